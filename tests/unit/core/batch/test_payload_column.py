"""How much of an application's payloads goes into one batch."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.batch.columns import BatchView, encode
from danube.core.batch.payloads import (
    leading_column,
    payload_column,
)
from danube.errors import InvalidArgument, LimitExceeded, RecordTooLarge
from danube.limits import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, RECORD_BYTES_MAX

ROWS = [b"abc", b"def", b"ghi", b"jkl"]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=60), st.integers(1, 400), st.data())
def test_a_list_is_cut_into_batches(payloads: list[bytes], bytes_max: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(payloads) - 1))
    column = leading_column(payloads, start, bytes_max)
    encoded = encode(column, publish_time_us=1).to_bytes()
    taken = payloads[start : start + column.record_count]
    assert (column.total, len(taken)) == (sum(map(len, taken)), column.record_count)
    assert len(taken) == 1 or column.total <= bytes_max
    assert encoded == encode(list(taken), publish_time_us=1).to_bytes()
    assert BatchView(encoded).payloads() == taken
    if start + len(taken) < len(payloads):
        more = payloads[start : start + len(taken) + 1]
        assert sum(map(len, more)) > bytes_max


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
    column = leading_column(payloads, 0, bytes_max)
    count = column.record_count
    assert count == 1 or column.total <= 2 * bytes_max
    assert count == 4 or bytes_max < 44
    rest = leading_column(payloads, 3, bytes_max)
    assert (rest.record_count, rest.total) == (1, 3)
    assert b"".join(column.pieces) == b"".join(ROWS[:count])


def test_what_is_cut_off_may_be_more_than_a_batch_takes() -> None:
    megabyte = bytes(1 << 20)
    payloads = [megabyte] * (BATCH_BYTES_MAX // len(megabyte) + 1)
    assert leading_column(payloads, 0, 3 << 20).record_count == 3
    with pytest.raises(LimitExceeded):
        payload_column(payloads)


def test_a_payload_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(RecordTooLarge) as large:
        leading_column([bytes(RECORD_BYTES_MAX + 1), b"a"], 0, 10)
    assert large.value.facts["index"] == 0
    wrong: list[Any] = [b"a", 7]
    with pytest.raises(InvalidArgument) as other:
        leading_column(wrong, 0, 10)
    assert other.value.facts["index"] == 1
    with pytest.raises(LimitExceeded):
        payload_column([b""] * (BATCH_RECORDS_MAX + 1))
    assert leading_column([b""] * (BATCH_RECORDS_MAX + 1), 0, 1 << 20).record_count == BATCH_RECORDS_MAX


def _many(source: random.Random, count: int, size_max: int) -> list[bytes]:
    return [source.randbytes(source.randrange(size_max)) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "size_max"),
    [(1, 9), (23, 50), (5, 1 << 16), (128, 50), (129, 1), (129, 50), (3_000, 300), (200, 9_000)],
)
def test_lists_of_any_length_are_laid_out_alike(source: random.Random, count: int, size_max: int) -> None:
    payloads = _many(source, count, size_max)
    column = payload_column(payloads)
    assert np.frombuffer(column.offsets, "<i4").tolist() == [0, *accumulate(map(len, payloads))]
    assert (column.record_count, column.total) == (count, sum(map(len, payloads)))
    assert BatchView(encode(payloads, publish_time_us=1).to_bytes()).payloads() == payloads
    half = leading_column(payloads, count // 2, column.total // 4)
    some = payloads[count // 2 : count // 2 + half.record_count]
    assert BatchView(encode(half, publish_time_us=1).to_bytes()).payloads() == some


@pytest.mark.parametrize("place", [0, 77, 199])
def test_what_is_not_bytes_in_a_long_list_is_named_or_copied(place: int) -> None:
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


def test_a_long_list_has_the_limits_of_a_short_one() -> None:
    with pytest.raises(RecordTooLarge) as large:
        payload_column([*[b"a"] * 150, bytes(RECORD_BYTES_MAX + 1)])
    assert large.value.facts["index"] == 150
    with pytest.raises(LimitExceeded):
        payload_column([bytes(1 << 20)] * 150)


@pytest.mark.parametrize("start", [3, 4])
def test_a_list_that_became_shorter_between_two_batches_is_refused(start: int) -> None:
    with pytest.raises(InvalidArgument, match="changed while it was encoded"):
        leading_column([b"a", b"b", b"c"], start, 100)


class _Named(bytes):
    """``bytes`` of an application's own kind."""


def test_bytes_of_an_own_kind_are_sent_as_what_they_hold() -> None:
    payloads = [_Named(b"%d" % number) for number in range(50)]
    assert BatchView(encode(payloads, publish_time_us=1).to_bytes()).payloads() == [
        bytes(p) for p in payloads
    ]
