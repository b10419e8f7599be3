"""Sums of namespaces and tenants at a worker: what its topics publish and store together, and elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube.broker.partition.sums import Sums
from danube.core.cluster.commands import GrantLease, PutKey, RegisterBroker
from danube.core.metadata.commands import Command
from danube.core.placement.load_report import LoadReport, report_command
from danube.core.placement.shares import Demand, key_of
from danube.core.protocol.native import Kind
from danube.errors import DanubeError, QuotaExceeded
from danube.host import clock
from danube.ipc.region import Region
from danube.ipc.usage import Usage, used
from tests.unit.broker.operations.test_quota_operations import ORDERS, Limited, kinds
from tests.unit.broker_parts import numbered

TEAM, ELSEWHERE = "/default/other", "/system/logs"


class Summed(Limited):
    """Worker 0 of two; the other one only counts."""

    def __init__(self, root: Path, region: Region) -> None:
        super().__init__(root)
        self.region = region
        self.opened = 0
        self.shard.sums = Sums(
            self._open_usage, lambda: self.proposals.state, 1, look=lambda: used(self.region)
        )
        self.router.operations.used_of = self.shard.sums.used
        for topic in (TEAM, ELSEWHERE):
            self.proposals.create(topic)

    def _open_usage(self) -> Usage:
        self.opened += 1
        return Usage(self.region, 0)

    def send(self, handle: int, count: int) -> list[int]:
        self.publish(self.client, numbered(count), handle)
        self.turn()
        return kinds(self)

    def refusal(self, handle: int) -> QuotaExceeded:
        self.publish(self.client, numbered(1), handle)
        error = self.client.only(Kind.ERROR).error
        assert isinstance(error, QuotaExceeded)
        return error

    def commit(self, command: Command) -> None:
        assert not isinstance(self.proposals.apply(command), DanubeError)

    def broker(self, broker_id: int) -> None:
        self.commit(GrantLease(lease_id=broker_id, ttl_ms=10_000))
        self.commit(RegisterBroker(broker_id=broker_id, lease_id=broker_id, native_address=f"b{broker_id}:1"))
        self.commit(PutKey(key=f"/cluster/commands/{broker_id}", value=b"1"))

    def report(self, broker_id: int, name: str, demand: Demand) -> None:
        usage = {str(key_of(name)): demand}
        self.commit(report_command(broker_id, 0, LoadReport(usage=usage)))


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(2, ring_bytes=4096)
    yield made
    made.close()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [10**12]
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now[0])
    return now


@pytest.fixture
def bench(tmp_path: Path, region: Region, at: list[int]) -> Iterator[Summed]:
    made = Summed(tmp_path, region)
    yield made
    made.shard.close()


def test_topics_of_a_namespace_publish_at_its_rate_together(bench: Summed, at: list[int]) -> None:
    bench.limit(max_publish_rate=10)
    first, second, outside = bench.produce("p"), bench.produce("p", TEAM), bench.produce("p", ELSEWHERE)
    assert bench.send(first, 10) == [Kind.PUBLISHED], "as much as is saved"
    assert bench.send(second, 10) == [], "a second is owed: stored, and answered later"
    error = bench.refusal(first)
    assert error.facts == {"limit": 10, "quota": "max_publish_rate", "retry_after_ms": 1_001}
    assert bench.send(outside, 1_000) == [Kind.PUBLISHED], "it is of another namespace"
    at[0] += 1_000_000_000
    bench.shard.tick()
    bench.turn()
    assert kinds(bench) == [Kind.PUBLISHED]
    bench.limit(max_publish_rate=0)
    assert bench.send(second, 1_000) == [Kind.PUBLISHED]
    bench.shard.second()
    assert used(bench.region) == {}, "its slot is free"


def test_what_another_worker_takes_counts(bench: Summed, region: Region) -> None:
    bench.limit(max_publish_bytes=1_000)
    handle = bench.produce("p")
    theirs = Usage(region, 1).slot(key_of("namespace default"))
    bench.shard.second()
    theirs.take(1, 10_000)
    error = bench.refusal(handle)
    assert error.facts["quota"] == "max_publish_bytes" and 8_000 < error.facts["retry_after_ms"] <= 9_001


def test_a_tenant_limits_its_namespaces_together_also_beside_a_smaller_limit_of_one(bench: Summed) -> None:
    bench.limit(max_publish_rate=5)
    bench.ask("put_tenant", name="acme", namespaces=["default", "system"], quota={"max_publish_rate": 20})
    first, outside = bench.produce("p"), bench.produce("p", ELSEWHERE)
    assert bench.send(outside, 40) == [], "it has used what the tenant saved, and owes a second"
    assert bench.refusal(first).facts["limit"] == 20
    bench.ask("delete_tenant", name="acme")
    assert bench.send(first, 5) == [Kind.PUBLISHED, Kind.PUBLISHED], "and what waited for the tenant"
    assert bench.send(outside, 1_000)[-1] == Kind.PUBLISHED


def test_a_namespace_stores_so_many_bytes(bench: Summed, region: Region) -> None:
    first, second = bench.produce("p"), bench.produce("p", TEAM)
    bench.send(first, 10)
    bench.send(second, 10)
    stored = sum(bench.shard.partitions[topic].log.local_bytes for topic in (ORDERS, TEAM))  # type: ignore[union-attr]
    bench.limit(max_storage_bytes=stored + 100)
    bench.shard.second()
    assert bench.send(first, 1) == [Kind.PUBLISHED], "a hundred bytes are left"
    bench.limit(max_storage_bytes=stored)
    bench.shard.second()
    error = bench.refusal(second)
    assert (error.facts["quota"], error.facts["retry_after_ms"]) == ("max_storage_bytes", 1_000)
    assert "namespace default stores" in str(error)
    bench.limit(max_storage_bytes=stored + 10_000)
    bench.shard.second()
    assert bench.send(second, 1) == [Kind.PUBLISHED]
    theirs = Usage(region, 1).slot(key_of("namespace default"))
    theirs.store(10_000)
    bench.shard.second()
    assert bench.refusal(first).facts["limit"] == stored + 10_000, "with those of the other worker"


def test_a_broker_has_its_share_of_a_cluster_and_stored_bytes_of_all_count(bench: Summed) -> None:
    for broker_id in (1, 2):
        bench.broker(broker_id)
    bench.limit(max_publish_rate=100, max_storage_bytes=10_000_000)
    handle = bench.produce("p")
    rate = bench.shard.partitions[ORDERS].publish_rate
    assert rate is not None and rate.sums[0].limits == (50, 0)
    bench.report(2, "namespace default", Demand(10.0, 0.0, False, 0))
    bench.report(1, "namespace default", Demand(50.0, 0.0, True, 0))
    bench.shard.second()
    assert 80 <= rate.sums[0].limits[0] <= 88
    assert bench.send(handle, 1) == [Kind.PUBLISHED]
    bench.report(2, "namespace default", Demand(0.0, 0.0, False, 10_000_000))
    bench.shard.second()
    assert bench.refusal(handle).facts["quota"] == "max_storage_bytes"


def test_where_no_sum_is_limited_nothing_is_kept(bench: Summed) -> None:
    bench.limit(max_publish_rate_per_topic=1_000)
    handle = bench.produce("p")
    bench.send(handle, 1)
    bench.shard.second()
    assert bench.opened == 0
    bench.limit(max_storage_bytes=1 << 40)
    bench.limit(max_storage_bytes=2 << 40)
    assert bench.opened == 1


def test_a_changed_limit_of_a_tenant_holds_within_a_second(bench: Summed) -> None:
    bench.limit(max_publish_rate=5)
    bench.ask("put_tenant", name="acme", namespaces=["default"], quota={"max_publish_rate": 20})
    bench.produce("p")
    rate = bench.shard.partitions[ORDERS].publish_rate
    assert rate is not None and [one.limits[0] for one in rate.sums] == [5, 20]
    bench.ask("put_tenant", name="acme", quota={"max_publish_rate": 30})  # five is the smaller one still
    bench.shard.second()
    assert [one.limits[0] for one in rate.sums] == [5, 30]


def test_policies_name_the_sums(bench: Summed) -> None:
    answer: dict[str, Any] = bench.ask("namespace_policy", namespace="default")
    assert answer["policy"]["max_publish_rate"] == 0
    bench.limit(max_publish_rate=5)
    assert bench.ask("namespace_policy", namespace="default")["effective"]["max_publish_rate"] == 5


def quotas(bench: Summed) -> dict[str, tuple[int, int]]:
    return {f"{row['name']} {row['quota']}": (row["used"], row["limit"]) for row in bench.ask("quotas")}


def test_quotas_tell_rates_and_bytes_over_all_workers_and_brokers(
    bench: Summed, region: Region, at: list[int]
) -> None:
    assert quotas(bench) == {}
    bench.shard.second()
    bench.limit(max_publish_rate=1_000, max_publish_bytes=1 << 20, max_storage_bytes=1 << 30, max_topics=5)
    bench.ask("put_tenant", name="acme", namespaces=["default"], quota={"max_dispatch_rate": 500})
    handle = bench.produce("p")
    assert quotas(bench)["default max_publish_rate"] == (0, 1_000), "nobody has looked yet"
    theirs = Usage(region, 1).slot(key_of("namespace default"))
    for second in range(10):
        bench.shard.second()
        at[0] += 1_000_000_000
        if second >= 3:
            bench.send(handle, 30)
            theirs.take(20, 2_000)
    bench.consume("s", "c", start="earliest", credit=200)
    bench.turn()
    bench.shard.second()
    found = quotas(bench)
    assert found["default max_publish_rate"] == (50, 1_000)
    assert found["default max_topics"] == (2, 5)
    assert found["default max_publish_bytes"][0] > 20 * 100
    hosted = bench.shard.partitions[ORDERS]
    assert hosted.log is not None and found["default max_storage_bytes"][0] == hosted.log.local_bytes
    delivered = used(region)[key_of("tenant acme dispatch")].records
    assert delivered and found["acme max_dispatch_rate"] == (round(delivered / 5), 500)
    for broker_id in (1, 2):
        bench.broker(broker_id)
    bench.report(1, "namespace default", Demand(900.0, 0.0, False, 900))  # its own: the words are newer
    bench.report(2, "namespace default", Demand(100.4, 0.0, False, 300))
    more = quotas(bench)
    assert more["default max_publish_rate"] == (150, 1_000)
    assert more["default max_storage_bytes"][0] == hosted.log.local_bytes + 300
