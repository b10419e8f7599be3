"""What the leader decides, against the machine and with a clock that is moved by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from danube.broker.clustered.controller import balance_settings
from danube.config.loading import load
from danube.core.cluster.commands import (
    AssignPartitions,
    ExpireLeases,
    ForgetBroker,
    ReleasePartitions,
    RenewLease,
    SetBrokerMode,
    UnloadPartitions,
)
from danube.core.metadata.commands import DeleteTopic
from danube.core.placement.balance import BalanceSettings
from danube.core.placement.duties import GRACE_US, MOVE_US, Duties, moves_record, rebalance_command
from danube.core.placement.load_report import DECIDING_KEY, REBALANCE_KEY, LoadReport
from danube.core.placement.partition_table import PartitionTable
from danube.errors import Fenced
from tests.unit.cluster_site import LEASE_MS, SECOND_US, Site


def places(record: object) -> Counter[int]:
    return Counter(getattr(one, "broker_id", 0) for one in record)  # type: ignore[attr-defined]


# -- partitions of nobody ------------------------------------------------------------------------


def test_a_new_topic_is_assigned_at_the_next_look_and_spread() -> None:
    site = Site()
    site.topics(30)
    record = site.topic("orders", 6)
    site.step()
    assert Counter(site.owner(record, partition) for partition in range(6)) == {1: 2, 2: 2, 3: 2}
    assert sorted(site.counts().values()) == [12, 12, 12]
    assert site.decide() == []


def test_new_partitions_and_a_topic_that_is_made_again_are_assigned() -> None:
    site = Site()
    record = site.topic("orders", 2)
    site.settle()
    site.do(DeleteTopic(topic=record.topic))
    again = site.topic("orders", 3)
    site.settle()
    assert {site.owner(again, partition) for partition in range(3)} == {1, 2, 3}


def test_without_a_broker_that_takes_partitions_they_wait() -> None:
    site = Site(brokers=1)
    site.do(SetBrokerMode(broker_id=1, mode="drained"))
    record = site.topic("orders")
    site.run(2)
    assert site.owner(record) == 0
    site.do(SetBrokerMode(broker_id=1, mode="active"))
    site.step()
    assert site.owner(record) == 1


def test_a_partition_that_was_unloaded_goes_to_its_target_and_else_away_from_its_owner() -> None:
    site = Site()
    site.topics(9)
    record = site.topic("orders")
    site.settle()
    former = site.owner(record)
    target = former % 3 + 1
    epoch = site.state.cluster.owners.of(record.topic_id, 0).epoch
    site.do(UnloadPartitions(partitions=((record.topic_id, 0, epoch),), reason="unload", to_broker_id=target))
    site.settle()
    assert site.owner(record) == target
    site.do(UnloadPartitions(partitions=((record.topic_id, 0, epoch + 1),), reason="unload"))
    site.settle()
    assert site.owner(record) not in (0, target)


def test_a_target_that_died_meanwhile_is_no_target() -> None:
    site = Site()
    record = site.topic("orders")
    site.settle()
    owner = site.owner(record)
    target = owner % 3 + 1
    site.holding = {owner}
    site.do(UnloadPartitions(partitions=((record.topic_id, 0, 1),), reason="unload", to_broker_id=target))
    site.die(target)
    site.run(LEASE_MS / 1000 + 1)
    site.holding = set()
    site.settle()
    assert site.owner(record) not in (0, owner, target)


# -- the dead ------------------------------------------------------------------------------------


def test_what_a_dead_broker_owned_is_elsewhere_one_lease_and_some_looks_later() -> None:
    site = Site()
    site.topics(300)
    site.settle()
    site.renew()
    died_us = site.now_us
    site.die(3)
    while site.counts()[3] or site.unowned():
        site.step(0.1)
    assert site.now_us - died_us <= LEASE_MS * 1000 + 400_000
    assert site.counts() == {1: 150, 2: 150, 3: 0}
    assert all(one.epoch <= 2 for one in site.ownerships())


def test_a_renewal_that_came_before_wins_over_a_late_expiry() -> None:
    site = Site()
    site.topics(6)
    site.settle()
    site.now_us += (LEASE_MS + 10) * 1000
    site._tick()
    expiry = [one for one in site.decide() if isinstance(one, ExpireLeases)]
    assert len(expiry[0].leases) == 3
    site.do(RenewLease(lease_id=site.leases[2]))
    for command in expiry:
        site.do(command)
    assert [one.broker_id for one in site.state.cluster.brokers.records() if one.alive] == [2]


def test_a_new_leader_lets_brokers_renew_first() -> None:
    site = Site()
    site.topics(6)
    site.settle()
    before = site.ownerships()
    site.now_us += 3 * LEASE_MS * 1000  # nobody led
    site.lead()
    assert not [one for one in site.decide() if isinstance(one, ExpireLeases)]
    site.renew(1, 2)
    site.now_us += GRACE_US
    site.step(0, renew=False)
    assert [one.alive for one in site.state.cluster.brokers.records()] == [True, True, False]
    assert [one for one in before if one.broker_id != 3] == [
        one for one in site.ownerships() if one in before and one.broker_id != 3
    ]


def test_a_paused_leader_decides_nothing_that_counts() -> None:
    site = Site()
    site.topics(30)
    site.settle()
    site.die(3)
    site.run(LEASE_MS / 1000 - 0.2)
    paused = site.duties
    site.now_us += 300_000
    site._tick()
    stale = paused.turn(site.state, site.now_us)
    assert stale
    site.lead()
    site.register(3)
    site.run(1)
    late = [*stale, ReleasePartitions(broker_id=3, partitions=((1, 0, 1),), reason="dead")]
    before = site.ownerships()
    for command in late:
        site.try_do(command)
    assert site.ownerships() == before
    assert site.refused


def test_another_leader_in_the_middle_goes_on_from_the_metadata() -> None:
    site = Site()
    site.topics(3_000)
    site.settle()
    site.die(1)
    while site.counts()[1] in (0, 1_000):
        site.step()
        if site.unowned():
            break
    site.lead()  # something is released and not assigned yet
    site.settle()
    assert site.unowned() == 0
    assert site.counts() == {1: 0, 2: 1_500, 3: 1_500}


def test_a_local_partition_waits_for_its_broker() -> None:
    site = Site(brokers=2)
    site.register(3, shared=False)
    site.topics(6)
    lossy = [site.topic(f"lossy-{number}", reliable=False) for number in range(3)]
    site.settle()
    held = {one.topic_id for one in site.ownerships() if one.broker_id == 3}
    assert any(one.topic_id in held for one in lossy)
    site.die(3)
    site.run(4)
    stays = {one.topic_id for one in site.ownerships() if one.broker_id == 3}
    assert stays == held - {one.topic_id for one in lossy}
    assert not any(site.owner(one) in (0, 3) for one in lossy)
    site.register(3, shared=False)
    site.settle()
    assert {one.topic_id for one in site.ownerships() if one.broker_id == 3} == stays


def test_a_local_partition_that_its_broker_released_waits_for_it() -> None:
    site = Site(brokers=0)
    site.register(1, shared=False)
    record = site.topic("orders")
    site.settle()
    site.register(2)
    site.do(ReleasePartitions(broker_id=1, partitions=((record.topic_id, 0, 1),), reason="stop"))
    site.do(SetBrokerMode(broker_id=1, mode="draining"))
    site.run(3)
    assert site.owner(record) == 0
    site.do(SetBrokerMode(broker_id=1, mode="active"))
    site.settle()
    assert site.owner(record) == 1


# -- modes ---------------------------------------------------------------------------------------


def test_a_draining_broker_is_emptied_a_few_at_once_and_then_drained() -> None:
    site = Site(BalanceSettings(strategy="fair", moves_max=4))
    site.topics(30)
    site.settle()
    site.do(SetBrokerMode(broker_id=2, mode="draining", reason="unload"))
    under_way = 0
    for _ in range(20):
        site.step()
        under_way = max(under_way, len(site.asked()))
    assert under_way == 4
    assert site.counts() == {1: 15, 2: 0, 3: 15}
    assert site.state.cluster.brokers.broker(2).mode == "drained"


def test_draining_says_what_stays() -> None:
    site = Site(brokers=2)
    site.register(3, shared=False)
    site.topics(9)
    site.settle()
    site.do(SetBrokerMode(broker_id=3, mode="draining"))
    site.run(2)
    assert site.counts()[3] == 3
    assert "3 partitions stay" in site.state.cluster.brokers.broker(3).reason


def test_a_broker_that_comes_back_is_what_it_was() -> None:
    site = Site()
    site.topics(9)
    site.settle()
    site.die(3)
    site.run(4)
    site.register(3)
    site.topics(3)
    site.settle()
    assert site.state.cluster.brokers.broker(3).mode == "active"
    assert site.counts()[3] == 3


def test_a_forgotten_broker_leaves_nothing_to_do() -> None:
    site = Site()
    site.topics(9)
    site.settle()
    site.die(3)
    site.run(4)
    site.do(ForgetBroker(broker_id=3))
    site.run(3)
    assert site.decide() == []


# -- rebalancing ---------------------------------------------------------------------------------


def lopsided(settings: BalanceSettings, topics: int = 40) -> Site:
    site = Site(settings, brokers=1)
    site.topics(topics)
    site.settle()
    site.register(2)
    return site


def test_nothing_moves_by_itself_unless_it_is_configured() -> None:
    site = lopsided(BalanceSettings(strategy="fair"))
    site.run(1_000, each=1.0)
    assert site.counts() == {1: 40, 2: 0}


def test_after_a_rolling_restart_the_last_broker_gets_its_share_by_itself() -> None:
    """With the settings of a configuration that says nothing about balance."""
    site = Site(balance_settings(load(None, {}, {}).config.balance), brokers=3)
    site.topics(30)
    site.settle()
    for broker_id in (1, 2, 3):
        site.die(broker_id)
        site.run(4)
        site.register(broker_id)
        site.run(4)
    assert site.counts()[3] == 0, "others took over what it had"
    site.run(400, each=1.0)
    assert min(site.counts().values()) >= 7


def test_who_asks_gets_one_round_at_a_time() -> None:
    site = lopsided(BalanceSettings(strategy="fair", moves_max=8, aggressiveness="conservative"))
    site.do(rebalance_command(3))
    commands = site.step()
    assert sum(len(one.partitions) for one in commands if isinstance(one, UnloadPartitions)) == 3
    assert site.state.cluster.keys.find(REBALANCE_KEY) is None
    site.holding = {1}
    site.do(rebalance_command())
    site.run(3)
    assert len(site.asked()) == 3, "the second round waits for the first"
    site.holding = set()
    site.settle()
    assert site.counts() == {1: 33, 2: 7}
    assert len(moves_record(site.state).moves) == 7


def test_by_itself_it_comes_to_rest_and_nothing_moves_twice() -> None:
    site = lopsided(BalanceSettings(strategy="fair", automatic=True, aggressiveness="aggressive"), 80)
    site.run(2_000, each=1.0)
    assert site.counts() == {1: 48, 2: 32}, "equal enough"
    assert len(site.unloads) == 32
    assert len({one[1:3] for one in site.unloads}) == 32
    rounds = sorted({one[0] for one in site.unloads})
    assert len(rounds) == 2
    assert rounds[1] - rounds[0] >= 180 * SECOND_US


def test_a_broker_that_comes_and_goes_is_given_nothing_by_itself() -> None:
    settings = BalanceSettings(strategy="fair", automatic=True, aggressiveness="aggressive", interval_s=1)
    site = lopsided(settings)
    for _ in range(12):
        site.register(2)
        site.run(8, each=0.5)
        site.die(2)
        site.run(4, each=0.5)
    assert not site.unloads


def test_moves_under_way_have_a_limit_and_one_that_hangs_ends_to_count() -> None:
    site = lopsided(BalanceSettings(strategy="fair", moves_max=2))
    site.holding = {1}
    site.do(rebalance_command(9))
    site.run(5, each=1.0)
    assert len(site.asked()) == 2
    site.do(SetBrokerMode(broker_id=1, mode="draining"))
    site.run(5, each=1.0)
    assert len(site.asked()) == 2
    site.run(MOVE_US / SECOND_US + 2, each=1.0)
    assert len(site.asked()) == 4


def test_a_move_that_hangs_holds_up_the_next_round_only_so_long() -> None:
    site = lopsided(BalanceSettings(strategy="fair"))
    site.holding = {1}
    site.do(rebalance_command(1))
    site.run(5, each=1.0)
    site.do(rebalance_command(3))
    site.run(5, each=1.0)
    assert len(site.asked()) == 1
    site.run(MOVE_US / SECOND_US, each=1.0)
    assert len(site.asked()) == 4


def test_the_leader_says_what_moves_what_stays_for_a_while_and_how_unequal_loads_are() -> None:
    site = lopsided(BalanceSettings(strategy="fair", aggressiveness="aggressive"))
    before = site.duties.placing(site.state, site.now_us)
    assert (before.moving, before.cooling) == (0, 0) and before.imbalance > 0.2
    site.holding = {1}
    site.do(rebalance_command(2))
    site.run(5, each=1.0)
    under_way = site.duties.placing(site.state, site.now_us)
    assert (under_way.moving, under_way.cooling) == (2, 2)
    site.holding = set()
    site.run(5, each=1.0)
    done = site.duties.placing(site.state, site.now_us)
    assert (done.moving, done.cooling) == (0, 2) and done.imbalance < before.imbalance
    site.run(400, each=1.0)
    assert site.duties.placing(site.state, site.now_us).cooling == 0, "over after the level's time"


def test_what_cannot_leave_is_not_moved() -> None:
    site = Site(BalanceSettings(strategy="fair"), brokers=0)
    site.register(1, shared=False)
    site.topics(10)
    site.settle()
    site.register(2)
    site.do(rebalance_command())
    site.run(3)
    assert site.counts() == {1: 10, 2: 0}


# -- what it remembers ---------------------------------------------------------------------------


def test_it_says_who_decides_while_that_broker_is_there() -> None:
    site = Site()
    site.step()
    said = site.state.cluster.keys.find(DECIDING_KEY)
    assert said is not None and said.value == b"1"
    assert said.lease_id == site.leases[1]
    site.duties = Duties(2, site.settings)
    site.duties.begin(site.state, site.now_us)
    site.step()
    said = site.state.cluster.keys.find(DECIDING_KEY)
    assert said is not None and said.value == b"2"
    site.die(2)
    site.run(4)
    assert site.state.cluster.keys.find(DECIDING_KEY) is None


def test_unreadable_keys_are_nothing() -> None:
    from danube.core.cluster.commands import PutKey
    from danube.core.placement.load_report import LOAD_PREFIX, MOVES_KEY

    site = lopsided(BalanceSettings(strategy="weighted_load"))
    for key in (f"{LOAD_PREFIX}1", f"{LOAD_PREFIX}2", MOVES_KEY, REBALANCE_KEY):
        site.do(PutKey(key=key, value=b"\xff{"))
    site.settle()
    assert site.state.cluster.keys.find(REBALANCE_KEY) is None
    site.report(1, LoadReport(cpu=float("inf"), bytes_per_s=-1e300))
    site.settle()


@pytest.mark.parametrize("seed", range(3))
def test_the_table_is_the_same_however_it_came_to_be(seed: int) -> None:
    import random

    chance = random.Random(seed)
    site = Site()
    for _ in range(60):
        names = [record.topic for record in site.state.topics()]
        if names and chance.random() < 0.3:
            site.do(DeleteTopic(topic=chance.choice(names)))
        else:
            site.topic(f"x{chance.getrandbits(40)}", chance.choice([0, 0, 3]), reliable=chance.random() < 0.7)
        if chance.random() < 0.7:
            site.step()
    kept, made = site.duties._table, PartitionTable.of(site.state)
    assert len(kept) == len(made)
    for record in site.state.topics():
        for partition in range(record.partition_count):
            rows = [table.row(record.topic_id, partition) for table in (kept, made)]
            found = [
                (
                    table.place(row),
                    table.owner_id(row),
                    bool(table.column("reliable")[row]),
                    row in table.unowned,
                )
                for table, row in zip((kept, made), rows, strict=True)
                if row is not None
            ]
            assert found[0] == found[1]
    assert sorted(kept.counts().tolist()) == sorted(made.counts().tolist())


def test_rows_of_deleted_topics_are_used_again() -> None:
    site = Site()
    for number in range(300):
        record = site.topic(f"short-{number}", 5)
        site.step(0)
        site.do(DeleteTopic(topic=record.topic))
    table = site.duties._table
    assert len(table) == 0 and len(table.column("owner")) == 5 and table.topic_count == 1


def test_a_command_of_the_past_is_fenced() -> None:
    site = Site()
    record = site.topic("orders")
    site.settle()
    owner = site.owner(record)
    with pytest.raises(Fenced):
        site.do(AssignPartitions(broker_id=owner, partitions=((record.topic_id, 0, 0),)))
