"""Footers that a power cut left unfinished, told from damaged ones.

A footer is written behind data that was synced, and is synced itself before any later segment gets one.
A cut before that keeps some of its sectors; the others read as zeros.  So only a footer behind the newest
whole one can be such a rest, and its segment is as unsealed as before: it is read, and sealed again.  Of one
that was finished and rots no whole sector turns into zeros: that is damage.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

SECTOR_BYTES: Final = 512
_HEAD_BYTES: Final = 16  # of a summary, and of a footer: never all zeros


def torn(data: bytes, position: int) -> bool:
    """Whether a sector is missing in a footer, or in the last bytes of one, which begins at ``position``."""
    cuts = [0, *range(-position % SECTOR_BYTES, len(data), SECTOR_BYTES), len(data)]
    pieces = [data[:_HEAD_BYTES], *(data[start:end] for start, end in pairwise(cuts) if start < end)]
    return any(not piece.strip(b"\0") for piece in pieces)
