"""The blocking client: the names of the asyncio one without await."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload

from danube.client.aio.client import new_session, seconds_as_ns
from danube.client.blocking.connection import BlockingConnection
from danube.client.blocking.consumer import Batch, Consumer, Message
from danube.client.blocking.producer import Producer
from danube.client.blocking.schemas import Schemas
from danube.client.blocking.typed import TypedConsumer, TypedProducer
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
from danube.client.machine.reply import Plan
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
from danube.core.partition.policy import FailurePolicy
from danube.errors import ClosedError, DanubeError

T = TypeVar("T")


class Client:
    """A connection to a broker.  Made by :func:`danube.sync.connect`; use it in ``with``."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str = "",
        name: str = "",
        timeout: float = 30.0,
        connect_timeout: float = 10.0,
        reconnect_timeout: float | None = 60.0,
    ) -> None:
        self._url = url
        self._timeout_ns = seconds_as_ns(timeout, "timeout")
        self._session = new_session(name, token, reconnect_timeout, self._timeout_ns)
        self._connection = BlockingConnection(self._session, parse_url(url), connect_timeout)
        self._opened = False
        self._closed = False
        self._open: OpenHandles[Producer | Consumer] = OpenHandles()
        self.admin = Admin(self)
        self.schemas = Schemas(self._session, lambda: self._live)

    @property
    def _live(self) -> BlockingConnection:
        self._session.check_usable()
        if not self._opened:
            raise ClosedError("the client is not connected", hint="use it in `with danube.sync.connect(...)`")
        return self._connection

    def open(self) -> Client:
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
        reliable: bool | None = None,
        durability: str | None = None,
        partitions: int = 0,
        compression: str = "none",
        linger_us: int = 0,
        batch_bytes: int = BATCH_BYTES,
        max_in_flight_bytes: int = IN_FLIGHT_BYTES,
        timeout: float | None = None,
    ) -> Producer | TypedProducer[Any]:
        """A producer of ``topic``, to be used in ``with``; the topic is made when it is missing.

        ``schema`` makes it a producer of values, see :class:`danube.Schema`.
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
        """A consumer of ``topic`` through ``subscription``, to be used in ``with``.

        ``schema`` makes it a consumer of values, see :class:`danube.Schema`.
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

    def close(self) -> None:
        """Close producers (flushing them), consumers and the connection; raise what was not delivered."""
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

    def __enter__(self) -> Client:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except DanubeError as failure:
            error.add_note(f"danube: closing the client failed: {failure}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self.connected else "not connected"
        return f"<danube.sync.Client {self._url} {state}>"


class Admin:
    """Topics, subscriptions and the broker's state: ``client.admin``."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._plans = AdminPlans(client._session)

    def _run(self, plan: Callable[[AdminPlans], Plan[T]]) -> T:
        return self._client._live.run(plan(self._plans))

    def create_topic(
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
        return self._run(lambda plans: plans.create_topic(topic, partitions, policy))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and everything in it."""
        self._run(lambda plans: plans.delete_topic(topic))

    def update_topic(
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
        return self._run(lambda plans: plans.update_topic(topic, policy))

    def list_topics(
        self, namespace: str | None = None, *, after: str = "", limit: int | None = None, prefix: str = ""
    ) -> list[TopicInfo]:
        """Topics by name: of a namespace, with ``prefix``, behind ``after``, the first ``limit``; or all."""
        page = page_of(after, limit, prefix)
        return self._run(lambda plans: plans.list_topics(namespace, page))

    def topic(self, topic: str) -> TopicInfo:
        """One topic with its policy."""
        return self._run(lambda plans: plans.topic(topic))

    def describe_topic(self, topic: str) -> TopicDescription:
        """One topic, and the state of each of its partitions."""
        return self._run(lambda plans: plans.describe_topic(topic))

    def list_subscriptions(
        self, topic: str, *, after: str = "", limit: int | None = None, prefix: str = ""
    ) -> list[SubscriptionInfo]:
        """The topic's subscriptions by name; as many of them as list_topics() would tell."""
        page = page_of(after, limit, prefix)
        return self._run(lambda plans: plans.list_subscriptions(topic, page))

    def describe_subscription(self, topic: str, subscription: str) -> SubscriptionInfo:
        """One subscription with the state of each partition."""
        return self._run(lambda plans: plans.describe_subscription(topic, subscription))

    def seek(self, topic: str, subscription: str, start: Start) -> None:
        """Move a subscription to "earliest", "latest", an offset, a datetime or ("time", microseconds)."""
        self._run(lambda plans: plans.seek(topic, subscription, start))

    def delete_subscription(self, topic: str, subscription: str) -> None:
        """Delete a subscription and its cursor on every partition."""
        self._run(lambda plans: plans.delete_subscription(topic, subscription))

    def unblock(self, topic: str, subscription: str) -> None:
        """Let a subscription go on that a poison record blocks; the record is skipped."""
        self._run(lambda plans: plans.unblock(topic, subscription))

    def set_failure_policy(
        self, topic: str, subscription: str, failure: FailurePolicy | dict[str, Any]
    ) -> None:
        """Change what happens to records of a subscription that are nacked or not acked in time."""
        self._run(lambda plans: plans.set_failure_policy(topic, subscription, failure))

    def seal(self, topic: str) -> list[int]:
        """Seal what each partition has written so far; below which offset, in partition order."""
        return self._run(lambda plans: plans.seal(topic))

    def open_holes(self, topic: str) -> list[dict[str, Any]]:
        """Offsets of each partition that only the disk of a broker that is away may hold."""
        return self._run(lambda plans: plans.open_holes(topic))

    def accept_loss(self, ends: Mapping[str, int]) -> list[dict[str, Any]]:
        """Give up the open holes of partitions (by name) that begin below an offset."""
        return self._run(lambda plans: plans.accept_loss(ends))

    def storage_status(self, topic: str = "") -> dict[str, Any]:
        """Return where data lies, by topic (or of one), and the bytes and seconds not off the host yet."""
        return self._run(lambda plans: plans.storage_status(topic))

    def cluster(self, op: str, **arguments: Any) -> Any:
        """Ask about a cluster's brokers, or have partitions moved: see ``danube brokers``."""
        return self._run(lambda plans: plans.cluster(op, arguments))

    def status(self) -> dict[str, Any]:
        """The broker's own account of itself."""
        return self._run(lambda plans: plans.status())


def connect(
    url: str = URL_DEFAULT,
    *,
    token: str = "",
    name: str = "",
    timeout: float = 30.0,
    connect_timeout: float = 10.0,
    reconnect_timeout: float | None = 60.0,
) -> Client:
    """A blocking client for ``danube://host:port[,host:port]``, to be used in ``with``.

    ``timeout`` (seconds) bounds requests and sends, ``connect_timeout`` for each address first the dial and
    then the broker's greeting.  After a lost connection the client dials again
    for ``reconnect_timeout`` seconds (None: for ever) before everything that waits fails.
    """
    return Client(
        url,
        token=token,
        name=name,
        timeout=timeout,
        connect_timeout=connect_timeout,
        reconnect_timeout=reconnect_timeout,
    )


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
