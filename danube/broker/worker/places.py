"""Places for connections: how many one worker holds, over all doors, after the log's descriptors.

Every connection needs a descriptor, and the number of descriptors is limited.  Half of them are reserved for
the log (:mod:`danube.wal.segments.descriptors`), a few for other uses, and the rest are places for
connections.  If no place is free, a new connection gets an error and is closed, while segments can still
roll.
"""

from __future__ import annotations

from danube.errors import LimitExceeded


class Places:
    """``places_max``: of all doors together."""

    def __init__(self, places_max: int) -> None:
        self.places_max = places_max
        self._taken = 0

    def take(self) -> None:
        """One more connection; raises LimitExceeded if the log would have to pay for it."""
        if self._taken >= self.places_max:
            raise LimitExceeded(
                f"this worker has descriptors for {self.places_max} connections",
                why="the others are kept for the log",
                hint="close some, or let the broker open more files: ulimit -n, LimitNOFILE",
            )
        self._taken += 1

    def give_back(self) -> None:
        self._taken -= 1
