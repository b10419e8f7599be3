"""The disk fails at every call in turn: nothing acknowledged is lost and nothing failed comes back wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube.errors import StorageFailed, StorageFull
from danube.host import files
from danube.wal.log.log import Log
from tests.log_oracle import verify as verify_directory
from tests.unit.failing_files import FailingFiles, Killed
from tests.unit.wal_samples import append, memory_directory, open_log, read_all, roll, sync


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        yield directory


class History:
    """What was attempted and what was acknowledged, at both levels."""

    def __init__(self) -> None:
        self.written: dict[int, bytes] = {}
        self.synced_end = 0
        self.number = 0

    def payload(self) -> bytes:
        self.number += 1
        return b"attempt %d" % self.number * 3


def work(log: Log, history: History, rounds: int = 6) -> None:
    """Appends, writes, syncs, rolls and deletes; notes what was acknowledged."""
    for number in range(rounds):
        for _ in range(3):
            if log.fenced:
                return
            attempts = {log.log_end + count: history.payload() for count in range(2)}
            for payload in attempts.values():
                append(log, payload)
            try:
                log.write()
            except StorageFull:
                assert log.log_end == log.written_end
                continue
            except StorageFailed:
                assert log.fenced and log.log_end == log.written_end
                return
            history.written |= attempts
            make_spare(log)
        job = log.sync_job()
        if job is not None:
            try:
                job.run(set())
            except (OSError, StorageFailed) as error:
                log.sync_failed(job, error)
                assert log.sync_job() is None
                return
            log.synced(job)
            log.store_mark()
            history.synced_end = log.synced_end
        if number % 2 and log.written_end == log.synced_end:
            seal = log.roll(b"snapshot")
            if seal is not None:
                try:
                    seal.run(set())
                except (OSError, StorageFailed) as error:
                    log.seal_failed(seal, error)
                    return
                log.sealed(seal)


def make_spare(log: Log) -> None:
    """Whatever happens to it, the log does not hear of it."""
    job = log.spare.job(log.active)
    if job is not None:
        try:
            job.run(set())
        except OSError as error:
            log.spare.done(job, error)
        else:
            log.spare.done(job, None)


def reopen(directory: Path, epoch: int, failing: FailingFiles | None = None) -> Log:
    if failing is not None:
        failing.disarm()
    return open_log(directory, epoch=epoch)


def verify(log: Log, history: History) -> None:
    found, damage = read_all(log)
    assert damage == []
    for offset, payload in history.written.items():
        assert found[offset] == payload, offset
    assert sorted(found) == list(range(log.log_end))


def call_count(directory: Path, failing: FailingFiles) -> int:
    log = open_log(directory)
    failing.arm(10**9, errno.EIO)
    work(log, History())
    count = len(failing.calls)
    assert sum(name == "rename_new" for name, _ in failing.calls) >= 2, "spares are part of it"
    log.abandon()
    return count


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EDQUOT, errno.EIO, "short", "short and full"])
def test_a_failure_of_any_call_loses_nothing_that_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int | str
) -> None:
    failing = FailingFiles(monkeypatch)
    count = call_count(tmp_path / "dry", failing)
    assert count > 30
    fired = 0
    for at in range(count):
        directory = tmp_path / str(at)
        log, history = open_log(directory), History()
        failing.arm(at, kind)
        work(log, history)
        fired += failing.fired
        failing.disarm()
        if not log.fenced:
            append(log, b"the log goes on")
            history.written[log.written_end] = b"the log goes on"
            log.write()
        verify(log, history)
        log.abandon()
        assert not list(directory.glob("next-*")), "unless the disk does not even delete"
        again = reopen(directory, 2, failing)
        verify(again, history)
        again.close()
    assert fired >= 5, "the fault itself must have happened"


@pytest.mark.parametrize("kind", ["killed", "killed after"])
def test_a_crash_at_any_call_and_again_in_recovery_loses_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    failing = FailingFiles(monkeypatch)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    count = call_count(tmp_path / "dry", failing)
    for at in range(count):
        directory = tmp_path / str(at)
        log, history = open_log(directory), History()
        failing.arm(at, kind)
        with pytest.raises(Killed):
            work(log, history)
        failing.disarm()
        log.spare.drop()  # nobody carries it out: what there is of it stays
        log.abandon()
        epoch, again, attempt = 2, None, 0
        while again is None:
            failing.arm(attempt, kind)
            attempt += 1 + at % 3
            try:
                again = open_log(directory, epoch=epoch)
            except Killed:
                epoch += 1
        failing.disarm()
        verify(again, history)
        end = again.log_end
        again.close()
        last = open_log(directory, epoch=epoch + 1)
        assert last.log_end == end and not list(directory.glob("*.new"))
        verify(last, history)
        last.abandon()


def test_a_sync_that_failed_is_never_asked_for_again_on_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingFiles(monkeypatch)
    log = open_log(tmp_path)
    append(log, b"kept")
    log.write()
    sync(log)
    append(log, b"written")
    log.write()
    first = log.sync_job()
    append(log, b"too")
    log.write()
    second = log.sync_job()
    assert first is not None and second is not None
    inode = os.fstat(first.files[0].fd).st_ino
    failing.arm(0, errno.EIO)
    with pytest.raises(OSError):
        first.run(set())
    with pytest.raises(StorageFailed):
        second.run(set())
    assert [name for name, _ in failing.calls] == ["fdatasync"]
    log.sync_failed(first, OSError(errno.EIO, "sync"))
    log.sync_failed(second, OSError(errno.EIO, "sync"))
    assert log.sync_job() is None and log.synced_end == 1
    with pytest.raises(StorageFailed):
        append(log, b"refused")
    with pytest.raises(StorageFailed):
        log.write()
    assert read_all(log)[0] == {0: b"kept", 1: b"written", 2: b"too"}
    failing.disarm()
    log.abandon()
    again = open_log(tmp_path, epoch=2)
    assert read_all(again)[0] == {0: b"kept", 1: b"written", 2: b"too"}
    assert all(
        os.stat(tmp_path / name).st_ino != inode
        for name in os.listdir(tmp_path)
        if name.startswith("0" * 19 + "1")
    )
    again.close()


def test_after_a_failed_sync_an_fsync_topic_goes_on_from_what_was_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingFiles(monkeypatch)
    log = open_log(tmp_path)
    append(log, b"acknowledged")
    log.write()
    sync(log)
    append(log, b"never acknowledged")
    log.write()
    job = log.sync_job()
    assert job is not None
    failing.arm(0, errno.EIO)
    with pytest.raises(OSError) as caught:
        job.run(set())
    log.sync_failed(job, caught.value)
    failing.disarm()
    again = open_log(tmp_path, epoch=2, trusted_end=log.synced_end)
    log.abandon()
    assert read_all(again)[0] == {0: b"acknowledged"}
    append(again, b"other")
    again.close()
    third = open_log(tmp_path, epoch=3)
    assert read_all(third)[0] == {0: b"acknowledged", 1: b"other"}
    third.close()


def test_a_full_disk_lets_readers_read_and_the_log_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingFiles(monkeypatch)
    log = open_log(tmp_path)
    append(log, b"before")
    log.write()
    failing.arm(0, errno.ENOSPC, lasting=True)
    for _ in range(3):
        append(log, bytes(10_000))
        with pytest.raises(StorageFull):
            log.write()
        assert (log.log_end, log.written_end, log.pending_bytes) == (1, 1, 0)
        assert read_all(log)[0] == {0: b"before"}
    failing.disarm()
    append(log, b"after")
    log.write()
    assert read_all(log)[0] == {0: b"before", 1: b"after"}
    log.abandon()
    again = open_log(tmp_path, epoch=2)
    assert read_all(again)[0] == {0: b"before", 1: b"after"}
    again.close()


def test_a_footer_that_does_not_fit_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingFiles(monkeypatch)
    log = open_log(tmp_path)
    append(log, b"x")
    log.write()
    sync(log)
    job = log.roll(b"s")
    assert job is not None
    failing.arm(0, errno.ENOSPC, lasting=True)
    job.run(set())
    failing.disarm()
    log.sealed(job)
    assert job.deferred and not log.fenced and read_all(log)[0] == {0: b"x"}
    append(log, b"y")
    log.close()
    again = open_log(tmp_path, epoch=2)
    assert read_all(again)[0] == {0: b"x", 1: b"y"}
    again.close()


def test_deleting_on_a_full_disk_makes_its_own_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest snapshot of producers needs a file before its segment goes; those before it do not."""
    failing = FailingFiles(monkeypatch)
    log = open_log(tmp_path)
    for payload in (b"a", b"b"):
        append(log, payload)
        log.write()
        sync(log)
        roll(log, b"producers")
    append(log, b"c")
    log.write()
    sync(log)
    failing.arm(0, errno.ENOSPC, lasting=True)
    assert log.evict(2) and log.start == 1
    with pytest.raises(StorageFailed):
        log.evict(2)
    failing.disarm()
    assert log.evict(2) and log.start == 2
    log.close()
    again = open_log(tmp_path, epoch=2)
    assert read_all(again)[0] == {2: b"c"} and again.recovery.producer_snapshot == b"producers"
    again.close()


