"""Limits of a namespace on one host and over three brokers: at the limit, at one more, and at ten times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count, cycle
from typing import Any

import pytest

from danube import sync
from danube.core.metadata.policies import LIMITS, SUMS_OF_ALL
from danube.errors import (
    DanubeError,
    LimitExceeded,
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
_NUMBERS = count()

Attempt = Callable[["Namespace", sync.Client, int], None]


class Namespace:
    """A namespace of one test, and clients of all brokers of a site, which take turns."""

    def __init__(self, clients: list[sync.Client], name: str) -> None:
        self.clients = clients
        self.name = name
        self.topic = f"/{name}/wide"
        self.handles = ExitStack()
        clients[0].admin.create_namespace(name)

    def set(self, **policy: Any) -> None:
        self.clients[0].admin.set_namespace_policy(self.name, **policy)
        for client in self.clients:
            wait_until(partial(self._knows, client, policy), 30, "the policy is known there")

    def _knows(self, client: sync.Client, policy: dict[str, Any]) -> bool:
        found = client.admin.namespace_policy(self.name)["policy"]
        return all(found[name] == value for name, value in policy.items())

    def make_topic(self, **policy: Any) -> None:
        """Make a topic with partitions at every broker, which every client can use."""
        self.clients[0].admin.create_topic(self.topic, partitions=PARTITIONS, **policy)
        for client in self.clients:
            client.producer(self.topic).open().close()


@pytest.fixture(scope="module", params=[1, 3], ids=["one host", "three brokers"])
def clients(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[sync.Client]]:
    place = tmp_path_factory.mktemp("limits")
    with ExitStack() as stack:
        if request.param == 1:
            brokers = Brokers(place)
            stack.callback(brokers.kill)
            addresses = [brokers.make(workers=2).address]
        else:
            cluster = stack.enter_context(BrokerCluster(place, request.param))
            addresses = [one.address for one in cluster.brokers]
        yield [stack.enter_context(sync.connect(one)) for one in addresses]


@pytest.fixture
def namespace(clients: list[sync.Client]) -> Iterator[Namespace]:
    made = Namespace(clients, f"n{next(_NUMBERS)}")
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
