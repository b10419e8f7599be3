"""How many records a consumer may have at a time: what it handles within a moment.

The window starts small, so that a consumer which comes later finds something left.  It doubles while half of
it is handled fast and shrinks at once to what was handled within ``span_ns``, down to one record.  One rule
for both sides: the native client counts a record as handled when the application asks for the next one, the
broker counts what is acked (:mod:`danube.core.dispatch.paced`) for consumers that cannot say more.
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
