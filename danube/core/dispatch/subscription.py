"""A reliable subscription: which consumer gets which offsets, and what of them is acked.

    join/leave, credit        who may be sent how many records
    due -> grant              redeliveries first, then new records; each returns grants
    ack, nack, tick           what became of them
    cursor_state              what a store must keep; ``version`` grows whenever it changes

Offsets below ``ack_floor`` are acked, those from ``next`` were never granted, and what lies between
is the window (:mod:`danube.core.dispatch.window`).  Unacked records in the window are bounded by
``max_unacked``, its width by SPAN_MAX or max_unacked, whichever is more.  Order: a record returned
by ``leave`` or a delay goes out before new ones; first deliveries are in offset order (key-shared:
for each key).  Time is passed in; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from danube.core.dispatch.acks import (
    ANY_SEAT,
    NO_SEAT,
    Ranges,
    acknowledge,
    by_owner,
    in_flight_at,
    offsets_in,
    sound,
)
from danube.core.dispatch.consumer_window import NEVER_NS
from danube.core.dispatch.consumers import Consumers
from danube.core.dispatch.course import Gaps
from danube.core.dispatch.cursor import CursorState, SkipRanges
from danube.core.dispatch.failures import MS, Failures
from danube.core.dispatch.filters import KeyFilter
from danube.core.dispatch.grants import (
    AckResult,
    DeadLetter,
    Grant,
    JoinResult,
    Mode,
    Offsets,
    grants_of,
    joined,
)
from danube.core.dispatch.key_ring import KeyRing
from danube.core.dispatch.key_table import SKIPPED, KeyTable
from danube.core.dispatch.report import check_agreement, counts_of, progress, reason
from danube.core.dispatch.window import (
    ACKED,
    BLOCKED,
    BURIED,
    DEAD,
    FREE,
    HELD,
    IN_FLIGHT,
    READY,
    RETRY,
    Window,
)
from danube.core.partition.policy import FailurePolicy, check_max_unacked
from danube.errors import DanubeError, broken
from danube.limits import ACKED_RANGES_STORED_MAX, MAX_UNACKED_DEFAULT


def return_to_ready(window: Window, consumers: Consumers, grant: Grant, start: int) -> int:
    """Make the records of ``grant`` from ``start`` on ready again; return their number.

    Their delivery does not count, and the consumer gets its credit back.  Records that are not in flight at
    that consumer any more are left unchanged.
    """
    consumer = consumers.by_id.get(grant.consumer_id)
    if consumer is None:
        return 0
    if grant.offsets is None:
        offsets = np.arange(start, grant.end, dtype=np.int64)
    else:
        offsets = grant.offsets[grant.offsets >= start]
    offsets = offsets[(offsets >= window.floor) & (offsets < window.next)]
    index = offsets & window.mask
    offsets = offsets[(window.state[index] == IN_FLIGHT) & (window.owner[index] == consumer.seat)]
    forget_delivery(window, offsets)
    consumers.return_credit(grant.consumer_id, len(offsets))
    return len(offsets)


def forget_delivery(window: Window, offsets: Offsets) -> None:
    """Records in flight are ready again as if not granted."""
    window.deliveries[offsets & window.mask] -= np.uint16(1)
    window.move(offsets, READY)


__all__ = ["AckResult", "DeadLetter", "Grant", "JoinResult", "Mode", "Subscription"]

SPAN_MAX: Final = MAX_UNACKED_DEFAULT
_KEYED_RECORDS_MIN: Final = 64
_new: Final = tuple.__new__  # makes a named tuple without a call of a Python function
GRANTS_MAX: Final = 256  # where acked ranges cut the log to pieces, one call ends after so many
_TRIM_INTERVAL_NS: Final = 10_000_000_000
_COUNTED: Final = (
    "granted", "redelivered", "acked", "ack_ignored", "ack_refused", "skipped", "expired", "damaged",
    "compacted",
)  # fmt: skip

KeyOf = Callable[[int], bytes]
Hashes = npt.NDArray[np.uint64]


class Subscription:
    """See the module.  Not thread-safe; every method is an ordinary function of its arguments."""

    def __init__(
        self, name: str, mode: Mode, state: CursorState, *, max_unacked: int, failure: FailurePolicy
    ) -> None:
        """Start at ``state``: no record is in flight, and only the offsets that it names are acked."""
        check_max_unacked(max_unacked)
        failure.check()
        state = state.settled()
        self.name = name
        self.mode = mode
        self._single = mode.single
        self.max_unacked = max_unacked
        self.version = 0
        self._state = state
        self._outstanding_max = max_unacked  # unacked records when the bound was last set, if that is more
        self._span_max = max(max_unacked, SPAN_MAX)
        self._consumers = Consumers(mode)
        self._ring = KeyRing()
        self._keys = KeyTable(self._ring) if mode is Mode.KEY_SHARED else None
        self._window = Window(state.ack_floor, self._keys)
        self._failures = Failures(self._window, failure)
        self.failure = failure
        self._ahead = SkipRanges(state.acked)
        self._gaps = Gaps()
        self._key_of: KeyOf | None = None
        self._available_end = 0
        self._trim_at_ns = self._now_ns = 0
        self._counters = dict.fromkeys(_COUNTED, 0)

    @property
    def asked(self) -> CursorState:
        """Return the cursor state that holds the subscription's own policy."""
        return self._state

    def set_failure(self, failure: FailurePolicy, *, own: bool = True) -> None:
        """Follow another failure policy from the next failure on; the cursor keeps it where it is its own."""
        failure.check()
        self.failure = self._failures.policy = failure
        self._consumers.follow(failure.ack_timeout_ms * MS)
        self._state = replace(self._state, failure=failure if own else None)
        self.version += 1

    def set_max_unacked(self, max_unacked: int) -> None:
        """Follow another bound; with more unacked already, nothing new goes out until they are fewer."""
        check_max_unacked(max_unacked)
        self.max_unacked = max_unacked
        self._span_max = max(max_unacked, SPAN_MAX)
        self._outstanding_max = max(max_unacked, self._window.outstanding)
        self._window.freed = True

    @property
    def next(self) -> int:
        """The first offset that was never granted (and is not known to be acked or damaged)."""
        return self._window.next

    @property
    def ack_floor(self) -> int:
        return self._window.floor

    @property
    def settled_end(self) -> int:
        """Below it nothing is left to deliver now."""
        return self._window.floor

    @property
    def left_from(self) -> int:
        """Below it no record waits to be delivered: each is settled, used up or at a consumer."""
        window = self._window
        waiting = [
            window.find(state, window.floor, 1) for state in (RETRY, READY, HELD) if window.counts[state]
        ]
        if waiting:
            return min(int(found[0]) for found in waiting)
        if self._ahead.count and self._ahead.first[0] <= window.next:
            return max(self._ahead.first[1], window.next)
        return window.next

    @property
    def in_flight_count(self) -> int:
        return self._window.counts[IN_FLIGHT]

    @property
    def wants_records(self) -> bool:
        """Whether a consumer could take new records now."""
        window, consumers = self._window, self._consumers
        counts, eligible = window.counts, consumers.eligible
        if not eligible or (self._single and not eligible >> consumers.order[0].seat & 1):
            return False
        if self._keys is None and (counts[BLOCKED] or counts[READY]):
            return False  # new records wait for an operator, or for redeliveries that come first
        span = window.next - window.floor
        return span - counts[ACKED] < self.max_unacked and (span < self._span_max or self._room() > 0)

    def _room(self) -> int:
        window = self._window
        span = window.next - window.floor
        room = self.max_unacked - span + window.counts[ACKED]
        if span + room <= self._span_max:
            return room
        return min(room, self._gaps.widest(window.floor, self._span_max) - window.next)

    def join(self, consumer_id: int, name: str, *, filters: Sequence[str] = (), now_ns: int) -> JoinResult:
        """Connect a consumer, without credit; one of the same name is displaced and gives back its records.
        Raises SubscriptionBusy (exclusive, another name is connected) or LimitExceeded."""
        key_filter = KeyFilter(filters)
        consumers = self._consumers
        displaced = consumers.check_join(consumer_id, name)
        place = self._remove(displaced.consumer_id) if displaced is not None else None
        consumer = consumers.add(consumer_id, name, key_filter, place)
        if self._keys is not None:
            self._ring.add(consumer.seat, consumer_id, key_filter)
            self._keys.ring_changed()
            self._window.freed = True
        return consumers.result(consumer, displaced)

    def pace(self, consumer_id: int, now_ns: int) -> None:
        """Limit a consumer's credit by its acks if others could have the rest.

        Call this before the consumer has credit.
        """
        if not self._single:
            self._consumers.pace(consumer_id, now_ns, self.failure.ack_timeout_ms * MS)

    def leave(self, consumer_id: int, now_ns: int) -> None:
        """Disconnect a consumer (if it is one); its records in flight may be granted again at once."""
        if consumer_id in self._consumers.by_id:
            self._remove(consumer_id)

    def _remove(self, consumer_id: int) -> int:
        consumer = self._consumers.by_id[consumer_id]
        self._window.move(self._window.owned(consumer.seat), READY)
        self._failures.begun.leave(consumer.seat)
        if self._keys is not None:
            self._ring.remove(consumer.seat)
            self._keys.ring_changed()
            self._window.freed = True
        return self._consumers.remove(consumer)

    def credit(self, consumer_id: int, records: int) -> None:
        """Let a consumer have ``records`` more."""
        self._consumers.add_credit(consumer_id, records)
        self._window.freed = True

    def set_ready(self, consumer_id: int, ready: bool) -> None:
        """Pause a consumer or resume it; its credit does not change."""
        self._consumers.set_ready(consumer_id, ready)
        self._window.freed = True

    def grant(
        self,
        available_end: int,
        now_ns: int,
        hashes: Hashes | None = None,
        hashes_start: int = 0,
        key_of: KeyOf | None = None,
    ) -> list[Grant]:
        """Grant new records below ``available_end``, within credit and window; call again for more.

        Key-shared needs ``hashes`` (uint64, ``hashes[i]`` is the key hash of ``hashes_start + i``;
        granting ends where they end) and, for filters, ``key_of``, which answers for any unacked
        offset and is kept for later calls of ``due``.
        """
        self._available_end = max(self._available_end, available_end)
        if self._keys is None and not self._ahead.count:
            return self._grant_run(available_end, now_ns)
        grants: list[Grant] = []
        if self._keys is not None:
            if hashes is None:
                broken("a key-shared subscription needs key hashes", subscription=self.name)
            self._key_of = key_of or self._key_of
            available_end = min(available_end, hashes_start + len(hashes))
            if self._window.freed:
                grants = self._grant_waiting(HELD, now_ns, self._window.counts[HELD])
        while self._window.next < available_end and self.wants_records and len(grants) < GRANTS_MAX:
            piece_end = self._pass_ahead(available_end)
            if self._window.next < piece_end:
                grants += self._grant_piece(piece_end, available_end, now_ns, hashes, hashes_start)
        return self._begun(grants, now_ns)

    def _begun(self, grants: list[Grant], now_ns: int) -> list[Grant]:
        if self._consumers.paced:
            self._consumers.began([grant.consumer_id for grant in grants], now_ns)
        return grants

    def _grant_run(self, end: int, now_ns: int) -> list[Grant]:
        """Grant new records up to ``end``, none of them acked."""
        window, consumers = self._window, self._consumers
        start = window.next
        if end > self._available_end:
            self._available_end = end
        if start >= end or not self.wants_records:
            return []
        span = start - window.floor
        count = min(end - start, self.max_unacked - span + window.counts[ACKED])
        if span + count > self._span_max:
            count = min(count, self._gaps.widest(window.floor, self._span_max) - start)
        one = consumers.take_one(count)
        if one is None:
            seats = consumers.turns(count)
            end = start + len(seats)
            window.grant_new(end, seats, self._failures.granted(start, end, now_ns))
            grants = grants_of(np.arange(start, end, dtype=np.int64), seats, None, consumers.by_seat)
        else:
            seat, count = one
            end = start + count
            window.grant_new(end, seat, self._failures.granted(start, end, now_ns))
            grants = [_new(Grant, (consumers.by_seat[seat].consumer_id, start, end, None, 0))]
        self._counters["granted"] += end - start
        return self._begun(grants, now_ns) if consumers.paced else grants

    def _grant_between(self, offsets: Offsets, now_ns: int) -> list[Grant]:
        """Grant new records at ``offsets`` (ascending, from ``next`` up); offsets between them are acked."""
        window, consumers = self._window, self._consumers
        if self._single:
            seat = consumers.order[0].seat
            seats = np.full(min(len(offsets), consumers.active_credit()), seat, np.int16)
            consumers.spend(seat, len(seats))
        else:
            seats = consumers.turns(len(offsets))
        offsets = offsets[: len(seats)]
        self._counters["granted"] += len(offsets)
        window.take(offsets, seats, self._failures.granted(window.next, int(offsets[-1]) + 1, now_ns))
        return grants_of(offsets, seats, None, consumers.by_seat)

    def _grant_piece(
        self, piece_end: int, available_end: int, now_ns: int, hashes: Hashes | None, hashes_start: int
    ) -> list[Grant]:
        """Grant new records up to ``piece_end``.

        If acked ranges begin there, also the records between them.
        """
        window, start = self._window, self._window.next
        if piece_end < available_end:
            offsets = self._ahead.between(
                start, min(available_end, self._gaps.widest(window.floor, self._span_max))
            )
            offsets = offsets[: self.max_unacked - window.outstanding]
        elif hashes is not None and self._keys is not None:
            offsets = np.arange(start, min(piece_end, start + self._room()), dtype=np.int64)
        else:
            return self._grant_run(piece_end, now_ns)
        if hashes is not None and self._keys is not None:
            grants = self._grant_keyed(offsets, now_ns, hashes, hashes_start)
        else:
            grants = self._grant_between(offsets, now_ns)
        if self._ahead.count:
            self._ahead.drop_below(window.next)
        return grants

    def _pass_ahead(self, available_end: int) -> int:
        """Skip offsets at ``next`` that are known to be acked or damaged.

        Return where the next such range begins.
        """
        if not self._ahead.count:
            return available_end
        window = self._window
        start, end = self._ahead.first
        if start <= window.next:
            if window.floor != window.next:
                end = min(end, self._gaps.widest(window.floor, self._span_max))
            window.take_acked(max(end, window.next))
            self._ahead.drop_below(window.next)
            return window.next
        return min(start, available_end)

    def _grant_keyed(self, offsets: Offsets, now_ns: int, hashes: Hashes, hashes_start: int) -> list[Grant]:
        window, keys, consumers = self._window, self._keys, self._consumers
        if keys is None or hashes_start > window.next:
            broken("key hashes do not cover what is granted", start=hashes_start, next=window.next)
        if len(offsets) > _KEYED_RECORDS_MIN:
            # No more at a time than can nearly be granted: the rest would be held for nothing.
            offsets = offsets[: max(consumers.usable_credit, _KEYED_RECORDS_MIN)]
        start, end = window.next, int(offsets[-1]) + 1
        keys.refresh()
        whole = end - start == len(offsets)
        first, last = start - hashes_start, end - hashes_start
        wanted = hashes[first:last] if whole else hashes[offsets - hashes_start]
        numbers = keys.find(np.ascontiguousarray(wanted, np.uint64), window.renumber)
        if self._ring.filtered:
            keys.resolve(numbers, offsets, self._key_of)
        seats = keys.assign(numbers, FREE, len(offsets), consumers.credit, consumers.ready)
        stamp = self._failures.granted(start, end, now_ns)
        if end - start == 1 and seats[0] >= 0:
            seat = int(seats[0])
            window.grant_new(end, seat, stamp)
            window.key[start & window.mask] = numbers[0]
            consumers.exhausted([seat])
            self._counters["granted"] += 1
            return [Grant(consumers.by_seat[seat].consumer_id, start, end, None, 0)]
        window.take(offsets, seats, stamp, numbers)
        skipped = int(np.count_nonzero(seats == SKIPPED))
        if skipped:
            self._counters["skipped"] += skipped
            self._acked()
        return self._keyed_grants(offsets, seats, None)

    def _keyed_grants(
        self, offsets: Offsets, seats: npt.NDArray[np.int16], before: npt.NDArray[np.uint16] | None
    ) -> list[Grant]:
        granted = seats >= 0
        if before is None:
            offsets, seats = offsets[granted], seats[granted]
            self._counters["granted"] += len(seats)
        grants = grants_of(offsets, seats, before, self._consumers.by_seat)
        self._consumers.exhausted(np.unique(seats).tolist())
        return grants

    def has_more(self, end: int) -> bool:
        """Whether records below ``end`` wait: never granted, to be granted again, or for their key."""
        counts = self._window.counts
        return self.next < end or counts[READY] + counts[HELD] + counts[DEAD] > 0

    def has_due(self, now_ns: int) -> bool:
        """Whether due() may grant something."""
        window = self._window
        waiting = window.counts[READY] or (window.freed and window.counts[HELD])
        return waiting > 0 or now_ns >= self._failures.next_ns

    def due(self, now_ns: int, limit: int) -> list[Grant]:
        """Grant up to ``limit`` records whose time has come, in offset order; key-shared: also held ones."""
        self._pass_time(now_ns)
        again = self._due(now_ns, limit) if self._keys is None else self._due_keyed(now_ns, limit)
        return self._begun(again, now_ns)

    def _due(self, now_ns: int, limit: int) -> list[Grant]:
        window, consumers = self._window, self._consumers
        if not window.counts[READY] or window.counts[BLOCKED] or not consumers.eligible:
            return []
        if self._single:
            offsets = window.find(READY, window.ready_from, min(limit, consumers.active_credit()))
            seats = np.full(len(offsets), consumers.order[0].seat, np.int16)
            consumers.spend(consumers.order[0].seat, len(offsets))
        else:
            seats = consumers.turns(min(limit, window.counts[READY]))
            offsets = window.find(READY, window.ready_from, len(seats))
        if not len(offsets):
            return []
        window.ready_from = int(offsets[-1]) + 1
        return self._grant_again(offsets, seats, READY, now_ns)

    def _due_keyed(self, now_ns: int, limit: int) -> list[Grant]:
        window = self._window
        if not window.freed:
            return []
        window.freed = False
        grants: list[Grant] = []
        try:
            grants += self._grant_waiting(READY, now_ns, limit)
            grants += self._grant_waiting(HELD, now_ns, limit - sum(grant.record_count for grant in grants))
        except DanubeError:  # a filter's question cannot be answered yet
            window.freed = True
            if not grants:
                raise
        window.freed |= bool(grants)  # they block others of their keys; the limit may have cut them
        return grants

    def _grant_waiting(self, state: int, now_ns: int, limit: int) -> list[Grant]:
        """Key-shared: grant READY and HELD records whose consumer can take them."""
        window, keys, consumers = self._window, self._keys, self._consumers
        if keys is None or not window.counts[state] or limit <= 0 or not consumers.eligible:
            return []
        keys.refresh()
        offsets = window.find(state, window.floor, window.counts[state])
        numbers = window.key[offsets & window.mask]
        if self._ring.filtered:
            keys.resolve(numbers, offsets, self._key_of)
        seats = keys.assign(numbers, state, limit, consumers.credit, consumers.ready)
        skipped = offsets[seats == SKIPPED]
        if len(skipped):
            self._skip_held(skipped)
        granted = seats >= 0
        offsets, seats = offsets[granted], seats[granted]
        return self._grant_again(offsets, seats, state, now_ns) if len(offsets) else []

    def _skip_held(self, offsets: Offsets) -> None:
        """Count held offsets as acked: no consumer wants their key any more.

        The key table has already counted them out.
        """
        window = self._window
        window.state[offsets & window.mask] = ACKED
        window.counts[HELD] -= len(offsets)
        window.counts[ACKED] += len(offsets)
        self._counters["skipped"] += len(offsets)
        self._acked()

    def _grant_again(
        self, offsets: Offsets, seats: npt.NDArray[np.int16], state: int, now_ns: int
    ) -> list[Grant]:
        stamp = self._failures.granted(int(offsets[0]), int(offsets[-1]) + 1, now_ns)
        before = self._window.grant_again(offsets, seats, stamp, state)
        self._counters["granted" if state == HELD else "redelivered"] += len(offsets)
        if self._keys is not None:
            return self._keyed_grants(offsets, seats, before)
        return grants_of(offsets, seats, before, self._consumers.by_seat)

    # -- what became of them -----------------------------------------------------------------------

    def give_back(self, grant: Grant, start: int) -> int:
        """Undo the grant of records from ``start`` on, which could not be sent; return their number."""
        return return_to_ready(self._window, self._consumers, grant, start)

    def ack(self, consumer_id: int | None, ranges: Ranges, now_ns: int) -> AckResult:
        """Ack half-open ranges of offsets (int64 or uint64 [n][2]) that the consumer (None: anyone) has in
        flight; see :mod:`danube.core.dispatch.acks`."""
        window, seat = self._window, self._seat(consumer_id)
        dead = window.counts[DEAD] + window.counts[BURIED]
        in_flight, floor = window.counts[IN_FLIGHT], window.floor
        owners = by_owner(window, in_flight_at(window, seat, ranges)) if seat == ANY_SEAT else []
        acked, ignored, refused = acknowledge(window, seat, ranges)
        if acked:
            self._moved()
            released = in_flight - window.counts[IN_FLIGHT]
            if released and seat != ANY_SEAT:
                lowest = int(ranges[0, 0]) if len(ranges) == 1 else int(ranges[:, 0].min())
                owners = [(seat, max(lowest, floor), released)]
            self._settled(owners, now_ns)
            if dead:
                self._failures.forget_acked()
        counters = self._counters
        counters["acked"] += acked
        counters["ack_ignored"] += ignored
        counters["ack_refused"] += refused
        return _new(AckResult, (acked, ignored, refused))

    def ack_earlier(self, ranges: Ranges) -> int:
        """Ack ranges that a consumer had before it came back; return how many were not acked yet.

        An earlier owner may have granted them, not this one.  If there are very many, only the lowest are
        kept, as in a cursor.
        """
        kept = ACKED_RANGES_STORED_MAX - len(self._ahead.ranges)
        return self.skip(joined(sound(ranges))[: max(kept, 0)], "acked")

    def _settled(self, owners: list[tuple[int, int, int]], now_ns: int) -> None:
        """Consumers settled records that they had in flight: ``(seat, lowest offset, records)``."""
        for seat, offset, count in owners:
            self._failures.settled(seat, offset, now_ns)
            self._consumers.released(seat, count, count, now_ns)

    def _seat(self, consumer_id: int | None) -> int:
        if consumer_id is None:
            return ANY_SEAT
        consumer = self._consumers.by_id.get(consumer_id)
        return NO_SEAT if consumer is None else consumer.seat

    def nack(self, consumer_id: int | None, ranges: Ranges, delay_ms: int, reason: str, now_ns: int) -> int:
        """Records that the consumer (None: anyone) has in flight go back after a delay; return how many.
        The delay is the policy's or ``delay_ms`` if that is longer (-1 or 0: the policy's)."""
        offsets = in_flight_at(self._window, self._seat(consumer_id), ranges)
        if len(offsets):
            self._settled(by_owner(self._window, offsets), now_ns)
            self._failures.nacked += len(offsets)
            if self._failures.fail(offsets, delay_ms, reason, now_ns):
                self._moved()
        return len(offsets)

    def hand_back(self, consumer_id: int | None, ranges: Ranges) -> int:
        """Records that the consumer (None: anyone) has in flight and has not tried are ready again; how many.
        That is no failure, and their delivery does not count."""
        offsets = in_flight_at(self._window, self._seat(consumer_id), ranges)
        if len(offsets):
            for seat, _, count in by_owner(self._window, offsets):
                self._consumers.forgotten(seat, count, self._now_ns)
            forget_delivery(self._window, offsets)
        return len(offsets)

    def tick(self, now_ns: int, available_end: int = 0) -> int | None:
        """Apply timeouts and delays that have come; return when to call again (None: no need; ``now_ns``:
        records became ready, or a consumer may have more of those below ``available_end``)."""
        window, next_ns = self._window, self._failures.next_ns
        self._now_ns = now_ns
        if available_end > self._available_end:
            self._available_end = available_end
        if now_ns < min(next_ns, self._trim_at_ns) and not self._consumers.paced:
            return None if next_ns == NEVER_NS else next_ns
        ready_before = window.counts[READY]
        self._pass_time(now_ns)
        if now_ns >= self._trim_at_ns:
            self._trim_at_ns = now_ns + _TRIM_INTERVAL_NS
            window.trim()
        stall_ns = self._pass_stalls(now_ns) if self._consumers.paced else None
        if window.counts[READY] > ready_before:
            return now_ns
        next_ns = self._failures.next_ns if stall_ns is None else min(self._failures.next_ns, stall_ns)
        return None if next_ns == NEVER_NS else next_ns

    def _pass_stalls(self, now_ns: int) -> int | None:
        """Where records wait for paced consumers that settle nothing; return when to look again."""
        window = self._window
        if window.next >= self._available_end and not window.counts[READY] + window.counts[HELD]:
            return None
        able = self._consumers.eligible
        next_ns = self._consumers.pass_stalls(now_ns)
        window.freed = True
        return now_ns if self._consumers.eligible & ~able else next_ns

    def _pass_time(self, now_ns: int) -> None:
        if now_ns >= self._failures.next_ns and self._failures.pass_time(now_ns, self._timed_out):
            self._moved()

    def _timed_out(self, late: Offsets, now_ns: int) -> None:
        if self._consumers.paced:
            for seat, _, count in by_owner(self._window, late):
                self._consumers.released(seat, count, 0, now_ns)

    def unblock(self, now_ns: int) -> int:
        """Blocked records are delivered again with a fresh count; return how many."""
        return self._failures.unblock()

    def take_dead_letters(self, limit: int) -> list[DeadLetter]:
        """Records to be copied to the dead letter topic; answer each with one of the next two."""
        return self._failures.take_dead_letters(limit)

    def dead_lettered(self, offset: int) -> None:
        """The copy is stored as durably as the topic asks: the record counts as acked."""
        if self._failures.dead_lettered(offset):
            self._moved()

    def dead_letter_failed(self, offset: int, now_ns: int) -> None:
        """The copy failed: the record stays unacked and is offered again later."""
        self._failures.dead_letter_failed(offset, now_ns)

    def _acked(self) -> None:
        self._window.advance()
        self._moved()

    def _moved(self) -> None:
        """Advance the floor after an ack; if the window is empty, acked offsets right behind it count too."""
        self.version += 1
        window = self._window
        if window.floor == window.next and self._ahead.count:
            self._pass_ahead(window.next)

    def seek(self, offset: int, log_end: int, now_ns: int) -> None:
        """Start again at ``offset`` (at most ``log_end``); everything granted or acked is forgotten."""
        self._window.reset(min(max(offset, 0), log_end))
        self._gaps.clear()
        self._consumers.nothing_in_flight(now_ns)
        self._failures.clear()
        self._ahead = SkipRanges()
        self.version += 1

    def skip_to(self, start: int) -> int:
        """Move to ``start``, where the log begins now; return the number of unacked records that expired."""
        return self.skip(np.array([[self.ack_floor, start]], np.int64), "expired")

    def skip_damaged(self, start: int, end: int, *, why: str = "damaged") -> int:
        """``start .. end`` cannot be read (or: compacted): they count as acked; return how many were not."""
        return self.skip(np.array([[start, end]], np.int64), why)

    def skip(self, ranges: Offsets, why: str) -> int:
        """Count ranges without stored records (int64[n][2], ascending) as acked; return how many were not.

        ``why`` is the reason that the counters name: "expired", "damaged" or "compacted".
        """
        ranges = ranges[(ranges[:, 1] > ranges[:, 0]) & (ranges[:, 1] > self._window.floor)]
        if len(ranges):
            self._gaps.add(ranges, self._window.floor)
        settled = self._settle(ranges) if len(ranges) else 0
        self._counters[why] += settled
        return settled

    def _settle(self, ranges: Offsets) -> int:
        window = self._window
        settled = 0
        if int(ranges[0, 0]) < window.next:
            offsets = offsets_in(ranges, window.floor, window.next)
            offsets = offsets[window.state[offsets & window.mask] != ACKED]
            settled = len(offsets)
            if self._consumers.paced:
                in_flight = offsets[window.state[offsets & window.mask] == IN_FLIGHT]
                for seat, _, count in by_owner(window, in_flight):
                    self._consumers.forgotten(seat, count, self._now_ns)
            window.move(offsets, ACKED)
            window.advance()
        ahead = ranges[ranges[:, 1] > window.next]
        if len(ahead):
            settled += self._ahead.add(np.maximum(ahead, window.next))
            self._pass_ahead(int(ahead[-1, 1]))
        self._failures.forget_acked()
        self._moved()
        return settled

    def cursor_state(self) -> CursorState:
        """Return the progress to store."""
        return progress(self._state, self._window, self._ahead)

    def explain(self, now_ns: int) -> str:
        """Why nothing moves, in one word; "ready" if something could."""
        more = self._window.next < self._available_end
        return reason(
            self._window, self._consumers, self.mode, more=more, wants=self.wants_records, room=self._room()
        )

    def statistics(self) -> dict[str, Any]:
        """Counts in records, and where the cursor stands."""
        return {
            "mode": self.mode.label,
            "consumers": len(self._consumers),
            "left_from": self.left_from,
            **counts_of(self._window, self._failures),
            **self._counters,
        }

    def check(self) -> None:
        """Raise InvariantBroken if anything here contradicts itself."""
        self._window.check()
        self._consumers.check()
        for seat, paced in self._consumers.paced.items():
            if paced.open != int(self._consumers.credit[seat]) + len(self._window.owned(seat)):
                broken("a paced consumer's records are counted differently", seat=seat, open=paced.open)
        check_agreement(self._window, self._ahead, self._outstanding_max)
