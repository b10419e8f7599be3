"""How many files the log holds open: what connections leave, never less than half, and fewer when told."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from danube.host import files
from danube.wal.segments.descriptors import (
    DESCRIPTORS_MAX,
    Descriptors,
    LogFile,
    connections_allowed,
    descriptors_allowed,
)


@pytest.mark.parametrize(
    ("limit", "connections", "allowed"),
    [
        (20_000, 0, 17_500),
        (20_000, 5_000, 12_500),
        (20_000, 9_000, 10_000),  # half of them
        (1_024, 0, 512),
        (1_024, 900, 512),
        (256, 0, 256),  # what the log needs at least
        (1_048_576, 10_000, DESCRIPTORS_MAX),
        (resource.RLIM_INFINITY, 10_000, DESCRIPTORS_MAX),
    ],
)
def test_the_log_has_what_connections_leave(
    monkeypatch: pytest.MonkeyPatch, limit: int, connections: int, allowed: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert descriptors_allowed(connections) == allowed


def test_when_more_connections_come_idle_files_are_closed_and_pinned_ones_stay(tmp_path: Path) -> None:
    found = Descriptors(10)
    opened = [LogFile(tmp_path / str(number), writable=True) for number in range(6)]
    for file in opened:
        found.create(file)
    found.pin(opened[0])
    found.resize(3)
    assert [file.fd >= 0 for file in opened] == [True, False, False, False, True, True]
    found.resize(0)
    assert [file.fd >= 0 for file in opened] == [True, False, False, False, False, False]
    found.unpin(opened[0])
    assert len(found) == 0
    assert found.fd(opened[3]) >= 0 and len(found) == 1, "one in use is opened again all the same"
    for file in opened:
        found.close(file)


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [(20_000, 9_872), (1_024, 384), (256, 16), (resource.RLIM_INFINITY, 1 << 30)],
)
def test_connections_have_what_is_neither_the_logs_nor_kept_for_others(
    monkeypatch: pytest.MonkeyPatch, limit: int, allowed: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert connections_allowed() == allowed


def test_a_new_segment_has_the_descriptor_of_an_idle_one_where_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, idle = Descriptors(10), LogFile(tmp_path / "idle", writable=True)
    found.create(idle)
    open_new = files.open_new

    def full(path: Path) -> int:
        if idle.fd >= 0:
            raise OSError(errno.EMFILE, "too many open files")
        return open_new(path)

    monkeypatch.setattr(files, "open_new", full)
    rolled = LogFile(tmp_path / "rolled", writable=True)
    assert found.create(rolled) >= 0 and idle.fd < 0
    found.close(rolled)
