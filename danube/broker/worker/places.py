"""Places for connections: how many one worker may hold, over all doors.

Every connection needs a descriptor, and the number of descriptors is limited.  Half of them are reserved for
the log (:mod:`danube.wal.segments.descriptors`), a few for other uses, and the rest are places for
connections.  If no place is free, a new connection gets an error and is closed, while segments can still
roll.
"""

from __future__ import annotations

from danube.errors import LimitExceeded


class Places:
    """Counts the places that the connections of all doors have taken, at most ``places_max``."""

    def __init__(self, places_max: int) -> None:
        self.places_max = places_max
        self._taken = 0

    def take(self) -> None:
        """Take a place for a new connection; raises LimitExceeded if no place is free."""
        if self._taken >= self.places_max:
            raise LimitExceeded(
                f"this worker has descriptors for {self.places_max} connections",
                why="the others are kept for the log",
                hint="close some, or let the broker open more files: ulimit -n, LimitNOFILE",
            )
        self._taken += 1

    def give_back(self) -> None:
        """Release the place of a closed connection."""
        self._taken -= 1
