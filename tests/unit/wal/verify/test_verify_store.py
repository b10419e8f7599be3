"""`danube verify` of a store, alone and against the local copy: every kind of harm is named with its key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from danube.errors import ObjectMissing, StoreDamaged, StoreUnavailable
from danube.wal.segments.holes import Hole
from danube.wal.segments.key_compaction import LatestKeys, compact
from danube.wal.segments.merge import SealedRange, merge
from danube.wal.segments.segment import file_name
from danube.wal.tier.hole_changes import Tail, encode_tail
from danube.wal.tier.keys import cursors_key, manifest_key, metadata_key, returned_key, segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest
from danube.wal.tier.returned import put_offer
from danube.wal.verify.bytes import Finding, FindingKind
from danube.wal.verify.store import verify_store
from danube.wal.verify.tree import Verified, verify_tree
from tests.unit.store_samples import (
    NOW_US,
    TOPIC,
    AgedStore,
    entry_for,
    fill_directory,
    fill_store,
    partition_directory,
    put_manifest,
)
from tests.unit.wal_samples import IDENTITY, memory_directory

DAY_US = 24 * 3600 * 1_000_000


class World:
    """A data directory, a store with its sealed segments, and what is said of both."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.directory = fill_directory(data_dir)
        self.store = AgedStore()
        self.manifest = fill_store(self.store, self.directory)

    def verified(self, *, local: bool = True, topic: str = "") -> Verified:
        found = Verified()
        kept = verify_tree(self.data_dir, found) if local else []
        verify_store(self.store, NOW_US, found, kept, lambda _, name: not topic or name == topic)
        return found

    def findings(self, **options: bool) -> list[Finding]:
        return self.verified(**options).findings

    def kinds(self, **options: bool) -> set[FindingKind]:
        return {finding.kind for finding in self.findings(**options)}

    def key(self, index: int) -> str:
        return segment_key(IDENTITY, self.manifest.entry(index))

    @property
    def newest(self) -> str:
        return manifest_key(IDENTITY, self.manifest.epoch, self.manifest.generation)

    def change(self, key: str, position: int, value: bytes) -> None:
        data = bytearray(self.store.get(key))
        data[position : position + len(value)] = value
        self.store.put(key, bytes(data))

    def install(self, manifest: Manifest) -> None:
        self.manifest = manifest
        put_manifest(self.store, manifest)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with memory_directory(tmp_path) as directory:
        yield World(directory)


def test_a_sound_store_is_clean_alone_and_with_the_local_copy(world: World) -> None:
    alone, both = world.verified(local=False), world.verified()
    assert alone.findings == both.findings == [] and alone.remarks == []
    assert (alone.partitions, alone.objects, alone.records) == (1, 3, 9)
    assert (both.partitions, both.objects, both.segments, both.records) == (1, 3, 4, 10)


def test_every_flipped_bit_of_an_object_is_found(world: World) -> None:
    key = world.key(1)
    whole = world.store.get(key)
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        world.store.put(key, bytes(flipped))
        found = world.findings(local=False)
        assert found and all(finding.where == key for finding in found), position


def test_every_flipped_bit_of_the_newest_manifest_is_found(world: World) -> None:
    whole = world.store.get(world.newest)
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        world.store.put(world.newest, bytes(flipped))
        assert any(one.where == world.newest for one in world.findings(local=False)), position


def test_a_missing_object_is_named_with_its_offsets(world: World) -> None:
    world.store.delete([world.key(1)])
    (finding,) = world.findings(local=False)
    assert (finding.kind, finding.where) == (FindingKind.MISSING, world.key(1))
    assert (finding.start, finding.end) == (3, 6) and world.newest in finding.what


def test_a_truncated_object_is_one(world: World) -> None:
    whole = world.store.get(world.key(1))
    world.store.put(world.key(1), whole[:-30])
    found = world.findings(local=False)
    assert FindingKind.TRUNCATED in {finding.kind for finding in found}
    assert {finding.where for finding in found} == {world.key(1)}
    world.store.put(world.key(1), b"")
    assert FindingKind.TRUNCATED in world.kinds(local=False)


def test_an_object_of_another_partition_or_offset(world: World) -> None:
    world.store.put(world.key(1), world.store.get(world.key(0)))
    assert world.kinds(local=False) >= {FindingKind.IDENTITY, FindingKind.DISAGREEMENT}
    other = World(world.data_dir / "other")
    other.manifest = replace(other.manifest, topic_id=99)
    key = segment_key(other.manifest.identity, other.manifest.entry(0))
    other.store.put(key, other.store.get(other.key(0)))
    other.install(replace(other.manifest, entries=other.manifest.entries[:1]))
    found = [finding for finding in other.findings(local=False) if finding.where == key]
    assert any(finding.kind is FindingKind.IDENTITY for finding in found)


