"""Passing of connections to the worker that owns their partition.

The kernel distributes connections without knowing their partitions, and requests for a partition of another
worker cross two rings.  So a connection without open handles is passed to the owner of the first partition
that it names.  It is not passed if the owner has enough connections: as many as this worker, or more than a
number of fair shares of all.
"""

from __future__ import annotations

from danube.ipc.counters import Counter, Counters, State
from danube.ipc.passage import Passage
from danube.ipc.region import Region


class ConnectionPassing:
    """Passes connections of one worker's door to the same door of others."""

    def __init__(
        self, worker: int, region: Region, passage: Passage, door: str, *, shares_max: float = 0
    ) -> None:
        """``shares_max``: an owner with fewer than so many fair shares gets connections in any case."""
        self._worker = worker
        self._passage = passage
        self._door = door
        self._shares_max = shares_max
        self._blocks = [Counters(region, other) for other in range(region.layout.workers)]

    def offer(
        self,
        owner: int,
        descriptor: int,
        unread: bytes | bytearray | memoryview,
        sent_bytes: int = 0,
        told: bytes = b"",
    ) -> bool:
        """Pass the socket and its unused input to ``owner``, if it has room; return whether it was passed.

        ``sent_bytes``: the number of bytes that were sent on it before, if the new owner must know.
        ``told``: what else it must know, such as who the client is.
        """
        there = self._blocks[owner]
        return (
            owner != self._worker
            and there.get(Counter.STATE) == State.READY
            and there.get(Counter.PID) != 0
            and self._has_room(there.get(Counter.CONNECTIONS))
            and self._passage.send(owner, descriptor, self._door, sent_bytes, unread, told)
        )

    def _has_room(self, there: int) -> bool:
        held = [block.get(Counter.CONNECTIONS) for block in self._blocks]
        return there < held[self._worker] or (there + 1) * len(held) <= self._shares_max * sum(held)
