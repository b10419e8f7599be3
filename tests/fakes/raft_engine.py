"""An Engine of one member in memory: commits what is proposed when the test says so, or at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from danube.cluster.raft.engine import EngineStatus, Machine, Members
from danube.errors import InvalidArgument, NotLeader, OutcomeUnknown
from danube.limits import RAFT_ENTRY_BYTES_MAX


class FakeEngine:
    """Leads from the start; ``held`` keeps proposals until release()."""

    def __init__(self, machine: Machine, *, node_id: str = "1", term: int = 1) -> None:
        self.machine = machine
        self.node_id = node_id
        self.term = term
        self.leading = True
        self.held = False
        self.entries: list[bytes] = []
        self.index = machine.applied_index
        self.members = Members({node_id: "h:1"})
        self._waiting: list[tuple[bytes | None, asyncio.Future[Any]]] = []  # None: a change of members

    @property
    def status(self) -> EngineStatus:
        role, leader = ("leader", self.node_id) if self.leading else ("follower", "")
        applied = self.index
        return EngineStatus(
            self.node_id, role, leader, self.term, self.index + len(self._waiting), applied, applied, 0,
            self.members,
        )  # fmt: skip

    def start(self) -> None: ...

    def stop(self) -> None:
        self.lose()

    def receive(self, node_id: str, message: bytes) -> None: ...

    def propose(self, entry: bytes) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self.leading:
            future.set_exception(NotLeader("no"))
            return future
        if len(entry) > RAFT_ENTRY_BYTES_MAX:
            future.set_exception(InvalidArgument("an entry is too large"))
            return future
        self._waiting.append((entry, future))
        if not self.held:
            self.release()
        return future

    def release(self) -> None:
        """Commit what waits."""
        waiting, self._waiting = self._waiting, []
        for entry, future in waiting:
            result = self._commit(entry)
            if not future.done():
                future.set_result(result)

    def _commit(self, entry: bytes | None) -> object:
        self.index += 1
        if entry is None:
            return None
        self.entries.append(entry)
        return self.machine.apply(self.index, self.term, entry)

    def lose(self, *, committed: bool = False) -> None:
        """Leadership goes; what waited is committed by the next leader, or never."""
        self.leading = False
        waiting, self._waiting = self._waiting, []
        for entry, future in waiting:
            if committed:
                self._commit(entry)
            if not future.done():
                future.set_exception(OutcomeUnknown("lost"))

    def win(self) -> None:
        """It leads again, in a later term, after an entry of its own."""
        self.term += 1
        self.index += 1
        self.leading = True

    def read_barrier(self) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.leading:
            future.set_result(self.index)
        else:
            future.set_exception(NotLeader("no"))
        return future

    def change_members(self, members: Members) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.members = members
        self._waiting.append((None, future))
        if not self.held:
            self.release()
        return future

    def statistics(self) -> Mapping[str, int]:
        return {}
