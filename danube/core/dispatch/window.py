"""The window of a reliable subscription: one state per offset from ``floor`` to ``next``.

Arrays are rings indexed by ``offset & mask`` and double as the window widens; nothing is kept per
record outside them.  A range of offsets is one or two slices, a set of offsets one index array.

    FREE       not in the window
    ACKED      done; the floor passes it
    IN_FLIGHT  granted to ``owner``, deadline in ``stamp``
    RETRY      nacked or timed out, waits for its time (``stamp``)
    READY      may be granted again now
    HELD       key-shared: never granted, its key is busy elsewhere
    DEAD       used up, waits to be taken as a dead letter
    BURIED     taken as a dead letter, not yet stored there
    BLOCKED    used up, stops its subscription (or its key) until it is unblocked
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from danube.core.dispatch.cursor import ranges_of
from danube.core.dispatch.grants import Offsets
from danube.core.dispatch.key_table import Keys, KeyTable
from danube.errors import broken

FREE: Final = 0
ACKED: Final = 1
IN_FLIGHT: Final = 2
RETRY: Final = 3
READY: Final = 4
HELD: Final = 5
DEAD: Final = 6
BURIED: Final = 7
BLOCKED: Final = 8
STATES: Final = 9
DELIVERIES_MAX: Final = 65_535
_CAPACITY_FIRST: Final = 256
_SCAN_FIRST: Final = 64
_SCAN_MAX: Final = 65_536
_STATE_BY_ANSWER: Final = np.array([ACKED, HELD, IN_FLIGHT], np.uint8)  # SKIPPED, REFUSED, a seat

Seats = npt.NDArray[np.int16]


class Window:
    """States, owners (seats), deliveries and stamps of the offsets ``floor .. next``."""

    __slots__ = ("_span_peak", "counts", "deliveries", "floor", "freed", "key", "keys", "mask", "next",
                 "owner", "ready_from", "stamp", "state")  # fmt: skip

    def __init__(self, floor: int, keys: KeyTable | None) -> None:
        self.floor = floor
        self.next = floor
        self.counts = [0] * STATES
        self.keys = keys
        self.ready_from = floor  # no offset below is READY
        self.freed = False  # a record that waits for its key may go on; cleared by its reader
        self._span_peak = 0
        self._allocate(_CAPACITY_FIRST)

    def _allocate(self, capacity: int) -> None:
        self.mask = capacity - 1
        self.state: npt.NDArray[np.uint8] = np.zeros(capacity, np.uint8)
        self.owner: npt.NDArray[np.int16] = np.full(capacity, -1, np.int16)
        self.deliveries: npt.NDArray[np.uint16] = np.zeros(capacity, np.uint16)
        self.stamp: npt.NDArray[np.uint16] = np.zeros(capacity, np.uint16)
        self.key: npt.NDArray[np.int32] = np.zeros(capacity if self.keys is not None else 1, np.int32)

    @property
    def outstanding(self) -> int:
        """Records of the window that are not acked."""
        return self.next - self.floor - self.counts[ACKED]

    def reset(self, floor: int) -> None:
        """Forget everything and start at ``floor``."""
        self.floor = self.next = self.ready_from = floor
        self.counts = [0] * STATES
        self._span_peak = 0
        self.freed = False
        if self.keys is not None:
            self.keys.reset()
        self._allocate(_CAPACITY_FIRST)

    def slices(self, start: int, end: int) -> tuple[slice, ...]:
        """Return the slices of ``start .. end`` in the rings: one, or two around the end."""
        first = start & self.mask
        last = first + end - start
        if last <= self.mask + 1:
            return (slice(first, last),)
        return slice(first, self.mask + 1), slice(0, last - self.mask - 1)

    def grant_new(self, end: int, seats: int | Seats, stamp: int) -> None:
        """Take ``next .. end`` into the window, in flight at ``seats`` (one, or int16[n])."""
        start = self.next
        if end - self.floor > self._span_peak:
            self._widen(end)
        else:
            self.next = end
        if end - start == 1:
            index = start & self.mask
            self.state[index] = IN_FLIGHT
            self.owner[index] = seats if isinstance(seats, int) else seats[0]
            self.deliveries[index] = 1
            self.stamp[index] = stamp
        else:
            done = 0
            for part in self.slices(start, end):
                count = part.stop - part.start
                self.state[part] = IN_FLIGHT
                self.owner[part] = seats if isinstance(seats, int) else seats[done : done + count]
                self.deliveries[part] = 1
                self.stamp[part] = stamp
                done += count
        self.counts[IN_FLIGHT] += end - start

    def take(self, offsets: Offsets, seats: Seats, stamp: int, keys: Keys | None = None) -> None:
        """Take all offsets up to the last of ``offsets`` into the window.  Each of ``offsets`` (ascending,
        from ``next`` up) gets its state: a seat, REFUSED or SKIPPED. The offsets between them count as acked.

        A key-shared window needs ``keys``.
        """
        start, end = self.next, int(offsets[-1]) + 1
        self._widen(end)
        if len(offsets) < end - start:
            self._mark_acked(start, end)
            self.counts[ACKED] -= len(offsets)
        index = offsets & self.mask
        granted = seats >= 0
        state = _STATE_BY_ANSWER[np.minimum(seats, 0) + 2]
        self.state[index] = state
        self.owner[index] = seats
        self.deliveries[index] = granted
        self.stamp[index] = stamp
        if keys is not None:
            self.key[index] = keys
        for name, count in enumerate(np.bincount(state, minlength=STATES).tolist()):
            self.counts[name] += count

    def take_acked(self, end: int) -> None:
        """Take ``next .. end`` into the window as acked; an empty window just moves past it."""
        if self.floor == self.next:
            self.floor = self.next = end
            return
        start = self.next
        self._widen(end)
        self._mark_acked(start, end)

    def _mark_acked(self, start: int, end: int) -> None:
        for part in self.slices(start, end):
            self.state[part] = ACKED
            if self.keys is not None:
                self.key[part] = 0  # not the key number of a former record
        self.counts[ACKED] += end - start

    def _widen(self, end: int) -> None:
        span = end - self.floor
        if span > self.mask + 1:
            self._resize(span)
        if span > self._span_peak:
            self._span_peak = span
        self.next = end

    def move(self, offsets: Offsets, new: int) -> None:
        """Change the state of these offsets (int64[n], distinct, in the window); never to HELD."""
        index = offsets & self.mask
        old = self.state[index]
        self.state[index] = new
        for state, count in enumerate(np.bincount(old, minlength=STATES).tolist()):
            self.counts[state] -= count
        self.counts[new] += len(offsets)
        if self.keys is not None:
            self.freed |= self.keys.move(self.key[index], old, new) or new == READY
        if new == READY and len(offsets):
            self.ready_from = min(self.ready_from, int(offsets.min()))

    def grant_again(self, offsets: Offsets, seats: Seats, stamp: int, old: int) -> npt.NDArray[np.uint16]:
        """Put offsets that are all in state ``old`` in flight; return how often each was delivered before.

        For a key-shared window the key table has counted them already.
        """
        index = offsets & self.mask
        before: npt.NDArray[np.uint16] = self.deliveries[index]
        self.state[index] = IN_FLIGHT
        self.owner[index] = seats
        self.stamp[index] = stamp
        self.deliveries[index] = np.minimum(before, DELIVERIES_MAX - 1) + np.uint16(1)
        self.counts[old] -= len(offsets)
        self.counts[IN_FLIGHT] += len(offsets)
        return before

    def _resize(self, span: int) -> None:
        """Make room for ``span`` offsets; a power of two, so that an offset is masked to its place."""
        offsets = np.arange(self.floor, self.next, dtype=np.int64)
        old_index = offsets & self.mask
        old: list[npt.NDArray[Any]] = [self.state, self.owner, self.deliveries, self.stamp, self.key]
        self._allocate(max(_CAPACITY_FIRST, 1 << (span - 1).bit_length()))
        new_index = offsets & self.mask
        new: list[npt.NDArray[Any]] = [self.state, self.owner, self.deliveries, self.stamp, self.key]
        for old_array, new_array in zip(old, new, strict=True):
            if len(new_array) > self.mask:
                new_array[new_index] = old_array[old_index]

    def trim(self) -> None:
        """Give memory back when the window has stayed much smaller than its arrays since last time."""
        span = self.next - self.floor
        if self._span_peak * 8 < self.mask and span * 8 < self.mask and self.mask >= 8 * _CAPACITY_FIRST:
            self._resize(max(self._span_peak, span, 1) * 2)
        self._span_peak = span

    def pass_acked(self, start: int, end: int) -> None:
        """``start .. end`` are acked: move the floor to their end if it stands at or after their start."""
        if start <= self.floor < end:
            self.counts[ACKED] -= end - self.floor
            self.floor = end

    def advance(self) -> bool:
        """Move the floor over the acked prefix; return whether it moved."""
        floor, end, mask, state = self.floor, self.next, self.mask, self.state
        if floor == end or state[floor & mask] != ACKED:
            return False
        step = _SCAN_FIRST
        while floor < end:
            first = floor & mask
            last = min(first + step, mask + 1, first + end - floor)
            open_here = state[first:last] != ACKED
            gap = int(open_here.argmax())
            if open_here[gap]:
                floor += gap
                break
            floor += last - first
            step = min(step * 8, _SCAN_MAX)
        self.counts[ACKED] -= floor - self.floor
        self.floor = floor
        return True

    def renumber(self, moved: Keys) -> None:
        """The key table was built anew: change the keys' numbers."""
        for part in self.slices(self.floor, self.next):
            self.key[part] = moved[self.key[part]]

    def find(self, wanted: int, start: int, count_max: int) -> Offsets:
        """Offsets in state ``wanted`` from ``start`` up: the lowest ``count_max``, ascending."""
        position = max(start, self.floor)
        missing = min(count_max, self.counts[wanted])
        found: list[Offsets] = []
        step = _SCAN_FIRST
        while missing > 0 and position < self.next:
            first = position & self.mask
            last = min(first + step, self.mask + 1, first + self.next - position)
            here = np.flatnonzero(self.state[first:last] == wanted)
            if len(here):
                found.append(here[:missing] + position)
                missing -= len(here)
            position += last - first
            step = min(step * 4, _SCAN_MAX)
        if not found:
            return np.empty(0, np.int64)
        return (found[0] if len(found) == 1 else np.concatenate(found)).astype(np.int64, copy=False)

    def select(self, start: int, end: int, state: int, stamp: int) -> Offsets:
        """Offsets of ``start .. end`` (clipped to the window) in ``state`` with ``stamp``."""
        start, end = max(start, self.floor), min(end, self.next)
        if start >= end:
            return np.empty(0, np.int64)
        found = []
        position = start
        for part in self.slices(start, end):
            chosen = (self.state[part] == state) & (self.stamp[part] == stamp)
            found.append(np.flatnonzero(chosen) + position)
            position += part.stop - part.start
        return np.concatenate(found).astype(np.int64, copy=False)

    def owned(self, seat: int) -> Offsets:
        """Offsets in flight at ``seat``, ascending."""
        found = []
        position = self.floor
        for part in self.slices(self.floor, self.next):
            chosen = (self.state[part] == IN_FLIGHT) & (self.owner[part] == seat)
            found.append(np.flatnonzero(chosen) + position)
            position += part.stop - part.start
        return np.concatenate(found).astype(np.int64, copy=False)

    def acked_ranges(self, ranges_max: int) -> Offsets:
        """The first ``ranges_max`` acked ranges above the floor, int64[n][2]."""
        if not self.counts[ACKED]:
            return np.empty((0, 2), np.int64)
        acked = np.concatenate([self.state[part] == ACKED for part in self.slices(self.floor, self.next)])
        return ranges_of(acked, self.floor, ranges_max)

    def check(self) -> None:
        """Raise InvariantBroken where counts and arrays differ."""
        states = np.concatenate([self.state[part] for part in self.slices(self.floor, self.next)])
        counted = np.bincount(states, minlength=STATES).tolist()
        if counted != self.counts:
            broken("window counts differ from its states", counts=self.counts, states=counted)
        if len(states) and states[0] == ACKED:
            broken("the floor stopped before an acked record", floor=self.floor)
        if self.keys is not None:
            index = np.arange(self.floor, self.next, dtype=np.int64) & self.mask
            self.keys.check(self.key[index], self.state[index], self.owner[index])
        if self.next - self.floor > self.mask + 1:
            broken("the window is wider than its arrays", floor=self.floor, next=self.next)
