"""Moments that a session waits for; the shell asks for the next one and says when it has come."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timer:
    """A moment at which ``action`` is called, unless cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Timers:
    """A heap of timers; ``when_timer`` is called when an earlier one than before was added."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.now_ns = now_ns
        self.when_timer: Callable[[], None] = _nothing
        self._timers: list[tuple[int, int, Timer]] = []
        self._timer_order = itertools.count()

    @property
    def next_timer_ns(self) -> int | None:
        """Moment on the monotonic clock of the first live timer."""
        timers = self._timers
        while timers and timers[0][2].action is None:
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    def call_at(self, moment_ns: int, action: Callable[[], None]) -> Timer:
        """Call ``action`` from on_time() once ``moment_ns`` has come."""
        timer = Timer(action)
        heapq.heappush(self._timers, (moment_ns, next(self._timer_order), timer))
        if self._timers[0][2] is timer:
            self.when_timer()
        return timer

    def on_time(self) -> None:
        """Run what is due."""
        now_ns = self.now_ns()
        while self._timers and self._timers[0][0] <= now_ns:
            timer = heapq.heappop(self._timers)[2]
            action, timer.action = timer.action, None
            if action is not None:
                action()


def _nothing() -> None:
    pass
