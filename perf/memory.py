"""Memory is touched right before it is measured: a guest's free memory may not be there.

Some hosts take free pages back within seconds, and the first write to such a page costs as much as ten to
twenty later ones.  A file written and deleted gets its pages from the kernel and gives them back, and the
next file gets the same; so passes are repeated until one takes about as long as the one before it.
"""

from __future__ import annotations

import time
from pathlib import Path

PASSES_MAX = 8
_ALIKE = 0.75
_PIECE = bytes(1 << 20)


def touch(directory: Path, size: int) -> int:
    """Touch about ``size`` bytes by way of a file in ``directory``; return how many passes it took."""
    before_s = 0.0
    for number in range(1, PASSES_MAX + 1):
        started = time.monotonic()
        _pass(directory / "touched", size)
        took_s = time.monotonic() - started
        if min(before_s, took_s) >= _ALIKE * max(before_s, took_s):
            return number
        before_s = took_s
    return PASSES_MAX


def _pass(path: Path, size: int) -> None:
    with path.open("wb", buffering=0) as file:
        path.unlink()
        for _ in range(size // len(_PIECE)):
            file.write(_PIECE)
