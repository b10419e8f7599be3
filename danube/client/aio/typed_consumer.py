"""The asyncio consumer of values, and what it hands out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from functools import cached_property, partial
from typing import Any, Generic, TypeVar, cast

from danube.client.aio.connection import Connection
from danube.client.aio.consumer import Consumer
from danube.client.machine.received import Part
from danube.client.records.message import BaseBatch, BaseMessage, Batch, Message
from danube.client.records.setup import ConsumerOptions
from danube.client.typed.binding import Decoding, bind_consumer
from danube.client.typed.models import Schema

T = TypeVar("T")


class TypedMessage(Message, Generic[T], eq=False, kw_only=True):
    """A message with its value."""

    _decoding: Decoding

    @property
    def value(self) -> T:
        """The decoded payload, None for a tombstone; decoded anew each time.  Raises PayloadInvalid."""
        return cast(T, value_of(self, self._decoding))


class TypedBatch(Batch, Generic[T]):
    """A batch with the values of its records."""

    def __init__(self, decoding: Decoding, *rest: Any) -> None:
        super().__init__(*rest)
        self._decoding = decoding

    @cached_property
    def values(self) -> list[T]:
        """The value of each record, None for a tombstone.

        Raises PayloadInvalid for the first that cannot be decoded.
        """
        return cast(list[T], values_of(self, self._decoding))


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


class TypedConsumer(Consumer, Generic[T]):
    """Receives values.  Made by ``client.consumer(schema=...)``."""

    def __init__(self, connection: Connection, options: ConsumerOptions, schema: Schema[T]) -> None:
        super().__init__(connection, options)
        self._schema = schema
        self._decoding: Decoding | None = None

    async def open(self) -> TypedConsumer[T]:
        """Find out how values are decoded, then subscribe; done by ``async with``."""
        if self._decoding is None and not self._closed:
            plan = bind_consumer(self._connection.session, self._schema)
            self._decoding = await self._connection.run(plan)
            self._message_cls = partial(TypedMessage, _decoding=self._decoding)
            self._batch_cls = partial(TypedBatch, self._decoding)
        await super().open()
        return self

    async def _learn(self, parts: Iterable[Part]) -> None:
        """Fetch versions from the registry that the records name and that are not known yet."""
        decoding = cast(Decoding, self._decoding)
        missing = decoding.missing(parts)
        if missing:
            await self._connection.run(decoding.learn(missing))

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

    async def __aenter__(self) -> TypedConsumer[T]:
        return await self.open()


def value_of(message: BaseMessage, decoding: Decoding) -> Any:
    """The value of one record."""
    source = message._source
    return decoding.value(message.payload, message.offset, source.batch, message._index, source.topic)


def values_of(batch: BaseBatch, decoding: Decoding) -> list[Any]:
    """The value of each record of a batch."""
    payloads, offsets = iter(batch.payloads), iter(batch.offsets.tolist())
    return [
        decoding.value(next(payloads), next(offsets), part.batch, index, batch.topic)
        for part in batch._parts
        for index in range(part.start, part.stop)
    ]
