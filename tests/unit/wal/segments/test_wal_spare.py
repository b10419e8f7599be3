"""The next segment's file, made ahead: what it saves, and that nothing depends on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube.errors import StorageFailed, StorageFull
from danube.host import files
from danube.spark.history.local_segments import LocalSegments
from danube.spark.jobs.validate.directory import DirectoryPlan
from danube.wal.log.log import Log, LogOptions
from danube.wal.log.syncer import Syncer
from danube.wal.segments import spare
from danube.wal.segments.descriptors import descriptors
from danube.wal.segments.segment import file_name, spare_epoch_of, spare_name
from danube.wal.segments.spare import KEPT_US, NEVER, SpareJob
from danube.wal.segments.walk import first_nonzero
from danube.wal.verify.tree import Verified, verify_partition
from tests.unit.failing_files import FailingFiles
from tests.unit.wal_samples import IDENTITY, SMALL, START_US, append, open_log, read_all, roll, sync

EIO = errno.EIO
NAME = spare_name(1)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "mark")


def fill(log: Log, size: int = 2000, time_us: int | None = None) -> None:
    append(log, bytes(size), time_us=time_us)
    log.write()


def asked(log: Log) -> SpareJob:
    """The job of a log that has filled enough of its segment."""
    job = log.spare.job(log.active)
    assert job is not None
    return job


def make(log: Log) -> SpareJob:
    job = asked(log)
    job.run(set())
    log.spare.done(job, None)
    return job


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Its first segment is half full."""
    made = open_log(tmp_path)
    fill(made)
    return made


def test_a_segment_that_was_reserved_ahead_is_written_without_asking_the_disk_for_room(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(log)
    assert names(tmp_path) == [file_name(0), NAME]
    assert (tmp_path / NAME).stat().st_blocks * 512 >= SMALL.segment_bytes
    sync(log)
    inode = (tmp_path / NAME).stat().st_ino
    sealing = log.roll()
    calls = FailingFiles(monkeypatch)
    fill(log, 10)
    while not log.should_roll:
        fill(log, 60)
    assert {name for name, _ in calls.calls} == {"rename_new", "pwritev"}
    assert names(tmp_path) == [file_name(0), file_name(1)]
    assert (tmp_path / file_name(1)).stat().st_ino == inode
    assert (tmp_path / file_name(1)).stat().st_size == job.size
    sync(log)
    assert "fsync_directory" in {name for name, _ in calls.calls}, "its name is on the disk with its records"
    assert sealing is not None
    sealing.run(set())
    log.sealed(sealing)
    assert log.spare.due_position < NEVER, "the one behind needs another"
    expected = read_all(log)
    roll(log)
    assert (tmp_path / file_name(1)).stat().st_size < job.size, "what was not needed of it is given back"
    log.close()
    again = open_log(tmp_path, epoch=2)
    assert read_all(again) == expected and again.recovery.damaged == ()
    again.close()


def test_a_spare_that_is_late_is_for_the_segment_behind_the_next(tmp_path: Path, log: Log) -> None:
    late = asked(log)
    roll(log)
    fill(log)
    assert log.spare.job(log.active) is None, "one is under way"
    late.run(set())
    log.spare.done(late, None)
    roll(log)
    inode = (tmp_path / NAME).stat().st_ino
    fill(log)
    assert (tmp_path / file_name(2)).stat().st_ino == inode
    log.close()


def test_one_that_is_whole_is_taken_before_the_loop_has_heard_of_it(tmp_path: Path, log: Log) -> None:
    job = asked(log)
    job.run(set())
    roll(log)
    fill(log)
    next_job = asked(log)
    log.spare.done(job, None)
    assert log.spare.held, "that is the next one"
    next_job.run(set())
    log.spare.done(next_job, None)
    assert names(tmp_path) == [file_name(0), file_name(1), NAME]
    log.close()
    assert names(tmp_path) == [file_name(0), file_name(1)]


def test_only_a_log_that_fills_a_part_quickly_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "IN_STEPS_MIN", 1000)
    slow = open_log(tmp_path / "slow", options=SMALL._replace(segment_bytes=16_000))
    fill(slow, 10, START_US)
    assert slow.spare.job(slow.active) is None and slow.spare.due_position == 1000
    fill(slow, 8_000, START_US + KEPT_US)
    assert slow.spare.job(slow.active) is None and slow.spare.due_position == NEVER
    assert not slow.spare.held
    roll(slow)
    fill(slow, 10, START_US)
    fill(slow, 8_000, START_US + KEPT_US // 2)
    job = make(slow)
    roll(slow)
    fill(slow, 10, START_US)
    assert job.made and slow.spare.job(slow.active) is None
    assert slow.spare.due_position == 1000, "this one has its space; the next may be needed within 0.1 s"
    fill(slow, 1_000, START_US)
    assert slow.spare.job(slow.active) is not None
    slow.close()
    plain = open_log(tmp_path / "plain", options=SMALL._replace(preallocate_first=0))
    assert plain.spare.job(plain.active) is None
    fill(plain)
    assert plain.spare.job(plain.active) is None, "it reserves nothing"
    plain.close()


def test_a_segment_that_grows_in_steps_ends_where_a_spare_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "IN_STEPS_MIN", 1000)
    log = open_log(tmp_path, options=SMALL._replace(segment_bytes=16_000))
    fill(log, 1_000)
    job = asked(log)
    assert not log.should_roll, "it is not there yet"
    roll(log)
    fill(log, 10)
    job.run(set())
    assert not log.should_roll, "a segment is more than some records"
    fill(log, 1_000)
    log.spare.done(job, None)
    assert log.should_roll
    roll(log)
    fill(log, 8_000)
    assert (tmp_path / file_name(3)).stat().st_size == job.size
    make(log)
    assert not log.should_roll, "its own space is there"
    fill(log, 8_000)
    assert log.should_roll
    log.close()


