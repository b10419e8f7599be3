"""Reading batches in place: round trips, damage is seen, and hostile bytes never escape."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.core.batch import columns
from danube.core.batch.checksum import crc32c, key_hash
from danube.core.batch.columns import BatchView, check_columns, check_columns_twin, encode, key_partitions
from danube.core.batch.format import HEADER_BYTES, Compression, Flag, read_header, stamp
from danube.errors import CallerError, Damage, LimitExceeded, ProtocolError, RecordTooLarge
from danube.limits import MIB
from tests.stored_batches import check_stored

_RECORD = st.fixed_dictionaries(
    {
        "payload": st.binary(max_size=40),
        "key": st.none() | st.binary(max_size=9),
        "attributes": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
        "time": st.integers(-(2**63), 2**63 - 1),
        "request": st.integers(0, 2**64 - 1),
    }
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """What went in, and the stored batch."""
    records = draw(st.lists(_RECORD, min_size=1, max_size=30))
    options: dict[str, Any] = {"payloads": [record["payload"] for record in records]}
    for name, source in (
        ("keys", "key"),
        ("attributes", "attributes"),
        ("publish_times", "time"),
        ("request_ids", "request"),
    ):
        if draw(st.booleans()):
            options[name] = [record[source] for record in records]
    options["producer_name"] = draw(st.text(max_size=9))
    options["origin"] = draw(st.text(max_size=9))
    options["schema_id"] = draw(st.none() | st.integers(0, 2**64 - 1))
    options["schema_version"] = draw(st.none() | st.integers(0, 2**32 - 1))
    stored = bytearray(encode(publish_time_us=77, **options).to_bytes())
    stamp(stored, draw(st.integers(0, 2**62)), 3, 5)
    return options, bytes(stored)


@given(batches())
@settings(max_examples=60)
def test_what_goes_in_comes_out(case: tuple[dict[str, Any], bytes]) -> None:
    options, stored = case
    count = len(options["payloads"])
    view = BatchView(stored, check_stored(stored))
    view.check()
    check_columns(stored, view.header, MIB)
    assert view.payloads() == options["payloads"]
    assert [view.payload(index) for index in range(count)] == options["payloads"]
    keys = options.get("keys") or [None] * count
    assert view.keys() == [view.key(index) for index in range(count)] == keys
    attributes = options.get("attributes") or [{}] * count
    assert view.attributes_list() == [view.attributes(index) for index in range(count)] == attributes
    assert view.publish_times.tolist() == options.get("publish_times", [77] * count)
    request_ids = view.request_ids
    assert (None if request_ids is None else request_ids.tolist()) == options.get("request_ids")
    assert (view.producer_name, view.origin) == (options["producer_name"], options["origin"])
    assert (view.schema_id, view.schema_version) == (options["schema_id"], options["schema_version"])
    first = view.header.base_offset
    assert view.offsets.tolist() == list(range(first, first + count))
    assert bytes(view.payload_bytes) == b"".join(options["payloads"])
    assert view.payload_offsets[-1] == len(view.payload_bytes)


def _rich() -> bytearray:
    stored = bytearray(
        encode(
            [b"abc", b"", b"defgh"],
            keys=[b"k", None, b"kk"],
            attributes=[{"a": "b"}, None, {"é": "ü"}],
            publish_times=[1, 2, 3],
            request_ids=[4, 5, 6],
            publish_time_us=1,
            producer_name="name",
            origin="origin",
        ).to_bytes()
    )
    stamp(stored, 100, 1, 2)
    return stored


def test_every_bit_that_flips_in_a_stored_batch_is_seen() -> None:
    stored = _rich()
    check_stored(stored, 100)
    for position in range(len(stored)):
        for bit in range(8):
            stored[position] ^= 1 << bit
            with pytest.raises(Damage):
                check_stored(stored, 100)
            stored[position] ^= 1 << bit


def test_a_batch_in_the_middle_of_a_buffer_is_read_where_it_lies() -> None:
    stored = bytes(_rich())
    for before in range(9):
        view = BatchView(memoryview(bytes(before) + stored + b"more"), position=before)
        view.check()
        assert view.payloads() == [b"abc", b"", b"defgh"]
        assert view.keys() == [b"k", None, b"kk"]
        assert view.data.nbytes == len(stored)


def test_a_view_copies_nothing() -> None:
    stored = _rich()
    view = BatchView(stored)
    assert view.payload(0) == b"abc"
    stored[stored.index(b"abc")] ^= 0xFF
    assert view.payload(0) == b"\x9ebc"


def test_a_batch_cut_anywhere_raises_and_never_crashes() -> None:
    stored = bytes(_rich())
    for size in range(len(stored)):
        with pytest.raises(ProtocolError):
            BatchView(stored[:size])
        with pytest.raises(ProtocolError):
            check_columns(stored[:size], read_header(stored), MIB)


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_records_outside_the_batch_are_an_index_error(index: int) -> None:
    view = BatchView(_rich())
    for accessor in (view.payload, view.key, view.attributes):
        with pytest.raises(IndexError):
            accessor(index)


def _readers(data: bytes) -> list[Callable[[], Any]]:
    """Everything that may be done with bytes of a peer, each starting anew."""
    names = ("payloads", "keys", "attributes_list", "check")
    properties = ("offsets", "publish_times", "request_ids", "producer_name", "origin", "payload_bytes")
    calls: list[Callable[[], Any]] = [lambda name=name: getattr(BatchView(data), name)() for name in names]
    calls += [lambda name=name: getattr(BatchView(data), name) for name in properties]
    for index in range(3):
        calls += [
            lambda index=index: BatchView(data).payload(index),
            lambda index=index: BatchView(data).key(index),
            lambda index=index: BatchView(data).attributes(index),
        ]
    calls.append(lambda: check_columns(data, read_header(data), MIB))
    return calls


def _try_all(data: bytes) -> None:
    """Nothing but typed errors comes out, and what comes out holds only bytes of the batch."""
    for call in _readers(data):
        try:
            result = call()
        except (CallerError, IndexError):
            continue
        if isinstance(result, list):
            assert sum(len(piece or b"") for piece in result) <= len(data)


def test_a_base_offset_that_is_none_is_refused() -> None:
    stored = _rich()
    for base_offset in (2**63 - 1, 2**63, 2**64 - 1):
        stamp(stored, base_offset, 1, 2)
        with pytest.raises(ProtocolError, match="offset"):
            _ = BatchView(stored).offsets


def test_hostile_bytes_give_typed_errors_and_nothing_from_outside(
    kernels_or_twins: str, source: random.Random
) -> None:
    honest = bytes(_rich())
    for _ in range(1500):
        data = bytearray(honest)
        for _ in range(source.randrange(1, 4)):
            position = source.randrange(4, len(data) - 4)
            value = source.choice([0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, source.getrandbits(32)])
            if source.random() < 0.5:
                struct.pack_into("<I", data, position & ~3, value)
            else:
                data[position] = value & 0xFF
        _try_all(bytes(data))


def _refused(check: Callable[[], None]) -> bool:
    try:
        check()
    except CallerError:
        return True
    return False


def test_kernels_and_twins_accept_the_same_batches(kernels_or_twins: str, source: random.Random) -> None:
    """Changes inside the columns, which the header cannot give away."""
    honest = bytes(_rich())
    header = read_header(honest)
    start = header.size - header.columns_size
    verdicts = set()
    for _ in range(3000):
        data = bytearray(honest)
        position = source.randrange(start, len(data))
        data[position] = source.choice([0, 1, 2, 3, 4, 0x7F, 0x80, 0xC3, 0xFF, data[position] ^ 1])
        refused = _refused(lambda data=data: check_columns(data, header, 5))
        view = BatchView(data, header)
        assert refused == _refused(lambda view=view: check_columns_twin(view, 5))
        verdicts.add(refused)
    assert verdicts == {True, False}


def _change(batch: bytes, what: str, index: int, value: int) -> bytes:
    """Overwrite one number of an offsets column of a batch."""
    view = BatchView(batch)
    header = view.header
    start = header.size - header.columns_size + getattr(view.layout, what) + 4 * index
    return batch[:start] + struct.pack("<i", value) + batch[start + 4 :]


@pytest.mark.parametrize("what", ["payload_offsets", "key_offsets", "attribute_offsets"])
@pytest.mark.parametrize(
    ("index", "value"), [(0, 1), (0, -1), (1, -5), (1, 2**31 - 1), (2, 0), (3, 2**30), (3, 0)]
)
def test_offsets_that_do_not_ascend_to_the_total_are_refused(
    kernels_or_twins: str, what: str, index: int, value: int
) -> None:
    honest = bytes(_rich())
    data = _change(honest, what, index, value)
    if data == honest:
        pytest.fail("nothing was changed")
    with pytest.raises(ProtocolError):
        BatchView(data).check()
    with pytest.raises((ProtocolError, RecordTooLarge)):
        check_columns(data, read_header(data), MIB)


def test_a_null_key_with_bytes_is_refused(kernels_or_twins: str) -> None:
    data = bytearray(_rich())
    view = BatchView(data)
    data[view.header.size - view.header.columns_size + view.layout.key_validity] = 0b110
    with pytest.raises(ProtocolError, match="without a key"):
        BatchView(data).check()
    with pytest.raises(ProtocolError, match="without a key"):
        check_columns(data, read_header(data), MIB)


@pytest.mark.parametrize("damage", [b"\xff\xff\0\0\0\0", b"\1\0\xff\xff\xff\xff", b"\2\0\1\0\0\0"])
def test_attributes_that_overrun_are_refused(kernels_or_twins: str, damage: bytes) -> None:
    data = bytearray(_rich())
    start = data.index(b"\1\0\1\0\0\0ab")
    data[start : start + 6] = damage
    with pytest.raises(ProtocolError):
        BatchView(data).attributes(0)
    with pytest.raises(ProtocolError):
        check_columns(data, read_header(data), MIB)


def test_text_that_is_not_utf8_is_refused(kernels_or_twins: str) -> None:
    honest = bytes(_rich())
    for text in ("é".encode(), b"name", b"origin"):
        data = honest.replace(text, b"\xff" * len(text))
        with pytest.raises(ProtocolError, match="UTF-8"):
            BatchView(data).check()
        with pytest.raises(ProtocolError, match="UTF-8"):
            check_columns(data, read_header(data), MIB)


def test_the_first_record_above_the_topics_limit_is_named(kernels_or_twins: str) -> None:
    for count, index in ((1, 0), (2, 1), (100, 57)):
        payloads = [b"x" * 10] * count
        payloads[index] = b"x" * 11
        for options in ({}, {"keys": [b"k"] * count}):
            data = encode(payloads, publish_time_us=1, **options).to_bytes()
            check_columns(data, read_header(data), 11)
            check_columns(BatchView(data), read_header(data), 11)
            with pytest.raises(RecordTooLarge) as caught:
                check_columns(data, read_header(data), 10)
            assert (caught.value.facts["index"], caught.value.facts["size"]) == (index, 11)
            assert "--max-record-size" in caught.value.hint


def test_no_topic_setting_is_advised_for_a_large_key(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode([b""], publish_time_us=1, keys=[b"k" * 8]).to_bytes()
    check_columns_twin(BatchView(data), 1)
    monkeypatch.setattr(columns, "KEY_BYTES_MAX", 7)
    with pytest.raises(RecordTooLarge) as caught:
        check_columns_twin(BatchView(data), 1)
    assert "key" in caught.value.hint and "--max-record-size" not in caught.value.hint


def test_a_producer_cannot_send_a_selection() -> None:
    data = bytearray(_rich())
    struct.pack_into("<H", data, 36, read_header(data).flags | Flag.SELECTED)
    with pytest.raises(ProtocolError, match="selection"):
        check_columns(data, read_header(data), MIB)


@pytest.mark.parametrize(("position", "change"), [(84, 8), (88, 8), (92, -1), (96, 8), (38, 8), (40, 1)])
def test_header_sizes_that_contradict_each_other_are_refused(position: int, change: int) -> None:
    data = bytearray(_rich())
    layout = "<H" if position == 38 else "<I"
    (value,) = struct.unpack_from(layout, data, position)
    struct.pack_into(layout, data, position, value + change)
    with pytest.raises(ProtocolError):
        check_columns(data, read_header(data), MIB)


def _bomb(kind: Compression, columns: bytes, claimed: int, block: bytes | None = None) -> bytes:
    """A compressed batch of one record whose header claims ``claimed`` bytes of columns."""
    if block is None:
        name = "lz4.frame" if kind is Compression.LZ4 else "zstandard"
        block = pytest.importorskip(name).compress(columns)
    block += bytes(-len(block) % 8)
    plain = bytearray(encode([b""], publish_time_us=1).to_bytes()[:HEADER_BYTES])
    struct.pack_into("<I", plain, 4, HEADER_BYTES + len(block))
    struct.pack_into("<H", plain, 36, kind)
    struct.pack_into("<I", plain, 84, claimed - 8)
    struct.pack_into("<I", plain, 96, claimed)
    data = plain + block
    struct.pack_into("<I", data, 28, crc32c(bytes(data[36:])))
    return bytes(data)


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
@pytest.mark.parametrize("claimed", [16, 64 * 1024, 1 * MIB - 8])
def test_a_block_that_inflates_to_more_than_it_says_is_refused(kind: Compression, claimed: int) -> None:
    data = _bomb(kind, bytes(25 * MIB), claimed)
    with pytest.raises(CallerError):
        BatchView(data).payloads()  # once before measuring, which may import the library
    tracemalloc.start()
    try:
        with pytest.raises(CallerError):
            BatchView(data).payloads()
        assert tracemalloc.get_traced_memory()[1] < 2 * claimed + MIB // 2  # lz4 copies its output once
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_a_ratio_like_a_bombs_is_refused_from_the_header(kind: Compression) -> None:
    data = _bomb(kind, b"", 12 * MIB, block=b"\0" * 64)
    with pytest.raises(LimitExceeded, match="inflates"):
        BatchView(data).payloads()
    with pytest.raises(LimitExceeded, match="inflates"):
        check_columns(data, read_header(data), 12 * MIB)


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_a_block_that_is_short_cut_or_noise_is_refused(kind: Compression, source: random.Random) -> None:
    library = pytest.importorskip("lz4.frame" if kind is Compression.LZ4 else "zstandard")
    block = library.compress(source.randbytes(800))
    for bad in (block[: len(block) // 2], source.randbytes(80), b"", library.compress(bytes(792))):
        with pytest.raises(ProtocolError):
            BatchView(_bomb(kind, b"", 800, block=bad)).payloads()


def test_a_window_that_is_too_large_is_refused() -> None:
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    chunker = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    block = chunker.compress(bytes(100_000)) + chunker.flush()
    with pytest.raises(ProtocolError, match="memory"):
        BatchView(_bomb(Compression.ZSTD, b"", 100_000, block=block)).payloads()


def test_a_compressed_batch_whose_average_record_is_too_large_is_refused() -> None:
    data = _bomb(Compression.LZ4, b"", 808, block=bytes(80))
    with pytest.raises(RecordTooLarge):
        check_columns(data, read_header(data), 799)
    check_columns(data, read_header(data), 800)


def test_a_key_goes_to_its_hash_modulo_the_partitions() -> None:
    keys = [b"", b"a", b"key", bytes(100)]
    found = key_partitions(keys, 7)
    assert found.tolist() == [key_hash(key) % 7 for key in keys]
    assert found.dtype == np.int64
    assert key_partitions([], 3).tolist() == []
