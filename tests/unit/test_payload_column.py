"""How much of an application's payloads goes into one batch."""

from __future__ import annotations

import importlib
import random
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.columns import BatchView, encode
from danube.core.kernels import MALFORMED, WELL_FORMED, jit
from danube.core.payload_column import leading_column, payload_column
from danube.errors import InvalidArgument, LimitExceeded, RecordTooLarge
from danube.limits import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, RECORD_BYTES_MAX

ROWS = [b"abc", b"def", b"ghi", b"jkl"]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=30), st.integers(1, 200))
def test_the_first_payloads_that_fit_are_taken(payloads: list[bytes], bytes_max: int) -> None:
    column = leading_column(payloads, bytes_max)
    count = column.record_count
    assert column.total == sum(map(len, payloads[:count]))
    assert count == 1 or column.total <= bytes_max
    assert count == len(payloads) or sum(map(len, payloads[: count + 1])) > bytes_max
    whole = encode(payloads[:count], publish_time_us=1).to_bytes()
    assert encode(column, publish_time_us=1).to_bytes() == whole


@pytest.mark.parametrize(
    "payloads",
    [
        np.array(ROWS, "V3"),
        np.frombuffer(b"".join(ROWS), np.uint8).reshape(4, 3),
        pa.array(ROWS, pa.binary(3)),
        pa.array(ROWS, pa.binary()),
    ],
)
@pytest.mark.parametrize("bytes_max", [1, 3, 8, 1000])
def test_arrays_are_cut_like_lists(payloads: Any, bytes_max: int) -> None:
    column = leading_column(payloads, bytes_max)
    count = column.record_count
    assert count == 1 or column.total <= bytes_max
    assert count == 4 or bytes_max < 12
    assert b"".join(column.pieces) == b"".join(ROWS[:count])


def test_what_is_cut_off_may_be_more_than_a_batch_takes() -> None:
    megabyte = bytes(1 << 20)
    payloads = [megabyte] * (BATCH_BYTES_MAX // len(megabyte) + 1)
    assert leading_column(payloads, 3 << 20).record_count == 3
    with pytest.raises(LimitExceeded):
        payload_column(payloads)


def test_a_payload_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(RecordTooLarge) as large:
        leading_column([bytes(RECORD_BYTES_MAX + 1), b"a"], 10)
    assert large.value.facts["index"] == 0
    wrong: list[Any] = [b"a", 7]
    with pytest.raises(InvalidArgument) as other:
        leading_column(wrong, 10)
    assert other.value.facts["index"] == 1
    with pytest.raises(LimitExceeded):
        leading_column([b""] * (BATCH_RECORDS_MAX + 1), 10)


def _many(source: random.Random, count: int, size_max: int) -> list[bytes]:
    return [source.randbytes(source.randrange(size_max)) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "size_max"), [(1, 9), (128, 50), (129, 1), (129, 50), (3_000, 300), (200, 9_000)]
)
def test_lists_of_any_length_are_laid_out_alike(
    kernels_or_twins: str, source: random.Random, count: int, size_max: int
) -> None:
    payloads = _many(source, count, size_max)
    column = payload_column(payloads)
    assert np.frombuffer(column.offsets, "<i4").tolist() == [0, *accumulate(map(len, payloads))]
    assert (column.record_count, column.total) == (count, sum(map(len, payloads)))
    assert b"".join(column.pieces) == b"".join(payloads)
    assert BatchView(encode(payloads, publish_time_us=1).to_bytes()).payloads() == payloads
    half = leading_column(payloads, column.total // 2)
    assert b"".join(half.pieces) == b"".join(payloads[: half.record_count])


@pytest.mark.parametrize("place", [0, 77, 199])
def test_what_is_not_bytes_in_a_long_list_is_named_or_copied(kernels_or_twins: str, place: int) -> None:
    payloads: list[Any] = [b"payload %d" % number for number in range(200)]
    expected = encode(payloads, publish_time_us=1).to_bytes()
    for same in (bytearray(payloads[place]), memoryview(payloads[place])):
        other = [*payloads[:place], same, *payloads[place + 1 :]]
        assert encode(other, publish_time_us=1).to_bytes() == expected
    for wrong in ("text", 7, None, ["x"], np.array([1, 2])):
        payloads[place] = wrong
        with pytest.raises(InvalidArgument) as refused:
            encode(payloads, publish_time_us=1)
        assert refused.value.facts["index"] == place


def test_a_long_list_has_the_limits_of_a_short_one(kernels_or_twins: str) -> None:
    with pytest.raises(RecordTooLarge) as large:
        payload_column([*[b"a"] * 150, bytes(RECORD_BYTES_MAX + 1)])
    assert large.value.facts["index"] == 150
    with pytest.raises(LimitExceeded):
        payload_column([bytes(1 << 20)] * 150)


@pytest.mark.skipif(bool(jit.reason), reason=jit.reason)
def test_kernels_of_lists_stop_at_what_is_no_bytes_and_at_the_end_of_their_room() -> None:
    lists = importlib.import_module("danube.core.kernels.lists")
    payloads: list[Any] = [b"%03d" % number for number in range(200)]
    bounds, joined = np.empty(201, np.int64), np.zeros(600, np.uint8)

    def join(room: int = 600) -> int:
        return int(lists.join(id(payloads), bounds, joined[:room]))

    assert lists.measure(id(payloads), bounds) == WELL_FORMED and join() == 200
    assert joined.tobytes() == b"".join(payloads) and bounds.tolist() == list(range(0, 601, 3))
    assert (join(599), join(3), join(2), join(0)) == (199, 1, 0, 0)
    payloads[9] = "009"
    assert lists.measure(id(payloads), bounds) == 9 and join() == MALFORMED and join(27) == MALFORMED
    payloads[9] = b"009"
    del payloads[150:]
    assert lists.measure(id(payloads), bounds) == 150 and join() == MALFORMED


@pytest.mark.parametrize("size", [0, 1, 100, 1024, 1025, 5000])
def test_the_leading_payloads_are_the_same_with_kernels_and_without(size: int, kernels_or_twins: str) -> None:
    payloads = [bytes([number % 251]) * size for number in range(300)]
    for bytes_max in (1, size, 2 * size, 150 * size + 1, 299 * size, 300 * size, 1 << 30):
        count = max(1, min(300, bytes_max // size if size else 300))
        column = leading_column(payloads, bytes_max)
        assert (column.record_count, column.total) == (count, count * size)
        assert b"".join(column.pieces) == b"".join(payloads[:count])
        assert np.frombuffer(column.offsets, "<i4").tolist() == [number * size for number in range(count + 1)]
