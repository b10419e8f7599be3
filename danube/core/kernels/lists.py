"""Kernels over a Python list of ``bytes``, read where the interpreter keeps them (:mod:`objects`).

Objects are given as their ``id``.  These kernels keep the GIL, so no other thread changes a list while one
of them reads it; between two of them it may, so each looks at every element again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from danube.core.kernels import MALFORMED, WELL_FORMED, jit
from danube.core.kernels.objects import CONTENT, ITEMS, SIZE, TYPE
from danube.limits import RECORD_BYTES_MAX


@jit.jit("int64(intp, intp, int64, int64, int64, int32[::1])", gil=True)
def measure(payloads: Any, bytes_type: Any, start: Any, overhead: Any, bytes_max: Any, offsets: Any) -> Any:
    """Offsets of the payloads from ``start`` on: of as many as have room and fit, but of one at least.

    They fit while they have at most ``bytes_max`` together, with ``overhead`` for each.  Returns how many
    they are, or MALFORMED where one of them is not ``bytes`` or larger than any record.
    """
    items = jit.load_at(payloads + ITEMS) + 8 * start
    end = np.int64(0)
    offsets[0] = 0
    for index in range(min(jit.load_at(payloads + SIZE) - start, len(offsets) - 1)):
        item = jit.load_at(items + 8 * index)
        size = jit.load_at(item + SIZE)
        if jit.load_at(item + TYPE) != bytes_type or size > RECORD_BYTES_MAX:
            return MALFORMED
        if index and end + size + overhead * (index + 1) > bytes_max:
            return index
        end += size
        offsets[index + 1] = end
    return min(jit.load_at(payloads + SIZE) - start, len(offsets) - 1)


@jit.jit("int64(intp, intp, intp, intp, int64, const int32[::1], intp)", gil=True)
def fill(
    target: Any, before: Any, payloads: Any, bytes_type: Any, start: Any, offsets: Any, after: Any
) -> Any:
    """Write ``before``, the payloads that were measured and ``after`` to the address ``target``.

    Returns WELL_FORMED, or MALFORMED where the list has changed since.
    """
    size = jit.load_at(before + SIZE)
    position = target
    jit.copy_at(position, before + CONTENT, size)
    position += size
    count = len(offsets) - 1
    if jit.load_at(payloads + SIZE) < start + count:
        return MALFORMED
    items = jit.load_at(payloads + ITEMS) + 8 * start
    for index in range(count):
        item = jit.load_at(items + 8 * index)
        size = offsets[index + 1] - offsets[index]
        if jit.load_at(item + TYPE) != bytes_type or jit.load_at(item + SIZE) != size:
            return MALFORMED
        jit.copy_at(position, item + CONTENT, size)
        position += size
    jit.copy_at(position, after + CONTENT, jit.load_at(after + SIZE))
    return WELL_FORMED
