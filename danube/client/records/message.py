"""Messages, and batches of them, as a consumer hands them out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cached_property
from itertools import repeat
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from danube.client.machine.received import Part, ReceivedBatch
from danube.client.machine.subscribing import PartitionConsumer
from danube.errors import DanubeError, InvalidArgument

if TYPE_CHECKING:
    import pyarrow


class Source(msgspec.Struct, eq=False):
    """Common part of the messages of one wire batch."""

    topic: str
    partition: PartitionConsumer
    batch: ReceivedBatch


class Delivered:
    """Records that are acknowledged or given back together: a message or a batch."""

    __slots__ = ()

    @property
    @abstractmethod
    def _consumer(self) -> PartitionConsumer: ...

    @abstractmethod
    def _ranges(self) -> list[tuple[int, int]]:
        """Half-open ranges of the offsets."""

    def ack_nowait(self) -> None:
        """Acknowledge; sent with others at the end of the loop's turn."""
        self._consumer.ack_ranges(self._ranges())

    def nack_nowait(self, delay: float | None = None, reason: str = "") -> None:
        """Give back, to be delivered again after ``delay`` seconds (None: the policy's delay)."""
        self._consumer.nack(self._ranges(), delay_ms_of(delay), reason)

    def _settle(self, error: BaseException | None) -> None:
        """Ack or nack as the ``with`` block ended."""
        if error is None:
            self.ack_nowait()
        else:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        give_up(self._consumer, self._ranges(), error)


class Awaited(Delivered):
    """Of the asyncio client; ``async with`` acks on success, nacks on an error."""

    __slots__ = ()

    async def ack(self) -> None:
        """Acknowledge; sent with others at the end of the loop's turn."""
        self.ack_nowait()

    async def nack(self, delay: float | None = None, reason: str = "") -> None:
        """Give back, to be delivered again after ``delay`` seconds (None: the policy's delay)."""
        self.nack_nowait(delay, reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settle(error)


class BaseMessage(Delivered, msgspec.Struct, eq=False):
    """One record, as it was delivered.  Everything but payload and offset is decoded on first access."""

    payload: bytes
    offset: int
    _source: Source
    _index: int

    @property
    def key(self) -> str | bytes | None:
        """Return the routing key: text if it is UTF-8, else bytes; None without a key."""
        key = self._source.batch.key(self._index)
        return None if key is None else _text_or_bytes(key)

    @property
    def key_bytes(self) -> bytes | None:
        return self._source.batch.key(self._index)

    @property
    def attributes(self) -> dict[str, str]:
        return self._source.batch.attributes(self._index)

    @property
    def topic(self) -> str:
        return self._source.topic

    @property
    def partition(self) -> int:
        """0 for a topic that is not partitioned."""
        return self._source.partition.index

    @property
    def publish_time_us(self) -> int:
        """Microseconds since 1970 UTC, by the producer's clock."""
        return int(self._source.batch.publish_times[self._index])

    @property
    def publish_time(self) -> datetime:
        seconds, microseconds = divmod(self.publish_time_us, 1_000_000)
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=microseconds)

    @property
    def producer_name(self) -> str:
        return self._source.batch.producer_name

    @property
    def schema_id(self) -> int | None:
        """The subject's id, where the producer named a schema."""
        return self._source.batch.schema_id

    @property
    def schema_version(self) -> int | None:
        return self._source.batch.schema_version

    @property
    def redelivery_count(self) -> int:
        """How often it was delivered before."""
        return self._source.batch.redelivery_count

    @property
    def _consumer(self) -> PartitionConsumer:
        return self._source.partition

    def _ranges(self) -> list[tuple[int, int]]:
        return [(self.offset, self.offset + 1)]

    def ack_nowait(self) -> None:
        """Acknowledge; sent with others at the end of the loop's turn."""
        self._source.partition.ack(self.offset)

    def __repr__(self) -> str:
        shown = self.payload if len(self.payload) <= 32 else self.payload[:32] + b"..."
        return (
            f"<{type(self).__name__} {self.topic} partition={self.partition} offset={self.offset} {shown!r}>"
        )


class Message(Awaited, BaseMessage, eq=False):
    """A message of the asyncio client; ``async with message:`` acks on success, nacks on an error."""

    async def ack(self) -> None:
        """Acknowledge; sent with others at the end of the loop's turn."""
        self._source.partition.ack(self.offset)