def test_orphans_count_when_they_are_a_day_old(world: World) -> None:
    extra = entry_for((world.directory / file_name(0)).read_bytes())._replace(content_hash=b"x" * 16)
    world.store.put(segment_key(IDENTITY, extra), b"an upload that was never named")
    assert world.findings() == [] and "not in a manifest yet" in world.verified().remarks[-1]
    world.store.age_us = DAY_US + 1
    (finding,) = world.findings()
    assert finding.kind is FindingKind.ORPHAN and finding.where == segment_key(IDENTITY, extra)
    assert (finding.start, finding.end) == (0, 3)


@pytest.mark.parametrize(
    "key", ["partitions/0000000000001234-3/notes", "somebody-elses", "partitions/x/y", "metadata/1"]
)
def test_names_that_are_nobody_s_are_findings(world: World, key: str) -> None:
    world.store.put(key, b"x")
    (finding,) = world.findings(local=False)
    assert (finding.kind, finding.where) == (FindingKind.ORPHAN, key)


def test_a_manifest_under_another_name(world: World) -> None:
    world.store.put(manifest_key(IDENTITY, 9, 9), world.store.get(world.newest))
    (finding,) = world.findings(local=False)
    assert finding.kind is FindingKind.IDENTITY and finding.where == manifest_key(IDENTITY, 9, 9)


def test_a_stale_owner_s_manifest_is_not_in_force(world: World) -> None:
    stale = world.manifest.trimmed(3)
    world.install(world.manifest.taken_over(7))
    put_manifest(world.store, replace(stale, generation=4_000))
    assert world.findings() == []


def test_a_manifest_that_lost_offsets_is_found(world: World) -> None:
    shorter = replace(world.manifest, generation=9, entries=world.manifest.entries[:2])
    world.install(shorter)
    found = world.findings(local=False)
    assert [(finding.kind, finding.start, finding.end) for finding in found] == [(FindingKind.GAP, 6, 9)]


def raw(world: World, change: Callable[[np.ndarray[tuple[int], np.dtype[np.void]]], None]) -> None:
    """Install a manifest whose entries were changed without any check."""
    entries = world.manifest.entries.copy()
    change(entries)
    world.install(replace(world.manifest, generation=world.manifest.generation + 1, entries=entries))


