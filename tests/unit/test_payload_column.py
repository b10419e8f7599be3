"""How much of an application's payloads goes into one batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.columns import encode
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
