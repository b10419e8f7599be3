"""The Consensus port in memory: one order of commands, and any number of logs that read it.

What is stored is bytes, as everywhere, so a reader shares nothing with the proposer.
"""

from __future__ import annotations

from collections.abc import Sequence

from danube.cluster.log.local_log import accept
from danube.core.metadata.commands import (
    Change,
    Command,
    Outcome,
    decode_commands,
    join_commands,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.outcomes import outcome_of
from danube.core.metadata.ports import Consensus
from danube.errors import ClosedError
from danube.limits import METADATA_ENTRY_BYTES_MAX


class Order:
    """Entries in order; ``compact`` replaces those so far by a snapshot."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, bytes]] = []  # index of the first command, commands
        self.snapshot = Metadata().snapshot()
        self.generation = 0

    def compact(self, state: Metadata) -> None:
        self.snapshot = state.snapshot()
        self.entries.clear()
        self.generation += 1


class MemoryLog(Consensus):
    def __init__(self, order: Order | None = None) -> None:
        self.order = order or Order()
        self._state = Metadata()
        self._changes: list[Change] = []
        self._generation = -1
        self._taken = 0
        self._closed = False
        self._catch_up()
        self._changes.clear()

    @property
    def state(self) -> Metadata:
        return self._state

    @property
    def version(self) -> int:
        return self._state.version

    def propose_many(self, commands: Sequence[Command]) -> list[Outcome]:
        self._check_open()
        self._catch_up()
        results: list[Outcome] = [None] * len(commands)
        start = 0
        while start < len(commands):
            accepted, start = accept(self._state, commands, start, results, METADATA_ENTRY_BYTES_MAX)
            if not accepted:
                continue
            entry = join_commands([one.encoded for one in accepted])
            self.order.entries.append((self._state.version + 1, entry))
            self._taken += 1
            for one in accepted:
                changes = self._state.apply(self._state.version + 1, one.command)
                self._changes += changes
                results[one.place] = outcome_of(self._state, one.command, changes)
        return results

    def refresh(self) -> list[Change]:
        self._check_open()
        self._catch_up()
        changes, self._changes = self._changes, []
        return changes

    def compact(self) -> None:
        """As LocalLog does when its file has grown: readers that lag behind get the snapshot."""
        self._catch_up()
        self.order.compact(self._state)
        self._generation, self._taken = self.order.generation, 0

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the metadata log was closed")

    def _catch_up(self) -> None:
        if self._generation != self.order.generation:
            state = Metadata.restore(self.order.snapshot)
            self._changes += state.changes_since(self._state)
            self._state, self._generation, self._taken = state, self.order.generation, 0
        for index, entry in self.order.entries[self._taken :]:
            assert index == self._state.version + 1
            for command in decode_commands(entry):
                self._changes += self._state.apply(self._state.version + 1, command)
        self._taken = len(self.order.entries)
