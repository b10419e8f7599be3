"""A partition on its way to another broker leaves whatever fails meanwhile, and never without all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from danube.broker.clustered.leaving import ACKS_NS, RETRY_NS, STORE_NS, Leaving
from danube.broker.clustered.owning import Place
from danube.broker.partition.hosted import HostedPartition
from danube.core.cluster.commands import Ownership
from danube.errors import DanubeError, OwnerMoved, StorageFailed
from tests.unit.broker_parts import RecordingSession, numbered
from tests.unit.tier_parts import TieredBench


class Giver:
    """The shard, as far as it is asked."""

    def __init__(self, bench: TieredBench) -> None:
        self.storage = bench.shard.storage
        self.tiers = bench.tiers
        self.released: list[int] = []

    def silence(self, hosted: HostedPartition) -> None:
        hosted.silent = True
        hosted.refusal = OwnerMoved("it moves")

    def serve_on(self, hosted: HostedPartition) -> None:
        hosted.silent, hosted.refusal = False, None

    def keep(self, place: Place) -> None:
        raise AssertionError("it can leave")

    def release(
        self, hosted: HostedPartition, record: Ownership, then: Callable[[DanubeError | None], None]
    ) -> None:
        self.released.append(hosted.core.log_end)


class Move:
    """One partition with ten records and a subscription, asked to leave."""

    def __init__(self, root: Path) -> None:
        self.bench = TieredBench(root)
        self.session = session = RecordingSession()
        self.bench.open_producer(session)
        self.bench.subscribe(session)
        self.bench.publish(session, numbered(10))
        self.bench.turn()
        self.giver = Giver(self.bench)
        record = Ownership(self.bench.hosted.topic_id, 0, 1, 1, "unload", 1)
        self.leaving = Leaving(self.bench.hosted, record, self.giver)
        self.now_ns = 1_000_000_000

    def step(self, times: int = 1) -> list[int]:
        for _ in range(times):
            self.now_ns += max(ACKS_NS, RETRY_NS)
            self.leaving.step(self.now_ns)
            self.bench.sealer.step()
        return self.giver.released


@pytest.fixture
def move(tmp_path: Path) -> Move:
    return Move(tmp_path)


def test_it_is_released_when_the_store_has_all_of_it(move: Move) -> None:
    assert move.step(10) == [10] and move.bench.tier.uploaded_end == 10


def test_a_mover_that_starts_again_meanwhile_is_told_that_it_leaves(move: Move) -> None:
    mover = move.bench.mover
    mover.prompt = False
    assert move.step(10) == [] and "leave" in mover.kinds()
    mover.frames.clear()  # the mover died with what it was told
    mover.left.clear()
    move.bench.tiers.on_connected()
    mover.prompt = True
    mover.step()
    assert move.step(10) == [10]


def test_a_log_that_is_opened_anew_meanwhile_is_sealed_once_it_is(move: Move) -> None:
    hosted = move.bench.hosted
    hosted.failure = StorageFailed("it is opened anew")
    assert move.step(5) == []
    hosted.failure = None
    assert move.step(10) == [10]


def test_a_store_that_goes_away_in_the_last_moment_keeps_nobody_waiting(move: Move) -> None:
    hosted, mover = move.bench.hosted, move.bench.mover
    while not hosted.silent:
        move.step()
    move.bench.ack(move.session, 0, 5)  # so there is something that the store has to hear of
    mover.prompt = False
    move.step(STORE_NS // RETRY_NS + 3)
    assert not hosted.silent and hosted.refusal is None and not move.giver.released
    move.bench.publish(move.session, numbered(5, start=10))
    move.bench.turn()
    assert hosted.high_watermark == 15
    mover.prompt = True
    mover.step()
    assert move.step(10) == [15] and move.bench.tier.uploaded_end == 15
