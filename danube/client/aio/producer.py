"""The asyncio producer."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any, Self

from danube.client.aio.connection import Connection, until_settled
from danube.client.aio.contexts import Context
from danube.client.machine.ack import Ack
from danube.client.machine.publishing import Outgoing
from danube.client.machine.reply import Plan, Reply, all_settled
from danube.client.records.group import SendFuture
from danube.client.records.handles import ProducerHandle
from danube.client.records.outbox import CLOSE_TIMEOUT_S, Outbox, Part, ProducerOptions, acks_of
from danube.client.records.records import Attributes
from danube.errors import DanubeError


class AwaitableSend(SendFuture):
    """The outcome of one send_nowait; ``await`` it, or ask ``done()`` and ``result()``."""

    __slots__ = ()

    def result(self) -> Ack:
        """The record's Ack, or the error raised; only when done()."""
        return self._ack()

    def __await__(self) -> Generator[Any, None, Ack]:
        if not self.done():
            yield from self._wait().__await__()
        return self._ack()

    async def _wait(self) -> None:
        group = self._group
        if not group.parts:
            if group.flushed is None:
                group.flushed = Reply()
            await until_settled(group.flushed)
        outcome = group.outcome(self._index)
        if isinstance(outcome, Outgoing):
            await until_settled(outcome)


class Producer(ProducerHandle[Connection], Context):
    """Sends records to a topic.  Made by ``client.producer(...)``; use it in ``async with``."""

    _use = "use it in `async with client.producer(...)`"

    def __init__(self, connection: Connection, options: ProducerOptions) -> None:
        super().__init__(connection, options)
        self._linger_s = options.linger_us / 1e6

    async def open(self) -> Self:
        """Find or make the topic and open every partition; done by ``async with``."""
        await self._connection.run(self._opening())
        return self

    def _make_box(self) -> Plan[Outbox]:
        box = yield from super()._make_box()
        box.when_group = self._schedule
        box.when_full = self._connection.flush
        return box

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        if self._linger_s:
            loop.call_later(self._linger_s, self._end_turn)
        else:
            loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        if self._open_box is not None:
            self._open_box.end_turn()
            self._connection.flush()

    async def send(
        self, payload: bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> Ack:
        """Send one record and wait for its acknowledgement.

        Calls that run at the same time share batches.  When cancelled, a record that has not left
        is taken back; one that has may still be stored.
        """
        box = self._box
        if not box.has_room:
            await self._room(box)
        idle = box.idle and not self._linger_s
        group, index = box.add(payload, key, attributes)
        if idle:
            box.flush_group()
            self._connection.flush()
        try:
            return await AwaitableSend(group, index)
        except asyncio.CancelledError:
            box.withdraw(group, index)
            raise

    async def send_many(
        self,
        payloads: Any,
        keys: Sequence[str | bytes | None] | None = None,
        attributes: Sequence[Attributes | None] | Attributes | None = None,
    ) -> list[Ack]:
        """Send many records and wait for all of them; one Ack per batch, in the order of the batches.

        ``payloads`` is a sequence of bytes, a numpy array or a pyarrow binary array.  ``attributes`` is one
        mapping per record, or one for all.  They belong to the client until the call has ended: a record that
        is changed meanwhile may be stored with its old or new bytes.

        Raises the first error; other batches may be stored then.  Its facts name the stored ones: ``acks``,
        and ``places``, the indexes in the call of each ack's records.  ``index`` is that of a record at
        fault.
        """
        box, connection = self._box, self._connection
        sent: list[Part] = []
        refused: DanubeError | None = None
        try:
            for part in box.batches(payloads, keys, attributes):
                sent.append(part)
                connection.flush()
                if part.more and not box.has_room:
                    await self._room(box)
                elif part.more:
                    await asyncio.sleep(0)
        except DanubeError as error:
            refused = error
        await connection.wait(all_settled([part.outgoing for part in sent]))
        return acks_of(sent, refused)

    def send_nowait(
        self, payload: bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> AwaitableSend:
        """Send one record without waiting; it leaves with others at the end of the loop's turn.

        Raises Overloaded when ``max_in_flight_bytes`` are not acknowledged: ``await ready()``.
        """
        outbox = self._open_box
        if outbox is None:
            outbox = self._box
        group, index = outbox.add(payload, key, attributes)
        return AwaitableSend(group, index)

    async def ready(self) -> None:
        """Wait until there is room for a batch of send_nowait; let the loop turn once per batch sent."""
        box = self._box
        if not box.has_room:
            self._connection.flush()
            await self._room(box)
        elif box.left_full:
            await asyncio.sleep(0)
        box.left_full = False

    async def _room(self, box: Outbox) -> None:
        """Wait for room, for as long as a send may take."""
        try:
            async with asyncio.timeout(box.timeout_s):
                while not box.has_room:
                    await self._connection.wait(box.room())
        except TimeoutError:
            raise box.no_room() from None

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far is answered.

        Raises the first failure of a send_nowait whose future was not awaited.
        """
        await self._connection.run(self._flushing(timeout))

    async def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Flush for at most ``timeout`` seconds and close; raise the error of undelivered records."""
        await self._connection.run(self._closing(timeout))
