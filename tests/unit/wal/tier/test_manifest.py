"""The manifest: what it finds, what it refuses, and that no damaged byte of it goes unnoticed."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from danube.core.batch.checksum import crc32c
from danube.errors import Damage, InvalidArgument, StorageIncompatible
from danube.limits import MIB
from danube.wal.segments.segment import LogIdentity, Summary
from danube.wal.tier.keys import (
    KeyKind,
    StoreKey,
    cursors_key,
    cursors_prefix,
    manifest_key,
    manifest_prefix,
    metadata_key,
    parse_key,
    parse_partition,
    segment_key,
)
from danube.wal.tier.manifest import (
    HEADER_BYTES,
    NO_ENTRIES,
    SEGMENT_ENTRY,
    EntryFlag,
    Manifest,
    SegmentEntry,
    entry_of,
)
from tests.golden.tiered_cases import IDENTITY, TIME_US, entry, hash_number, vectors
from tests.processor_time import processor_time_within


def manifest_of(*bounds: tuple[int, int], start_offset: int = 0) -> Manifest:
    empty = Manifest.empty("/default/t", IDENTITY, 3, start_offset)
    return empty.with_added(*(entry(base, end, number + 1) for number, (base, end) in enumerate(bounds)))


def resealed(data: bytes | bytearray) -> bytes:
    """The manifest's bytes with checksums that fit again."""
    head = bytes(data[: HEADER_BYTES - 4])
    body = head + struct.pack("<I", crc32c(head)) + bytes(data[HEADER_BYTES:-8])
    return body + struct.pack("<II", crc32c(body), 0)


@pytest.mark.parametrize("name", ["hole", "holes-settled"])
def test_every_flipped_bit_and_every_cut_is_noticed(name: str) -> None:
    data = vectors()[name]
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(Damage):
            Manifest.decode(bytes(flipped))
        with pytest.raises(Damage):
            Manifest.decode(data[:position])
    with pytest.raises(Damage):
        Manifest.decode(data + bytes(8))


def test_a_newer_version_is_refused_and_a_damaged_one_is_not_called_newer() -> None:
    data = bytearray(vectors()["three"])
    data[8] = 3
    with pytest.raises(Damage) as damaged:
        Manifest.decode(bytes(data))
    assert type(damaged.value) is Damage
    with pytest.raises(StorageIncompatible, match="version 3"):
        Manifest.decode(resealed(data))


@pytest.mark.parametrize(
    ("position", "value", "why"),
    [
        (10, b"\x48", "sizes that cannot be"),
        (24, (2**63).to_bytes(8, "little"), "start offset is too large"),
        (24, (10).to_bytes(8, "little"), "below the start offset"),
        (HEADER_BYTES, b"\xff", "not UTF-8"),
        (HEADER_BYTES + 16, (10).to_bytes(8, "little"), "ends where it begins"),
        (HEADER_BYTES + 16 + 8, (11).to_bytes(8, "little"), "overlap"),
        (HEADER_BYTES + 16 + 8, (9).to_bytes(8, "little"), "hole"),
        (HEADER_BYTES + 16 + 16, (11).to_bytes(8, "little"), "more than its offsets"),
        (HEADER_BYTES + 16 + 24, (11).to_bytes(8, "little"), "more than its offsets"),
        (HEADER_BYTES + 16 + 32, (2048).to_bytes(8, "little"), "fit its object"),
        (HEADER_BYTES + 16 + 40, (63).to_bytes(8, "little"), "fit its object"),
        (HEADER_BYTES + 16 + 72, (4).to_bytes(4, "little"), "later epoch"),
        (HEADER_BYTES + 16 + 76, (8).to_bytes(4, "little"), "unknown flag"),
        (HEADER_BYTES + 16 + 76, (1).to_bytes(4, "little"), "hole"),
        (HEADER_BYTES + 16 + 112, b"\xaa", "chain hash"),
    ],
)
def test_contradictions_behind_right_checksums_are_damage(position: int, value: bytes, why: str) -> None:
    data = bytearray(vectors()["three"])
    data[position : position + len(value)] = value
    with pytest.raises(Damage) as damaged:
        Manifest.decode(resealed(data))
    assert why in str(damaged.value)


def test_entries_come_back_with_hashes_that_end_in_zeros() -> None:
    manifest = manifest_of((0, 10))
    assert manifest.entry(0) == entry(0, 10, 1) and manifest.entry(0).content_hash[-1] == 0
    assert Manifest.decode(manifest.encode()).entry(0) == entry(0, 10, 1)
    with pytest.raises(IndexError):
        manifest.entry(1)


