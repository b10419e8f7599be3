"""Records that were not acked: deadlines, redelivery after a delay, and what happens when it is enough."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from danube.core.dispatch.begun import Begun
from danube.core.dispatch.grants import DeadLetter, Offsets
from danube.core.dispatch.redelivery import MS, DeadLetters, Timetable, redelivery_delay_ms
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
    def next_ns(self) -> int | None:
        """The next moment at which something here may happen by itself."""
        moments = (self._timeouts.next_ns, self._retries.next_ns, self._dead.next_ns)
        return min((moment for moment in moments if moment is not None), default=None)

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
        """Those of ``late`` that their consumers can have begun long ago; the others get a later deadline."""
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
        """Up to ``limit`` dead records that nobody is storing yet, in offset order."""
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
        """Everything in the window is forgotten (seek)."""
        self.begun.clear()
        self._timeouts.clear()
        self._retries.clear()
        self._dead.clear()

    @property
    def moment_count(self) -> int:
        return len(self._timeouts) + len(self._retries)
