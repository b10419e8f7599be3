"""Limits of a namespace on one host and over three brokers: at the limit, at one more, and at ten times."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import combinations, count, cycle
from typing import Any

import pytest

from danube import sync
from danube.core.batch.columns import key_partitions
from danube.core.metadata.policies import LIMITS, SUMS_OF_ALL
from danube.errors import (
    DanubeError,
    LimitExceeded,
    NotFound,
    OperationTimeout,
    PolicyMismatch,
    QuotaExceeded,
    RecordTooLarge,
    TopicNotFound,
)
from tests.broker_cluster import BrokerCluster
from tests.broker_process import Brokers, wait_until

LIMIT = 3
TIMES = 10
PARTITIONS = 6
STORED_BYTES = 1_000_000
RECORD_BYTES = 1_000
_CANDIDATES = [b"%d" % number for number in range(100)]
_PLACES = key_partitions(_CANDIDATES, PARTITIONS).tolist()
KEYS = [_CANDIDATES[_PLACES.index(place)] for place in range(PARTITIONS)]  # one of each partition
_NUMBERS = count()

Attempt = Callable[["Namespace", sync.Client, int], None]


class Namespace:
    """A namespace of one test, and clients of all brokers of a site, which take turns."""

    def __init__(self, clients: list[sync.Client], addresses: list[str], name: str) -> None:
        self.clients = clients
        self._addresses = cycle(addresses)
        self.name = name
        self.topic = f"/{name}/wide"
        self.handles = ExitStack()
        clients[0].admin.create_namespace(name)

    def set(self, **policy: Any) -> None:
        self.clients[0].admin.set_namespace_policy(self.name, **policy)
        for client in self.clients:
            wait_until(partial(self._knows, client, policy), 30, "the policy is known there")

    def _knows(self, client: sync.Client, policy: dict[str, Any]) -> bool:
        try:
            found = client.admin.namespace_policy(self.name)["policy"]
        except NotFound:  # the namespace itself is new
            return False
        return all(found[name] == value for name, value in policy.items())

    def make_topic(self, name: str = "wide", **policy: Any) -> str:
        """Make a topic with partitions at every broker, which every client can use."""
        topic = f"/{self.name}/{name}"
        self.clients[0].admin.create_topic(topic, partitions=PARTITIONS, **policy)
        for client in self.clients:
            client.producer(topic).open().close()
        return topic

    def connect(self) -> sync.Client:
        """One more client, of whichever broker's turn it is."""
        return self.handles.enter_context(sync.connect(next(self._addresses), reconnect_timeout=None))

    def of_partitions(self, topic: str, name: str) -> list[int]:
        return [int(one[name]) for one in self.clients[0].admin.describe_topic(topic).partitions]


