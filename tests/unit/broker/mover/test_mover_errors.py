"""What failed is done again, and an error that is over is told no more."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from danube.broker.mover import partition as mover_partition
from danube.core.partition.tier_plan import OUTAGE_FAILURES_MIN
from danube.errors import StoreUnavailable
from danube.wal.tier.keys import cursors_prefix
from tests.unit.broker.mover.test_mover import WAIT_S, Place, on_a_loop
from tests.unit.broker.mover.test_mover import no_bug as no_bug
from tests.unit.broker.mover.test_mover import place as place
from tests.unit.broker.mover.test_mover_staged import Hand
from tests.unit.failing_files import FailingFiles
from tests.unit.faulty_store import FaultyStore, fail_before, make_segments
from tests.unit.wal_samples import IDENTITY

AWAY = StoreUnavailable("the store is away")


def copies(place: Place) -> list[bytes]:
    return [place.store.memory.get(one.key) for one in place.store.memory.list(cursors_prefix(IDENTITY))]


@on_a_loop
async def test_a_copy_of_cursors_that_failed_is_stored_later(place: Place) -> None:
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.until(lambda: bool(worker.states) and worker.states[-1]["loaded"])
        place.store.always = fail_before
        worker.say("cursors", topic_id=IDENTITY.topic_id, partition=3, blob=b"progress")
        await worker.error("the store is away")
        place.store.always = None
        await worker.until(lambda: not worker.states[-1]["error"])
        assert copies(place) == [b"progress"]


@on_a_loop
async def test_the_end_of_an_outage_is_the_end_of_waiting(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danube.broker.mover.health.ASK_AFTER_NS", 50_000_000)
    monkeypatch.setattr(mover_partition, "retry_delay_us", lambda failures, chance: 3_600_000_000)
    make_segments(place.directory, 2)
    async with place.mover() as connect:
        worker = await connect()
        await worker.until(lambda: worker.stores[-1:] == [(True, "")])
        place.store.always = fail_before
        worker.attach(place.directory)
        await worker.error("the store is away")
        place.store.always = None
        await worker.uploaded(2)
        assert not worker.states[-1]["error"]


@on_a_loop
async def test_who_is_let_through_in_an_outage_tells_the_others_of_its_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where always somebody tries the store is never silent, so nobody asks it about itself."""
    monkeypatch.setattr("danube.broker.mover.health.ASK_AFTER_NS", 3_600_000_000_000)
    monkeypatch.setattr(mover_partition, "retry_delay_us", lambda failures, chance: 3_600_000_000)
    async with place.mover() as connect:
        worker = await connect()
        await worker.until(lambda: worker.stores[-1:] == [(True, "")])
        place.store.always = fail_before

        def partitions(*, error: bool) -> set[int]:
            newest = {state["partition"]: state for state in worker.states}
            return {number for number, state in newest.items() if bool(state["error"]) is error}

        waiting = set(range(OUTAGE_FAILURES_MIN))
        for number in waiting:
            worker.attach(place.directory, partition=number)
        await worker.until(lambda: partitions(error=True) == waiting)
        place.store.always = None
        worker.attach(place.directory, partition=len(waiting))  # it has not tried yet
        await worker.until(lambda: partitions(error=False) == waiting | {len(waiting)})


@on_a_loop
async def test_the_newest_cursors_are_stored_after_a_copy_that_took_long(place: Place) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def late(name: str, arguments: tuple[Any, ...], call: Any) -> Any:
        if name == "put":
            place.store.always = None
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(WAIT_S)
        return call()

    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.until(lambda: bool(worker.states) and worker.states[-1]["loaded"])
        place.store.always = late
        worker.say("cursors", topic_id=IDENTITY.topic_id, partition=3, blob=b"first")
        await asyncio.wait_for(begun.wait(), WAIT_S)
        worker.say("cursors", topic_id=IDENTITY.topic_id, partition=3, blob=b"second")
        worker.say("attach", partition=3, epoch=1, directory=str(place.directory), topic="/default/orders",
                   topic_id=IDENTITY.topic_id, log_start=0)  # fmt: skip
        states = len(worker.states)
        await worker.until(lambda: len(worker.states) > states)  # so it has taken the second
        go_on.set()
    assert copies(place) == [b"first", b"second"]


@on_a_loop
async def test_an_upload_that_an_outage_held_up_goes_on_by_itself(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its partition may try again, and the gate is closed still: nobody else would call for it."""
    monkeypatch.setattr(mover_partition, "retry_delay_us", lambda failures, chance: 50_000)
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.until(lambda: bool(worker.states) and worker.states[-1]["loaded"])
        place.store.always = fail_before
        place.make(2)
        worker.say("sealed", topic_id=IDENTITY.topic_id, partition=3)
        begun = len(place.store.calls)
        async with asyncio.timeout(WAIT_S):
            while len(place.store.calls) - begun < OUTAGE_FAILURES_MIN + 2:
                await asyncio.sleep(0.01)
        place.store.always = None
        await worker.uploaded(2)


@pytest.mark.parametrize("over", ["nothing came of it", "it is wanted no more"])
def test_the_error_of_a_merge_ends_with_its_reason(tmp_path: Path, over: str) -> None:
    directory = tmp_path / "log"
    make_segments(directory, 3)
    hand = Hand(FaultyStore(), directory)
    hand.run(merges=False)
    partition = hand.partition
    partition.compact(0)
    assert partition.merge_job(hand.now_us, hand.work) is not None
    partition.merge_failed(AWAY, hand.now_us, 0.5)
    assert "away" in partition.error
    hand.now_us += 10**9
    if over == "nothing came of it":
        assert partition.merge_job(hand.now_us, hand.work) is not None
        partition.merged([], hand.now_us)
    else:
        partition.compact(None)
        assert partition.merge_job(hand.now_us, hand.work) is None
    assert not partition.error


@on_a_loop
async def test_a_mover_that_starts_on_a_full_disk_uploads_what_makes_room(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.mover() as connect:
        worker = await connect()
        await worker.until(lambda: worker.stores[-1:] == [(True, "")])
    make_segments(place.directory, 2)
    full = FailingFiles(monkeypatch, ("open_new", "fallocate"))
    full.arm(0, errno.ENOSPC, lasting=True)
    async with place.mover() as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.uploaded(2)
        assert full.fired and not (place.data / "reserve-mover").exists(), "it has become the binding"
        full.disarm()
        async with asyncio.timeout(WAIT_S):
            while not (place.data / "reserve-mover").exists():
                await asyncio.sleep(0.01)
