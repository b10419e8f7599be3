"""Room that is kept for what makes room on a full disk: for footers, and for snapshots of producers."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from danube.errors import StorageFailed, StorageFull
from danube.host import files
from danube.host.disk_reserve import RESERVE_BYTES, Reserve
from danube.wal.log.log import Log, LogOptions
from danube.wal.recovery import carry, producers
from danube.wal.recovery.producers import Checkpoint
from tests.unit.failing_files import FailingFiles
from tests.unit.wal_samples import IDENTITY, append, open_log, read_all, roll, sync


class SmallDisk:
    """A disk for one file: nothing lies beyond ``size`` bytes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size = size
        self.refused = 0
        fallocate, pwritev = files.fallocate, files.pwritev

        def check(end: int) -> None:
            if end > self.size:
                self.refused += 1
                raise OSError(errno.ENOSPC, "no room")

        def small_fallocate(fd: int, position: int, size: int) -> None:
            check(position + size)
            fallocate(fd, position, size)

        def small_pwritev(fd: int, buffers: Any, position: int) -> int:
            check(position + sum(map(len, buffers)))
            return pwritev(fd, buffers, position)

        monkeypatch.setattr(files, "fallocate", small_fallocate)
        monkeypatch.setattr(files, "pwritev", small_pwritev)


