"""Deliveries of a namespace or tenant at a worker: together they keep one rate, and every record comes."""

from __future__ import annotations

import pytest

from danube.core.placement.shares import Demand
from danube.core.protocol.native import Kind, Nack
from danube.ipc.region import Region
from danube.ipc.usage import Usage, used
from tests.unit.broker.operations.test_quota_operations import ORDERS
from tests.unit.broker.operations.test_sums import ELSEWHERE, TEAM, Summed
from tests.unit.broker.operations.test_sums import at as at
from tests.unit.broker.operations.test_sums import bench as bench
from tests.unit.broker.operations.test_sums import region as region
from tests.unit.broker_parts import numbered

TICK_NS = 20_000_000
NAME = "namespace default"


def fill(bench: Summed, topic: str, count: int) -> None:
    bench.publish(bench.client, numbered(count), bench.produce("p", topic))
    bench.turn()
    bench.client.take()


def reading(bench: Summed, topic: str, subscription: str = "s", credit: int = 10_000) -> int:
    """Open a consumer from the topic's begin; its handle."""
    handle = bench.consume(subscription, f"c{bench.handle}", topic, credit=credit, start="earliest")
    return handle


def ran(bench: Summed, at: list[int], seconds: float) -> dict[int, int]:
    """Let time pass by ticks; how many records each handle got."""
    got: dict[int, int] = {}
    end_ns = at[0] + int(seconds * 1e9)
    while True:
        bench.turn()
        for frame in bench.client.take(Kind.DELIVER):
            got[frame.handle] = got.get(frame.handle, 0) + len(frame.records)
        if at[0] >= end_ns:
            return got
        at[0] += TICK_NS
        bench.shard.tick()


@pytest.mark.parametrize("times, seconds", [(1, 0.0), (1.2, 0.2), (10, 9.2)])
def test_at_the_rate_all_come_at_once_and_what_is_more_comes_later(
    bench: Summed, at: list[int], times: float, seconds: float
) -> None:
    bench.limit(max_dispatch_rate=10)
    fill(bench, ORDERS, int(10 * times))
    handle = reading(bench, ORDERS)
    before = ran(bench, at, max(0.0, seconds - 0.4))  # a tick later than it is due, and a tick more
    later = ran(bench, at, min(0.4, seconds))
    assert before.get(handle, 0) + later.get(handle, 0) == 10 * times
    assert before[handle] < 10 * times or not seconds


def test_subscriptions_of_all_topics_of_a_namespace_share_its_rate(bench: Summed, at: list[int]) -> None:
    bench.limit(max_dispatch_rate=100)
    handles = []
    for topic in (ORDERS, TEAM):
        fill(bench, topic, 1_000)
        handles += [reading(bench, topic, "s"), reading(bench, topic, "t")]
    fill(bench, ELSEWHERE, 2_000)
    outside = reading(bench, ELSEWHERE)
    got = ran(bench, at, 10)
    assert got.pop(outside) == 2_000, "it is of another namespace"
    assert 950 <= sum(got.values()) <= 1_110
    assert all(got[handle] >= 200 for handle in handles), "a second was saved, which the first one had"
    bench.shard.second()
    slot = used(bench.region)
    assert [one.held > 0 and one.records >= sum(got.values()) for one in slot.values()] == [True]
    bench.limit(max_dispatch_rate=0)
    rest = ran(bench, at, 0)
    assert all(got[handle] + rest[handle] >= 899 for handle in handles), "the client dropped 101 in between"
    assert sum(got.values()) + sum(rest.values()) >= 4_000 - 101
    bench.shard.second()
    assert used(bench.region) == {}, "its slot is free"


def test_publishing_is_not_limited_by_it(bench: Summed) -> None:
    bench.limit(max_dispatch_rate=1)
    handle = bench.produce("p")
    assert bench.shard.partitions[ORDERS].publish_rate is None
    assert bench.send(handle, 1_000) == [Kind.PUBLISHED]


