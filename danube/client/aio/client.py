"""The asyncio client: one connection, its producers and consumers, and administration."""

from __future__ import annotations

import asyncio
from typing import Any, Self, TypeVar, Unpack, overload

from danube.client.aio.connection import Connection
from danube.client.aio.consumer import Consumer
from danube.client.aio.contexts import Context
from danube.client.aio.producer import Producer
from danube.client.aio.typed import TypedConsumer, TypedProducer
from danube.client.records.administration import AdminOperations, Awaiting, SchemaOperations
from danube.client.records.handles import BaseClient
from danube.client.records.setup import (
    ConsumerKeywords,
    ProducerKeywords,
    consumer_options,
    producer_options,
)
from danube.client.typed.models import AvroSchema, Model
from danube.core import kernels
from danube.errors import ClosedError, DanubeError

T = TypeVar("T")


class Admin(Awaiting, AdminOperations):
    """Topics, subscriptions, access and the broker's state: ``client.admin``."""


class Schemas(Awaiting, SchemaOperations):
    """Register, find and compare schemas; bind them to topics."""


class Client(BaseClient[Connection], Context):
    """A connection to the broker of ``danube://host:port[,host:port]``; use it in ``async with``."""

    _called = "danube.Client"
    _use = "use it in `async with danube.connect(...)`"
    _admin_cls, _schemas_cls = Admin, Schemas
    admin: Admin
    schemas: Schemas

    async def open(self) -> Self:
        """Connect; raise ConnectionFailed when no address of the URL answers.  Done by ``async with``."""
        if self._closed:
            raise ClosedError("the client is closed", hint="make a new one")
        self._session.check_usable()
        if not self._opened:
            connection = Connection(self._session, self._addresses, self._connect_timeout_s, self._tls)
            await connection.open()
            try:
                self._session.check_usable()  # it may have been closed meanwhile
            except DanubeError:
                connection.leave()
                raise
            self._connection, self._opened = connection, True
        return self

    @overload
    def producer(
        self, topic: str, name: str | None = None, *, schema: None = None, **options: Unpack[ProducerKeywords]
    ) -> Producer: ...

    @overload
    def producer(
        self, topic: str, name: str | None = None, *, schema: Model[T], **options: Unpack[ProducerKeywords]
    ) -> TypedProducer[T]: ...

    @overload
    def producer(
        self, topic: str, name: str | None = None, *, schema: AvroSchema, **options: Unpack[ProducerKeywords]
    ) -> TypedProducer[Any]: ...

    def producer(
        self, topic: str, name: str | None = None, *, schema: Any = None, **options: Unpack[ProducerKeywords]
    ) -> Producer | TypedProducer[Any]:
        """A producer of ``topic``, to be used in ``async with``; the topic is made when it is missing.

        ``reliable``, ``durability`` and ``partitions`` are for a topic that is made.  ``linger_us``
        waits for more records before a batch leaves.  ``timeout`` (seconds) is how long a send may
        take; None takes the client's.  ``schema`` (a model or a :class:`danube.Schema`) makes it a
        producer of values.
        """
        made = producer_options(topic, name, self._timeout_ns, **options)
        return self._add(Producer, TypedProducer, made, schema)

    @overload
    def consumer(
        self,
        topic: str,
        subscription: str,
        mode: str = "shared",
        *,
        schema: None = None,
        **options: Unpack[ConsumerKeywords],
    ) -> Consumer | TypedConsumer[Any]: ...

    @overload
    def consumer(
        self,
        topic: str,
        subscription: str,
        mode: str = "shared",
        *,
        schema: Model[T],
        **options: Unpack[ConsumerKeywords],
    ) -> TypedConsumer[T]: ...

    @overload
    def consumer(
        self,
        topic: str,
        subscription: str,
        mode: str = "shared",
        *,
        schema: AvroSchema,
        **options: Unpack[ConsumerKeywords],
    ) -> TypedConsumer[Any]: ...

    def consumer(
        self,
        topic: str,
        subscription: str,
        mode: str = "shared",
        *,
        schema: Any = None,
        **options: Unpack[ConsumerKeywords],
    ) -> Consumer:
        """A consumer of ``topic`` through ``subscription``, to be used in ``async with``.

        ``mode`` is shared, exclusive, failover or key_shared.  ``start`` holds when the subscription
        is new: "earliest", "latest", an offset, a datetime or ("time", microseconds).
        ``prefetch_records`` None fits itself to the pace of the application.  ``temporary``: the
        subscription is never stored, and goes with its last consumer; after a lost connection it goes on
        behind the last record that was acknowledged.  ``schema`` makes it a consumer of values.
        """
        made = consumer_options(topic, subscription, mode, **options)
        return self._add(Consumer, TypedConsumer, made, schema)

    async def close(self) -> None:
        """Close producers (flushing them), consumers and the connection.

        Raise the error of undelivered records.
        """
        if self._closed:
            return
        self._closed = True
        connected, self._opened = self._opened, False
        try:
            outcomes = await asyncio.gather(
                *(one.close() for one in list(self._open)), return_exceptions=True
            )
            self._session.flush_acks()
            if connected:
                await self._connection.close()
        finally:  # also where this task was cancelled
            if connected:
                self._connection.leave()
            self._session.fail(ClosedError("the client is closed"))
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


def load_kernels() -> bool:
    """Encode and check batches by machine code in this process; for programs that send or read millions.

    To be called once, before anything is sent: it takes 0.1 s, and the first time on a machine some 20 s in
    which Numba compiles them.  Lists of small payloads are then encoded in half the time.
    False if Numba cannot be used or DANUBE_KERNELS=off is set; all else works the same.
    """
    return kernels.load().available


connect = Client
