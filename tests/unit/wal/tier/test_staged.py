"""Objects that a job staged: what speaks against naming them, and what is seen when they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube.core.partition.compaction_plan import CompactionSettings
from danube.errors import InvalidArgument, ObjectMissing, StorageFailed, StoreDamaged
from danube.wal.segments.index import SparseIndex
from danube.wal.segments.segment import (
    HEADER_BYTES,
    SUMMARY_BYTES,
    LogIdentity,
    chain_hash_of,
    pack_footer,
    pack_header,
    read_header,
    read_summary,
    split_footer,
)
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry, entry_of
from danube.wal.tier.rewriting import compact_objects, compaction_plan, merge_objects
from danube.wal.tier.staged import (
    SOURCES_MAX,
    Rules,
    Staged,
    decode_staged,
    encode_staged,
    examine_staged,
    names,
    objection,
    staged,
)
from danube.wal.tier.uploader import Uploader, replacing, trimming
from tests.unit.faulty_store import FaultyStore
from tests.unit.merge_samples import Record
from tests.unit.wal.tier.test_compacting import LATER_US, segments_of, uploaded
from tests.unit.wal_samples import IDENTITY

COMPACTED = Rules(now_us=LATER_US, tombstone_retention_ms=0)
DELETED = Rules(now_us=LATER_US)
GONE = "its sources are not what the manifest names"


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def uploader(store: FaultyStore, tmp_path: Path) -> Uploader:
    """Six objects of four records each."""
    return uploaded(store, tmp_path / "log", segments_of(6))[0]


def entries(manifest: Manifest, first: int, stop: int) -> list[SegmentEntry]:
    return [manifest.entry(index) for index in range(first, stop)]


def merged(uploader: Uploader, work: Path, first: int = 1, stop: int = 4) -> Staged:
    sources = entries(uploader.manifest, first, stop)
    return staged(merge_objects(uploader, sources, work), sources)


def by_key(uploader: Uploader, work: Path, target_bytes: int = 1_500, keep_ms: int = 0) -> list[Staged]:
    """What a job that removes old tombstones makes of all but the newest object, in groups."""
    settings = CompactionSettings(dirty_bytes_min=0, lag_us=0, target_bytes=target_bytes)
    plan = compaction_plan(uploader.manifest, LATER_US, keep_ms, settings)
    assert plan is not None
    made: list[Staged] = []
    for entry, sources in compact_objects(uploader, plan, settings, work):
        removed = sum(source.record_count for source in sources) - entry.record_count
        after = made[-1].made.content_hash if made else b""
        made.append(
            staged(
                entry, sources, removed=removed, keys=True, tombstones_before_us=plan.tombstones_before_us,
                after=after,
            )
        )  # fmt: skip
    return made


def examine(uploader: Uploader, one: Staged, work: Path) -> None:
    first = uploader.manifest.find(one.made.base_offset)
    examine_staged(uploader, one, entries(uploader.manifest, first, first + len(one.sources)), work)


def changed(one: Staged, **fields: Any) -> Staged:
    """With other values in its row, or in itself."""
    row = {name: fields.pop(name) for name in list(fields) if name in SegmentEntry._fields}
    values = {name: getattr(one, name) for name in Staged.__struct_fields__} | fields
    values["row"] = one.made._replace(**row)[:14]
    return Staged(**values)


def test_a_list_crosses_the_wire(uploader: Uploader, tmp_path: Path) -> None:
    objects = [merged(uploader, tmp_path / "work"), *by_key(uploader, tmp_path / "work")]
    assert decode_staged(encode_staged(objects)) == objects
    for data in (b"", b"\xff", b"\x91\x01", encode_staged(objects)[:-1]):
        with pytest.raises(InvalidArgument, match="cannot be read"):
            decode_staged(data)


def test_a_merge_has_no_objection_until_it_is_installed(uploader: Uploader, tmp_path: Path) -> None:
    one = merged(uploader, tmp_path / "work")
    assert objection(one, uploader.manifest, DELETED) == "" and not names(uploader.manifest, one)
    examine(uploader, one, tmp_path / "work")
    sources = entries(uploader.manifest, 1, 4)
    uploader.install(replacing(one.made, sources))
    assert names(uploader.manifest, one)
    assert GONE in objection(one, uploader.manifest, DELETED)
    assert not (tmp_path / "work").exists()


def test_what_happened_in_between_is_an_objection(uploader: Uploader, tmp_path: Path) -> None:
    one, other = merged(uploader, tmp_path / "work"), merged(uploader, tmp_path / "work", 2, 5)
    planned = uploader.manifest
    after = uploader.install(replacing(other.made, entries(planned, 2, 5)))
    assert GONE in objection(one, after, DELETED), "a merge took some of them"
    assert GONE in objection(one, Manifest.empty(planned.topic, IDENTITY, 1), DELETED)
    trimmed = planned.trimmed(planned.entry(1).end_offset)
    assert GONE in objection(one, trimmed, DELETED), "retention took the first"
    expiring = Rules(now_us=LATER_US, trim_offset=planned.entry(1).end_offset)
    assert "expired" in objection(one, planned, expiring)
    assert objection(one, planned, expiring._replace(trim_offset=planned.entry(1).end_offset - 1)) == ""
    assert objection(one, planned.trimmed(planned.entry(0).end_offset), DELETED) == "", "it is the first now"


MERGE_MISTAKES: dict[str, tuple[Callable[[Staged], Staged], str]] = {
    "no hash": (lambda one: changed(one, content_hash=b"short"), "hash"),
    "no sources": (lambda one: changed(one, sources=[]), "0 sources"),
    "too many": (lambda one: changed(one, sources=one.sources * SOURCES_MAX), "sources"),
    "no bytes": (lambda one: changed(one, size_bytes=0), "bytes"),
    "offsets": (lambda one: changed(one, end_offset=one.made.end_offset + 1), "do not follow"),
    "an offset that is none": (lambda one: changed(one, base_offset=-1), GONE),
    "epoch": (lambda one: changed(one, epoch=one.made.epoch + 1), "do not follow"),
    "times": (lambda one: changed(one, last_append_us=0), "do not follow"),
    "the hash before": (lambda one: changed(one, previous_hash=b"x" * 16), "do not follow"),
    "the chain": (lambda one: changed(one, chain_hash=b"x" * 16), "do not follow"),
    "records": (lambda one: changed(one, record_count=one.made.record_count - 1), "do not follow"),
    "records that were removed": (
        lambda one: changed(one, record_count=one.made.record_count - 1, removed=1), "records are missing",
    ),
    "a number below none": (
        lambda one: changed(one, record_count=one.made.record_count + 1, removed=-1), "records are missing",
    ),
    "batches": (lambda one: changed(one, batch_count=one.made.batch_count - 1), "other batches"),
    "bytes of batches": (lambda one: changed(one, data_end=one.made.data_end + 8), "other batches"),
    "flags": (lambda one: changed(one, flags=0), "flags"),
    "compacted": (lambda one: changed(one, flags=int(EntryFlag.COMPACTED | EntryFlag.MERGED)), "flags"),
    "tombstones": (lambda one: changed(one, tombstones_before_us=1), "no key compaction"),
    "a number too large": (lambda one: changed(one, uploaded_us=2**64), "do not fit"),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGE_MISTAKES)
def test_an_entry_that_does_not_follow_from_its_sources(
    name: str, uploader: Uploader, tmp_path: Path
) -> None:
    mistake, expected = MERGE_MISTAKES[name]
    one = mistake(merged(uploader, tmp_path / "work"))
    assert expected in objection(one, uploader.manifest, DELETED)


def test_a_hole_is_not_hidden(uploader: Uploader, tmp_path: Path) -> None:
    one = merged(uploader, tmp_path / "work")
    rows = uploader.manifest.entries.copy()
    rows["base_offset"][2] += 1
    rows["record_count"][2] -= 1
    rows["flags"][2] |= int(EntryFlag.HOLE_BEFORE)
    manifest = uploader.manifest._with(rows)
    one = changed(one, record_count=one.made.record_count - 1)
    assert "missing between its sources" in objection(one, manifest, DELETED)


def test_key_compaction_is_for_topics_that_want_it(uploader: Uploader, tmp_path: Path) -> None:
    one = by_key(uploader, tmp_path / "work")[0]
    manifest = uploader.manifest
    assert one.removed and objection(one, manifest, COMPACTED) == ""
    assert "cleanup" in objection(one, manifest, DELETED)
    early = COMPACTED._replace(now_us=manifest.entry(0).last_append_us, lag_us=1)
    assert "not compacted yet" in objection(changed(one, tombstones_before_us=0), manifest, early)
    keeping = COMPACTED._replace(tombstone_retention_ms=10**6)
    assert "younger than the topic keeps them" in objection(one, manifest, keeping)
    assert "flags" in objection(changed(one, flags=int(EntryFlag.MERGED)), manifest, COMPACTED)


def test_the_newest_object_is_left_alone(uploader: Uploader, tmp_path: Path) -> None:
    one = by_key(uploader, tmp_path / "work", target_bytes=1 << 20)[0]
    whole = uploader.manifest
    shorter = Manifest(
        whole.topic, *IDENTITY, whole.epoch, whole.generation, whole.start_offset, whole.entries[:5]
    )
    assert objection(one, whole, COMPACTED) == ""
    assert "newest object" in objection(one, shorter, COMPACTED)


def test_tombstones_go_in_order_only(uploader: Uploader, tmp_path: Path) -> None:
    """Without the first group's compaction an older record would be back when the tombstone is gone."""
    first, second, *_ = by_key(uploader, tmp_path / "work")
    manifest = uploader.manifest
    assert "was not compacted with it" in objection(second, manifest, COMPACTED)
    assert objection(second, manifest, COMPACTED, {first.made.content_hash}) == "", "it will be before it"
    assert objection(changed(second, tombstones_before_us=0), manifest, COMPACTED) == ""
    expired = manifest.trimmed(second.made.base_offset)
    assert objection(second, expired, COMPACTED) == "", "nothing lies before it any more"
    after = uploader.install(replacing(first.made, entries(manifest, 0, len(first.sources))))
    assert objection(second, after, COMPACTED) == ""


