"""Ranges of a subscription's window that have no record: compacted, damaged, expired or never used."""

from __future__ import annotations

from typing import Final

import numpy as np

from danube.core.dispatch.grants import Offsets
from danube.core.dispatch.ranges import closed_up, joined, no_ranges, size_of, within
from danube.limits import MAX_UNACKED_LIMIT

SPAN_LIMIT: Final = MAX_UNACKED_LIMIT  # of places, whatever of them has records
_OFFSETS_END: Final = 1 << 62


class Gaps:
    """A window's width counts records, so what lies in a gap does not count: up to SPAN_LIMIT."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges = no_ranges()

    def clear(self) -> None:
        self._ranges = no_ranges()

    def add(self, ranges: Offsets, floor: int) -> None:
        """These (int64[n][2]) have no record; what lies below the floor is of no use any more."""
        self._ranges = joined(within(np.concatenate((self._ranges, ranges)), floor, _OFFSETS_END))

    def close_up(self, start: int, end: int) -> None:
        """``start .. end`` is taken out of the window's places."""
        self._ranges = closed_up(self._ranges, start, end)

    def widest(self, floor: int, span_max: int) -> int:
        """The first offset that is too far from ``floor`` for a window of ``span_max`` records."""
        end = floor + span_max
        if not len(self._ranges) or int(self._ranges[-1, 1]) <= floor:
            return end
        limit = floor + max(SPAN_LIMIT, span_max)
        while end < limit:
            wider = floor + span_max + size_of(within(self._ranges, floor, end))
            if wider == end:
                break
            end = wider
        return min(end, limit)
