"""The asyncio producer of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from danube.client.aio.connection import Connection
from danube.client.aio.producer import AwaitableSend, Producer
from danube.client.machine.ack import Ack
from danube.client.records.records import Attributes
from danube.client.records.setup import ProducerOptions
from danube.client.typed.binding import Bound, bind_producer
from danube.client.typed.models import Schema, encoded
from danube.errors import ClosedError

T = TypeVar("T")


class TypedProducer(Producer, Generic[T]):
    """Sends values of one schema; bytes are sent as they are.  Made by ``client.producer(schema=...)``."""

    def __init__(self, connection: Connection, options: ProducerOptions, schema: Schema[T]) -> None:
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
            raise ClosedError("the producer is not open", hint="use it in `async with client.producer(...)`")
        return self._bound

    async def open(self) -> TypedProducer[T]:
        """Register or find the schema, then open as every producer does; done by ``async with``."""
        if self._bound is None and not self._closed:
            plan = bind_producer(self._connection.session, self._schema, self.topic)
            self._bound = await self._connection.run(plan)
            self._options.schema_id = self._bound.schema_id
            self._options.schema_version = self._bound.version
        await super().open()
        return self

    async def send(
        self, payload: T | bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> Ack:
        """Encode and send one value and wait for its acknowledgement; raises PayloadInvalid."""
        return await super().send(encoded(self._open_bound.codec, payload), key, attributes)

    async def send_many(
        self,
        payloads: Any,
        keys: Sequence[str | bytes | None] | None = None,
        attributes: Sequence[Attributes | None] | Attributes | None = None,
    ) -> list[Ack]:
        """Encode all values, then send them; nothing is sent when one of them cannot be encoded."""
        return await super().send_many(encoded_all(self._open_bound, payloads), keys, attributes)

    def send_nowait(
        self, payload: T | bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> AwaitableSend:
        """Encode and send one value without waiting; raises PayloadInvalid and Overloaded."""
        return super().send_nowait(encoded(self._open_bound.codec, payload), key, attributes)

    async def __aenter__(self) -> TypedProducer[T]:
        return await self.open()


def encoded_all(bound: Bound, payloads: Any) -> list[bytes]:
    """The payloads of many values."""
    codec = bound.codec
    return [encoded(codec, value) for value in payloads]
