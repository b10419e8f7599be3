"""Report of a subscription: counts of its records, why none moves, and a check of its own state."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from danube.core.dispatch.consumers import Consumers
from danube.core.dispatch.cursor import CursorState, SkipRanges
from danube.core.dispatch.failures import Failures
from danube.core.dispatch.grants import Mode
from danube.core.dispatch.window import ACKED, BLOCKED, BURIED, DEAD, HELD, IN_FLIGHT, READY, RETRY, Window
from danube.errors import broken
from danube.limits import ACKED_RANGES_STORED_MAX

_BLOCKED_OFFSETS_SHOWN: Final = 100


def reason(window: Window, consumers: Consumers, mode: Mode, *, more: bool, wants: bool, room: int) -> str:
    """Why nothing moves, in one word; "ready" if something could.

    ``more``: there are records that were never granted; ``wants``: a consumer could take new ones;
    ``room``: how many more may be unacked.
    """
    counts = window.counts
    keyed = mode is Mode.KEY_SHARED
    if not len(consumers):
        return "no_consumer"
    if counts[BLOCKED] and not keyed:
        return "blocked"
    if counts[READY] or counts[HELD] or more:
        able = consumers.active_credit() if mode.single else consumers.eligible
        if not able:
            return "no_credit"
        waiting_may_go = window.freed if keyed else counts[READY] > 0
        if waiting_may_go or (more and wants):
            return "ready"
        if room <= 0:
            return "window_full"
        return "blocked" if counts[BLOCKED] else "waiting_redelivery"
    if counts[BLOCKED]:
        return "blocked"
    return "waiting_redelivery" if counts[RETRY] + counts[DEAD] + counts[BURIED] else "caught_up"


def counts_of(window: Window, failures: Failures) -> dict[str, Any]:
    """Numbers of records in each state, and where the cursor stands."""
    counts = window.counts
    return {
        "ack_floor": window.floor,
        "next": window.next,
        "in_flight": counts[IN_FLIGHT],
        "waiting_redelivery": counts[RETRY] + counts[READY],
        "held": counts[HELD],
        "blocked": counts[BLOCKED],
        "blocked_offsets": window.find(BLOCKED, window.floor, _BLOCKED_OFFSETS_SHOWN).tolist(),
        "dead": counts[DEAD] + counts[BURIED],
        "acked_above_floor": counts[ACKED],
        "nacked": failures.nacked,
        "timed_out": failures.timed_out,
        "dropped": failures.dropped,
        "dead_lettered": failures.dead_lettered_count,
    }


def progress(state: CursorState, window: Window, ahead: SkipRanges) -> CursorState:
    """Return the progress to store; of the acked ranges at most the lowest ACKED_RANGES_STORED_MAX."""
    acked = window.acked_ranges(ACKED_RANGES_STORED_MAX)
    further = ahead.ranges[: ACKED_RANGES_STORED_MAX - len(acked)]
    if len(further):
        if len(acked) and acked[-1, 1] == further[0, 0]:
            acked, further = acked.copy(), further[1:].copy()
            acked[-1, 1] = ahead.first[1]
        acked = np.concatenate((acked, further))
    return CursorState(state.mode, window.floor, acked, state.max_unacked, state.failure)


def check_agreement(window: Window, ahead: SkipRanges, max_unacked: int) -> None:
    """Raise InvariantBroken where a subscription's parts contradict each other."""
    if not window.floor <= window.next:
        broken("ack_floor passed next", floor=window.floor, next=window.next)
    if window.outstanding > max_unacked:
        broken("too many records are unacked", unacked=window.outstanding, limit=max_unacked)
    if ahead.count and ahead.first[0] < window.next:
        broken("an acked range ahead was not taken", first=ahead.first, next=window.next)
    if ahead.count and ahead.first[0] == window.floor:
        broken("the floor stopped before an acked range ahead", first=ahead.first, floor=window.floor)
