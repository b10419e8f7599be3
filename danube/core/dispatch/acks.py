"""Applying acks to a window.  The work is bounded by the window and the frame, whatever ranges a peer names.

A record may be acked by the consumer that has it in flight.  Any member may ack a record that is in flight
nowhere: one that waits for redelivery, is blocked, or is dead.  Offsets that were never granted, are below
the floor or were acked before have no effect; offsets in flight at another consumer are refused.  Earlier
grants are not remembered: after a seek back an old ack counts only if its offset is in flight again at the
same consumer.  An ack for ANY_SEAT names no consumer, so it counts for any consumer's record.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from danube.core import kernels
from danube.core.dispatch.grants import Offsets
from danube.core.dispatch.window import ACKED, BLOCKED, BURIED, DEAD, IN_FLIGHT, READY, RETRY, STATES, Window

_ONE_BY_ONE_MAX: Final = 4
_OFFSET_MAX: Final = 1 << 62
_COUNTED_PER_RANGE_MAX: Final = 1 << 40
_WAITS_FOR_NOBODY: Final = np.zeros(STATES, np.bool_)
_WAITS_FOR_NOBODY[[RETRY, READY, DEAD, BURIED, BLOCKED]] = True
_NO_COUNTERS: Final = np.zeros((0, STATES), np.int32)
_ONE_IN_FLIGHT: Final = np.array([IN_FLIGHT], np.uint8)

NO_SEAT: Final = -1
ANY_SEAT: Final = -2

Ranges = npt.NDArray[Any]


def acknowledge(window: Window, seat: int, ranges: Ranges) -> tuple[int, int, int]:
    """Ack half-open ``ranges`` (int64 or uint64 [n][2], in any order) for the consumer at ``seat``.

    Returns records acked, ignored and refused.  The floor has been advanced.
    """
    acked = refused = 0
    pairs = ranges.tolist() if len(ranges) <= _ONE_BY_ONE_MAX else None
    if pairs is not None and (len(pairs) == 1 or all(a[1] <= b[0] for a, b in pairwise(pairs))):
        named = 0
        for start, end in pairs:
            if 0 <= start < end <= _OFFSET_MAX:
                named += min(end - start, _COUNTED_PER_RANGE_MAX)
                start, end = max(start, window.floor), min(end, window.next)
                if start < end:
                    done, foreign = _acknowledge_range(window, seat, start, end)
                    acked += done
                    refused += foreign
    else:
        ranges = sound(ranges)
        named = named_count(ranges)
        counted = _acknowledge_kernel(window, seat, ranges)
        if counted is None:
            offsets = offsets_in(ranges, window.floor, window.next)
            counted = _acknowledge_index(window, seat, offsets & window.mask)
        acked, refused = counted
    if acked:
        window.advance()
    return acked, named - acked - refused, refused


def _acknowledge_range(window: Window, seat: int, start: int, end: int) -> tuple[int, int]:
    keys = window.keys
    if end - start == 1:
        index = start & window.mask
        if window.state[index] == IN_FLIGHT and (window.owner[index] == seat or seat == ANY_SEAT):
            window.state[index] = ACKED
            window.counts[IN_FLIGHT] -= 1
            window.counts[ACKED] += 1
            if keys is not None:
                window.freed |= keys.move(window.key[index : index + 1], _ONE_IN_FLIGHT, ACKED)
            window.pass_acked(start, end)
            return 1, 0
    acked = refused = 0
    for part in window.slices(start, end):
        state = window.state[part]
        mine = state == IN_FLIGHT
        if seat != ANY_SEAT:
            mine &= window.owner[part] == seat
        if mine.all():
            if keys is not None:
                window.freed |= keys.move(window.key[part], state, ACKED)
            window.state[part] = ACKED
            window.counts[IN_FLIGHT] -= len(state)
            window.counts[ACKED] += len(state)
            acked += len(state)
            window.pass_acked(start, start + len(state))
        else:
            done, foreign = _acknowledge_index(window, seat, np.arange(part.start, part.stop))
            acked += done
            refused += foreign
        start += len(state)
    return acked, refused


def _acknowledge_index(window: Window, seat: int, index: Offsets) -> tuple[int, int]:
    state = window.state[index]
    in_flight = state == IN_FLIGHT
    mine = in_flight if seat == ANY_SEAT else in_flight & (window.owner[index] == seat)
    refused = int(np.count_nonzero(in_flight)) - int(np.count_nonzero(mine))
    taken = mine | _WAITS_FOR_NOBODY[state]
    index, state = index[taken], state[taken]
    if not len(index):
        return 0, refused
    for name, count in enumerate(np.bincount(state, minlength=STATES).tolist()):
        window.counts[name] -= count
    window.counts[ACKED] += len(index)
    if window.keys is not None:
        window.freed |= window.keys.move(window.key[index], state, ACKED)
    window.state[index] = ACKED
    return len(index), refused


def _acknowledge_kernel(window: Window, seat: int, ranges: Offsets) -> tuple[int, int] | None:
    """Acknowledge in one pass of the kernel; None without kernels, for ANY_SEAT and for unsorted ranges.

    Ranges that overlap or do not ascend are left to the caller as well.
    """
    if not kernels.available or seat == ANY_SEAT:
        return None
    counters = _NO_COUNTERS if window.keys is None else window.keys.counters
    tally = np.zeros(STATES + 2, np.int64)
    if not kernels.compiled.ack_ranges(
        ranges, window.floor, window.next, seat, window.state, window.owner, window.key, counters, tally
    ):
        return None
    *taken, refused, freed = tally.tolist()
    for state, count in enumerate(taken):
        window.counts[state] -= count
    acked = sum(taken)
    window.counts[ACKED] += acked
    window.freed |= freed > 0
    return acked, refused


def sound(ranges: Ranges) -> Offsets:
    """The ranges as contiguous int64[m][2], without those that are empty, reversed or no offsets."""
    signed = np.ascontiguousarray(ranges).view(np.int64)
    starts, ends = signed[:, 0], signed[:, 1]
    possible = (starts >= 0) & (starts < ends) & (ends <= _OFFSET_MAX)
    return signed if possible.all() else signed[possible]


def in_flight_at(window: Window, seat: int, ranges: Ranges) -> Offsets:
    """Return the offsets of the ranges that the consumer at ``seat`` has in flight: int64[m], ascending.

    ANY_SEAT stands for every consumer.
    """
    if seat == NO_SEAT or not len(ranges):
        return np.empty(0, np.int64)
    if len(ranges) == 1:
        start, end = ranges[0].tolist()
        if end - start == 1:
            if not window.floor <= start < window.next or window.state[start & window.mask] != IN_FLIGHT:
                return np.empty(0, np.int64)
            if seat != ANY_SEAT and window.owner[start & window.mask] != seat:
                return np.empty(0, np.int64)
            return np.array([start], np.int64)
    offsets = offsets_in(sound(ranges), window.floor, window.next)
    index = offsets & window.mask
    mine = window.state[index] == IN_FLIGHT
    if seat != ANY_SEAT:
        mine &= window.owner[index] == seat
    chosen: Offsets = offsets[mine]
    return chosen


def by_owner(window: Window, offsets: Offsets) -> list[tuple[int, int, int]]:
    """``(seat, lowest offset, records)`` for each seat that has some of ``offsets`` (ascending) in flight."""
    if len(offsets) == 1:
        offset = int(offsets[0])
        return [(int(window.owner[offset & window.mask]), offset, 1)]
    seats, first, counts = np.unique(
        window.owner[offsets & window.mask], return_index=True, return_counts=True
    )
    return list(zip(seats.tolist(), offsets[first].tolist(), counts.tolist(), strict=True))


def named_count(ranges: Offsets) -> int:
    """How many records sound ranges name; one counts at most 2**40."""
    return int(np.minimum(ranges[:, 1] - ranges[:, 0], _COUNTED_PER_RANGE_MAX).sum())


def offsets_in(ranges: Offsets, low: int, high: int) -> Offsets:
    """Offsets of ``low .. high`` that any of the sound ranges names: int64[m], ascending, each once."""
    starts, ends = np.maximum(ranges[:, 0], low), np.minimum(ranges[:, 1], high)
    inside = ends > starts
    starts, ends = starts[inside], ends[inside]
    if not len(starts):
        return np.empty(0, np.int64)
    if (starts[1:] < ends[:-1]).any():
        # Ranges that overlap or go back: sort, and let each begin where all before it have ended.
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        starts[1:] = np.maximum(starts[1:], ends[:-1])
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
