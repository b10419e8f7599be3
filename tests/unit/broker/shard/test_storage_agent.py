"""Durability at run time: fencing, opening the log anew, back-off, rolling and cursors, step by step."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from danube.broker.partition import opening
from danube.broker.shard import storage
from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameFlag, Kind
from danube.errors import ClosedError, StorageFailed, StorageFull
from danube.host import files
from danube.wal.log.log import Log, LogIdentity
from danube.wal.log.syncer import SealJob, Syncer
from danube.wal.segments.segment import spare_epoch_of
from danube.wal.segments.spare import KEPT_US, DropJob, SpareJob
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession, SteppedSyncer, expected, numbered
from tests.unit.failing_files import FailingFiles
from tests.unit.wal_samples import SMALL


@pytest.fixture
def session() -> RecordingSession:
    return RecordingSession()


@pytest.fixture
def fsync(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, durability="fsync")
    yield bench
    bench.shard.close()


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.shard.close()


def publish_until_sealing(bench: Bench, session: RecordingSession) -> None:
    """Until a full segment waits to be sealed, and before it that for the next one room is made."""
    while not any(isinstance(job, SealJob) for job, _ in bench.sealer.jobs):
        bench.publish(session, numbered(50, bench.hosted.core.log_end))
        bench.turn()


def acknowledged(session: RecordingSession) -> list[int]:
    return [wire.decode_published(frame.body).base_offset for frame in session.take(Kind.PUBLISHED)]


EIO = OSError(errno.EIO, "input/output error")


def sealed_segments(log: Log) -> int:
    return sum(segment.sealed for segment in log._segments)


def test_a_failed_sync_fails_what_waits_and_keeps_what_was_acknowledged(
    fsync: Bench, session: RecordingSession
) -> None:
    opened = fsync.open_producer(session)
    fields = {"producer_id": opened.producer_id, "producer_epoch": opened.epoch}
    fsync.publish(session, numbered(2, base_sequence=0, **fields))
    fsync.turn()
    fsync.syncer.step()
    assert acknowledged(session) == [0]
    lost = fsync.publish(session, numbered(2, 2, base_sequence=2, **fields))
    fsync.turn()
    fsync.syncer.step(EIO)
    frame = session.only(Kind.ERROR)
    assert frame.correlation == lost and isinstance(frame.error, StorageFailed)

    hosted = fsync.hosted
    before, epoch = hosted.log, hosted.core.epoch
    refused = fsync.publish(session, numbered(2, 2, base_sequence=2, **fields))
    frame = session.only(Kind.ERROR)
    assert frame.correlation == refused and isinstance(frame.error, StorageFailed)
    assert "cannot be written" in hosted.statistics()["state"]

    assert fsync.run_later() == [storage.REOPEN_DELAY_FIRST_NS / 1e9]
    assert hosted.log is not before and hosted.failure is None and hosted.statistics()["state"] == "open"
    assert hosted.core.epoch == epoch + 1
    assert hosted.high_watermark == 2, "cut where the disk is known to be good"
    again = fsync.publish(session, numbered(2, 2, base_sequence=2, **fields))
    fsync.turn()
    fsync.syncer.step()
    frame = session.only(Kind.PUBLISHED)
    assert (frame.correlation, frame.flags) == (again, 0)
    assert wire.decode_published(frame.body)[:2] == (2, epoch + 1)
    assert fsync.stored() == expected(0, 4)


def test_written_records_survive_a_failed_sync(written: Bench, session: RecordingSession) -> None:
    written.open_producer(session)
    written.subscribe(session)
    for number in range(3):
        written.publish(session, numbered(1, number))
        written.turn()
    assert len(session.take(Kind.PUBLISHED)) == 3
    written.shard.storage.sync_written()
    written.syncer.step(EIO)
    assert written.hosted.failure is not None
    written.run_later()
    assert written.hosted.high_watermark == 3 and written.stored() == expected(0, 3)
    assert written.turns_wanted, "deliveries go on by themselves"
    written.publish(session, numbered(1, 3))
    written.turn()
    assert written.stored() == expected(0, 4)
    assert [record for frame in session.take() if frame.kind == Kind.DELIVER for record in frame.records] == (
        expected(3, 4)
    )


def test_a_failed_write_fences_and_the_resend_is_stored_once(
    written: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = written.open_producer(session)
    fields = {"producer_id": opened.producer_id, "producer_epoch": opened.epoch}
    written.publish(session, numbered(1, base_sequence=0, **fields))
    written.turn()
    session.take()
    disk = FailingFiles(monkeypatch, ("pwritev",))
    disk.arm(0, errno.EIO)
    for number in (1, 2):
        written.publish(session, numbered(1, number, base_sequence=number, **fields))
    written.turn()
    assert [type(frame.error) for frame in session.take()] == [StorageFailed] * 2
    assert (written.hosted.core.log_end, written.hosted.high_watermark) == (1, 1)
    disk.disarm()
    written.run_later()
    for number in (1, 2):
        written.publish(session, numbered(1, number, base_sequence=number, **fields))
    written.turn()
    assert acknowledged(session) == [1, 2] and written.stored() == expected(0, 3)


def test_a_failed_reopen_is_tried_again_ever_more_slowly(
    fsync: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync.open_producer(session)
    fsync.publish(session, numbered(1))
    fsync.turn()

    def refuse(*args: Any) -> Any:
        raise StorageFailed("the disk does not answer")

    with monkeypatch.context() as patched:
        patched.setattr("danube.broker.shard.shard.open_log", refuse)
        fsync.syncer.step(EIO)
        delays = [delay_s for _ in range(7) for delay_s in fsync.run_later()]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert fsync.hosted.failure is not None
    fsync.run_later()
    assert fsync.hosted.failure is None and fsync.hosted.reopen_delay_ns == 0 and fsync.later == []


def test_a_log_that_lost_acknowledged_records_is_never_taken(
    written: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.open_producer(session)
    written.publish(session, numbered(3))
    written.turn()
    session.take()
    real = opening.open_log

    def shorter(*args: Any) -> opening.OpenedStorage:
        return real(*args[:6], 0, *args[7:])  # the trusted end

    written.shard.storage.sync_written()
    directory = written.hosted.directory
    assert directory is not None
    kept = {path: path.read_bytes() for path in directory.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr("danube.broker.shard.shard.open_log", shorter)
        written.syncer.step(EIO)
        written.run_later()
    assert written.hosted.high_watermark == 3, "the high watermark never goes back"
    assert isinstance(written.hosted.failure, StorageFailed) and len(written.later) == 1
    for path, content in kept.items():  # the disk came back
        path.write_bytes(content)


def test_a_policy_changed_while_the_log_reopens_is_the_one_in_force(
    written: Bench, session: RecordingSession
) -> None:
    written.open_producer(session)
    written.publish(session, numbered(1))
    written.turn()
    session.take()
    written.shard.storage.sync_written()
    written.syncer.step(EIO)
    reopen = written.shard.reopen
    policy = msgspec.structs.replace(written.record.policy, durability="fsync")

    def changed_meanwhile(*args: Any) -> Any:
        outcome = reopen(*args)
        written.shard.update_policy(msgspec.structs.replace(written.record, policy=policy))
        return outcome

    written.shard.reopen = changed_meanwhile  # type: ignore[method-assign]
    written.run_later()
    assert written.hosted.failure is None
    written.publish(session, numbered(1, 1))
    written.turn()
    assert session.take() == [], "an answer at level fsync waits for the disk"
    written.syncer.step()
    frame = session.only(Kind.PUBLISHED)
    assert wire.decode_published(frame.body).base_offset == 1


def test_a_topic_deleted_while_its_log_reopens_leaves_nothing(
    tmp_path: Path, session: RecordingSession
) -> None:
    bench = Bench(tmp_path, durability="fsync")
    bench.open_producer(session)
    bench.publish(session, numbered(1))
    bench.turn()
    bench.syncer.step(EIO)
    hosted = bench.hosted
    bench.executor.held = True
    bench.run_later()
    (reopen,) = bench.executor.waiting
    bench.executor.waiting = []
    bench.executor.held = False
    bench.shard.delete_topic(bench.topics.pop(TOPIC))
    before = hosted.log
    reopen()
    assert hosted.log is before and bench.later == [] and list(tmp_path.iterdir()) == []


def test_a_topic_deleted_before_its_log_reopens_is_left_alone(
    tmp_path: Path, session: RecordingSession
) -> None:
    bench = Bench(tmp_path, durability="fsync")
    bench.open_producer(session)
    bench.publish(session, numbered(1))
    bench.turn()
    bench.syncer.step(EIO)
    bench.shard.delete_topic(bench.topics.pop(TOPIC))
    bench.run_later()
    assert list(tmp_path.iterdir()) == [] and bench.later == []


def test_a_log_may_fail_more_often_than_an_incarnation_has_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last epoch is used again and again: what was acknowledged stays, and what was not is refused."""
    monkeypatch.setattr("danube.broker.shard.shard.LOG_EPOCHS", 4)
    for policy in ({}, {"durability": "fsync"}):
        bench = Bench(tmp_path / str(len(policy)), **policy)
        session = RecordingSession()
        bench.open_producer(session)
        epochs, expected_count = [], 0
        for number in range(12):
            bench.publish(session, numbered(3, bench.hosted.core.log_end))
            bench.turn()
            kept = 0 if policy else 3  # a written record was acknowledged, and one at fsync is refused
            if not policy:
                bench.shard.storage.sync_written()
            bench.syncer.step(EIO)
            bench.run_later()
            epochs.append(bench.hosted.core.epoch)
            expected_count += kept
            assert bench.hosted.failure is None and bench.hosted.high_watermark == expected_count
            bench.publish(session, numbered(2, expected_count))
            bench.turn()
            bench.syncer.step()
            expected_count += 2
            if number % 4 == 3:
                bench.shard.storage.roll(bench.hosted)
                bench.sealer.step()
            assert bench.stored() == expected(0, expected_count), number
        assert epochs == [5, 6, *[7] * 10]
        directory = bench.hosted.directory
        bench.shard.close()
        assert directory is not None
        log = Log.open(directory, LogIdentity(bench.record.topic_id, 0), 8, SMALL)
        assert (log.log_end, list(log.recovery.damaged)) == (expected_count, [])
        log.close()


