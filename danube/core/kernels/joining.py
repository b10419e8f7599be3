"""Kernels that split the attributes of thousands of records into names and values.

They read only inside ``data``: offsets were checked, and so are sizes that a producer wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from danube.core.kernels import WELL_FORMED, jit
from danube.core.kernels.batch import text_is_valid

_ATTRIBUTE_HEAD = 6


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
