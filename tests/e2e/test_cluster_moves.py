"""A partition moves while it is written and read, and a broker is killed -9 at each step of the move.

The steps are seen from outside: in the metadata, in the store and in what brokers print.  MOVES=all runs
every step with every victim; else one or two of each.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

from danube import sync
from danube.core.cluster.commands import Ownership, UnloadPartitions
from danube.errors import Unavailable
from tests.broker_cluster import BrokerCluster
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.test_cluster_owners import TOPIC, Running

STEPS = ("asked", "uploaded", "drained", "released", "assigned", "opened")
VICTIMS = ("source", "target", "leader")
SOME = (
    ("asked", "source"), ("uploaded", "target"), ("drained", "source"),
    ("released", "leader"), ("assigned", "target"), ("opened", "target"),
)  # fmt: skip
FAILOVER_S = 3.0  # docs/cluster.md
SLACK_S = 3.0  # of a machine that runs other tests as well
IN_FLIGHT = 10  # records that the producer sends before it waits for their answers
# Who may die with records that nobody else has; else offsets go on without a gap.
EXPOSED = {("source", step) for step in STEPS[:3]} | {("target", "assigned"), ("target", "opened")}


class Moves:
    """One move after the other, each with a victim; checks what each one left."""

    def __init__(self, cluster: BrokerCluster, running: Running, store: Path) -> None:
        self.cluster = cluster
        self.running = running
        self._store = store
        self._ends: list[int] = []  # how many records were acknowledged when each move began

    def ownership(self) -> Ownership:
        return self.cluster.ownership(TOPIC)

    def leader(self) -> BrokerProcess:
        found: list[int] = []

        def known() -> bool:
            record = self.cluster.log.state.cluster.keys.find("/cluster/leader")
            found[:] = [int(record.value)] if record is not None else []
            return bool(found)

        wait_until(known, 20, "a leader")
        return self.cluster.broker(found[0])

    def run(self, step: str, victim: str) -> None:
        """Move it once, kill the victim at the step, and wait until all is as before."""
        cluster, leader = self.cluster, self.leader()
        self._settled()
        if victim == "leader" and cluster.owner(TOPIC) is leader:  # it is to have no other part in the move
            cluster.place(TOPIC, cluster.others(leader)[0])
            self._settled()
        source = cluster.owner(TOPIC)
        target = next(one for one in cluster.others(source) if victim != "leader" or one is not leader)
        killed = {"source": source, "target": target, "leader": leader}[victim]
        watcher = next(one for one in cluster.brokers if one is not killed)
        cluster.ask(watcher)
        begun, received = len(self.running.offsets), len(self.running.order)
        leases = self._leases(killed)
        self._ends.append(begun)
        record = self.ownership()
        reached = self._watch(step, record, source, target)
        place = (record.topic_id, 0, record.epoch)
        cluster.propose(
            UnloadPartitions(partitions=(place,), reason="rebalance", to_broker_id=cluster.id_of(target))
        )
        wait_until(reached, 20, f"{step} of {self.ownership()}")
        killed.kill()
        died_s = time.monotonic()
        self._publishes_again(len(self.running.offsets))
        print(
            f"{step} {victim}: published again after {time.monotonic() - died_s:.2f} s", end=", ", flush=True
        )
        cluster.start([killed])
        self._settled()
        # A broker that a busy machine kept from renewing was dead to the others, and may have had records.
        stayed = leases == self._leases(killed)
        self._check(begun, received, (victim, step) in EXPOSED or not stayed)

    def _leases(self, killed: BrokerProcess) -> dict[int, int]:
        """Of the brokers that are not killed: they have another one when theirs had ended."""
        ids = [self.cluster.id_of(one) for one in self.cluster.others(killed)]
        brokers = self.cluster.log.state.cluster.brokers
        return {broker_id: brokers.broker(broker_id).lease_id for broker_id in ids}

    def _watch(
        self, step: str, before: Ownership, source: BrokerProcess, target: BrokerProcess
    ) -> Callable[[], bool]:
        """Whether the step is reached, from now on."""
        objects = len(self._objects())
        drained, opened = _printed(source, "drained"), _printed(target, "partition opened")
        watches: dict[str, Callable[[], bool]] = {
            "asked": lambda: bool(self.ownership().reason) or self.ownership() != before,
            "uploaded": lambda: len(self._objects()) > objects,
            "drained": lambda: _printed(source, "drained") > drained,
            "released": lambda: self.ownership().broker_id != before.broker_id,
            "assigned": lambda: self.ownership().broker_id not in (0, before.broker_id),
            "opened": lambda: _printed(target, "partition opened") > opened,
        }
        return watches[step]

    def _objects(self) -> list[Path]:
        return list(self._store.rglob("*.seg"))

    def _publishes_again(self, count: int) -> None:
        wait_until(lambda: len(self.running.offsets) > count + 20, 30, "records are acknowledged again")

    def _settled(self) -> None:
        """All brokers are there, one of them owns it, and what a disk brought back is in its place."""
        cluster = self.cluster

        def settled() -> bool:
            record = self.ownership()
            alive = cluster.alive()
            return len(alive) == len(cluster.brokers) and record.broker_id in alive and not record.reason

        wait_until(settled, 30, f"brokers and owner: {self.ownership()}")
        with sync.connect(cluster.owner(TOPIC).address, timeout=20) as client:

            def whole() -> bool:
                try:
                    [described] = client.admin.describe_topic(TOPIC).partitions
                except Unavailable:  # brokers did not agree within a second whose it is
                    return False
                return not any(hole["kind"] == "open" for hole in described["holes"])

            wait_until(whole, 60, "no records are away")

    def _check(self, begun: int, received: int, exposed: bool) -> None:
        offsets = self.running.offsets[max(begun - 1, 0) :]
        steps = {end - start for start, end in pairwise(offsets)}
        assert min(steps) > 0, "no offset is given twice, and they go on in order"
        assert exposed or steps == {1}, f"offsets go on without a gap: {sorted(steps)}"
        known = set(self.running.order[:received])
        again = [offset for offset in self.running.order[received:] if offset in known]
        # Cursors went to the store with the last move but one, at the latest: what the last one left on a
        # disk alone comes back without its acks.
        floor = self.running.offsets[self._ends[-3]] if len(self._ends) > 2 else 0
        print(f"{len(offsets)} records, {len(again)} delivered again")
        assert all(offset >= floor for offset in again), (min(again), floor)


def _printed(broker: BrokerProcess, event: str) -> int:
    """How often a broker's worker said this of the topic."""
    text = broker.output_path.read_text(errors="replace")
    return sum(f": {event} partition={TOPIC}" in line for line in text.splitlines())


