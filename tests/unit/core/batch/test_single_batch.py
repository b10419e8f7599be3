"""The columns of one batch where they lie against the ordinary reader and against a table of one batch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from danube.core import kernels
from danube.core.batch import joined
from danube.core.batch.columns import BatchView, layout_of
from danube.core.batch.format import Flag, read_header
from danube.core.batch.joined import BatchTable, BatchViews
from danube.errors import DanubeError, ProtocolError
from tests.unit.core.batch.test_joined_columns import attributes_of, plain_batch, random_batch, rows_of


def single_batch(octets: joined.Octets, position: int) -> BatchViews:
    return BatchViews(octets, np.array([position]))


def test_a_single_batch_has_the_columns_of_a_table(source: random.Random) -> None:
    if not kernels.load().available:
        pytest.skip("no kernels here")
    for _ in range(200):
        before, batch = plain_batch(), random_batch(source, 1_000)
        octets = np.frombuffer(before + batch, np.uint8)
        position = len(before)
        single, table = single_batch(octets, position), BatchTable(octets, np.array([position]))
        rows, view = table.row_count, BatchView(batch)
        assert (single.row_count, single.counts.tolist()) == (rows, [rows])
        assert single.offsets().tolist() == table.offsets().tolist()
        assert single.publish_times().tolist() == table.publish_times().tolist()
        assert rows_of(single.payloads(), rows) == view.payloads()
        assert rows_of(single.keys(), rows) == list(view.keys())
        assert attributes_of(single) == view.attributes_list()
        assert single.producers() == table.producers()
        for name, dtype in (("append_time_us", "<i8"), ("schema_version", "<i4")):
            assert single.repeated(name, dtype).tolist() == table.repeated(name, dtype).tolist()
            assert single.repeated(name, dtype).dtype == table.repeated(name, dtype).dtype
        for flag in (Flag.SCHEMA_ID, Flag.SCHEMA_VERSION):
            ours, theirs = single.flagged(flag), table.flagged(flag)
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or ours.tolist() == theirs.tolist()


def test_large_columns_are_not_copied() -> None:
    batch = plain_batch()
    octets = np.frombuffer(batch, np.uint8)
    single = single_batch(octets, 0)
    keys = single.keys()
    assert keys is not None
    for column in (single.payloads().data, single.payloads().offsets, keys.data, keys.offsets):
        assert np.shares_memory(column, octets)


@pytest.mark.parametrize(
    ("column", "shift", "value", "read"),
    [
        ("payload_offsets", 4, 9, "payloads"),
        ("key_offsets", 4, 1 << 30, "keys"),
        ("attribute_offsets", 4, 7, "attributes"),
        ("attributes", 0, 0xFFFF, "attributes"),
    ],
)
def test_malformed_columns_are_told(column: str, shift: int, value: int, read: str) -> None:
    batch = plain_batch()
    header = read_header(batch)
    place = header.size - layout_of(header).end + getattr(layout_of(header), column) + shift
    broken = batch[:place] + value.to_bytes(4, "little") + batch[place + 4 :]
    single = single_batch(np.frombuffer(broken, np.uint8), 0)
    with pytest.raises(DanubeError):
        getattr(single, read)()


def test_a_header_that_contradicts_itself_is_told() -> None:
    batch = bytearray(plain_batch())
    header = read_header(batch)
    batch[84:88] = (header.payload_bytes + 8).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="do not add up"):
        single_batch(np.frombuffer(bytes(batch), np.uint8), 0).payloads()