def test_a_log_with_unsynced_batches_opens_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written again where they lie: no copy has room."""
    log = open_log(tmp_path)
    append(log, b"a")
    log.write()
    sync(log)
    append(log, b"b")
    log.write()
    log.abandon()
    before = {path.name: path.stat().st_size for path in tmp_path.glob("*.seg")}
    synced: list[int] = []
    fdatasync, open_new = files.fdatasync, files.open_new

    def full(path: Path) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(files, "open_new", full)
    monkeypatch.setattr(files, "fdatasync", lambda fd: (synced.append(fd), fdatasync(fd)))
    again = open_log(tmp_path, epoch=2)
    assert read_all(again)[0] == {0: b"a", 1: b"b"} and synced
    assert {path.name for path in tmp_path.glob("*.seg*")} == set(before)
    monkeypatch.setattr(files, "open_new", open_new)
    append(again, b"c")  # into a file of its own
    again.write()
    assert read_all(again)[0] == {0: b"a", 1: b"b", 2: b"c"} and len(list(tmp_path.glob("*.seg"))) == 2
    again.abandon()


def test_a_log_whose_end_only_the_mark_knows_opens_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, kept = tmp_path / "log", Reserve()
    log = open_log(directory)
    append(log, b"a", b"b")
    log.write()
    sync(log)
    log.abandon()
    next(directory.glob("*.seg")).unlink()
    kept.keep(tmp_path / "reserve-0")
    monkeypatch.setattr(carry, "reserve", kept)

    def full(path: Path) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(files, "open_new", full)
    again = open_log(directory, epoch=2)
    assert again.log_end == 2
    again.abandon()


@pytest.mark.parametrize("size", [16_384, 1 << 20, 4 << 20])
@pytest.mark.parametrize("payload", [100, 70_000])
def test_what_a_full_disk_took_can_be_sealed_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, payload: int
) -> None:
    disk = SmallDisk(monkeypatch, size)
    log = open_log(tmp_path, options=LogOptions(segment_bytes=64 << 20, preallocate_first=4096))
    stored = {}
    with pytest.raises(StorageFull):
        while True:
            first = append(log, *[b"x" * payload] * 3).base_offset
            log.write()
            stored |= {first + number: b"x" * payload for number in range(3)}
    sync(log)
    assert disk.refused
    if stored:
        roll(log, b"producers of some length" * 50)
        assert sum(segment.sealed for segment in log._segments) == 1, "its footer has room"
        assert read_all(log)[0] == stored
    else:
        assert payload * 3 > size
    log.abandon()


@pytest.fixture
def reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reserve:
    """The reserve of a process, as a worker keeps it."""
    made = Reserve()
    monkeypatch.setattr(producers, "reserve", made)
    made.keep(tmp_path / "reserve-0")
    return made


def one_sealed(directory: Path) -> Log:
    """A log of one sealed segment, whose footer alone knows the producers, and an active one."""
    log = open_log(directory)
    append(log, b"a")
    log.write()
    sync(log)
    roll(log, b"producers")
    append(log, b"b")
    log.write()
    sync(log)
    return log


def test_the_only_sealed_segment_goes_from_a_full_disk_and_its_producers_stay_known(
    tmp_path: Path, reserved: Reserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = one_sealed(tmp_path / "log")
    failing = FailingFiles(monkeypatch, ("open_new", "fallocate"))
    failing.arm(0, errno.ENOSPC, lasting=True)
    assert log.evict(1) and log.start == 1
    assert not (tmp_path / "reserve-0").exists()
    reserved.fill()
    assert not (tmp_path / "reserve-0").exists(), "there is no room yet"
    failing.disarm()
    reserved.fill()
    assert (tmp_path / "reserve-0").stat().st_blocks * 512 >= RESERVE_BYTES
    log.close()
    again = open_log(tmp_path / "log", epoch=2)
    assert read_all(again)[0] == {1: b"b"} and again.recovery.producer_snapshot == b"producers"
    again.close()


@pytest.mark.parametrize("name", ["pwritev", "ftruncate", "fdatasync", "rename", "fsync_directory"])
def test_a_reserve_that_fails_evicts_nothing_and_is_made_anew(
    tmp_path: Path, reserved: Reserve, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    log = one_sealed(tmp_path / "log")
    full = FailingFiles(monkeypatch, ("open_new",))
    failing = FailingFiles(monkeypatch, (name,))
    full.arm(0, errno.ENOSPC, lasting=True)
    failing.arm(0, errno.EIO)
    with pytest.raises(StorageFailed):
        log.evict(1)
    assert failing.fired and log.start == 0
    full.disarm()
    reserved.fill()
    assert (tmp_path / "reserve-0").stat().st_size == RESERVE_BYTES
    assert log.evict(1)
    log.close()


def test_a_snapshot_that_the_reserve_cannot_hold_waits_for_room(
    tmp_path: Path, reserved: Reserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(1, bytes(RESERVE_BYTES))
    FailingFiles(monkeypatch, ("open_new",)).arm(0, errno.ENOSPC, lasting=True)
    with pytest.raises(OSError, match="No space"):
        producers.write_checkpoint(tmp_path, IDENTITY, checkpoint, urgent=True)
    with pytest.raises(OSError, match="No space"):
        producers.write_checkpoint(tmp_path, IDENTITY, Checkpoint(1, b"small"))
    assert (tmp_path / "reserve-0").exists(), "nor does what can wait take it"
    producers.write_checkpoint(tmp_path, IDENTITY, Checkpoint(1, b"small"), urgent=True)
    assert producers.read_checkpoint(tmp_path, IDENTITY) == Checkpoint(1, b"small")


def test_what_an_earlier_process_kept_is_there_on_a_full_disk(
    tmp_path: Path, reserved: Reserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    FailingFiles(monkeypatch, ("open_new", "fallocate")).arm(0, errno.ENOSPC, lasting=True)
    after_a_crash = Reserve()
    after_a_crash.keep(tmp_path / "reserve-0")
    after_a_crash.replace_durably(tmp_path / "needed", b"data")
    assert (tmp_path / "needed").read_bytes() == b"data"


@pytest.mark.parametrize("size", [0, RESERVE_BYTES - 1, RESERVE_BYTES])
def test_a_file_without_the_blocks_is_made_anew(tmp_path: Path, size: int) -> None:
    path = tmp_path / "reserve-0"
    with path.open("wb") as file:
        file.truncate(size)
    Reserve().keep(path)
    assert path.stat().st_size == RESERVE_BYTES <= path.stat().st_blocks * 512