class BaseBatch(Delivered):
    """Consecutive deliveries of one partition, read in place.  A record costs nothing until accessed."""

    def __init__(self, topic: str, partition: PartitionConsumer, parts: list[Part]) -> None:
        self.topic = topic
        self.record_count = sum(part.stop - part.start for part in parts)
        self._partition = partition
        self._parts = parts

    @property
    def partition(self) -> int:
        """0 for a topic that is not partitioned."""
        return self._partition.index

    def __len__(self) -> int:
        return self.record_count

    @cached_property
    def payloads(self) -> list[bytes]:
        payloads = _together([_cut(part, part.batch.payloads()) for part in self._parts])
        return payloads

    @cached_property
    def keys(self) -> list[str | bytes | None]:
        """The key of each record as in Message.key."""
        keys = _together([_cut(part, part.batch.keys()) for part in self._parts])
        return [None if key is None else _text_or_bytes(key) for key in keys]

    @cached_property
    def attributes(self) -> list[dict[str, str]]:
        return _together([_cut(part, part.batch.attributes_list()) for part in self._parts])

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """int64[n]."""
        return _joined([part.batch.offsets[part.start : part.stop] for part in self._parts])

    @cached_property
    def publish_times(self) -> NDArray[np.int64]:
        """int64[n]: microseconds since 1970 UTC, by the producer's clock."""
        return _joined([part.batch.publish_times[part.start : part.stop] for part in self._parts])

    @property
    def producer_names(self) -> list[str]:
        return [part.batch.producer_name for part in self._parts for _ in range(part.stop - part.start)]

    @property
    def redelivery_counts(self) -> NDArray[np.int32]:
        """int32[n]: how often each record was delivered before."""
        return np.repeat(
            np.array([part.batch.redelivery_count for part in self._parts], np.int32),
            [part.stop - part.start for part in self._parts],
        )

    @property
    def first_offset(self) -> int:
        part = self._parts[0]
        if part.batch.selected:
            return int(part.batch.offsets[part.start])
        return part.batch.header.base_offset + part.start

    @property
    def size(self) -> int:
        """Bytes of the wire batches that hold the records."""
        return sum(part.batch.header.size for part in self._parts)

    def offset_ranges(self) -> list[tuple[int, int]]:
        """Half-open ranges of the offsets."""
        return [one for part in self._parts for one in part.batch.offset_ranges(part.start, part.stop)]

    def to_arrow(self) -> pyarrow.Table:
        """A table with payload, key, offset, partition, publish_time, producer_name and attributes.

        Payloads and keys are not copied: they stay in the delivered batch, which the table keeps alive.
        """
        from danube.client.records.arrow import table_of

        return table_of(self._parts, self.partition)

    @property
    def _consumer(self) -> PartitionConsumer:
        return self._partition

    def _ranges(self) -> list[tuple[int, int]]:
        return self.offset_ranges()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.topic} partition={self.partition} "
            f"records={self.record_count} first_offset={self.first_offset}>"
        )


class Batch(Awaited, BaseBatch):
    """A batch of the asyncio client; ``async with batch:`` acks on success, nacks on an error."""


def messages_of(
    make: Callable[..., Any], topic: str, partition: PartitionConsumer, part: Part
) -> Iterator[Any]:
    """The part's records as messages, made one by one as they are taken."""
    batch, start, stop = part
    source = Source(topic, partition, batch)
    first = batch.header.base_offset
    offsets = batch.offsets[start:stop].tolist() if batch.selected else range(first + start, first + stop)
    payloads = _cut(part, batch.payloads())
    return map(make, payloads, offsets, repeat(source), range(start, stop))


def delay_ms_of(delay: float | None) -> int:
    """Seconds as milliseconds; -1 for None."""
    if delay is None:
        return -1
    if not 0 <= delay <= 86_400 * 365:
        raise InvalidArgument(f"delay of {delay} s is not valid", hint="seconds from 0 to one year")
    return round(delay * 1000)


def give_up(partition: PartitionConsumer, ranges: list[tuple[int, int]], error: BaseException) -> None:
    """Give records back because ``error`` ended their handling.

    Only an Exception is a failure of the handling; a cancelled task, Ctrl-C, an exit and a generator that
    is closed say nothing about the records.
    """
    try:
        if isinstance(error, Exception):
            partition.nack(ranges, -1, reason_of(error))
        else:
            partition.hand_back(ranges)
    except DanubeError as failure:  # the consumer is at its end, and with it the broker gives them back
        error.add_note(f"danube: the records were not given back: {failure}")


def reason_of(error: BaseException) -> str:
    """A nack's reason for an exception, short enough to travel."""
    return f"{type(error).__name__}: {error}"[:200]


def _text_or_bytes(key: bytes) -> str | bytes:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key


def _cut(part: Part, values: list[Any]) -> list[Any]:
    return values if len(values) == part.stop - part.start else values[part.start : part.stop]


def _together(pieces: list[list[Any]]) -> list[Any]:
    """Join the lists into the first one, which no other code holds."""
    whole, *others = pieces
    for one in others:
        whole += one
    return whole


def _joined(pieces: list[NDArray[Any]]) -> NDArray[Any]:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
