"""One member of a cluster: the engine, the transport, the proposals and the host's copy, put together.

All work is on one loop.  Requests of this host's processes are sent to the leader, and again to the next
leader until there is an answer or the time is over.  The machine recognises a repetition by its origin and
number.  The answer is returned when this member has applied the entry that it refers to.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

import msgspec

from danube.cluster.control.calls import (
    Answer,
    Barrier,
    Change,
    ClusterStatus,
    Failed,
    Introduce,
    Introduction,
    Join,
    Propose,
    Request,
    Status,
    decode_request,
    encode,
    sent_error,
)
from danube.cluster.control.formation import ASK_TIMEOUT_S, Formation, Formed, ask_to_join
from danube.cluster.control.leadership import Leadership
from danube.cluster.control.roster import Roster
from danube.cluster.control.to_leader import ToLeader
from danube.cluster.etcd.calls import EtcdPlace
from danube.cluster.etcd.place import EtcdFormation
from danube.cluster.links.frames import Greeting, Lane
from danube.cluster.links.link import LinkTimes
from danube.cluster.links.tls import TlsContexts
from danube.cluster.links.transport import Identity, Transport
from danube.cluster.log.applied_log import AppliedLog
from danube.cluster.log.node_files import ETCD, FORMING, MEMBER, check_journal, load_node, store_node
from danube.cluster.log.waiting import Waiting, waiting_error
from danube.cluster.raft.engine import Engine, EngineStatus, Host, Machine, Members
from danube.core.placement.balance import BalanceSettings
from danube.errors import DanubeError, InvalidArgument, NotSupported, Unavailable, WrongState, broken
from danube.host import telemetry
from danube.host.clock import elapsed_ns, wall_us

JOIN_RETRY_S: Final = 0.5
JOIN_TIMEOUT_S: Final = 5.0
SHOW_POLL_S: Final = 0.05
LEADERLESS_NS: Final = 5_000_000_000  # longer than any election takes: then a leader is not around the corner
LEADERLESS_WAIT_MS: Final = 2_000
METADATA_DIRECTORY: Final = "metadata"
JOURNAL_DIRECTORY: Final = "raft"
JOURNAL_FILE: Final = "raft.log"

_log = telemetry.events("cluster.node")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """``raft_addr`` is where the others reach this node; it need not be where it listens."""

    data_dir: Path
    cluster: str
    raft_addr: str
    seeds: tuple[str, ...] = ()
    join: tuple[str, ...] = ()
    heartbeat_ms: int = 150
    tls: TlsContexts | None = None
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    etcd: EtcdPlace | None = None  # in the place of a journal, seeds and votes


class MakeEngine(Protocol):
    """Factory of an engine; ``bootstrap`` only for the node that makes the cluster."""

    def __call__(
        self,
        node_id: str,
        directory: Path,
        machine: Machine,
        host: Host,
        *,
        cluster_id: str,
        bootstrap: Members | None,
        heartbeat_ms: int,
    ) -> Engine: ...


class Node:
    """One member, see the module; ``failed`` is called when it cannot go on and the process is to end."""

    def __init__(
        self,
        settings: NodeSettings,
        make_engine: MakeEngine | None,
        failed: Callable[[BaseException], None],
    ) -> None:
        """``make_engine`` is None if the metadata is in etcd."""
        self._settings = settings
        self._make_engine = make_engine
        self._failed = failed
        self._record = load_node(settings.data_dir)
        self._directory = settings.data_dir / JOURNAL_DIRECTORY
        if settings.etcd is None:
            check_journal(self._record, self._journal_exists, self._directory)
        self._machine = AppliedLog(settings.data_dir / METADATA_DIRECTORY, self._on_applied)
        if (self._machine.version or self._machine.damaged) and not self._journal_exists:
            self._machine.close()
            raise WrongState(
                f"{settings.data_dir} holds the metadata of a broker that was alone",
                why="members must all begin with the same",
                hint="make it the first one with `danube cluster adopt`, or start with an empty directory",
            )
        identity = Identity(
            settings.cluster, self._record.node_id, settings.raft_addr, self._record.cluster_id
        )
        times = LinkTimes.of_heartbeat(settings.heartbeat_ms)
        self._transport = Transport(identity, self, times=times, tls=settings.tls)
        self._roster = Roster(self._transport)
        self._engine: Engine | None = None
        self._leadership: Leadership | None = None
        self._to_leader: ToLeader | None = None
        self._formation: Formation | EtcdFormation | None = None
        self._not_added: DanubeError | None = None  # why a member refused this node
        self._leaderless_us = wall_us()  # since when no leader is known; 0 while one is
        self._leader_seen_ns = elapsed_ns()
        self._tasks: set[asyncio.Task[None]] = set()
        self._journal_end = 0  # its end at the start: no reader has seen more of it applied
        self._stopped = False
        self.when_committed: Callable[[], None] = _nothing  # the host's copy holds more
        self.before_change: Callable[[Change], None] | None = None  # told of this host's; an error refuses it

    @property
    def node_id(self) -> str:
        return self._record.node_id

    @property
    def machine(self) -> AppliedLog:
        return self._machine

    @property
    def members(self) -> Members:
        """Members by this member's own log; without voters before its first entry."""
        return Members({}) if self._engine is None else self._engine.status.members

    @property
    def leader_id(self) -> str:
        """ "" while none is known."""
        return "" if self._engine is None else self._engine.status.leader_id

    async def ask_members(self) -> dict[str, Members]:
        """Return, by node id, the members that other nodes name in their answers; etcd answers for all."""
        if self._settings.etcd is not None:
            return dict.fromkeys(self.members.voters, self.members)
        return await self._roster.ask_all()

    # -- life -------------------------------------------------------------------------------------

    async def run(self, listener: socket.socket) -> None:
        """Take part; returns when the engine runs.  Raises DanubeError if it cannot start."""
        await self._transport.listen(listener)
        settings = self._settings
        if settings.etcd is not None:
            found = EtcdFormation(
                settings.etcd, self._record, settings.cluster, settings.raft_addr, self._machine
            )
            self._formation, self._make_engine = found, found.make_engine
            known = await found.find()
            formed = Formed(known.head.cluster_id, Members(known.members))
        elif self._journal_exists:
            formed = Formed(self._record.cluster_id, Members({}))
        else:
            formation = Formation(self._transport, self._record, seeds=settings.seeds, join=settings.join)
            self._formation = formation
            formed = await formation.find()
        self._enter(formed)

    def _enter(self, formed: Formed) -> None:
        """Become a part of the cluster, on disk before any answer in its name."""
        settings = self._settings
        fresh = not self._journal_exists
        if not self._record.cluster_id:
            self._record = replace(self._record, cluster_id=formed.cluster_id, state=FORMING)
            store_node(settings.data_dir, self._record)
        if self._make_engine is None:
            broken("a node has no engine", node_id=self.node_id)
        engine = self._engine = self._make_engine(
            self.node_id, self._directory, self._machine, self, cluster_id=formed.cluster_id,
            bootstrap=self._first_members(formed), heartbeat_ms=settings.heartbeat_ms,
        )  # fmt: skip
        self._journal_end = engine.status.last_index
        state = MEMBER if settings.etcd is None else ETCD
        if self._record.state != state:
            self._record = replace(self._record, state=state)
            store_node(settings.data_dir, self._record)
        self._leadership = Leadership(engine, self._machine, self._on_failed, balance=settings.balance)
        self._to_leader = ToLeader(engine, self._machine, self._leadership, self._transport)
        self._transport.join_cluster(formed.cluster_id)
        self._roster.learn(formed.members)
        self._roster.agreed(engine.status.members)
        engine.start()
        if fresh and not self._machine.visible:
            self._machine.publish()  # no reader here has seen a later state
        self._show_copy()
        _log.info("part of the cluster", node_id=self.node_id, cluster_id=formed.cluster_id)
        if not engine.status.members.voters:
            self._start(self._join(engine))

    @property
    def _journal_exists(self) -> bool:
        """Return whether this node has agreed entries, or knows where they are stored."""
        if self._settings.etcd is not None:
            return self._record.state == ETCD
        return (self._directory / JOURNAL_FILE).exists()

    def _first_members(self, formed: Formed) -> Members | None:
        """Return the members that a new journal begins with: the first voters, or this node as a learner."""
        if self._journal_exists:
            return None
        return Members({}, {self.node_id: self._settings.raft_addr}) if formed.joining else formed.members

    def stop(self) -> None:
        """Leave the group; waiting requests are answered with OutcomeUnknown."""
        self._stopped = True
        if self._engine is not None:
            self._engine.stop()
        if self._leadership is not None:
            self._leadership.resign("")
        for task in self._tasks:
            task.cancel()
        self._transport.close()
        self._machine.close()

    def _start(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, engine: Engine) -> None:
        """Request the addition of this node until the first entries name the voters.

        A node that stopped in between does so again: it may have been added, but
        knows no member and would accept none.
        """
        request = encode(Join(self.node_id, self._settings.raft_addr))
        while not engine.status.members.voters:
            known = [*self._roster.members.voters.values(), *self._settings.seeds, *self._settings.join]
            answer = await ask_to_join(self._transport, request, known, JOIN_TIMEOUT_S)
            if isinstance(answer, Members):
                self._roster.learn(answer)
            else:
                self._not_added = answer
                _log.lasting("not added to the cluster yet", source=self.node_id, why=str(answer))
            await asyncio.sleep(JOIN_RETRY_S)

    # -- the engine's host ------------------------------------------------------------------------

    def send(self, node_id: str, message: bytes) -> None:
        self._transport.send(node_id, message)

    def role_changed(self, status: EngineStatus) -> None:
        _log.info("role", role=status.role, term=status.term, leader_id=status.leader_id)
        if not status.leader_id and not self._leaderless_us:
            self._leader_seen_ns = elapsed_ns()
        self._leaderless_us = 0 if status.leader_id else self._leaderless_us or wall_us()
        if self._leadership is not None:
            if status.role == "leader":
                self._leadership.lead()
            else:
                self._leadership.resign(status.leader_id)
        if self._to_leader is not None:
            self._to_leader.leader_changed()

    def members_changed(self, members: Members) -> None:
        self._roster.agreed(members)

    def failed(self, error: BaseException) -> None:
        self._on_failed(error)

    def _on_failed(self, error: BaseException) -> None:
        if not self._stopped:
            self._failed(error)

    def _on_applied(self) -> None:
        if self._to_leader is not None:
            self._to_leader.applied()
        if self._leadership is not None:
            self._leadership.follow_time()
        self.when_committed()

    def _show_copy(self) -> None:
        """Make a rebuilt copy visible when it has reached the state that workers may have seen."""
        engine = self._engine
        if self._machine.visible or engine is None or self._stopped:
            return
        status = engine.status
        seen_end = min(self._journal_end, status.last_index)  # entries that a leader cuts were never applied
        if status.leader_id and max(seen_end, 1) <= status.commit_index <= status.applied_index:
            self._machine.publish()
            self._on_applied()
        else:  # entries of the engine's own are applied without a notice
            asyncio.get_running_loop().call_later(SHOW_POLL_S, self._show_copy)

    # -- the transport's host ---------------------------------------------------------------------

    def received(self, node_id: str, message: bytes) -> None:
        if self._engine is not None:
            self._engine.receive(node_id, message)

    def stranger(self, node_id: str) -> None:
        self._roster.ask_about(node_id)

    def moved(self, node_id: str, address: str) -> None:
        self._roster.moved(node_id, address)
        if self._leadership is not None and self._leadership.leading:
            self._start(self._leadership.note_move(node_id, address))

    async def called(self, caller: Greeting, body: bytes) -> bytes:
        """A request of another node; a guest may only introduce itself and ask to join."""
        try:
            request = decode_request(body)
            if caller.lane == Lane.GUEST:
                return encode(await self._answer_guest(caller, request))
            if self._leadership is None:
                raise Unavailable("this node is part of no cluster yet")
            if isinstance(request, Introduce):
                return encode(self._introduction())
            return encode(await self._leadership.answer(request))
        except DanubeError as error:
            return encode(Failed(sent_error(error)))

    async def _answer_guest(self, caller: Greeting, request: Request) -> Answer:
        if isinstance(request, Introduce):
            return self._introduction()
        if isinstance(request, Join) and request.node_id != caller.node_id:
            raise InvalidArgument("a node asks to be added itself, and no other", node_id=request.node_id)
        if isinstance(request, Join) and self._to_leader is not None:
            return await self._to_leader.add(request, ASK_TIMEOUT_S)
        raise NotSupported("a node that is no member may not ask this")

    def _introduction(self) -> Introduction:
        if self._engine is None:
            return Introduction(self.node_id)
        status = self._engine.status
        members = status.members if status.members.voters else self._roster.members
        return Introduction(self.node_id, self._transport.identity.cluster_id, status.leader_id, members)

    # -- this host's processes --------------------------------------------------------------------

    async def asked(self, body: bytes) -> bytes:
        """A request of a worker or a command of this host."""
        try:
            request = decode_request(body)
            if isinstance(request, Status):
                return encode(self.status())
            if isinstance(request, Change) and self.before_change is not None:
                self.before_change(request)
            if self._to_leader is None:
                waiting = self._formation.waiting if self._formation is not None else None
                raise waiting_error(waiting, wall_us())
            return encode(await self._to_leader.ask(self._impatient(request)))
        except DanubeError as error:
            return encode(Failed(sent_error(error)))

    def _impatient(self, request: Request) -> Request:
        """A request that waits for a leader, but not long where there was none for long."""
        if self.leader_id:
            self._leader_seen_ns = elapsed_ns()
        elif elapsed_ns() - self._leader_seen_ns > LEADERLESS_NS and isinstance(
            request, Propose | Barrier | Change
        ):
            short_ms = min(request.timeout_ms, LEADERLESS_WAIT_MS)
            return msgspec.structs.replace(request, timeout_ms=short_ms)
        return request

    def status(self) -> ClusterStatus:
        """This member as it is now."""
        identity = self._transport.identity
        reached = [node_id for node_id in self._roster.addresses if self._transport.connected(node_id)]
        counters = self._transport.statistics()
        if self._engine is None:
            return ClusterStatus(
                identity.node_id, identity.address, identity.cluster, identity.cluster_id, "waiting", "",
                0, 0, 0, self._machine.version, {}, {}, reached, counters,
                waiting=self._formation.waiting if self._formation is not None else None,
            )  # fmt: skip
        status = self._engine.status
        counters |= {f"engine_{name}": value for name, value in self._engine.statistics().items()}
        return ClusterStatus(
            identity.node_id, identity.address, identity.cluster, identity.cluster_id, status.role,
            status.leader_id, status.term, status.applied_index, status.commit_index, self._machine.version,
            status.members.voters, status.members.learners, reached, counters,
            self._leadership.placing if self._leadership is not None else None,
            self._waiting(status, reached),
        )  # fmt: skip

    def _waiting(self, status: EngineStatus, reached: list[str]) -> Waiting | None:
        """Return why this member has no leader, or is not added yet; None if it has a leader."""
        if status.leader_id:
            return None
        since_us = self._leaderless_us = self._leaderless_us or wall_us()
        if self._settings.etcd is not None:
            endpoints = list(self._settings.etcd.endpoints)
            why = (
                f"no leader is known: etcd at {', '.join(endpoints)} does not answer, or none is elected yet"
            )
            return Waiting(
                why, "most members of etcd must be up; the log of this broker tells more", since_us
            )
        if not status.members.voters:
            refused = self._not_added
            why = f"this node is not added to the cluster yet{f': {refused}' if refused is not None else ''}"
            hint = refused.hint if refused is not None else ""
            return Waiting(why, hint or "the members must be up and reach each other", since_us)
        missing = [
            address
            for node_id, address in status.members.voters.items()
            if node_id != self.node_id and node_id not in reached
        ]
        count = len(status.members.voters)
        why = f"no leader is known, and {', '.join(missing) or 'nobody'} of {count} voters is not reached"
        hint = f"{count // 2 + 1} of {count} voters must be up and reach each other; where they are lost"
        hint += " for good, `danube cluster recover`"
        return Waiting(why, hint, since_us, missing)


def _nothing() -> None:
    pass
