"""Kernels of the key-shared window: find keys, give their records to seats, count them anew.

One pass over plain arrays each, explained in :mod:`danube.core.dispatch.key_table`.  They are ordinary
functions, which are called as they are while there is no machine code.  The constants are those of
:mod:`danube.core.dispatch.window`, spelled out because a kernel knows no imports of other modules.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

_ACKED, _IN_FLIGHT, _RETRY, _READY, _HELD, _BLOCKED = 1, 2, 3, 4, 5, 8
_UNKNOWN, _NOBODY = -1, -2
_REFUSED, _SKIPPED = -1, -2

Array = np.ndarray[Any, Any]


def find_keys(
    hashes: Array, start: int, table: Array, used: Array, route: Array, room: int,
    positions: Array, seats: Array, filtered: bool, found: Array, added: Array,
) -> int:  # fmt: skip
    """Write each hash's place in ``table`` to ``found``, adding new ones while ``room`` lasts.

    Starts at ``start`` and returns where it stopped; ``added[0]`` is the number of new keys.
    """
    mask = len(table) - 1
    ring_size = len(positions)
    count = 0
    for i in range(start, len(hashes)):
        wanted = hashes[i]
        place = np.int64(wanted & np.uint64(mask))
        while used[place] and table[place] != wanted:
            place = (place + 1) & mask
        if not used[place]:
            if count == room:
                added[0] = count
                return i
            count += 1
            used[place] = 1
            table[place] = wanted
            route[place] = _UNKNOWN
            if ring_size == 0:
                route[place] = _NOBODY
            elif not filtered:
                position = wanted & np.uint64(0xFFFFFFFF)
                low, high = 0, ring_size
                while low < high:
                    middle = (low + high) >> 1
                    if positions[middle] < position:
                        low = middle + 1
                    else:
                        high = middle
                route[place] = seats[low if low < ring_size else 0]
        found[i] = place
    added[0] = count
    return len(hashes)


def assign_keys(
    keys: Array, old: int, limit: int, route: Array, owner: Array, counters: Array, credit: Array,
    ready: Array, out: Array,
) -> int:  # fmt: skip
    """Give records (their keys, in offset order) to seats; return how many were granted.

    ``out`` gets the seat, _REFUSED or _SKIPPED for each record.  ``old`` is the state they come
    from: FREE (new), HELD or READY.  Credit, owners and counters are updated.
    """
    granted = 0
    for i in range(len(keys)):
        key = keys[i]
        seat = route[key]
        out[i] = _REFUSED
        if seat == _NOBODY and old != _READY:
            out[i] = _SKIPPED
            if old == _HELD:
                counters[key, _HELD] -= 1
            continue
        blocked = counters[key, _BLOCKED] > 0
        if old != _READY:
            blocked = blocked or counters[key, _READY] + counters[key, _RETRY] > 0
            if old != _HELD:
                blocked = blocked or counters[key, _HELD] > 0
        if (
            seat < 0
            or blocked
            or granted == limit
            or credit[seat] == 0
            or ready[seat] == 0
            or (counters[key, _IN_FLIGHT] > 0 and owner[key] != seat)
        ):
            if old == 0:
                counters[key, _HELD] += 1
            continue
        out[i] = seat
        owner[key] = seat
        credit[seat] -= 1
        counters[key, _IN_FLIGHT] += 1
        if old != 0:
            counters[key, old] -= 1
        granted += 1
    return granted


def move_keys(keys: Array, old: Array, new: int, counters: Array) -> bool:
    """Count records that changed their state; True when a waiting record may go on now."""
    freed = False
    for i in range(len(keys)):
        key, was = keys[i], old[i]
        counters[key, was] -= 1
        if new != _ACKED:
            counters[key, new] += 1
        if was == _IN_FLIGHT:
            if counters[key, was] == 0 and counters[key, _HELD] + counters[key, _READY] > 0:
                freed = True
        elif counters[key, was] == 0 and counters[key, _HELD] + counters[key, _READY] > 0:
            freed = True
    return freed


def ack_ranges(
    ranges: Array, low: int, high: int, seat: int, state: Array, owner: Array, key: Array, counters: Array,
    tally: Array,
) -> bool:  # fmt: skip
    """Ack what ``ranges`` name in ``low .. high`` for the consumer at ``seat``.

    ``tally`` gets the records taken by the state they were in, then those refused, then how often a
    waiting record of the same key may go on.  False, and nothing done, if the ranges overlap or do
    not ascend.  ``counters`` is empty if there are no keys.
    """
    for i in range(1, len(ranges)):
        if ranges[i, 0] < ranges[i - 1, 1]:
            return False
    mask = len(state) - 1
    states = len(tally) - 2
    for i in range(len(ranges)):
        for offset in range(max(ranges[i, 0], low), min(ranges[i, 1], high)):
            index = offset & mask
            was = state[index]
            if was == _IN_FLIGHT and owner[index] != seat:
                tally[states] += 1
            elif was != _ACKED and was != _HELD and was != 0:
                state[index] = _ACKED
                tally[was] += 1
                if len(counters) > 0:
                    count = counters[key[index]]
                    count[was] -= 1
                    if count[was] == 0 and count[_HELD] + count[_READY] > 0:
                        tally[states + 1] += 1
    return True


SIGNATURES: Final = {
    find_keys: (
        "int64(const uint64[::1], int64, uint64[::1], uint8[::1], int16[::1], int64,"
        " const uint64[::1], const int16[::1], boolean, int32[::1], int64[::1])"
    ),
    assign_keys: (
        "int64(const int32[::1], int64, int64, const int16[::1], int16[::1], int32[:,::1], int64[::1],"
        " const uint8[::1], int16[::1])"
    ),
    move_keys: "boolean(const int32[::1], const uint8[::1], int64, int32[:,::1])",
    ack_ranges: (
        "boolean(const int64[:,::1], int64, int64, int64, uint8[::1], const int16[::1], const int32[::1],"
        " int32[:,::1], int64[::1])"
    ),
}
