"""Joined columns against the reader of single batches, by kernels and by twins; malformed ones are told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from danube.core import kernels
from danube.core.batch.columns import BatchView, encode, layout_of
from danube.core.batch.format import HEADER_BYTES, Flag, padded, read_header, stamp
from danube.core.batch.joined import BatchTable, VariableColumn
from danube.core.batch.selection import select
from danube.errors import Damage, ProtocolError


@pytest.fixture(params=["kernels", "twins"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "kernels" and not kernels.load().available:
        pytest.skip("no kernels here")
    if request.param == "twins":
        kernels.unload()
    yield request.param
    kernels.load()


def random_batch(source: random.Random, base: int) -> bytes:
    count = source.choice([1, 2, 9, 70])
    keys: Any = source.choice(
        [None, [b"k%d" % (row % 4) for row in range(count)],
         [source.choice([None, b"", b"key"]) for _ in range(count)]]
    )  # fmt: skip
    attributes: Any = source.choice(
        [None, [source.choice([{}, {"a": "ß", "b": ""}, {"": "x" * 300}]) for _ in range(count)]]
    )
    times: Any = source.choice([None, [1_000 + row for row in range(count)]])
    batch = bytearray(
        encode(
            [source.randbytes(source.randrange(30)) for _ in range(count)],
            producer_name=source.choice(["", "p", "päul"]), keys=keys, attributes=attributes,
            publish_time_us=-5, publish_times=times, schema_id=source.choice([None, 4]),
            schema_version=source.choice([None, 2]), request_ids=source.choice([None, list(range(count))]),
            origin=source.choice(["", "host:1"]),
        ).to_bytes()
    )  # fmt: skip
    stamp(batch, base, 2, 77 + base)
    header = read_header(batch)
    if count > 2 and source.random() < 0.4:
        chosen = np.array(sorted(source.sample(range(count), source.randrange(1, count))), np.int64)
        return select(bytes(batch), header, chosen)
    return bytes(batch)


def table_of(batches: list[bytes]) -> BatchTable:
    octets = np.frombuffer(b"".join(batches), np.uint8)
    sizes = np.array([len(batch) for batch in batches], np.int64)
    return BatchTable(octets, np.cumsum(sizes) - sizes)


def rows_of(column: VariableColumn | None, count: int) -> list[bytes | None]:
    if column is None:
        return [None] * count
    data = column.data.tobytes()
    cut: list[bytes | None] = [
        data[start:end] for start, end in zip(column.offsets, column.offsets[1:], strict=False)
    ]
    if column.validity is not None:
        valid = np.unpackbits(column.validity, count=count, bitorder="little")
        assert int((valid == 0).sum()) == column.null_count
        cut = [one if there else None for one, there in zip(cut, valid, strict=True)]
    return cut


def attributes_of(table: BatchTable) -> list[dict[str, str]]:
    found = table.attributes()
    if found is None:
        return [{}] * table.row_count
    names = rows_of(found.names, len(found.names.offsets) - 1)
    values = rows_of(found.values, len(found.values.offsets) - 1)
    pairs = [(str(name, "utf-8"), str(value, "utf-8")) for name, value in zip(names, values, strict=True)]
    return [dict(pairs[start:end]) for start, end in zip(found.ends, found.ends[1:], strict=False)]


@pytest.mark.parametrize("count", [1, 2, 12])
def test_joined_columns_are_those_of_the_batches(source: random.Random, count: int) -> None:
    for _ in range(25):
        bases = np.cumsum([source.randrange(80, 200) for _ in range(count)]).tolist()
        batches = [random_batch(source, base) for base in bases]
        views, table = [BatchView(batch) for batch in batches], table_of(batches)
        rows = table.row_count
        assert rows == sum(map(len, views))
        assert table.offsets().tolist() == [offset for view in views for offset in view.offsets.tolist()]
        times = [moment for view in views for moment in view.publish_times.tolist()]
        assert table.publish_times().tolist() == times
        assert rows_of(table.payloads(), rows) == [one for view in views for one in view.payloads()]
        assert rows_of(table.keys(), rows) == [one for view in views for one in list(view.keys())]
        assert attributes_of(table) == [one for view in views for one in view.attributes_list()]
        assert [str(name, "utf-8") for name in table.producers()] == [view.producer_name for view in views]
        appended = [view.header.append_time_us for view in views for _ in range(len(view))]
        assert table.repeated("append_time_us").tolist() == appended


def broken(batch: bytes, position: int, value: bytes) -> bytes:
    return batch[:position] + value + batch[position + len(value) :]


def plain_batch(base: int = 0) -> bytes:
    batch = bytearray(
        encode([b"abc", b"de"], keys=[b"k", None], attributes=[{"a": "b"}, {}], publish_time_us=1).to_bytes()
    )
    stamp(batch, base, 1, 1)
    return bytes(batch)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("column", "shift", "value", "read"),
    [
        ("payload_offsets", 0, 1, "payloads"),
        ("payload_offsets", 4, 9, "payloads"),
        ("payload_offsets", 8, 4, "payloads"),
        ("payload_offsets", 4, -1, "payloads"),
        ("key_offsets", 4, 1 << 30, "keys"),
        ("attribute_offsets", 4, 7, "attributes"),
        ("attributes", 0, 0xFFFF, "attributes"),
        ("attributes", 2, 1 << 30, "attributes"),
        ("attributes", 6, 0xFF, "attributes"),
    ],
)
def test_a_column_that_cannot_be_is_damage(
    column: str, shift: int, value: int, read: str, alone: bool
) -> None:
    batch = plain_batch(10)
    header = read_header(batch)
    start = HEADER_BYTES + padded(header.name_size + header.origin_size)
    position = start + getattr(layout_of(header), column) + shift
    size = 4 if column.endswith("offsets") or shift == 2 else 2 if shift == 0 else 1
    bad = broken(batch, position, value.to_bytes(size, "little", signed=value < 0))
    batches = [bad] if alone else [plain_batch(), bad, plain_batch(20)]
    table = table_of(batches)
    with pytest.raises((Damage, ProtocolError)):
        getattr(table, read)()


def test_the_columns_of_a_single_batch_are_not_copied() -> None:
    before, batch = plain_batch(), plain_batch(10)
    octets = np.frombuffer(before + batch, np.uint8)
    single, view = BatchTable(octets, np.array([len(before)])), BatchView(batch)
    keys = single.keys()
    assert keys is not None
    assert (rows_of(single.payloads(), 2), rows_of(keys, 2)) == (view.payloads(), view.keys())
    for column in (single.payloads().data, single.payloads().offsets, keys.data, keys.offsets):
        assert np.shares_memory(column, octets)


@pytest.mark.parametrize(("flag", "valid"), [(Flag.SCHEMA_ID, [True] * 2 + [False] * 2), (Flag.KEYS, None)])
def test_flags_are_told_for_each_record(flag: Flag, valid: list[bool] | None) -> None:
    batch = bytearray(encode([b"a", b"b"], keys=[b"k", b"l"], publish_time_us=1, schema_id=4).to_bytes())
    stamp(batch, 0, 1, 1)
    found = table_of([bytes(batch), plain_batch(2)]).flagged(flag)
    assert (None if found is None else found.tolist()) == valid


def test_headers_that_contradict_their_size_are_damage() -> None:
    batch = plain_batch()
    for position, value in ((84, 9), (88, 99), (96, 8), (4, len(batch) + 8)):
        bad = broken(batch, position, value.to_bytes(4, "little"))
        with pytest.raises(Damage, match="do not add up"):
            table_of([plain_batch(), bad, plain_batch()])
        with pytest.raises(Damage, match="do not add up"):
            table_of([bad])


def test_selected_offsets_must_ascend() -> None:
    batch = bytearray(encode([b"a", b"b", b"c"], publish_time_us=1).to_bytes())
    stamp(batch, 5, 1, 1)
    chosen = select(bytes(batch), read_header(batch), np.array([0, 2], np.int64))
    header = read_header(chosen)
    bad = broken(chosen, HEADER_BYTES + layout_of(header).selected + 4, (0).to_bytes(4, "little"))
    with pytest.raises((Damage, ProtocolError), match="do not ascend"):
        table_of([plain_batch(), bad]).offsets()
