"""Faults of a cluster on hosts: killed, paused and cut-off brokers, and moves; a seed gives the whole plan.

A fault ends with the cluster whole again: all brokers registered, every partition owned.  What it did, to
whom and how long the healing took is a ``fault`` line of the journal.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from danube.errors import DanubeError
from tests.broker_process import BrokerFailed, wait_until
from tests.crash.cluster_hosts import ClusterOnHosts
from tests.crash.cluster_times import ROUGH
from tests.crash.journal import Journal
from tests.rough_cables import Conditions

MOVED_S = 30.0
TARGETS = ("leader", "leader", "follower", "other follower")
WEIGHTS = {
    "kill_broker": 5,
    "kill_again_while_it_starts": 1,
    "kill_majority": 1,
    "kill_all": 1,
    "pause_broker": 3,
    "cut_host": 3,
    "cut_from_brokers": 3,
    "not_heard": 2,
    "hears_nothing": 2,
    "cut_link": 2,
    "flap": 2,
    "swizzle": 2,
    "cut_from_clients": 1,
    "kill_in_a_partition": 2,
    "move_partition": 4,
    "rebalance": 1,
    "empty_broker": 1,
}
# A bad network takes nothing away from anybody: all partitions are served, just not as fast.
ROUGH_S = 8.0
ROUGH_WEIGHTS = {**dict.fromkeys(ROUGH, 2), "kill_broker": 1}


@dataclass(frozen=True)
class Step:
    """One fault of a plan: what, to whom, for how long, and the quiet before it."""

    fault: str
    target: str
    seconds: float
    rest_s: float
    number: int  # for what a fault draws itself


def plan_of(
    seed: int | str, count: int, faults: Sequence[str] = (), weights: Mapping[str, int] = WEIGHTS
) -> list[Step]:
    """The same for the same seed; ``faults`` come first, in this order."""
    source = random.Random(f"cluster nemesis {seed}")
    steps = []
    for place in range(count):
        (drawn,) = source.choices(list(weights), list(weights.values()))
        steps.append(
            Step(
                fault=faults[place] if place < len(faults) else drawn,
                target=source.choice(TARGETS),
                seconds=round(source.uniform(2.5, 6.0), 2),
                rest_s=round(source.uniform(1.0, 3.0), 2),
                number=source.randrange(1 << 30),
            )
        )
    return steps


class ClusterNemesis:
    """Does the steps of a plan to a cluster; raises BrokerFailed where it does not heal."""

    def __init__(self, cluster: ClusterOnHosts, journal: Journal, seed: int | str) -> None:
        self.cluster = cluster
        self.journal = journal
        self.seed = seed
        self.hosts = cluster.hosts
        self.everyone = range(cluster.size)

    def do(self, step: Step) -> None:
        time.sleep(step.rest_s)
        target = self.place_of(step.target)
        facts = asdict(step) | {"place": target, "owned": self.owned_by(target)}
        act: Callable[[int, Step], dict[str, Any] | None] = getattr(self, step.fault)
        started_ns = time.monotonic_ns()
        try:
            facts |= act(target, step) or {}
        finally:
            ended_ns = time.monotonic_ns()
            self.cluster.resume()
            self.hosts.mend_all()
        self.cluster.start(self.everyone)
        facts["healed_s"] = round(self.cluster.wait_settled(), 3)
        self.journal.write("fault", step.fault, self.seed, started_ns, ended_ns, facts)

    def place_of(self, target: str) -> int:
        leader = self.cluster.leader()
        followers = [place for place in self.everyone if place != leader]
        return {"leader": leader, "follower": followers[0], "other follower": followers[1]}[target]

    def owned_by(self, place: int) -> list[list[Any]]:
        """Topic, partition and the offset at which its next owner begins, of all that a broker owns."""
        broker_id = self.cluster.id_of(place)
        return [
            [topic, number, self.cluster.reserved(one)]
            for topic, number, one in self.cluster.partitions()
            if one.broker_id == broker_id
        ]

    def others(self, place: int) -> list[int]:
        return [other for other in self.everyone if other != place]

    # -- processes --------------------------------------------------------------------------------

    def kill_broker(self, target: int, step: Step) -> None:
        """SIGKILL to every process of a broker, which stays away longer than its lease."""
        self.cluster.brokers[target].kill()
        time.sleep(step.seconds)

    def kill_again_while_it_starts(self, target: int, step: Step) -> None:
        broker = self.cluster.brokers[target]
        broker.kill()
        broker.launch()
        time.sleep(step.seconds / 3)
        broker.kill()

    def kill_majority(self, target: int, step: Step) -> None:
        for place in self.others(target):
            self.cluster.brokers[place].kill()
        time.sleep(step.seconds)

    def kill_all(self, target: int, step: Step) -> None:
        for broker in self.cluster.brokers:
            broker.kill()

    def pause_broker(self, target: int, step: Step) -> None:
        """SIGSTOP to every process of a broker, for longer than its lease."""
        self.cluster.pause(target)
        time.sleep(step.seconds)
        self.cluster.resume()

    # -- the network ------------------------------------------------------------------------------

    def cut_host(self, target: int, step: Step) -> None:
        """A minority of one: its cable is cut, so clients do not reach it either."""
        self.hosts.cut(target)
        time.sleep(step.seconds)

    def cut_from_brokers(self, target: int, step: Step) -> None:
        """A minority, the target in it, that clients still reach."""
        others = self.others(target)
        alone = (self.cluster.size - 1) // 2
        self._separate([target, *others[: alone - 1]], others[alone - 1 :])
        time.sleep(step.seconds)

    def not_heard(self, target: int, step: Step) -> None:
        """One way: the other brokers hear nothing of it, and it hears them."""
        for other in self.others(target):
            self.hosts.block(target, other)
        time.sleep(step.seconds)

    def hears_nothing(self, target: int, step: Step) -> None:
        """One way: it hears nothing of the other brokers, and they hear it."""
        for other in self.others(target):
            self.hosts.block(other, target)
        time.sleep(step.seconds)

    def cut_link(self, target: int, step: Step) -> None:
        """A bridge: the target sees all others, of which one half does not see the other."""
        others = self.others(target)
        half = len(others) // 2
        self._separate(others[:half], others[half:])
        time.sleep(step.seconds)

    def flap(self, target: int, step: Step) -> None:
        """A cable that is there for a second and away for a second."""
        for _ in range(max(2, round(step.seconds / 2))):
            self.hosts.cut(target)
            time.sleep(1)
            self.hosts.mend(target)
            time.sleep(1)

    def swizzle(self, target: int, step: Step) -> None:
        """Links go one by one in one order, and come back in another."""
        source = random.Random(step.number)
        links = [(one, other) for one in self.everyone for other in range(one)]
        for joined in (False, True):
            for one, other in source.sample(links, len(links)):
                (self.hosts.join if joined else self.hosts.separate)(one, other)
                time.sleep(step.seconds / 6)

    def cut_from_clients(self, target: int, step: Step) -> None:
        """Brokers see each other; one of them is not seen by clients, or does not see them."""
        clients = self.cluster.clients_place
        self.hosts.block(*((target, clients) if step.number % 2 else (clients, target)))
        time.sleep(step.seconds)

    def kill_in_a_partition(self, target: int, step: Step) -> None:
        """One is cut off and another killed: nobody has a majority until one comes back."""
        self.hosts.cut(target)
        time.sleep(step.seconds / 2)
        self.cluster.brokers[self.others(target)[step.number % 2]].kill()
        time.sleep(step.seconds / 2)

    def _separate(self, side: Sequence[int], other_side: Sequence[int]) -> None:
        for one in side:
            for other in other_side:
                self.hosts.separate(one, other)

    # -- a bad network ----------------------------------------------------------------------------

    def lose_a_tenth(self, target: int, step: Step) -> None:
        self._rough(Conditions(loss=0.1))

    def lose_three_tenths(self, target: int, step: Step) -> None:
        self._rough(Conditions(loss=0.3))

    def delay_packets(self, target: int, step: Step) -> None:
        """200 ms each way, 100 ms more or less, so that packets overtake others."""
        self._rough(Conditions(delay_s=0.2, jitter_s=0.1))

    def thin_cables(self, target: int, step: Step) -> None:
        """Every host sends 1 Mbit/s at most."""
        self._rough(Conditions(bits_s=1e6))

    def _rough(self, conditions: Conditions) -> None:
        self.hosts.roughen(conditions)
        time.sleep(ROUGH_S)

    # -- moves ------------------------------------------------------------------------------------

    def move_partition(self, target: int, step: Step) -> dict[str, Any]:
        """An owner is asked to give a partition away; how it went is in the facts."""
        partitions = self.cluster.partitions()
        topic, number, before = partitions[step.number % len(partitions)]
        name = self.cluster.state().topic(topic).physical_name(number)
        asked_ns = time.monotonic_ns()
        try:
            self.cluster.ask("unload_topic", topic=name)
        except DanubeError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        facts = {"topic": topic, "partition": number, "asked_ns": asked_ns}

        def moved() -> bool:
            now = next(one for t, n, one in self.cluster.partitions() if (t, n) == (topic, number))
            return now.broker_id not in (0, before.broker_id) and not now.reason

        with suppress(BrokerFailed):  # it may also stay where it is; whether it moved is told
            wait_until(moved, MOVED_S, "moved")
            return facts | {"moved_ns": time.monotonic_ns()}
        return facts

    def rebalance(self, target: int, step: Step) -> dict[str, Any]:
        return self._asked("rebalance")

    def empty_broker(self, target: int, step: Step) -> dict[str, Any]:
        """All partitions leave a broker, which takes some again afterwards."""
        broker_id = str(self.cluster.id_of(target))
        facts = self._asked("unload_broker", broker_id=broker_id)
        time.sleep(step.seconds)
        wait_until(
            lambda: "refused" not in self._asked("activate_broker", broker_id=broker_id), 30, "activated"
        )
        return facts

    def _asked(self, op: str, **arguments: Any) -> dict[str, Any]:
        try:
            self.cluster.ask(op, **arguments)
        except DanubeError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        return {}
