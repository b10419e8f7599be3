"""A segment on its way off the host: a crash at every call that changes the disk or asks the store (row E7).

Put, read back, manifest, its local copy, local delete: the real log, uploader and rule of what may leave.
After each crash, and after each restart, every record is there once, in the order of its offset, on this
host or in an object that the newest manifest names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from danube.broker.tiers.retention import LocalRetention, evictable_end
from danube.wal.log.log import Log
from danube.wal.segments.segment import HEADER_BYTES, file_name
from danube.wal.tier.keys import segment_key
from danube.wal.tier.sealed_files import LocalListing
from danube.wal.tier.uploader import Ownership, Uploader, adding
from tests.unit.failing_files import FailingFiles, Killed
from tests.unit.faulty_store import (
    TOPIC,
    Crash,
    FaultyStore,
    copy_segments,
    crash_after,
    crash_before,
    make_segments,
    newest_manifest,
)
from tests.unit.wal_samples import IDENTITY, memory_directory, open_log, read_all, records_in

COUNT = 4
RESTARTS = 5_000
NOW_US = 1 << 60
ALL_MAY_LEAVE = LocalRetention(ms=1)

Records = dict[int, bytes]
Arm = Callable[["Host"], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("made") / IDENTITY.directory_name
    make_segments(directory, COUNT, 1)
    return sorted(directory.iterdir())


class Host:
    """One directory and one store over many starts of a broker; each is a new owner."""

    def __init__(self, made: list[Path], directory: Path, failing: FailingFiles) -> None:
        self.store = FaultyStore()
        self.directory = directory / IDENTITY.directory_name
        self.epoch = 1
        self.starts = 0
        self._failing = failing
        copy_segments(made, self.directory)

    def live(self) -> None:
        """One life: recover, upload what is sealed, name it, let it leave; ended by whatever is armed."""
        self.epoch += 1
        self.starts += 1
        log: Log | None = None
        try:
            log = open_log(self.directory, epoch=self.epoch)
            uploader = Uploader(self.store, Ownership(TOPIC, IDENTITY, self.epoch, self.directory))
            uploader.load()
            self._evict(log, uploader)
            for segment in LocalListing(self.directory).refresh():
                if not segment.sealed or segment.end_offset <= uploader.manifest.uploaded_end:
                    continue
                entry = uploader.upload(self.directory / file_name(segment.base_offset), resumed=True)
                if entry is not None:
                    uploader.install(adding([entry]))
                    self._evict(log, uploader)
        except (Crash, Killed):
            pass
        finally:
            self.store.faults.clear()
            self._failing.disarm()
            if log is not None:
                log.abandon()

    def _evict(self, log: Log, uploader: Uploader) -> None:
        end = evictable_end(uploader.manifest, log, NOW_US, ALL_MAY_LEAVE)
        if end:
            log.evict(end)

    def records(self) -> Records:
        """All records, local ones as a restart finds them; an offset has one record in both places."""
        self.epoch += 1
        self.starts += 1
        log = open_log(self.directory, epoch=self.epoch)
        found, damage = read_all(log)
        log.abandon()
        assert not damage
        manifest = newest_manifest(self.store.memory)
        for number in range(len(manifest) if manifest is not None else 0):
            assert manifest is not None
            entry = manifest.entry(number)
            data = self.store.memory.get(segment_key(IDENTITY, entry))
            assert len(data) == entry.size_bytes, "no manifest names a partial object"
            for offset, payload in records_in(data[HEADER_BYTES : entry.data_end]):
                assert found.setdefault(offset, payload) == payload, f"offset {offset} has two records"
        return found


def dry_run(made: list[Path], directory: Path, failing: FailingFiles) -> tuple[Records, int, int]:
    """All records, and how many calls of the store and of files a life takes."""
    host = Host(made, directory, failing)
    expected = host.records()
    failing.arm(-1, 0)
    host.live()
    counts = len(host.store.calls), len(failing.calls)
    assert host.records() == expected and sorted(expected) == list(range(len(expected)))
    assert len(newest_manifest(host.store.memory) or ()) >= COUNT, "everything was uploaded"
    return expected, *counts


def test_a_crash_at_every_call_between_put_and_local_delete_loses_and_doubles_nothing(
    made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingFiles(monkeypatch)
    numbers = itertools.count()
    with memory_directory(tmp_path) as root:
        expected, store_calls, file_calls = dry_run(made, root / "dry", failing)
        assert store_calls > 30 and file_calls > 20
        arms: list[Arm] = [
            *(lambda host, at=at, how=how: host.store.faults.update({len(host.store.calls) + at: how})
              for at in range(store_calls) for how in (crash_before, crash_after)),
            *(lambda host, at=at, how=how: failing.arm(at, how)
              for at in range(file_calls) for how in ("killed", "killed after")),
        ]  # fmt: skip
        restarts = 0
        # One crash at every point; then two, the second in the next life, until there were enough.
        pairs: Iterator[tuple[Arm, Arm | None]] = itertools.chain(
            ((arm, None) for arm in arms),
            (
                pair
                for shift in range(len(arms))
                for pair in zip(arms, arms[shift:] + arms[:shift], strict=True)
            ),
        )
        for first, second in pairs:
            host = Host(made, root / str(next(numbers)), failing)
            for arm in (first, second):
                if arm is not None:
                    arm(host)
                    host.live()
                    assert host.records() == expected
            host.live()
            assert host.records() == expected
            manifest = newest_manifest(host.store.memory)
            assert manifest is not None and manifest.uploaded_end >= COUNT * 2, "in the end all has left"
            restarts += host.starts
            if second is not None and restarts >= RESTARTS:
                break
        assert restarts >= RESTARTS
