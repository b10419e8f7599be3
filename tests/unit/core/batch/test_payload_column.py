"""How much of an application's payloads goes into one batch."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from danube.core import kernels
from danube.core.batch.checksum import crc32c
from danube.core.batch.columns import BatchView, encode
from danube.core.batch.compression import Compression
from danube.core.batch.payloads import (
    RECORD_OVERHEAD,
    ListedColumn,
    PayloadColumn,
    Place,
    leading_column,
    payload_column,
)
from danube.core.kernels import MALFORMED, objects
from danube.errors import InvalidArgument, LimitExceeded, RecordTooLarge
from danube.limits import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, RECORD_BYTES_MAX, SHARED_BODY_BYTES_MIN
from tests.kernel_fixtures import kernels_kept, load_kernels

ROWS = [b"abc", b"def", b"ghi", b"jkl"]


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=60), st.integers(1, 400), st.booleans(), st.data()
)
def test_a_list_is_cut_into_batches(
    payloads: list[bytes], bytes_max: int, loaded: bool, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(payloads) - 1))
    with kernels_kept():
        if loaded:
            load_kernels()
        else:
            kernels.unload()
        column = leading_column(payloads, start, bytes_max)
        encoded = encode(column, publish_time_us=1).to_bytes()
    taken = payloads[start : start + column.record_count]
    assert (column.total, len(taken)) == (sum(map(len, taken)), column.record_count)
    assert len(taken) == 1 or column.total <= bytes_max
    assert encoded == encode(list(taken), publish_time_us=1).to_bytes()
    assert BatchView(encoded).payloads() == taken
    if start + len(taken) < len(payloads):
        more = payloads[start : start + len(taken) + 1]
        overhead = RECORD_OVERHEAD if isinstance(column, ListedColumn) else 0
        assert sum(map(len, more)) + overhead * len(more) > bytes_max


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
def test_lists_of_any_length_are_laid_out_alike(
    kernels_or_twins: str, source: random.Random, count: int, size_max: int
) -> None:
    payloads = _many(source, count, size_max)
    column = payload_column(payloads)
    assert np.frombuffer(column.offsets, "<i4").tolist() == [0, *accumulate(map(len, payloads))]
    assert (column.record_count, column.total) == (count, sum(map(len, payloads)))
    listed = count > 24 or count * len(payloads[0]) >= SHARED_BODY_BYTES_MIN
    assert isinstance(column, ListedColumn) == (kernels_or_twins == "kernels" and listed)
    assert BatchView(encode(payloads, publish_time_us=1).to_bytes()).payloads() == payloads
    half = leading_column(payloads, count // 2, column.total // 4)
    some = payloads[count // 2 : count // 2 + half.record_count]
    assert BatchView(encode(half, publish_time_us=1).to_bytes()).payloads() == some


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


@pytest.mark.parametrize("extras", [{}, {"keys": [b"k"] * 200, "request_ids": range(1, 201)}])
@pytest.mark.parametrize("compression", [Compression.NONE, Compression.LZ4])
def test_a_column_of_a_list_lies_between_all_others(
    with_kernels: None, compression: Compression, extras: dict[str, Any]
) -> None:
    payloads = [b"payload %d" % number for number in range(200)]
    options: dict[str, Any] = {"publish_time_us": 1, "producer_name": "p", "compression": compression}
    listed = payload_column(payloads)
    assert isinstance(listed, ListedColumn)
    encoded = encode(listed, **options, **extras).to_bytes()
    kernels.unload()
    assert encoded == encode(payloads, **options, **extras).to_bytes()


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.LZ4])
@pytest.mark.parametrize(
    "change",
    [
        lambda payloads: payloads.pop(),
        lambda payloads: payloads.clear(),
        lambda payloads: payloads.__setitem__(150, b"longer than it was"),
        lambda payloads: payloads.__setitem__(0, b""),
        lambda payloads: payloads.__setitem__(199, "x" * 3),
    ],
)
def test_a_list_that_changes_while_it_is_encoded_is_refused(
    with_kernels: None, change: Callable[[list[Any]], object], compression: Compression
) -> None:
    payloads = [b"%03d" % number for number in range(200)]
    column = payload_column(payloads)
    change(payloads)
    near = np.empty(kernels.list_kernels().NEAR_BYTES, np.uint8)
    for allocate in (None, lambda size: Place(memoryview(bytearray(size)), near)):
        with pytest.raises(InvalidArgument, match="changed while it was encoded"):
            encode(column, publish_time_us=1, compression=compression, allocate=allocate)


@pytest.mark.parametrize("start", [3, 4])
def test_a_list_that_became_shorter_between_two_batches_is_refused(kernels_or_twins: str, start: int) -> None:
    with pytest.raises(InvalidArgument, match="changed while it was encoded"):
        leading_column([b"a", b"b", b"c"], start, 100)


def test_kernels_of_lists_stop_at_what_is_no_bytes_and_at_the_end_of_their_room(with_kernels: None) -> None:
    lists = kernels.list_kernels()
    payloads: list[Any] = [b"%03d" % number for number in range(200)]

    def measure(start: int, room: int, bytes_max: int = 10_000) -> tuple[int, list[int]]:
        offsets = np.full(room + 1, -7, np.int32)
        taken = int(lists.measure(id(payloads), id(bytes), start, 8, bytes_max, offsets))
        return taken, offsets[: max(taken, 0) + 1].tolist()

    assert measure(0, 200) == (200, list(range(0, 601, 3)))
    assert measure(198, 200) == (2, [0, 3, 6]) and measure(5, 3) == (3, [0, 3, 6, 9])
    assert [measure(0, 200, size)[0] for size in (0, 10, 21, 22, 32, 33)] == [1, 1, 1, 2, 2, 3]
    assert measure(200, 9)[0] == 0 and measure(201, 9)[0] < 1
    for wrong in ("009", bytearray(b"009"), None, _Named(b"009"), bytes(RECORD_BYTES_MAX + 1)):
        payloads[9] = wrong
        assert measure(0, 200)[0] == MALFORMED and measure(9, 1)[0] == MALFORMED
        assert measure(0, 200, 98)[0] == 8 and measure(10, 200)[0] == 190


@given(
    st.lists(st.one_of(st.integers(0, 300), st.integers(8_000, 13_000), st.integers(0, 40_000)), max_size=40),
    st.integers(0, 130),
    st.integers(0, 130),
    st.integers(0, 3),
)
def test_what_is_made_past_the_caches_is_the_same_with_its_checksum(
    sizes: list[int], before_size: int, shift: int, start: int
) -> None:
    source = random.Random(len(sizes))
    payloads = [source.randbytes(size) for size in [*[5] * start, *sizes]]
    before, after = source.randbytes(before_size), source.randbytes(source.randrange(8))
    expected = b"".join([before, *payloads[start:], after])
    assume(expected)
    bounds = np.array([0, *accumulate(sizes)], np.int32)
    with kernels_kept():
        load_kernels()
        room = bytearray(len(expected) + 256)
        place = memoryview(room)[shift : shift + len(expected)]
        near = np.empty(kernels.list_kernels().NEAR_BYTES + 1, np.uint8)
        near[-1] = 77
        column = ListedColumn(bounds, payloads, start)
        joined, checksum = column.between(before, after, lambda _: Place(place, near[:-1]))
        assert joined is place and bytes(joined) == expected and checksum == crc32c(expected)
        assert not any(room[:shift]) and not any(room[shift + len(expected) :]) and near[-1] == 77
        usual, unknown = column.between(before, after, lambda _: Place(place))
        assert usual is place and bytes(usual) == expected and unknown is None


class _Named(bytes):
    """``bytes`` of an application's own kind."""


