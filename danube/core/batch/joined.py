"""Joined columns of many stored batches, for readers that return thousands of rows at once.

The result is in Arrow's layout (offsets and bytes, a validity bitmap).  :class:`BatchTable` holds the headers
of consecutive batches as arrays and where all their columns lie, and joins them by kernels.
:class:`BatchViews` asks the reader of each batch: the way without kernels, and for one large batch, whose
columns stay where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core import kernels
from danube.core.batch.columns import BatchView, Data
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
_NOTHING: Final = memoryview(b"")

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
    """Intact, uncompressed batches at ``positions`` of ``octets`` (8-aligned, read-only).  Needs kernels."""

    __slots__ = ("_layout", "counts", "headers", "octets", "positions")

    def __init__(self, octets: Octets, positions: Ints, headers: NDArray[np.void] | None = None) -> None:
        self.octets = octets
        self.positions = np.ascontiguousarray(positions)
        self.headers = read_headers(octets, self.positions) if headers is None else headers
        self.counts: Ints = self.headers["record_count"].astype(np.int64)
        self._layout = _Layout(self.positions, self.headers, self.counts)

    @property
    def row_count(self) -> int:
        return int(self.counts.sum())

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
        bases = self.headers["base_offset"].astype(np.int64)
        joined = np.empty(self.row_count, np.int64)
        if not self._has(Flag.SELECTED).any():
            starts = np.cumsum(self.counts) - self.counts
            np.add(np.arange(len(joined)), np.repeat(bases - starts, self.counts), out=joined)
            return joined
        bad = kernels.compiled.join_offsets(self.octets, self._layout.selected, self.counts, bases, joined)
        if bad != kernels.WELL_FORMED:
            raise self._malformed(bad, "selected offsets do not ascend")
        return joined

    def publish_times(self) -> Ints:
        """int64[rows]: microseconds since 1970 UTC."""
        shared = self.headers["publish_time_us"].astype(np.int64)
        if not self._has(Flag.TIMES).any():
            return np.repeat(shared, self.counts)
        joined = np.empty(self.row_count, np.int64)
        kernels.compiled.join_words(self.octets, self._layout.times, self.counts, shared, joined)
        return joined

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
        validity = np.zeros((self.row_count + 7) // 8, np.uint8)
        present = has_keys.astype(np.int64)
        absent = kernels.compiled.join_bits(self.octets, layout.key_validity, present, self.counts, validity)
        return column._replace(validity=validity, null_count=int(absent))

    def attributes(self) -> AttributeColumns | None:
        """Names and values of all attributes; None if no record has any.  Damage for malformed ones."""
        if not self._has(Flag.ATTRIBUTES).any():
            return None
        layout = self._layout
        raw = self._variable(layout.attribute_offsets, layout.attributes, "attribute_bytes", "attribute")
        totals = np.zeros(3, np.int64)
        bad = kernels.compiled.measure_attributes(_read_only(raw.data), _read_only(raw.offsets), totals)
        if bad != kernels.WELL_FORMED:
            batch = int(np.searchsorted(np.cumsum(self.counts), bad, "right"))
            raise self._malformed(batch, "attributes of a record are malformed")
        count, name_bytes, value_bytes = totals.tolist()
        ends = np.empty(len(raw.offsets), np.int32)
        names = VariableColumn(np.empty(count + 1, np.int32), np.empty(name_bytes, np.uint8))
        values = VariableColumn(np.empty(count + 1, np.int32), np.empty(value_bytes, np.uint8))
        kernels.compiled.split_attributes(
            _read_only(raw.data), _read_only(raw.offsets), ends, names.offsets, names.data,
            values.offsets, values.data,
        )  # fmt: skip
        return AttributeColumns(ends, names, values)

    def producers(self) -> list[bytes]:
        """The producer's name in each batch, as it stands there."""
        places = (self.positions + HEADER_BYTES).tolist()
        data = self.octets.data
        return [
            bytes(data[place : place + size])
            for place, size in zip(places, self.headers["name_size"].tolist(), strict=True)
        ]

    def _variable(self, offsets: Ints, positions: Ints, total_name: str, what: str) -> VariableColumn:
        totals = self.headers[total_name].astype(np.int64)
        joined_offsets = np.empty(self.row_count + 1, np.int32)
        joined = np.empty(int(totals.sum()), np.uint8)
        join = kernels.compiled.join_variable
        bad = join(self.octets, offsets, positions, self.counts, totals, joined_offsets, joined)
        if bad != kernels.WELL_FORMED:
            raise self._malformed(bad, f"offsets of the {what} column do not ascend from 0 to its size")
        return VariableColumn(joined_offsets, joined)

    def _malformed(self, index: int, what: str) -> Damage:
        return Damage(
            what,
            position=int(self.positions[index]),
            base_offset=int(self.headers["base_offset"][index]),
        )


