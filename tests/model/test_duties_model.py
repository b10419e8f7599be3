"""Random clusters: brokers come, go, drain, lie about their load and release late; leaders change.

After each episode, once nothing more happens: every partition has an active owner within a bounded number
of looks.  At every look the limits hold, and no partition returns to where it was moved from within its
cooldown by rebalancing.
"""

from __future__ import annotations

import random

import pytest

from danube.core.cluster.commands import SetBrokerMode, UnloadPartitions
from danube.core.metadata.commands import DeleteTopic
from danube.core.placement.balance import LEVELS, STRATEGIES, BalanceSettings
from danube.core.placement.duties import MOVES_KEPT_MAX, ClusterView, moves_record, rebalance_command
from danube.core.placement.load_report import LoadReport
from danube.core.placement.partition_table import PartitionTable
from danube.limits import PARTITIONS_PER_COMMAND_MAX
from tests.examples import examples
from tests.unit.cluster_site import SECOND_US, Site

EPISODES = 6
STEPS = 30
REST_STEPS = 60


class Model:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.settings = BalanceSettings(
            strategy=self.random.choice(STRATEGIES),
            aggressiveness=self.random.choice(sorted(LEVELS)),
            automatic=self.random.random() < 0.7,
            interval_s=self.random.choice([0, 2, 20]),
            moves_max=self.random.choice([1, 3, 16]),
        )
        self.site = Site(self.settings, brokers=self.random.randint(1, 5))
        self.last: dict[tuple[int, int], tuple[int, int, int]] = {}  # place: when, from, to

    def episode(self) -> None:
        for _ in range(STEPS):
            self.happen()
            self.look(self.random.choice([0.1, 0.1, 0.5, 1.0, 1.9]))
        self.rest()

    def happen(self) -> None:
        site, chance = self.site, self.random
        match chance.randrange(10):
            case 0:
                site.topic(f"t{chance.getrandbits(50)}", chance.choice([0, 0, 3, 12]))
            case 1:
                site.topics(chance.randint(1, 20))
            case 2:
                site.register(chance.randint(1, 6))
            case 3 if len(site.leases) > 1:
                site.die(chance.choice(sorted(site.leases)))
            case 4:
                self.report()
            case 5:
                self.set_mode()
            case 6:
                site.holding = set(chance.sample(sorted(site.leases), min(1, len(site.leases))))
            case 7:
                site.lead()
            case 8:
                site.do(rebalance_command(chance.choice([0, 1, 50])))
            case 9:
                self.unload_or_delete()
            case _:
                pass

    def report(self) -> None:
        """The truth, or anything."""
        chance = self.random
        for broker_id in self.site.leases:
            if broker_id not in self.alive():
                continue
            worst = chance.choice([1.0, 1e3, 1e300])
            self.site.report(
                broker_id,
                LoadReport(
                    cpu=chance.random() * worst, memory=chance.random(),
                    bytes_per_s=chance.random() * 1e8 * worst,
                    backlog_records=chance.randrange(10**7), partition_count=chance.randrange(100),
                ),
            )  # fmt: skip

    def alive(self) -> set[int]:
        return {one.broker_id for one in self.site.state.cluster.brokers.records() if one.alive}

    def set_mode(self) -> None:
        broker_id = self.random.choice([one.broker_id for one in self.site.state.cluster.brokers.records()])
        mode = self.random.choice(["active", "active", "draining"])
        self.site.do(SetBrokerMode(broker_id=broker_id, mode=mode))

    def unload_or_delete(self) -> None:
        site = self.site
        owned = [one for one in site.ownerships() if one.broker_id]
        if not owned:
            return
        one = self.random.choice(owned)
        record = site.state.topic_with_id(one.topic_id)
        if record is not None and self.random.random() < 0.5:
            site.do(DeleteTopic(topic=record.topic))
            return
        target = self.random.choice([0, *sorted(site.leases)])
        place = (one.topic_id, one.partition, one.epoch)
        site.try_do(UnloadPartitions(partitions=(place,), reason="unload", to_broker_id=target))

    def look(self, seconds: float = 0.1) -> int:
        site = self.site
        self.foresee()
        commands = site.step(seconds)
        assert all(len(getattr(one, "partitions", ())) <= PARTITIONS_PER_COMMAND_MAX for one in commands)
        asked = [one for one in commands if isinstance(one, UnloadPartitions)]
        count = sum(len(one.partitions) for one in asked)
        assert count <= self.settings.moves_max, "more moves at once than are allowed"
        decided = [one for one in site.asked() if one.reason in ("drain", "rebalance")]
        assert len(decided) <= self.settings.moves_max, "more moves are under way than are allowed"
        for one in asked:
            if one.reason == "rebalance":
                self.note(one)
        assert len(moves_record(site.state).moves) <= MOVES_KEPT_MAX
        return len(commands)

    def foresee(self) -> None:
        """A plan that nobody carries out changes nothing."""
        state = self.site.state
        before = state.snapshot()
        ClusterView(state, PartitionTable.of(state), self.settings).plan(16, self.site.now_us)
        assert state.snapshot() == before

    def note(self, command: UnloadPartitions) -> None:
        now_us = self.site.now_us
        for topic_id, partition, _ in command.partitions:
            former = self.last.get((topic_id, partition))
            if former is not None:
                assert now_us - former[0] >= self.settings.level.cooldown_s * SECOND_US, (
                    "moved back and forth"
                )
            self.last[topic_id, partition] = (now_us, 0, command.to_broker_id)

    def rest(self) -> None:
        """Nothing happens any more; brokers that were lost stay so."""
        site = self.site
        site.holding = set()
        for broker_id in sorted(site.leases):
            if broker_id not in self.alive():
                site.register(broker_id)
        modes = [site.state.cluster.brokers.broker(broker_id).mode for broker_id in site.leases]
        if "active" not in modes:
            site.do(SetBrokerMode(broker_id=min(site.leases), mode="active"))
        for _ in range(REST_STEPS):
            self.look(0.5)
            if self.at_rest():
                break
        assert self.at_rest(), (site.unowned(), site.refused[-3:])

    def at_rest(self) -> bool:
        brokers = {one.broker_id: one for one in self.site.state.cluster.brokers.records()}
        return self.site.unowned() == 0 and all(
            brokers[one.broker_id].alive for one in self.site.ownerships()
        )


@pytest.mark.parametrize("seed", range(examples(25)))
def test_every_partition_finds_an_owner_and_the_limits_hold(seed: int) -> None:
    model = Model(seed)
    for _ in range(EPISODES):
        model.episode()
