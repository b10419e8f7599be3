"""A broker in memory behind the client's interface, for tests of the command line alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from danube.client.machine.ack import Ack
from danube.client.machine.admin import SubscriptionInfo, TopicDescription, TopicInfo
from danube.errors import ConnectionFailed, DanubeError, SubscriptionNotFound, TopicExists, TopicNotFound


@dataclass
class StubMessage:
    """A record as a consumer gets it."""

    payload: bytes
    key: str | bytes | None
    attributes: dict[str, str]
    offset: int
    partition: int = 0
    producer_name: str = "p"
    redelivery_count: int = 0
    schema_id: int | None = None
    schema_version: int | None = None
    publish_time: datetime = datetime(2026, 11, 21, 8, 0, 0, 5, tzinfo=UTC)
    acks: list[int] = field(default_factory=list)

    async def ack(self) -> None:
        self.acks.append(self.offset)


class StubBroker:
    """Topics, subscriptions and what was asked of them."""

    def __init__(self) -> None:
        self.topics: dict[str, list[StubMessage]] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.subscriptions: dict[tuple[str, str], int] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.acks: list[int] = []
        self.urls: list[str] = []
        self.fail_after: int | None = None  # records that are accepted before sends fail
        self.failure: Exception = ConnectionFailed("the broker went away")
        self.reachable = True
        self.principal = ""
        self.store: dict[str, Any] | None = None
        self.waits_for: DanubeError | None = None
        self.readable_end: int | None = None

    def put(self, topic: str, *payloads: bytes) -> None:
        for payload in payloads:
            self.add(topic, payload, None, None)

    def add(self, topic: str, payload: bytes, key: Any, attributes: Any) -> int:
        if self.fail_after is not None:
            if self.fail_after == 0:
                raise self.failure
            self.fail_after -= 1
        log = self.topics.setdefault(topic, [])
        log.append(StubMessage(payload, key, dict(attributes or {}), len(log), acks=self.acks))
        return len(log) - 1

    def log(self, topic: str) -> list[StubMessage]:
        if topic not in self.topics:
            raise TopicNotFound(f"topic {topic!r} does not exist", topic=topic)
        return self.topics[topic]

    @contextmanager
    def connect(self, url: str, **options: Any) -> Iterator[StubClient]:
        yield self._client(url)

    @asynccontextmanager
    async def connect_async(self, url: str, **options: Any) -> AsyncIterator[StubClient]:
        client = self._client(url)
        client.admin = AsyncAdmin(self)
        yield client

    def _client(self, url: str) -> StubClient:
        self.urls.append(url)
        if not self.reachable:
            raise ConnectionFailed("connection refused", why="nothing listens there")
        return StubClient(self)


class StubAdmin:
    """The administration interface, without await."""

    def __init__(self, broker: StubBroker) -> None:
        self._broker = broker

    def _info(self, topic: str) -> TopicInfo:
        self._broker.log(topic)
        policy = self._broker.policies.get(topic, {})
        return TopicInfo(
            topic=topic,
            topic_id=2**63 + 5,
            partitions=[topic],
            reliable=policy.get("reliable", True),
            durability=policy.get("durability", "written"),
            policy=policy,
        )

    def create_topic(self, topic: str, **options: Any) -> TopicInfo:
        self._broker.calls.append(("create_topic", topic, options))
        if topic in self._broker.topics:
            raise TopicExists(f"topic {topic!r} exists")
        self._broker.topics[topic] = []
        self._broker.policies[topic] = options
        return self._info(topic)

    def update_topic(self, topic: str, **options: Any) -> TopicInfo:
        self._broker.calls.append(("update_topic", topic, options))
        return self._info(topic)

    def delete_topic(self, topic: str) -> None:
        self._broker.calls.append(("delete_topic", topic))
        self._broker.log(topic)
        del self._broker.topics[topic]

    def list_topics(self, after: str = "", limit: int | None = None, prefix: str = "") -> list[TopicInfo]:
        names = [name for name in sorted(self._broker.topics) if name > after and name.startswith(prefix)]
        return [self._info(topic) for topic in names[:limit]]

    def describe_topic(self, topic: str) -> TopicDescription:
        end = len(self._broker.log(topic))
        facts = {"partition": topic, "start": 0, "high_watermark": end}
        return TopicDescription(topic=self._info(topic), partitions=[facts])

    def list_subscriptions(
        self, topic: str, after: str = "", limit: int | None = None, prefix: str = ""
    ) -> list[SubscriptionInfo]:
        self._broker.log(topic)
        found = sorted(name for one, name in self._broker.subscriptions if one == topic)
        chosen = [name for name in found if name > after and name.startswith(prefix)]
        return [self.describe_subscription(topic, name) for name in chosen[:limit]]

    def describe_subscription(self, topic: str, subscription: str) -> SubscriptionInfo:
        log = self._broker.log(topic)
        if (topic, subscription) not in self._broker.subscriptions:
            raise SubscriptionNotFound(f"subscription {subscription!r} does not exist")
        floor = self._broker.subscriptions[topic, subscription]
        facts = {"partition": topic, "ack_floor": floor, "lag": len(log) - floor}
        return SubscriptionInfo(
            subscription=subscription, mode="shared", lag_records=len(log) - floor, partitions=[facts]
        )

    def subscription_progress(self, topic: str, subscription: str) -> list[dict[str, Any]]:
        return self.describe_subscription(topic, subscription).partitions

    def topic_ends(self, topic: str) -> list[dict[str, Any]]:
        return self.describe_topic(topic).partitions

    def seek(self, topic: str, subscription: str, start: Any) -> None:
        self._broker.calls.append(("seek", topic, subscription, start))
        self.describe_subscription(topic, subscription)
        if isinstance(start, int):
            self._broker.subscriptions[topic, subscription] = start

    def unblock(self, topic: str, subscription: str) -> None:
        self._broker.calls.append(("unblock", topic, subscription))

    def delete_subscription(self, topic: str, subscription: str) -> None:
        self._broker.calls.append(("delete_subscription", topic, subscription))
        self.describe_subscription(topic, subscription)
        del self._broker.subscriptions[topic, subscription]

    def storage_status(self, topic: str) -> dict[str, Any]:
        return {"topics": [], "store": self._broker.store}

    def status(self) -> dict[str, Any]:
        return {"broker": "stub", "connections": 1}


class AsyncAdmin:
    """The same with await."""

    def __init__(self, broker: StubBroker) -> None:
        self._admin = StubAdmin(broker)

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> Any:
            return getattr(self._admin, name)(*arguments, **options)

        return call


class StubClient:
    def __init__(self, broker: StubBroker) -> None:
        self._broker = broker
        self.admin: Any = StubAdmin(broker)
        self.principal = broker.principal

    @asynccontextmanager
    async def producer(self, topic: str, **options: Any) -> AsyncIterator[StubProducer]:
        self._broker.calls.append(("producer", topic, options))
        self._broker.topics.setdefault(topic, [])
        yield StubProducer(self._broker, topic)

    @asynccontextmanager
    async def consumer(self, topic: str, *, subscription: str, **options: Any) -> AsyncIterator[StubConsumer]:
        self._broker.calls.append(("consumer", topic, subscription, options))
        log = self._broker.log(topic)
        start = options["start"]
        first = {"earliest": 0, "latest": len(log)}.get(start, start if isinstance(start, int) else 0)
        first = self._broker.subscriptions.setdefault((topic, subscription), first)
        try:
            yield StubConsumer(self._broker, topic, first)
        finally:
            if options.get("temporary"):
                del self._broker.subscriptions[topic, subscription]


class StubProducer:
    def __init__(self, broker: StubBroker, topic: str) -> None:
        self._broker = broker
        self._topic = topic

    async def send(self, payload: bytes, key: Any = None, attributes: Any = None) -> Ack:
        return Ack(self._broker.add(self._topic, payload, key, attributes), 0, "written")

    async def send_many(
        self, payloads: Sequence[bytes], keys: Any = None, attributes: Any = None
    ) -> list[Ack]:
        self._broker.calls.append(("send_many", len(payloads)))
        count = len(payloads)
        rows = zip(payloads, keys or [None] * count, attributes or [None] * count, strict=True)
        offsets = [self._broker.add(self._topic, *row) for row in rows]
        return [Ack(offsets[0], 0, "written", record_count=count)]


class StubConsumer:
    """Gives what there is, then waits for ever, as a consumer does."""

    def __init__(self, broker: StubBroker, topic: str, first: int) -> None:
        self._broker = broker
        self._messages = broker.topics[topic][first : broker.readable_end]

    async def __aiter__(self) -> AsyncIterator[StubMessage]:
        for message in self._messages:
            yield message
        await asyncio.Event().wait()

    @property
    def waits_for(self) -> DanubeError | None:
        return self._broker.waits_for
