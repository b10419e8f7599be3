"""Producer and consumer of values of the blocking client: the names of the asyncio ones without await."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Generic, TypeVar, cast

from danube.client.aio.typed_consumer import value_of, values_of
from danube.client.aio.typed_producer import encoded_all
from danube.client.blocking.connection import BlockingConnection
from danube.client.blocking.consumer import Batch, Consumer, Message
from danube.client.blocking.producer import BlockingSend, Producer
from danube.client.machine.ack import Ack
from danube.client.machine.received import Part
from danube.client.records.records import Attributes
from danube.client.records.setup import ConsumerOptions, ProducerOptions
from danube.client.typed.binding import Bound, Decoding, bind_consumer, bind_producer
from danube.client.typed.models import Schema, encoded
from danube.errors import ClosedError

T = TypeVar("T")


class TypedProducer(Producer, Generic[T]):
    """Sends values of one schema; bytes are sent as they are.  Made by ``client.producer(schema=...)``."""

    def __init__(self, connection: BlockingConnection, options: ProducerOptions, schema: Schema[T]) -> None:
        super().__init__(connection, options)
        self._schema = schema
        self._bound: Bound | None = None

    @property
    def subject(self) -> str:
        """The registry's subject that the batches name."""
        return self._open_bound.subject

    @property
    def schema_id(self) -> int:
        return self._open_bound.schema_id

    @property
    def schema_version(self) -> int:
        return self._open_bound.version

    @property
    def _open_bound(self) -> Bound:
        if self._bound is None:
            raise ClosedError("the producer is not open", hint="use it in `with client.producer(...)`")
        return self._bound

    def open(self) -> TypedProducer[T]:
        """Register or find the schema, then open as every producer does; done by ``with``."""
        if self._bound is None and not self._closed:
            plan = bind_producer(self._connection.session, self._schema, self.topic)
            self._bound = self._connection.run(plan)
            self._options.schema_id = self._bound.schema_id
            self._options.schema_version = self._bound.version
        super().open()
        return self

    def send(
        self, payload: T | bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> Ack:
        """Encode and send one value and wait for its acknowledgement; raises PayloadInvalid."""
        return super().send(encoded(self._open_bound.codec, payload), key, attributes)

    def send_many(
        self,
        payloads: Any,
        keys: Sequence[str | bytes | None] | None = None,
        attributes: Sequence[Attributes | None] | Attributes | None = None,
    ) -> list[Ack]:
        """Encode all values, then send them; nothing is sent when one of them cannot be encoded."""
        return super().send_many(encoded_all(self._open_bound, payloads), keys, attributes)

    def send_nowait(
        self, payload: T | bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> BlockingSend:
        """Encode and gather one value; raises PayloadInvalid and Overloaded."""
        return super().send_nowait(encoded(self._open_bound.codec, payload), key, attributes)

    def __enter__(self) -> TypedProducer[T]:
        return self.open()


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


class TypedConsumer(Consumer, Generic[T]):
    """Receives values.  Made by ``client.consumer(schema=...)``."""

    def __init__(self, connection: BlockingConnection, options: ConsumerOptions, schema: Schema[T]) -> None:
        super().__init__(connection, options)
        self._schema = schema
        self._decoding: Decoding | None = None

    def open(self) -> TypedConsumer[T]:
        """Find out how values are decoded, then subscribe; done by ``with``."""
        if self._decoding is None and not self._closed:
            plan = bind_consumer(self._connection.session, self._schema)
            self._decoding = self._connection.run(plan)
            self._message_cls = partial(TypedMessage, _decoding=self._decoding)
            self._batch_cls = partial(TypedBatch, self._decoding)
        super().open()
        return self

    def _learn(self, parts: Iterable[Part]) -> None:
        """Fetch versions from the registry that the records name and that are not known yet."""
        decoding = cast(Decoding, self._decoding)
        missing = decoding.missing(parts)
        if missing:
            self._connection.run(decoding.learn(missing))

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

    def __enter__(self) -> TypedConsumer[T]:
        return self.open()