def test_a_newer_owner_fences_publishes_without_losing_their_answers(
    fsync: Bench, session: RecordingSession
) -> None:
    fsync.open_producer(session)
    waiting = fsync.publish(session, numbered(1))
    fsync.turn()
    log = fsync.hosted.log
    assert log is not None and log._writer is not None
    log._writer.segment.file.lost = True  # what a lock that was taken leaves
    fsync.syncer.step()
    frame = session.only(Kind.ERROR)
    assert frame.correlation == waiting and isinstance(frame.error, StorageFailed)
    assert fsync.hosted.failure is not None and len(fsync.later) == 1


def test_a_log_that_is_fenced_takes_no_offset_from_the_partition(
    written: Bench, session: RecordingSession
) -> None:
    written.open_producer(session)
    written.publish(session, numbered(1))
    written.turn()
    session.take()
    log = written.hosted.log
    assert log is not None
    log.failure = StorageFailed("found by a job that is not back yet")
    written.publish(session, numbered(1, 1))
    assert isinstance(session.only(Kind.ERROR).error, StorageFailed)
    assert written.hosted.core.log_end == 1 and not written.hosted.waiting


def test_the_background_sync_waits_for_the_one_that_runs(written: Bench, session: RecordingSession) -> None:
    written.open_producer(session)
    for number in range(2):
        written.publish(session, numbered(1, number))
        written.turn()
        written.shard.storage.sync_written()
    assert len(written.syncer.jobs) == 1
    written.syncer.step()
    assert written.hosted.core.synced_end == 1
    written.shard.storage.sync_written()
    written.syncer.step()
    assert written.hosted.core.synced_end == 2
    written.shard.storage.sync_written()
    assert written.syncer.jobs == []


