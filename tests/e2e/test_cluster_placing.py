"""Three whole brokers own partitions: a dead one's are soon another's, and what is asked to move moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from danube import sync
from tests.broker_cluster import BrokerCluster
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.test_cluster_brokers import danube

FAILOVER_S = 3.0
SLACK_S = 2.0  # of a machine that runs other tests as well
PARTITIONS = 6


def rows(client: Any) -> dict[str, dict[str, Any]]:
    """By native address."""
    return {row["native_address"]: row for row in client.admin.cluster("brokers")}


def counts(client: Any) -> list[int]:
    return sorted(row["partitions"] for row in rows(client).values())


def native(broker: BrokerProcess) -> str:
    return broker.address.partition("://")[2]


def test_partitions_of_a_dead_broker_have_other_owners_within_the_bound(tmp_path: Path) -> None:
    with BrokerCluster(tmp_path, 3) as cluster, sync.connect(cluster.brokers[0].address) as client:
        client.admin.create_topic("/default/a", partitions=PARTITIONS, reliable=False)
        wait_until(lambda: counts(client) == [2, 2, 2], 5, "partitions are spread")
        found = rows(client)
        assert sorted(row["role"] for row in found.values()) == ["follower", "follower", "leader"]
        # The leader where that is another one: the bound holds for both.
        victim = max(cluster.brokers[1:], key=lambda one: found[native(one)]["role"] == "leader")
        died_s = time.monotonic()
        victim.kill()

        def taken_over() -> bool:
            now = rows(client)
            left = sum(row["partitions"] for place, row in now.items() if place != native(victim))
            return not now[native(victim)]["alive"] and left == PARTITIONS

        wait_until(taken_over, 20, "others own all partitions")
        assert time.monotonic() - died_s < FAILOVER_S + SLACK_S
        balance = client.admin.cluster("balance")
        assert balance["broker_count"] == 2 and balance["unowned"] == 0


def test_brokers_are_emptied_and_filled_again(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    options = ["--storage", f"file://{tmp_path / 'store'}"]
    with BrokerCluster(tmp_path, 3, arguments=options) as cluster:
        address = cluster.brokers[0].address
        ask: Callable[..., Any] = lambda *words: danube(*words, "-s", address)  # noqa: E731
        with sync.connect(address) as client:
            client.admin.create_topic("/default/a", partitions=PARTITIONS)
            wait_until(lambda: counts(client) == [2, 2, 2], 5, "partitions are spread")
            victim = rows(client)[native(cluster.brokers[1])]["broker_id"]
            assert ask("brokers", "unload", victim, "--dry-run")["total"] == 2
            ask("brokers", "unload", victim, "--wait", "--timeout", "20s")
            assert counts(client) == [0, 3, 3]
            assert ask("brokers", "activate", victim)["mode"] == "active"
            assert ask("brokers", "rebalance")["started"]
            wait_until(lambda: counts(client) == [2, 2, 2], 10, "the round is done")
            before = {one: cluster.ownership("/default/a", one).broker_id for one in range(PARTITIONS)}
            assert ask("topics", "unload", "a-part-3")["partitions"] == 1
            moved = lambda: cluster.ownership("/default/a", 3).broker_id not in (0, before[3])  # noqa: E731
            wait_until(moved, 10, "the partition has another owner")
