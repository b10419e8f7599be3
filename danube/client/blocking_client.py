"""The blocking client: the names of the asyncio one without await."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from danube.client.ack import Ack
from danube.client.address import URL_DEFAULT, parse_url
from danube.client.admin import (
    AdminPlans,
    Start,
    SubscriptionInfo,
    TopicDescription,
    TopicInfo,
    policy_fields,
)
from danube.client.blocking import BlockingConnection
from danube.client.client import new_session, seconds_as_ns
from danube.client.inbox import Inbox
from danube.client.message import BaseBatch, BaseMessage, reason_of
from danube.client.outbox import BATCH_BYTES, IN_FLIGHT_BYTES, Attributes, Group, Outbox, SendFuture
from danube.client.producer import CLOSE_TIMEOUT_S, raise_first, undelivered
from danube.client.publishing import Outgoing
from danube.client.reply import Plan, all_settled
from danube.client.setup import (
    PREFETCH_BYTES,
    ConsumerOptions,
    ProducerOptions,
    consumer_options,
    open_consumer,
    open_producer,
    producer_options,
)
from danube.core.policy import FailurePolicy
from danube.errors import ClosedError, DanubeError, InvalidArgument, OperationTimeout

T = TypeVar("T")


class Message(BaseMessage, eq=False):
    """A message of the blocking client; ``with message:`` acks on success and nacks on an exception."""

    def ack(self) -> None:
        """Acknowledge; sent with others when the consumer is next asked for a message, or closed."""
        self.ack_nowait()

    def nack(self, delay: float | None = None, reason: str = "") -> None:
        """Give the record back, to be delivered again after ``delay`` seconds (None: the policy's delay)."""
        self.nack_nowait(delay, reason)

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.ack_nowait()
        else:
            self.nack_nowait(reason=reason_of(error))


class Batch(BaseBatch):
    """A batch of the blocking client; ``with batch:`` acks on success and nacks on an exception."""

    def ack(self) -> None:
        """Acknowledge all records; sent when the consumer is next asked for a batch, or closed."""
        self.ack_nowait()

    def nack(self, delay: float | None = None, reason: str = "") -> None:
        """Give all records back, to be delivered again after ``delay`` seconds (None: the policy's delay)."""
        self.nack_nowait(delay, reason)

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.ack_nowait()
        else:
            self.nack_nowait(reason=reason_of(error))


class BlockingSend(SendFuture):
    """The outcome of one send_nowait; ``result()`` waits for it."""

    __slots__ = ("_producer",)

    def __init__(self, group: Group, index: int, producer: Producer) -> None:
        super().__init__(group, index)
        self._producer = producer

    def result(self, timeout: float | None = None) -> Ack:
        """The record's Ack, or the error raised; waits, and sends what is gathered first."""
        if not self.done():
            self._producer._settle(self._group)
            if not self._producer._connection.wait_until(self.done, timeout):
                raise OperationTimeout(f"the send took longer than {timeout:g} s")
        return self._ack()


class Producer:
    """Sends records to a topic.  Made by ``client.producer(...)``; use it in ``with``."""

    def __init__(self, connection: BlockingConnection, options: ProducerOptions) -> None:
        self._connection = connection
        self._options = options
        self._outbox: Outbox | None = None
        self._closed = False

    @property
    def topic(self) -> str:
        return self._options.topic

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def _box(self) -> Outbox:
        self._connection.session.check_usable()
        if self._outbox is None:
            raise ClosedError(
                "the producer is closed" if self._closed else "the producer is not open",
                hint="use it in `with client.producer(...)`",
            )
        return self._outbox

    def open(self) -> Producer:
        """Find or make the topic and open every partition; done by ``with``."""
        if self._outbox is None:
            if self._closed:
                raise ClosedError("the producer is closed", hint="make a new one")
            self._outbox = self._connection.run(open_producer(self._connection.session, self._options))
        return self

    def send(
        self, payload: bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> Ack:
        """Send one record and wait for its acknowledgement."""
        self.ready()
        with self._connection.lock:
            box = self._box
            group, index = box.add(payload, key, attributes)
            box.flush_group()
        return BlockingSend(group, index, self).result()

    def send_many(
        self,
        payloads: Any,
        keys: Sequence[str | bytes | None] | None = None,
        attributes: Sequence[Attributes | None] | Attributes | None = None,
    ) -> list[Ack]:
        """Send many records and wait for all of them; one Ack per batch, in the order of the batches.

        ``payloads`` is a sequence of bytes, a numpy array or a pyarrow binary array.  ``attributes``
        is one mapping per record, or one for all.  Raises the first error; other batches may be
        stored then.
        """
        connection = self._connection
        box = self._box
        sent: list[Outgoing] = []
        batches = box.batches(payloads, keys, attributes)
        while True:
            with connection.lock:
                outgoing = next(batches, None)
                connection.flush()
            if outgoing is None:
                break
            sent.append(outgoing)
            if not box.has_room:
                connection.wait(box.room())
        connection.wait(all_settled(list(sent)))
        return [outgoing.result() for outgoing in sent]

    def send_nowait(
        self, payload: bytes, key: str | bytes | None = None, attributes: Attributes | None = None
    ) -> BlockingSend:
        """Gather one record; it leaves when ``batch_bytes`` are gathered or someone waits.

        There is no loop behind the blocking client: call flush(), ready() or result() to be sure
        that it leaves.  Raises Overloaded when ``max_in_flight_bytes`` are not acknowledged.
        """
        with self._connection.lock:
            group, index = self._box.add(payload, key, attributes)
            if self._connection.session.has_output:
                self._connection.flush()
        return BlockingSend(group, index, self)

    def _settle(self, group: Group) -> None:
        """Send the group if it has not left."""
        with self._connection.lock:
            if self._outbox is not None and self._outbox.group is group:
                self._outbox.flush_group()

    def ready(self) -> None:
        """Wait until there is room for send_nowait."""
        box = self._box
        if not box.has_room:
            with self._connection.lock:
                room = box.room()
            self._connection.wait(room)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far is answered; raise the first failure of a send_nowait
        whose future nobody has looked at."""
        box = self._box
        with self._connection.lock:
            emptied = box.emptied()
        self._connection.wait(emptied, timeout, "flush")
        raise_first(box.take_failures())

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Flush for at most ``timeout`` seconds and close; raise what was not delivered."""
        box, self._outbox = self._outbox, None
        self._closed = True
        if box is None:
            return
        failure: DanubeError | None = None
        connection = self._connection
        try:
            with connection.lock:
                emptied = box.emptied()
            connection.wait(emptied, timeout, "flush")
        except OperationTimeout as error:
            failure = undelivered(box, error)
        finally:
            with connection.lock:
                failures = box.take_failures()
                replies = box.close()
        connection.wait_until(lambda: all(reply.settled for reply in replies), 1.0)
        if failure is not None:
            raise failure
        raise_first(failures)

    def __enter__(self) -> Producer:
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
            error.add_note(f"danube: the producer also failed to deliver: {failure}")

    def __repr__(self) -> str:
        return f"<Producer {self.name!r} of {self.topic}>"


class Consumer:
    """Receives a topic's messages through a subscription.  Made by ``client.consumer(...)``."""

    def __init__(self, connection: BlockingConnection, options: ConsumerOptions) -> None:
        self._connection = connection
        self._options = options
        self._inbox: Inbox[Message, Batch] | None = None
        self._closed = False

    @property
    def topic(self) -> str:
        return self._options.topic

    @property
    def subscription(self) -> str:
        return self._options.subscription

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def active(self) -> bool:
        """False for a failover standby that was given no partition when it subscribed."""
        return any(partition.active for partition in self._box.partitions)

    @property
    def _box(self) -> Inbox[Message, Batch]:
        self._connection.session.check_usable()
        if self._inbox is None:
            raise ClosedError(
                "the consumer is closed" if self._closed else "the consumer is not open",
                hint="use it in `with client.consumer(...)`",
            )
        return self._inbox

    def open(self) -> Consumer:
        """Subscribe to every partition; done by ``with``."""
        if self._inbox is None:
            if self._closed:
                raise ClosedError("the consumer is closed", hint="make a new one")
            plan = open_consumer(self._connection.session, self._options, Message, Batch)
            self._inbox = self._connection.run(plan)
        return self

    def __iter__(self) -> Iterator[Message]:
        inbox = self._box
        while True:
            messages = inbox.messages
            for message in messages:
                yield message
                if inbox.messages is not messages:
                    break  # subscribed anew: the rest of that batch will come again
            else:
                self._advance(inbox, None)

    def _advance(self, inbox: Inbox[Message, Batch], timeout: float | None) -> bool:
        """Wait for another batch of messages; False when time is up."""
        spent = inbox.messages
        return self._connection.wait_until(lambda: inbox.messages is not spent or inbox.advance(), timeout)

    def receive(self, timeout: float | None = None) -> Message:
        """The next message; raise OperationTimeout when none comes within ``timeout`` seconds."""
        inbox = self._box
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._connection.lock:
                message = next(inbox.messages, None)
            if message is not None:
                return message
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._advance(inbox, left):
                raise OperationTimeout(f"no message came within {timeout:g} s")

    def batches(self, max_records: int | None = None, max_wait: float | None = None) -> Iterator[Batch]:
        """Batches of at most ``max_records`` records of one partition.

        With ``max_wait`` (seconds) a batch is handed out when it is full or its first record has
        waited so long; without, as soon as there is one, and nothing is copied to join deliveries.
        """
        if max_records is not None and max_records < 1:
            raise InvalidArgument(f"max_records must be at least 1, not {max_records}")
        inbox, connection = self._box, self._connection
        with connection.lock:
            inbox.begin_batches(max_records)
        wait_ns = int((max_wait or 0) * 1e9)
        batch: Batch | None = None
        due_ns: int | None = None

        def take() -> bool:
            nonlocal batch, due_ns
            before = due_ns
            batch, due_ns = inbox.next_batch(max_records, wait_ns)
            return batch is not None or before != due_ns

        while True:
            timeout_s = None if due_ns is None else max(0.0, (due_ns - connection.session.now_ns()) / 1e9)
            connection.wait_until(take, timeout_s)
            if batch is not None:
                yield batch
                batch = due_ns = None

    def flush(self) -> None:
        """Wait until the broker has stored every acknowledgement given so far."""
        with self._connection.lock:
            replies = self._box.synced()
        for reply in replies:
            self._connection.wait(reply)

    def close(self) -> None:
        """Send the acknowledgements given so far and unsubscribe; the rest goes to other consumers."""
        inbox, self._inbox = self._inbox, None
        self._closed = True
        if inbox is not None:
            with self._connection.lock:
                replies = inbox.close()
            self._connection.wait_until(lambda: all(reply.settled for reply in replies), CLOSE_TIMEOUT_S)

    def __enter__(self) -> Consumer:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r} of {self.topic} subscription={self.subscription!r}>"


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
        self._open: list[Producer | Consumer] = []
        self.admin = Admin(self)

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

    def producer(
        self,
        topic: str,
        name: str | None = None,
        *,
        reliable: bool | None = None,
        durability: str | None = None,
        partitions: int = 0,
        compression: str = "none",
        linger_us: int = 0,
        batch_bytes: int = BATCH_BYTES,
        max_in_flight_bytes: int = IN_FLIGHT_BYTES,
        timeout: float | None = None,
    ) -> Producer:
        """A producer of ``topic``, to be used in ``with``; the topic is made when it is missing."""
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
        return self._remember(Producer(self._live, options))

    def consumer(
        self,
        topic: str,
        subscription: str,
        mode: str = "shared",
        *,
        start: Start = "latest",
        name: str | None = None,
        prefetch_records: int | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        filters: Sequence[str] = (),
        max_unacked: int = 0,
        failure: FailurePolicy | dict[str, Any] | None = None,
    ) -> Consumer:
        """A consumer of ``topic`` through ``subscription``, to be used in ``with``."""
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
        return self._remember(Consumer(self._live, options))

    def _remember(self, opened: Any) -> Any:
        self._open = [one for one in self._open if not one._closed]
        self._open.append(opened)
        return opened

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
        opened, self._open = self._open, []
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
        self.close()

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
        max_record_bytes: int | None = None,
        max_unacked: int | None = None,
        failure: FailurePolicy | dict[str, Any] | None = None,
    ) -> TopicInfo:
        """Make a topic; raise TopicExists when there is one."""
        policy = policy_fields(
            reliable,
            durability,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            max_record_bytes=max_record_bytes,
            max_unacked=max_unacked,
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
        max_record_bytes: int | None = None,
        max_unacked: int | None = None,
        failure: FailurePolicy | dict[str, Any] | None = None,
    ) -> TopicInfo:
        """Change the given fields of a topic's policy."""
        policy = policy_fields(
            None,
            durability,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            max_record_bytes=max_record_bytes,
            max_unacked=max_unacked,
            failure=failure,
        )
        return self._run(lambda plans: plans.update_topic(topic, policy))

    def list_topics(self, namespace: str | None = None) -> list[TopicInfo]:
        """All topics, or those of one namespace."""
        return self._run(lambda plans: plans.list_topics(namespace))

    def topic(self, topic: str) -> TopicInfo:
        """One topic with its policy."""
        return self._run(lambda plans: plans.topic(topic))

    def describe_topic(self, topic: str) -> TopicDescription:
        """One topic, and the state of each of its partitions."""
        return self._run(lambda plans: plans.describe_topic(topic))

    def list_subscriptions(self, topic: str) -> list[SubscriptionInfo]:
        """The topic's subscriptions by name."""
        return self._run(lambda plans: plans.list_subscriptions(topic))

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

    ``timeout`` (seconds) bounds requests and sends.  After a lost connection the client dials again
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
