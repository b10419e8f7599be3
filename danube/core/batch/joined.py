"""Columns of many stored batches, joined: what a reader that hands out thousands of rows at once needs.

:class:`BatchTable` holds the headers of consecutive batches as arrays and where all their columns lie.
Joining reads the batches where they are; the result is in Arrow's layout (offsets and bytes, a validity
bitmap).  By kernels where they are loaded (danube.core.kernels), else by numpy.

The columns of one stored batch in Arrow's layout, where they lie.

:class:`SingleBatch` answers as danube.core.batch.joined.BatchTable does for one batch.  A table's
arithmetic on arrays pays off for many small batches; for one large batch it would cost more than its bytes.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core import kernels
from danube.core.batch.columns import BatchView
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


def _kernels() -> Any:
    return kernels.compiled if kernels.available else None


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
    """Intact, uncompressed batches at ``positions`` of ``octets`` (8-aligned, read-only)."""

    __slots__ = ("_layout", "counts", "headers", "octets", "positions")

    def __init__(self, octets: Octets, positions: Ints, headers: NDArray[np.void] | None = None) -> None:
        self.octets = octets
        self.positions = np.ascontiguousarray(positions)
        self.headers = read_headers(octets, self.positions) if headers is None else headers
        self.counts: Ints = self.headers["record_count"].astype(np.int64)
        self._layout = _Layout(self.positions, self.headers, self.counts)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def row_count(self) -> int:
        return int(self.counts.sum())

    def _has(self, flag: Flag) -> NDArray[np.bool_]:
        has: NDArray[np.bool_] = (self.headers["flags"] & np.uint16(flag)) != 0
        return has

    def repeated(self, name: str, dtype: str = "<i8") -> NDArray[Any]:
        """A header's number for each record of its batch."""
        values: NDArray[Any] = np.repeat(self.headers[name].astype(dtype), self.counts)
        return values

    def flagged(self, flag: Flag) -> NDArray[np.bool_] | None:
        """bool[rows]: whether the record's batch has ``flag``; None if all have it."""
        has = self._has(flag)
        return None if has.all() else np.repeat(has, self.counts)

    def offsets(self) -> Ints:
        """int64[rows]: the offset of each record; Damage where a selection's do not ascend."""
        bases = self.headers["base_offset"].astype(np.int64)
        selected, kernel = self._layout.selected, _kernels()
        joined = np.empty(self.row_count, np.int64)
        if not self._has(Flag.SELECTED).any():
            starts = np.cumsum(self.counts) - self.counts
            np.add(np.arange(len(joined)), np.repeat(bases - starts, self.counts), out=joined)
            return joined
        if kernel is not None:
            bad = kernel.join_offsets(self.octets, selected, self.counts, bases, joined)
            if bad != kernels.WELL_FORMED:
                raise self._malformed(bad, "selected offsets do not ascend")
            return joined
        row = 0
        for index, count in enumerate(self.counts.tolist()):
            joined[row : row + count] = self._deltas(index, count) + bases[index]
            row += count
        return joined

    def _deltas(self, index: int, count: int) -> Ints:
        place = int(self._layout.selected[index])
        if place < 0:
            return np.arange(count, dtype=np.int64)
        deltas = np.frombuffer(self.octets, "<u4", count, place).astype(np.int64)
        if not (deltas[1:] > deltas[:-1]).all():
            raise self._malformed(index, "selected offsets do not ascend")
        return deltas

    def publish_times(self) -> Ints:
        """int64[rows]: microseconds since 1970 UTC."""
        shared = self.headers["publish_time_us"].astype(np.int64)
        if not self._has(Flag.TIMES).any():
            return np.repeat(shared, self.counts)
        joined = np.empty(self.row_count, np.int64)
        kernel = _kernels()
        if kernel is not None:
            kernel.join_words(self.octets, self._layout.times, self.counts, shared, joined)
            return joined
        row = 0
        for count, place, moment in zip(
            self.counts.tolist(), self._layout.times.tolist(), shared.tolist(), strict=True
        ):
            own = np.frombuffer(self.octets, "<i8", count, place) if place >= 0 else moment
            joined[row : row + count] = own
            row += count
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
        kernel = _kernels()
        if kernel is not None:
            present = has_keys.astype(np.int64)
            absent = int(kernel.join_bits(self.octets, layout.key_validity, present, self.counts, validity))
        else:
            valid = np.concatenate([self._valid(index, bool(has)) for index, has in enumerate(has_keys)])
            validity, absent = np.packbits(valid, bitorder="little"), int(len(valid) - valid.sum())
        return column._replace(validity=validity, null_count=absent)

    def _valid(self, index: int, has_keys: bool) -> NDArray[np.bool_]:
        count, place = int(self.counts[index]), int(self._layout.key_validity[index])
        if place < 0:
            return np.full(count, has_keys)
        bitmap = self.octets[place : place + (count + 7) // 8]
        return np.unpackbits(bitmap, count=count, bitorder="little").view(np.bool_)

    def attributes(self) -> AttributeColumns | None:
        """Names and values of all attributes; None if no record has any.  Damage for malformed ones."""
        if not self._has(Flag.ATTRIBUTES).any():
            return None
        layout = self._layout
        raw = self._variable(layout.attribute_offsets, layout.attributes, "attribute_bytes", "attribute")
        kernel = _kernels()
        if kernel is None:
            return self._attributes_twin()
        totals = np.zeros(3, np.int64)
        bad = kernel.measure_attributes(_read_only(raw.data), _read_only(raw.offsets), totals)
        if bad != kernels.WELL_FORMED:
            batch = int(np.searchsorted(np.cumsum(self.counts), bad, "right"))
            raise self._malformed(batch, "attributes of a record are malformed")
        count, name_bytes, value_bytes = totals.tolist()
        ends = np.empty(len(raw.offsets), np.int32)
        names = VariableColumn(np.empty(count + 1, np.int32), np.empty(name_bytes, np.uint8))
        values = VariableColumn(np.empty(count + 1, np.int32), np.empty(value_bytes, np.uint8))
        kernel.split_attributes(
            _read_only(raw.data), _read_only(raw.offsets), ends, names.offsets, names.data,
            values.offsets, values.data,
        )  # fmt: skip
        return AttributeColumns(ends, names, values)

    def _attributes_twin(self) -> AttributeColumns:
        ends, names, values = [0], [], []
        for index in range(len(self)):
            for record in self.view(index).attributes_list():
                names += [name.encode() for name in record]
                values += [value.encode() for value in record.values()]
                ends.append(len(names))
        return AttributeColumns(np.array(ends, np.int32), _variable_of(names), _variable_of(values))

    def producers(self) -> list[bytes]:
        """The producer's name in each batch, as it stands there."""
        places = (self.positions + HEADER_BYTES).tolist()
        data = self.octets.data
        return [
            bytes(data[place : place + size])
            for place, size in zip(places, self.headers["name_size"].tolist(), strict=True)
        ]

    def view(self, index: int) -> BatchView:
        """One batch by the ordinary reader."""
        return BatchView(self.octets.data, position=int(self.positions[index]))

    def _variable(self, offsets: Ints, positions: Ints, total_name: str, what: str) -> VariableColumn:
        totals = self.headers[total_name].astype(np.int64)
        if len(self) == 1 and offsets[0] >= 0:
            return self._in_place(int(offsets[0]), int(positions[0]), int(totals[0]), what)
        joined_offsets = np.empty(self.row_count + 1, np.int32)
        joined = np.empty(int(totals.sum()), np.uint8)
        kernel = _kernels()
        join = kernel.join_variable if kernel is not None else _join_variable_twin
        bad = join(self.octets, offsets, positions, self.counts, totals, joined_offsets, joined)
        if bad != kernels.WELL_FORMED:
            raise self._malformed(bad, f"offsets of the {what} column do not ascend from 0 to its size")
        return VariableColumn(joined_offsets, joined)

    def _in_place(self, offsets_position: int, position: int, total: int, what: str) -> VariableColumn:
        """The column of a batch that stands alone, where it lies."""
        offsets = np.frombuffer(self.octets, "<i4", int(self.counts[0]) + 1, offsets_position)
        if offsets[0] != 0 or offsets[-1] != total or not (offsets[1:] >= offsets[:-1]).all():
            raise self._malformed(0, f"offsets of the {what} column do not ascend from 0 to its size")
        return VariableColumn(offsets, self.octets[position : position + total])

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

        def take(flag: Flag, size: Ints) -> Ints:
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


def _variable_of(pieces: list[bytes]) -> VariableColumn:
    offsets = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    return VariableColumn(offsets, np.frombuffer(b"".join(pieces), np.uint8))


def _join_variable_twin(
    octets: Octets, offsets: Ints, positions: Ints, counts: Ints, totals: Ints,
    joined_offsets: NDArray[np.int32], joined: Octets,
) -> int:  # fmt: skip
    """kernels.joining.join_variable by numpy."""
    row = end = 0
    joined_offsets[0] = 0
    rows = zip(offsets.tolist(), positions.tolist(), counts.tolist(), totals.tolist(), strict=True)
    for batch, (place, position, count, total) in enumerate(rows):
        if place < 0:
            joined_offsets[row + 1 : row + count + 1] = end
            row += count
            continue
        own = np.frombuffer(octets, "<i4", count + 1, place)
        if own[0] != 0 or own[-1] != total or not (own[1:] >= own[:-1]).all():
            return batch
        joined_offsets[row + 1 : row + count + 1] = own[1:] + end
        joined[end : end + total] = octets[position : position + total]
        end += total
        row += count
    return kernels.WELL_FORMED


_KEYS = int(Flag.KEYS)
_ATTRIBUTES = int(Flag.ATTRIBUTES)


class SingleBatch:
    """An intact, uncompressed batch at ``position`` of ``octets`` (8-aligned, read-only).

    Every method raises ProtocolError if the columns that it reads are malformed.
    """

    __slots__ = ("_octets", "_position", "_view", "row_count")

    def __init__(self, octets: Octets, position: int) -> None:
        self._octets = octets
        self._position = position
        self._view = BatchView(octets.data, position=position)
        self.row_count = self._view.record_count

    @property
    def counts(self) -> NDArray[np.int64]:
        """int64[1]: the records of the batch."""
        return np.array([self.row_count], np.int64)

    def repeated(self, name: str, dtype: str = "<i8") -> NDArray[Any]:
        """A header's number for each record."""
        return np.full(self.row_count, getattr(self._view.header, name), dtype)

    def flagged(self, flag: Flag) -> NDArray[np.bool_] | None:
        """bool[rows], all false: the batch has no ``flag``; None if it has."""
        return None if self._view.header.flags & flag else np.zeros(self.row_count, np.bool_)

    def offsets(self) -> NDArray[np.int64]:
        """int64[rows]: the offset of each record."""
        return self._view.offsets

    def publish_times(self) -> NDArray[np.int64]:
        """int64[rows]: microseconds since 1970 UTC."""
        return self._view.publish_times

    def payloads(self) -> VariableColumn:
        """The payload column."""
        view = self._view
        return VariableColumn(view.payload_offsets, np.frombuffer(view.payload_bytes, np.uint8))

    def keys(self) -> VariableColumn | None:
        """The key column; None if no record has a key."""
        view = self._view
        if not view.header.flags & _KEYS:
            return None
        column = VariableColumn(view.key_offsets, np.frombuffer(view.key_bytes, np.uint8))
        present = view.key_validity
        if present is None:
            return column
        absent = self.row_count - int(present.sum())
        return column._replace(validity=np.packbits(present, bitorder="little"), null_count=absent)

    def attributes(self) -> AttributeColumns | None:
        """Names and values of all attributes; None if no record has any."""
        if not self._view.header.flags & _ATTRIBUTES:
            return None
        return BatchTable(self._octets, np.array([self._position])).attributes()

    def producers(self) -> list[bytes]:
        """The producer's name, as it stands there."""
        view = self._view
        return [bytes(view.data[HEADER_BYTES : HEADER_BYTES + view.header.name_size])]
