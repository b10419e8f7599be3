"""Joined columns of many stored batches, for readers that return thousands of rows at once.

The result is in Arrow's layout (offsets and bytes, a validity bitmap).  :class:`BatchTable` holds the headers
of consecutive batches as arrays, and where all their columns lie.  The columns of a single batch stay there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core import kernels
from danube.core.batch.columns import decode_attributes
from danube.core.batch.format import COMPRESSION_MASK, HEADER_BYTES, Flag
from danube.errors import Damage

Ints = NDArray[np.int64]
Octets = NDArray[np.uint8]

HEADER: Final = np.dtype(
    [
        ("magic", "<u4"), ("size", "<u4"), ("base_offset", "<i8"), ("append_time_us", "<i8"),
        ("epoch", "<u4"), ("body_crc", "<u4"), ("header_crc", "<u4"), ("flags", "<u2"), ("name_size", "<u2"),
        ("record_count", "<u4"), ("schema_version", "<u4"), ("schema_id", "<u8"), ("producer_id", "<u8"),
        ("base_sequence", "<u8"), ("publish_time_us", "<i8"), ("producer_epoch", "<u4"),
        ("payload_bytes", "<u4"), ("key_bytes", "<u4"), ("attribute_bytes", "<u4"), ("columns_size", "<u4"),
        ("origin_size", "<u2"), ("reserved", "<u2"),
    ]
)  # fmt: skip
_WORDS: Final = HEADER_BYTES // 8
_NONE: Final = -1

if HEADER.itemsize != HEADER_BYTES:
    raise ImportError("the table of danube.core.batch.format is the format")


class VariableColumn(NamedTuple):
    """``offsets`` int32[n+1] into ``data``; ``validity``: a bitmap, None if all are there."""

    offsets: NDArray[np.int32]
    data: Octets
    validity: Octets | None = None
    null_count: int = 0


class AttributeColumns(NamedTuple):
    """Attributes of n records as two columns; record i has those from ``ends[i]`` to ``ends[i + 1]``."""

    ends: NDArray[np.int32]
    names: VariableColumn
    values: VariableColumn


class BatchTable:
    """Intact, uncompressed batches at ``positions`` of ``octets``, which are 8-aligned."""

    __slots__ = ("_first_rows", "_inside", "_layout", "counts", "headers", "octets", "positions", "row_count")

    def __init__(self, octets: Octets, positions: Ints, headers: NDArray[np.void] | None = None) -> None:
        self.octets = octets
        self.positions = positions
        self.headers = read_headers(octets, positions) if headers is None else headers
        self.counts: Ints = self.headers["record_count"].astype(np.int64)
        self.row_count = int(self.counts.sum())
        self._first_rows = np.cumsum(self.counts) - self.counts
        self._inside = np.arange(self.row_count) - np.repeat(self._first_rows, self.counts)  # its own batch
        self._layout = _Layout(positions, self.headers, self.counts)

    def _has(self, flag: int) -> NDArray[np.bool_]:
        has: NDArray[np.bool_] = (self.headers["flags"] & np.uint16(flag)) != 0
        return has

    def repeated(self, name: str, dtype: str = "<i8") -> NDArray[Any]:
        """A header's number for each record of its batch."""
        values: NDArray[Any] = np.repeat(self.headers[name].astype(dtype), self.counts)
        return values

    def flagged(self, flag: int) -> NDArray[np.bool_] | None:
        """bool[rows]: whether the record's batch has ``flag``; None if all have it."""
        has = self._has(flag)
        return None if has.all() else np.repeat(has, self.counts)

    def offsets(self) -> Ints:
        """int64[rows]: the offset of each record; Damage where a selection's do not ascend."""
        bases: Ints = self.repeated("base_offset")
        if not self._has(Flag.SELECTED).any():
            return bases + self._inside
        deltas = self._numbers(self._layout.selected, "<u4", self._inside)
        wrong = np.flatnonzero((np.diff(deltas) <= 0) & (self._inside[1:] > 0))
        if len(wrong):
            raise self._malformed(self._batch_of(int(wrong[0]) + 1), "selected offsets do not ascend")
        return bases + deltas

    def publish_times(self) -> Ints:
        """int64[rows]: microseconds since 1970 UTC."""
        shared: Ints = self.repeated("publish_time_us")
        if not self._has(Flag.TIMES).any():
            return shared
        return self._numbers(self._layout.times, "<i8", shared)

    def payloads(self) -> VariableColumn:
        """The payload column; Damage where a batch's offsets do not ascend to its total."""
        layout = self._layout
        return self._variable(layout.payload_offsets, layout.payloads, "payload_bytes", "payload")

    def keys(self) -> VariableColumn | None:
        """The key column; None if no record has a key."""
        layout = self._layout
        has_keys = self._has(Flag.KEYS)
        if not has_keys.any():
            return None
        column = self._variable(layout.key_offsets, layout.keys, "key_bytes", "key")
        if has_keys.all() and not self._has(Flag.NULL_KEYS).any():
            return column
        bitmaps = np.repeat(layout.key_validity, self.counts)
        octets = self.octets[np.where(bitmaps < 0, 0, bitmaps + (self._inside >> 3))]
        present = np.repeat(has_keys, self.counts)
        present &= (bitmaps < 0) | (octets >> (self._inside & 7).astype(np.uint8) & 1 != 0)
        absent = self.row_count - int(present.sum())
        return column._replace(validity=np.packbits(present, bitorder="little"), null_count=absent)

    def attributes(self) -> AttributeColumns | None:
        """Names and values of all attributes; None if no record has any.

        Raises Damage or ProtocolError for malformed ones.
        """
        if not self._has(Flag.ATTRIBUTES).any():
            return None
        layout = self._layout
        raw = self._variable(layout.attribute_offsets, layout.attributes, "attribute_bytes", "attribute")
        if not kernels.available:
            return _attributes_in(raw)
        totals = np.zeros(3, np.int64)
        bad = kernels.compiled.measure_attributes(raw.data, raw.offsets, totals)
        if bad != kernels.WELL_FORMED:
            raise self._malformed(self._batch_of(bad), "attributes of a record are malformed")
        count, name_bytes, value_bytes = totals.tolist()
        ends = np.empty(len(raw.offsets), np.int32)
        names = VariableColumn(np.empty(count + 1, np.int32), np.empty(name_bytes, np.uint8))
        values = VariableColumn(np.empty(count + 1, np.int32), np.empty(value_bytes, np.uint8))
        kernels.compiled.split_attributes(
            raw.data, raw.offsets, ends, names.offsets, names.data, values.offsets, values.data
        )
        return AttributeColumns(ends, names, values)

    def producers(self) -> list[bytes]:
        """The producer's name in each batch, as it stands there."""
        places = (self.positions + HEADER_BYTES).tolist()
        data = self.octets.data
        return [
            bytes(data[place : place + size])
            for place, size in zip(places, self.headers["name_size"].tolist(), strict=True)
        ]

    def _numbers(self, positions: Ints, dtype: str, otherwise: Ints | int) -> Ints:
        """int64[rows]: each record's number in a column that begins at ``positions`` (-1: it is absent)."""
        numbers: NDArray[Any] = _as(self.octets, dtype)
        there = np.repeat(positions >= 0, self.counts)
        places = np.repeat(positions // numbers.itemsize, self.counts) + self._inside
        found: Ints = np.where(there, numbers[np.where(there, places, 0)], otherwise)
        return found

    def _variable(self, offsets: Ints, positions: Ints, total_name: str, what: str) -> VariableColumn:
        there = offsets >= 0
        totals = np.where(there, self.headers[total_name].astype(np.int64), 0)
        begins = np.where(there, _as(self.octets, "<i4")[np.where(there, offsets // 4, 0)], 0)
        ends = self._numbers(np.where(there, offsets + 4, _NONE), "<i4", 0)
        wrong = (begins != 0) | (ends[self._first_rows + self.counts - 1] != totals)
        backwards = np.flatnonzero(ends < np.where(self._inside > 0, np.roll(ends, 1), 0))
        wrong[[self._batch_of(row) for row in backwards[:1].tolist()]] = True
        if wrong.any():
            what = f"offsets of the {what} column do not ascend from 0 to its size"
            raise self._malformed(int(wrong.argmax()), what)
        if len(there) == 1 and there[0]:  # where it lies
            first, place = int(offsets[0]) // 4, int(positions[0])
            own = _as(self.octets, "<i4")[first : first + self.row_count + 1]
            return VariableColumn(own, self.octets[place : place + int(totals[0])])
        joined = np.zeros(self.row_count + 1, np.int32)
        joined[1:] = ends + np.repeat(np.cumsum(totals) - totals, self.counts)
        data = self.octets.data
        places = zip(positions.tolist(), totals.tolist(), strict=True)
        pieces = [data[place : place + size] for place, size in places]
        return VariableColumn(joined, np.frombuffer(b"".join(pieces), np.uint8))

    def _batch_of(self, row: int) -> int:
        return int(np.searchsorted(self._first_rows, row, "right")) - 1

    def _malformed(self, index: int, what: str) -> Damage:
        return Damage(
            what,
            position=int(self.positions[index]),
            base_offset=int(self.headers["base_offset"][index]),
        )


def read_headers(octets: Octets, positions: Ints) -> NDArray[np.void]:
    """HEADER[n]: the headers at ``positions``, which hold intact batches."""
    table: NDArray[Any] = _as(octets, "<u8")[(positions // 8)[:, None] + np.arange(_WORDS)]
    headers: NDArray[np.void] = table.view(HEADER).reshape(-1)
    return headers


class _Layout:
    """Positions of all batches' columns in the data; -1 for an absent one.  See columns.place_columns."""

    __slots__ = (
        "attribute_offsets", "attributes", "key_offsets", "key_validity", "keys", "payload_offsets",
        "payloads", "selected", "times",
    )  # fmt: skip

    def __init__(self, positions: Ints, headers: NDArray[np.void], counts: Ints) -> None:
        flags = headers["flags"]
        names = headers["name_size"].astype(np.int64) + headers["origin_size"]
        at = positions + HEADER_BYTES + _padded(names)
        offsets_size = _padded(4 * (counts + 1))

        def take(flag: int, size: Ints) -> Ints:
            nonlocal at
            has = (flags & np.uint16(flag)) != 0
            place = np.where(has, at, _NONE)
            at = at + np.where(has, size, 0)
            return place

        def bytes_of(name: str) -> Ints:
            return _padded(headers[name].astype(np.int64))

        begin = at
        self.times = take(Flag.TIMES, 8 * counts)
        take(Flag.REQUEST_IDS, 8 * counts)
        self.selected = take(Flag.SELECTED, _padded(4 * counts))
        self.payload_offsets = at
        self.payloads = at + offsets_size
        at = self.payloads + bytes_of("payload_bytes")
        self.key_validity = take(Flag.NULL_KEYS, (counts + 63) // 64 * 8)
        self.key_offsets = take(Flag.KEYS, offsets_size)
        self.keys = take(Flag.KEYS, bytes_of("key_bytes"))
        self.attribute_offsets = take(Flag.ATTRIBUTES, offsets_size)
        self.attributes = take(Flag.ATTRIBUTES, bytes_of("attribute_bytes"))
        self._check(positions, headers, begin, at)

    @staticmethod
    def _check(positions: Ints, headers: NDArray[np.void], begin: Ints, end: Ints) -> None:
        flags = headers["flags"]
        wrong = (end - begin != headers["columns_size"]) | (end - positions != headers["size"])
        wrong |= (flags & np.uint16(COMPRESSION_MASK)) != 0
        for flag, name in ((Flag.KEYS, "key_bytes"), (Flag.ATTRIBUTES, "attribute_bytes")):
            wrong |= ((flags & np.uint16(flag)) == 0) & (headers[name] != 0)
        wrong |= ((flags & np.uint16(Flag.NULL_KEYS)) != 0) & ((flags & np.uint16(Flag.KEYS)) == 0)
        if wrong.any():
            index = int(wrong.argmax())
            raise Damage(
                "batch columns do not add up to their size",
                position=int(positions[index]),
                base_offset=int(headers["base_offset"][index]),
            )


def _padded(sizes: Ints) -> Ints:
    return (sizes + 7) & ~7


def _as(octets: Octets, dtype: str) -> NDArray[Any]:
    """All whole words of the bytes, as numbers of ``dtype``."""
    return octets[: len(octets) // 8 * 8].view(dtype)


def _attributes_in(raw: VariableColumn) -> AttributeColumns:
    """The kernels' twin."""
    ends: list[int] = [0]
    names: list[bytes] = []
    values: list[bytes] = []
    data = raw.data.data
    for start, end in pairwise(raw.offsets.tolist()):
        record = decode_attributes(data[start:end])
        names += [name.encode() for name in record]
        values += [value.encode() for value in record.values()]
        ends.append(len(names))
    return AttributeColumns(np.array(ends, np.int32), _column_of(names), _column_of(values))


def _column_of(pieces: list[bytes]) -> VariableColumn:
    offsets = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    return VariableColumn(offsets, np.frombuffer(b"".join(pieces), np.uint8))
