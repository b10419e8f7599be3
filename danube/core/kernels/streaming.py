"""Copying to memory that another processor reads next, past this one's caches.

A store to a line that another processor has read waits until that one lets go of it, some 30 ns each where
the two share no cache.  A non-temporal store of a whole line does not ask for what was there.
"""

from __future__ import annotations

from typing import Any, Final

from danube.core.kernels import jit

LINE: Final = 64


@jit.inline
def stream_at(target: Any, source: Any, size: Any) -> Any:
    """Copy between two addresses; before anybody is told of it there is to be a fence."""
    first = min(-target & (LINE - 1), size)
    last = first + (size - first) // LINE * LINE
    jit.copy_at(target, source, first)
    for place in range(first, last, LINE):
        jit.stream_line(target + place, source + place)
    jit.copy_at(target + last, source + last, size - last)


@jit.jit("void(uint8[::1], int64, const uint8[::1])")
def stream(target: Any, position: Any, source: Any) -> Any:
    """Copy ``source`` to ``position`` in ``target``, which has room; who is told of it afterwards sees it."""
    stream_at(target.ctypes.data + position, source.ctypes.data, len(source))
    jit.fence()
