"""The asyncio client: one connection, its producers and consumers, and administration."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Self, TypeVar, Unpack, overload

from danube.client.aio.administration import Admin, Schemas
from danube.client.aio.connection import Connection
from danube.client.aio.consumer import Consumer
from danube.client.aio.contexts import Context
from danube.client.aio.producer import Producer
from danube.client.aio.typed import TypedConsumer, TypedProducer
from danube.client.machine.address import URL_DEFAULT, parse_url
from danube.client.machine.admin import AdminPlans
from danube.client.machine.schema_plans import SchemaPlans
from danube.client.machine.tls import TlsOptions, tls_of
from danube.client.records.handles import BaseClient
from danube.client.records.setup import (
    ConsumerKeywords,
    ProducerKeywords,
    consumer_options,
    producer_options,
)
from danube.client.records.tokens import Token, token_source
from danube.client.typed.models import Schema, schema_of
from danube.core import kernels
from danube.errors import ClosedError, DanubeError

T = TypeVar("T")


class Client(BaseClient["Producer | Consumer"], Context):
    """A connection to the broker of ``danube://host:port[,host:port]``; use it in ``async with``.

    ``timeout`` (seconds) bounds requests and sends, ``connect_timeout`` for each address first the dial and
    then the broker's greeting.  After a lost connection the client dials again
    for ``reconnect_timeout`` seconds (None: for ever) before everything that waits fails.
    ``danube+tls://`` or ``tls`` (:class:`danube.TlsOptions`) makes it connect by TLS.

    ``token`` is a text or a function that returns one, ``token_file`` a file that holds one; both are asked
    again before the token ends.  Without either DANUBE_TOKEN and DANUBE_TOKEN_FILE are.  A token is sent only
    to this host, or through TLS, unless ``allow_plaintext_token`` is set.
    """

    _called = "danube.Client"
    _close_failed = "closing the client failed"

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: Token = "",
        token_file: str | os.PathLike[str] | None = None,
        allow_plaintext_token: bool = False,
        tls: TlsOptions | None = None,
        name: str = "",
        timeout: float = 30.0,
        connect_timeout: float = 10.0,
        reconnect_timeout: float | None = 60.0,
    ) -> None:
        plain_url, self._tls = tls_of(url, tls)
        self._addresses = parse_url(plain_url)
        source = token_source(token, token_file)
        super().__init__(url, name, source, allow_plaintext_token, timeout, reconnect_timeout)
        self._connect_timeout_s = connect_timeout
        self._connection: Connection | None = None
        self.admin = Admin(AdminPlans(self._session), lambda: self._live)
        self.schemas = Schemas(SchemaPlans(self._session), lambda: self._live)

    @property
    def _live(self) -> Connection:
        self._session.check_usable()
        if self._connection is None:
            raise ClosedError(
                "the client is closed" if self._closed else "the client is not connected",
                hint="use it in `async with danube.connect(...)`",
            )
        return self._connection

    async def open(self) -> Self:
        """Connect; raise ConnectionFailed when no address of the URL answers.  Done by ``async with``."""
        if self._closed:
            raise ClosedError("the client is closed", hint="make a new one")
        self._session.check_usable()
        if self._connection is None:
            connection = Connection(self._session, self._addresses, self._connect_timeout_s, self._tls)
            await connection.open()
            try:
                self._session.check_usable()  # it may have been closed meanwhile
            except DanubeError:
                connection.leave()
                raise
            self._connection = connection
        return self

    @overload
    def producer(
        self, topic: str, name: str | None = None, *, schema: None = None, **options: Unpack[ProducerKeywords]
    ) -> Producer: ...

    @overload
    def producer(
        self,
        topic: str,
        name: str | None = None,
        *,
        schema: type[T] | Schema[T],
        **options: Unpack[ProducerKeywords],
    ) -> TypedProducer[T]: ...

    @overload
    def producer(
        self,
        topic: str,
        name: str | None = None,
        *,
        schema: dict[str, Any] | str,
        **options: Unpack[ProducerKeywords],
    ) -> TypedProducer[Any]: ...

    def producer(
        self,
        topic: str,
        name: str | None = None,
        *,
        schema: Any = None,
        **options: Unpack[ProducerKeywords],
    ) -> Producer | TypedProducer[Any]:
        """A producer of ``topic``, to be used in ``async with``; the topic is made when it is missing.

        ``reliable``, ``durability`` and ``partitions`` are for a topic that is made.  ``linger_us``
        waits for more records before a batch leaves.  ``timeout`` (seconds) is how long a send may
        take; None takes the client's.  ``schema`` (a model or a :class:`danube.Schema`) makes it a
        producer of values.
        """
        made = producer_options(topic, name, self._timeout_ns, **options)
        producer = (
            Producer(self._live, made)
            if schema is None
            else TypedProducer(self._live, made, schema_of(schema))
        )
        self._open.add(producer)
        return producer

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
        schema: type[T] | Schema[T],
        **options: Unpack[ConsumerKeywords],
    ) -> TypedConsumer[T]: ...

    @overload
    def consumer(
        self,
        topic: str,
        subscription: str,
        mode: str = "shared",
        *,
        schema: dict[str, Any] | str,
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
        consumer = (
            Consumer(self._live, made)
            if schema is None
            else TypedConsumer(self._live, made, schema_of(schema))
        )
        self._open.add(consumer)
        return consumer

    async def close(self) -> None:
        """Close producers (flushing them), consumers and the connection.

        Raise the error of undelivered records.
        """
        if self._closed:
            return
        self._closed = True
        connection, self._connection = self._connection, None
        opened = self._open.take()
        try:
            outcomes = await asyncio.gather(*(one.close() for one in opened), return_exceptions=True)
            self._session.flush_acks()
            if connection is not None:
                await connection.close()
        finally:  # also where this task was cancelled
            if connection is not None:
                connection.leave()
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
