"""Sets of offsets as ranges: int64[n][2], half-open, ascending and apart from each other."""

from __future__ import annotations

import numpy as np

from danube.core.dispatch.grants import Offsets


def no_ranges() -> Offsets:
    """An empty int64[0][2]."""
    return np.empty((0, 2), np.int64)


def joined(ranges: Offsets) -> Offsets:
    """The set that ``ranges``, in any order, cover together."""
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    if not len(ranges):
        return no_ranges()
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ranges[:, 1])
    first = np.ones(len(ranges), np.bool_)  # of a range that does not touch the one before it
    first[1:] = ranges[1:, 0] > ends[:-1]
    last = np.append(np.flatnonzero(first)[1:] - 1, len(ranges) - 1)
    return np.stack((ranges[first, 0], ends[last]), axis=1)


def between(ranges: Offsets, start: int, end: int) -> Offsets:
    """What of ``start .. end`` is in no range."""
    ranges = within(ranges, start, end)
    starts = np.concatenate(([start], ranges[:, 1]))
    ends = np.concatenate((ranges[:, 0], [end]))
    gaps = np.stack((starts, ends), axis=1).astype(np.int64, copy=False)
    return gaps[gaps[:, 1] > gaps[:, 0]]


def within(ranges: Offsets, start: int, end: int) -> Offsets:
    """What of the ranges lies in ``start .. end``."""
    clipped = np.clip(ranges, start, max(start, end))
    return clipped[clipped[:, 1] > clipped[:, 0]]


def without(ranges: Offsets, removed: Offsets) -> Offsets:
    """What of the ranges is in none of ``removed``."""
    parts = [between(removed, start, end) for start, end in ranges.tolist()]
    return np.concatenate(parts) if parts else no_ranges()


def closed_up(ranges: Offsets, start: int, end: int) -> Offsets:
    """The ranges where ``start .. end`` is taken out and what lies behind it moves down to ``start``."""
    moved = np.where(ranges >= end, ranges - (end - start), np.minimum(ranges, start))
    return joined(moved)


def size_of(ranges: Offsets) -> int:
    """How many offsets there are."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())