def test_what_is_compacted_is_not_joined_with_the_rest(uploader: Uploader, tmp_path: Path) -> None:
    first, *_ = by_key(uploader, tmp_path / "work")
    uploader.install(replacing(first.made, entries(uploader.manifest, 0, len(first.sources))))
    mixed = merged(uploader, tmp_path / "work", 0, 2)
    assert mixed.made.flags & EntryFlag.COMPACTED
    assert "count as compacted" in objection(mixed, uploader.manifest, COMPACTED)


def test_compacted_objects_are_merged(uploader: Uploader, tmp_path: Path) -> None:
    first, second, *_ = by_key(uploader, tmp_path / "work")
    for one in (first, second):
        number = uploader.manifest.find(one.made.base_offset)
        sources = entries(uploader.manifest, number, number + len(one.sources))
        uploader.install(replacing(one.made, sources))
    both = merged(uploader, tmp_path / "work", 0, 2)
    assert objection(both, uploader.manifest, DELETED) == ""
    examine(uploader, both, tmp_path / "work")


# -- the object -----------------------------------------------------------------------------------


def test_objects_that_are_what_they_say(uploader: Uploader, store: FaultyStore, tmp_path: Path) -> None:
    examine(uploader, merged(uploader, tmp_path / "work", 0, 6), tmp_path / "work")
    for one in by_key(uploader, tmp_path / "work"):
        examine(uploader, one, tmp_path / "work")
    reads = store.calls.count("get")
    examine(uploader, merged(uploader, tmp_path / "work", 0, 6), tmp_path / "work")
    assert store.calls.count("get_to") and store.calls.count("get") - reads <= 7 + 6, "no source is read"


