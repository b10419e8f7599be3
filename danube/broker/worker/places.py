"""Places for connections: how many one worker may hold, over all doors.

Every connection needs a descriptor, and the number of descriptors is limited.  Half of them are reserved for
the log (:mod:`danube.wal.segments.descriptors`), a few for other uses, and the rest are places for
connections.  If no place is free, a new connection gets an error and is closed, while segments can still
roll.  The last places are for connections of this host, so that an operator gets in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube.errors import LimitExceeded
from danube.host import tcp

if TYPE_CHECKING:
    from danube.broker.worker.guests import Guests


class Places:
    """Counts the places that the connections of all doors have taken, at most ``places_max``.

    ``kept``: how many of them are for connections of this host alone.  ``guests``: None where connections of
    an address or a principal are not limited.
    """

    def __init__(self, places_max: int, *, kept: int = 0, guests: Guests | None = None) -> None:
        self.places_max = places_max
        self._kept = kept
        self._guests = guests
        self._taken = 0

    def take(self, host: str, held: int, most: int, *, arrived: bool = False) -> None:
        """Take a place for a new connection from ``host`` at a door that holds ``held`` of ``most``.

        ``arrived``: another worker has judged it.  Raises LimitExceeded if no place is free, and Overloaded
        if its address has as many as it may.
        """
        local = tcp.local(host)
        kept = 0 if local or arrived else self._kept
        if held >= most - kept:
            raise LimitExceeded(
                f"this worker holds {held} connections already",
                why=f"{kept} more are kept for this host" if kept else "",
                hint="close some, or raise limits.connections_max",
            )
        if self._taken >= self.places_max - kept:
            raise LimitExceeded(
                f"this worker has descriptors for {self.places_max} connections",
                why="the others are kept for the log",
                hint="close some, or let the broker open more files: ulimit -n, LimitNOFILE",
            )
        if self._guests is not None:
            if arrived:
                self._guests.arrive(host)
            else:
                self._guests.come(host, local=local)
        self._taken += 1

    def give_back(self, host: str) -> None:
        """Release the place of a closed connection."""
        self._taken -= 1
        if self._guests is not None:
            self._guests.leave(host)

    def enter(self, principal: str, host: str, *, arrived: bool = False) -> None:
        """Count a connection for its principal; raises Overloaded if there are as many as there may be."""
        if self._guests is None:
            return
        if arrived:
            self._guests.carry(principal)
        else:
            self._guests.enter(principal, local=tcp.local(host))

    def exit(self, principal: str) -> None:
        """A connection of this principal is closed, or shows another one."""
        if self._guests is not None:
            self._guests.exit(principal)
