"""Messages of one producer become one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from danube.core.batch.builder import encode_plain
from danube.core.batch.columns import EncodedBatch, encode
from danube.errors import InvalidArgument
from danube.server.messages.sent_messages import Message, MessageColumns

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

    Raises InvalidArgument for a time beyond PUBLISH_TIME_MS_MAX, and what encode() raises; facts
    hold the message's index.
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