def test_a_read_error_fails_that_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)
    append(log, b"x")
    log.write()
    with monkeypatch.context() as broken_disk:

        def fail(*args: object) -> bytes:
            raise OSError(errno.EIO, "read")

        broken_disk.setattr(files, "pread", fail)
        with pytest.raises(StorageFailed):
            log.read(0, 1)
    assert not log.fenced and read_all(log) == ({0: b"x"}, [])
    log.close()


def test_an_owner_in_another_process_that_still_lives_keeps_the_log(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, b"x")
    log.write()
    program = (
        "import sys; from pathlib import Path; from danube.errors import AlreadyRunning; "
        "from danube.wal.log.log import Log, LogIdentity\n"
        "try: Log.open(Path(sys.argv[1]), LogIdentity(0x1234, 3), 2)\n"
        "except AlreadyRunning: print('refused')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "refused\n"
    append(log, b"y")
    log.write()
    log.abandon()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
    again = open_log(tmp_path, epoch=3)
    assert read_all(again) == ({0: b"x", 1: b"y"}, [])
    again.close()


def test_a_stale_owner_whose_file_was_changed_meanwhile_cannot_append(tmp_path: Path) -> None:
    from danube.wal.segments.descriptors import descriptors

    old = open_log(tmp_path)
    append(old, b"x")
    old.write()
    sync(old)
    descriptors.close(old._segments[0].file)  # as after a long idle time
    new = open_log(tmp_path, epoch=2)
    new.close()
    append(old, b"late")
    with pytest.raises(StorageFailed):
        old.write()
    old.abandon()
    third = open_log(tmp_path, epoch=3)
    assert read_all(third) == ({0: b"x"}, [])
    third.close()


def test_a_roll_right_before_a_crash_keeps_both_files(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, b"first")
    log.write()
    assert log.roll(b"s") is not None
    append(log, b"second")
    log.write()
    log.abandon()
    again = open_log(tmp_path, epoch=2)
    assert read_all(again) == ({0: b"first", 1: b"second"}, []) and again.recovery.damaged == ()
    roll(again)
    again.close()


def test_a_fenced_log_never_takes_the_new_owners_work_for_damage(tmp_path: Path) -> None:
    """Readers go on with the old log until the new one is there; its files are being moved meanwhile."""
    old = open_log(tmp_path)
    append(old, b"synced")
    old.write()
    sync(old)
    append(old, b"carried")
    old.write()
    job = old.sync_job()
    assert job is not None
    old.sync_failed(job, OSError(errno.EIO, "sync"))
    assert old.read(1, 2).damage == ()
    new = open_log(tmp_path, epoch=2)
    assert old.read(0, 1).damage == ()
    with pytest.raises(StorageFailed):
        old.read(1, 2)
    assert old.damage.count == 0
    old.abandon()
    assert read_all(new) == ({0: b"synced", 1: b"carried"}, [])
    new.close()


def test_a_full_disk_at_opening_changes_nothing_and_a_later_opening_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    append(log, b"x")
    log.write()
    log.abandon()
    failing = FailingFiles(monkeypatch)
    failing.arm(0, errno.ENOSPC, lasting=True)
    with pytest.raises(StorageFull):
        open_log(tmp_path, epoch=2)
    failing.disarm()
    again = open_log(tmp_path, epoch=3)
    assert read_all(again)[0] == {0: b"x"}
    again.close()


def test_descriptors_stay_within_their_bound_and_files_are_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from danube.wal.segments.descriptors import descriptors

    monkeypatch.setattr(descriptors, "descriptors_max", len(descriptors) + 6)
    logs = [open_log(tmp_path / str(number)) for number in range(20)]
    for turn in range(3):
        for log in logs:
            append(log, b"turn %d" % turn)
            log.write()
            sync(log)
    assert len(descriptors) <= descriptors.descriptors_max
    for log in logs:
        assert read_all(log)[0] == {0: b"turn 0", 1: b"turn 1", 2: b"turn 2"}
        log.close()


def test_bytes_of_a_failed_write_never_lie_behind_a_later_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    append(log, b"kept")
    log.write()
    append(log, bytes(150))
    append(log, b"stale and whole")
    real = files.pwritev

    def written_and_failed(fd: int, buffers: list[bytes], position: int) -> int:
        real(fd, buffers, position)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as full:
        full.setattr(files, "pwritev", written_and_failed)
        with pytest.raises(StorageFull):
            log.write()
    assert verify_directory(tmp_path).end == 1
    append(log, b"short")
    log.write()
    assert verify_directory(tmp_path).sound
    log.abandon()
    again = open_log(tmp_path, epoch=2)
    assert read_all(again) == ({0: b"kept", 1: b"short"}, []) and again.recovery.damaged == ()
    again.close()


def test_every_new_name_is_durable_before_anything_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingFiles(monkeypatch)

    def names_are_durable() -> bool:
        changed = [number for number, (name, _) in enumerate(failing.calls) if name in ("rename", "open_new")]
        durable = [number for number, (name, _) in enumerate(failing.calls) if name == "fsync_directory"]
        segments = [number for number in changed if ".seg" in str(failing.calls[number][1])]
        return bool(segments) and max(segments) < max(durable, default=-1)

    log = open_log(tmp_path)
    failing.arm(10**9, 0)
    append(log, b"x")
    log.write()
    assert not names_are_durable()
    sync(log)
    assert names_are_durable()
    append(log, b"y")
    log.write()
    log.abandon()
    failing.arm(10**9, 0)
    again = open_log(tmp_path, epoch=2)
    assert names_are_durable()
    renamed = next(number for number, (name, _) in enumerate(failing.calls) if name == "rename")
    cut = [
        number for number, (name, _) in enumerate(failing.calls) if name == "ftruncate" and number > renamed
    ]
    first = next(number for number, (name, _) in enumerate(failing.calls) if name == "fsync_directory")
    assert renamed < first < min(cut), "the old copy goes only after the new one has its name for good"
    again.close()
