"""A reliable subscription that skips offsets without records, and delivers records that come back later.

The window has no places for skipped offsets (:mod:`danube.core.dispatch.course`). So no delivery waits at a
gap or a hole, even if records before it are not acked.  This class is the border: callers use offsets, the
subscription below uses places.

A hole is a range of offsets whose records, if any, are only on an absent disk.  The subscription skips it and
*withholds* it: the range is neither delivered nor acked.  ``ack_floor`` stays at or before the start of the
hole, so the cursor keeps the hole and returned records are not missed.  Returned records are delivered next,
before new ones: the course goes back to them and then continues at the *frontier*, where it was before.

Records on each side of a hole are in offset order.  A hole changes only this: returned records come after
records with higher offsets.  One window and one table of keys hold all records, so no key is ever at two
consumers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np

from danube.core.dispatch.acks import Ranges, named_count, sound
from danube.core.dispatch.course import OFFSETS_END, SPAN_LIMIT, Course
from danube.core.dispatch.cursor import CursorState, SkipRanges
from danube.core.dispatch.grants import (
    AckResult,
    DeadLetter,
    Grant,
    Mode,
    Offsets,
    between,
    closed_up,
    joined,
    no_ranges,
    size_of,
    within,
    without,
)
from danube.core.dispatch.subscription import GRANTS_MAX, Hashes, KeyOf, Subscription
from danube.core.dispatch.window import ACKED, HELD, READY, RETRY
from danube.core.partition.policy import FailurePolicy
from danube.errors import broken
from danube.limits import ACKED_RANGES_STORED_MAX

__all__ = ["GIVEN_UP", "UNUSED", "HoledSubscription"]

GIVEN_UP = "given_up"
UNUSED = "unused"
# A range with fewer offsets gets places, which costs less than a piece of the course.  A wide window skips
# nearly all such ranges, so that its width depends on records only.
PASSED_MIN: Final = 4_096
PASSED_MIN_WIDE: Final = 8
WIDE_SPAN: Final = SPAN_LIMIT // 4


class HoledSubscription(Subscription):
    """See the module.  ``withheld`` lies below the frontier; ``ack_floor`` stays below it."""

    def __init__(
        self, name: str, mode: Mode, state: CursorState, *, max_unacked: int, failure: FailurePolicy
    ) -> None:
        super().__init__(name, mode, state, max_unacked=max_unacked, failure=failure)
        self._course = Course()
        self._passed_min = PASSED_MIN
        self._withheld = no_ranges()
        self._returned = no_ranges()  # of the withheld ones: delivered next
        self._back_end = 0  # where what is delivered now of what came back ends; 0: the frontier is at next
        self._frontier = 0  # where it goes on then
        self._parked = no_ranges()  # what must not be granted from the frontier on
        self._log_end = 0  # of what was available, the highest
        self._ask_key: KeyOf | None = None
        self._counters |= {UNUSED: 0, GIVEN_UP: 0}

    @property
    def next(self) -> int:
        """The offset that is to be granted next, of those that never were."""
        return self._course.offset(self._window.next) if self._course.count else self._window.next

    @property
    def ack_floor(self) -> int:
        floor = self._unacked_from
        return min(floor, int(self._withheld[0, 0])) if len(self._withheld) else floor

    @property
    def settled_end(self) -> int:
        floor = self._unacked_from
        return min(floor, int(self._returned[0, 0])) if len(self._returned) else floor

    @property
    def _unacked_from(self) -> int:
        """The lowest offset that was granted and is not acked, or is to be granted next."""
        course, window = self._course, self._window
        if not course.count:
            return window.floor
        lowest = min(course.offset(window.floor), self.next)
        for turn, end in pairwise([*course.turns, window.next]):
            lowest = min(lowest, self._unacked_within(max(turn, window.floor), end))
        return lowest

    def _unacked_within(self, start: int, end: int) -> int:
        """The offset of the first place of ``start .. end`` that is not acked; OFFSETS_END without one."""
        for part in self._window.slices(start, end) if start < end else ():
            unacked = np.flatnonzero(self._window.state[part] != ACKED)
            if len(unacked):
                return self._course.offset(start + int(unacked[0]))
            start += part.stop - part.start
        return OFFSETS_END

    @property
    def left_from(self) -> int:
        left = self._left_on_course if self._course.count else super().left_from
        return min(left, int(self._withheld[0, 0])) if len(self._withheld) else left

    @property
    def _left_on_course(self) -> int:
        window, lowest = self._window, self.next
        if self._ahead.count and self._ahead.first[0] <= window.next:
            lowest = self._course.offset(max(self._ahead.first[1], window.next))
        for state in (RETRY, READY, HELD):
            count = window.counts[state] if self._course.turns else min(window.counts[state], 1)
            if count:
                found = self._course.offsets(window.find(state, window.floor, count))
                lowest = min(lowest, int(found.min()))
        return lowest

    @property
    def withheld(self) -> Offsets:
        """int64[n][2]: ranges that are neither acked nor can be delivered now."""
        return self._withheld

    # -- granting ---------------------------------------------------------------------------------

    def grant(
        self,
        available_end: int,
        now_ns: int,
        hashes: Hashes | None = None,
        hashes_start: int = 0,
        key_of: KeyOf | None = None,
    ) -> list[Grant]:
        plain = not self._ahead.count and not self._course.count and not self._back_end
        if plain and self._keys is None:
            return self._grant_run(available_end, now_ns)
        if key_of is not None:
            self._ask_key, key_of = key_of, self._key_at
        if plain:
            return super().grant(available_end, now_ns, hashes, hashes_start, key_of)
        self._note_end(available_end)
        available_end = min(available_end, self._back_end or OFFSETS_END)
        grants: list[Grant] = []
        before = -1
        while before < self.next < available_end and len(grants) < GRANTS_MAX:
            before = self.next
            self._choose_passed_min()
            if self._ahead.count:
                self._pass_ahead(self._window.next)
            start = self._course.next_place(hashes_start)
            granted = super().grant(self._reach(available_end), now_ns, hashes, start, key_of)
            grants += self._course.grants(granted)
        self._go_on()
        self._follow_end()
        return grants

    def _reach(self, available_end: int) -> int:
        """Return where granting below ``available_end`` ends: there, or before skipped offsets."""
        stop = self._course.next_place(available_end)
        if self._ahead.count:
            window, ranges = self._window, self._ahead.ranges
            passed = ranges[ranges[:, 1] - ranges[:, 0] >= self._passed_min, 0]
            if len(passed):
                stop = min(stop, max(int(passed[0]), window.next))
            if self._passed_min == PASSED_MIN:
                stop = min(stop, window.floor + WIDE_SPAN)
        return stop

    def _key_at(self, place: int) -> bytes:
        return b"" if self._ask_key is None else self._ask_key(self._course.offset(place))

    def due(self, now_ns: int, limit: int) -> list[Grant]:
        grants = super().due(now_ns, limit)
        return self._course.grants(grants) if self._course.count else grants

    def give_back(self, grant: Grant, start: int) -> int:
        if not self._course.count:
            return super().give_back(grant, start)
        offsets = grant.within(max(start, grant.start), grant.end)
        places = self._places(np.stack((offsets, offsets + 1), axis=1))[:, 0]
        if not len(places):
            return 0
        first = int(places[0])
        return super().give_back(grant._replace(start=first, end=int(places[-1]) + 1, offsets=places), first)

    # -- passing over -----------------------------------------------------------------------------

    def _choose_passed_min(self) -> None:
        span = self._window.next - self._window.floor
        self._passed_min = PASSED_MIN if span < WIDE_SPAN else PASSED_MIN_WIDE

    def _pass_ahead(self, available_end: int) -> int:
        """Like the base class, but wide ranges get no places."""
        window = self._window
        if self._ahead.count and window.floor != window.next:
            start, end = self._ahead.first
            if start <= window.next and end - window.next >= self._passed_min:
                self._pass_over(end)
        return super()._pass_ahead(available_end)

    def _pass_over(self, end: int) -> None:
        """Continue at the offset whose place would be ``end``; offsets before it get no places."""
        self._note_end()
        window = self._window
        offset = self._course.offset(end)
        self._ahead = SkipRanges(closed_up(self._ahead.ranges, window.next, end))
        self._gaps.close_up(window.next, end)
        self._turn_to(offset)

    def _turn_to(self, offset: int) -> None:
        """The next piece of the course begins at ``offset``."""
        self._course.begin(self._window.next, offset)
        self._course.forget_below(self._window.floor)
        self._follow_end()

    def _note_end(self, available_end: int = 0) -> None:
        if not self._course.count and not self._back_end:
            available_end = max(available_end, self._available_end)
        self._log_end = max(self._log_end, available_end)

    def _follow_end(self) -> None:
        """Set the end of the available records, as a place."""
        self._available_end = self._end_of(self._log_end)

    def _end_of(self, log_end: int) -> int:
        if not self._back_end:
            return self._course.next_place(log_end)
        back_end = self._course.next_place(self._back_end)
        return back_end + size_of(self._returned) + max(log_end - self._frontier, 0)

    def _straighten(self) -> None:
        """Where nothing is granted and unacked, places may be offsets again."""
        window, course = self._window, self._course
        if not course.count:
            return
        if window.floor != window.next:
            course.forget_below(window.floor)
            return
        ahead = self._offsets_ahead()
        window.reset(self.next)
        self._failures.clear()
        self._gaps.clear()
        course.clear()
        self._ahead = SkipRanges(ahead)
        self._follow_end()
        window.freed = True

    def _offsets_ahead(self) -> Offsets:
        """Return as offsets the ranges that are acked beyond the window in its present piece."""
        return self._ahead.ranges + (self.next - self._window.next)

    # -- holes ------------------------------------------------------------------------------------

    def withhold(self, hole_end: int) -> None:
        """``next .. hole_end`` is an open hole: go on behind it."""
        self._straighten()
        at = self.next
        if self._back_end:
            hole_end = min(hole_end, self._back_end)
        if hole_end <= at:
            return
        missing = between(self._offsets_ahead(), at, hole_end)  # its acked offsets stay acked
        self._withheld = joined(np.concatenate((self._withheld, missing)))
        if self._window.floor == self._window.next:
            self._window.take_acked(hole_end)
            self._ahead.drop_below(hole_end)
        else:
            self._pass_over(self._course.next_place(hole_end))
        self._window.freed = True
        self._moved()
        self._go_on()

    def follow_holes(
        self, open_holes: Offsets, unused: Offsets | None = None, given_up: Offsets | None = None
    ) -> None:
        """Follow the current holes; all three arguments are ranges, int64[n][2].

        Withheld ranges that are unused or given up count as acked; those that are in no hole any more
        have come back.
        """
        for settled, why in ((unused, UNUSED), (given_up, GIVEN_UP)):
            if settled is not None and len(settled) and len(self._withheld):
                gone = without(self._withheld, without(self._withheld, settled))
                if len(gone):
                    self.skip(gone, why)
        self._returned = without(self._withheld, open_holes)
        self._go_on()

    def _go_on(self) -> None:
        """Continue at the returned records, and at the frontier when those are granted."""
        if not self._back_end and not len(self._returned):
            return
        moved = False
        while self.next >= self._back_end and (self._back_end or len(self._returned)):
            self._note_end()
            self._straighten()
            if not self._back_end:
                self._frontier, self._parked = self.next, self._offsets_ahead()
            if len(self._returned):
                start, self._back_end = self._returned[0].tolist()
                self._returned = self._returned[1:]
                self._withheld = without(self._withheld, np.array([[start, self._back_end]], np.int64))
                self._go_to(start, no_ranges())
            else:
                self._back_end = 0
                self._go_to(self._frontier, self._parked)
            moved = True
        if moved:
            self._window.freed = True
            self._moved()
            self._straighten()

    def _go_to(self, offset: int, ahead: Offsets) -> None:
        window = self._window
        self._turn_to(offset)
        ahead = ahead + (window.next - offset)
        self._ahead = SkipRanges(ahead)
        self._gaps.close_up(window.next, OFFSETS_END)
        self._gaps.add(ahead, window.floor)

    def skip(self, ranges: Offsets, why: str) -> int:
        plain = not self._course.count and not self._back_end
        if plain and not len(self._withheld):
            settled = super().skip(ranges, why)
            self._straighten()
            return settled
        ranges = joined(ranges)
        self._skip_withheld(ranges, why)
        settled = super().skip(self._places(ranges), why)
        if self._back_end:
            beyond = within(ranges, self._frontier, OFFSETS_END)
            parked = joined(np.concatenate((self._parked, beyond)))
            self._counters[why] += size_of(parked) - size_of(self._parked)
            settled += size_of(parked) - size_of(self._parked)
            self._parked = parked
        self._go_on()
        self._straighten()
        return settled

    def _skip_withheld(self, ranges: Offsets, why: str) -> None:
        before = size_of(self._withheld)
        self._withheld = without(self._withheld, ranges)
        self._returned = without(self._returned, ranges)
        gone = before - size_of(self._withheld)
        if gone:
            self.version += 1
            if why == GIVEN_UP:
                self._counters[why] += gone

    def _settle(self, ranges: Offsets) -> int:
        self._choose_passed_min()
        return super()._settle(ranges)

    def seek(self, offset: int, log_end: int, now_ns: int) -> None:
        self._note_end(log_end)
        self._withheld = self._returned = self._parked = no_ranges()
        self._back_end = 0
        self._course.clear()
        super().seek(offset, log_end, now_ns)
        self._follow_end()

    # -- what became of them -----------------------------------------------------------------------

    def _places(self, ranges: Ranges) -> Offsets:
        """Return the places of ranges of offsets; behind a returned record place and offset differ."""
        if not self._course.count:
            return within(ranges, 0, self._back_end) if self._back_end else ranges
        return self._course.places(ranges, self._back_end or OFFSETS_END)

    def ack(self, consumer_id: int | None, ranges: Ranges, now_ns: int) -> AckResult:
        if not self._course.count:
            return super().ack(consumer_id, ranges, now_ns)
        named = sound(ranges)
        result = super().ack(consumer_id, self._places(named), now_ns)
        ignored = named_count(named) - result.acked - result.refused
        self._counters["ack_ignored"] += ignored - result.ignored
        self._straighten()
        return result._replace(ignored=ignored)

    def nack(self, consumer_id: int | None, ranges: Ranges, delay_ms: int, reason: str, now_ns: int) -> int:
        places = self._places(sound(ranges)) if self._course.count else ranges
        return super().nack(consumer_id, places, delay_ms, reason, now_ns)

    def hand_back(self, consumer_id: int | None, ranges: Ranges) -> int:
        return super().hand_back(consumer_id, self._places(sound(ranges)) if self._course.count else ranges)

    def tick(self, now_ns: int, available_end: int = 0) -> int | None:
        if not self._course.count and not self._back_end:
            return super().tick(now_ns, available_end)
        self._note_end(available_end)
        self._follow_end()
        again_ns = super().tick(now_ns)
        self._straighten()
        return again_ns

    def take_dead_letters(self, limit: int) -> list[DeadLetter]:
        letters = super().take_dead_letters(limit)
        if not self._course.count:
            return letters
        return [letter._replace(offset=self._course.offset(letter.offset)) for letter in letters]

    def dead_lettered(self, offset: int) -> None:
        for place, _ in self._places(np.array([[offset, offset + 1]], np.int64)).tolist():
            super().dead_lettered(place)
        self._straighten()

    def dead_letter_failed(self, offset: int, now_ns: int) -> None:
        for place, _ in self._places(np.array([[offset, offset + 1]], np.int64)).tolist():
            super().dead_letter_failed(place, now_ns)

    # -- what is told -----------------------------------------------------------------------------

    def cursor_state(self) -> CursorState:
        """Return the progress to store; a withheld range counts as not acked."""
        if not self._course.count and not self._back_end and not len(self._withheld):
            return super().cursor_state()
        window = self._window
        acked = window.acked_ranges(ACKED_RANGES_STORED_MAX)
        unacked = self._course.offset_ranges(between(acked, window.floor, window.next))
        ahead, frontier, left = self._offsets_ahead(), self.next, no_ranges()
        if self._back_end:
            left = between(ahead, frontier, self._back_end)
            ahead, frontier = self._parked, self._frontier
        unacked = joined(np.concatenate((self._withheld, unacked, left)))
        floor = int(unacked[0, 0]) if len(unacked) else frontier
        acked = joined(np.concatenate((between(unacked, floor, frontier), ahead)))
        state = self._state
        return CursorState(
            state.mode, floor, acked[:ACKED_RANGES_STORED_MAX], state.max_unacked, state.failure
        )

    def statistics(self) -> dict[str, Any]:
        """Like the base class, with the number of withheld offsets and their first ranges."""
        numbers = super().statistics()
        blocked = np.array(numbers["blocked_offsets"], np.int64)
        return {
            **numbers,
            "ack_floor": self.ack_floor,
            "next": self.next,
            "blocked_offsets": self._course.offsets(blocked).tolist(),
            "withheld": size_of(self._withheld),
            "withheld_ranges": self._withheld[:100].tolist(),
        }

    def check(self) -> None:
        super().check()
        frontier = self._frontier if self._back_end else self.next
        ends = self._withheld.reshape(-1)
        if len(ends) and (ends[-1] > frontier or (np.diff(ends) <= 0).any()):
            broken("withheld ranges do not lie below the frontier", ranges=ends.tolist(), frontier=frontier)
        if self._back_end and not self.next < self._back_end <= frontier:
            broken("what came back does not lie before the frontier", next=self.next, end=self._back_end)
        if not self._back_end and len(self._returned):
            broken("what came back waits for nothing", ranges=self._returned.tolist())
        pieces = self._course.pieces
        if len(pieces) and ((np.diff(pieces[:, 0]) <= 0).any() or pieces[-1, 0] > self._window.next):
            broken("pieces of the course do not ascend", pieces=len(pieces), next=self._window.next)
        if len(self._course) and self._window.floor == self._window.next:
            broken("a course is kept for an empty window", pieces=len(pieces))
