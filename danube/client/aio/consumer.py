"""The asyncio consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Self

from danube.client.aio.connection import Connection
from danube.client.aio.contexts import Context
from danube.client.records.handles import ConsumerHandle
from danube.client.records.inbox import Inbox
from danube.client.records.message import Batch, Message


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
            await asyncio.sleep(0)  # let other tasks run, even under a constant stream of messages
            if inbox.messages is messages and not inbox.advance():
                self._connection.flush()
                await self._connection.wait(inbox.arrival())


class Consumer(ConsumerHandle[Connection, Message, Batch], Context):
    """Receives a topic's messages through a subscription.  Made by ``client.consumer(...)``."""

    _use = "use it in `async with client.consumer(...)`"
    _message_cls: Callable[..., Message] = Message
    _batch_cls: Callable[..., Batch] = Batch

    async def open(self) -> Self:
        """Subscribe to every partition; done by ``async with``."""
        await self._connection.run(self._opening())
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
        await self._connection.run(self._flushing())

    async def close(self) -> None:
        """Send the acknowledgements given so far and unsubscribe; the rest goes to other consumers.

        Waits up to 5 s for a connection when there is none, and raises where acks may be lost.
        """
        await self._connection.run(self._closing())
