"""All partitions of one consumer as one stream: fair between partitions, in order within each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, Final, Generic, TypeVar

from danube.client.machine.received import Part
from danube.client.machine.reply import Reply, settled_reply
from danube.client.machine.subscribing import CLOSE_TIMEOUT_NS, PartitionConsumer
from danube.client.records.message import BaseBatch, BaseMessage, messages_of
from danube.errors import ClosedError, DanubeError, InvalidArgument, OperationTimeout
from danube.limits import MIB

BATCH_BYTES_SOFT: Final = 1 * MIB  # deliveries that wait are handed out together up to this size
CLOSE_WAIT_S: Final = CLOSE_TIMEOUT_NS / 1e9 + 1.0  # acks that are pending have a deadline of their own
MESSAGES_AT_ONCE: Final = 1024  # between two turns of a loop that takes one message after another

M = TypeVar("M", bound=BaseMessage)
B = TypeVar("B", bound=BaseBatch)


class Inbox(Generic[M, B]):
    """Delivered messages that the application has not been given yet.

    ``messages`` is the batch that is being handed out one by one; it is replaced when the
    subscription was made anew, because its records will come again.
    """

    def __init__(
        self,
        topic: str,
        partitions: list[PartitionConsumer],
        message_cls: Callable[..., M],
        batch_cls: Callable[..., B],
    ) -> None:
        self.topic = topic
        self.partitions = partitions
        self.closed = False
        self.messages: Iterator[M] = iter(())
        self._coming: Iterator[M] = self.messages  # the rest of the batch that they are of
        self._message_cls = message_cls
        self._batch_cls = batch_cls
        self._current: PartitionConsumer | None = None
        self._handed: list[PartitionConsumer] = []  # partitions of records at the application
        self._ready: deque[PartitionConsumer] = deque()
        self._ready_since_ns: dict[PartitionConsumer, int] = {}
        self._rest: dict[PartitionConsumer, Part] = {}
        self._waiter: Reply | None = None
        for partition in partitions:
            partition.when_ready = self._on_ready
            partition.when_reset = self._on_reset
            partition.when_repeated = self._on_repeated

    def _on_ready(self, partition: PartitionConsumer) -> None:
        if partition.ready and partition not in self._ready_since_ns:
            self._ready.append(partition)
            self._ready_since_ns[partition] = partition.session.now_ns()
        self._wake()

    def _on_reset(self, partition: PartitionConsumer) -> None:
        self._rest.pop(partition, None)
        if self._ready_since_ns.pop(partition, None) is not None:
            self._ready.remove(partition)
        if self._current is partition:
            self._current = None
            self.messages = self._coming = iter(())

    def _on_repeated(self, partition: PartitionConsumer) -> None:
        """Drop the records here whose acks were sent again."""
        if self._current is partition:
            self._set_current_aside()
        part = self._rest.pop(partition, None)
        left = None if part is None else partition.rest_of(part.batch, part.start)
        if part is not None and left is part.batch:
            self._rest[partition] = part
        elif left is not None:
            self._rest[partition] = Part(left, 0, left.record_count)
        elif not partition.ready and self._ready_since_ns.pop(partition, None) is not None:
            self._ready.remove(partition)

    def _wake(self) -> None:
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            waiter.resolve(None)

    def arrival(self) -> Reply:
        """Settles when something came, or a partition failed, or the consumer was closed."""
        if self._waiter is None:
            self._waiter = Reply()
        return self._waiter

    @property
    def waits_for(self) -> DanubeError | None:
        """Return the broker's reason for sending no records of a partition now, or None."""
        return next((one.waiting for one in self.partitions if one.waiting is not None), None)

    def nothing_came(self, timeout_s: float) -> OperationTimeout:
        """Return the error of a receive that timed out; its cause is the broker's reason."""
        reason = self.waits_for
        error = OperationTimeout(
            f"no message came within {timeout_s:g} s",
            why="" if reason is None else f"the broker cannot read the next records: {reason}",
            hint="" if reason is None else reason.hint,
        )
        error.__cause__ = reason
        return error

    def check(self) -> None:
        """Raise the error that ended the consumer."""
        if self.closed:
            raise ClosedError("the consumer is closed")
        for partition in self.partitions:
            if partition.failure is not None:
                raise partition.failure.with_traceback(None)

    # -- one by one -----------------------------------------------------------------------------

    def advance(self) -> bool:
        """Put further records into ``messages``, few enough for a loop's turn; False when there are none."""
        head = list(islice(self._coming, MESSAGES_AT_ONCE))
        if head:
            self.messages = iter(head)
            return True
        self._ask_for_more()
        if self.closed or not self._ready:
            self.check()
        while self._ready:
            partition = self._ready.popleft()
            part = self._rest.pop(partition, None)
            if part is None:
                batch = partition.take()
                part = None if batch is None else Part(batch, 0, batch.record_count)
            self._after_take(partition)
            self._handed.append(partition)
            if part is not None:
                self._current = partition
                self._coming = messages_of(self._message_cls, self.topic, partition, part)
                self.messages = iter(list(islice(self._coming, MESSAGES_AT_ONCE)))
                return True
        self._ask_for_more()
        return False

    def _ask_for_more(self) -> None:
        for partition in self._handed:
            partition.asked_for_more()
        self._handed.clear()

    def _after_take(self, partition: PartitionConsumer) -> None:
        """Queue the partition again, behind the others, while it has more records."""
        if partition.ready or partition in self._rest:
            self._ready.append(partition)
            self._ready_since_ns[partition] = partition.session.now_ns()
        else:
            self._ready_since_ns.pop(partition, None)

    # -- batches --------------------------------------------------------------------------------

    def begin_batches(self, records_max: int | None) -> None:
        """Change to batches, beginning with the rest of ``messages``."""
        if records_max is not None and records_max < 1:
            raise InvalidArgument(f"max_records must be at least 1, not {records_max}")
        self._set_current_aside()
        if records_max is not None:
            for partition in self.partitions:
                partition.widen(2 * records_max)

    def _set_current_aside(self) -> None:
        """Put the rest of ``messages`` in front of its partition's other records."""
        message: Any = next(chain(self.messages, self._coming), None)
        partition = self._current
        if message is not None and partition is not None:
            batch = message._source.batch
            self._rest[partition] = Part(batch, message._index, batch.record_count)
            if partition not in self._ready_since_ns:
                self._ready.appendleft(partition)
                self._ready_since_ns[partition] = partition.session.now_ns()
        self._current = None
        self.messages = self._coming = iter(())

    def next_batch(self, records_max: int | None, wait_ns: int) -> tuple[B | None, int | None]:
        """Return the next batch that is full or has waited long enough, else (None, time of the next)."""
        self._ask_for_more()
        if self.closed or not self._ready:
            self.check()
        if wait_ns <= 0:
            while self._ready:
                if (batch := self._collect(self._ready[0], records_max)) is not None:
                    return batch, None
            self._ask_for_more()
            return None, None
        soonest: int | None = None
        now_ns = self.partitions[0].session.now_ns()
        for partition in list(self._ready):
            due_ns = self._ready_since_ns[partition] + wait_ns
            rest = self._rest.get(partition)
            missing = (records_max or 1 << 62) - (rest.stop - rest.start if rest else 0)
            if due_ns <= now_ns or missing <= 0 or partition.half_full(missing):
                batch = self._collect(partition, records_max)
                if batch is None:
                    return self.next_batch(records_max, wait_ns)
                return batch, None
            soonest = due_ns if soonest is None else min(soonest, due_ns)
        return None, soonest

    def _collect(self, partition: PartitionConsumer, records_max: int | None) -> B | None:
        """Join the parts of the partition that are here; None if all of them were acked meanwhile."""
        parts: list[Part] = []
        records = size = 0
        rest = self._rest.pop(partition, None)
        while rest is not None or partition.ready:
            if rest is None:
                if parts and size + partition.ready[0].header.size > BATCH_BYTES_SOFT and records_max is None:
                    break
                batch = partition.take()
                if batch is None:
                    continue
                size += batch.header.size
                rest = Part(batch, 0, batch.record_count)
            batch, start, stop = rest
            if records_max is not None and records + stop - start > records_max:
                middle = start + records_max - records
                if middle > start:
                    parts.append(Part(batch, start, middle))
                self._rest[partition] = Part(batch, middle, stop)
                break
            parts.append(rest)
            records += stop - start
            rest = None
            if records_max is not None and records >= records_max:
                break
        self._ready.remove(partition)
        self._after_take(partition)
        self._handed.append(partition)
        return self._batch_cls(self.topic, partition, parts) if parts else None

    # -- ending ---------------------------------------------------------------------------------

    def _hand_back(self) -> None:
        """Return records that the application was not given; the broker does not count their delivery."""
        self.begin_batches(None)
        for partition in self.partitions:
            if partition.failure is None:
                rest = self._rest.get(partition)
                ranges = [] if rest is None else rest.batch.offset_ranges(rest.start, rest.stop)
                for batch in partition.ready:
                    ranges += batch.offset_ranges(0, batch.record_count)
                if ranges:
                    partition.hand_back(ranges)

    def synced(self) -> list[Reply]:
        """Settle when the broker has stored every acknowledgement given so far."""
        self.check()
        return [partition.sync_acks() for partition in self.partitions]

    def close(self) -> list[Reply]:
        """Unsubscribe everywhere; acknowledgements given so far are sent first."""
        if self.closed:
            return [settled_reply()]
        self._hand_back()
        self.closed = True
        replies = [partition.close() for partition in self.partitions]
        self._wake()
        return replies