@pytest.fixture(scope="module", params=[1, 3], ids=["one host", "three brokers"])
def addresses(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    place = tmp_path_factory.mktemp("limits")
    with ExitStack() as stack:
        if request.param == 1:
            brokers = Brokers(place)
            stack.callback(brokers.kill)
            yield [brokers.make(workers=2).address]
        else:
            cluster = stack.enter_context(BrokerCluster(place, request.param))
            yield [one.address for one in cluster.brokers]


@pytest.fixture(scope="module")
def clients(addresses: list[str]) -> Iterator[list[sync.Client]]:
    with ExitStack() as stack:
        # Who is not used for a minute has lost its connection: it makes another one, however late.
        yield [stack.enter_context(sync.connect(one, reconnect_timeout=None)) for one in addresses]


@pytest.fixture
def namespace(clients: list[sync.Client], addresses: list[str]) -> Iterator[Namespace]:
    made = Namespace(clients, addresses, f"n{next(_NUMBERS)}")
    with made.handles:
        yield made


def topic(namespace: Namespace, client: sync.Client, number: int) -> None:
    client.admin.create_topic(f"/{namespace.name}/t{number}")


def subject(namespace: Namespace, client: sync.Client, number: int) -> None:
    client.schemas.register(f"/{namespace.name}/s{number}", "string", "")


def producer(namespace: Namespace, client: sync.Client, number: int) -> None:
    namespace.handles.enter_context(client.producer(namespace.topic, f"p{number}"))


def subscription(namespace: Namespace, client: sync.Client, number: int) -> None:
    namespace.handles.enter_context(client.consumer(namespace.topic, f"s{number}"))


def consumer(namespace: Namespace, client: sync.Client, number: int) -> None:
    namespace.handles.enter_context(client.consumer(namespace.topic, f"s{number % 2}"))


def consumer_of_one(namespace: Namespace, client: sync.Client, number: int) -> None:
    namespace.handles.enter_context(client.consumer(namespace.topic, "s"))


COUNTED: dict[str, Attempt] = {
    "max_topics": topic,
    "max_partitions": topic,
    "max_subjects": subject,
    "max_producers_per_topic": producer,
    "max_subscriptions_per_topic": subscription,
    "max_consumers_per_topic": consumer,
    "max_consumers_per_subscription": consumer_of_one,
}
ELSEWHERE = {  # tests of rates and bytes, and of what has no number of things
    *SUMS_OF_ALL, "max_subscription_dispatch_rate", "max_message_size", "max_publish_rate_per_topic",
    "max_publish_bytes_per_topic", "max_storage_bytes_per_topic", "retention_max_ms", "max_unacked",
}  # fmt: skip


def test_every_limit_is_here_or_elsewhere() -> None:
    assert {*COUNTED} | ELSEWHERE == {*LIMITS}


@pytest.mark.parametrize("quota", COUNTED)
def test_as_many_as_the_limit_and_never_more(namespace: Namespace, quota: str) -> None:
    if "_per_" in quota:
        namespace.make_topic()
    namespace.set(**{quota: LIMIT})
    made: list[int] = []
    turns = cycle(namespace.clients)
    for number in range(TIMES * LIMIT):
        try:
            COUNTED[quota](namespace, next(turns), number)
            made.append(number)
        except LimitExceeded as error:
            assert error.facts["limit"] == LIMIT and error.facts["quota"] == quota
    assert made == [*range(LIMIT)], "the first ones, by whichever broker"
    namespace.set(**{quota: LIMIT + 1})
    COUNTED[quota](namespace, namespace.clients[-1], TIMES * LIMIT)
    for client in namespace.clients:
        with pytest.raises(LimitExceeded):
            COUNTED[quota](namespace, client, TIMES * LIMIT + 1)


def test_records_are_as_large_as_the_limit_and_no_larger(namespace: Namespace) -> None:
    namespace.make_topic()
    namespace.set(max_message_size=100)
    for client in namespace.clients:
        with client.producer(namespace.topic) as one:
            for size_bytes in (101, 1_000):
                with pytest.raises(RecordTooLarge):
                    one.send(b"x" * size_bytes)
            one.send(b"x" * 100)


def test_demands_hold_at_every_broker(namespace: Namespace) -> None:
    namespace.make_topic()
    for demand in ({"durability_min": "fsync"}, {"schema_required": True}):
        namespace.set(**demand)
        for client in namespace.clients:
            with pytest.raises(PolicyMismatch):
                client.producer(namespace.topic).open()
        namespace.set(**{name: type(value)() for name, value in demand.items()})
    namespace.set(auto_create=False)
    for client in namespace.clients:
        with pytest.raises(TopicNotFound):
            client.producer(f"/{namespace.name}/missing").open()
        client.producer(namespace.topic).open().close()


@pytest.mark.parametrize("demand", [{"durability_min": "fsync"}, {"schema_required": True}], ids=str)
def test_a_demand_that_comes_later_ends_producers_at_every_broker(
    namespace: Namespace, demand: dict[str, Any]
) -> None:
    namespace.make_topic()
    opened = [namespace.handles.enter_context(one.producer(namespace.topic)) for one in namespace.clients]
    for one in opened:
        one.send_many([b"x"] * PARTITIONS)
    namespace.set(**demand)
    for one in opened:
        with pytest.raises(PolicyMismatch):
            for _ in range(300):  # the owners have read it when it is known there, or a moment later
                one.send(b"y")
                time.sleep(0.1)


def stored(client: sync.Client, namespace: Namespace) -> int:
    [used] = [one["used"] for one in client.admin.quotas() if one["name"] == namespace.name]
    return int(used)


def test_stored_bytes_of_a_namespace_end_near_their_limit_at_every_broker(namespace: Namespace) -> None:
    namespace.make_topic()
    namespace.set(max_storage_bytes=STORED_BYTES)
    first, *_ = clients = namespace.clients
    with first.producer(namespace.topic) as fast:
        for _ in range(19):
            fast.send_many([b"x" * RECORD_BYTES] * (STORED_BYTES // RECORD_BYTES // 20))
    wait_until(lambda: stored(first, namespace) >= 0.9 * STORED_BYTES, 60, "all of it is reported")
    producers = [namespace.handles.enter_context(one.producer(namespace.topic, timeout=2)) for one in clients]
    refusals: list[DanubeError] = []  # in a row, by whichever owner
    turns = cycle(producers)
    for _ in range(900):
        try:
            next(turns).send(b"x" * RECORD_BYTES)
            refusals = []
        except (QuotaExceeded, OperationTimeout) as error:  # a connection rests after a refusal
            refusals.append(error)
        if len(refusals) == PARTITIONS:
            break
        time.sleep(0.2)  # 5 kB/s: reports may be as late as 20 s
    assert "max_storage_bytes" in [one.facts.get("quota") for one in refusals]
    for client in clients:
        wait_until(lambda one=client: stored(one, namespace) >= STORED_BYTES, 60, "it is told everywhere")  # type: ignore[misc]
        assert stored(client, namespace) <= 1.1 * STORED_BYTES


# -- what a topic stores --------------------------------------------------------------------------------


class Hasty:
    """Who has less time than a refusal asks for is told at once: of one partition, on its own connection."""

    def __init__(self, namespace: Namespace, topic: str, partition: int) -> None:
        self._key = KEYS[partition]
        self._producer = namespace.handles.enter_context(namespace.connect().producer(topic, timeout=0.9))

    def send(self, count: int = 1, size_bytes: int = 0) -> None:
        self._producer.send_many([b"x" * size_bytes] * count, keys=[self._key] * count)

    def refused(self, quota: str) -> None:
        for _ in range(300):
            try:
                self.send()
            except QuotaExceeded as error:
                assert error.facts["quota"] == quota
                return
            except OperationTimeout:
                continue
            time.sleep(0.2)  # a partition is looked at once a second
        raise AssertionError(f"{self._producer.topic} takes what is beyond {quota}")


def test_a_topic_stores_as_much_as_its_limit_and_no_more(namespace: Namespace) -> None:
    """Every owner has looked at ``below`` when each partition of ``beyond`` is refused: it looks at all."""
    quota, first = "max_storage_bytes_per_topic", namespace.clients[0]
    below, beyond = namespace.make_topic("below"), namespace.make_topic("beyond")
    for topic, times in ((below, 10), (beyond, 11)):
        with first.producer(topic) as producer:
            for _ in range(times):
                producer.send_many([b"x" * RECORD_BYTES] * 10 * PARTITIONS, keys=KEYS * 10)
    share = max(namespace.of_partitions(below, "local_bytes")) + 1
    assert min(namespace.of_partitions(beyond, "local_bytes")) >= share
    namespace.set(**{quota: share * PARTITIONS})
    for partition in range(PARTITIONS):
        Hasty(namespace, beyond, partition).refused(quota)
    with first.producer(below) as producer:
        producer.send_many([b""] * PARTITIONS, keys=KEYS)  # each has a byte left
    hasty = [Hasty(namespace, below, partition) for partition in range(PARTITIONS)]
    for one in hasty:
        one.refused(quota)
    kept = namespace.of_partitions(below, "local_bytes")
    assert share <= min(kept) and max(kept) <= 1.1 * share
    for one in hasty:
        with pytest.raises((QuotaExceeded, OperationTimeout)):  # its connection rests after a refusal
            one.send(TIMES * share // RECORD_BYTES, RECORD_BYTES)
    assert namespace.of_partitions(below, "local_bytes") == kept


# -- rates of a topic and of a subscription ---------------------------------------------------------------

RATE = 600  # of a topic, and of each subscription
BATCH = RATE // 2  # all partitions have their share of it
SETTLED_S, WINDOW_S, PATIENCE_S = 5.0, 10.0, 90.0
ERROR = 0.1
HISTORY = int(RATE * (PATIENCE_S + 10))


class Flows:
    """Publishers and readers of topics, and how much of each has passed by the time."""

    def __init__(self, namespace: Namespace, pool: ThreadPoolExecutor) -> None:
        self._namespace, self._pool = namespace, pool
        self.begin_s = time.monotonic()
        self.published, self.read = threading.Event(), threading.Event()  # it is enough
        self.sent, self.got = Counter[str](), Counter[str]()
        self.publishers: list[Future[None]] = []
        self.readers: list[Future[None]] = []
        self.samples: list[tuple[float, Counter[str]]] = []

    def publish(self, topic: str, per_second: float) -> None:
        """Want this rate; what is not taken in time is wanted later."""
        self.publishers.append(self._pool.submit(self._publish, self._namespace.connect(), topic, per_second))

    def _publish(self, client: sync.Client, topic: str, per_second: float) -> None:
        with client.producer(topic, timeout=PATIENCE_S) as producer:
            due_s = time.monotonic()
            while not self.published.is_set():
                producer.send_many([b"x"] * BATCH, keys=KEYS * (BATCH // PARTITIONS))
                self.sent[topic] += BATCH  # one publisher of each topic whose sum is of interest
                due_s += BATCH / per_second
                self.published.wait(max(0.0, due_s - time.monotonic()))

    def consume(self, topic: str) -> None:
        self.readers.append(self._pool.submit(self._consume, self._namespace.connect(), topic))

    def _consume(self, client: sync.Client, topic: str) -> None:
        with client.consumer(topic, "s", start="earliest") as consumer:
            while not self.read.is_set():
                with suppress(OperationTimeout):
                    consumer.receive(timeout=0.5).ack()
                    self.got[topic] += 1

    def stored(self, topic: str) -> int:
        return sum(self._namespace.of_partitions(topic, "high_watermark"))

    def sample(self, topics: list[str]) -> None:
        counts = Counter({f"delivered {topic}": count for topic, count in self.got.items()})
        counts |= Counter({f"stored {topic}": self.stored(topic) for topic in topics})
        self.samples.append((time.monotonic() - self.begin_s, counts))
        for flow, passed in counts.items():
            # A second is saved, another one may be owed, and a batch of each partition passes beyond that.
            assert passed <= RATE * (self.samples[-1][0] + 2) + BATCH, flow

    def steady(self, flow: str) -> bool:
        """Whether its rate was what it may be, over the seconds of some window behind the first ones."""
        seen = [(at_s, counts[flow]) for at_s, counts in self.samples if at_s >= SETTLED_S]
        return any(
            abs((later - before) / (RATE * (end_s - start_s)) - 1) <= ERROR
            for (start_s, before), (end_s, later) in combinations(seen, 2)
            if end_s - start_s >= WINDOW_S
        )

    def stop(self) -> None:
        self.published.set()
        self.read.set()


def test_rates_of_topics_and_subscriptions_are_what_they_may_be(namespace: Namespace) -> None:
    """Who wants the limit, or one more, gets all; who wants ten times as much gets the limit."""
    equal, more, tenfold, history = topics = [
        namespace.make_topic(name) for name in ("equal", "more", "tenfold", "history")
    ]
    with namespace.clients[0].producer(history) as producer:
        producer.send_many([b"x"] * HISTORY, keys=KEYS * (HISTORY // PARTITIONS))
    namespace.set(max_publish_rate_per_topic=RATE, max_subscription_dispatch_rate=RATE)
    with ThreadPoolExecutor(TIMES + 5) as pool, ExitStack() as stack:
        flows = Flows(namespace, pool)
        stack.callback(flows.stop)
        for topic in (equal, more, history):
            flows.consume(topic)
        for topic, times, per_second in ((equal, 1, RATE), (more, 1, RATE + 1), (tenfold, TIMES, RATE)):
            for _ in range(times):
                flows.publish(topic, per_second)
        wanted = [f"stored {topic}" for topic in topics[:3]]
        wanted += [f"delivered {topic}" for topic in (equal, more, history)]
        while not all(map(flows.steady, wanted)):
            assert time.monotonic() - flows.begin_s < PATIENCE_S, [*filter(flows.steady, wanted)]
            time.sleep(1)
            flows.sample(topics[:3])
        flows.published.set()
        for one in flows.publishers:
            one.result(PATIENCE_S)
        for topic in (equal, more):  # nothing of it is lost, or comes twice
            assert flows.stored(topic) == flows.sent[topic]
            wait_until(lambda one=topic: flows.got[one] >= flows.sent[one], PATIENCE_S, "all of it comes")  # type: ignore[misc]
            assert flows.got[topic] == flows.sent[topic]
        flows.read.set()
        for one in flows.readers:
            one.result(PATIENCE_S)
