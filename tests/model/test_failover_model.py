"""Three hosts, each with its disk, one store, and whatever may happen to one partition of them.

They publish, upload, evict, die, take over, come back, move, give up what a lost disk had.  At all times no
offset is given to two records and nothing that was acked or given up comes again as missing.  In the end
all disks are back: every acknowledged record can be read and was delivered, but for those that an operator
gave up, and the store is sound.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from danube.broker.mover.returning import asides
from danube.errors import DanubeError
from danube.wal.segments.holes import HoleKind
from danube.wal.tier.manifest import Manifest
from danube.wal.tier.uploader import trimming
from danube.wal.verify.store import verify_store
from danube.wal.verify.tree import Verified
from tests.examples import examples
from tests.unit.cluster_hosts import NOW_US, Cluster, Host
from tests.unit.faulty_store import Crash, crash_after, crash_before, fail_after, fail_before
from tests.unit.wal_samples import memory_directory

SEEDS = range(examples(120))
STEPS = 70
HOLES_MAX = 40


class World:
    def __init__(self, seed: int, root: Path) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster()
        self.hosts = [Host(self.cluster, number, root / str(number)) for number in (1, 2, 3)]
        self.away: set[Host] = set()
        self.count = 0
        self.given_up: set[int] = set()

    @property
    def owner(self) -> Host | None:
        return self.cluster.owner

    def step(self) -> None:
        chance = self.random.random()
        if self.random.random() < 0.12:  # something goes wrong soon
            how = self.random.choice((crash_before, crash_after, fail_before, fail_after))
            calls = self.cluster.store.calls
            self.cluster.store.faults[len(calls) + self.random.randrange(12)] = how
        try:
            self.act(chance)
        except Crash:
            if self.owner is not None:
                self.die(self.owner)
        except DanubeError:
            if self.owner is not None and self.owner.subscription is None:
                self.owner.crash()
        self.check()

    def act(self, chance: float) -> None:
        owner = self.owner
        if owner is None or owner.subscription is None:
            self.elect()
        elif chance < 0.35:
            self.publish(owner)
        elif chance < 0.5:
            owner.ack([one for one in owner.deliver(3) if self.random.random() < 0.8])
        elif chance < 0.6:
            owner.upload()
        elif chance < 0.66:
            owner.copy_cursors()
        elif chance < 0.7:
            owner.evict()
        elif chance < 0.8:
            self.die(owner)
        elif chance < 0.84:
            owner.release()
        elif chance < 0.93:
            self.come_back()
        elif chance < 0.98:
            owner.take_back()
        elif self.random.random() < 0.3:
            owner.accept_loss()

    def publish(self, owner: Host) -> None:
        payloads = [b"%d" % (self.count + number) for number in range(self.random.randrange(1, 6))]
        self.count += len(payloads)
        owner.publish(*payloads)

    def elect(self) -> None:
        there = [host for host in self.hosts if host not in self.away]
        if not there:
            self.away.discard(self.random.choice(self.hosts))
            return
        host = self.owner or self.random.choice(there)
        host.take().open()

    def die(self, host: Host) -> None:
        host.crash()
        if self.random.random() < 0.6:
            self.away.add(host)

    def come_back(self) -> None:
        for host in self.hosts:
            if host is not self.owner and (host not in self.away or self.random.random() < 0.4):
                self.away.discard(host)
                host.restart()
                host.bring_back()

    def check(self) -> None:
        manifest = self.cluster.manifest
        if manifest is not None:
            assert Manifest.decode(manifest.encode()) == manifest
            assert len(manifest.holes) <= HOLES_MAX
            for hole in manifest.all_holes():
                if hole.kind is HoleKind.GIVEN_UP:
                    self.given_up |= set(range(hole.start, hole.end))

    def finish(self) -> None:
        """All disks come back; the last owner gets everything."""
        self.cluster.store.faults.clear()
        self.away.clear()
        for _ in range(3):
            owner = self.owner
            if owner is None or owner.subscription is None:
                owner = (owner or self.hosts[0]).take()
                owner.open()
            for host in self.hosts:
                if host is not owner:
                    host.restart()
                host.bring_back()
            while owner.take_back():
                pass
        self.compare(self.owner)  # type: ignore[arg-type]

    def compare(self, owner: Host) -> None:
        given = {one: data for one, data in self.cluster.given.items() if one not in self.given_up}
        held = owner.records()
        assert given.items() <= held.items(), "every acknowledged record can be read"
        assert not [hole for hole in self.cluster.holes() if hole[2] == "open"], "no hole stays open"
        for _ in range(60):
            granted = owner.deliver()
            assert set(granted) <= set(held)
            owner.ack(granted)
            owner.ack(self.stuck(owner))
        assert set(given) <= self.cluster.acked, "and was delivered"
        assert owner.subscription.ack_floor == owner.log.log_end  # type: ignore[union-attr]
        kept = [aside.directory.name for host in self.hosts for aside in asides(host.data_dir)]
        assert not kept or self.given_up, "nothing stays aside"
        verified = Verified()
        verify_store(self.cluster.store.memory, NOW_US, verified)
        assert not [one for one in verified.findings if "store.json" not in str(one)]

    def stuck(self, owner: Host) -> list[int]:
        """What was granted before and not acked."""
        subscription = owner.subscription
        assert subscription is not None
        return list(range(subscription.settled_end, subscription.next))


@pytest.mark.parametrize("number", SEEDS)
def test_no_record_is_lost_or_doubled_and_none_is_passed(number: int, seed: int, tmp_path: Path) -> None:
    with memory_directory(tmp_path) as root:
        world = World(seed * 1_000 + number, root)
        for _ in range(STEPS):
            world.step()
        world.finish()


def test_retention_takes_a_hole_with_the_records_behind_it(tmp_path: Path) -> None:
    with memory_directory(tmp_path) as root:
        world = World(0, root)
        first, second, _ = world.hosts
        first.take().open()
        first.publish(b"0")
        first.crash()
        second.take().open()
        second.publish(b"1")
        second.upload()
        assert second.uploader is not None
        end = second.uploader.manifest.uploaded_end
        second.uploader.install(trimming(end))
        assert world.cluster.holes() == []
        first.restart()
        assert [one.word for one in first.bring_back()] == ["removed"], "its records have expired"
