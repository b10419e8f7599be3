"""Key compaction of objects: the manifest names what is whole and complete, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube.core.partition.compaction_plan import CompactionSettings
from danube.errors import StorageFailed, StoreDamaged
from danube.wal.segments.key_compaction import LatestKeys, compact
from danube.wal.segments.merge import SealedRange
from danube.wal.segments.segment import NO_HASH
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest
from danube.wal.tier.rewriting import compact_objects, compaction_plan, last_compacted, replacing_in_order
from danube.wal.tier.uploader import Ownership, Uploader, adding, replacing, trimming
from tests.unit.faulty_store import TOPIC, FaultyStore, newest_manifest
from tests.unit.merge_samples import Record, append_keyed, records_of, sealed_log, stored_records
from tests.unit.wal_samples import IDENTITY, START_US, open_log, roll, sync

SETTINGS = CompactionSettings(dirty_bytes_min=0, lag_us=0, target_bytes=1_500)
LATER_US = START_US + 10**12
KEEP_MS = 10**9  # tombstones stay


class Crash(Exception):
    """The mover ends."""


def segments_of(count: int, keys: int = 3) -> list[list[list[Record]]]:
    numbers = iter(range(count * 4))
    return [
        [[(b"k%d" % (n % keys), b"v%d" % n) for n in (next(numbers), next(numbers))] for _ in range(2)]
        for _ in range(count)
    ]


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


def uploaded(
    store: FaultyStore, directory: Path, segments: list[list[list[Record]]]
) -> tuple[Uploader, dict[int, Record]]:
    """All segments in the store, named; with all their records."""
    ranges = sealed_log(directory, segments)
    uploader = Uploader(store, Ownership(TOPIC, IDENTITY, 1, directory))
    uploader.load()
    entries = [uploader.upload(one.path) for one in ranges]
    uploader.install(adding([entry for entry in entries if entry is not None]))
    return uploader, records_of(ranges)


def stored(store: FaultyStore, manifest: Manifest) -> dict[int, Record]:
    """All records that the manifest names; each object must have the chain to the one before it."""
    found: dict[int, Record] = {}
    before = NO_HASH
    for index in range(len(manifest)):
        entry = manifest.entry(index)
        assert entry.previous_hash in (NO_HASH, before)
        before = entry.chain_hash
        data = store.memory.get(segment_key(IDENTITY, entry))
        assert len(data) == entry.size_bytes
        here = stored_records(data[64 : entry.data_end])
        assert len(here) == entry.record_count
        found |= here
    return found


def check_whole(found: dict[int, Record], records: dict[int, Record]) -> None:
    assert all(records[offset] == record for offset, record in found.items())
    latest = {key: offset for offset, (key, _) in sorted(records.items()) if key is not None}
    assert set(latest.values()) <= set(found)


def one_round(uploader: Uploader, work: Path, keep_ms: int = KEEP_MS) -> Manifest:
    plan = compaction_plan(uploader.manifest, LATER_US, keep_ms, SETTINGS)
    assert plan is not None
    replaced = compact_objects(uploader, plan, SETTINGS, work)
    return uploader.install(replacing_in_order(replaced))


def test_a_round_leaves_the_latest_of_each_key(store: FaultyStore, tmp_path: Path) -> None:
    uploader, records = uploaded(store, tmp_path / "log", segments_of(6))
    manifest = one_round(uploader, tmp_path / "work")
    assert last_compacted(manifest) == len(manifest) - 2 > 0, "several groups, and the newest as it was"
    assert manifest.entry(0).flags == EntryFlag.COMPACTED | EntryFlag.MERGED
    found = stored(store, manifest)
    check_whole(found, records)
    assert len(found) == 3 + 4, "of what was compacted each key once, and the newest segment"
    assert compaction_plan(manifest, LATER_US, KEEP_MS, SETTINGS) is None
    assert not (tmp_path / "work").exists()


def test_a_second_round_does_not_write_what_stays_as_it_is(store: FaultyStore, tmp_path: Path) -> None:
    segments = [*segments_of(2), [[(b"other", b"1")]], [[(b"other", b"2")]], [[(b"last", b"3")]]]
    uploader, records = uploaded(store, tmp_path / "log", segments)
    manifest = one_round(uploader, tmp_path / "work")
    check_whole(stored(store, manifest), records)
    assert compaction_plan(manifest, LATER_US, KEEP_MS, SETTINGS) is None


def test_no_object_is_replaced_by_another_of_its_name(store: FaultyStore, tmp_path: Path) -> None:
    """Also where nothing is removed: readers still have the manifest that names the original."""
    segments: list[list[list[Record]]] = [[[(b"a", b"1")]], [[(b"b", b"1")]], [[(b"c", b"1")]]]
    uploader, records = uploaded(store, tmp_path / "log", segments)
    before = uploader.manifest
    settings = CompactionSettings(dirty_bytes_min=0, lag_us=0, target_bytes=1)
    plan = compaction_plan(before, LATER_US, KEEP_MS, settings)
    assert plan is not None
    replaced = compact_objects(uploader, plan, settings, tmp_path / "work")
    assert [len(sources) for _, sources in replaced] == [1, 1]
    assert stored(store, before) == records, "the originals are as they were"
    after = uploader.install(replacing_in_order(replaced))
    assert stored(store, after) == records and last_compacted(after) == 1


def test_tombstones_go_with_their_keys(store: FaultyStore, tmp_path: Path) -> None:
    segments: list[list[list[Record]]] = [[[(b"a", b"1"), (b"b", b"1")]], [[(b"a", b"")]], [[(b"c", b"1")]]]
    uploader, _ = uploaded(store, tmp_path / "log", segments)
    assert sorted(stored(store, one_round(uploader, tmp_path / "work", keep_ms=0))) == [1, 3]


def test_what_cannot_be_installed_in_order_is_not_installed(store: FaultyStore, tmp_path: Path) -> None:
    uploader, _ = uploaded(store, tmp_path / "log", segments_of(6))
    plan = compaction_plan(uploader.manifest, LATER_US, KEEP_MS, SETTINGS)
    assert plan is not None
    replaced = compact_objects(uploader, plan, SETTINGS, tmp_path / "work")
    assert len(replaced) > 1
    trimmed = uploader.install(trimming(replaced[0][1][0].end_offset))
    assert uploader.install(replacing_in_order(replaced)) is trimmed
    assert uploader.install(replacing(*replaced[1])) is not trimmed, "alone it would do"


def test_segments_without_the_state_of_producers_wait_for_one_with_it(
    store: FaultyStore, tmp_path: Path
) -> None:
    directory = tmp_path / "log"
    log = open_log(directory)
    for number, snapshot in enumerate([b"state", b"", b"", b"state", b"", b"state"]):
        append_keyed(log, [(b"k", b"v%d" % number)])
        roll(log, snapshot)
    sync(log)
    log.abandon()
    uploader = Uploader(store, Ownership(TOPIC, IDENTITY, 1, directory))
    uploader.load()
    entries = [uploader.upload(path) for path in sorted(directory.glob("*.seg"))]
    uploader.install(adding([entry for entry in entries if entry is not None]))
    settings = CompactionSettings(dirty_bytes_min=0, lag_us=0, target_bytes=1)
    plan = compaction_plan(uploader.manifest, LATER_US, KEEP_MS, settings)
    assert plan is not None and len(plan.sources) == 5
    replaced = compact_objects(uploader, plan, settings, tmp_path / "work")
    assert [(made.base_offset, made.end_offset) for made, _ in replaced] == [(0, 1), (1, 4)]


def test_damaged_objects_are_not_compacted(store: FaultyStore, tmp_path: Path) -> None:
    uploader, _ = uploaded(store, tmp_path / "log", segments_of(4))
    key = segment_key(IDENTITY, uploader.manifest.entry(1))
    data = bytearray(store.memory.get(key))
    data[120] ^= 1
    store.memory.put(key, bytes(data))
    with pytest.raises(StoreDamaged, match="cannot be compacted"):
        one_round(uploader, tmp_path / "work")


def test_a_disk_that_refuses_is_told(store: FaultyStore, tmp_path: Path) -> None:
    uploader, _ = uploaded(store, tmp_path / "log", segments_of(4))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageFailed):
        one_round(uploader, tmp_path / "file" / "work")


def test_a_crash_at_any_call_of_the_store_loses_nothing(tmp_path: Path) -> None:
    """Before or after each call: a new owner goes on from what is there, and ends as without the crash."""
    at = 0
    while True:
        for after in (False, True):
            store = FaultyStore()
            directory = tmp_path / f"{at}-{after}"
            uploader, records = uploaded(store, directory, segments_of(6))
            calls = [0]

            def crash(
                name: str, arguments: tuple[Any, ...], call: Callable[[], Any], after: bool = after,
                calls: list[int] = calls, at: int = at,
            ) -> Any:  # fmt: skip
                calls[0] += 1
                if calls[0] - 1 != at:
                    return call()
                if after:
                    call()
                raise Crash

            store.always = crash
            try:
                one_round(uploader, tmp_path / "work")
            except Crash:
                pass
            else:
                assert calls[0] == at > 20, "every call was met"
                return
            store.always = None
            newest = newest_manifest(store.memory)
            assert newest is not None
            check_whole(stored(store, newest), records)
            again = Uploader(store, Ownership(TOPIC, IDENTITY, 2, directory))
            again.load()
            plan = compaction_plan(again.manifest, LATER_US, KEEP_MS, SETTINGS)
            if plan is not None:
                one_round(again, tmp_path / "work")
            found = stored(store, again.manifest)
            check_whole(found, records)
            assert len(found) == 7
        at += 1


def test_compacted_local_files_are_uploaded_as_such(store: FaultyStore, tmp_path: Path) -> None:
    ranges = sealed_log(tmp_path / "log", segments_of(3))
    latest = LatestKeys()
    latest.add(ranges)
    target = tmp_path / "log" / ranges[0].path.name
    made = compact(ranges[:2], latest, target)
    ranges[1].path.unlink()
    uploader = Uploader(store, Ownership(TOPIC, IDENTITY, 1, tmp_path / "log"))
    uploader.load()
    entries = [uploader.upload(target), uploader.upload(ranges[2].path)]
    manifest = uploader.install(adding([entry for entry in entries if entry is not None]))
    assert manifest.entry(0).flags == EntryFlag.COMPACTED | EntryFlag.MERGED
    assert manifest.entry(0).chain_hash == made.merged.chain_hash == manifest.entry(1).previous_hash
    assert records_of([SealedRange(target)]).items() <= stored(store, manifest).items()