def forged(store: FaultyStore, one: Staged, change: Callable[[bytearray], None]) -> Staged:
    """An object of another content that is sealed as well as any, and the entry that says so."""
    key = segment_key(IDENTITY, one.made)
    data = bytearray(store.memory.get(key))
    summary = read_summary(bytes(data[-SUMMARY_BYTES:]), len(data))
    assert summary is not None
    body = bytes(data[summary.data_end : -SUMMARY_BYTES])
    content, (index, snapshot) = data[: summary.data_end], split_footer(body, summary)
    change(content)
    from danube.core.batch.checksum import content_hash

    sealed = summary._replace(content_hash=content_hash(bytes(content)))
    footer = pack_footer(sealed, index, snapshot, chain_hash_of(body, summary))
    whole = bytes(content) + footer
    final = read_summary(footer[-SUMMARY_BYTES:], len(whole))
    assert final is not None
    made = entry_of(final, len(whole), 1, flags=one.made.flags, chain_hash=one.made.chain_hash)
    store.memory.put(segment_key(IDENTITY, made), whole)
    return changed(one, **made._asdict())


def rewritten(store: FaultyStore, one: Staged, **more: Any) -> Staged:
    """The same content with another footer; ``more``: index, snapshot or fields of the summary."""
    key = segment_key(IDENTITY, one.made)
    data = store.memory.get(key)
    summary = read_summary(data[-SUMMARY_BYTES:], len(data))
    assert summary is not None
    body = data[summary.data_end : -SUMMARY_BYTES]
    index, snapshot = split_footer(body, summary)
    index, snapshot = more.pop("index", index), more.pop("snapshot", snapshot)
    footer = pack_footer(summary._replace(**more), index, snapshot, chain_hash_of(body, summary))
    whole = data[: summary.data_end] + footer
    store.memory.put(key, whole)
    return changed(one, size_bytes=len(whole))


