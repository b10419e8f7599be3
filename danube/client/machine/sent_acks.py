"""Acknowledgements that were sent and that the broker may not have stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Ranges = list[tuple[int, int]]

KEPT_NS: Final = 15_000_000_000  # a broker stores cursors sooner, and a lost connection is noticed sooner
RANGES_KEPT_MAX: Final = 16_384


class SentAcks:
    """What to send again before the broker can say that everything is stored.

    Kept for KEPT_NS at least; what is older was stored by a broker that runs.  It is sent again only when
    somebody asks for a sync.
    """

    __slots__ = ("_asked", "_earlier", "_last", "_lost", "_now_ns", "_recent", "_turned_ns", "unsure")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.unsure = False  # something was sent since the last sync that was answered
        self._now_ns = now_ns
        self._recent: Ranges = []
        self._earlier: Ranges = []
        self._asked: Ranges = []  # a sync that is not answered yet is about these
        self._lost: Ranges = []  # sent on a connection that is gone
        self._last: tuple[int, int] | None = None
        self._turned_ns = now_ns()

    def add(self, ranges: Ranges) -> None:
        """These were written for the broker; at least one."""
        now_ns = self._now_ns()
        recent = self._recent
        if now_ns - self._turned_ns > KEPT_NS or len(recent) > RANGES_KEPT_MAX:
            self._earlier, self._turned_ns = recent, now_ns
            recent = self._recent = []
        if recent and recent[-1][1] == ranges[0][0]:
            recent[-1] = (recent[-1][0], ranges[0][1])
            recent += ranges[1:]
        else:
            recent += ranges
        self._last = ranges[-1]
        self.unsure = True

    def lose(self) -> None:
        """The connection is gone, and with it the answer."""
        if self.unsure or self._asked:
            self.unsure = True
            lost = self._lost + self._asked + self._earlier + self._recent
            self._lost = lost[-RANGES_KEPT_MAX:]
            self._asked, self._earlier, self._recent = [], [], []

    def clear(self) -> None:
        """Somebody has sought: what was acked before must not be acked again."""
        self._lost, self._asked, self._earlier, self._recent = [], [], [], []
        self._last = None

    def take_lost(self) -> Ranges:
        """What is to be sent again before a sync."""
        lost, self._lost = self._lost, []
        return lost

    def begin_sync(self) -> tuple[int, int] | None:
        """A range to ask about, whose answer is about everything sent so far; None where nothing was."""
        self._asked = self._asked + self._earlier + self._recent
        self._earlier, self._recent = [], []
        self.unsure = False  # until more is sent
        return self._last

    def end_sync(self, stored: bool) -> None:
        """The broker has answered."""
        if not stored:
            self._earlier = self._asked + self._earlier
            self.unsure = True
        self._asked = []
