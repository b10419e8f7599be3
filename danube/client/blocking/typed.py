"""Producer and consumer of values of the blocking client: the names of the asyncio ones without await."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

from danube.client.blocking.connection import BlockingConnection
from danube.client.blocking.consumer import Batch, Consumer, Message
from danube.client.blocking.producer import BlockingSend, Producer
from danube.client.machine.ack import Ack
from danube.client.machine.received import Part
from danube.client.records.records import Attributes
from danube.client.typed.binding import BoundConsumer, BoundProducer, Decoding, Valued, ValuedBatch

T = TypeVar("T")


class TypedProducer(BoundProducer[BlockingConnection, T], Producer):
    """Sends values of one schema; bytes are sent as they are.  Made by ``client.producer(schema=...)``."""

    def send(
        self, payload: T | bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> Ack:
        """Encode and send one value and wait for its acknowledgement; raises PayloadInvalid."""
        return super().send(self._encoded(payload), key, attributes)

    def send_many(
        self,
        payloads: Any,
        keys: Sequence[str | bytes | None] | None = None,
        attributes: Sequence[Attributes | None] | Attributes | None = None,
    ) -> list[Ack]:
        """Encode all values, then send them; nothing is sent when one of them cannot be encoded."""
        return super().send_many([self._encoded(one) for one in payloads], keys, attributes)

    def send_nowait(
        self, payload: T | bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> BlockingSend:
        """Encode and gather one value; raises PayloadInvalid and Overloaded."""
        return super().send_nowait(self._encoded(payload), key, attributes)


class TypedMessage(Message, Valued[T], eq=False, kw_only=True):
    """A message with its value."""

    _decoding: Decoding


class TypedBatch(ValuedBatch[T], Batch):
    """A batch with the values of its records."""


class TypedConsumer(BoundConsumer[BlockingConnection, Message, Batch, T], Consumer):
    """Receives values.  Made by ``client.consumer(schema=...)``."""

    _message_cls, _batch_cls = TypedMessage, TypedBatch

    def _learn(self, parts: Iterable[Part]) -> None:
        """Fetch versions from the registry that the records name and that are not known yet."""
        if plan := self._unknown(parts):
            self._connection.run(plan)

    def __iter__(self) -> Iterator[TypedMessage[T]]:
        source = None
        for message in super().__iter__():
            if message._source is not source:
                source = message._source
                self._learn((Part(source.batch, 0, 0),))
            yield cast(TypedMessage[T], message)

    def receive(self, timeout: float | None = None) -> TypedMessage[T]:
        """The next message; raise OperationTimeout when none comes within ``timeout`` seconds."""
        message = super().receive(timeout)
        self._learn((Part(message._source.batch, 0, 0),))
        return cast(TypedMessage[T], message)

    def batches(
        self, max_records: int | None = None, max_wait: float | None = None
    ) -> Iterator[TypedBatch[T]]:
        """Batches as Consumer.batches() gives them, with ``values``."""
        for batch in super().batches(max_records, max_wait):
            self._learn(batch._parts)
            yield cast(TypedBatch[T], batch)
