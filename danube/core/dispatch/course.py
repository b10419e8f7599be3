"""The course of a subscription: in which order it delivers offsets, and which offsets it skips.

A *place* is the number of a record in the window, in the order of first deliveries.  While a subscription
skips nothing, place and offset are equal.  A gap has no places, so it does not widen the window.  Records
that come back in a hole get places behind those of higher offsets.  The course is a list of pieces.  In a
piece, offsets follow each other from one place up to the place where the next piece begins.

Ranges of a subscription's window that have no record: compacted, damaged, expired or never used.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from danube.core.dispatch.grants import Grant, Offsets, closed_up, joined, no_ranges, size_of, within
from danube.limits import MAX_UNACKED_LIMIT

OFFSETS_END: Final = 1 << 62
_PIECES_FIRST: Final = 16


class Course:
    """Pieces, int64[n][2] ``(place, offset)``, by place; ``count`` 0: places are offsets."""

    __slots__ = ("_first", "_pieces", "_turns", "count")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Places are offsets."""
        self._pieces: Offsets = np.empty((_PIECES_FIRST, 2), np.int64)
        self._first = self.count = 0
        self._turns: list[int] = []  # places of pieces that begin below the end of the piece before

    def __len__(self) -> int:
        return self.count

    @property
    def pieces(self) -> Offsets:
        return self._pieces[self._first : self._first + self.count]

    @property
    def turns(self) -> list[int]:
        """Places at which it goes back to lower offsets."""
        return self._turns

    def begin(self, place: int, offset: int) -> None:
        """From ``place`` on, which is not below that of the last piece, offsets follow ``offset``."""
        if not self.count:
            self._append(0, 0)
        last_place, last_offset = self.pieces[-1].tolist()
        if last_place == place:  # a piece without a record
            self.count -= 1
            if self._turns and self._turns[-1] == place:
                self._turns.pop()
            if self.count:
                last_place, last_offset = self.pieces[-1].tolist()
        if self.count and offset < last_offset + place - last_place:
            self._turns.append(place)
        self._append(place, offset)

    def _append(self, place: int, offset: int) -> None:
        end = self._first + self.count
        if end == len(self._pieces):
            kept = self.pieces
            self._pieces = np.empty((max(_PIECES_FIRST, 2 * self.count), 2), np.int64)
            self._pieces[: len(kept)] = kept
            self._first, end = 0, len(kept)
        self._pieces[end] = place, offset
        self.count += 1

    def forget_below(self, place: int) -> None:
        """No piece that ends at or below ``place`` is asked for any more."""
        if self.count < 2 or self._pieces[self._first + 1, 0] > place:
            return
        gone = int(np.searchsorted(self.pieces[:, 0], place, "right")) - 1
        self._first += gone
        self.count -= gone
        first = int(self._pieces[self._first, 0])
        self._turns = [turn for turn in self._turns if turn > first]

    # -- from places to offsets -------------------------------------------------------------------

    def offset(self, place: int) -> int:
        """The offset at one place; behind the last piece's begin it goes on without end."""
        if not self.count:
            return place
        pieces = self.pieces
        start, offset = pieces[-1].tolist()
        if place < start:
            start, offset = pieces[max(int(np.searchsorted(pieces[:, 0], place, "right")) - 1, 0)].tolist()
        return int(offset + place - start)

    def offsets(self, places: Offsets) -> Offsets:
        """The offset at each place, int64[n]."""
        if not self.count:
            return places
        pieces = self.pieces
        which = np.maximum(np.searchsorted(pieces[:, 0], places, "right") - 1, 0)
        found: Offsets = places + (pieces[which, 1] - pieces[which, 0])
        return found

    def offset_ranges(self, ranges: Offsets) -> Offsets:
        """The offsets at ranges of places that ascend and are apart from each other, as a set of ranges."""
        if not self.count or not len(ranges):
            return ranges
        cuts = self.pieces[:, 0]
        which = np.searchsorted(ranges[:, 0], cuts) - 1  # the range that begins below the cut
        inside = cuts[(which >= 0) & (cuts < ranges[np.maximum(which, 0), 1])]
        starts = np.sort(np.concatenate((ranges[:, 0], inside)))
        ends = np.sort(np.concatenate((ranges[:, 1], inside)))
        first = self.offsets(starts)
        return joined(np.stack((first, first + ends - starts), axis=1))

    def grants(self, grants: list[Grant]) -> list[Grant]:
        """Grants of offsets for grants of places; one that reaches over several pieces becomes several."""
        if not self.count:
            return grants
        return [part for grant in grants for part in self._grants(grant)]

    def _grants(self, grant: Grant) -> list[Grant]:
        cuts = self.pieces[1:, 0]
        low, high = np.searchsorted(cuts, (grant.start, grant.end - 1), "right").tolist()
        bounds = [grant.start, *cuts[low:high].tolist(), grant.end]
        parts: list[Grant] = []
        for start, end in pairwise(bounds):
            shift = self.offset(start) - start
            places = None if grant.offsets is None else grant.within(start, end)
            if places is None:
                parts.append(grant._replace(start=start + shift, end=end + shift))
            elif len(places):
                offsets = places + shift
                first, last = int(offsets[0]), int(offsets[-1]) + 1
                dense = last - first == len(offsets)
                parts.append(grant._replace(start=first, end=last, offsets=None if dense else offsets))
        return parts

    # -- from offsets to places -------------------------------------------------------------------

    def next_place(self, offset: int) -> int:
        """The place of an offset at or behind the begin of the last piece."""
        if not self.count:
            return offset
        start, first = self.pieces[-1].tolist()
        return int(start + offset - first)

    def places(self, ranges: Offsets, end: int = OFFSETS_END) -> Offsets:
        """Ranges of places for any ranges of offsets (int64[n][2]); the last piece has offsets up to ``end``.

        Offsets that are not on the course have none.
        """
        if not self.count:
            return ranges
        pieces = self.pieces
        last = self.next_place(max(end, int(pieces[-1, 1])))
        ends = np.append(pieces[1:, 0], last)
        bounds = [0, *np.searchsorted(pieces[:, 0], self._turns).tolist(), self.count]
        found = [_ascending(ranges, pieces[low:high], ends[low:high]) for low, high in pairwise(bounds)]
        places = found[0] if len(found) == 1 else np.concatenate(found)
        return places[places[:, 1] > places[:, 0]]


def _ascending(ranges: Offsets, pieces: Offsets, ends: Offsets) -> Offsets:
    """Places of ranges in pieces that have ascending offsets."""
    if not len(ranges):
        return no_ranges()
    which = np.maximum(np.searchsorted(pieces[:, 1], ranges, "right") - 1, 0)
    behind = np.maximum(ranges - pieces[which, 1], 0)
    places: Offsets = np.minimum(pieces[which, 0] + behind, ends[which])
    return places


SPAN_LIMIT: Final = MAX_UNACKED_LIMIT  # of places, whatever of them has records


class Gaps:
    """A window's width counts records, so offsets in a gap do not count: up to SPAN_LIMIT."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges = no_ranges()

    def clear(self) -> None:
        self._ranges = no_ranges()

    def add(self, ranges: Offsets, floor: int) -> None:
        """Add ``ranges`` (int64[n][2]) without records; ranges below the floor are dropped."""
        self._ranges = joined(within(np.concatenate((self._ranges, ranges)), floor, OFFSETS_END))

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
