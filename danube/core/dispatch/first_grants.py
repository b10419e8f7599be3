"""First deliveries of a subscription that is not key-shared: who gets the records after the window.

The active consumer gets all it has credit for, else the consumers take turns.  The caller has seen
that one of them can take a record.
"""

from __future__ import annotations

import numpy as np

from danube.core.dispatch.consumers import Consumers
from danube.core.dispatch.failures import Failures
from danube.core.dispatch.grants import Grant, Offsets, grants_of
from danube.core.dispatch.window import Window


def grant_run(
    window: Window, consumers: Consumers, failures: Failures, end: int, now_ns: int, *, single: bool
) -> list[Grant]:
    """New records up to ``end``, none of them acked."""
    start = window.next
    if single:
        end = min(end, start + consumers.active_credit())
        seat = consumers.order[0].seat
        consumers.spend(seat, end - start)
    elif end - start == 1:
        seat = consumers.turn()
    elif consumers.alone:
        end = min(end, start + consumers.usable_credit)
        seat = consumers.turn()
        consumers.spend(seat, end - start - 1)
    else:
        seats = consumers.turns(end - start)
        end = start + len(seats)
        window.grant_new(end, seats, failures.granted(start, end, now_ns))
        return grants_of(np.arange(start, end, dtype=np.int64), seats, None, consumers.by_seat)
    window.grant_new(end, seat, failures.granted(start, end, now_ns))
    return [Grant(consumers.by_seat[seat].consumer_id, start, end, None, 0)]


def grant_between(
    window: Window, consumers: Consumers, failures: Failures, offsets: Offsets, now_ns: int, *, single: bool
) -> list[Grant]:
    """New records at ``offsets`` (ascending, the first is the window's next); what lies between is acked."""
    if single:
        seat = consumers.order[0].seat
        seats = np.full(min(len(offsets), consumers.active_credit()), seat, np.int16)
        consumers.spend(seat, len(seats))
    else:
        seats = consumers.turns(len(offsets))
    offsets = offsets[: len(seats)]
    window.take(offsets, seats, failures.granted(window.next, int(offsets[-1]) + 1, now_ns))
    return grants_of(offsets, seats, None, consumers.by_seat)
