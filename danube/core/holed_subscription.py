"""A reliable subscription that goes on behind holes, and comes back for what returns in them.

A hole is a range of offsets of which only a disk that is away knows records.  It is far wider than a window,
so the subscription *jumps*: once everything before the hole is acked it goes on behind it, and the hole is
*withheld*: not delivered, not acked.  ``ack_floor`` stays at its start, so the cursor keeps it and what comes
back is not missed.  What comes back makes it jump again, the other way: once everything granted is acked it
goes to the first record that came, delivers what was withheld and passes what it had delivered before.

Between the two nothing is in flight, so no key is ever at two consumers, and records of each side are in
offset order.  What comes back comes after records with higher offsets: that is all that a hole changes.
A jump waits for acks as long as a consumer or the failure policy lets them wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from danube.core.acks import Ranges
from danube.core.ahead import Ahead
from danube.core.cursor import CursorState
from danube.core.grants import AckResult, Mode, Offsets
from danube.core.policy import FailurePolicy
from danube.core.ranges import between, joined, no_ranges, size_of, within, without
from danube.core.subscription import Subscription
from danube.errors import broken
from danube.limits import ACKED_RANGES_STORED_MAX

__all__ = ["GIVEN_UP", "UNUSED", "HoledSubscription"]

GIVEN_UP = "given_up"
UNUSED = "unused"
_OFFSETS_END = 1 << 62


class HoledSubscription(Subscription):
    """See the module.  ``withheld`` lies below the window and is what ``ack_floor`` waits for."""

    def __init__(
        self, name: str, mode: Mode, state: CursorState, *, max_unacked: int, failure: FailurePolicy
    ) -> None:
        super().__init__(name, mode, state, max_unacked=max_unacked, failure=failure)
        self._withheld = no_ranges()
        self._returned = no_ranges()  # of the withheld ones: may be delivered, once the window is empty
        self._hole_end = 0  # behind the hole at ``next``, while what lies before it is not acked
        self._jumping = False  # one of the last two is to be done; asked with every ack
        self._counters |= {UNUSED: 0, GIVEN_UP: 0}

    @property
    def ack_floor(self) -> int:
        return int(self._withheld[0, 0]) if len(self._withheld) else self._window.floor

    @property
    def left_from(self) -> int:
        return min(super().left_from, self.ack_floor) if len(self._withheld) else super().left_from

    @property
    def withheld(self) -> Offsets:
        """int64[n][2]: what is neither acked nor can be delivered now."""
        return self._withheld

    @property
    def wants_records(self) -> bool:
        """As before, and no jump waits for acks."""
        return not self._jumping and super().wants_records

    # -- holes ------------------------------------------------------------------------------------

    def withhold(self, hole_end: int) -> None:
        """``next .. hole_end`` is an open hole: go on behind it once all before it is acked."""
        if hole_end > self._window.next:
            self._hole_end = hole_end
            self._jump_soon()

    def follow_holes(
        self, open_holes: Offsets, unused: Offsets | None = None, given_up: Offsets | None = None
    ) -> None:
        """Follow what is known of holes now; all three are ranges, int64[n][2].

        Withheld ranges that are unused or given up count as acked; those that are in no hole any more
        have come back.
        """
        for settled, why in ((unused, UNUSED), (given_up, GIVEN_UP)):
            if settled is not None and len(settled) and len(self._withheld):
                gone = without(self._withheld, without(self._withheld, settled))
                if len(gone):
                    self.skip(gone, why)
        if self._hole_end:  # what was filled of it before it was passed is not passed
            at = self._window.next
            ahead = within(open_holes, at, self._hole_end)
            self._hole_end = int(ahead[0, 1]) if len(ahead) and int(ahead[0, 0]) == at else 0
        self._returned = without(self._withheld, open_holes)
        self._jump_soon()

    def _jump_soon(self) -> None:
        """What is to be done may have changed."""
        self._jumping = self._hole_end > 0 or len(self._returned) > 0
        self._jump()

    def _jump(self) -> bool:
        """Where a jump waits and nothing is granted and unacked, do it; whether it was done."""
        if not self._jumping or self._window.floor != self._window.next:
            return False
        if len(self._returned):
            self._go_back()
        else:
            self._pass_hole()
        self._jumping = False
        self._window.freed = True
        self._moved()
        return True

    def _pass_hole(self) -> None:
        window = self._window
        end = max(self._hole_end, window.next)  # what was acked ahead may reach beyond it
        missing = between(self._ahead.ranges, window.next, end)  # what is acked of it stays acked
        self._withheld = joined(np.concatenate((self._withheld, missing)))
        self._hole_end = 0
        window.take_acked(end)
        self._ahead.drop_below(end)

    def _go_back(self) -> None:
        window = self._window
        target = int(self._returned[0, 0])
        acked = between(self._withheld, target, window.floor)
        self._ahead = Ahead(joined(np.concatenate((acked, self._ahead.ranges))))
        # Holes above are found again on the way.
        self._withheld = within(self._withheld, 0, target)
        self._returned = no_ranges()
        self._hole_end = 0
        window.reset(target)
        self._failures.clear()

    # -- what ends the wait for a jump ------------------------------------------------------------

    def ack(self, consumer_id: int | None, ranges: Ranges, now_ns: int) -> AckResult:
        result = super().ack(consumer_id, ranges, now_ns)
        if self._jumping:
            self._jump()
        return result

    def dead_lettered(self, offset: int) -> None:
        super().dead_lettered(offset)
        self._jump()

    def tick(self, now_ns: int, available_end: int = 0) -> int | None:
        again_ns = super().tick(now_ns, available_end)
        return now_ns if self._jumping and self._jump() else again_ns

    def skip(self, ranges: Offsets, why: str) -> int:
        if len(self._withheld):
            before = size_of(self._withheld)
            self._withheld = without(self._withheld, ranges)
            self._returned = without(self._returned, ranges)
            gone = before - size_of(self._withheld)
            if gone:
                self.version += 1
                if why == GIVEN_UP:
                    self._counters[why] += gone
        settled = super().skip(within(ranges, self._window.floor, _OFFSETS_END), why)
        if self._hole_end and self._hole_end <= self._window.next:
            self._hole_end = 0
        self._jump_soon()
        return settled

    def seek(self, offset: int, log_end: int, now_ns: int) -> None:
        self._withheld = self._returned = no_ranges()
        self._hole_end = 0
        self._jumping = False
        super().seek(offset, log_end, now_ns)

    # -- what is told -----------------------------------------------------------------------------

    def cursor_state(self) -> CursorState:
        """What must be kept: a withheld range is one that is not acked."""
        state = super().cursor_state()
        if not len(self._withheld):
            return state
        floor = self.ack_floor
        acked = between(self._withheld, floor, state.ack_floor)
        acked = joined(np.concatenate((acked, state.acked)))[:ACKED_RANGES_STORED_MAX]
        return CursorState(state.mode, floor, acked, state.max_unacked, state.failure)

    def explain(self, now_ns: int) -> str:
        """As before; waiting_at_hole while what was granted is not acked and a hole comes next."""
        word = super().explain(now_ns)
        return "waiting_at_hole" if self._jumping and word not in ("no_consumer", "blocked") else word

    def statistics(self) -> dict[str, Any]:
        """As before, with what is withheld: how many offsets, and the first ranges of them."""
        return {
            **super().statistics(),
            "ack_floor": self.ack_floor,
            "withheld": size_of(self._withheld),
            "withheld_ranges": self._withheld[:100].tolist(),
        }

    def check(self) -> None:
        super().check()
        ends = self._withheld.reshape(-1)
        if len(ends) and (ends[-1] > self._window.floor or (np.diff(ends) <= 0).any()):
            broken("withheld ranges do not lie below the window", ranges=ends.tolist())
        if self._jumping and self._window.floor == self._window.next:
            broken("a jump waits for nothing", hole_end=self._hole_end, returned=len(self._returned))
