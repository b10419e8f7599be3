"""How loads are measured, where partitions are placed and what is moved: tables of cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from danube.core.cluster.commands import AssignPartitions, PutKey, UnloadPartitions
from danube.core.placement.balance import (
    LEVELS,
    STRATEGIES,
    BalanceSettings,
    Imbalance,
    imbalance,
    measure,
    place,
)
from danube.core.placement.duties import ClusterView
from danube.core.placement.load_report import LOAD_PREFIX, LoadReport
from danube.core.placement.partition_table import PartitionTable
from tests.unit.cluster_site import Site

MIB = 1 << 20


def outlook(site: Site, settings: BalanceSettings | None = None) -> ClusterView:
    return ClusterView(site.state, PartitionTable.of(site.state), settings or site.settings)


def owned(counts: list[int], settings: BalanceSettings) -> Site:
    """Brokers 1, 2, ... that own so many topics each."""
    site = Site(settings, brokers=len(counts))
    for broker_id, count in enumerate(counts, 1):
        for number in range(count):
            record = site.topic(f"b{broker_id}-{number}")
            site.do(AssignPartitions(broker_id=broker_id, partitions=((record.topic_id, 0, 0),)))
    assert list(site.counts().values()) == counts
    return site


def loads_of(site: Site, strategy: str, **settings: object) -> list[float]:
    """By broker id."""
    found = outlook(site, replace(BalanceSettings(strategy=strategy), **settings))  # type: ignore[arg-type]
    by_broker = zip(found.table.broker_ids, found.loads.load.tolist(), strict=True)
    return [round(load, 1) for _, load in sorted(by_broker)]


# -- loads ---------------------------------------------------------------------------------------


def test_fair_counts() -> None:
    site = owned([4, 2, 0], BalanceSettings(strategy="fair"))
    assert loads_of(site, "fair") == [4, 2, 0]
    assert outlook(site).imbalance == Imbalance(3, 2.0, pytest.approx((8 / 3) ** 0.5), 4.0, 0.0)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0, 0, 0], [100, 50, 0]),  # nothing flows: partitions count
        ([30e6, 10e6, 20e6], [175, 75, 50]),
        ([1e3, 0, 0], [100.1, 50, 0]),  # hardly anything flows
        ([1e15, 10e6, 20e6], [220, 58.6, 17.1]),  # a lie counts four times the median at most
    ],
)
def test_balanced_weighs_partitions_and_throughput(rates: list[float], expected: list[float]) -> None:
    site = owned([4, 2, 0], BalanceSettings(strategy="fair"))
    for broker_id, rate in enumerate(rates, 1):
        site.report(broker_id, LoadReport(bytes_per_s=rate))
    found = loads_of(site, "balanced")
    if rates[0] == 1e15:
        assert found[0] < 220 and found[2] > 20, "the others still differ"
    else:
        assert found == pytest.approx(expected, abs=0.2)


@pytest.mark.parametrize("measured", ["cpu", "memory", "throughput", "backlog"])
def test_weighted_load_follows_what_is_weighed(measured: str) -> None:
    site = owned([2, 2, 2], BalanceSettings(strategy="fair"))
    busy = {
        "cpu": LoadReport(cpu=0.9),
        "memory": LoadReport(memory=0.9),
        "throughput": LoadReport(bytes_per_s=50e6),
        "backlog": LoadReport(backlog_records=1_000_000),
    }[measured]
    site.report(1, busy)
    site.report(2, LoadReport())
    site.report(3, LoadReport())
    first, second, third = loads_of(site, "weighted_load", weights={measured: 1.0})
    assert first > 50 > second == third == 0


def test_a_broker_that_reports_nothing_is_taken_for_an_average_one() -> None:
    site = owned([2, 2, 2], BalanceSettings(strategy="fair"))
    site.report(1, LoadReport(bytes_per_s=30e6))
    site.report(2, LoadReport(bytes_per_s=10e6))
    assert loads_of(site, "balanced") == [125, 75, 100]


def test_idle_brokers_differ_by_nothing() -> None:
    site = owned([3, 3, 3], BalanceSettings(strategy="fair"))
    for broker_id, cpu in enumerate((0.01, 0.03, 0.02), 1):
        site.report(broker_id, LoadReport(cpu=cpu, bytes_per_s=broker_id * 100.0))
    for strategy in STRATEGIES:
        found = outlook(site, BalanceSettings(strategy=strategy))
        assert found.imbalance.cv < LEVELS["aggressive"].imbalance


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_of_partitions_are_part_of_their_brokers_load(strategy: str) -> None:
    site = owned([5, 3, 1], BalanceSettings(strategy="fair"))
    for broker_id in (1, 2, 3):
        site.report(broker_id, LoadReport(cpu=0.2 * broker_id, bytes_per_s=20e6, backlog_records=300_000))
    found = outlook(site, BalanceSettings(strategy=strategy))
    owner = found.table.column("owner")
    for slot in range(3):
        total = float(found.loads.weight[owner == slot].sum())
        assert total <= found.loads.load[slot] + 1e-6
        assert total > 0


def test_partitions_of_a_broker_weigh_alike_and_its_report_of_another_version_is_read() -> None:
    site = owned([4, 4], BalanceSettings(strategy="fair"))
    site.report(1, LoadReport(bytes_per_s=40e6))
    told = site.state.cluster.keys.find(f"{LOAD_PREFIX}1")
    assert told is not None
    later = told.value[:-1] + b',"busiest":[[1,0,37e6]]}'
    site.do(PutKey(key=told.key, value=later, lease_id=site.leases[1]))
    site.report(2, LoadReport(bytes_per_s=20e6))
    found = outlook(site, BalanceSettings(strategy="balanced"))
    weight, owner = found.loads.weight, found.table.column("owner")
    assert len(set(weight[owner == 0].tolist())) == len(set(weight[owner == 1].tolist())) == 1
    assert weight[owner == 0].sum() == pytest.approx(found.loads.load[0])
    assert weight[owner == 0].sum() > weight[owner == 1].sum()


def test_no_brokers_and_one_are_balanced() -> None:
    nobody = np.zeros(0), np.zeros(0, np.bool_)
    assert imbalance(*nobody).cv == 0
    assert imbalance(np.array([5.0]), np.array([True])).cv == 0


# -- placing -------------------------------------------------------------------------------------


def test_the_least_loaded_are_filled_first_and_the_same_every_time() -> None:
    site = owned([6, 3, 0], BalanceSettings(strategy="fair"))
    site.topics(9)
    found = outlook(site)
    rows = sorted(found.table.unowned)
    chosen = place(found.picture, found.loads, rows, {})
    assert chosen == place(found.picture, found.loads, rows, {})
    assert [sum(slot == one for _, slot in chosen) for one in range(3)] == [0, 3, 6]


def test_a_topic_is_spread_before_loads_are_made_equal() -> None:
    site = owned([6, 3, 0], BalanceSettings(strategy="fair"))
    site.topic("orders", 6)
    found = outlook(site)
    chosen = place(found.picture, found.loads, sorted(found.table.unowned), {})
    assert [sum(slot == one for _, slot in chosen) for one in range(3)] == [2, 2, 2]


def test_who_is_avoided_gets_it_only_alone() -> None:
    site = owned([3, 0], BalanceSettings(strategy="fair"))
    site.topics(1)
    found = outlook(site)
    (row,) = found.table.unowned
    assert place(found.picture, found.loads, [row], {row: 1}) == [(row, 0)]
    found.picture.takes[0] = False
    assert place(found.picture, found.loads, [row], {row: 1}) == [(row, 1)]
    found.picture.takes[1] = False
    assert place(found.picture, found.loads, [row], {row: 1}) == []


# -- moving --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "level", "moves"),
    [
        ([4, 4, 4], "aggressive", 0),
        ([1, 0], "aggressive", 0),  # it would only be the other one's
        ([2, 0], "conservative", 1),
        ([12, 0, 0], "conservative", 4),  # as many as a round has
        ([12, 0, 0], "balanced", 8),
        ([6, 4, 3], "conservative", 0),
        ([6, 4, 3], "balanced", 0),
        ([6, 4, 2], "balanced", 2),
        ([6, 4, 3], "aggressive", 1),
    ],
)
def test_the_level_says_when_and_how_much(counts: list[int], level: str, moves: int) -> None:
    settings = BalanceSettings(strategy="fair", aggressiveness=level)
    found = outlook(owned(counts, settings), settings)
    planned = found.plan(settings.level.moves_per_round, 10**9)
    assert len(planned) == moves
    assert planned == found.plan(settings.level.moves_per_round, 10**9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_move_makes_loads_more_equal(strategy: str) -> None:
    settings = BalanceSettings(strategy=strategy, aggressiveness="aggressive")
    site = owned([30, 7, 0], settings)
    for broker_id, cpu in enumerate((0.9, 0.4, 0.1), 1):
        site.report(broker_id, LoadReport(cpu=cpu, bytes_per_s=cpu * 100e6, backlog_records=1_000))
    found = outlook(site)
    load = found.loads.load.copy()
    moves = found.plan(64, 10**9)
    assert moves
    for move in moves:
        before = load.std()
        load[move.source] -= move.weight
        load[move.target] += move.weight
        assert load.std() < before
        assert "the mean is" in move.reason
    assert len({move.row for move in moves}) == len(moves)


def test_one_partition_that_is_all_the_load_stays() -> None:
    site = owned([1, 1], BalanceSettings(strategy="fair"))
    site.report(1, LoadReport(bytes_per_s=100e6))
    site.report(2, LoadReport(bytes_per_s=0))
    found = outlook(site, BalanceSettings(strategy="balanced", aggressiveness="aggressive"))
    assert found.imbalance.cv > 0.2
    assert found.plan(64, 10**9) == []


def test_partitions_of_one_topic_leave_a_broker_first() -> None:
    settings = BalanceSettings(strategy="fair", aggressiveness="aggressive")
    site = Site(settings, brokers=1)
    site.topics(4)
    record = site.topic("orders", 4)
    site.settle()
    site.register(2)
    found = outlook(site)
    moved = [found.table.place(move.row)[0] for move in found.plan(2, 10**9)]
    assert moved == [record.topic_id] * 2


def test_what_is_asked_already_or_was_moved_lately_stays() -> None:
    settings = BalanceSettings(strategy="fair", aggressiveness="aggressive")
    site = owned([8, 0], settings)
    from danube.core.placement.duties import rebalance_command

    site.do(rebalance_command(2))
    site.step()
    moving = {one.topic_id for one in site.asked()}
    assert len(moving) == 2
    found = outlook(site)
    assert not moving & {found.table.place(move.row)[0] for move in found.plan(64, site.now_us)}
    site.settle()
    found = outlook(site)
    assert not moving & {found.table.place(move.row)[0] for move in found.plan(64, site.now_us)}


def test_what_is_unloaded_already_is_not_moved_as_well() -> None:
    settings = BalanceSettings(strategy="fair", aggressiveness="aggressive")
    site = owned([8, 0], settings)
    places = tuple((one.topic_id, one.partition, one.epoch) for one in site.ownerships()[:7])
    site.do(UnloadPartitions(partitions=places, reason="unload"))
    found = outlook(site)
    assert {found.table.place(move.row) for move in found.plan(64, site.now_us)}.isdisjoint(places)


def test_measures_of_a_broker_without_partitions_are_finite() -> None:
    site = Site(BalanceSettings(strategy="weighted_load"), brokers=2)
    site.report(1, LoadReport(cpu=1.0, bytes_per_s=1e9, backlog_records=10**9))
    found = outlook(site)
    loads = measure(found.picture, site.settings)
    assert np.isfinite(loads.load).all() and np.isfinite(loads.unit)
