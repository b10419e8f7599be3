"""The blocking client: the names of the asyncio one without await."""

from __future__ import annotations

import os
from typing import Any, Self, TypeVar, Unpack, overload

from danube.client.blocking.administration import Admin, Schemas
from danube.client.blocking.connection import BlockingConnection
from danube.client.blocking.consumer import Batch, Consumer, Message
from danube.client.blocking.contexts import Context
from danube.client.blocking.producer import Producer
from danube.client.blocking.typed import TypedConsumer, TypedProducer
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
from danube.errors import ClosedError, DanubeError

T = TypeVar("T")


class Client(BaseClient["Producer | Consumer"], Context):
    """A connection to the broker of ``danube://host:port[,host:port]``; use it in ``with``.

    ``timeout`` (seconds) bounds requests and sends, ``connect_timeout`` for each address first the dial and
    then the broker's greeting.  After a lost connection the client dials again
    for ``reconnect_timeout`` seconds (None: for ever) before everything that waits fails.
    ``danube+tls://`` or ``tls`` (:class:`danube.TlsOptions`) makes it connect by TLS.

    ``token`` is a text or a function that returns one, ``token_file`` a file that holds one; both are asked
    again before the token ends.  Without either DANUBE_TOKEN and DANUBE_TOKEN_FILE are.  A token is sent only
    to this host, or through TLS, unless ``allow_plaintext_token`` is set.
    """

    _called = "danube.sync.Client"
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
        source = token_source(token, token_file)
        super().__init__(url, name, source, allow_plaintext_token, timeout, reconnect_timeout)
        plain_url, secure = tls_of(url, tls)
        self._connection = BlockingConnection(self._session, parse_url(plain_url), connect_timeout, secure)
        self._opened = False
        self.admin = Admin(AdminPlans(self._session), lambda: self._live)
        self.schemas = Schemas(SchemaPlans(self._session), lambda: self._live)

    @property
    def _live(self) -> BlockingConnection:
        self._session.check_usable()
        if not self._opened:
            raise ClosedError("the client is not connected", hint="use it in `with danube.sync.connect(...)`")
        return self._connection

    def open(self) -> Self:
        """Connect; raise ConnectionFailed when no address of the URL answers.  Done by ``with``."""
        self._session.check_usable()
        if not self._opened:
            self._connection.open()
            self._opened = True
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
        """A producer of ``topic``, to be used in ``with``; the topic is made when it is missing.

        ``schema`` makes it a producer of values, see :class:`danube.Schema`.
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
        """A consumer of ``topic`` through ``subscription``, to be used in ``with``.

        ``schema`` makes it a consumer of values, see :class:`danube.Schema`.
        """
        made = consumer_options(topic, subscription, mode, **options)
        consumer = (
            Consumer(self._live, made)
            if schema is None
            else TypedConsumer(self._live, made, schema_of(schema))
        )
        self._open.add(consumer)
        return consumer

    def close(self) -> None:
        """Close producers (flushing them), consumers and the connection.

        Raise the error of undelivered records.
        """
        if self._closed:
            return
        self._closed = True
        failure: DanubeError | None = None
        opened = self._open.take()
        try:
            for one in opened:
                try:
                    one.close()
                except DanubeError as error:
                    failure = failure or error
        finally:
            self._connection.close()
            with self._connection.lock:
                self._session.fail(ClosedError("the client is closed"))
        if failure is not None:
            raise failure


connect = Client

__all__ = [
    "Admin",
    "Batch",
    "Client",
    "Consumer",
    "Message",
    "Producer",
    "Schemas",
    "TypedConsumer",
    "TypedProducer",
    "connect",
]