def test_offsets_and_times_are_found_at_the_edges() -> None:
    manifest = manifest_of((0, 10), (10, 20)).with_added(entry(25, 30, 3, flags=EntryFlag.HOLE_BEFORE))
    assert [manifest.find(offset) for offset in (-1, 0, 9, 10, 19, 20, 24, 25, 29, 30, 2**70)] == [
        0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3,
    ]  # fmt: skip
    times = [-(2**70), TIME_US, TIME_US + 9, TIME_US + 10, TIME_US + 29, TIME_US + 30, 2**70]
    assert [manifest.at_time(time_us) for time_us in times] == [0, 0, 0, 1, 2, 3, 3]
    plans = [(0, 0), (5, 5), (0, 1), (9, 11), (20, 25), (20, 26), (0, 99), (30, 99)]
    assert [list(manifest.plan(*bounds)) for bounds in plans] == [
        [], [], [0], [0, 1], [], [2], [0, 1, 2], [],
    ]  # fmt: skip
    assert (manifest.uploaded_end, manifest.size_bytes, len(manifest)) == (30, 3 * 4096 + 6, 3)


def test_offsets_beyond_what_a_float_can_tell_apart() -> None:
    base = 2**62
    manifest = manifest_of((base, base + 1), (base + 1, base + 2), start_offset=base)
    assert [manifest.find(base + step) for step in range(3)] == [0, 1, 2]


def test_a_clock_that_went_back_hides_no_record() -> None:
    empty = Manifest.empty("/default/t", IDENTITY, 3)
    manifest = empty.with_added(
        entry(0, 10, 1, last_append_us=500), entry(10, 20, 2, last_append_us=100), entry(20, 30, 3)
    )
    assert [manifest.at_time(time_us) for time_us in (50, 300, 501)] == [0, 0, 2]


