"""Every stored format: what its writer takes, its reader gives back, at the ends of its numbers too.

Whatever a life of a subscription, a producer table, a manifest or the metadata makes is decoded to itself in
the model of that part (test_subscription_model, test_holed_subscription, test_dedup_model,
test_manifest_model, test_cluster_metadata_model, test_raft_journal); here are the formats without a life.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from danube.broker.tiers.inheritance import KeptOwner, read_owner, write_owner
from danube.cluster.log import log_file
from danube.cluster.raft.engine import Members
from danube.cluster.raft.entry import members_entry, members_of
from danube.wal.log.cursors import CursorStore
from danube.wal.recovery.damage import DamagedRange, DamageRegister
from danube.wal.recovery.mark import SLOT_BYTES, Mark, pack_slot, read_mark
from danube.wal.recovery.producers import Checkpoint, read_checkpoint, write_checkpoint
from danube.wal.segments.descriptors import LogFile, descriptors
from danube.wal.segments.holes import Hole, HoleKind
from danube.wal.segments.index import SparseIndex
from danube.wal.segments.segment import (
    SUMMARY_BYTES,
    LogIdentity,
    SegmentHeader,
    Summary,
    base_offset_of,
    chain_hash_of,
    file_name,
    pack_footer,
    pack_header,
    read_header,
    read_summary,
    spare_epoch_of,
    spare_name,
    split_footer,
)
from danube.wal.tier.hole_changes import Tail, decode_tail, encode_tail
from danube.wal.tier.keys import (
    cursors_key,
    manifest_key,
    metadata_key,
    owner_key,
    parse_key,
    returned_key,
    segment_key,
)
from danube.wal.tier.manifest import Manifest, SegmentEntry
from danube.wal.tier.staged import Staged, decode_staged, encode_staged
from tests.examples import examples

QUICK = settings(deadline=None, max_examples=examples(60))
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
offset = st.integers(0, 2**62)
time_us = st.integers(-(2**63), 2**63 - 1)
hash_16 = st.binary(min_size=16, max_size=16)
identities = st.builds(LogIdentity, u64, u32)
names = st.text(max_size=30)


@QUICK
@given(st.builds(SegmentHeader, identities, u32, u64, time_us, hash_16))
def test_segment_headers(header: SegmentHeader) -> None:
    assert read_header(pack_header(header)) == header
    assert base_offset_of(file_name(header.base_offset)) == header.base_offset
    assert spare_epoch_of(spare_name(header.epoch)) == header.epoch


@QUICK
@given(
    identities, u32, st.lists(u64, min_size=4, max_size=4), time_us, time_us, hash_16, hash_16,
    st.one_of(st.none(), st.binary(max_size=50)), st.one_of(st.none(), hash_16), st.booleans(),
    st.lists(st.tuples(offset, offset, time_us), max_size=5),
)  # fmt: skip
def test_segment_footers_and_indexes(
    identity: LogIdentity, epoch: int, numbers: list[int], first_us: int, last_us: int, content: bytes,
    previous: bytes, snapshot: bytes | None, chain: bytes | None, compacted: bool,
    rows: list[tuple[int, int, int]],
) -> None:  # fmt: skip
    index = SparseIndex()
    for base, position, time in rows:
        index.offsets.append(base)
        index.positions.append(position)
        index.times.append(time)
    summary = Summary(
        identity, epoch, *numbers, first_us, last_us, 4096, content, previous, 0, 0, False, 0, 0, compacted
    )  # fmt: skip
    footer = pack_footer(summary, index.pack(), snapshot, chain)
    found = read_summary(footer[-SUMMARY_BYTES:], 4096 + len(footer))
    assert found is not None
    assert found[:11] == summary[:11] and (found.compacted, found.chained) == (compacted, chain is not None)
    entries, kept = split_footer(footer[:-SUMMARY_BYTES], found)
    assert kept == snapshot and chain_hash_of(footer[:-SUMMARY_BYTES], found) == (chain or content)
    again = SparseIndex.unpack(entries)
    assert (again.offsets, again.positions, again.times) == (index.offsets, index.positions, index.times)


@QUICK
@given(identities, st.builds(Mark, u64, u64, u64, u64, u32), st.builds(Mark, u64, u64, u64, u64, u32))
def test_marks(identity: LogIdentity, one: Mark, other: Mark) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "mark").write_bytes(pack_slot(identity, one) + pack_slot(identity, other))
        assert read_mark(Path(name), identity) == (max(one, other), False)
        (Path(name) / "mark").write_bytes(bytes(SLOT_BYTES) + pack_slot(identity, one))
        assert read_mark(Path(name), identity) == (one, False)


@QUICK
@given(identities, st.builds(Checkpoint, u64, st.binary(max_size=100)))
def test_producer_checkpoints(identity: LogIdentity, checkpoint: Checkpoint) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), identity, checkpoint)
        assert read_checkpoint(Path(name), identity) == checkpoint


@settings(deadline=None, max_examples=15)
@given(identities, st.dictionaries(names, st.binary(max_size=100), max_size=6))
def test_cursor_files_and_their_copies(identity: LogIdentity, states: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = CursorStore(Path(name), identity)
        store.load()
        for subscription, state in states.items():
            store.store(subscription, state)
        store.write()
        copy = store.copy()
        store.close()
        again = CursorStore(Path(name), identity)
        assert again.load() == states and not again.damage
        again.close()
        (Path(name) / "cursors-a").write_bytes(copy)
        (Path(name) / "cursors-b").write_bytes(b"")
        copied = CursorStore(Path(name), identity)
        assert copied.load() == states and not copied.damage
        copied.close()


@QUICK
@given(u64, st.binary(max_size=100), st.lists(st.tuples(u64, st.binary(min_size=1, max_size=50)), max_size=5))
def test_metadata_logs(generation: int, snapshot: bytes, entries: list[tuple[int, bytes]]) -> None:
    packed = b"".join(log_file.pack_entry(*entry) for entry in entries)
    content = log_file.new_file(generation, snapshot)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "metadata.log"
        path.write_bytes(content + packed)
        file = LogFile(path, writable=True)
        head = log_file.read_head(descriptors.fd(file), str(path))
        log_file.write_mark(descriptors.fd(file), len(content) + len(packed))
        assert log_file.read_mark(descriptors.fd(file), str(path)) == len(content) + len(packed)
        descriptors.close(file)
    assert (head.generation, head.snapshot, head.entries_start) == (generation, snapshot, len(content))
    for found in (
        list(log_file.committed_entries(packed, len(content), "it")),
        log_file.tail_entries(packed, len(content), "it"),
    ):
        assert [(entry.first_index, entry.content) for entry in found] == entries


rows = st.builds(
    lambda numbers, times, hashes, epoch, flags: (*numbers, *times, epoch, flags, *hashes),
    st.lists(offset, min_size=6, max_size=6).map(tuple), st.tuples(time_us, time_us, time_us),
    st.tuples(hash_16, hash_16, hash_16), u32, st.integers(0, 7),
)  # fmt: skip


staged = st.builds(
    Staged, rows, st.lists(hash_16, max_size=3), offset, offset, st.booleans(), time_us, hash_16
)


@QUICK
@given(st.lists(staged, max_size=3))
def test_lists_of_staged_objects(objects: list[Staged]) -> None:
    assert decode_staged(encode_staged(objects)) == objects
    assert all(isinstance(one.made, SegmentEntry) for one in objects)


@QUICK
@given(st.builds(Tail, u64, u32, u32, offset, st.lists(rows, max_size=3)))
def test_offers_of_returned_records(tail: Tail) -> None:
    assert decode_tail(encode_tail(tail)) == tail


hole_spans = st.tuples(st.integers(1, 50), st.integers(1, 50), u64, st.sampled_from(HoleKind), time_us)


@QUICK
@given(st.lists(hole_spans, max_size=8), names, identities)
def test_holes_of_a_manifest(drawn: list[tuple[Any, ...]], topic: str, identity: LogIdentity) -> None:
    holes: list[Hole] = []
    end = 0
    for gap, size, broker_id, kind, found_us in drawn:
        settled_us = 0 if kind is HoleKind.OPEN else 7
        holes.append(Hole(end + gap, end + gap + size, broker_id, 3, kind, found_us, settled_us))
        end += gap + size
    manifest = Manifest.empty(topic, identity, 3).with_holes(holes)
    again = Manifest.decode(manifest.encode())
    assert again == manifest and again.all_holes() == holes and again.topic == topic


@QUICK
@given(identities, u32, u32, rows)
def test_keys_of_the_store(identity: LogIdentity, epoch: int, number: int, row: tuple[Any, ...]) -> None:
    entry = SegmentEntry._make(row)
    for key, kind in (
        (segment_key(identity, entry), "segment"),
        (manifest_key(identity, epoch, number), "manifest"),
        (cursors_key(identity, epoch, number), "cursors"),
        (owner_key(identity, epoch), "owner"),
        (returned_key(identity, number, epoch), "returned"),
        (metadata_key(number), "metadata"),
    ):
        found = parse_key(key)
        assert found is not None and found.kind == kind, key
        assert kind == "metadata" or found.identity == identity


@QUICK
@given(st.builds(KeptOwner, st.integers(0, 2**63), u32, u32))
def test_owners(kept: KeptOwner) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_owner(Path(name), kept)
        assert read_owner(Path(name)) == kept


@QUICK
@given(st.lists(st.builds(DamagedRange, names, offset, offset, offset, names), max_size=5))
def test_reports_of_damage(ranges: list[DamagedRange]) -> None:
    with tempfile.TemporaryDirectory() as name:
        register = DamageRegister(Path(name))
        kept = [record for record in ranges if register.note(record)]
        assert register.store() and list(DamageRegister(Path(name))) == kept


@QUICK
@given(u64, st.dictionaries(names, names, max_size=5))
def test_members_of_the_metadata_group(term: int, members: dict[str, str]) -> None:
    assert members_of(members_entry(term, Members(members))) == Members(members)