class Recording(Running):
    """Also remembers the order of what was delivered."""

    def __init__(self, address: str, topic: str) -> None:
        super().__init__(address, topic)
        self.pause_s = 0.02
        self.order: list[int] = []

    def note(self, offset: int) -> None:
        self.order.append(offset)

    async def _all_received(self, receiving: asyncio.Task[None]) -> None:
        await super()._all_received(receiving)
        await asyncio.to_thread(wait_until, self._acked, 20, "the reader has acked all that is stored")

    def _acked(self) -> bool:
        with sync.connect(self.address, timeout=20) as client:
            described = client.admin.describe_subscription(TOPIC, "all").partitions[0]
            return (described["lag"], described["withheld"]) == (0, 0)


def cases() -> list[tuple[str, str]]:
    return list(product(STEPS, VICTIMS)) if os.environ.get("MOVES") == "all" else list(SOME)


def test_no_step_of_a_move_loses_or_doubles_anything_when_a_broker_dies(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    arguments = ["--log-level", "debug", "--storage", store.as_uri()]
    with BrokerCluster(tmp_path, 3, arguments=arguments) as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)
        running = Recording(cluster.brokers[0].address, TOPIC)
        moves = Moves(cluster, running, store)

        def move_all() -> None:
            moves._publishes_again(0)
            for step, victim in cases():
                moves.run(step, victim)

        asyncio.run(running.during(move_all))
        print(f"longest time without an acknowledgement: {running.gap_s:.3f} s")
        assert not running.errors
        check_log(cluster, running)
        assert running.gap_s < FAILOVER_S + SLACK_S, running.gap_s


def check_log(cluster: BrokerCluster, running: Recording) -> None:
    """Each acknowledged record lies at its offset, and the reader has had all that lies there.

    What else does was on its way when its owner was killed, was on that one's disk alone when it was sent
    again, and came back with the disk: in front, the same record, of one burst for each such kill.
    """
    with sync.connect(cluster.owner(TOPIC).address, timeout=20) as client:
        with client.consumer(TOPIC, "audit", start="earliest") as audit:
            found: dict[int, int] = {}
            missing = set(running.offsets)
            while missing:
                message = audit.receive(timeout=20)
                message.ack()
                assert message.offset not in found
                found[message.offset] = int(bytes(message.payload))
                missing.discard(message.offset)
    assert [found[offset] for offset in running.offsets] == list(range(len(running.offsets)))
    assert set(running.seen) >= set(found)
    unanswered = found.keys() - set(running.offsets)
    print(f"{len(unanswered)} records came back that had been sent again")
    assert all(offset < running.offsets[found[offset]] for offset in unanswered)
    assert len(unanswered) <= IN_FLIGHT * sum((victim, step) in EXPOSED for step, victim in cases())
