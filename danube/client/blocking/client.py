"""The blocking client: the names of the asyncio one without await."""

from __future__ import annotations

from typing import Any, Self, TypeVar, Unpack, overload

from danube.client.blocking.connection import BlockingConnection
from danube.client.blocking.consumer import Consumer
from danube.client.blocking.contexts import Context
from danube.client.blocking.producer import Producer
from danube.client.blocking.typed import TypedConsumer, TypedProducer
from danube.client.records.administration import AdminOperations, SchemaOperations, Waiting
from danube.client.records.handles import BaseClient
from danube.client.records.setup import (
    ConsumerKeywords,
    ProducerKeywords,
    consumer_options,
    producer_options,
)
from danube.client.typed.models import AvroSchema, Model
from danube.errors import ClosedError, DanubeError

T = TypeVar("T")


class Admin(Waiting, AdminOperations):
    """Topics, subscriptions, access and the broker's state: ``client.admin``."""


class Schemas(Waiting, SchemaOperations):
    """Register, find and compare schemas; bind them to topics."""


class Client(BaseClient[BlockingConnection], Context):
    """A connection to the broker of ``danube://host:port[,host:port]``; use it in ``with``."""

    _called = "danube.sync.Client"
    _use = "use it in `with danube.sync.connect(...)`"
    _admin_cls, _schemas_cls = Admin, Schemas
    admin: Admin
    schemas: Schemas

    def open(self) -> Self:
        """Connect; raise ConnectionFailed when no address of the URL answers.  Done by ``with``."""
        self._session.check_usable()
        if not self._opened:
            self._connection = BlockingConnection(
                self._session, self._addresses, self._connect_timeout_s, self._tls
            )
            try:
                self._connection.open()
                self._opened = True
            except BaseException:  # also a signal's
                self._connection.close()
                raise
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
        """A producer of ``topic``, to be used in ``with``; the topic is made when it is missing.

        ``schema`` makes it a producer of values, see :class:`danube.Schema`.
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
        """A consumer of ``topic`` through ``subscription``, to be used in ``with``.

        ``schema`` makes it a consumer of values, see :class:`danube.Schema`.
        """
        made = consumer_options(topic, subscription, mode, **options)
        return self._add(Consumer, TypedConsumer, made, schema)

    def close(self) -> None:
        """Close producers (flushing them), consumers and the connection.

        Raise the error of undelivered records.
        """
        if self._closed:
            return
        self._closed = True
        closed = ClosedError("the client is closed")
        if not self._opened:
            self._session.fail(closed)
            return
        failure: DanubeError | None = None
        try:
            for one in list(self._open):
                try:
                    one.close()
                except DanubeError as error:
                    failure = failure or error
        finally:
            self._connection.close()
            with self._connection.lock:
                self._session.fail(closed)
        if failure is not None:
            raise failure


connect = Client
