"""Group commit: one sync a file a group, outcomes in order on the loop's thread, errors to their owner."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube.errors import ClosedError, StorageFailed
from danube.host import files
from danube.wal.log import syncer as syncer_module
from danube.wal.log.syncer import LeftoverJob, Syncer
from tests.unit.wal_samples import append, open_log, read_all


class Loop:
    """A loop's thread: what is posted runs when the test asks for it."""

    def __init__(self) -> None:
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()

    def run_one(self) -> None:
        self.posted.get(timeout=20)()


class Gate:
    """A job that waits until it is let through."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.open = threading.Event()

    def run(self, synced: set[object]) -> None:
        self.running.set()
        if not self.open.wait(20):
            raise TimeoutError


def test_jobs_submitted_while_a_group_runs_form_one_group_with_one_sync_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced_files: list[int] = []
    real = files.fdatasync
    monkeypatch.setattr(files, "fdatasync", lambda fd: (synced_files.append(fd), real(fd)))
    loop = Loop()
    syncer = Syncer(loop.posted.put)
    syncer.start()
    logs = [open_log(tmp_path / str(number)) for number in range(3)]
    gate = Gate()
    order: list[Any] = []
    syncer.submit(gate, lambda job, error: order.append("gate"))
    assert gate.running.wait(20)
    for _ in range(4):
        for number, log in enumerate(logs):
            append(log, b"x")
            log.write()
            job = log.sync_job()
            assert job is not None

            def done(job: Any, error: Exception | None, number: int = number) -> None:
                assert error is None and threading.current_thread() is threading.main_thread()
                logs[number].synced(job)
                order.append((number, logs[number].synced_end))

            syncer.submit(job, done)
    gate.open.set()
    loop.run_one()
    assert order == ["gate"], "the second group is not told yet"
    loop.run_one()
    assert loop.posted.empty() and len(synced_files) == 3
    assert order == ["gate", *((number, end) for end in range(1, 5) for number in range(3))]
    assert all(log.synced_end == log.written_end for log in logs)
    assert (syncer.group_count, syncer.job_count) == (2, 13)
    syncer.stop()
    for log in logs:
        log.close()


def test_a_failed_sync_reaches_its_owner_only_and_later_jobs_of_that_file_fail_without_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = open_log(tmp_path / "good"), open_log(tmp_path / "bad")
    for log in (good, bad):
        append(log, b"x")
        log.write()
    first, other = bad.sync_job(), good.sync_job()
    append(bad, b"y")
    bad.write()
    second = bad.sync_job()
    assert first and other and second
    failing_fd = first.files[0].fd
    calls: list[int] = []
    real = files.fdatasync

    def fail(fd: int) -> None:
        calls.append(fd)
        if fd == failing_fd:
            raise OSError(errno.EIO, "sync")
        real(fd)

    monkeypatch.setattr(files, "fdatasync", fail)
    loop = Loop()
    syncer = Syncer(loop.posted.put)
    outcomes: list[tuple[Any, Exception | None]] = []
    for job in (first, other, second):
        syncer.submit(job, lambda job, error: outcomes.append((job, error)))
    syncer.start()
    syncer.stop()
    loop.run_one()
    assert [job for job, _ in outcomes] == [first, other, second]
    assert isinstance(outcomes[0][1], OSError) and outcomes[1][1] is None
    assert isinstance(outcomes[2][1], StorageFailed)
    assert calls.count(failing_fd) == 1
    bad.sync_failed(first, outcomes[0][1])
    bad.sync_failed(second, outcomes[2][1])
    good.synced(other)
    assert bad.fenced and not good.fenced and good.synced_end == 1
    bad.abandon()
    monkeypatch.setattr(files, "fdatasync", real)
    again = open_log(tmp_path / "bad", epoch=2)
    assert read_all(again)[0] == {0: b"x", 1: b"y"}
    again.close()
    good.close()


def test_stop_carries_out_what_was_submitted_and_refuses_more() -> None:
    loop = Loop()
    syncer = Syncer(loop.posted.put)
    done: list[int] = []

    class Count:
        def run(self, synced: set[object]) -> None:
            done.append(1)

    for _ in range(5):
        syncer.submit(Count(), lambda job, error: done.append(2))
    syncer.start()
    syncer.stop()
    while not loop.posted.empty():
        loop.run_one()
    assert sorted(done) == [1] * 5 + [2] * 5
    with pytest.raises(ClosedError):
        syncer.submit(Count(), lambda job, error: None)


def synced_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, refused: bool = False, failed: int = -1
) -> tuple[list[str], list[Exception | None], list[Any]]:
    """Three logs in one group: system calls, outcomes and the logs afterwards."""
    monkeypatch.setattr(syncer_module, "TOGETHER_MIN", 3)
    calls: list[str] = []

    def syncfs(fd: int) -> None:
        calls.append("syncfs")
        if refused:
            raise OSError(errno.EIO, "input/output error")

    real = files.fdatasync
    monkeypatch.setattr(files, "syncfs", syncfs)
    monkeypatch.setattr(files, "fdatasync", lambda fd: (calls.append("fdatasync"), real(fd)))
    loop = Loop()
    syncer = Syncer(loop.posted.put, tmp_path)
    logs = [open_log(tmp_path / str(number)) for number in range(3)]
    jobs, outcomes = [], []
    for number, log in enumerate(logs):
        append(log, b"x")
        log.write()
        job = log.sync_job()
        assert job is not None and log.active is not None
        log.active.file.failed = number == failed
        jobs.append((job, lambda job, error, log=log: outcomes.append((log, job, error))))
    syncer.submit_all(jobs)
    syncer.start()
    loop.run_one()
    for log, job, error in outcomes:
        if error is None:
            log.synced(job)
        else:
            log.sync_failed(job, error)
        assert [file.pins for file in job.files] == [int(error is not None)], "the log keeps what failed"
    syncer.stop()
    return calls, [error for _, _, error in outcomes], logs


def test_many_files_are_synced_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, errors, logs = synced_together(tmp_path, monkeypatch)
    assert calls == ["syncfs"] and errors == [None] * 3
    assert [log.synced_end for log in logs] == [1] * 3
    for log in logs:
        assert log.active.file.pins == 0
        log.close()


def test_where_that_call_fails_each_file_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, errors, logs = synced_together(tmp_path, monkeypatch, refused=True)
    assert calls == ["syncfs"] + ["fdatasync"] * 3 and errors == [None] * 3
    for log in logs:
        log.close()


def test_a_file_whose_sync_failed_before_is_not_synced_by_that_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, errors, logs = synced_together(tmp_path, monkeypatch, failed=1)
    assert calls == ["syncfs"]
    assert [type(error) for error in errors] == [type(None), StorageFailed, type(None)]
    assert [log.synced_end for log in logs] == [1, 0, 1] and logs[1].fenced
    for log in logs:
        log.close()


def error_of_leftovers(directory: Path) -> Exception | None:
    """Sync a file system in the thread, and return what the loop is told."""
    loop = Loop()
    syncer = Syncer(loop.posted.put)
    syncer.start()
    errors: list[Exception | None] = []
    syncer.submit(LeftoverJob(directory), lambda job, error: errors.append(error))
    loop.run_one()
    syncer.stop()
    [error] = errors
    return error


def test_what_an_ended_process_left_unsynced_is_synced_at_once_for_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(files, "syncfs", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    assert (error_of_leftovers(tmp_path), synced) == (None, [str(tmp_path)])


def test_a_file_system_that_cannot_be_synced_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(files, "syncfs", refuse)
    assert isinstance(error_of_leftovers(tmp_path), OSError)
