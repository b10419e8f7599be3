"""Chunks: what is cut or picked is exactly the records asked for, and the memory of hot ones is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.broker.partition.chunks import Chunk, HotBatches
from danube.core.batch.columns import encode
from danube.core.batch.format import read_header, stamp
from danube.core.batch.selection import ring_hash, select
from tests.unit.broker_parts import records_in

FIRST = 1000


def stamped(count: int, base_offset: int, *, keyed: bool = False, producer_name: str = "") -> bytes:
    payloads = [b"%d" % number * (number % 3 + 1) for number in range(base_offset, base_offset + count)]
    keys = [b"k%d" % (number % 5) for number in range(count)] if keyed else None
    encoded = bytearray(
        encode(payloads, keys=keys, producer_name=producer_name, publish_time_us=0).to_bytes()
    )
    stamp(encoded, base_offset, 1, 1)
    return bytes(encoded)


def chunk_of(counts: list[int], *, keyed: bool = False, first: int = FIRST) -> Chunk:
    parts, offset = [], first
    for count in counts:
        parts.append(stamped(count, offset, keyed=keyed))
        offset += count
    return Chunk(b"".join(parts), first, offset)


def joined(parts: list[bytes | memoryview]) -> list[tuple[int, bytes]]:
    assert all(len(part) and len(part) % 8 == 0 for part in parts)
    return [record for part in parts for record in records_in(part)]


COUNTS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.booleans(), st.data())
def test_cut_is_a_slice_of_the_records(counts: list[int], keyed: bool, data: st.DataObject) -> None:
    chunk = chunk_of(counts, keyed=keyed)
    records = records_in(chunk.data)
    assert [offset for offset, _ in records] == list(range(FIRST, chunk.next_offset))
    start = data.draw(st.integers(FIRST, chunk.next_offset - 1))
    end = data.draw(st.integers(start + 1, chunk.next_offset))
    assert joined(chunk.cut(start, end)) == records[start - FIRST : end - FIRST]


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.booleans(), st.data())
def test_pick_is_those_records_in_order(counts: list[int], keyed: bool, data: st.DataObject) -> None:
    chunk = chunk_of(counts, keyed=keyed)
    records = dict(records_in(chunk.data))
    chosen = data.draw(st.sets(st.sampled_from(sorted(records)), min_size=1))
    offsets = np.array(sorted(chosen), np.int64)
    assert joined(chunk.pick(offsets)) == [(offset, records[offset]) for offset in sorted(chosen)]


def test_whole_batches_are_never_copied() -> None:
    chunk = chunk_of([3, 4, 5])
    assert chunk.cut(FIRST, FIRST + 12)[0] is chunk.data
    (middle,) = chunk.cut(FIRST + 3, FIRST + 7)
    assert isinstance(middle, memoryview) and middle.obj is chunk.data
    (picked,) = chunk.pick(np.arange(FIRST + 3, FIRST + 7))
    assert isinstance(picked, memoryview) and picked.obj is chunk.data
    edges = chunk.cut(FIRST + 2, FIRST + 8)
    assert [isinstance(part, memoryview) for part in edges] == [False, True, False]


def test_a_range_inside_one_batch_is_one_selection() -> None:
    chunk = chunk_of([10, 10])
    parts = chunk.cut(FIRST + 2, FIRST + 5)
    assert len(parts) == 1
    assert [offset for offset, _ in joined(parts)] == [FIRST + 2, FIRST + 3, FIRST + 4]


def test_hashes_and_keys_belong_to_their_offsets() -> None:
    chunk = chunk_of([4, 7], keyed=True)
    keys = [chunk.key(offset) for offset in range(FIRST, chunk.next_offset)]
    assert keys == [b"k0", b"k1", b"k2", b"k3", b"k0", b"k1", b"k2", b"k3", b"k4", b"k0", b"k1"]
    assert keys == [chunk.key_at(index) for index in range(11)]
    assert chunk.hashes.tolist() == [ring_hash(key) for key in keys]


def test_a_record_without_key_goes_by_its_producer() -> None:
    chunk = Chunk(stamped(2, 0, producer_name="till-7"), 0, 2)
    assert chunk.key(1) == b"till-7"
    assert chunk.hashes.tolist() == [ring_hash(b"till-7")] * 2


def test_hot_batches_give_way_oldest_first_and_keep_the_newest() -> None:
    one = len(stamped(2, 0))
    hot = HotBatches(one * 3)
    for number in range(5):
        hot.add(number * 2, number * 2 + 2, stamped(2, number * 2))
    assert hot.size_bytes == one * 3
    assert hot.chunk(3, 10, 1 << 20) is None
    kept = hot.chunk(4, 10, 1 << 20)
    assert kept is not None and (kept.first_offset, kept.next_offset) == (4, 10)
    huge = stamped(2000, 10)
    hot.add(10, 2010, huge)
    assert hot.size_bytes == len(huge), "even one that is larger than the bound is kept, alone"


@pytest.mark.parametrize(
    "end, bytes_max, reached", [(10, 1 << 20, 10), (6, 1 << 20, 6), (10, 1, 6), (5, 1 << 20, 6)]
)
def test_a_hot_chunk_holds_whole_batches_below_the_end(end: int, bytes_max: int, reached: int) -> None:
    hot = HotBatches(1 << 20)
    for base in range(0, 10, 2):
        hot.add(base, base + 2, stamped(2, base))
    chunk = hot.chunk(5, end, bytes_max)
    assert chunk is not None and (chunk.first_offset, chunk.next_offset) == (4, reached)
    assert [offset for offset, _ in records_in(chunk.data)] == list(range(4, reached))


def test_hot_batches_never_join_across_a_gap() -> None:
    hot = HotBatches(1 << 20)
    hot.add(0, 2, stamped(2, 0))
    hot.add(4, 6, stamped(2, 4))
    assert hot.chunk(0, 6, 1 << 20) is None
    assert hot.chunk(4, 6, 1 << 20) is not None


def test_trim_truncate_and_clear_keep_the_count_of_bytes() -> None:
    hot = HotBatches(1 << 20)
    one = len(stamped(2, 0))
    for base in range(0, 10, 2):
        hot.add(base, base + 2, stamped(2, base))
    hot.trim(3)
    assert hot.size_bytes == one * 4
    hot.truncate(8)
    assert hot.size_bytes == one * 3
    chunk = hot.chunk(2, 100, 1 << 20)
    assert chunk is not None and (chunk.first_offset, chunk.next_offset) == (2, 8)
    hot.clear()
    assert hot.size_bytes == 0 and hot.chunk(2, 100, 1 << 20) is None


# -- chunks of a compacted segment ----------------------------------------------------------------


def sparse_of(counts: list[int], kept: list[bool], tail: int, *, keyed: bool = False) -> tuple[Chunk, Chunk]:
    """A chunk and what compaction may leave of it; batches of which nothing is kept are gone."""
    whole = chunk_of(counts, keyed=keyed)
    parts: list[bytes | memoryview] = []
    for place in whole.places:
        low, high = place.base_offset - FIRST, place.end_offset - FIRST
        indexes = np.flatnonzero(kept[low:high])
        if len(indexes) == high - low:
            parts.append(whole.batch(place))
        elif len(indexes):
            parts.append(select(whole.batch(place), whole.header(place), indexes))
    data = b"".join(parts)
    first = read_header(data).base_offset if data else FIRST
    return whole, Chunk(data, first, whole.next_offset + tail, sparse=True)


@settings(deadline=None, max_examples=120)
@given(COUNTS, st.lists(st.booleans(), min_size=36, max_size=36), st.integers(0, 3), st.booleans(), st.data())
def test_a_sparse_chunk_knows_what_it_holds(
    counts: list[int], kept: list[bool], tail: int, keyed: bool, data: st.DataObject
) -> None:
    whole, chunk = sparse_of(counts, kept, tail, keyed=keyed)
    if not chunk.data:
        return
    records = {offset: payload for offset, payload in records_in(whole.data) if kept[offset - FIRST]}
    covered = np.arange(chunk.first_offset, chunk.next_offset)
    held = {int(offset) for offset in covered[chunk.held(covered)]}
    assert held == set(records)
    missing = {offset for start, end in chunk.missing.tolist() for offset in range(start, end)}
    assert missing == set(covered.tolist()) - held
    assert (chunk.missing[1:, 0] > chunk.missing[:-1, 1]).all(), "apart from each other"
    chosen = sorted(data.draw(st.sets(st.sampled_from(sorted(held)), min_size=1)))
    assert joined(chunk.pick(np.array(chosen))) == [(offset, records[offset]) for offset in chosen]
    assert chunk.pick(np.array(sorted(held))) == [chunk.data]
    assert [place.end_offset for place in chunk.places][-1] == chunk.next_offset
    for offset in covered.tolist():
        hashed, key = int(chunk.hashes[offset - chunk.first_offset]), chunk.key(offset)
        if offset in held:
            assert key == whole.key(offset) and hashed == ring_hash(key)
        else:
            assert key == b"" and hashed == 0
