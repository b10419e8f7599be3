"""Records that were not acked: deadlines, redelivery after a delay, and dead letters.

The first part decides when a record is granted again: delays, a bounded table of moments, and waiting dead
letters.

The second part estimates from a consumer's acks when it can have begun a record.

A consumer gets records in advance and begins them in the order of their offsets.  While it settles records
below an offset, it may not have begun that offset.  So a record's time counts from the last settled record
below it.  A consumer that is stuck at a record settles nothing below that record any more, although it may
settle higher ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from danube.core.dispatch.consumer_window import NEVER_NS
from danube.core.dispatch.grants import DeadLetter, Offsets
from danube.core.dispatch.window import (
    ACKED,
    BLOCKED,
    BURIED,
    DEAD,
    DELIVERIES_MAX,
    IN_FLIGHT,
    READY,
    RETRY,
    Window,
)
from danube.core.partition.policy import FailurePolicy
from danube.errors import broken

CELLS: Final = 64  # of the ack timeout; times in one cell are one step


class Begun:
    """Steps ``(offset, time)`` of each seat, both ascending: when it last settled a record up to there."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[int, int]]] = {}

    def settled(self, seat: int, offset: int, now_ns: int, timeout_ns: int) -> None:
        """The consumer at ``seat`` acked or nacked ``offset``; it is the lowest of those that it did now."""
        steps = self._steps.setdefault(seat, [])
        while steps and steps[-1][0] >= offset:
            steps.pop()
        cell_ns = max(timeout_ns // CELLS, 1)
        if steps and steps[-1][1] // cell_ns == now_ns // cell_ns:
            offset = steps.pop()[0]
        if steps and steps[0][1] <= now_ns - timeout_ns:  # too old to make anything later
            steps[:] = [step for step in steps if step[1] > now_ns - timeout_ns]
        steps.append((offset, now_ns))

    def since(self, seat: int, offsets: Offsets) -> npt.NDArray[np.int64]:
        """Return when a record below each of ``offsets`` was settled last; 0 without one."""
        steps = np.array([(0, 0), *self._steps.get(seat, ())], np.int64)
        since_ns: npt.NDArray[np.int64] = steps[np.searchsorted(steps[1:, 0], offsets), 1]
        return since_ns

    def leave(self, seat: int) -> None:
        self._steps.pop(seat, None)

    def clear(self) -> None:
        self._steps.clear()


MS: Final = 1_000_000
REASON_CHARS_MAX: Final = 256
_STAMPS: Final = 65_536
_DEAD_LETTER_DELAY_MS: Final = 1_000
_DEAD_LETTER_DELAY_MAX_MS: Final = 60_000


def redelivery_delay_ms(policy: FailurePolicy, deliveries: int, delay_ms: int) -> int:
    """Delay after the ``deliveries``-th delivery failed and the consumer asked for ``delay_ms``."""
    delay = policy.base_redelivery_delay_ms
    if policy.backoff == "exponential":
        # Beyond 2**40 ms every limit is passed; the shift must not grow with the attempts.
        delay <<= min(max(deliveries - 1, 0), 40)
    return min(max(delay, delay_ms), policy.max_redelivery_delay_ms)


@dataclass(slots=True)
class Moment:
    """Records of ``start .. end`` that bear ``stamp`` come up at ``at_ns``."""

    at_ns: int
    stamp: int
    start: int
    end: int


class Timetable:
    """Moments, rounded so that their number stays small.

    Records whose times fall into one cell, about 1/64 of the delay wide, share a moment: the latest of their
    times.  So no record is early, and a single record is exact.  There are at most about 130 cells for each
    power of two of the delays in use, however many records there are.
    """

    __slots__ = ("_by_cell", "_next_stamp", "_stamps", "next_ns")

    def __init__(self) -> None:
        self._by_cell: dict[tuple[int, int], Moment] = {}
        self._stamps: set[int] = set()
        self._next_stamp = 0
        self.next_ns = NEVER_NS  # nothing comes up before it, though perhaps nothing at it

    def add(self, now_ns: int, delay_ns: int, start: int, end: int) -> int:
        """Note that ``start .. end`` (or some of it) comes up after a delay; return the stamp to bear."""
        at_ns = now_ns + delay_ns
        grain = max((delay_ns >> 6).bit_length() - 1, 20)
        cell = (grain, at_ns >> grain)
        moment = self._by_cell.get(cell)
        if moment is None:
            moment = self._by_cell[cell] = Moment(at_ns, self._new_stamp(), start, end)
            if at_ns < self.next_ns:
                self.next_ns = at_ns
            return moment.stamp
        if at_ns > moment.at_ns:
            moment.at_ns = at_ns
        if start < moment.start:
            moment.start = start
        if end > moment.end:
            moment.end = end
        return moment.stamp

    def _new_stamp(self) -> int:
        if len(self._stamps) >= _STAMPS - 1:
            broken("the timetable has no stamp left", moments=len(self._by_cell))
        stamp = self._next_stamp
        while stamp in self._stamps:
            stamp = (stamp + 1) % _STAMPS
        self._stamps.add(stamp)
        self._next_stamp = (stamp + 1) % _STAMPS
        return stamp

    def take(self, now_ns: int, floor: int) -> list[Moment]:
        """Moments that have come, the earliest first; those wholly below ``floor`` are dropped."""
        if now_ns < self.next_ns:
            return []
        come: list[Moment] = []
        for cell, moment in list(self._by_cell.items()):
            if moment.at_ns <= now_ns or moment.end <= floor:
                del self._by_cell[cell]
                self._stamps.discard(moment.stamp)
                if moment.end > floor:
                    come.append(moment)
        self.next_ns = min((moment.at_ns for moment in self._by_cell.values()), default=NEVER_NS)
        come.sort(key=lambda moment: moment.at_ns)
        return come

    def clear(self) -> None:
        self._by_cell.clear()
        self._stamps.clear()
        self.next_ns = NEVER_NS


class DeadLetters:
    """Why records are dead, and when a dead letter that could not be stored is tried again.

    Kept per record, but only for records that used up their deliveries; bounded by the window.
    """

    __slots__ = ("_attempts", "_later", "_reasons")

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._attempts: dict[int, int] = {}
        self._later: list[tuple[int, int]] = []

    def add(self, offsets: list[int], reason: str) -> None:
        self._reasons.update(dict.fromkeys(offsets, reason[:REASON_CHARS_MAX]))

    def letter(self, offset: int, deliveries: int) -> DeadLetter:
        return DeadLetter(offset, deliveries, self._reasons.get(offset, ""))

    def forget(self, offset: int) -> None:
        self._reasons.pop(offset, None)
        self._attempts.pop(offset, None)

    def failed(self, offset: int, now_ns: int) -> None:
        """Schedule another attempt to store the dead letter: after 1 s, 2 s, 4 s ... 60 s."""
        attempt = self._attempts[offset] = self._attempts.get(offset, 0) + 1
        delay_ms = min(_DEAD_LETTER_DELAY_MS << min(attempt - 1, 10), _DEAD_LETTER_DELAY_MAX_MS)
        heapq.heappush(self._later, (now_ns + delay_ms * MS, offset))

    @property
    def next_ns(self) -> int:
        return self._later[0][0] if self._later else NEVER_NS

    def take(self, now_ns: int) -> list[int]:
        """Offsets to be tried again now."""
        come = []
        while self._later and self._later[0][0] <= now_ns:
            offset = heapq.heappop(self._later)[1]
            if offset in self._reasons:
                come.append(offset)
        return come

    @property
    def offsets(self) -> list[int]:
        return list(self._reasons)

    def clear(self) -> None:
        self._reasons.clear()
        self._attempts.clear()
        self._later.clear()


class Failures:
    """The failure policy of one subscription at work on its window.

    Counts: ``nacked``, ``timed_out`` (records), ``dropped`` and ``dead_lettered`` (acked that way).
    """

    def __init__(self, window: Window, policy: FailurePolicy) -> None:
        self.policy = policy
        self.nacked = self.timed_out = self.dropped = self.dead_lettered_count = 0
        self.begun = Begun()
        self._window = window
        self._timeouts = Timetable()
        self._retries = Timetable()
        self._dead = DeadLetters()

    def granted(self, start: int, end: int, now_ns: int) -> int:
        """Note the deadline of offsets in ``start .. end`` that are granted now; the stamp they bear."""
        return self._timeouts.add(now_ns, self.policy.ack_timeout_ms * MS, start, end)

    @property
    def next_ns(self) -> int:
        """The next moment at which something here may happen by itself; NEVER_NS without one."""
        next_ns = min(self._timeouts.next_ns, self._retries.next_ns)
        return min(next_ns, self._dead.next_ns) if self._window.counts[BURIED] else next_ns

    def pass_time(self, now_ns: int, timed_out: Callable[[Offsets, int], None]) -> bool:
        """Apply deadlines and delays that have come; True when the cursor may have moved.

        ``timed_out`` is told of records that are late, while they still are in flight.
        """
        window = self._window
        moved = False
        for moment in self._timeouts.take(now_ns, window.floor):
            late = window.select(moment.start, moment.end, IN_FLIGHT, moment.stamp)
            late = self._overdue(late, now_ns)
            if len(late):
                timed_out(late, now_ns)
                self.timed_out += len(late)
                moved |= self.fail(late, 0, f"not acked within {self.policy.ack_timeout_ms} ms", now_ns)
        for moment in self._retries.take(now_ns, window.floor):
            window.move(window.select(moment.start, moment.end, RETRY, moment.stamp), READY)
        again = [offset for offset in self._dead.take(now_ns) if self._state_of(offset) == BURIED]
        if again:
            window.move(np.array(sorted(again), np.int64), DEAD)
        return moved

    def _overdue(self, late: Offsets, now_ns: int) -> Offsets:
        """Return the offsets of ``late`` whose time is over; postpone the deadline of the others.

        A record's time runs from when its consumer can have begun with it, not from its grant.
        """
        window, timeout_ns = self._window, self.policy.ack_timeout_ms * MS
        owners = window.owner[late & window.mask]
        since_ns = np.zeros(len(late), np.int64)
        order = np.argsort(owners, kind="stable")
        for mine in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1):
            if len(mine):
                since_ns[mine] = self.begun.since(int(owners[mine[0]]), late[mine])
        waits = since_ns > now_ns - timeout_ns
        for begun_ns in np.unique(since_ns[waits]).tolist():
            waiting = late[waits & (since_ns == begun_ns)]
            start, end = int(waiting[0]), int(waiting[-1]) + 1
            window.stamp[waiting & window.mask] = self._timeouts.add(
                now_ns, begun_ns + timeout_ns - now_ns, start, end
            )
        return late[~waits]

    def settled(self, seat: int, offset: int, now_ns: int) -> None:
        """The consumer at ``seat`` acked or nacked ``offset``, the lowest of those that it did now."""
        self.begun.settled(seat, offset, now_ns, self.policy.ack_timeout_ms * MS)

    def fail(self, offsets: Offsets, delay_ms: int, reason: str, now_ns: int) -> bool:
        """Records in flight were nacked or are late; True when the cursor may have moved."""
        window = self._window
        deliveries = window.deliveries[offsets & window.mask].astype(np.int64)
        exhausted = deliveries > min(self.policy.max_redelivery_count, DELIVERIES_MAX - 1)
        moved = False
        if exhausted.any():
            moved = self._poison(offsets[exhausted], reason)
            offsets, deliveries = offsets[~exhausted], deliveries[~exhausted]
        attempts = np.unique(deliveries).tolist()
        for attempt in attempts:
            chosen = offsets if len(attempts) == 1 else offsets[deliveries == attempt]
            self._delay(chosen, redelivery_delay_ms(self.policy, attempt, delay_ms), now_ns)
        return moved

    def _delay(self, offsets: Offsets, delay_ms: int, now_ns: int) -> None:
        window = self._window
        if delay_ms == 0:
            window.move(offsets, READY)
            return
        stamp = self._retries.add(now_ns, delay_ms * MS, int(offsets.min()), int(offsets.max()) + 1)
        window.move(offsets, RETRY)
        window.stamp[offsets & window.mask] = stamp

    def _poison(self, offsets: Offsets, reason: str) -> bool:
        window = self._window
        if self.policy.poison == "drop":
            self.dropped += len(offsets)
            window.move(offsets, ACKED)
            window.advance()
            return True
        if self.policy.poison == "block":
            window.move(offsets, BLOCKED)
        else:
            self._dead.add(offsets.tolist(), reason)
            window.move(offsets, DEAD)
        return False

    def unblock(self) -> int:
        """Blocked records are ready again as if never delivered; return how many."""
        window = self._window
        blocked = window.find(BLOCKED, window.floor, window.counts[BLOCKED])
        window.deliveries[blocked & window.mask] = 0
        window.move(blocked, READY)
        return len(blocked)

    # -- dead letters ------------------------------------------------------------------------------

    def take_dead_letters(self, limit: int) -> list[DeadLetter]:
        """Take up to ``limit`` dead records that are not being stored yet, in offset order."""
        window = self._window
        taken = window.find(DEAD, window.floor, limit)
        if not len(taken):
            return []
        window.move(taken, BURIED)
        deliveries = window.deliveries[taken & window.mask].tolist()
        return [self._dead.letter(*each) for each in zip(taken.tolist(), deliveries, strict=True)]

    def dead_lettered(self, offset: int) -> bool:
        """The dead letter is stored: its record is acked.  False when it was acked before."""
        self._dead.forget(offset)
        if self._state_of(offset) not in (DEAD, BURIED):
            return False
        self.dead_lettered_count += 1
        self._window.move(np.array([offset], np.int64), ACKED)
        self._window.advance()
        return True

    def dead_letter_failed(self, offset: int, now_ns: int) -> None:
        """The dead letter could not be stored: it is offered again after a delay that doubles."""
        if self._state_of(offset) == BURIED:
            self._dead.failed(offset, now_ns)

    def forget_acked(self) -> None:
        """Dead records may have been acked by their consumers after all."""
        for offset in self._dead.offsets:
            if self._state_of(offset) not in (DEAD, BURIED):
                self._dead.forget(offset)

    def _state_of(self, offset: int) -> int:
        window = self._window
        if not window.floor <= offset < window.next:
            return ACKED
        return int(window.state[offset & window.mask])

    def clear(self) -> None:
        """Forget everything in the window (seek)."""
        self.begun.clear()
        self._timeouts.clear()
        self._retries.clear()
        self._dead.clear()
