"""Producer and consumer of values of the asyncio client, with the consumer's messages and batches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Generic, TypeVar, cast

from danube.client.aio.connection import Connection
from danube.client.aio.consumer import Consumer
from danube.client.aio.producer import AwaitableSend, Producer
from danube.client.machine.ack import Ack
from danube.client.machine.received import Part
from danube.client.records.message import Batch, Message
from danube.client.records.records import Attributes
from danube.client.typed.binding import BoundConsumer, BoundProducer, Decoding, Valued, ValuedBatch

T = TypeVar("T")


class TypedProducer(BoundProducer[Connection, T], Producer):
    """Sends values of one schema; bytes are sent as they are.  Made by ``client.producer(schema=...)``."""

    async def send(
        self, payload: T | bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> Ack:
        """Encode and send one value and wait for its acknowledgement; raises PayloadInvalid."""
        return await super().send(self._encoded(payload), key, attributes)

    async def send_many(
        self,
        payloads: Any,
        keys: Sequence[str | bytes | None] | None = None,
        attributes: Sequence[Attributes | None] | Attributes | None = None,
    ) -> list[Ack]:
        """Encode all values, then send them; nothing is sent when one of them cannot be encoded."""
        return await super().send_many([self._encoded(one) for one in payloads], keys, attributes)

    def send_nowait(
        self, payload: T | bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> AwaitableSend:
        """Encode and send one value without waiting; raises PayloadInvalid and Overloaded."""
        return super().send_nowait(self._encoded(payload), key, attributes)


class TypedMessage(Message, Valued[T], eq=False, kw_only=True):
    """A message with its value."""

    _decoding: Decoding


class TypedBatch(ValuedBatch[T], Batch):
    """A batch with the values of its records."""


class _TypedMessages(Generic[T]):
    """Iterator over typed messages; the registry is asked once for each batch that needs it."""

    def __init__(self, consumer: TypedConsumer[T], messages: AsyncIterator[Message]) -> None:
        self._consumer = consumer
        self._messages = messages
        self._source: Any = None
        self._kept: Message | None = None  # taken, and its schema is not known yet

    def __aiter__(self) -> _TypedMessages[T]:
        return self

    async def __anext__(self) -> TypedMessage[T]:
        message = self._kept
        if message is None:
            message = await self._messages.__anext__()
        if message._source is not self._source:
            self._kept = message  # a caller's timeout may end this call
            await self._consumer._learn((Part(message._source.batch, 0, 0),))
            self._source, self._kept = message._source, None
        return cast(TypedMessage[T], message)


class TypedConsumer(BoundConsumer[Connection, Message, Batch, T], Consumer):
    """Receives values.  Made by ``client.consumer(schema=...)``."""

    _message_cls, _batch_cls = TypedMessage, TypedBatch

    async def _learn(self, parts: Iterable[Part]) -> None:
        """Fetch versions from the registry that the records name and that are not known yet."""
        if plan := self._unknown(parts):
            await self._connection.run(plan)

    def __aiter__(self) -> AsyncIterator[TypedMessage[T]]:
        """Return an iterator that goes on after a cancelled or timed-out ``anext()``."""
        return _TypedMessages(self, super().__aiter__())

    async def receive(self, timeout: float | None = None) -> TypedMessage[T]:
        """The next message; raise OperationTimeout when none comes within ``timeout`` seconds."""
        message = await super().receive(timeout)
        await self._learn((Part(message._source.batch, 0, 0),))
        return cast(TypedMessage[T], message)

    async def batches(
        self, max_records: int | None = None, max_wait: float | None = None
    ) -> AsyncIterator[TypedBatch[T]]:
        """Batches as Consumer.batches() gives them, with ``values``."""
        async for batch in super().batches(max_records, max_wait):
            await self._learn(batch._parts)
            yield cast(TypedBatch[T], batch)
