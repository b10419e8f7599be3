"""Kernels over a Python list of ``bytes``, read through the interpreter's own C functions.

A list is given as its ``id``, which is its address in CPython.  These kernels keep the GIL, so no other
thread changes the list while they read it.
"""

from __future__ import annotations

from typing import Any

from danube.core.kernels import MALFORMED, WELL_FORMED, jit


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


@jit.jit("int64(intp, int64[::1], uint8[::1])", gil=True)
def join(address: Any, bounds: Any, joined: Any) -> Any:
    """Put elements side by side, as many as ``bounds`` has without its first and ``joined`` has room for.

    Returns how many, or MALFORMED where one is absent or not ``bytes``.
    """
    end = 0
    room = len(joined)
    bounds[0] = 0
    for index in range(len(bounds) - 1):
        item = jit.list_item(address, index)
        size = jit.bytes_size(item) if item else -1
        if size < 0:
            jit.clear_error()
            return MALFORMED
        if end + size > room:
            return index
        jit.copy_from(joined, end, jit.bytes_data(item), size)
        end += size
        bounds[index + 1] = end
    return len(bounds) - 1
