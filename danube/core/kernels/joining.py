"""Kernels that join one column of many batches into one, for readers that hand out thousands of rows at once.

They read only inside ``data``: every position and size comes from a layout that was checked against its
batch, and every offset that a producer wrote is checked here before it is followed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from danube.core.kernels import WELL_FORMED, jit
from danube.core.kernels.batch import text_is_valid

_ATTRIBUTE_HEAD = 6


@jit.jit(
    "int64(const uint8[::1], const int64[::1], const int64[::1], const int64[::1], const int64[::1],"
    " int32[::1], uint8[::1])"
)
def join_variable(
    data: Any, offsets: Any, positions: Any, counts: Any, totals: Any, joined_offsets: Any, joined: Any
) -> Any:
    """Join a column of offsets and bytes; return WELL_FORMED or the index of the first bad batch.

    A batch without the column has -1 in ``offsets`` and gives its records no bytes.
    """
    row = np.int64(0)
    end = np.int64(0)
    joined_offsets[0] = 0
    for batch in range(len(counts)):
        count = counts[batch]
        place = offsets[batch]
        if place < 0:
            for index in range(count):
                joined_offsets[row + index + 1] = end
            row += count
            continue
        before = np.int64(jit.load_int(data, place))
        backwards = before != 0
        for index in range(count):
            after = np.int64(jit.load_int(data, place + 4 * (index + 1)))
            backwards |= after < before
            joined_offsets[row + index + 1] = end + after
            before = after
        if backwards or before != totals[batch]:
            return batch
        jit.copy_bytes(joined, end, data, positions[batch], before)
        end += before
        row += count
    return WELL_FORMED


@jit.jit("void(const uint8[::1], const int64[::1], const int64[::1], const int64[::1], int64[::1])")
def join_words(data: Any, positions: Any, counts: Any, otherwise: Any, joined: Any) -> None:
    """Join numbers of eight bytes; a batch with position -1 repeats its number in ``otherwise``."""
    row = np.int64(0)
    for batch in range(len(counts)):
        place = positions[batch]
        for index in range(counts[batch]):
            if place < 0:
                joined[row + index] = otherwise[batch]
            else:
                joined[row + index] = np.int64(jit.load_word(data, place + 8 * index))
        row += counts[batch]


@jit.jit("int64(const uint8[::1], const int64[::1], const int64[::1], const int64[::1], int64[::1])")
def join_offsets(data: Any, selected: Any, counts: Any, bases: Any, joined: Any) -> Any:
    """The offset of every record: of selections from their deltas, which must ascend; else counting up."""
    row = np.int64(0)
    for batch in range(len(counts)):
        place = selected[batch]
        base = bases[batch]
        before = np.int64(-1)
        for index in range(counts[batch]):
            delta = np.int64(index)
            if place >= 0:
                delta = np.int64(jit.load_half(data, place + 4 * index))
                if delta <= before:
                    return batch
                before = delta
            joined[row + index] = base + delta
        row += counts[batch]
    return WELL_FORMED


@jit.jit("int64(const uint8[::1], const int64[::1], const int64[::1], const int64[::1], uint8[::1])")
def join_bits(data: Any, validities: Any, present: Any, counts: Any, joined: Any) -> Any:
    """Set the bit of every record that has a key in a bitmap of zeros; return how many have none.

    ``present`` is 0 for a batch without keys; position -1 of the others: all records have one.
    """
    row = np.int64(0)
    absent = np.int64(0)
    for batch in range(len(counts)):
        place = validities[batch]
        for index in range(counts[batch]):
            bit = present[batch]
            if place >= 0:
                bit = np.int64(data[place + (index >> 3)] >> (index & 7)) & 1
            absent += 1 - bit
            at = row + index
            joined[at >> 3] |= np.uint8(bit << (at & 7))
        row += counts[batch]
    return absent


@jit.jit("int64(const uint8[::1], const int32[::1], int64[::1])")
def measure_attributes(data: Any, offsets: Any, totals: Any) -> Any:
    """Check all records' attributes; ``totals`` becomes (attributes, name bytes, value bytes).

    Returns WELL_FORMED or the index of the first bad record.
    """
    names = np.int64(0)
    values = np.int64(0)
    count = np.int64(0)
    for row in range(len(offsets) - 1):
        place = np.int64(offsets[row])
        end = np.int64(offsets[row + 1])
        while place < end:
            if end - place < _ATTRIBUTE_HEAD:
                return row
            name_size = np.int64(jit.load_short(data, place))
            value_size = np.int64(jit.load_half(data, place + 2))
            middle = place + _ATTRIBUTE_HEAD + name_size
            if middle + value_size > end:
                return row
            if not text_is_valid(data, place + _ATTRIBUTE_HEAD, middle):
                return row
            if not text_is_valid(data, middle, middle + value_size):
                return row
            names += name_size
            values += value_size
            count += 1
            place = middle + value_size
    totals[0] = count
    totals[1] = names
    totals[2] = values
    return WELL_FORMED


@jit.jit(
    "void(const uint8[::1], const int32[::1], int32[::1], int32[::1], uint8[::1], int32[::1], uint8[::1])"
)
def split_attributes(
    data: Any, offsets: Any, ends: Any, name_offsets: Any, names: Any, value_offsets: Any, values: Any
) -> None:
    """Names and values of measured attributes as two columns; ``ends`` says where each record's begin."""
    count = np.int64(0)
    ends[0] = 0
    name_offsets[0] = 0
    value_offsets[0] = 0
    for row in range(len(offsets) - 1):
        place = np.int64(offsets[row])
        end = np.int64(offsets[row + 1])
        while place < end:
            name_size = np.int64(jit.load_short(data, place))
            value_size = np.int64(jit.load_half(data, place + 2))
            start = place + _ATTRIBUTE_HEAD
            jit.copy_bytes(names, name_offsets[count], data, start, name_size)
            jit.copy_bytes(values, value_offsets[count], data, start + name_size, value_size)
            name_offsets[count + 1] = name_offsets[count] + name_size
            value_offsets[count + 1] = value_offsets[count] + value_size
            count += 1
            place = start + name_size + value_size
        ends[row + 1] = count
