"""Messages of one producer become one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from danube.core.batch_builder import encode_plain
from danube.core.columns import EncodedBatch, encode
from danube.errors import InvalidArgument
from danube.server.proto.DanubeApi_pb2 import StreamMessage

_US_PER_MS: Final = 1000
PUBLISH_TIME_MS_MAX: Final = (2**63 - 1) // _US_PER_MS


def encode_messages(
    messages: Sequence[StreamMessage],
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
    if len(messages) == 1:
        return _encode_one(messages[0], producer_name, origin, schema_id, schema_version)
    times = [message.publish_time for message in messages]
    first = times[0]
    if max(times) > PUBLISH_TIME_MS_MAX:
        _refuse_time(times)
    request_ids = [message.request_id for message in messages]
    keys = [message.routing_key.encode() if message.HasField("routing_key") else None for message in messages]
    attributes = [message.attributes for message in messages]
    return encode(
        [message.payload for message in messages],
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
    message: StreamMessage,
    producer_name: str,
    origin: str,
    schema_id: int | None,
    schema_version: int | None,
) -> EncodedBatch:
    time_ms, request_id, attributes = message.publish_time, message.request_id, message.attributes
    if time_ms > PUBLISH_TIME_MS_MAX:
        _refuse_time([time_ms])
    keyed = message.HasField("routing_key")
    if not keyed and not attributes:
        return encode_plain(
            message.payload,
            producer_name=producer_name,
            origin=origin,
            publish_time_us=time_ms * _US_PER_MS,
            request_id=request_id,
            schema_id=schema_id,
            schema_version=schema_version,
        )
    return encode(
        [message.payload],
        producer_name=producer_name,
        origin=origin,
        schema_id=schema_id,
        schema_version=schema_version,
        publish_time_us=time_ms * _US_PER_MS,
        request_ids=[request_id] if request_id else None,
        keys=[message.routing_key.encode()] if keyed else None,
        attributes=[attributes] if attributes else None,
    )


def _refuse_time(times: list[int]) -> None:
    index = next(index for index, time_ms in enumerate(times) if time_ms > PUBLISH_TIME_MS_MAX)
    raise InvalidArgument(
        f"publish_time {times[index]} is not a time",
        why=f"it is milliseconds since 1970 and at most {PUBLISH_TIME_MS_MAX}",
        hint="do not send microseconds or nanoseconds",
        index=index,
    )
