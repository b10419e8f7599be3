"""Selecting records: kernel and twin give the same bytes, and each record stays what it was."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest

from danube.core import kernels
from danube.core.batch.columns import BatchView, check_columns, encode
from danube.core.batch.format import COMPRESSION_MASK, Compression, Flag, read_header, stamp
from danube.core.batch.selection import ring_hash, ring_hashes, ring_hashes_twin, select, select_twin
from danube.errors import InvalidArgument, ProtocolError
from tests.stored_batches import check_stored


def _options(source: random.Random, count: int) -> dict[str, Any]:
    """Records with a random choice of columns."""
    options: dict[str, Any] = {
        "payloads": [source.randbytes(source.choice([0, 1, 8, 100])) for _ in range(count)],
        "producer_name": source.choice(["", "p", "producer"]),
        "origin": source.choice(["", "origin"]),
    }
    if source.random() < 0.6:
        null = source.choice([0.0, 0.5])
        options["keys"] = [None if source.random() < null else source.randbytes(5) for _ in range(count)]
    if source.random() < 0.5:
        options["attributes"] = [{"k": "v" * source.randrange(9)} for _ in range(count)]
    if source.random() < 0.5:
        options["publish_times"] = [source.getrandbits(60) for _ in range(count)]
    if source.random() < 0.5:
        options["request_ids"] = [source.getrandbits(64) for _ in range(count)]
    return options


def _stored(options: dict[str, Any], base_offset: int = 1000) -> bytes:
    batch = bytearray(encode(publish_time_us=9, **options).to_bytes())
    stamp(batch, base_offset, 4, 5)
    return bytes(batch)


def _some(source: random.Random, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(sorted(source.sample(range(count), source.randrange(1, count + 1))), np.int64)


def _records(view: BatchView) -> list[tuple[Any, ...]]:
    """All that a consumer sees of each record."""
    request_ids = view.request_ids
    return list(
        zip(
            view.offsets.tolist(),
            view.payloads(),
            view.keys(),
            view.attributes_list(),
            view.publish_times.tolist(),
            [None] * len(view) if request_ids is None else request_ids.tolist(),
            strict=True,
        )
    )


def test_a_selection_holds_the_chosen_records_unchanged(kernels_or_twins: str, source: random.Random) -> None:
    for _ in range(150):
        count = source.randrange(1, 70)
        stored = _stored(_options(source, count))
        header = read_header(stored)
        check_columns(stored, header, 100)
        indexes = _some(source, count)
        chosen = select(stored, header, indexes)
        view = BatchView(chosen, check_stored(chosen))
        view.check()
        everything = _records(BatchView(stored))
        assert _records(view) == [everything[index] for index in indexes]
        assert view.header.flags == header.flags | Flag.SELECTED
        kept = ("base_offset", "epoch", "append_time_us", "producer_id", "base_sequence", "publish_time_us")
        assert all(getattr(view.header, name) == getattr(header, name) for name in kept)
        assert (view.producer_name, view.origin) == (
            BatchView(stored).producer_name,
            BatchView(stored).origin,
        )
        assert chosen == select_twin(stored, header, indexes)


def test_a_selection_of_a_selection_keeps_the_offsets(kernels_or_twins: str, source: random.Random) -> None:
    for _ in range(40):
        count = source.randrange(2, 50)
        stored = _stored(_options(source, count))
        first = _some(source, count)
        once = select(stored, read_header(stored), first)
        second = _some(source, len(first))
        twice = select(once, read_header(once), second)
        assert twice == select(stored, read_header(stored), first[second])
        assert BatchView(twice, check_stored(twice)).offsets.tolist() == (1000 + first[second]).tolist()


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_a_selection_of_a_compressed_batch_is_not_compressed(
    kernels_or_twins: str, kind: Compression
) -> None:
    pytest.importorskip("lz4.frame" if kind is Compression.LZ4 else "zstandard")
    options = {"payloads": [b"abcdefgh" * 20] * 40, "keys": [b"k"] * 40, "producer_name": "p"}
    stored = bytearray(encode(publish_time_us=9, compression=kind, **options).to_bytes())
    stamp(stored, 1000, 4, 5)
    assert read_header(stored).flags & COMPRESSION_MASK == kind
    indexes = np.array([0, 5, 39])
    plain = _stored(options)
    assert select(stored, read_header(stored), indexes) == select(plain, read_header(plain), indexes)


@pytest.mark.parametrize("indexes", [[], [-1], [3], [1, 1], [2, 1], [0, 1, 2, 3]], ids=repr)
def test_indexes_must_ascend_within_the_batch(kernels_or_twins: str, indexes: list[int]) -> None:
    stored = _stored({"payloads": [b"a", b"b", b"c"]})
    with pytest.raises(InvalidArgument):
        select(stored, read_header(stored), np.array(indexes, np.int64))


def test_hostile_offsets_are_refused_and_never_followed(kernels_or_twins: str) -> None:
    stored = _stored({"payloads": [b"abc", b"de", b"f"], "keys": [b"k", b"l", b"m"]})
    header = read_header(stored)
    layout = BatchView(stored).layout
    start = header.size - header.columns_size
    for column in (layout.payload_offsets, layout.key_offsets):
        for value in (-1, -(2**31), 2**31 - 1, 100):
            data = bytearray(stored)
            struct.pack_into("<i", data, start + column + 4, value)
            with pytest.raises(ProtocolError):
                select(data, header, np.array([0, 1]))
            if column == layout.key_offsets:
                with pytest.raises(ProtocolError):
                    ring_hashes(data, header)


def test_entries_that_overlap_cannot_be_multiplied(kernels_or_twins: str) -> None:
    """Offsets 0, T, 0, T ... would give every other record the whole column."""
    count, size = 2000, 1000
    stored = bytearray(_stored({"payloads": [b"x" * size] * count, "keys": [b"k" * 40] * count}))
    header = read_header(stored)
    layout = BatchView(stored).layout
    start = header.size - header.columns_size
    for column, total in ((layout.payload_offsets, size * count), (layout.key_offsets, 40 * count)):
        data = bytearray(stored)
        offsets = np.frombuffer(data, np.int32, count + 1, start + column)
        offsets[:] = 0
        offsets[1::2] = total
        with pytest.raises(ProtocolError):
            select(data, header, np.arange(0, count, 2))
    with pytest.raises(ProtocolError):
        ring_hashes(data, header)


def test_a_selection_whose_offsets_do_not_ascend_is_refused(kernels_or_twins: str) -> None:
    stored = _stored({"payloads": [b"a", b"b", b"c"]})
    chosen = bytearray(select(stored, read_header(stored), np.array([0, 1, 2])))
    header = read_header(chosen)
    struct.pack_into("<I", chosen, header.size - header.columns_size + BatchView(chosen).layout.selected, 5)
    with pytest.raises(ProtocolError, match="ascend"):
        select(chosen, header, np.array([1]))
    with pytest.raises(ProtocolError, match="ascend"):
        BatchView(chosen).check()


def test_random_damage_never_escapes_the_batch(kernels_or_twins: str, source: random.Random) -> None:
    honest = _stored(_options(source, 20) | {"keys": [b"k", None] * 10})
    for _ in range(400):
        data = bytearray(honest)
        struct.pack_into("<I", data, source.randrange(36, len(data) - 4) & ~3, source.getrandbits(32))
        try:
            header = read_header(data)
            chosen = select(data, header, np.arange(0, header.record_count, source.choice([1, 2])))
            ring_hashes(data, header)
        except Exception as error:
            assert type(error).__module__ == "danube.errors", repr(error)
        else:
            assert len(chosen) <= 2 * len(data)


def test_ring_hashes_are_the_published_functions() -> None:
    def by_the_book(data: bytes) -> int:
        """FNV-1a of 64 bits, folded, then MurmurHash3's fmix32, in another spelling."""
        value = 14695981039346656037
        for octet in data:
            value = ((value ^ octet) * 1099511628211) % 2**64
        folded = value // 2**32 ^ value % 2**32
        for shift, factor in ((16, 2246822507), (13, 3266489909)):
            folded = (folded ^ folded >> shift) * factor % 2**32
        return folded ^ folded >> 16

    for data in (b"", b"a", b"foobar", bytes(range(256)), "ключ".encode()):
        assert ring_hash(data) == by_the_book(data)


def test_ring_hashes_of_records_are_those_of_their_keys(kernels_or_twins: str, source: random.Random) -> None:
    for _ in range(60):
        count = source.randrange(1, 60)
        options = _options(source, count)
        stored = _stored(options)
        hashes = ring_hashes(stored, read_header(stored))
        name = options["producer_name"].encode()
        keys = options.get("keys") or [None] * count
        assert hashes.dtype == np.uint64
        assert hashes.tolist() == [ring_hash(name if key is None else key) for key in keys]
        assert hashes.tolist() == ring_hashes_twin(BatchView(stored)).tolist()


def test_the_kernels_run_where_they_were_loaded(kernels_or_twins: str) -> None:
    assert kernels.available == (kernels_or_twins == "kernels")
