"""``danube.StreamMessage``s as producers send them: read all at once, those of a turn of the loop.

Messages of one producer differ in request id, payload and publish time, and the bytes of all their other
fields are the same.  So kernels find the former in all messages, and the generated class reads the first
of each run of others alike.  Where anything is unusual the messages are to be read one by one.

Messages of one producer become one batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from danube.core import kernels
from danube.core.batch.builder import encode_plain
from danube.core.batch.columns import EncodedBatch, encode
from danube.core.batch.payloads import PayloadColumn
from danube.errors import InvalidArgument
from danube.server.proto.DanubeApi_pb2 import MsgID, StreamMessage

FEW: Final = 8  # messages that cost less one by one
TURN_BYTES_MAX: Final = 1 << 20  # copying more than once would cost more than it saves
TURN_MESSAGES_MAX: Final = 16_384  # of one batch
_RUN_MEAN_MIN: Final = 4

Message = tuple[bytes, int, int, bytes | None, Mapping[str, str] | None]
"""What is a message's own: payload, publish time in ms, request id, routing key, attributes."""
Envelope = tuple[str, int | None, int | None]
"""Origin, id and version of the schema."""


class MessageColumns(NamedTuple):
    """Messages without key and attributes: the other fields of their own, a column each."""

    payloads: PayloadColumn  # in one piece
    times_ms: NDArray[Any]  # int64
    request_ids: NDArray[Any]  # uint64
    largest: int  # payload, in bytes
    latest_ms: int
    one_time: bool  # all times are the same
    identified: bool  # some request id is not 0

    def one_by_one(self) -> Iterator[Message]:
        """For what happens to one of them alone."""
        joined = bytes(self.payloads.pieces[0])
        ends = np.frombuffer(self.payloads.offsets, "<i4").tolist()
        for (start, end), time_ms, request_id in zip(
            pairwise(ends), self.times_ms.tolist(), self.request_ids.tolist(), strict=True
        ):
            yield joined[start:end], time_ms, request_id, None, None


class Lot(NamedTuple):
    """Messages of one producer with one envelope, and which ones of the turn they are."""

    first: StreamMessage
    indices: Sequence[int]
    columns: MessageColumns


def parsed(data: bytes) -> StreamMessage:
    """One message; raises InvalidArgument if ``data`` is none."""
    try:
        return StreamMessage.FromString(data)
    except DecodeError:
        raise InvalidArgument("the message is not a danube.StreamMessage") from None


def envelope_of(message: StreamMessage, place: MsgID) -> Envelope:
    """Return the fields that a message shares with its batch, beside the producer.

    ``place`` is its msg_id.
    """
    return (
        place.broker_addr,
        message.schema_id if message.HasField("schema_id") else None,
        message.schema_version if message.HasField("schema_version") else None,
    )


def own_fields_of(message: StreamMessage) -> Message:
    """Return the parts of the message that it does not share with its batch."""
    key = message.routing_key.encode() if message.HasField("routing_key") else None
    return message.payload, message.publish_time, message.request_id, key, message.attributes or None


def read_together(datas: Sequence[bytes]) -> list[Lot] | None:
    """All messages of a turn, FEW at least; None if they are to be read one by one."""
    if not kernels.available:
        return None
    count = len(datas)
    bounds = np.frombuffer(array("q", accumulate(map(len, datas), initial=0)), np.int64)
    together = b"".join(datas)
    if not 0 < len(together) <= TURN_BYTES_MAX or count > TURN_MESSAGES_MAX:
        return None
    joined = np.frombuffer(together, np.uint8)
    found = np.empty((5, count), np.int64)
    run_count = kernels.compiled.scan_messages(joined, bounds, found)
    if not 0 < run_count * _RUN_MEAN_MIN <= count:
        return None
    if run_count == 1:
        first = _first_of_run(datas[0])
        return None if first is None else [Lot(first, range(count), _columns(joined, found))]
    return _lots(datas, joined, found, run_count)


def _lots(
    datas: Sequence[bytes], joined: NDArray[Any], found: NDArray[Any], run_count: int
) -> list[Lot] | None:
    """Runs that say the same, put together."""
    run_starts = np.searchsorted(found[4], np.arange(run_count)).tolist()
    numbers: dict[tuple[Any, ...], int] = {}
    firsts: list[StreamMessage] = []
    of_run = []
    for start in run_starts:
        first = _first_of_run(datas[start])
        if first is None:
            return None
        place = first.msg_id
        said = (place.topic_name, first.producer_name), place.producer_id, envelope_of(first, place)
        of_run.append(numbers.setdefault(said, len(numbers)))
        if len(numbers) > len(firsts):
            firsts.append(first)
    if len({target for target, _, _ in numbers}) < len(numbers):
        return None  # several of one producer, and to stay in their order
    of_message = np.array(of_run)[found[4]]
    lots = []
    for number, first in enumerate(firsts):
        indices = np.flatnonzero(of_message == number)
        lots.append(Lot(first, indices.tolist(), _columns(joined, np.ascontiguousarray(found[:, indices]))))
    return lots