def test_small_segments_become_full_before_they_end(tmp_path: Path, log: Log) -> None:
    make(log)
    assert not log.should_roll
    while not log.should_roll:
        fill(log, 60)
    assert log.active is not None and log.active.data_end >= SMALL.segment_bytes
    log.close()


def test_a_spare_is_not_part_of_the_log(tmp_path: Path, log: Log) -> None:
    before = log.local_bytes
    make(log)
    sync(log)
    assert log.active is not None and log.local_bytes == before == log.active.data_end
    found = verify_partition(tmp_path, (IDENTITY.topic_id, IDENTITY.partition), verified := Verified())
    assert not verified.findings and not verified.remarks and len(found.segments) == 1
    assert [one.start for one in LocalSegments(tmp_path, IDENTITY).found(unsynced=True)] == [0]
    plan = DirectoryPlan(IDENTITY, tmp_path)
    assert not plan.part.remarks and not plan.part.findings and len(plan.work) == 1
    log.close()


def test_what_is_reserved_ahead_does_not_make_retention_delete(log: Log) -> None:
    make(log)
    roll(log)
    fill(log)
    assert log.active is not None and log.active.size_bytes > log.active.data_end
    stored = log.local_bytes
    assert log.retain(START_US, 0, stored) == [] and log.start == 0
    assert log.retain(START_US, 0, stored - 4096) == [(0, 1)]
    log.close()


