"""A set of numbers that is nearly everything below some number: a floor and ranges above it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

RANGES_MAX: Final = 65_536

Range = tuple[int, int]


class NumberSet:
    """Numbers from 0 on, as half-open ranges.

    Full: with more than ``ranges_max`` ranges the lowest gap is given up: its numbers count as members from
    then on and in ``given_up``, so that a run that loses half of its records ends with a bounded account.
    """

    __slots__ = ("_ends", "_ranges_max", "_starts", "count", "given_up")

    def __init__(self, ranges_max: int = RANGES_MAX) -> None:
        self._ranges_max = ranges_max
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.count = 0  # members, without what was given up
        self.given_up = 0

    def add(self, start: int, end: int) -> int:
        """Add ``start .. end``; return how many of them are new."""
        starts, ends = self._starts, self._ends
        if ends and start == ends[-1]:  # the usual case: the next number
            ends[-1] = end
            self.count += end - start
            return end - start
        first = bisect_left(ends, start)  # the ranges first .. last touch or overlap the new one
        last = bisect_right(starts, end)
        known = 0
        for place in range(first, last):
            known += max(0, min(ends[place], end) - max(starts[place], start))
        new = end - start - known
        if first < last:
            start, end = min(start, starts[first]), max(end, ends[last - 1])
        starts[first:last] = [start]
        ends[first:last] = [end]
        self.count += new
        if len(starts) > self._ranges_max:
            self._give_up()
        return new

    def _give_up(self) -> None:
        """Close the lowest gap between two ranges."""
        self.given_up += self._starts[1] - self._ends[0]
        del self._starts[1], self._ends[0]

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._ends[place]

    @property
    def end(self) -> int:
        """One more than the largest member; 0 when there is none."""
        return self._ends[-1] if self._ends else 0

    def ranges(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)

    def without(self, other: NumberSet) -> Iterator[Range]:
        """Ranges of this set's members that ``other`` has not."""
        theirs = list(other.ranges())
        place = 0
        for start, end in self.ranges():
            while place < len(theirs) and theirs[place][1] <= start:
                place += 1
            at = place
            while start < end:
                if at == len(theirs) or theirs[at][0] >= end:
                    yield start, end
                    break
                if theirs[at][0] > start:
                    yield start, theirs[at][0]
                start = max(start, theirs[at][1])
                at += 1
