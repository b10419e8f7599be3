"""The asyncio client: one connection, its producers and consumers, and administration."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload

from danube.client.aio.connection import Connection
from danube.client.aio.consumer import Consumer
from danube.client.aio.producer import Producer
from danube.client.aio.schemas import Schemas
from danube.client.aio.typed_consumer import TypedConsumer
from danube.client.aio.typed_producer import TypedProducer
from danube.client.machine.address import URL_DEFAULT, parse_url
from danube.client.machine.admin import (
    AdminPlans,
    Start,
    SubscriptionInfo,
    TopicDescription,
    TopicInfo,
    policy_fields,
)
from danube.client.machine.paging import page_of
from danube.client.machine.session import Session
from danube.client.records.open_handles import OpenHandles
from danube.client.records.outbox import BATCH_BYTES, IN_FLIGHT_BYTES
from danube.client.records.setup import (
    PREFETCH_BYTES,
    ConsumerKeywords,
    ProducerKeywords,
    consumer_options,
    producer_options,
)
from danube.client.typed.models import Schema, schema_of
from danube.core import kernels
from danube.core.partition.policy import FailurePolicy
from danube.errors import ClosedError, DanubeError, InvalidArgument
from danube.host.allocator import keep_large_blocks
from danube.limits import BUSY_POLL_US_MAX

T = TypeVar("T")


class Client:
    """A connection to a broker.  Made by :func:`danube.connect`; use it in ``async with``."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str = "",
        name: str = "",
        timeout: float = 30.0,
        connect_timeout: float = 10.0,
        reconnect_timeout: float | None = 60.0,
        busy_poll_us: int = 0,
    ) -> None:
        self._addresses = parse_url(url)
        self._url = url
        self._timeout_ns = seconds_as_ns(timeout, "timeout")
        self._connect_timeout_s = connect_timeout
        if not 0 <= busy_poll_us <= BUSY_POLL_US_MAX:
            raise InvalidArgument(f"busy_poll_us is {busy_poll_us}", why=f"it is 0 to {BUSY_POLL_US_MAX}")
        self._busy_poll_us = busy_poll_us
        self._session = new_session(name, token, reconnect_timeout, self._timeout_ns)
        self._connection: Connection | None = None
        self._closed = False
        self._open: OpenHandles[Producer | Consumer] = OpenHandles()
        self.admin = Admin(self)
        self.schemas = Schemas(self._session, lambda: self._live)

    @property
    def _live(self) -> Connection:
        self._session.check_usable()
        if self._connection is None:
            raise ClosedError(
                "the client is closed" if self._closed else "the client is not connected",
                hint="use it in `async with danube.connect(...)`",
            )
        return self._connection

    async def open(self) -> Client:
        """Connect; raise ConnectionFailed when no address of the URL answers.  Done by ``async with``."""
        if self._closed:
            raise ClosedError("the client is closed", hint="make a new one")
        self._session.check_usable()
        if self._connection is None:
            timeout_s = self._connect_timeout_s
            connection = Connection(self._session, self._addresses, timeout_s, self._busy_poll_us)
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
        reliable: bool | None = None,
        durability: str | None = None,
        partitions: int = 0,
        compression: str = "none",
        linger_us: int = 0,
        batch_bytes: int = BATCH_BYTES,
        max_in_flight_bytes: int = IN_FLIGHT_BYTES,
        timeout: float | None = None,
    ) -> Producer | TypedProducer[Any]:
        """A producer of ``topic``, to be used in ``async with``; the topic is made when it is missing.

        ``reliable``, ``durability`` and ``partitions`` are for a topic that is made.  ``linger_us``
        waits for more records before a batch leaves.  ``timeout`` (seconds) is how long a send may
        take; None takes the client's.  ``schema`` (a model or a :class:`danube.Schema`) makes it a
        producer of values.
        """
        options = producer_options(
            topic,
            name,
            reliable=reliable,
            durability=durability,
            partitions=partitions,
            compression=compression,
            linger_us=linger_us,
            batch_bytes=batch_bytes,
            max_in_flight_bytes=max_in_flight_bytes,
            timeout_ns=self._timeout_ns if timeout is None else seconds_as_ns(timeout, "timeout"),
        )
        producer = (
            Producer(self._live, options)
            if schema is None
            else TypedProducer(self._live, options, schema_of(schema))
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
        start: Start = "latest",
        name: str | None = None,
        prefetch_records: int | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        filters: Sequence[str] = (),
        max_unacked: int = 0,
        failure: FailurePolicy | dict[str, Any] | None = None,
    ) -> Consumer:
        """A consumer of ``topic`` through ``subscription``, to be used in ``async with``.

        ``mode`` is shared, exclusive, failover or key_shared.  ``start`` holds when the subscription
        is new: "earliest", "latest", an offset, a datetime or ("time", microseconds).
        ``prefetch_records`` None fits itself to the pace of the application.  ``schema`` makes it
        a consumer of values.
        """
        options = consumer_options(
            topic,
            subscription,
            mode=mode,
            start=start,
            name=name,
            prefetch_records=prefetch_records,
            prefetch_bytes=prefetch_bytes,
            filters=filters,
            max_unacked=max_unacked,
            failure=failure,
        )
        consumer = (
            Consumer(self._live, options)
            if schema is None
            else TypedConsumer(self._live, options, schema_of(schema))
        )
        self._open.add(consumer)
        return consumer

    def statistics(self) -> dict[str, int]:
        """Counters since the client was made: connections, batches, records, bytes, duplicates, failures."""
        return self._session.statistics.as_dict()

    @property
    def connected(self) -> bool:
        return self._session.ready

    async def close(self) -> None:
        """Close producers (flushing them), consumers and the connection; raise what was not delivered."""
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

    async def __aenter__(self) -> Client:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        try:
            await self.close()
        except DanubeError as failure:
            error.add_note(f"danube: closing the client failed: {failure}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self.connected else "not connected"
        return f"<danube.Client {self._url} {state}>"


class Admin:
    """Topics, subscriptions and the broker's state: ``client.admin``."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._plans = AdminPlans(client._session)

    async def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 0,
        reliable: bool | None = None,
        durability: str | None = None,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        retention_segments: int | None = None,
        max_record_bytes: int | None = None,
        max_unacked: int | None = None,
        max_dispatch_rate: int | None = None,
        cleanup: str | None = None,
        tombstone_retention_ms: int | None = None,
        failure: FailurePolicy | dict[str, Any] | None = None,
    ) -> TopicInfo:
        """Make a topic; raise TopicExists when there is one."""
        policy = policy_fields(
            reliable,
            durability,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            retention_segments=retention_segments,
            max_record_bytes=max_record_bytes,
            max_unacked=max_unacked,
            max_dispatch_rate=max_dispatch_rate,
            cleanup=cleanup,
            tombstone_retention_ms=tombstone_retention_ms,
            failure=failure,
        )
        return await self._client._live.run(self._plans.create_topic(topic, partitions, policy))

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and everything in it."""
        await self._client._live.run(self._plans.delete_topic(topic))

    async def update_topic(
        self,
        topic: str,
        *,
        durability: str | None = None,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        retention_segments: int | None = None,
        max_record_bytes: int | None = None,
        max_unacked: int | None = None,
        max_dispatch_rate: int | None = None,
        cleanup: str | None = None,
        tombstone_retention_ms: int | None = None,
        failure: FailurePolicy | dict[str, Any] | None = None,
    ) -> TopicInfo:
        """Change the given fields of a topic's policy."""
        policy = policy_fields(
            None,
            durability,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            retention_segments=retention_segments,
            max_record_bytes=max_record_bytes,
            max_unacked=max_unacked,
            max_dispatch_rate=max_dispatch_rate,
            cleanup=cleanup,
            tombstone_retention_ms=tombstone_retention_ms,
            failure=failure,
        )
        return await self._client._live.run(self._plans.update_topic(topic, policy))

    async def list_topics(
        self, namespace: str | None = None, *, after: str = "", limit: int | None = None, prefix: str = ""
    ) -> list[TopicInfo]:
        """Topics by name: of a namespace, with ``prefix``, behind ``after``, the first ``limit``; or all."""
        page = page_of(after, limit, prefix)
        return await self._client._live.run(self._plans.list_topics(namespace, page))

    async def topic(self, topic: str) -> TopicInfo:
        """One topic with its policy."""
        return await self._client._live.run(self._plans.topic(topic))

    async def describe_topic(self, topic: str) -> TopicDescription:
        """One topic, and the state of each of its partitions."""
        return await self._client._live.run(self._plans.describe_topic(topic))

    async def list_subscriptions(
        self, topic: str, *, after: str = "", limit: int | None = None, prefix: str = ""
    ) -> list[SubscriptionInfo]:
        """The topic's subscriptions by name; as many of them as list_topics() would tell."""
        page = page_of(after, limit, prefix)
        return await self._client._live.run(self._plans.list_subscriptions(topic, page))

    async def describe_subscription(self, topic: str, subscription: str) -> SubscriptionInfo:
        """One subscription with the state of each partition."""
        return await self._client._live.run(self._plans.describe_subscription(topic, subscription))

    async def seek(self, topic: str, subscription: str, start: Start) -> None:
        """Move a subscription to "earliest", "latest", an offset, a datetime or ("time", microseconds)."""
        await self._client._live.run(self._plans.seek(topic, subscription, start))

    async def delete_subscription(self, topic: str, subscription: str) -> None:
        """Delete a subscription and its cursor on every partition."""
        await self._client._live.run(self._plans.delete_subscription(topic, subscription))

    async def unblock(self, topic: str, subscription: str) -> None:
        """Let a subscription go on that a poison record blocks; the record is skipped."""
        await self._client._live.run(self._plans.unblock(topic, subscription))

    async def set_failure_policy(
        self, topic: str, subscription: str, failure: FailurePolicy | dict[str, Any]
    ) -> None:
        """Change what happens to records of a subscription that are nacked or not acked in time."""
        await self._client._live.run(self._plans.set_failure_policy(topic, subscription, failure))

    async def seal(self, topic: str) -> list[int]:
        """Seal what each partition has written so far; below which offset, in partition order."""
        return await self._client._live.run(self._plans.seal(topic))

    async def open_holes(self, topic: str) -> list[dict[str, Any]]:
        """Offsets of each partition that only the disk of a broker that is away may hold."""
        return await self._client._live.run(self._plans.open_holes(topic))

    async def accept_loss(self, ends: Mapping[str, int]) -> list[dict[str, Any]]:
        """Give up the open holes of partitions (by name) that begin below an offset."""
        return await self._client._live.run(self._plans.accept_loss(ends))

    async def storage_status(self, topic: str = "") -> dict[str, Any]:
        """Return where data lies, by topic (or of one), and the bytes and seconds not off the host yet."""
        return await self._client._live.run(self._plans.storage_status(topic))

    async def cluster(self, op: str, **arguments: Any) -> Any:
        """Ask about a cluster's brokers, or have partitions moved: see ``danube brokers``."""
        return await self._client._live.run(self._plans.cluster(op, arguments))

    async def status(self) -> dict[str, Any]:
        """The broker's own account of itself."""
        return await self._client._live.run(self._plans.status())


def new_session(name: str, token: str, reconnect_timeout_s: float | None, timeout_ns: int) -> Session:
    """The machine behind a client of either kind."""
    keep_large_blocks()
    reconnect_ns = None if reconnect_timeout_s is None else int(reconnect_timeout_s * 1e9)
    client = name or f"danube-python on {socket.gethostname()}"
    return Session(
        client=client, token=token, reconnect_timeout_ns=reconnect_ns, request_timeout_ns=timeout_ns
    )


def seconds_as_ns(seconds: float, what: str) -> int:
    if not 0 < seconds <= 86_400:
        raise InvalidArgument(f"{what} of {seconds} s is not valid", hint="seconds above 0, at most a day")
    return int(seconds * 1e9)


def load_kernels() -> bool:
    """Encode and check batches by machine code in this process; for programs that send or read millions.

    To be called once, before anything is sent: it takes 0.1 s, and the first time on a machine some 20 s in
    which Numba compiles them.  Lists of small payloads are then encoded in half the time.
    False if Numba cannot be used or DANUBE_KERNELS=off is set; all else works the same.
    """
    return kernels.load().available


def connect(
    url: str = URL_DEFAULT,
    *,
    token: str = "",
    name: str = "",
    timeout: float = 30.0,
    connect_timeout: float = 10.0,
    reconnect_timeout: float | None = 60.0,
    busy_poll_us: int = 0,
) -> Client:
    """A client for ``danube://host:port[,host:port]``, to be used in ``async with``.

    ``timeout`` (seconds) bounds requests and sends, ``connect_timeout`` for each address first the dial and
    then the broker's greeting.  After a lost connection the client dials again
    for ``reconnect_timeout`` seconds (None: for ever) before everything that waits fails.  With
    ``busy_poll_us`` the loop does not sleep for that long while something waits for an answer: answers
    are here sooner, and a core is busy meanwhile.  For a broker that does so as well (server.busy_poll_us).
    """
    return Client(
        url,
        token=token,
        name=name,
        timeout=timeout,
        connect_timeout=connect_timeout,
        reconnect_timeout=reconnect_timeout,
        busy_poll_us=busy_poll_us,
    )
