"""Window of a consumer: how many records it may have at a time, by how many it handles in a short time.

The window starts small, so that records are left for a consumer that subscribes later.  The window doubles
while half of it is handled fast, and shrinks at once to the number handled within ``span_ns``, down to one
record.  Both sides use this rule.  The native client counts a record as handled when the application takes
the next one.  For other consumers the broker counts acks.

:class:`PacedSeat` is for consumers that let the broker set their pace: it limits the credit that they can use
now.

A gRPC client takes every message that its stream brings, long before the application works on it.  So its
credit does not show its pace, but its acks do.  The client has a window of un-acked records; credit beyond
the window is withheld.

A client may work on one record or on many at a time.  The time for one record is measured when the client had
no other record.  The number that it acks within such a time is its parallelism.  If that is the whole window,
no record waits at the client, and the window doubles.  Otherwise the window becomes the number acked within
its span, or twice the parallelism.  A consumer that acks nothing while its window is full may collect records
before it acks them, so its window doubles each time that ``stall_ns`` passes.
"""

from __future__ import annotations

from typing import Final

from danube.limits import MAX_UNACKED_DEFAULT

WINDOW_FIRST: Final = 16
WINDOW_MAX: Final = MAX_UNACKED_DEFAULT
SPAN_NS: Final = 500_000_000
ACK_TIMEOUT_PARTS: Final = 8  # the window is worth no more than this part of the ack timeout


def span_of(ack_timeout_ns: int) -> int:
    """In which time a window is to be handled, where records time out after ``ack_timeout_ns``."""
    return max(min(SPAN_NS, ack_timeout_ns // ACK_TIMEOUT_PARTS), 1)


class ConsumerWindow:
    """``records`` is the window's size now; it stays between ``least`` and ``most``."""

    __slots__ = ("_count", "_since_ns", "least", "most", "records", "span_ns")

    def __init__(self, records: int, *, least: int = 1, most: int = WINDOW_MAX) -> None:
        self.records = records
        self.least = least
        self.most = most
        self.span_ns = SPAN_NS
        self._count = 0
        self._since_ns = 0

    @property
    def fixed(self) -> bool:
        return self.least == self.most

    def began(self, now_ns: int) -> None:
        """The consumer had nothing and has something now: the time before was no handling."""
        self._since_ns = now_ns
        self._count = 0

    def handled(self, count: int, now_ns: int) -> int:
        """``count`` records were handled; return by how much the window changed."""
        self._count += count
        elapsed_ns = max(now_ns - self._since_ns, 1)
        before = self.records
        if self.fixed or (2 * self._count < before and elapsed_ns < self.span_ns):
            return 0
        fitting = self._count * self.span_ns // elapsed_ns
        self.records = max(min(fitting, 2 * before, self.most), self.least)
        self.began(now_ns)
        return self.records - before

    def fit(self, count: int, elapsed_ns: int) -> None:
        """Follow a consumer that settled ``count`` records in the time that it takes for one."""
        if count >= self.records:
            self.double()
            return
        at_once = 1 if count <= 1 else 2 * count
        fitting = max(count * self.span_ns // max(elapsed_ns, 1), at_once)
        self.records = max(min(fitting, 2 * self.records, self.most), self.least)

    def double(self) -> None:
        """Let the consumer have more, though it has handled nothing."""
        self.records = min(2 * self.records, self.most)


NEVER_NS: Final = 1 << 62
ROUND_MIN_NS: Final = 10_000_000


class PacedSeat:
    """``open``: records that are not settled, granted or not: usable credit and records in flight."""

    __slots__ = ("_began_ns", "_idle_ns", "_moved_ns", "_round_count", "_round_ns", "_service_ns",
                 "_stall_ns", "open", "window", "withheld")  # fmt: skip

    def __init__(self, now_ns: int, ack_timeout_ns: int) -> None:
        self.window = ConsumerWindow(WINDOW_FIRST)
        self.withheld = 0
        self.open = 0
        self._idle_ns = now_ns  # since when nothing is in flight; -1: something is
        self._began_ns = -1  # when it was granted something and had nothing; -1: it has acked since
        self._service_ns = 0  # how long it took for one record
        self._round_ns = -1  # when it settled the first record of this round; -1: none yet
        self._round_count = 0
        self._moved_ns = now_ns
        self._stall_ns = NEVER_NS
        self.follow(ack_timeout_ns)

    def follow(self, ack_timeout_ns: int) -> None:
        """The ack timeout is another one."""
        self.window.span_ns = span_of(ack_timeout_ns)
        self._stall_ns = max(ack_timeout_ns // ACK_TIMEOUT_PARTS, 1)

    def began(self, now_ns: int) -> None:
        """Note that the consumer was granted records."""
        if self._idle_ns < 0:
            return
        if now_ns - self._idle_ns > self._service_ns // 4:  # it had to wait: that says nothing of its pace
            self._round_ns = -1
        self._idle_ns = -1
        self._began_ns = self._moved_ns = now_ns

    def has_nothing(self, now_ns: int) -> None:
        """Note that the consumer has no record in flight any more."""
        self._idle_ns = now_ns

    def settled(self, count: int, now_ns: int) -> None:
        """Note that the consumer acked or nacked ``count`` records at once."""
        self._moved_ns = now_ns
        if self._began_ns >= 0:
            self._service_ns = now_ns - self._began_ns
            self._began_ns = -1
        if self._round_ns < 0:
            self._round_ns, self._round_count = now_ns, count
        elif now_ns < self._round_ns + max(self._service_ns, ROUND_MIN_NS):
            self._round_count += count
        else:
            self.window.fit(self._round_count, now_ns - self._round_ns)
            self._round_ns, self._round_count = now_ns, count

    def timed_out(self, now_ns: int) -> None:
        """Note that the consumer did not settle its records in time; shrink its window to the least."""
        self._moved_ns = now_ns
        self._round_ns = -1
        self.window.records = self.window.least

    def stalled_ns(self, usable: int) -> int:
        """Return when a consumer that settles nothing may have more; NEVER_NS if it could have more now."""
        return NEVER_NS if usable or not self.withheld else self._moved_ns + self._stall_ns

    def stalled(self, now_ns: int) -> None:
        self._moved_ns = now_ns
        self.window.double()

    def usable(self, credit: int) -> int:
        """Return the usable part of ``credit`` and of the withheld credit; withhold the rest."""
        more = min(self.withheld, self.window.records - self.open)
        more = max(more, -credit)
        self.withheld -= more
        self.open += more
        return credit + more