def test_what_does_not_follow_is_refused() -> None:
    manifest = manifest_of((0, 10))
    for bad, why in (
        (entry(11, 12, 2), "hole"),
        (entry(9, 12, 2), "overlap"),
        (entry(10, 12, 2, flags=EntryFlag.HOLE_BEFORE), "hole"),
        (entry(10, 10, 2), "ends where it begins"),
        (entry(10, 12, 2, epoch=4), "later epoch"),
        (entry(10, 12, 2, size_bytes=-1), "do not fit"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            manifest.with_added(bad)
        assert why in str(refused.value)
    assert manifest.with_added(entry(10, 12, 2)).generation == manifest.generation + 1 == 2


def test_a_merge_covers_the_same_offsets_and_keeps_the_chain() -> None:
    manifest = manifest_of((0, 10), (10, 20), (20, 30))
    merged = entry(0, 20, 9, flags=EntryFlag.MERGED, previous_hash=bytes(16), chain_hash=hash_number(2))
    after = manifest.with_replaced(0, 1, merged)
    assert after.entry(0) == merged and after.entry(1) == manifest.entry(2)
    assert after.entry(1).previous_hash == after.entry(0).chain_hash
    for first, last, wrong, why in (
        (0, 2, merged, "cannot take the place"),
        (1, 2, merged, "cannot take the place"),
        (0, 3, merged, "there are 3"),
        (1, 0, merged, "there are no entries"),
        (0, 1, merged._replace(record_count=19), "19 records instead of 20"),
        (0, 1, merged._replace(record_count=21, flags=6), "21 records instead of 20"),
        (0, 1, merged._replace(flags=0), "chain hash"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            manifest.with_replaced(first, last, wrong)
    compacted = merged._replace(record_count=3, flags=EntryFlag.MERGED | EntryFlag.COMPACTED)
    assert manifest.with_replaced(0, 1, compacted).entry(0).record_count == 3


def test_a_hole_before_the_merged_segments_stays_stated() -> None:
    manifest = manifest_of((0, 10)).with_added(
        entry(15, 20, 2, flags=EntryFlag.HOLE_BEFORE), entry(20, 25, 3)
    )
    merged = entry(15, 25, 9, flags=EntryFlag.MERGED, chain_hash=hash_number(3))
    assert manifest.with_replaced(1, 2, merged).entry(1).flags == EntryFlag.MERGED | EntryFlag.HOLE_BEFORE


def test_trimming_drops_whole_segments_and_states_what_begins_late() -> None:
    manifest = manifest_of((0, 10), (10, 20)).with_added(entry(25, 30, 3, flags=EntryFlag.HOLE_BEFORE))
    after = [manifest.trimmed(start) for start in (0, 9, 10, 22, 25, 30, 99)]
    assert [len(one) for one in after] == [3, 3, 2, 1, 1, 0, 0]
    assert [one.uploaded_end for one in after] == [30, 30, 30, 30, 30, 30, 99]
    assert [one.entry(0).flags for one in after[:5]] == [0, 0, 0, EntryFlag.HOLE_BEFORE, 0]
    assert all(Manifest.decode(one.encode()) == one for one in after)
    assert after[2].trimmed(3).start_offset == 10  # a start never goes back


def test_a_new_owner_goes_on_where_the_old_one_was() -> None:
    manifest = manifest_of((0, 10))
    after = manifest.taken_over(9)
    assert (after.epoch, after.generation, len(after)) == (9, manifest.generation + 1, 1)
    with pytest.raises(InvalidArgument, match="epoch 2"):
        manifest.taken_over(2)


def test_a_manifest_is_a_value() -> None:
    manifest = manifest_of((0, 10))
    same = Manifest.decode(manifest.encode())
    assert manifest == same and hash(manifest) == hash(same) and manifest != manifest.trimmed(1)
    assert manifest != "manifest"
    with pytest.raises(ValueError, match="read-only"):
        manifest.entries["epoch"][0] = 1
    rows = np.zeros(1, SEGMENT_ENTRY)
    other = Manifest("/t", 1, 0, 1, 0, 0, rows)
    rows["base_offset"] = 5
    assert other.entries["base_offset"][0] == 0


def test_names_that_are_too_long_cannot_be_written() -> None:
    with pytest.raises(InvalidArgument, match="too large"):
        Manifest("t" * 65_536, 1, 0, 1, 0, 0, NO_ENTRIES).encode()


def test_the_entry_of_a_segment_is_its_summary() -> None:
    summary = Summary(
        IDENTITY, 2, 100, 130, 30, 4, 7, 9, 4096, b"c" * 16, b"p" * 16, 0, 0, False, 0, 160
    )  # fmt: skip
    made = entry_of(summary, 4256, 55)
    assert made == (100, 130, 30, 4, 4256, 4096, 7, 9, 55, 2, 0, b"c" * 16, b"p" * 16, b"c" * 16)
    assert entry_of(summary, 4256, 55, chain_hash=b"x" * 16).chain_hash == b"x" * 16


def test_keys_name_what_they_were_made_of() -> None:
    one = entry(5, 2**40, 1)
    keys = {
        segment_key(IDENTITY, one): StoreKey(
            KeyKind.SEGMENT, IDENTITY, 5, 2**40, hash_prefix="0101010101010101"
        ),
        manifest_key(IDENTITY, 4, 17): StoreKey(KeyKind.MANIFEST, IDENTITY, epoch=4, generation=17),
        cursors_key(IDENTITY, 4, 17): StoreKey(KeyKind.CURSORS, IDENTITY, epoch=4, generation=17),
        metadata_key(99): StoreKey(KeyKind.METADATA, version=99),
        "store.json": StoreKey(KeyKind.STORE),
    }
    assert {key: parse_key(key) for key in keys} == keys
    assert manifest_key(IDENTITY, 4, 17).startswith(manifest_prefix(IDENTITY))
    assert cursors_key(IDENTITY, 4, 17).startswith(cursors_prefix(IDENTITY))


def test_the_order_of_names_is_the_order_of_numbers() -> None:
    numbers = [(1, 9), (1, 10), (2, 1), (9, 4_294_967_295), (10, 0), (4_294_967_295, 1)]
    keys = [manifest_key(IDENTITY, *number) for number in numbers]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    "key",
    [
        "", "store.jso", "metadata/1", "partitions/", "partitions/0000000000000001-0/manifest-1-1",
        "partitions/0000000000000001-01/manifest-0000000001-0000000001",
        "partitions/000000000000000g-0/manifest-0000000001-0000000001",
        "partitions/0000000000000001-0/manifest-9999999999-0000000001",
        "partitions/0000000000000001-9999999999/manifest-0000000001-0000000001",
        "partitions/0000000000000001-0/00000000000000000001-00000000000000000002-0000.seg",
        "/store.json", "partitions/0000000000000001-0/../store.json", "store.json\n",
    ],
)  # fmt: skip
def test_other_names_are_not_ours(key: str) -> None:
    assert parse_key(key) is None


def test_folders_of_partitions() -> None:
    assert parse_partition(IDENTITY.directory_name) == IDENTITY
    assert parse_partition(LogIdentity(0, 0).directory_name) == LogIdentity(0, 0)
    for name in ("", "metadata", "0000000000000001-9999999999", "0000000000000001-0/x"):
        assert parse_partition(name) is None


MANY, RECORDS = 100_000, 1_000  # segments, and the records of each


def many_segments() -> Manifest:
    entries = np.zeros(MANY, SEGMENT_ENTRY)
    base = np.arange(MANY, dtype=np.uint64) * np.uint64(RECORDS)
    entries["base_offset"], entries["end_offset"] = base, base + np.uint64(RECORDS)
    entries["record_count"], entries["batch_count"] = RECORDS, 10
    entries["size_bytes"], entries["data_end"] = 1_000_000, 990_000
    entries["first_append_us"] = np.arange(MANY) * 1_000
    entries["last_append_us"] = entries["first_append_us"] + 999
    return Manifest("/default/perf", 1, 0, 1, 1, 0, entries)


def second_quarter(data: bytes) -> list[SegmentEntry]:
    """Decode a manifest of many segments and plan a read of its second quarter."""
    manifest, end = Manifest.decode(data), MANY * RECORDS
    return [manifest.entry(index) for index in manifest.plan(end // 4, end // 2)]


def test_planning_over_many_segments_is_fast_and_small() -> None:
    data = many_segments().encode()
    with processor_time_within(1.0):
        found = second_quarter(data)
    assert len(found) == MANY // 4 and found[0].base_offset == MANY * RECORDS // 4
    tracemalloc.start()  # it would more than double the time
    second_quarter(data)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 200 * MIB
