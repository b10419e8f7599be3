"""Copying to memory that another processor reads next, past this one's caches.

A store to a line that another processor has read waits until that one lets go of it, some 30 ns each where
the two share no cache.  A non-temporal store of a whole line does not ask for what was there.
"""

from __future__ import annotations

from typing import Any, Final

from danube.core.kernels import jit

LINE: Final = 64


@jit.jit("void(uint8[::1], int64, const uint8[::1])")
def stream(target: Any, position: Any, source: Any) -> Any:
    """Copy ``source`` to ``position`` in ``target``, which has room; who is told of it afterwards sees it."""
    size = len(source)
    to, origin = target.ctypes.data + position, source.ctypes.data
    first = min(-to & (LINE - 1), size)
    last = first + (size - first) // LINE * LINE
    jit.copy_at(to, origin, first)
    for place in range(first, last, LINE):
        jit.stream_line(to + place, origin + place)
    jit.copy_at(to + last, origin + last, size - last)
    jit.fence()
