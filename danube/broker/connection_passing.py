"""Which worker holds a connection.

The kernel deals connections out without knowing what they are for, and what a connection asks of a partition
that another worker owns crosses two rings.  So before it has opened anything, a connection is passed to the
owner of the first partition that it asks for, unless that one holds as many connections as this one: the
sockets of a busy partition's clients stay spread over the workers, and more evenly than they were dealt out.
"""

from __future__ import annotations

from danube.ipc.counters import Counter, Counters, State
from danube.ipc.passage import Passage
from danube.ipc.region import Region


class ConnectionPassing:
    """Passes connections of one worker to others."""

    def __init__(self, worker: int, region: Region, passage: Passage) -> None:
        self._worker = worker
        self._passage = passage
        self._blocks = [Counters(region, other) for other in range(region.layout.workers)]

    def offer(self, owner: int, descriptor: int, unread: bytes | memoryview) -> bool:
        """Whether ``owner`` gets the socket, with the bytes that were read from it and not used."""
        there = self._blocks[owner]
        return (
            owner != self._worker
            and there.get(Counter.STATE) == State.READY
            and there.get(Counter.PID) != 0
            and there.get(Counter.CONNECTIONS) < self._blocks[self._worker].get(Counter.CONNECTIONS)
            and self._passage.send(owner, descriptor, unread)
        )
