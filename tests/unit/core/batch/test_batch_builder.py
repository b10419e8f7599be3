"""Encoding: every accepted form gives the same bytes, and every limit names the record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.batch.builder import encode_plain
from danube.core.batch.columns import BatchView, EncodedBatch, check_columns, encode
from danube.core.batch.format import Compression, Flag, body_intact, stamp
from danube.errors import DanubeError, InvalidArgument, LimitExceeded, RecordTooLarge
from danube.limits import (
    ATTRIBUTE_BYTES_MAX,
    ATTRIBUTES_PER_RECORD_MAX,
    BATCH_RECORDS_MAX,
    KEY_BYTES_MAX,
    MIB,
    RECORD_BYTES_MAX,
)
from tests.stored_batches import check_stored


def _bytes(payloads: Any, **options: Any) -> bytes:
    return encode(payloads, publish_time_us=1, **options).to_bytes()


SAME_WIDTH = [b"abc", b"d\0f", b"ghi"]
MIXED = [b"abc", b"", b"longer"]


@pytest.mark.parametrize(
    "payloads",
    [
        tuple(SAME_WIDTH),
        (payload for payload in SAME_WIDTH),
        [bytearray(b"abc"), memoryview(b"d\0f"), b"ghi"],
        np.array(SAME_WIDTH, "S3"),
        np.array(SAME_WIDTH, "V3"),
        np.array(SAME_WIDTH, object),
        np.repeat(np.array(SAME_WIDTH, "V3"), 2)[::2],
        np.frombuffer(b"".join(SAME_WIDTH), np.uint8).reshape(3, 3),
        np.asfortranarray(np.frombuffer(b"".join(SAME_WIDTH), np.uint8).reshape(3, 3)),
        pa.array(SAME_WIDTH, pa.binary()),
        pa.array(SAME_WIDTH, pa.large_binary()),
        pa.array(SAME_WIDTH, pa.binary(3)),
        pa.array([b"zz", *SAME_WIDTH, b"yyyy"], pa.binary()).slice(1, 3),
        pa.array([b"zzz", *SAME_WIDTH], pa.binary(3)).slice(1, 3),
        pa.array([text.decode() for text in SAME_WIDTH], pa.string()),
        pa.array([text.decode() for text in SAME_WIDTH], pa.large_string()),
        pa.chunked_array([pa.array(SAME_WIDTH[:1], pa.binary()), pa.array(SAME_WIDTH[1:], pa.binary())]),
    ],
)
def test_every_form_of_payloads_gives_the_same_bytes(payloads: Any) -> None:
    assert _bytes(payloads) == _bytes(SAME_WIDTH)


@pytest.mark.parametrize(
    "payloads",
    [tuple(MIXED), np.array(MIXED, object), pa.array(MIXED, pa.large_binary()), pa.array(MIXED, pa.binary())],
)
def test_records_of_many_sizes_too(payloads: Any) -> None:
    assert _bytes(payloads) == _bytes(MIXED)


@pytest.mark.parametrize(
    "payloads",
    [np.zeros((2, 0), np.uint8), pa.array([b"", b""], pa.binary()), np.array([b"", b""])],
)
def test_empty_records_are_records(payloads: Any) -> None:
    assert BatchView(_bytes(payloads)).payloads() == [b"", b""]


@pytest.mark.parametrize(
    "payloads",
    [
        b"one payload",
        "text",
        ["text"],
        [b"fine", None],
        [b"fine", 3],
        [memoryview(np.zeros(3, np.int32))],
        np.zeros(3),
        np.zeros((2, 2, 2), np.uint8),
        np.array([b"a", None], object),
        pa.array([b"a", None], pa.binary()),
        pa.array([1, 2]),
    ],
)
def test_other_payloads_are_refused(payloads: Any) -> None:
    with pytest.raises(InvalidArgument):
        _bytes(payloads)


@pytest.mark.parametrize("index", [0, 1, 4])
def test_a_payload_that_is_not_bytes_is_named(index: int) -> None:
    payloads: list[Any] = [b"fine"] * 5
    payloads[index] = "text"
    with pytest.raises(InvalidArgument, match=f"record {index} ") as caught:
        _bytes(payloads)
    assert caught.value.facts["index"] == index


@pytest.mark.parametrize(("count", "index"), [(1, 0), (3, 2)])
def test_a_record_above_the_limit_is_named(count: int, index: int) -> None:
    payloads = [b"x"] * count
    payloads[index] = bytes(RECORD_BYTES_MAX + 1)
    with pytest.raises(RecordTooLarge) as caught:
        _bytes(payloads)
    assert caught.value.facts["index"] == index


def test_a_record_at_the_limit_is_taken() -> None:
    assert BatchView(_bytes([bytes(RECORD_BYTES_MAX)])).header.payload_bytes == RECORD_BYTES_MAX


@pytest.mark.parametrize("payloads", [[], np.zeros((0, 3), np.uint8), pa.array([], pa.binary())])
def test_a_batch_has_a_record(payloads: Any) -> None:
    with pytest.raises(LimitExceeded):
        _bytes(payloads)


def test_a_batch_has_limits() -> None:
    with pytest.raises(LimitExceeded, match="records"):
        _bytes([b""] * (BATCH_RECORDS_MAX + 1))
    with pytest.raises(LimitExceeded, match="bytes"):
        _bytes([bytes(MIB)] * 12)  # one size
    with pytest.raises(LimitExceeded, match="bytes"):
        _bytes([bytes(MIB - i % 2) for i in range(13)])
    with pytest.raises(LimitExceeded, match="bytes"):
        _bytes([bytes(KEY_BYTES_MAX)] * 100, keys=[bytes(KEY_BYTES_MAX)] * 100)  # each column would fit
    assert BatchView(_bytes([b""] * BATCH_RECORDS_MAX)).record_count == BATCH_RECORDS_MAX


def test_limits_of_keys_and_attributes_name_the_record() -> None:
    with pytest.raises(RecordTooLarge) as caught:
        _bytes([b"a", b"b"], keys=[b"", bytes(KEY_BYTES_MAX + 1)])
    assert caught.value.facts["index"] == 1
    with pytest.raises(LimitExceeded) as refused:
        _bytes([b"a", b"b"], attributes=[None, {str(i): "" for i in range(ATTRIBUTES_PER_RECORD_MAX + 1)}])
    assert refused.value.facts["index"] == 1
    with pytest.raises(RecordTooLarge) as caught:
        _bytes([b"a", b"b"], attributes=[None, {"k": "v" * ATTRIBUTE_BYTES_MAX}])
    assert caught.value.facts["index"] == 1
    with pytest.raises(RecordTooLarge) as caught:
        _bytes([b"a", b"b"], attributes=[None, {"k" * (ATTRIBUTE_BYTES_MAX + 1): ""}])
    assert caught.value.facts["index"] == 1


@pytest.mark.parametrize(
    "options",
    [
        {"keys": [b"k"]},
        {"keys": "ab"},
        {"keys": [b"k", 3]},
        {"keys": ["\ud800", None]},
        {"attributes": [{}]},
        {"attributes": {"a": "b"}},
        {"attributes": [None, {"a": 1}]},
        {"attributes": [None, {1: "a"}]},
        {"attributes": [None, {"a": "\ud800"}]},
        {"publish_times": [1]},
        {"publish_times": [1.5, 2.5]},
        {"publish_times": [1, 2**63]},
        {"publish_times": np.zeros((2, 2), np.int64)},
        {"request_ids": [1, -1]},
        {"request_ids": np.array([1, -1])},
        {"producer_id": -1},
        {"producer_epoch": 2**32},
        {"base_sequence": "x"},
        {"schema_id": 2**64},
        {"producer_name": "\ud800"},
    ],
)
def test_what_does_not_fit_a_field_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        _bytes([b"a", b"b"], **options)


def test_keys_may_be_text_bytes_or_missing() -> None:
    view = BatchView(_bytes([b"1", b"2", b"3"], keys=["é", None, b"\xff"]))
    assert view.keys() == ["é".encode(), None, b"\xff"]
    assert BatchView(_bytes([b"1", b"2"], keys=["a", b"b"])).keys() == [b"a", b"b"]


def test_columns_without_content_take_no_space() -> None:
    plain = _bytes([b"1", b"2"])
    assert _bytes([b"1", b"2"], keys=[None, None], attributes=[None, {}]) == plain


def test_overhead_is_at_most_16_bytes_a_record() -> None:
    payloads = [b"x" * 100] * 1000
    batch = encode(payloads, publish_time_us=1, publish_times=[1] * 1000, producer_name="producer")
    assert batch.size - 100 * 1000 <= 16 * 1000


def test_head_and_body_are_the_batch_and_the_body_checksum_holds() -> None:
    batch = encode([b"a", b"bc"], publish_time_us=1, producer_name="p", base_sequence=9)
    assert len(batch.head) == 36
    assert batch.size == len(batch.to_bytes()) == batch.header.size
    assert body_intact(batch.to_bytes(), batch.header)
    assert (batch.record_count, batch.header.base_sequence) == (2, 9)


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_compression_round_trips_and_is_dropped_where_it_saves_nothing(kind: Compression) -> None:
    pytest.importorskip("lz4.frame" if kind is Compression.LZ4 else "zstandard")
    payloads = [b"%d the same again and again" % index for index in range(500)]
    stored = bytearray(_bytes(payloads, keys=[b"k"] * 500, compression=kind))
    stamp(stored, 10, 1, 2)
    view = BatchView(stored, check_stored(stored))
    view.check()
    check_columns(stored, view.header, MIB)
    assert view.header.flags == kind | Flag.KEYS
    assert view.header.size < view.header.columns_size
    assert view.payloads() == payloads
    assert _bytes([b"a"], compression=kind) == _bytes([b"a"])


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_what_compresses_like_a_bomb_is_sent_as_it_is(kind: Compression) -> None:
    pytest.importorskip("lz4.frame" if kind is Compression.LZ4 else "zstandard")
    batch = _bytes([bytes(6 * MIB)], compression=kind)
    view = BatchView(batch)
    check_columns(batch, view.header, RECORD_BYTES_MAX)
    assert view.payloads() == [bytes(6 * MIB)]


@given(
    payload=st.binary(max_size=40),
    producer_name=st.text(max_size=9),
    origin=st.text(max_size=9),
    publish_time_us=st.integers(-(2**64), 2**64),
    request_id=st.integers(0, 2**65),
    schema_id=st.none() | st.integers(0, 2**65),
    schema_version=st.none() | st.integers(0, 2**33),
)
def test_one_plain_record_is_encoded_as_any(payload: bytes, request_id: int, **fields: Any) -> None:
    def outcome(call: Callable[[], EncodedBatch]) -> tuple[Any, ...]:
        try:
            batch = call()
        except DanubeError as error:
            return (type(error),)
        return batch.to_bytes(), batch.record_count, batch.header

    request_ids = [request_id] if request_id else None
    # A bytearray is never encoded as a plain record.
    expected = outcome(lambda: encode([bytearray(payload)], request_ids=request_ids, **fields))
    assert outcome(lambda: encode([payload], request_ids=request_ids, **fields)) == expected
    assert outcome(lambda: encode_plain(payload, request_id=request_id, **fields)) == expected


def test_one_plain_record_has_the_limit_of_any() -> None:
    largest = encode_plain(bytes(RECORD_BYTES_MAX), producer_name="p" * 65_535, origin="", publish_time_us=0)
    check_columns(largest.to_bytes(), largest.header, RECORD_BYTES_MAX)
    with pytest.raises(RecordTooLarge) as refused:
        encode_plain(bytes(RECORD_BYTES_MAX + 1), producer_name="", origin="", publish_time_us=0)
    assert refused.value.facts["index"] == 0
