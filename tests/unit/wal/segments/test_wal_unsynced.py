"""Files with unsynced bytes: pinned until they are synced, and for as long as a job may use them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from danube.wal.segments.descriptors import LogFile, Unsynced, descriptors


@pytest.fixture
def file(tmp_path: Path) -> LogFile:
    made = LogFile(tmp_path / "file", writable=True)
    descriptors.create(made)
    return made


def test_a_file_is_pinned_once_until_all_of_it_is_synced(file: LogFile) -> None:
    unsynced = Unsynced()
    assert not unsynced.ends and file not in unsynced.ends
    unsynced.wrote(file, 5)
    unsynced.wrote(file, 7)
    assert unsynced.ends and file in unsynced.ends and file.pins == 1
    assert unsynced.start_job() == [file]
    unsynced.end_job(5)
    assert file in unsynced.ends and file.pins == 1, "it was written meanwhile"
    unsynced.start_job()
    unsynced.end_job(7)
    assert not unsynced.ends and file.pins == 0
    descriptors.close(file)


def test_a_failed_job_gives_nothing_back(file: LogFile) -> None:
    unsynced = Unsynced()
    unsynced.wrote(file, 5)
    unsynced.start_job()
    unsynced.end_job()
    assert file in unsynced.ends and file.pins == 1
    unsynced.abandon()
    assert file not in unsynced.ends and file.pins == 0
    descriptors.close(file)


def test_what_a_job_uses_stays_open_when_the_log_is_abandoned(file: LogFile) -> None:
    unsynced = Unsynced()
    unsynced.wrote(file, 5)
    unsynced.start_job()
    unsynced.start_job()
    unsynced.abandon()
    descriptors.close(file)
    os.fstat(file.fd)
    unsynced.end_job()
    os.fstat(file.fd)
    unsynced.end_job()
    assert file.fd == -1 and not unsynced.ends
