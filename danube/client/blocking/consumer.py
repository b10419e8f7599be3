"""The consumer of the blocking client, and its messages and batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from danube.client.blocking.connection import BlockingConnection
from danube.client.blocking.contexts import Context, open_whole
from danube.client.machine.reply import Plan
from danube.client.records.handles import ConsumerHandle
from danube.client.records.inbox import Inbox
from danube.client.records.message import BaseBatch, BaseMessage, Delivered


class Locked(Delivered):
    """Of the blocking client, whose threads may settle records of one consumer at the same time."""

    __slots__ = ()

    def ack(self) -> None:
        """Acknowledge; the ack is sent when the consumer next receives, or is closed."""
        self.ack_nowait()

    def nack(self, delay: float | None = None, reason: str = "") -> None:
        """Give back, to be delivered again after ``delay`` seconds (None: the policy's delay)."""
        self.nack_nowait(delay, reason)

    def ack_nowait(self) -> None:
        """Acknowledge like ack()."""
        with self._consumer.shell.lock:
            super().ack_nowait()

    def nack_nowait(self, delay: float | None = None, reason: str = "") -> None:
        """Refuse like nack()."""
        with self._consumer.shell.lock:
            super().nack_nowait(delay, reason)

    def _give_up(self, error: BaseException) -> None:
        with self._consumer.shell.lock:
            super()._give_up(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settle(error)


class Message(Locked, BaseMessage, eq=False):
    """A message of the blocking client; ``with message:`` acks on success, nacks on an error."""

    def ack_nowait(self) -> None:
        """Acknowledge like ack()."""
        partition = self._source.partition
        with partition.shell.lock:
            partition.ack(self.offset)


class Batch(Locked, BaseBatch):
    """A batch of the blocking client; ``with batch:`` acks on success, nacks on an error."""


class Consumer(ConsumerHandle[BlockingConnection, Message, Batch], Context):
    """Receives a topic's messages through a subscription.  Made by ``client.consumer(...)``."""

    _use = "use it in `with client.consumer(...)`"
    _message_cls: Callable[..., Message] = Message
    _batch_cls: Callable[..., Batch] = Batch

    def open(self) -> Self:
        """Subscribe to every partition; done by ``with``."""
        open_whole(self)
        return self

    def _make_box(self) -> Plan[Inbox[Message, Batch]]:
        inbox = yield from super()._make_box()
        for partition in inbox.partitions:
            partition.shell = self._connection
        return inbox

    def __iter__(self) -> Iterator[Message]:
        inbox, lock = self._box, self._connection.lock
        while True:
            with lock:  # other threads may iterate as well
                messages = inbox.messages
                message = next(messages, None)
            if message is not None:
                yield message
            else:
                self._advance(inbox, messages, None)

    def _advance(self, inbox: Inbox[Message, Batch], spent: Any, timeout: float | None) -> bool:
        """Wait for messages other than ``spent``; False when time is up."""
        return self._connection.wait_until(lambda: inbox.messages is not spent or inbox.advance(), timeout)

    def receive(self, timeout: float | None = None) -> Message:
        """The next message; raise OperationTimeout when none comes within ``timeout`` seconds."""
        inbox = self._box
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._connection.lock:
                messages = inbox.messages
                message = next(messages, None)
            if message is not None:
                return message
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._advance(inbox, messages, left):
                raise inbox.nothing_came(timeout or 0.0)

    def batches(self, max_records: int | None = None, max_wait: float | None = None) -> Iterator[Batch]:
        """Batches of at most ``max_records`` records of one partition.

        With ``max_wait`` (seconds) a batch is handed out when it is full or its first record has
        waited so long; without, as soon as there is one, and nothing is copied to join deliveries.
        """
        inbox, connection = self._box, self._connection
        with connection.lock:
            inbox.begin_batches(max_records)
        wait_ns = int((max_wait or 0) * 1e9)
        batch: Batch | None = None
        due_ns: int | None = None

        def take() -> bool:
            nonlocal batch, due_ns
            before = due_ns
            batch, due_ns = inbox.next_batch(max_records, wait_ns)
            return batch is not None or before != due_ns

        while True:
            timeout_s = None if due_ns is None else max(0.0, (due_ns - connection.session.now_ns()) / 1e9)
            connection.wait_until(take, timeout_s)
            if batch is not None:
                yield batch
                batch = due_ns = None

    def flush(self) -> None:
        """Wait until the broker has stored every acknowledgement given so far.

        Without a connection it waits for one; raises OperationTimeout after the client's ``timeout``.
        """
        self._connection.run(self._flushing())

    def close(self) -> None:
        """Send the acknowledgements given so far and unsubscribe; the rest goes to other consumers.

        Waits up to 5 s for a connection when there is none, and raises where acks may be lost.
        """
        self._connection.run(self._closing())