def _first_of_run(data: bytes) -> StreamMessage | None:
    """Parse the first message of a run; None if the others may differ in more than the kernel has found.

    They may if the message has unusual fields, or is not as a serializer writes it: then a field may come
    again behind the others.
    """
    try:
        message = parsed(data)
    except InvalidArgument:  # the others of its run may have nothing to do with it
        return None
    unusual = message.attributes or message.HasField("routing_key") or message.SerializeToString() != data
    return None if unusual else message


def _columns(joined: NDArray[Any], found: NDArray[Any]) -> MessageColumns:
    of_messages = kernels.compiled
    sums = np.empty(5, np.int64)
    of_messages.sum_up(found, sums)
    total, largest, latest_ms, varying, identified = sums.tolist()
    payloads, offsets = np.empty(total, np.uint8), np.empty(found.shape[1] + 1, np.int32)
    of_messages.gather_payloads(joined, found, payloads, offsets)
    column = PayloadColumn(offsets.astype("<i4", copy=False).tobytes(), total, (payloads.data,))
    return MessageColumns(
        column, found[1], found[0].view(np.uint64), largest, latest_ms, not varying, identified != 0
    )


_US_PER_MS: Final = 1000
PUBLISH_TIME_MS_MAX: Final = (2**63 - 1) // _US_PER_MS


def encode_messages(
    messages: Sequence[Message] | MessageColumns,
    *,
    producer_name: str,
    origin: str,
    schema_id: int | None = None,
    schema_version: int | None = None,
) -> EncodedBatch:
    """One message or more as a batch; columns that no message needs are left out.

    Times are milliseconds in a message and microseconds in a batch.  An absent routing key stays
    apart from an empty one.  The names and the schema come from the caller because all messages
    share them.

    Raises InvalidArgument for a time beyond PUBLISH_TIME_MS_MAX, and errors of encode(); facts hold the
    message's index.
    """
    if isinstance(messages, MessageColumns):
        return _encode_columns(messages, producer_name, origin, schema_id, schema_version)
    if len(messages) == 1:
        return _encode_one(messages[0], producer_name, origin, schema_id, schema_version)
    payloads, times, request_ids, keys, attributes = zip(*messages, strict=True)
    first = times[0]
    if max(times) > PUBLISH_TIME_MS_MAX:
        _refuse_time(times)
    return encode(
        list(payloads),
        producer_name=producer_name,
        origin=origin,
        schema_id=schema_id,
        schema_version=schema_version,
        publish_time_us=first * _US_PER_MS,
        publish_times=None if times.count(first) == len(times) else [time * _US_PER_MS for time in times],
        request_ids=request_ids if any(request_ids) else None,
        keys=None if keys.count(None) == len(keys) else keys,
        attributes=attributes if any(attributes) else None,
    )


def _encode_one(
    message: Message,
    producer_name: str,
    origin: str,
    schema_id: int | None,
    schema_version: int | None,
) -> EncodedBatch:
    payload, time_ms, request_id, key, attributes = message
    if time_ms > PUBLISH_TIME_MS_MAX:
        _refuse_time([time_ms])
    if key is None and not attributes:
        return encode_plain(
            payload,
            producer_name=producer_name,
            origin=origin,
            publish_time_us=time_ms * _US_PER_MS,
            request_id=request_id,
            schema_id=schema_id,
            schema_version=schema_version,
        )
    return encode(
        [payload],
        producer_name=producer_name,
        origin=origin,
        schema_id=schema_id,
        schema_version=schema_version,
        publish_time_us=time_ms * _US_PER_MS,
        request_ids=[request_id] if request_id else None,
        keys=None if key is None else [key],
        attributes=[attributes] if attributes else None,
    )


def _encode_columns(
    messages: MessageColumns,
    producer_name: str,
    origin: str,
    schema_id: int | None,
    schema_version: int | None,
) -> EncodedBatch:
    times_ms = messages.times_ms
    if messages.latest_ms > PUBLISH_TIME_MS_MAX:
        _refuse_time(times_ms.tolist())
    return encode(
        messages.payloads,
        producer_name=producer_name,
        origin=origin,
        schema_id=schema_id,
        schema_version=schema_version,
        publish_time_us=int(times_ms[0]) * _US_PER_MS,
        publish_times=None if messages.one_time else times_ms * _US_PER_MS,
        request_ids=messages.request_ids if messages.identified else None,
    )


def _refuse_time(times: Sequence[int]) -> None:
    index = next(index for index, time_ms in enumerate(times) if time_ms > PUBLISH_TIME_MS_MAX)
    raise InvalidArgument(
        f"publish_time {times[index]} is not a time",
        why=f"it is milliseconds since 1970 and at most {PUBLISH_TIME_MS_MAX}",
        hint="do not send microseconds or nanoseconds",
        index=index,
    )
