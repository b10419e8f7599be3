"""When a record is granted again: delays, a bounded table of moments, and dead letters in waiting."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

from danube.core.dispatch.grants import DeadLetter
from danube.core.partition.policy import FailurePolicy
from danube.errors import broken

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
    """Moments, coarsened so that there are never many.

    A moment gathers what falls into the same cell of about 1/64 of its delay and comes up with the
    latest of them: nothing is early, nothing later than that, and a single record is exact.  There
    are at most about 130 cells for each power of two of the delay in use, whatever the records.
    """

    __slots__ = ("_by_cell", "_next_ns", "_next_stamp", "_stamps")

    def __init__(self) -> None:
        self._by_cell: dict[tuple[int, int], Moment] = {}
        self._stamps: set[int] = set()
        self._next_stamp = 0
        self._next_ns: int | None = None

    def __len__(self) -> int:
        return len(self._by_cell)

    @property
    def next_ns(self) -> int | None:
        """When something comes up next; never later than that, sometimes earlier."""
        return self._next_ns

    def add(self, now_ns: int, delay_ns: int, start: int, end: int) -> int:
        """Note that ``start .. end`` (or some of it) comes up after a delay; return the stamp to bear."""
        at_ns = now_ns + delay_ns
        grain = max((delay_ns >> 6).bit_length() - 1, 20)
        cell = (grain, at_ns >> grain)
        moment = self._by_cell.get(cell)
        if moment is None:
            moment = self._by_cell[cell] = Moment(at_ns, self._new_stamp(), start, end)
            if self._next_ns is None or at_ns < self._next_ns:
                self._next_ns = at_ns
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
        if self._next_ns is None or now_ns < self._next_ns:
            return []
        come: list[Moment] = []
        for cell, moment in list(self._by_cell.items()):
            if moment.at_ns <= now_ns or moment.end <= floor:
                del self._by_cell[cell]
                self._stamps.discard(moment.stamp)
                if moment.end > floor:
                    come.append(moment)
        self._next_ns = min((moment.at_ns for moment in self._by_cell.values()), default=None)
        come.sort(key=lambda moment: moment.at_ns)
        return come

    def clear(self) -> None:
        self._by_cell.clear()
        self._stamps.clear()
        self._next_ns = None


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
        """It was not stored: try again after 1 s, 2 s, 4 s ... 60 s."""
        attempt = self._attempts[offset] = self._attempts.get(offset, 0) + 1
        delay_ms = min(_DEAD_LETTER_DELAY_MS << min(attempt - 1, 10), _DEAD_LETTER_DELAY_MAX_MS)
        heapq.heappush(self._later, (now_ns + delay_ms * MS, offset))

    @property
    def next_ns(self) -> int | None:
        return self._later[0][0] if self._later else None

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