@pytest.mark.parametrize("name", ["unlink", "open_new", "fallocate"])
@pytest.mark.parametrize("number", [EIO, errno.EDQUOT, errno.EOPNOTSUPP])
def test_a_spare_that_cannot_be_made_leaves_nothing_and_the_log_goes_on(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    if name == "unlink":
        (tmp_path / NAME).write_bytes(b"a leftover")
    with monkeypatch.context() as patch:
        FailingFiles(patch, (name,)).arm(0, number)
        job = asked(log)
        with pytest.raises(OSError) as caught:
            job.run(set())
        log.spare.done(job, caught.value)
    assert not job.made and not log.spare.held
    assert names(tmp_path) == [file_name(0)] + [NAME] * (name == "unlink")
    roll(log)
    fill(log)
    again = log.spare.job(log.active)
    assert (again is not None) == (number == errno.EDQUOT), "only room may come back"
    log.close()
    reopened = open_log(tmp_path, epoch=2)
    assert len(read_all(reopened)[0]) == 2
    reopened.close()


def test_a_disk_that_fills_while_it_is_made_gets_its_room_back(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "CHUNK_BYTES", 4096)
    free = iter([1 << 40, 0])
    monkeypatch.setattr(files, "free_bytes", lambda fd: next(free))
    job = make(log)
    assert not job.made and not log.spare.held and names(tmp_path) == [file_name(0)]
    log.close()


def test_a_full_disk_gets_the_spare_before_a_write_is_refused(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(log)
    pwritev = files.pwritev

    def full_beside_a_spare(fd: int, buffers: Any, position: int) -> int:
        if (tmp_path / NAME).exists():
            raise OSError(errno.ENOSPC, "no room")
        return pwritev(fd, buffers, position)

    monkeypatch.setattr(files, "pwritev", full_beside_a_spare)
    fill(log, 100)
    assert log.written_end == 2 and names(tmp_path) == [file_name(0)] and not log.spare.held
    disk = FailingFiles(monkeypatch, ("pwritev",))
    disk.arm(0, errno.ENOSPC, lasting=True)
    with pytest.raises(StorageFull):
        fill(log, 100)
    assert disk.fired == 1, "there is nothing more to give up"
    disk.disarm()
    fill(log, 100)
    log.close()
    again = open_log(tmp_path, epoch=2)
    assert sorted(read_all(again)[0]) == [0, 1, 2]
    again.close()


def test_a_full_disk_at_the_roll_gets_the_spare_too(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(log)
    roll(log)
    disk = FailingFiles(monkeypatch, ("rename_new",))
    disk.arm(0, errno.EDQUOT)
    fill(log)
    assert disk.fired and names(tmp_path) == [file_name(0), file_name(1)]
    log.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, EIO])
def test_a_file_system_that_cannot_name_it_gets_a_file_as_before(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    make(log)
    roll(log)
    FailingFiles(monkeypatch, ("rename_new",)).arm(0, number)
    fill(log)
    assert names(tmp_path) == [file_name(0), file_name(1)] and log.spare.due_position == NEVER
    assert (tmp_path / file_name(1)).stat().st_size <= 2 * SMALL.preallocate_first
    roll(log)
    fill(log)
    assert log.spare.job(log.active) is None, "no other is made in vain"
    log.close()


def test_another_owners_file_is_never_overwritten(tmp_path: Path, log: Log) -> None:
    make(log)
    roll(log)
    (tmp_path / file_name(1)).write_bytes(b"a newer owner's")
    append(log, b"late")
    with pytest.raises(StorageFailed, match="exists"):
        log.write()
    assert log.fenced and (tmp_path / file_name(1)).read_bytes() == b"a newer owner's"
    assert names(tmp_path) == [file_name(0), file_name(1)]
    log.abandon()


def test_the_file_that_gets_the_name_is_locked_as_any_other(tmp_path: Path, log: Log) -> None:
    make(log)
    roll(log)
    fill(log)
    sync(log)
    assert log.active is not None
    fd = os.open(tmp_path / file_name(1), os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            files.lock(fd)
    finally:
        os.close(fd)
    descriptors.close(log.active.file)  # as after a long idle time
    new = open_log(tmp_path, epoch=2)
    new.close()
    append(log, b"late")
    with pytest.raises(StorageFailed):
        log.write()
    log.abandon()


def test_a_newer_owner_removes_it_and_the_older_one_writes_into_nothing_of_its(tmp_path: Path) -> None:
    old = open_log(tmp_path)
    fill(old)
    make(old)
    roll(old)
    new = open_log(tmp_path, epoch=2)
    assert not [name for name in names(tmp_path) if spare_epoch_of(name) is not None]
    fill(new)
    append(old, b"late")
    with pytest.raises(StorageFailed):
        old.write()
    old.abandon()
    assert len(read_all(new)[0]) == 2
    new.close()


def test_what_a_killed_owner_left_is_removed_and_does_not_make_an_opening_fail(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(log)
    log.spare.drop()  # nobody carries it out
    log.abandon()
    (tmp_path / spare_name(7)).write_bytes(b"")
    assert NAME in names(tmp_path)
    unlink = files.unlink

    def gone_meanwhile(path: Path) -> None:
        if path.name == NAME:
            os.unlink(path)  # its fenced log, in a thread
        unlink(path)

    monkeypatch.setattr(files, "unlink", gone_meanwhile)
    again = open_log(tmp_path, epoch=2)
    assert not [name for name in names(tmp_path) if spare_epoch_of(name) is not None] and again.log_end == 1
    again.close()


def test_a_crash_right_after_it_got_its_name_leaves_nothing(tmp_path: Path, log: Log) -> None:
    """All of it is zeros: no record was written."""
    job = make(log)
    sync(log)
    sealing = log.roll()
    assert sealing is not None
    sealing.run(set())
    log.sealed(sealing)
    files.rename_new(job.path, tmp_path / file_name(1))
    log.abandon()
    verified = Verified()
    verify_partition(tmp_path, (IDENTITY.topic_id, IDENTITY.partition), verified)
    assert not verified.findings and "never written" in verified.remarks[0]
    again = open_log(tmp_path, epoch=2)
    assert again.log_end == 1 and again.recovery.damaged == () and names(tmp_path) == [file_name(0)]
    fill(again)
    assert sorted(read_all(again)[0]) == [0, 1]
    again.close()


def test_a_reopened_owner_of_the_same_epoch_replaces_what_it_could_not_delete(
    tmp_path: Path, log: Log
) -> None:
    (tmp_path / NAME).write_bytes(b"a leftover")
    assert make(log).made and (tmp_path / NAME).read_bytes() == bytes((tmp_path / NAME).stat().st_size)
    log.close()


@pytest.mark.parametrize("moment", ["before", "between chunks", "after"])
@pytest.mark.parametrize("end", [Log.abandon, Log.close])
def test_a_log_that_ends_leaves_none_whatever_the_thread_does(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, moment: str, end: Callable[[Log], None]
) -> None:
    monkeypatch.setattr(spare, "CHUNK_BYTES", 4096)
    job = asked(log)
    chunks: list[int] = []
    fallocate = files.fallocate

    def ends_meanwhile(fd: int, position: int, size: int) -> None:
        fallocate(fd, position, size)
        chunks.append(position)
        if moment == "between chunks" and len(chunks) == 1:
            end(log)

    monkeypatch.setattr(files, "fallocate", ends_meanwhile)
    if moment == "before":
        end(log)
    job.run(set())
    if moment == "after":
        end(log)
    log.spare.done(job, None)
    assert names(tmp_path) == [file_name(0)] and not log.spare.held
    assert len(chunks) == {"before": 0, "between chunks": 1, "after": -(-job.size // 4096)}[moment]
    end(log)


def test_one_that_cannot_be_deleted_stays_until_the_next_opening(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(log)
    with monkeypatch.context() as patch:
        FailingFiles(patch, ("unlink",)).arm(0, EIO)
        log.abandon()
    assert NAME in names(tmp_path)
    again = open_log(tmp_path, epoch=2)
    assert NAME not in names(tmp_path)
    again.close()


def test_a_real_thread_makes_and_drops_spares_while_the_log_is_written(tmp_path: Path) -> None:
    """The loop's side and the thread's meet in every order that they like."""
    outcomes: list[Callable[[], None]] = []
    syncer = Syncer(outcomes.append)
    syncer.start()
    log = open_log(tmp_path, options=LogOptions(8192, 4096, 8192))
    for number in range(400):
        fill(log, 500)
        job = log.spare.job(log.active)
        if job is not None:
            syncer.submit(job, log.spare.done)
        if log.should_roll:
            roll(log)
        if number % 7 == 0 and (dropped := log.spare.drop()) is not None:
            syncer.submit(dropped, lambda job, error: None)
        while outcomes:
            outcomes.pop(0)()
    log.close()
    syncer.stop()
    assert not [name for name in names(tmp_path) if spare_epoch_of(name) is not None]
    again = open_log(tmp_path, epoch=2)
    assert sorted(read_all(again)[0]) == list(range(400)) and again.recovery.damaged == ()
    again.close()


def test_a_spare_is_old_when_the_log_has_become_slower(log: Log) -> None:
    job = make(log)
    asked_us = START_US
    assert not log.spare.old(asked_us + KEPT_US) and log.spare.old(asked_us + KEPT_US + 1)
    dropped = log.spare.drop()
    assert dropped is not None and log.spare.drop() is None and not log.spare.old(1 << 62)
    dropped.run(set())
    assert not job.path.exists() and log.spare.job(log.active) is None, "not again in this segment"
    log.close()


def test_a_name_is_given_only_where_it_can_be_given_without_overwriting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"s")
    target.write_bytes(b"t")
    with pytest.raises(FileExistsError):
        files.rename_new(source, target)
    assert target.read_bytes() == b"t" and source.exists()
    target.unlink()
    monkeypatch.setattr(files, "_libc", object())
    with pytest.raises(OSError, match="renameat2") as caught:
        files.rename_new(source, target)
    assert caught.value.errno == errno.ENOSYS and source.exists()
    monkeypatch.undo()
    files.rename_new(source, target)
    assert target.read_bytes() == b"s" and not source.exists()


def test_what_was_never_written_of_a_file_is_not_read(tmp_path: Path) -> None:
    fd = files.open_new(tmp_path / "file")
    try:
        files.fallocate(fd, 0, 64 << 20)
        files.pwritev(fd, [b"x"], 32 << 20)
        assert files.next_data(fd, 0) in (0, 32 << 20)  # 0: a file system that does not tell
        assert first_nonzero(fd, 0, 64 << 20) is not None
        assert first_nonzero(fd, (32 << 20) + 1, 64 << 20) is None
        assert first_nonzero(fd, 0, 16 << 20) is None
        assert files.next_data(fd, 64 << 20) is None
    finally:
        files.close(fd)
    assert files.next_data(fd, 7) == 7, "who cannot tell skips nothing"