def _swap_batches(content: bytearray) -> None:
    """The last record's payload of the first source, with the checksums that belong to it."""
    from danube.core.batch.format import read_header as batch_header
    from danube.core.batch.format import stamp

    first = batch_header(content, HEADER_BYTES)
    view = bytearray(content[HEADER_BYTES : HEADER_BYTES + first.size])
    stamp(view, first.base_offset, first.epoch, first.append_time_us + 1)
    content[HEADER_BYTES : HEADER_BYTES + first.size] = view


def _flip(content: bytearray) -> None:
    content[HEADER_BYTES + 150] ^= 1


def _other_partition(content: bytearray) -> None:
    header = read_header(bytes(content[:HEADER_BYTES]))
    content[:HEADER_BYTES] = pack_header(header._replace(identity=LogIdentity(99, 0)))


def _index_astray(one: Staged) -> bytes:
    index = SparseIndex()
    index.add(one.made.base_offset, HEADER_BYTES + 8, 0)
    return index.pack()


OBJECT_MISTAKES: dict[str, tuple[Callable[[FaultyStore, Staged], Staged], str]] = {
    "a sound batch that is no source's": (
        lambda store, one: forged(store, one, _swap_batches), "are not its source's",
    ),
    "a flipped bit": (lambda store, one: forged(store, one, _flip), "damaged batches"),
    "another partition's header": (lambda store, one: forged(store, one, _other_partition), "different"),
    "other producers": (
        lambda store, one: rewritten(store, one, snapshot=b"others"), "state of the producers",
    ),
    "no producers": (lambda store, one: rewritten(store, one, snapshot=None), "state of the producers"),
    "an index that goes astray": (
        lambda store, one: rewritten(store, one, index=_index_astray(one)), "index does not lead",
    ),
    "a footer of another partition": (
        lambda store, one: rewritten(store, one, identity=LogIdentity(99, 0)), "different segments",
    ),
    "a footer that counts otherwise": (
        lambda store, one: changed(rewritten(store, one, batch_count=1), batch_count=1), "other numbers",
    ),
    "an entry that counts otherwise": (lambda store, one: changed(one, record_count=3), "other things"),
    "a footer that says compacted": (
        lambda store, one: rewritten(store, one, compacted=True), "other things than its entry",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECT_MISTAKES)
def test_an_object_that_is_not_what_it_says(
    name: str, uploader: Uploader, store: FaultyStore, tmp_path: Path
) -> None:
    mistake, expected = OBJECT_MISTAKES[name]
    one = mistake(store, merged(uploader, tmp_path / "work"))
    with pytest.raises(StoreDamaged) as caught:
        examine(uploader, one, tmp_path / "work")
    assert expected in str(caught.value)
    assert not (tmp_path / "work").exists()


def test_an_object_that_is_not_there_or_of_another_size(
    uploader: Uploader, store: FaultyStore, tmp_path: Path
) -> None:
    one = merged(uploader, tmp_path / "work")
    key = segment_key(IDENTITY, one.made)
    store.memory.put(key, store.memory.get(key) + b"more")
    with pytest.raises(StoreDamaged, match="instead of"):
        examine(uploader, one, tmp_path / "work")
    store.memory.delete([key])
    with pytest.raises(ObjectMissing, match="not in the store"):
        examine(uploader, one, tmp_path / "work")


def test_a_source_whose_batches_are_not_in_it(uploader: Uploader, store: FaultyStore, tmp_path: Path) -> None:
    """Three sources are said to be replaced, the object holds two and a forged footer."""
    two, three = merged(uploader, tmp_path / "work", 1, 3), entries(uploader.manifest, 1, 4)
    with pytest.raises(StoreDamaged, match=r"state of the producers|ends before"):
        examine_staged(uploader, two, three, tmp_path / "work")
    with pytest.raises(StoreDamaged, match=r"state of the producers|goes on behind"):
        examine_staged(uploader, two, three[:1], tmp_path / "work")
    same = rewritten(store, two, snapshot=b"producers 3")
    with pytest.raises(StoreDamaged, match="ends before"):
        examine_staged(uploader, same, three, tmp_path / "work")
    same = rewritten(store, two, snapshot=b"producers 1")
    with pytest.raises(StoreDamaged, match="goes on behind"):
        examine_staged(uploader, same, three[:1], tmp_path / "work")


def test_a_damaged_footer_of_the_last_source(uploader: Uploader, store: FaultyStore, tmp_path: Path) -> None:
    one = merged(uploader, tmp_path / "work")
    key = segment_key(IDENTITY, uploader.manifest.entry(3))
    data = bytearray(store.memory.get(key))
    data[-30] ^= 1
    store.memory.put(key, bytes(data))
    with pytest.raises(StoreDamaged, match="footer"):
        examine(uploader, one, tmp_path / "work")


def test_a_compacted_object_needs_the_state_of_the_producers(
    uploader: Uploader, store: FaultyStore, tmp_path: Path
) -> None:
    one = rewritten(store, by_key(uploader, tmp_path / "work")[0], snapshot=None)
    with pytest.raises(StoreDamaged, match="no state of the producers"):
        examine(uploader, one, tmp_path / "work")


def test_a_disk_that_refuses_is_no_fault_of_the_object(uploader: Uploader, tmp_path: Path) -> None:
    one = merged(uploader, tmp_path / "work")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageFailed):
        examine(uploader, one, tmp_path / "file" / "work")


def test_an_object_of_empty_segments_is_examined(store: FaultyStore, tmp_path: Path) -> None:
    """Sources of which compaction left nothing have no batches at all."""
    segments: list[list[list[Record]]] = [
        [[(b"a", b"1")]],
        [[(b"a", b"2")]],
        [[(b"a", b"3")]],
        [[(b"b", b"")]],
    ]
    uploader, _ = uploaded(store, tmp_path / "log", segments)
    made = by_key(uploader, tmp_path / "work", target_bytes=1, keep_ms=10**9)
    assert [one.made.batch_count for one in made] == [0, 0, 1]
    for one in made:
        examine(uploader, one, tmp_path / "work")
        number = uploader.manifest.find(one.made.base_offset)
        uploader.install(replacing(one.made, entries(uploader.manifest, number, number + 1)))
    for first, stop in ((0, 2), (0, 3), (1, 3)):
        one = merged(uploader, tmp_path / "work", first, stop)
        assert objection(one, uploader.manifest, COMPACTED) == ""
        examine(uploader, one, tmp_path / "work")
    assert uploader.install(trimming(1)).start_offset == 1