def test_a_tenants_bytes_count_and_those_of_redeliveries(bench: Summed, at: list[int]) -> None:
    bench.ask("put_tenant", name="acme", namespaces=["default"], quota={"max_dispatch_bytes": 1_000})
    fill(bench, ORDERS, 100)
    handle = reading(bench, ORDERS)
    first = ran(bench, at, 3)[handle]
    assert first < 100
    bench.request(bench.client, Kind.NACK, Nack([(0, first)], 0, "later"), handle)
    assert ran(bench, at, 30)[handle] == 100, "those that were given back, and the rest"
    [one] = used(bench.region).values()
    assert one.records == 100 + first and 3_000 <= one.size_bytes <= 33_000


def test_another_worker_and_another_broker_have_their_part(
    bench: Summed, region: Region, at: list[int]
) -> None:
    bench.limit(max_dispatch_rate=100)
    fill(bench, ORDERS, 1_000)
    handle = reading(bench, ORDERS)
    [key] = used(region)
    theirs = Usage(region, 1).slot(key)
    bench.shard.second()
    theirs.take(400, 0)
    assert 195 <= ran(bench, at, 5)[handle] <= 215, "four of the seconds were the other worker's"
    for broker_id in (1, 2):
        bench.broker(broker_id)
    bench.report(1, f"{NAME} dispatch", Demand(10.0, 0.0, True))
    bench.report(2, f"{NAME} dispatch", Demand(60.0, 0.0, True))
    bench.shard.second()
    [total] = bench.shard.partitions[ORDERS].dispatch_limits.sums
    assert 20 <= total.limits[0] <= 40
    share = total.limits[0]
    assert share * 9 <= ran(bench, at, 10)[handle] <= share * 11


def test_a_reader_without_credit_takes_nobodys_turn(bench: Summed, at: list[int]) -> None:
    bench.limit(max_dispatch_rate=100)
    fill(bench, ORDERS, 2_000)
    stuck, other = reading(bench, ORDERS, "s", credit=5), reading(bench, ORDERS, "t")
    got = ran(bench, at, 10)
    assert got[stuck] == 5 and got[other] >= 1_000


def test_records_that_are_not_kept_wait_in_their_queue(bench: Summed, at: list[int]) -> None:
    topic = "/default/live"
    bench.proposals.create(topic, reliable=False, durability="memory")
    handle = reading(bench, topic)
    bench.limit(max_dispatch_rate=100)
    producer = bench.produce("p", topic)
    for _ in range(30):
        bench.publish(bench.client, numbered(10), producer)
    got = ran(bench, at, 1)[handle]
    assert 180 <= got <= 230
    assert got + ran(bench, at, 2)[handle] == 300
    bench.limit(max_dispatch_rate=0)
    bench.publish(bench.client, numbered(500), producer)
    assert ran(bench, at, 0)[handle] == 500


def test_keyed_records_that_are_not_kept_wait_for_consumers_with_credit(bench: Summed, at: list[int]) -> None:
    topic = "/default/live"
    bench.proposals.create(topic, reliable=False, durability="memory")
    bench.limit(max_dispatch_rate=100)
    bench.consume("k", "a", topic, mode="key_shared", credit=40)
    bench.consume("k", "b", topic, mode="key_shared", credit=0)
    producer = bench.produce("p", topic)
    for _ in range(20):
        bench.publish(bench.client, numbered(10, keys=[b"%d" % number for number in range(10)]), producer)
    assert sum(ran(bench, at, 3).values()) == 40


def test_a_changed_policy_reaches_the_tenants_sum(bench: Summed) -> None:
    bench.limit(max_dispatch_rate=5)
    bench.ask("put_tenant", name="acme", namespaces=["default"], quota={"max_publish_rate": 20})
    bench.produce("p")
    hosted = bench.shard.partitions[ORDERS]
    assert [one.limits[0] for one in hosted.dispatch_limits.sums] == [5]
    bench.ask("put_tenant", name="acme", quota={"max_dispatch_rate": 30})
    assert [one.limits[0] for one in hosted.dispatch_limits.sums] == [5, 30]
    assert hosted.publish_rate is not None and [one.limits[0] for one in hosted.publish_rate.sums] == [20]
