"""What the mover does by rule: who goes first, and what of the store goes when nobody needs it (row E6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from danube.broker.mover import copies as mover_copies
from danube.broker.mover import partition as mover_partition
from danube.broker.mover.partition import INSTALL_INTERVAL_US, NEVER_US, MovedPartition, Step, Urgency
from danube.config.sections import StorageConfig
from danube.core.partition.tier_plan import TierSettings
from danube.errors import Damage
from danube.wal.log.cursors import pack_header
from danube.wal.segments.local_holes import FILE_NAME as HOLES_NAME
from danube.wal.segments.local_holes import LocalHoles, OffsetJump
from danube.wal.segments.segment import file_name
from danube.wal.tier.keys import partition_prefix
from danube.wal.tier.uploader import Ownership, Uploader
from tests.unit.broker.mover.test_mover import WAIT_S, Place, on_a_loop
from tests.unit.broker.mover.test_mover import no_bug as no_bug
from tests.unit.broker.mover.test_mover import place as place
from tests.unit.faulty_store import TOPIC, FaultyStore, check_store, make_segments
from tests.unit.wal_samples import IDENTITY

ORPHAN_US = 200_000
DAY_S = 86_400


@on_a_loop
async def test_orphans_go_at_their_age_and_what_is_named_stays(place: Place) -> None:
    asked: list[int] = []
    place.store.clean_uploads = lambda older_us: asked.append(older_us) or 0  # type: ignore[func-returns-value,method-assign]
    originals = place.make(2)
    orphan = partition_prefix(IDENTITY) + f"{0:020d}-{4:020d}-{'ab' * 8}.seg"
    place.store.memory.put(orphan, b"an upload whose manifest never came")
    settings = TierSettings(merge_below=0, orphan_age_us=ORPHAN_US, reader_grace_us=0)
    async with place.mover(settings) as connect:
        worker = await connect()
        worker.attach(place.directory)
        await worker.uploaded(2)
        async with asyncio.timeout(WAIT_S):
            while place.store.memory.head(orphan) is not None or len(asked) < 2:
                await asyncio.sleep(0.02)
        assert set(asked) == {ORPHAN_US}, "parts, too, again and again"
    check_store(place.store.memory, originals, set())


def test_by_default_nothing_lies_about_for_more_than_a_day() -> None:
    age_s = StorageConfig().orphan_age_ms / 1_000
    grace_s = TierSettings().reader_grace_us / 1e6
    sweep_s = mover_partition.SWEEP_INTERVAL_US / 1e6
    assert TierSettings().orphan_age_us == age_s * 1e6
    assert age_s + sweep_s + grace_s < DAY_S
    assert age_s + mover_copies.CLEAN_UPLOADS_S < DAY_S


QUIET = 400


@on_a_loop
async def test_what_has_records_to_upload_goes_before_all_empty_partitions(place: Place) -> None:
    """Its first upload waits for a thread that is free, and not for the manifests of all others."""
    originals = place.make(2)
    listed: list[str] = []
    finished: list[int] = []  # how many others were listed when a manifest of the busy one was there

    def slow(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        if name == "list":
            listed.append(arguments[0])
            time.sleep(0.002)
        elif name == "put" and "/manifest-" in arguments[0]:
            finished.append(len([one for one in listed if not one.startswith(partition_prefix(IDENTITY))]))
        return call()

    async with place.mover() as connect:
        worker = await connect()
        place.store.always = slow
        for number in range(QUIET):
            worker.attach(place.data / "partitions" / f"{number}", topic_id=1_000 + number)
        worker.attach(place.directory)
        worker.say("sealed", topic_id=IDENTITY.topic_id, partition=IDENTITY.partition)
        await worker.until(lambda: any(one["topic_id"] == IDENTITY.topic_id and one["loaded"]
                                       for one in worker.states) and bool(finished))  # fmt: skip
        assert finished[0] < QUIET // 2
        await worker.until(lambda: len({one["topic_id"] for one in worker.states}) == QUIET + 1)
    check_store(place.store.memory, originals, set())


@on_a_loop
async def test_a_partition_without_a_record_and_a_subscription_makes_no_object(place: Place) -> None:
    async with place.mover() as connect:
        worker = await connect()
        place_of = {"topic_id": IDENTITY.topic_id, "partition": IDENTITY.partition}
        worker.attach(place.directory)
        worker.say("leave", **place_of, id=7, blob=pack_header(IDENTITY, 1, b""), end_offset=0)
        await worker.until(lambda: bool(worker.states) and worker.states[-1]["left_id"] == 7)
        assert not list(place.store.memory.list(partition_prefix(IDENTITY)))


def moved(tmp_path: Path, log_start: int = 0) -> MovedPartition:
    owner = Ownership(TOPIC, IDENTITY, 1, tmp_path / "log")
    return MovedPartition(owner, Uploader(FaultyStore(), owner), TierSettings(), log_start)


def leave(partition: MovedPartition, end_offset: int) -> None:
    identity = {"topic_id": IDENTITY.topic_id, "partition": IDENTITY.partition}
    partition.take({"kind": "leave", **identity, "id": 1, "blob": b"", "end_offset": end_offset})


def done(partition: MovedPartition, step: Step) -> None:
    assert partition.next_step(1, False)[0] is step
    partition.took(step, partition.job(step, 1)(), 1)


def test_urgent_is_who_leaves_then_who_has_a_backlog_by_age_then_who_is_waited_for(tmp_path: Path) -> None:
    identity = {"topic_id": IDENTITY.topic_id, "partition": IDENTITY.partition}
    empty, cold, busy = moved(tmp_path / "a"), moved(tmp_path / "b", log_start=5), moved(tmp_path / "c")
    assert empty.urgency == (Urgency.QUIET, 0) and cold.urgency == (Urgency.AWAITED, 0)
    make_segments(tmp_path / "c" / "log", 2)
    assert busy.urgency == (Urgency.QUIET, 0), "nobody has looked yet"
    busy.take({"kind": "sealed", **identity})
    assert busy.urgency == (Urgency.BACKLOG, 0)
    done(busy, Step.SCAN)
    oldest_us = busy.urgency[1]
    assert busy.urgency[0] is Urgency.BACKLOG and oldest_us > 0, "known before the store was asked"
    done(busy, Step.LOAD)
    assert busy.backlog.segments[0].first_append_us == oldest_us == busy.urgency[1]
    empty.take({"kind": "cursors", **identity, "blob": b"", "soon": True})
    assert empty.urgency == (Urgency.AWAITED, 0)
    leave(empty, 0)
    assert empty.urgency == (Urgency.LEAVING, 0) < busy.urgency < cold.urgency


def test_a_log_that_ends_with_a_hole_of_its_own_can_be_left(tmp_path: Path) -> None:
    """After a power cut a log goes on ahead; it may be given away before it has another record."""
    partition = moved(tmp_path)
    make_segments(tmp_path / "log", 1)[0].with_name(file_name(4)).unlink()
    LocalHoles.load(tmp_path / "log").add(4, 1_000, 1, OffsetJump(1, 1, "power cut"))
    leave(partition, 1_000)
    done(partition, Step.SCAN)
    done(partition, Step.LOAD)
    upload = partition.upload_job(8 << 20, 1)
    assert upload is not None
    partition.uploaded(upload[0], upload[1]())
    done(partition, Step.INSTALL)
    assert partition.manifest.uploaded_end == 1_000
    assert partition.next_step(NEVER_US - 1, False)[0] is not Step.INSTALL, "and it is done"


def test_a_hole_whose_file_is_damaged_is_tried_again_without_haste(tmp_path: Path) -> None:
    partition = moved(tmp_path)
    make_segments(tmp_path / "log", 0)
    (tmp_path / "log" / HOLES_NAME).write_bytes(b"damaged")
    leave(partition, 9)
    done(partition, Step.SCAN)
    done(partition, Step.LOAD)
    partition.took(Step.INSTALL, partition.job(Step.INSTALL, 1)(), 1)
    assert partition.manifest.uploaded_end == 0
    assert partition.next_step(INSTALL_INTERVAL_US, False)[0] is not Step.INSTALL
    assert partition.next_step(INSTALL_INTERVAL_US + 1, False)[0] is Step.INSTALL


def test_a_directory_that_cannot_be_read_keeps_no_manifest_from_being_read(tmp_path: Path) -> None:
    partition = moved(tmp_path)
    assert partition.next_step(1, False)[0] is Step.SCAN
    partition.job(Step.SCAN, 1)
    partition.failed(Step.SCAN, Damage("a footer is damaged"), 1, 0.5)
    later_us = 1 << 50
    assert partition.next_step(later_us, False)[0] is Step.LOAD
    partition.took(Step.LOAD, partition.job(Step.LOAD, later_us)(), later_us)
    assert partition.next_step(later_us, False)[0] is Step.SCAN
