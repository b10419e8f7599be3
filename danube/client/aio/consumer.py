"""The asyncio consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from danube.client.aio.connection import Connection
from danube.client.machine.reply import Reply, all_settled
from danube.client.machine.subscribing import CLOSE_TIMEOUT_NS
from danube.client.records.inbox import Inbox
from danube.client.records.message import Batch, Message
from danube.client.records.setup import ConsumerOptions, open_consumer
from danube.errors import ClosedError, DanubeError, InvalidArgument, OperationTimeout

CLOSE_WAIT_S = CLOSE_TIMEOUT_NS / 1e9 + 1.0  # acks that are pending have a deadline of their own


class _Messages:
    """Iterator over the messages of an inbox.

    No generator: that is at its end for good once a caller's timeout has cancelled it.
    """

    __slots__ = ("_connection", "_inbox")

    def __init__(self, inbox: Inbox[Message, Batch], connection: Connection) -> None:
        self._inbox = inbox
        self._connection = connection

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Message:
        inbox = self._inbox
        while True:
            messages = inbox.messages
            for message in messages:
                return message
            await asyncio.sleep(0)  # let others run, even where messages never cease
            if inbox.messages is messages and not inbox.advance():
                self._connection.flush()
                await self._connection.wait(inbox.arrival())


class Consumer:
    """Receives a topic's messages through a subscription.  Made by ``client.consumer(...)``."""

    def __init__(self, connection: Connection, options: ConsumerOptions) -> None:
        self._connection = connection
        self._options = options
        self._inbox: Inbox[Message, Batch] | None = None
        self._closed = False
        self._message_cls: Callable[..., Message] = Message
        self._batch_cls: Callable[..., Batch] = Batch

    @property
    def topic(self) -> str:
        return self._options.topic

    @property
    def subscription(self) -> str:
        return self._options.subscription

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def active(self) -> bool:
        """False for a failover standby that was given no partition when it subscribed."""
        return any(partition.active for partition in self._box.partitions)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waits_for(self) -> DanubeError | None:
        """Why the broker cannot send the next records now, where it has said so: an object of the store is
        gone or damaged, the store does not answer, a disk fails.  It goes on by itself once it can."""
        return self._box.waits_for

    @property
    def _box(self) -> Inbox[Message, Batch]:
        self._connection.session.check_usable()
        if self._inbox is None:
            raise ClosedError(
                "the consumer is closed" if self._closed else "the consumer is not open",
                hint="use it in `async with client.consumer(...)`",
            )
        return self._inbox

    async def open(self) -> Consumer:
        """Subscribe to every partition; done by ``async with``."""
        if self._inbox is None:
            if self._closed:
                raise ClosedError("the consumer is closed", hint="make a new one")
            plan = open_consumer(self._connection.session, self._options, self._message_cls, self._batch_cls)
            inbox = await self._connection.run(plan)
            if self.closed:
                inbox.close()
                raise ClosedError("the consumer was closed while it was opened", hint="make a new one")
            self._inbox = inbox
        return self

    def __aiter__(self) -> AsyncIterator[Message]:
        """Return an iterator that goes on after a cancelled or timed-out ``anext()``."""
        return _Messages(self._box, self._connection)

    async def receive(self, timeout: float | None = None) -> Message:
        """The next message; raise OperationTimeout when none comes within ``timeout`` seconds."""
        inbox = self._box
        for message in inbox.messages:
            return message
        try:
            async with asyncio.timeout(timeout):
                return await _Messages(inbox, self._connection).__anext__()
        except TimeoutError:
            raise inbox.nothing_came(timeout or 0.0) from inbox.waits_for

    async def batches(
        self, max_records: int | None = None, max_wait: float | None = None
    ) -> AsyncIterator[Batch]:
        """Batches of at most ``max_records`` records of one partition.

        With ``max_wait`` (seconds) a batch is handed out when it is full or its first record has
        waited so long; without, as soon as there is one, and nothing is copied to join deliveries.
        """
        if max_records is not None and max_records < 1:
            raise InvalidArgument(f"max_records must be at least 1, not {max_records}")
        inbox = self._box
        inbox.begin_batches(max_records)
        wait_ns = int((max_wait or 0) * 1e9)
        while True:
            batch, due_ns = inbox.next_batch(max_records, wait_ns)
            if batch is not None:
                yield batch
                await asyncio.sleep(0)
                continue
            self._connection.flush()
            timeout_s = None if due_ns is None else (due_ns - self._connection.session.now_ns()) / 1e9
            try:
                async with asyncio.timeout(timeout_s):
                    await self._connection.wait(inbox.arrival())
            except TimeoutError:
                continue

    async def flush(self) -> None:
        """Wait until the broker has stored every acknowledgement given so far.

        Without a connection it waits for one; raises OperationTimeout after the client's ``timeout``.
        """
        replies = self._box.synced()
        self._connection.flush()
        for reply in replies:
            await self._connection.wait(reply)

    async def close(self) -> None:
        """Send the acknowledgements given so far and unsubscribe; the rest goes to other consumers.

        Waits up to 5 s for a connection when there is none, and raises where acks may be lost.
        """
        inbox, self._inbox = self._inbox, None
        self._closed = True
        if inbox is not None:
            replies = inbox.close()
            self._connection.flush()
            try:
                await self._connection.wait_within(all_settled(replies), CLOSE_WAIT_S, "closing the consumer")
            except OperationTimeout:
                pass  # no ack is at stake; the connection's end closes it at the broker
            raise_lost(replies)

    async def __aenter__(self) -> Consumer:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        try:
            await self.close()
        except DanubeError as failure:
            error.add_note(f"danube: acknowledgements may be lost: {failure}")

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r} of {self.topic} subscription={self.subscription!r}>"


def raise_lost(replies: list[Reply]) -> None:
    """Raise why acknowledgements of a consumer that was closed may be lost."""
    for reply in replies:
        if reply.error is not None:
            raise reply.error.with_traceback(None)
