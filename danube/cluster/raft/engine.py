"""Port of the engine: the interface of one member of a replicated log, for any algorithm.

Owner:    one event loop's thread; every call happens there.
Entries:  opaque bytes in one agreed order.  ``Machine.apply`` gets each committed one once, in order.
Outcome:  a future that ends with NotLeader was not stored by this member; one that ends with
          OutcomeUnknown may still be committed by a later leader.
Network:  may lose, repeat, delay and reorder messages; never changes them.
Storage:  a promise to a peer is durable before the promise leaves.  A storage error ends
          the member: ``Host.failed`` gets the error, and nothing is sent any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec


class Members(msgspec.Struct, frozen=True):
    """Members by node id, with their addresses (``host:port``).  Voters decide; learners only follow."""

    voters: dict[str, str]
    learners: dict[str, str] = {}


class EngineStatus(msgspec.Struct, frozen=True):
    """One member as it is now; indexes count entries from 1."""

    node_id: str
    role: str  # follower, candidate, leader
    leader_id: str  # "" while none is known
    term: int
    last_index: int
    commit_index: int
    applied_index: int
    snapshot_index: int
    members: Members


class Machine(Protocol):
    """State that committed entries are applied to; deterministic."""

    @property
    def applied_index(self) -> int:
        """Index of the last entry that is part of the state; entries up to it are not applied again."""

    def apply(self, index: int, term: int, entry: bytes) -> object:
        """Apply one committed entry; return the result of its proposal on the leader."""

    def freeze(self) -> Callable[[], bytes]:
        """Capture the whole state; the returned function encodes it, in any thread."""

    def stored(self, snapshot: bytes) -> None:
        """The bytes of the last ``freeze`` are on disk, in the place of the entries that they hold."""

    def thaw(self, snapshot: bytes) -> object:
        """Decode a snapshot for ``restore``; in any thread, as it touches nothing."""

    def restore(self, index: int, snapshot: bytes, thawed: object) -> None:
        """Become the state of ``snapshot``, which holds all entries up to ``index``."""


class Host(Protocol):
    """Callbacks of an engine to the node it runs in."""

    def send(self, node_id: str, message: bytes) -> None:
        """Send to a peer without waiting; may lose the message."""

    def role_changed(self, status: EngineStatus) -> None:
        """The role, the leader or the term is another one."""

    def members_changed(self, members: Members) -> None:
        """A change of members is in the log, committed or not."""

    def failed(self, error: BaseException) -> None:
        """The member cannot go on and has stopped; the process is to end."""


class Engine(Protocol):
    """One member of the group."""

    @property
    def status(self) -> EngineStatus: ...

    def start(self) -> None:
        """Take part from now on."""

    def stop(self) -> None:
        """Take no part any more; proposals that wait end with OutcomeUnknown."""

    def receive(self, node_id: str, message: bytes) -> None:
        """Take a message of an authenticated peer; unreadable messages are counted and dropped."""

    def propose(self, entry: bytes) -> asyncio.Future[Any]:
        """Propose an entry; the future ends with the result of ``Machine.apply`` here."""

    def read_barrier(self) -> asyncio.Future[int]:
        """An index: a machine that has applied it has seen all that was acknowledged before the call."""

    def change_members(self, members: Members) -> asyncio.Future[None]:
        """Add, promote or remove one member; refused while another change is on its way."""

    def statistics(self) -> Mapping[str, int]:
        """Counters, for telemetry."""
