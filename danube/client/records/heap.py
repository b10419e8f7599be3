"""The memory that the payloads of one batch leave is kept for those of the next.

A consumer mostly drops a batch before it asks for the next one's payloads.  CPython gives an arena (1 MiB)
back to the kernel when the last object in it is gone, and the C library the end of its heap, so the next
batch pays a page fault for each 4 KiB: two thirds to nine tenths of what making its payloads takes.  One
object that stays in each keeps them (ADR 29).
"""

from __future__ import annotations

from collections import deque
from typing import Final

# Less than this stays in any case: the C library's M_TRIM_THRESHOLD.
_GIVEN_BACK: Final = 1 << 17
# Objects up to this size are in CPython's arenas, others in the C library's heap, where the last is enough.
_IN_ARENAS: Final = 512
_OBJECT_BYTES: Final = bytes.__basicsize__
# Half an arena, because others have a part of it.
_STEP_BYTES: Final = 1 << 19
# Of one batch; payloads that are larger are not worth what they would hold.
_HELD_BYTES_MAX: Final = 1 << 20

# Of the last batches of all consumers of the process, for each of which the heap has been large enough.
_anchors: deque[list[bytes]] = deque(maxlen=4)


def anchored(payloads: list[bytes], size: int) -> list[bytes]:
    """``payloads``, of about ``size`` bytes in all, a few of which stay when the caller drops them."""
    if size >= _GIVEN_BACK:
        each = size // len(payloads) + _OBJECT_BYTES
        step = _STEP_BYTES // each if each <= _IN_ARENAS else len(payloads)
        anchors = payloads[::-step]
        if sum(map(len, anchors)) <= _HELD_BYTES_MAX:
            _anchors.append(anchors)
    return payloads
