"""Ranges ahead of the window that must not be granted: acked before a restart, or damaged."""

from __future__ import annotations

import numpy as np

from danube.core.cursor import no_ranges
from danube.core.grants import Offsets


class Ahead:
    """Disjoint ascending ranges, int64[n][2]; true while there are any."""

    __slots__ = ("_position", "_ranges")

    def __init__(self, ranges: Offsets | None = None) -> None:
        self._ranges = no_ranges() if ranges is None else ranges.copy()
        self._position = 0

    def __bool__(self) -> bool:
        return self._position < len(self._ranges)

    @property
    def ranges(self) -> Offsets:
        return self._ranges[self._position :]

    @property
    def first(self) -> tuple[int, int]:
        start, end = self._ranges[self._position].tolist()
        return start, end

    def drop_below(self, offset: int) -> None:
        """Forget what lies below ``offset``."""
        while self and int(self._ranges[self._position, 1]) <= offset:
            self._position += 1
        if self and int(self._ranges[self._position, 0]) < offset:
            self._ranges[self._position, 0] = offset

    def add(self, start: int, end: int) -> int:
        """Add ``start .. end``; return how many of its offsets were not there."""
        ranges = self.ranges
        touching = (ranges[:, 0] <= end) & (ranges[:, 1] >= start)
        before = int((ranges[:, 1] - ranges[:, 0]).sum())
        merged = np.array([[start, end]], np.int64)
        if touching.any():
            near = ranges[touching]
            merged = np.array([[min(start, near[0, 0]), max(end, near[-1, 1])]], np.int64)
        below = ranges[ranges[:, 1] < start]
        above = ranges[ranges[:, 0] > end]
        self._ranges = np.concatenate((below, merged, above))
        self._position = 0
        return int((self._ranges[:, 1] - self._ranges[:, 0]).sum()) - before
