"""Kernels over a Python list of ``bytes``, read through the interpreter's own C functions.

A list is given as its ``id``, which is its address in CPython.  These kernels keep the GIL; between two
of them another thread may change the list, so the second looks at every size again.
"""

from __future__ import annotations

from typing import Any

from danube.core.kernels import WELL_FORMED, jit


@jit.jit("int64(intp, int64[::1])", gil=True)
def measure(address: Any, bounds: Any) -> Any:
    """Sum up the sizes of as many elements as ``bounds`` has without its first, which becomes 0.

    Returns WELL_FORMED or the index of the first that is absent or not ``bytes``.
    """
    end = 0
    bounds[0] = 0
    for index in range(len(bounds) - 1):
        item = jit.list_item(address, index)
        size = jit.bytes_size(item) if item else -1
        if size < 0:
            jit.clear_error()
            return index
        end += size
        bounds[index + 1] = end
    return WELL_FORMED


@jit.jit("int64(intp, const int64[::1], uint8[::1])", gil=True)
def gather(address: Any, bounds: Any, joined: Any) -> Any:
    """Copy the measured elements into ``joined``; WELL_FORMED or the index of the first that has changed."""
    for index in range(len(bounds) - 1):
        start = bounds[index]
        size = bounds[index + 1] - start
        item = jit.list_item(address, index)
        if item == 0 or jit.bytes_size(item) != size:
            jit.clear_error()
            return index
        jit.copy_from(joined, start, jit.bytes_data(item), size)
    return WELL_FORMED
