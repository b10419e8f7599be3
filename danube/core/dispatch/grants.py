"""Values of a subscription: its mode, grants of offsets, results of joins and acks, sets of offsets.

A set of offsets is an array of ranges: int64[n][2], half-open, ascending and apart from each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from danube.errors import InvalidArgument

Offsets = npt.NDArray[np.int64]


class Mode(IntEnum):
    """Rule by which consumers share a subscription's records; the numbers are stored in cursors."""

    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3

    @classmethod
    def parse(cls, text: str) -> Mode:
        try:
            return cls[text.upper().replace("-", "_")]
        except KeyError:
            raise InvalidArgument(
                f"subscription mode {text!r} is not known",
                hint="use exclusive, shared, failover or key_shared",
            ) from None

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def single(self) -> bool:
        """Whether one active consumer gets everything."""
        return self is Mode.EXCLUSIVE or self is Mode.FAILOVER


class Seated(Protocol):
    """A consumer, as far as grants know it."""

    @property
    def consumer_id(self) -> int: ...


class Grant(NamedTuple):
    """Records that one consumer may be sent now.

    ``offsets`` is None when they are all of ``start .. end``; otherwise int64[n], ascending, with
    ``start`` its first and ``end`` one after its last.  Each of them was granted
    ``redelivery_count`` times before.
    """

    consumer_id: int
    start: int
    end: int
    offsets: Offsets | None
    redelivery_count: int

    @property
    def record_count(self) -> int:
        return self.end - self.start if self.offsets is None else len(self.offsets)

    def within(self, start: int, end: int) -> Offsets:
        """int64[n]: the offsets granted in ``start .. end``, which lies in the grant."""
        if self.offsets is None:
            return np.arange(start, end, dtype=np.int64)
        low, high = np.searchsorted(self.offsets, (start, end)).tolist()
        return self.offsets[low:high]


class JoinResult(NamedTuple):
    """``displaced`` is the consumer of the same name that this one replaced; its stream must end."""

    active: bool
    displaced: int | None


class AckResult(NamedTuple):
    """Records of one ack: taken, without effect (late, twice, unknown), and in flight elsewhere."""

    acked: int
    ignored: int
    refused: int


class DeadLetter(NamedTuple):
    """A record that used up its deliveries; it stays unacked until ``dead_lettered(offset)``."""

    offset: int
    deliveries: int
    reason: str


def grants_of(
    offsets: Offsets,
    seats: npt.NDArray[np.int16],
    before: npt.NDArray[np.uint16] | None,
    by_seat: Mapping[int, Seated],
) -> list[Grant]:
    """Grants for records (offsets ascending) given to ``seats`` after ``before`` deliveries (None: 0).

    A consumer's records stay in offset order; a new grant begins where the consumer or the number
    of deliveries changes.
    """
    count = len(seats)
    if count == 0:
        return []
    order = np.argsort(seats, kind="stable")
    offsets, seats = offsets[order], seats[order]
    changed = seats[1:] != seats[:-1]
    if before is not None:
        before = before[order]
        changed |= before[1:] != before[:-1]
    edges = [0, *(np.flatnonzero(changed) + 1).tolist(), count]
    grants = []
    for first, last in pairwise(edges):
        part = offsets[first:last]
        start, end = int(part[0]), int(part[-1]) + 1
        whole = end - start == last - first
        consumer_id = by_seat[int(seats[first])].consumer_id
        times = 0 if before is None else int(before[first])
        grants.append(Grant(consumer_id, start, end, None if whole else part, times))
    return grants


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
    """Return the parts of ``start .. end`` that lie in no range."""
    ranges = within(ranges, start, end)
    starts = np.concatenate(([start], ranges[:, 1]))
    ends = np.concatenate((ranges[:, 0], [end]))
    gaps = np.stack((starts, ends), axis=1).astype(np.int64, copy=False)
    return gaps[gaps[:, 1] > gaps[:, 0]]


def within(ranges: Offsets, start: int, end: int) -> Offsets:
    """Return the parts of the ranges that lie in ``start .. end``."""
    clipped = np.clip(ranges, start, max(start, end))
    return clipped[clipped[:, 1] > clipped[:, 0]]


def without(ranges: Offsets, removed: Offsets) -> Offsets:
    """Return the parts of the ranges that lie in none of ``removed``."""
    parts = [between(removed, start, end) for start, end in ranges.tolist()]
    return np.concatenate(parts) if parts else no_ranges()


def closed_up(ranges: Offsets, start: int, end: int) -> Offsets:
    """Return ``ranges`` without ``start .. end``; ranges behind it move down to ``start``."""
    moved = np.where(ranges >= end, ranges - (end - start), np.minimum(ranges, start))
    return joined(moved)


def size_of(ranges: Offsets) -> int:
    """How many offsets there are."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())
