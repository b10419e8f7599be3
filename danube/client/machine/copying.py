"""Whether bytes for another processor are stored as usual, or past the caches (kernels/streaming.py).

Both are right, on one host and minutes apart.  Where reader and writer share caches, what is stored as usual
is read from there, and what went past them has to be fetched from memory.  Where they share none, each line
waits for the other processor to let go of it, five times as long as the whole copy takes past the caches; a
virtual host is moved from one to the other.
"""

from __future__ import annotations

from typing import Final

from danube.core import kernels

TRIED: Final = 4  # how many copies past the caches tell what one costs
STREAMED: Final = 128  # after how many of them usual ones are tried again
TIMES: Final = 2.25  # as long as the best of them: what a usual one may take
SLOW_IN_A_ROW: Final = 2  # that took longer; one alone was held up by somebody else


class CopyChoice:
    """Chooses for copies of one kind, by how long they took."""

    __slots__ = ("_best_ns", "_left", "_slow")

    def __init__(self) -> None:
        self._best_ns = float("inf")  # a byte, past the caches
        self._left = TRIED
        self._slow = 0  # usual ones in a row

    def streams(self) -> bool:
        """Whether the next one goes past the caches."""
        return self._left > 0 and kernels.available

    def took(self, streamed: bool, size: int, duration_ns: int) -> None:
        """How long a copy of ``size`` bytes took, and how it was done."""
        cost_ns = duration_ns / size
        if streamed:
            self._left -= 1
            self._best_ns = min(self._best_ns, cost_ns)
            return
        self._slow = self._slow + 1 if cost_ns > TIMES * self._best_ns else 0
        if self._slow == SLOW_IN_A_ROW:
            self._slow, self._left, self._best_ns = 0, STREAMED, float("inf")
