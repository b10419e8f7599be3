"""Ranges ahead of the window that must not be granted: acked before a restart, or damaged."""

from __future__ import annotations

import numpy as np

from danube.core.dispatch.grants import Offsets
from danube.core.dispatch.ranges import no_ranges


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

    def add(self, added: Offsets) -> int:
        """Add ranges, int64[n][2]; return how many of their offsets were not there."""
        ranges = self.ranges
        joined = np.concatenate((ranges, added))
        joined = joined[np.argsort(joined[:, 0], kind="stable")]
        ends = np.maximum.accumulate(joined[:, 1])
        first = np.ones(len(joined), np.bool_)  # of a range that does not touch the one before it
        first[1:] = joined[1:, 0] > ends[:-1]
        last = np.append(np.flatnonzero(first)[1:] - 1, len(joined) - 1)
        before = int((ranges[:, 1] - ranges[:, 0]).sum())
        self._ranges = np.stack((joined[first, 0], ends[last]), axis=1)
        self._position = 0
        return int((self._ranges[:, 1] - self._ranges[:, 0]).sum()) - before

    def between(self, start: int, end: int) -> Offsets:
        """int64[n]: the offsets of ``start .. end`` that are in no range, ascending."""
        ranges = self.ranges
        ranges = np.clip(ranges[: np.searchsorted(ranges[:, 0], end)], start, end) - start
        steps = np.zeros(end - start + 1, np.int32)
        np.add.at(steps, ranges[:, 0], 1)
        np.add.at(steps, ranges[:, 1], -1)
        return np.flatnonzero(np.cumsum(steps[:-1]) == 0).astype(np.int64, copy=False) + start
