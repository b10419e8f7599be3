"""Rates of delivery: so many records a second, saved up for at most one second.

A subscription has a rate of its own.  Subscriptions of a namespace or tenant may have one together, which is
a debt of records and bytes as for publishing (:mod:`danube.core.partition.publish_rate`).  While nothing is
owed, whoever comes is served.  Otherwise a subscription reserves a *turn*: a small part of the rate, paid in
advance, which comes when everything is paid that was reserved or delivered before.  So turns go round, and no
subscription takes all.  Records wait for their turn where they are stored, and are never dropped for it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from danube.core.partition.publish_rate import SAVED_NS_MAX, SECOND_NS, SharedDebt, Taken

UNLIMITED: Final = 1 << 62
TURN_NS: Final = 20_000_000  # of the rate of a sum, for one subscription
RECORD_BYTES: Final = 1024  # taken for a record's size as long as none was delivered


class RecordRate:
    """``per_second`` 0 is no limit.  Records are never dropped: those not allowed now are allowed later."""

    __slots__ = ("_filled_ns", "_tokens", "per_second")

    def __init__(self, per_second: int = 0) -> None:
        self.per_second = per_second
        self._tokens = float(per_second)
        self._filled_ns = 0

    def set(self, per_second: int) -> None:
        """Change the rate; saved allowance is cut to the new bound."""
        if per_second != self.per_second:
            self.per_second = per_second
            self._tokens = min(self._tokens, float(per_second))

    def allowed(self, now_ns: int) -> int:
        """Whole records that may go now."""
        if not self.per_second:
            return UNLIMITED
        elapsed_ns = max(0, now_ns - self._filled_ns) if self._filled_ns else 0
        self._filled_ns = now_ns
        earned = elapsed_ns * self.per_second / SECOND_NS
        self._tokens = min(self._tokens + earned, float(max(self.per_second, 1)))
        return int(self._tokens)

    def take(self, records: int) -> None:
        """Take the tokens of ``records`` records that were granted."""
        if self.per_second:
            self._tokens -= records

    def next_ns(self, now_ns: int) -> int | None:
        """Return when one more record may go; None without a limit."""
        if not self.per_second:
            return None
        missing = max(0.0, 1.0 - self._tokens)
        return now_ns + int(missing * SECOND_NS / self.per_second) + 1


class DispatchSum(SharedDebt):
    """Rate of delivery of a namespace or tenant at one worker."""

    __slots__ = ()

    def __init__(self, taken: Taken) -> None:
        super().__init__(taken, ("max_dispatch_rate", "max_dispatch_bytes"))

    def paid_ns(self, now_ns: int) -> int:
        """Return when all is paid that was delivered or reserved, with what other workers delivered."""
        self.follow(now_ns)
        return max(self._paid_ns)

    def free(self, size_bytes: int, now_ns: int) -> int:
        """Return how many records of this size are saved up."""
        saved_ns = [min(now_ns - paid_ns, SAVED_NS_MAX) for paid_ns in self._paid_ns]
        return self._records(size_bytes, saved_ns[0], saved_ns[1])

    def turn(self, size_bytes: int) -> int:
        """Return how many records of this size are a turn."""
        return self._records(size_bytes, TURN_NS, TURN_NS)

    def _records(self, size_bytes: int, records_ns: int, bytes_ns: int) -> int:
        records, per_second = UNLIMITED, self._per_second
        if per_second[0]:
            records = records_ns * per_second[0] // SECOND_NS
        if per_second[1]:
            records = min(records, bytes_ns * per_second[1] // (SECOND_NS * size_bytes))
        return records

    def reserve(self, records: int, size_bytes: int, now_ns: int) -> None:
        """Pay for a turn that comes later."""
        self._taken.hold()
        self.add(records, size_bytes, now_ns)

    def take(self, records: int, size_bytes: int, now_ns: int) -> None:
        """Count what is delivered."""
        self._taken.take(records, size_bytes)
        self.add(records, size_bytes, now_ns)


class DispatchLimits(NamedTuple):
    """Limits of each subscription of a partition."""

    per_second: int = 0
    sums: tuple[DispatchSum, ...] = ()


NOT_LIMITED: Final = DispatchLimits()


class Turn(NamedTuple):
    """A reserved part of the sums' rates."""

    due_ns: int
    records: int
    size_bytes: int


class DispatchRate(RecordRate):
    """Rate of one subscription: its own, and its turns at the sums that it counts in."""

    __slots__ = ("_left", "_now_ns", "_size_bytes", "_turn", "limited", "limits")

    def __init__(self) -> None:
        super().__init__()
        self.limits = NOT_LIMITED
        self.limited = False
        self._size_bytes = RECORD_BYTES  # of a record, by what was delivered last
        self._turn: Turn | None = None
        self._left = 0  # of the turn that has come
        self._now_ns = 0  # when it came; it ends with that moment

    def follow(self, limits: DispatchLimits, now_ns: int) -> None:
        """Take other limits; what was reserved is given back, so turns under old limits do not delay it."""
        self.give_back(now_ns)
        self.limits = limits
        self.limited = limits != NOT_LIMITED
        self._left = 0
        self.set(limits.per_second)

    def allowed(self, now_ns: int) -> int:
        """Whole records that may go now.  If sums allow none, a turn is reserved."""
        allowed = super().allowed(now_ns)
        if allowed < 1 or not self.limits.sums:
            return allowed
        return min(allowed, self._allowed_together(now_ns))

    def _allowed_together(self, now_ns: int) -> int:
        sums, turn = self.limits.sums, self._turn
        if now_ns != self._now_ns:
            self._now_ns, self._left = now_ns, 0
        if turn is not None:
            if now_ns < turn.due_ns:
                return 0
            self.give_back(now_ns)  # it is paid as what is delivered
            self._left = turn.records
        if self._left > 0:
            return self._left
        due_ns = max([one.paid_ns(now_ns) for one in sums])
        if due_ns <= now_ns:
            return max(1, min([one.free(self._size_bytes, now_ns) for one in sums]))
        records = max(1, min([one.turn(self._size_bytes) for one in sums]))
        self._turn = Turn(due_ns, records, records * self._size_bytes)
        for one in sums:
            one.reserve(records, self._turn.size_bytes, now_ns)
        return 0

    def give_back(self, now_ns: int) -> None:
        """Let others have what was reserved."""
        turn, self._turn = self._turn, None
        if turn is not None:
            for one in self.limits.sums:
                one.add(-turn.records, -turn.size_bytes, now_ns)

    def take(self, records: int, size_bytes: int = 0) -> None:
        """Take what was delivered after it was allowed."""
        super().take(records)
        if self.limits.sums and records:
            self._left -= records
            self._size_bytes = max(1, size_bytes // records)
            for one in self.limits.sums:
                one.take(records, size_bytes, self._now_ns)

    def next_ns(self, now_ns: int) -> int | None:
        """Return when more may go; None if nothing waits for that."""
        own_ns = super().next_ns(now_ns) if super().allowed(now_ns) < 1 else None
        turn = self._turn
        if turn is None or own_ns is None:
            return own_ns if turn is None else turn.due_ns
        return max(own_ns, turn.due_ns)