def test_full_segments_are_sealed_aside_and_a_failed_seal_fences(
    written: Bench, session: RecordingSession
) -> None:
    written.open_producer(session)
    publish_until_sealing(written, session)
    written.sealer.step()
    log = written.hosted.log
    assert log is not None and sealed_segments(log) == 1
    publish_until_sealing(written, session)
    end = written.hosted.high_watermark
    written.sealer.step(EIO)
    assert written.hosted.failure is not None
    written.run_later()
    assert written.hosted.failure is None and written.hosted.high_watermark == end


def test_what_a_full_disk_left_unsealed_is_sealed_when_there_is_room_in_order(
    written: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingFiles(monkeypatch)
    written.open_producer(session)
    log = written.hosted.log
    assert log is not None
    sealed: list[int] = []
    written.shard.sealed = lambda hosted: sealed.append(sealed_segments(log))
    for _ in range(2):
        written.publish(session, numbered(3))
        written.turn()
        written.shard.storage.roll(written.hosted)
    failing.arm(0, errno.ENOSPC, lasting=True)
    written.sealer.step()
    failing.disarm()
    written.sealer.step()
    assert sealed_segments(log) == 0 and not sealed, "the second names the first one's hash"
    written.shard.storage.sync_written()
    while written.syncer.jobs:
        written.syncer.step()
    for _ in range(3):
        assert len(sealed) == 2 or written.run_later(), "it is tried again"
        while written.sealer.jobs:
            written.sealer.step()
    assert sealed == [1, 2] and written.hosted.failure is None


# -- a disk that falls behind ---------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["time", "records"])
def test_acknowledgements_of_a_written_topic_wait_while_the_disk_is_behind(
    written: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    written.open_producer(session)
    written.subscribe(session, start="earliest")
    written.publish(session, numbered(2))
    written.turn()
    assert acknowledged(session) == [0]
    written.shard.storage.sync_written()
    if bound == "time":
        written.shard.storage.sync_lag_max_ns = 0
    else:
        monkeypatch.setattr(storage, "UNSYNCED_RECORDS_MAX", 3)
    for number in range(2):
        written.publish(session, numbered(2, 2 + 2 * number))
        written.turn()
        written.shard.storage.sync_written()
    assert session.take() == [], "neither acknowledged nor handed out"
    assert written.hosted.statistics()["waits_for_disk"]
    assert written.syncer.step() == 1
    written.turn()
    assert session.take() == [], "the sync that ran was asked for before"
    assert written.syncer.step() == 1, "the next one is asked for at once"
    written.turn()
    frames = session.take()
    answers = [frame for frame in frames if frame.kind == Kind.PUBLISHED]
    assert [wire.decode_published(frame.body).base_offset for frame in answers] == [2, 4]
    delivered = [frame for frame in frames if frame.kind == Kind.DELIVER]
    assert [record for frame in delivered for record in frame.records] == expected(2, 6)
    assert not written.hosted.core.held
    written.shard.storage.sync_lag_max_ns = 10**18
    written.publish(session, numbered(1, 6))
    written.turn()
    assert acknowledged(session) == [6], "the disk has caught up"


def test_a_disk_that_fails_while_it_is_behind_fails_what_waits(
    written: Bench, session: RecordingSession
) -> None:
    written.open_producer(session)
    written.publish(session, numbered(1))
    written.turn()
    assert acknowledged(session) == [0]
    written.shard.storage.sync_lag_max_ns = 0
    written.publish(session, numbered(1, 1))
    written.turn()
    assert session.take() == []
    written.syncer.step(EIO)
    assert isinstance(session.only(Kind.ERROR).error, StorageFailed)
    written.run_later()
    assert written.hosted.failure is None and not written.hosted.core.held


def test_changing_the_level_ends_the_wait(written: Bench, session: RecordingSession) -> None:
    written.open_producer(session)
    written.publish(session, numbered(1))
    written.turn()
    written.shard.storage.sync_lag_max_ns = 0
    written.publish(session, numbered(1, 1))
    written.turn()
    assert acknowledged(session) == [0]
    for level in ("fsync", "written"):
        policy = msgspec.structs.replace(written.record.policy, durability=level)
        written.shard.update_policy(msgspec.structs.replace(written.record, policy=policy))
    assert acknowledged(session) == [1] and not written.hosted.core.held


# -- cursors --------------------------------------------------------------------------------------


def test_a_synced_ack_is_answered_when_the_cursor_is_on_the_disk(
    written: Bench, session: RecordingSession
) -> None:
    written.open_producer(session)
    written.subscribe(session)
    written.publish(session, numbered(2))
    written.turn()
    session.take()
    written.frame(session, wire.ack_frame(2, bytes(8) + (2).to_bytes(8, "little"), 77, FrameFlag.SYNC))
    assert session.take() == []
    written.syncer.step()
    assert session.only(Kind.RESULT).correlation == 77


def test_a_cursor_is_synced_behind_the_records_that_it_passed(
    written: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fdatasync, fsync_directory = files.fdatasync, files.fsync_directory

    def named(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name[-5:])
        fdatasync(fd)

    def directory(path: Path) -> None:
        synced.append("directory")
        fsync_directory(path)

    written.open_producer(session)
    written.subscribe(session)
    written.publish(session, numbered(2))
    written.turn()
    session.take()
    monkeypatch.setattr(files, "fdatasync", named)
    monkeypatch.setattr(files, "fsync_directory", directory)
    written.frame(session, wire.ack_frame(2, bytes(8) + (2).to_bytes(8, "little"), 77, FrameFlag.SYNC))
    written.syncer.step()
    session.only(Kind.RESULT)
    assert synced[:2] == ["0.seg", "directory"] and "ors-" in synced[2], synced
    written.shard.storage.sync_written()
    written.syncer.step()
    synced.clear()
    written.ack(session, 0, 2)
    written.frame(session, wire.ack_frame(2, bytes(8) + (3).to_bytes(8, "little"), 78, FrameFlag.SYNC))
    written.syncer.step()
    assert "0.seg" not in synced, "the log is on the disk already"


def test_a_cursor_is_not_synced_where_its_records_cannot_be(
    written: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.open_producer(session)
    written.subscribe(session)
    written.publish(session, numbered(2))
    written.turn()
    session.take()
    failing = FailingFiles(monkeypatch)
    written.frame(session, wire.ack_frame(2, bytes(8) + (2).to_bytes(8, "little"), 77, FrameFlag.SYNC))
    failing.arm(0, errno.EIO)
    written.syncer.step()
    failing.disarm()
    assert isinstance(session.only(Kind.ERROR).error, StorageFailed)
    cursors = written.hosted.cursors
    assert cursors is not None and not cursors._durable
    written.shard.storage.sync_written()
    written.syncer.step()
    assert written.hosted.failure is not None, "the log hears of it: its file is never synced again"


def test_cursors_that_a_full_disk_refused_are_written_when_there_is_room(
    tmp_path: Path, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.open_producer(session)
    bench.subscribe(session, consumer="c")
    bench.publish(session, numbered(4))
    bench.turn()
    session.take()
    bench.ack(session, 0, 3)
    bench.turn()
    disk = FailingFiles(monkeypatch)
    disk.arm(0, errno.ENOSPC, lasting=True)
    bench.shard.store_cursors()
    assert bench.counters["storage_errors"] == 1
    disk.disarm()
    bench.shard.store_cursors()  # nothing was acked since
    bench.shard.storage.sync_cursors()
    assert bench.syncer.step() == 1
    other = Bench(tmp_path / "copy")
    (tmp_path / "copy").mkdir()
    directory = bench.hosted.directory
    assert directory is not None
    copied = tmp_path / "copy" / directory.name
    copied.mkdir()
    for path in directory.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    assert other.subscribe(RecordingSession(2), consumer="c").ack_floor == 3
    bench.shard.close()
    other.shard.close()


def test_a_failed_cursor_sync_is_done_again(written: Bench, session: RecordingSession) -> None:
    written.open_producer(session)
    written.subscribe(session)
    written.publish(session, numbered(2))
    written.turn()
    written.ack(session, 0, 1)
    written.turn()
    written.shard.store_cursors()
    written.shard.storage.sync_cursors()
    written.syncer.step(EIO)
    assert written.counters["storage_errors"] == 1
    written.shard.storage.sync_cursors()
    assert written.syncer.step() == 1


def test_an_ack_or_subscription_whose_cursor_is_not_on_the_disk_is_answered_with_the_error(
    written: Bench, session: RecordingSession
) -> None:
    written.open_producer(session)
    written.subscribe(session)
    written.publish(session, numbered(2))
    written.turn()
    session.take()
    written.frame(session, wire.ack_frame(2, bytes(8) + (1).to_bytes(8, "little"), 77, FrameFlag.SYNC))
    # The same again: nothing new is to be stored, and the first is not on disk yet.
    written.frame(session, wire.ack_frame(2, bytes(8) + (1).to_bytes(8, "little"), 78, FrameFlag.SYNC))
    assert session.take() == []
    written.syncer.step(EIO)
    failed = session.take()
    assert [(frame.kind, frame.correlation) for frame in failed] == [(Kind.ERROR, 77), (Kind.ERROR, 78)]
    written.frame(session, wire.ack_frame(2, bytes(8) + (2).to_bytes(8, "little"), 79, FrameFlag.SYNC))
    written.syncer.step()
    assert session.only(Kind.RESULT).correlation == 79


# -- spare segments -------------------------------------------------------------------------------


def publish_until_spare(bench: Bench, session: RecordingSession) -> None:
    """Until room is made for the next segment of what is published quickly."""
    bench.open_producer(session)
    while not bench.sealer.jobs:
        bench.publish(session, numbered(50, bench.hosted.core.log_end))
        bench.turn()
    assert [type(job) for job, _ in bench.sealer.jobs] == [SpareJob]


def spares_of(bench: Bench) -> list[str]:
    directory = bench.hosted.directory
    assert directory is not None
    return [path.name for path in directory.iterdir() if spare_epoch_of(path.name) is not None]


def test_room_for_the_next_segment_is_made_beside_the_loop_and_used(
    written: Bench, session: RecordingSession
) -> None:
    publish_until_spare(written, session)
    written.sealer.step()
    assert len(spares_of(written)) == 1
    publish_until_sealing(written, session)
    written.publish(session, numbered(1))
    written.turn()
    log = written.hosted.log
    assert log is not None and log.active is not None and spares_of(written) == []
    assert log.active.size_bytes > SMALL.segment_bytes > log.active.data_end


def test_a_spare_does_not_wait_for_seals(written: Bench, session: RecordingSession) -> None:
    reserver = SteppedSyncer()
    written.shard.storage.reserver = cast(Syncer, reserver)
    written.open_producer(session)
    publish_until_sealing(written, session)
    while not reserver.jobs:
        written.publish(session, numbered(50, written.hosted.core.log_end))
        written.turn()
    assert {type(job) for job, _ in written.sealer.jobs} == {SealJob}, "nothing was sealed meanwhile"
    reserver.step()
    assert len(spares_of(written)) == 1
    written.shard.storage.drop_spares()
    assert [type(job) for job, _ in reserver.jobs] == [DropJob], "in the order of asking"
    reserver.step()
    assert spares_of(written) == []


def test_a_log_that_became_slower_gives_its_spare_back(written: Bench, session: RecordingSession) -> None:
    publish_until_spare(written, session)
    written.sealer.step()
    storage_ = written.shard.storage
    active = written.hosted.log.active if written.hosted.log is not None else None
    assert active is not None
    storage_.drop_spares(active.last_append_us + KEPT_US)
    assert written.sealer.jobs == [] and len(spares_of(written)) == 1, "it may still be quick enough"
    storage_.drop_spares(active.last_append_us + KEPT_US + 1)
    assert len(spares_of(written)) == 1, "not on the loop"
    written.sealer.step()
    assert spares_of(written) == []
    storage_.drop_spares()
    assert written.sealer.jobs == []


def test_a_full_disk_takes_the_spare_of_the_log_first(
    written: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_until_spare(written, session)
    written.sealer.step()
    disk = FailingFiles(monkeypatch, ("pwritev",))
    disk.arm(0, errno.ENOSPC)
    written.publish(session, numbered(1))
    written.turn()
    assert disk.fired and spares_of(written) == [], "its own, at once"
    assert session.take(Kind.ERROR) == []


def test_a_full_disk_takes_the_spares_of_other_logs_too(
    written: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_until_spare(written, session)
    written.sealer.step()

    def full() -> None:
        raise StorageFull("the disk is full")

    log = written.hosted.log
    assert log is not None
    monkeypatch.setattr(log, "write", full)  # stands for any other log of the worker
    written.publish(session, numbered(1))
    written.turn()
    assert [type(job) for job, _ in written.sealer.jobs] == [DropJob]
    written.sealer.step()
    assert spares_of(written) == []


def test_a_seal_that_finds_the_disk_full_gives_the_spares_back(
    written: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_until_spare(written, session)
    written.sealer.step()
    written.shard.storage.roll(written.hosted)
    disk = FailingFiles(monkeypatch, ("pwritev",))
    disk.arm(0, errno.ENOSPC, lasting=True)
    written.sealer.step()
    disk.disarm()
    assert len(spares_of(written)) == 1 and [type(job) for job, _ in written.sealer.jobs] == [DropJob]
    written.sealer.step()
    assert spares_of(written) == []


def test_a_deleted_topic_leaves_no_directory_for_a_spare_that_was_asked_for(
    written: Bench, session: RecordingSession
) -> None:
    publish_until_spare(written, session)
    directory = written.hosted.directory
    assert directory is not None
    written.shard.delete_topic(written.record)
    assert [type(job) for job, _ in written.sealer.jobs] == [SpareJob, DropJob]
    assert not directory.exists()
    written.sealer.step()
    assert not directory.exists()


def test_a_log_that_fails_drops_its_spare_in_the_thread(written: Bench, session: RecordingSession) -> None:
    publish_until_spare(written, session)
    written.sealer.step()
    written.shard.storage.fence(written.hosted, StorageFailed("for the test"))
    assert [type(job) for job, _ in written.sealer.jobs] == [DropJob] and len(spares_of(written)) == 1
    written.sealer.step()
    assert spares_of(written) == []


def test_a_spare_is_dropped_at_once_where_the_thread_has_ended(
    written: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_until_spare(written, session)
    written.sealer.step()

    def ended(job: Any, on_done: Any) -> None:
        raise ClosedError("the syncer was stopped")

    monkeypatch.setattr(written.sealer, "submit", ended)
    written.shard.storage.drop_spares()
    assert spares_of(written) == []
