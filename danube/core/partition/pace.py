"""Pace of uploads: their share of time while workers wait for processors.  Plain values in, decisions out.

Uploading costs the mover, and a store on the same host even more, so on a busy host uploads slow publishing
down.  That shows in the time for which a worker's loop was ready to run and had no processor.  While a busy
worker waits much, fewer uploads run at a time, and they pause between their pieces; otherwise all of them
work all the time.

Waiting records are only on this host, so the pauses are bounded: the nearer the oldest record or the waiting
bytes come to their bounds, the less uploads pause, and at a bound they do not pause at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

SHARE_MIN: Final = 0.1  # so that a host that is always busy still uploads
WAIT_HIGH: Final = 0.10  # of the time; a worker that waits more is held up
WAIT_LOW: Final = 0.03
BUSY_MIN: Final = 0.05  # of a processor; of a worker that does less, its waiting says nothing
FALL_MAX: Final = 4.0  # the share falls to no less than this part of it at once
RISE: Final = 1.5
PAUSE_MAX_NS: Final = 1_000_000_000
HELD_FREELY: Final = 0.5  # of a bound; above it uploads rest less and less


class Scheduled(NamedTuple):
    """Processor time of one process since it began, in nanoseconds: running, and waiting for a processor."""

    ran_ns: int
    waited_ns: int


class Bounds(NamedTuple):
    """How far holding back may go: age of the oldest record and bytes that wait.  0: nothing is held back."""

    age_s: float
    size_bytes: int


class Pace:
    """Share of the speed of ``parallel`` uploads that they may use, 1.0 if no worker is busy.

    One watcher calls ``observe`` and ``exposed``; any thread may call ``pause_ns``.
    """

    __slots__ = ("_bounds", "_last", "_last_ns", "_least", "_parallel", "_yielded")

    def __init__(self, bounds: Bounds, parallel: int) -> None:
        self._bounds = bounds
        self._parallel = parallel
        self._last: dict[int, Scheduled] = {}
        self._last_ns = 0
        self._yielded = 1.0  # what the workers' waiting leaves
        self._least = SHARE_MIN  # what the bounds demand
        self.exposed(0, 0)

    @property
    def share(self) -> float:
        return max(self._yielded, self._least)

    def observe(self, workers: Mapping[int, Scheduled], now_ns: int) -> None:
        """Take the workers' numbers by process id; one that is new or gone says nothing this time."""
        elapsed_ns = now_ns - self._last_ns
        if elapsed_ns <= 0:
            return
        waiting = 0.0
        for pid, found in workers.items():
            before = self._last.get(pid)
            if before is not None and found.ran_ns - before.ran_ns >= BUSY_MIN * elapsed_ns:
                waiting = max(waiting, (found.waited_ns - before.waited_ns) / elapsed_ns)
        self._last, self._last_ns = dict(workers), now_ns
        if waiting > WAIT_HIGH:
            self._yielded = max(SHARE_MIN, self._yielded / min(FALL_MAX, waiting / WAIT_HIGH))
        elif waiting < WAIT_LOW:
            self._yielded = min(1.0, self._yielded * RISE)

    def exposed(self, age_s: float, size_bytes: int) -> None:
        """Take the age of the oldest record that waits for its upload, and how many bytes wait."""
        bounds = self._bounds
        if not (bounds.age_s and bounds.size_bytes):
            self._least = 1.0
            return
        used = max(age_s / bounds.age_s, size_bytes / bounds.size_bytes)
        self._least = min(1.0, max(SHARE_MIN, (used - HELD_FREELY) / (1.0 - HELD_FREELY)))

    @property
    def slots(self) -> int:
        """How many uploads may be under way before another one begins: few that get on, not all a little."""
        return max(1, round(self.share * self._parallel))

    def pause_ns(self, worked_ns: int, running: int) -> int:
        """How long one of ``running`` uploads rests after having worked for so long."""
        part = min(1.0, self.share * self._parallel / max(1, running))
        return min(PAUSE_MAX_NS, int(worked_ns * (1.0 - part) / part))
