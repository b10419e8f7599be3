"""Digests of rows: the same however the rows are cut and typed, another one wherever a row differs."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("pyarrow")
import pyarrow as pa

from danube.spark.sink.row_digest import RowDigest

TEXT = pa.string()
MAPPING = pa.map_(pa.string(), pa.string())
Row = tuple[str, str | None, dict[str, str] | None]


def batch(rows: list[Row], text: Any = TEXT) -> Any:
    payloads, keys, attributes = zip(*rows, strict=True)
    columns = {
        "payload": pa.array(payloads, text), "key": pa.array(keys, text),
        "attributes": pa.array([each and list(each.items()) for each in attributes], MAPPING),
    }  # fmt: skip
    return pa.RecordBatch.from_pydict(columns)


def digest(*batches: Any) -> str:
    made = RowDigest()
    for one in batches:
        made.add(one)
    return made.hex()


def test_cuts_and_types_make_no_difference() -> None:
    source = random.Random(7)
    rows: list[Row] = [
        (
            "x" * source.randrange(5),
            source.choice([None, "", "k"]),
            source.choice([None, {"a": "1"}, {"b": ""}]),
        )
        for _ in range(200)
    ]
    whole = batch(rows)
    expected = digest(whole)
    for _ in range(20):
        bounds = sorted([0, 200, *(source.randrange(201) for _ in range(5))])
        pieces = [whole.slice(a, b - a) for a, b in pairwise(bounds)]
        assert digest(*pieces) == expected
    assert digest(batch(rows, pa.large_string())) == expected
    assert digest(batch(rows, pa.binary())) == expected


ROWS: list[Row] = [("a", "k", {"n": "1"}), ("b", None, None), ("", "", {})]
OTHERS: list[list[Row]] = [
    [ROWS[1], ROWS[0], ROWS[2]],
    [("ab", "k", {"n": "1"}), ("", None, None), ROWS[2]],
    [("a", None, {"n": "1"}), ("b", "k", None), ROWS[2]],
    [ROWS[0], ("b", "", None), ROWS[2]],
    [("a", "k", {"n1": ""}), *ROWS[1:]],
    [("a", "k", None), ("b", None, {"n": "1"}), ROWS[2]],
    ROWS[:2],
]


@pytest.mark.parametrize("other", OTHERS)
def test_what_differs_has_another_digest(other: list[Row]) -> None:
    assert digest(batch(other)) != digest(batch(ROWS))


def test_a_column_that_is_absent_is_one_without_values() -> None:
    rows: list[Row] = [("a", None, None), ("b", None, None)]
    assert digest(batch(rows).select(["payload"])) == digest(batch(rows))
    empty: list[Row] = [("a", None, {}), ("b", None, None)]
    assert digest(batch(empty)) == digest(batch(rows)), "a record without attributes has no empty ones"