def read_headers(octets: Octets, positions: Ints) -> NDArray[np.void]:
    """HEADER[n]: the headers at ``positions``, which hold intact batches."""
    words = octets[: len(octets) // 8 * 8].view("<u8")
    table: NDArray[Any] = words[(positions // 8)[:, None] + np.arange(_WORDS)]
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


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def _variable_of(lengths: Sequence[int] | Ints, pieces: Sequence[Data]) -> VariableColumn:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return VariableColumn(offsets, np.frombuffer(b"".join(pieces), np.uint8))


class BatchViews:
    """Intact, uncompressed batches as BatchTable has them, each by its own reader.

    Every method raises ProtocolError if the columns that it reads are malformed.
    """

    __slots__ = ("_octets", "_positions", "_views", "counts", "row_count")

    def __init__(self, octets: Octets, positions: Ints) -> None:
        self._octets, self._positions = octets, positions
        self._views = [BatchView(octets.data, position=position) for position in positions.tolist()]
        self.counts: Ints = np.array([view.record_count for view in self._views], np.int64)
        self.row_count = int(self.counts.sum())

    def repeated(self, name: str, dtype: str = "<i8") -> NDArray[Any]:
        """A header's number for each record of its batch."""
        return np.repeat(np.array([getattr(view.header, name) for view in self._views], dtype), self.counts)

    def flagged(self, flag: int) -> NDArray[np.bool_] | None:
        """bool[rows]: whether the record's batch has ``flag``; None if all have it."""
        has = self._has(flag)
        return None if has.all() else np.repeat(has, self.counts)

    def _has(self, flag: int) -> NDArray[np.bool_]:
        return np.array([view.header.flags & flag != 0 for view in self._views], np.bool_)

    def offsets(self) -> Ints:
        """int64[rows]: the offset of each record."""
        return np.concatenate([view.offsets for view in self._views])

    def publish_times(self) -> Ints:
        """int64[rows]: microseconds since 1970 UTC."""
        return np.concatenate([view.publish_times for view in self._views])

    def payloads(self) -> VariableColumn:
        """The payload column."""
        return _together([(view.payload_offsets, view.payload_bytes) for view in self._views])

    def keys(self) -> VariableColumn | None:
        """The key column; None if no record has a key."""
        has = self._has(Flag.KEYS)
        if not has.any():
            return None
        column = _together([
            (view.key_offsets, view.key_bytes) if there else (np.zeros(len(view) + 1, np.int32), _NOTHING)
            for view, there in zip(self._views, has.tolist(), strict=True)
        ])  # fmt: skip
        if has.all() and not self._has(Flag.NULL_KEYS).any():
            return column
        present = np.repeat(has, self.counts)
        end = 0
        for view in self._views:
            start, end = end, end + len(view)
            validity = view.key_validity
            if validity is not None:
                present[start:end] = validity
        absent = self.row_count - int(present.sum())
        return column._replace(validity=np.packbits(present, bitorder="little"), null_count=absent)

    def attributes(self) -> AttributeColumns | None:
        """Names and values of all attributes; None if no record has any."""
        if not self._has(Flag.ATTRIBUTES).any():
            return None
        if kernels.available:
            return BatchTable(self._octets, self._positions).attributes()
        ends, names, values = [0], [], []
        for record in (one for view in self._views for one in view.attributes_list()):
            names += [name.encode() for name in record]
            values += [value.encode() for value in record.values()]
            ends.append(len(names))
        columns = [_variable_of([len(text) for text in texts], texts) for texts in (names, values)]
        return AttributeColumns(np.array(ends, np.int32), *columns)

    def producers(self) -> list[bytes]:
        """The producer's name in each batch, as it stands there."""
        return [bytes(view.data[HEADER_BYTES : HEADER_BYTES + view.header.name_size]) for view in self._views]


def _together(columns: list[tuple[NDArray[np.int32], memoryview]]) -> VariableColumn:
    """The columns of several batches as one; the column of one where it lies."""
    if len(columns) == 1:
        offsets, data = columns[0]
        return VariableColumn(offsets, np.frombuffer(data, np.uint8))
    lengths = np.concatenate([np.diff(offsets) for offsets, _ in columns])
    return _variable_of(lengths, [data for _, data in columns])


def table_of(octets: Octets, positions: Ints, headers: NDArray[np.void] | None = None) -> Table:
    """The batches at ``positions``, by the way that costs least."""
    if len(positions) == 1 or not kernels.available:
        return BatchViews(octets, positions)
    return BatchTable(octets, positions, headers)


Table = BatchTable | BatchViews