def test_bytes_of_an_own_kind_are_sent_as_what_they_hold(kernels_or_twins: str) -> None:
    payloads = [_Named(b"%d" % number) for number in range(50)]
    assert BatchView(encode(payloads, publish_time_us=1).to_bytes()).payloads() == [
        bytes(p) for p in payloads
    ]


def test_a_layout_that_is_not_known_keeps_kernels_away_from_lists(
    with_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = [b"%d" % number for number in range(200)]
    assert objects.layout_is_known() and isinstance(payload_column(payloads), ListedColumn)
    monkeypatch.setattr("danube.core.batch.payloads._LISTS_CAN_BE_READ", False)
    assert isinstance(payload_column(payloads), PayloadColumn)


@pytest.mark.parametrize("name", ["TYPE", "SIZE", "ITEMS", "CONTENT"])
def test_a_layout_with_a_part_elsewhere_is_not_the_known_one(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(objects, name, getattr(objects, name) - 8)
    assert not objects.layout_is_known()


def test_another_interpreter_has_no_known_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not objects.layout_is_known()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="pypy"))
    assert not objects.layout_is_known()


@pytest.mark.parametrize("size", [0, 1, 100, 1024, 1025, 5000])
def test_the_leading_payloads_are_the_same_with_kernels_and_without(size: int, kernels_or_twins: str) -> None:
    payloads = [bytes([number % 251]) * size for number in range(300)]
    for bytes_max in (1, size, 2 * size + 16, 150 * size + 1200, 300 * size + 2400, 1 << 30):
        count = max(1, min(300, bytes_max // (size + 8)))
        column = leading_column(payloads, 0, bytes_max)
        assert (column.record_count, column.total) == (count, count * size)
        assert np.frombuffer(column.offsets, "<i4").tolist() == [number * size for number in range(count + 1)]
