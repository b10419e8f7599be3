"""Futures of callers at a leader: outcomes of proposals by index, and barriers by heartbeat.

A future belongs to one leadership.  If that ends, a proposal that was not appended ends with NotLeader, and
an appended one with OutcomeUnknown, unless it was applied before.
"""

from __future__ import annotations

import asyncio
from typing import Any

from danube.cluster.raft.entry import Entry, size_of
from danube.errors import DanubeError, NotLeader, OutcomeUnknown, Overloaded
from danube.limits import RAFT_PROPOSALS_BYTES_MAX, RAFT_PROPOSALS_MAX

Outcome = asyncio.Future[Any]


class Proposals:
    """Entries that are not appended yet, and futures of those that are not applied yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: list[tuple[Entry, Outcome]] = []
        self._waiting: dict[int, tuple[Outcome, int]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._waiting)

    def add(self, entry: Entry) -> Outcome:
        """Take an entry on the way; raises Overloaded."""
        size = size_of(entry)
        if len(self) >= RAFT_PROPOSALS_MAX or self._bytes + size > RAFT_PROPOSALS_BYTES_MAX:
            raise Overloaded("too many proposals wait", limit=RAFT_PROPOSALS_MAX)
        outcome = self._loop.create_future()
        self._queue.append((entry, outcome))
        self._bytes += size
        return outcome

    def take(self, first_index: int) -> list[Entry]:
        """The entries that are about to be appended from ``first_index`` on."""
        queue, self._queue = self._queue, []
        for index, (entry, outcome) in enumerate(queue, first_index):
            self._waiting[index] = (outcome, size_of(entry))
        return [entry for entry, _ in queue]

    def applied(self, index: int, result: object) -> None:
        outcome, size = self._waiting.pop(index, (None, 0))
        self._bytes -= size
        if outcome is not None and not outcome.done():
            outcome.set_result(result)

    def fail(self, leader_id: str) -> None:
        """Leadership is over."""
        for _, outcome in self._queue:
            refuse(outcome, NotLeader("this member no longer leads", leader_id=leader_id))
        for outcome, _ in self._waiting.values():
            refuse(outcome, OutcomeUnknown("leadership was lost before the outcome was known"))
        self._queue, self._waiting, self._bytes = [], {}, 0


class Barriers:
    """Futures that wait for a majority to answer a heartbeat that began after them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._new: list[Outcome] = []
        self._begun: list[tuple[int, Outcome]] = []

    def add(self) -> Outcome:
        if len(self._new) + len(self._begun) >= RAFT_PROPOSALS_MAX:
            raise Overloaded("too many barriers wait", limit=RAFT_PROPOSALS_MAX)
        self._new.append(self._loop.create_future())
        return self._new[-1]

    @property
    def due(self) -> bool:
        """Whether some wait for a heartbeat to begin."""
        return bool(self._new)

    def begin(self, number: int) -> None:
        """A heartbeat begins with this number."""
        self._begun += [(number, outcome) for outcome in self._new]
        self._new = []

    def answered(self, number: int, commit_index: int) -> None:
        """A majority has answered heartbeats up to this number."""
        while self._begun and self._begun[0][0] <= number:
            outcome = self._begun.pop(0)[1]
            if not outcome.done():
                outcome.set_result(commit_index)

    def fail(self, leader_id: str) -> None:
        for outcome in [*self._new, *(outcome for _, outcome in self._begun)]:
            refuse(outcome, NotLeader("this member no longer leads", leader_id=leader_id))
        self._new, self._begun = [], []


def refuse(outcome: Outcome, error: DanubeError) -> Outcome:
    """End a future with an error that need not be read."""
    if not outcome.done():
        outcome.set_exception(error)
        outcome.exception()
    return outcome