def test_manifests_that_contradict_themselves_or_the_objects(world: World) -> None:
    before = world.manifest

    def lose_first(entries: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        entries["base_offset"][1] = 4

    def overlap(entries: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        entries["end_offset"][0] = 4

    def chain(entries: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        entries["previous_hash"][2] = b"y" * 16

    def epoch(entries: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        entries["epoch"][2] = 99

    def stated(entries: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        entries["flags"][1] = 1

    def inside_out(entries: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        entries["end_offset"][2] = 6

    def unknown(entries: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        entries["flags"][1] |= 8

    expected = {
        unknown: FindingKind.DISAGREEMENT,
        lose_first: FindingKind.GAP,
        overlap: FindingKind.OVERLAP,
        chain: FindingKind.CHAIN,
        epoch: FindingKind.IDENTITY,
        stated: FindingKind.DISAGREEMENT,
        inside_out: FindingKind.DISAGREEMENT,
    }
    for change, kind in expected.items():
        raw(world, change)
        found = [one for one in world.findings(local=False) if one.where == world.newest]
        assert kind in {finding.kind for finding in found}, (change.__name__, found)
        world.store.delete([world.newest])
        world.manifest = before


@pytest.mark.parametrize("field", ["record_count", "batch_count", "size_bytes", "data_end", "last_append_us"])
def test_entries_that_say_something_else_than_the_object(world: World, field: str) -> None:
    def change(entries: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        entries[field][1] += 1

    raw(world, change)
    found = world.findings(local=False)
    assert found and {finding.where for finding in found} == {world.key(1)}


def test_merged_and_compacted_objects_agree_with_the_originals(world: World, tmp_path: Path) -> None:
    sources = [SealedRange(world.directory / file_name(start)) for start in (0, 3)]
    merge(sources, tmp_path / "merged.seg")
    data = (tmp_path / "merged.seg").read_bytes()
    world.store.put(segment_key(IDENTITY, entry_for(data)), data)
    world.install(world.manifest.with_replaced(0, 1, entry_for(data)))
    assert world.findings() == []
    for path in (world.directory / file_name(0), world.directory / file_name(3)):
        path.unlink()  # evicted
    assert world.findings() == []
    latest = LatestKeys()
    everything = [SealedRange(tmp_path / "merged.seg"), SealedRange(world.directory / file_name(6))]
    latest.add(everything)
    compact(everything, latest, tmp_path / "compacted.seg")
    data = (tmp_path / "compacted.seg").read_bytes()
    world.store.put(segment_key(IDENTITY, entry_for(data)), data)
    world.install(world.manifest.with_replaced(0, 1, entry_for(data)))
    assert world.manifest.entry(0).flags == EntryFlag.MERGED | EntryFlag.COMPACTED
    assert world.findings() == []


def test_other_batches_locally_than_in_the_store_are_a_disagreement(world: World) -> None:
    other = partition_directory(fill_directory(world.data_dir / "other", 2).parents[1])
    second = (other / file_name(3)).read_bytes()
    changed = second.replace(b"record 1", b"record X")
    assert second != changed
    from danube.core.batch.checksum import content_hash, crc32c
    from danube.core.batch.format import read_header, stamp

    data = bytearray(changed)
    header = read_header(data, 64)
    data[64 + 28 : 64 + 32] = crc32c(bytes(data[64 + 36 : 64 + header.size])).to_bytes(4, "little")
    stamp(memoryview(data)[64:], header.base_offset, header.epoch, header.append_time_us)
    data_end = int.from_bytes(data[-80:-72], "little")
    data[-72:-56] = content_hash(bytes(data[:data_end]))
    data[-16:-12] = crc32c(bytes(data[-144:-16])).to_bytes(4, "little")
    (world.directory / file_name(3)).write_bytes(data)
    found = world.findings()
    assert {finding.kind for finding in found} == {FindingKind.CHAIN, FindingKind.DISAGREEMENT}
    disagreement = next(one for one in found if one.kind is FindingKind.DISAGREEMENT)
    assert disagreement.where.endswith(file_name(3)) and (disagreement.start, disagreement.end) == (3, 6)


def test_a_gap_between_store_and_local_files(world: World) -> None:
    world.install(replace(world.manifest, generation=9, entries=world.manifest.entries[:1]))
    for start in (0, 3):
        (world.directory / file_name(start)).unlink()
    gaps = [(one.start, one.end) for one in world.findings() if "neither" in one.what]
    assert gaps == [(3, 6)]


def test_expired_offsets_are_not_missed(world: World) -> None:
    world.install(world.manifest.trimmed(4))
    world.store.delete([world.key(0)]) if len(world.manifest) == 3 else None
    assert world.findings() == []


def test_cursors_metadata_and_the_store_s_own_record(world: World) -> None:
    whole = world.store.get(cursors_key(IDENTITY, 1, 1))
    world.change(cursors_key(IDENTITY, 1, 1), 70, b"\xff")
    assert {one.where for one in world.findings()} == {cursors_key(IDENTITY, 1, 1)}
    world.store.put(cursors_key(IDENTITY, 1, 1), whole)
    world.store.put(metadata_key(5), world.store.get(metadata_key(0)))
    (finding,) = world.findings()
    assert finding.where == metadata_key(5) and "version 0" in finding.what
    world.store.put(metadata_key(5), b"damaged")
    assert "damaged" in world.findings()[0].what
    world.store.delete([metadata_key(5)])
    for content, kind in (
        (b"{", FindingKind.CHECKSUM),
        (b'{"format": 2}', FindingKind.VERSION),
        (b"[]", FindingKind.CHECKSUM),
    ):
        world.store.put("store.json", content)
        assert world.kinds() == {kind}
    world.store.delete(["store.json"])
    assert world.findings() == [] and "no store.json" in world.verified().remarks[-1]


def test_cursors_of_another_partition(world: World) -> None:
    from danube.wal.log.cursors import pack_header
    from danube.wal.segments.segment import LogIdentity

    world.store.put(cursors_key(IDENTITY, 1, 2), pack_header(LogIdentity(1, 1), 3, b""))
    assert world.kinds() == {FindingKind.IDENTITY}


def test_one_topic_alone(world: World) -> None:
    assert world.verified(local=False, topic=TOPIC).objects == 3
    found = world.verified(local=False, topic="/default/other")
    assert found.objects == found.partitions == 0


def test_a_partition_whose_manifest_is_replaced_meanwhile_is_read_again(world: World) -> None:
    """A merge is installed, and its sources are deleted, right after the listing was taken."""
    data = (world.directory / file_name(0)).read_bytes()
    list_objects, steps = world.store.list, []

    def listing(prefix: str, after: str = ""):  # type: ignore[no-untyped-def]
        found = list(list_objects(prefix, after))
        if not steps:
            steps.append(1)
            merge(
                [SealedRange(world.directory / file_name(start)) for start in (0, 3)],
                world.data_dir / "merged.seg",
            )
            merged = (world.data_dir / "merged.seg").read_bytes()
            old = [world.key(0), world.key(1)]
            world.store.put(segment_key(IDENTITY, entry_for(merged)), merged)
            world.install(world.manifest.with_replaced(0, 1, entry_for(merged)))
            world.store.delete(old)
        return iter(found)

    world.store.list = listing  # type: ignore[method-assign]
    assert world.findings(local=False) == [] and steps and data


def test_a_store_that_cannot_be_read_is_an_error_and_wrong_answers_are_findings(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = world.store.get

    def answer(error: Exception, *keys: str) -> None:
        def failing(key: str, start: int = 0, end: int | None = None) -> bytes:
            if key in keys:
                raise error
            return get(key, start, end)

        monkeypatch.setattr(world.store, "get", failing)

    everything = [world.key(1), world.newest, cursors_key(IDENTITY, 1, 1), "store.json", metadata_key(0)]
    for key in everything:
        answer(StoreUnavailable("it is down"), key)
        with pytest.raises(StoreUnavailable):
            world.findings(local=False)
    for key in (world.key(1), world.newest, "store.json", metadata_key(0)):
        answer(StoreDamaged("short"), key)
        assert {one.where for one in world.findings(local=False)} >= {key}
    for key in (cursors_key(IDENTITY, 1, 1), "store.json", metadata_key(0), manifest_key(IDENTITY, 1, 1)):
        answer(ObjectMissing("gone"), key)
        assert world.findings(local=False) == []


def test_a_store_without_the_newest_manifest_falls_back_and_tells(world: World) -> None:
    world.change(world.newest, 70, b"\xff")
    found = world.verified(local=False)
    assert [one.where for one in found.findings if one.kind is FindingKind.CHECKSUM] == [world.newest]
    assert found.objects == 2  # what the manifest before names


def test_a_hole_that_is_named_is_a_fact_and_no_harm(world: World) -> None:
    end = world.manifest.uploaded_end
    hole = Hole(end, end + 100, 7, world.manifest.epoch)
    world.install(world.manifest.with_holes([hole]))
    verified = world.verified(local=False)
    assert verified.findings == []
    [remark] = verified.remarks
    assert f"offsets {end} to {end + 100} are a hole: records may come back from broker 7" in remark


def test_a_manifest_of_a_newer_version_is_told(world: World) -> None:
    from danube.core.batch.checksum import crc32c

    data = bytearray(world.store.get(world.newest))
    data[8] = 3
    data[60:64] = crc32c(bytes(data[:60])).to_bytes(4, "little")
    world.store.put(world.newest, bytes(data))
    assert FindingKind.VERSION in world.kinds(local=False)


def test_an_owner_s_claim_is_one_of_our_names(world: World) -> None:
    world.store.put("partitions/0000000000001234-3/owner-0000000001", b"")
    assert world.findings() == []


def test_a_manifest_that_was_installed_and_is_not_there(world: World) -> None:
    copy = world.directory / "manifest"
    copy.write_bytes(world.manifest.encode())
    assert world.findings() == [] == world.verified().remarks[1:]
    world.store.delete([world.newest])
    (finding,) = [one for one in world.findings() if one.kind is FindingKind.MISSING]
    assert finding.where == world.newest and str(copy) in finding.what
    for key in list(world.store.list("partitions/")):
        world.store.delete([key.key])
    world.store.put("partitions/0000000000001234-3/owner-0000000001", b"")
    assert FindingKind.MISSING in world.kinds()
    copy.write_bytes(b"damaged")
    assert {one.where for one in world.findings()} == {str(copy)}


def test_a_partition_that_the_store_does_not_know_at_all(world: World) -> None:
    (world.directory / "manifest").write_bytes(world.manifest.encode())
    world.store.delete([info.key for info in world.store.list("partitions/")])
    assert FindingKind.MISSING in world.kinds()


def test_what_a_disk_offers_is_read(world: World) -> None:
    entry = world.manifest.entry(2)
    tail = Tail(7, 256, 511, entry.end_offset, [tuple(entry)])
    key = returned_key(IDENTITY, 7, 511)
    put_offer(world.store, IDENTITY, tail)
    assert world.findings() == []
    missing = (*tail.rows[0][:-3], b"x" * 16, *tail.rows[0][-2:])
    cases = {
        FindingKind.CHECKSUM: [b"x", encode_tail(structs.replace(tail, log_end=1))],
        FindingKind.IDENTITY: [encode_tail(structs.replace(tail, broker_id=8))],
        FindingKind.MISSING: [encode_tail(structs.replace(tail, rows=[missing]))],
    }
    for kind, contents in cases.items():
        for content in contents:
            world.store.put(key, content)
            (found,) = world.findings()
            assert found.kind is kind and key in (found.where, found.what.split()[0])
