"""The Engine over raftos 0.2.6: its roles, transitions, timers and vote round, everything else hardened.

raftos supplies the three roles and their life cycle, the timers, the candidate's vote round, the voter's
up-to-date check, heartbeats and the leader's step-down timer.  Storage, messages, entries, commits and
members are Danube's.

Owner:  the loop's thread.  A call, a message or a timer changes memory only and asks for a step.
Step:   once a turn of the loop: append what was proposed, one sync, commit, apply, then send and answer.
        So no promise leaves the member that is not durable, and one sync serves a whole turn.  A leader
        asks its peers to store entries before it syncs them itself: both take their time at once, and
        its own copy counts for a commit only when it is durable.
Gate:   a message of a higher term is taken in before any role sees it, one of a lower term by none; so
        every role runs in the sender's term.
Aside:  snapshots are encoded, written and read in a thread, one after the other; only what becomes of
        them is a part of the loop.
Stamp:  a leader's messages carry the term of its leadership.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from danube.cluster.raft.disk import DirectoryDisk, Disk
from danube.cluster.raft.engine import EngineStatus, Host, Machine, Members
from danube.cluster.raft.entry import COMMAND, Entry
from danube.cluster.raft.member import Member
from danube.cluster.raft.messages import (
    REQUESTS,
    AppendAnswer,
    AppendRequest,
    ElectNow,
    Message,
    PreVoteAnswer,
    PreVoteRequest,
    SnapshotAnswer,
    SnapshotPart,
    Stale,
    UnknownKind,
    Unreadable,
    VoteAnswer,
    VoteRequest,
    decode,
)
from danube.cluster.raft.proposals import refuse
from danube.cluster.raft.quorum import has_quorum
from danube.cluster.raft.replication import Bounds
from danube.cluster.raft.roles import Following, Leading, Voting
from danube.errors import (
    ConfigInvalid,
    DanubeError,
    InvalidArgument,
    NotLeader,
)
from danube.limits import RAFT_ENTRY_BYTES_MAX, RAFT_JOURNAL_BYTES

logging.getLogger("raftos").setLevel(logging.ERROR)  # it warns that it cannot encrypt; it is not to
MISSING, ORIGIN = "", "raftos"
try:
    if find_spec("danube.bundled") is not None:  # a wheel has it, unchanged (scripts/wheel)
        from danube.bundled.raftos.state import Candidate, Follower, Leader, State

        ORIGIN = "the raftos of this wheel"
    else:
        from raftos.state import Candidate, Follower, Leader, State
except ImportError as missing:
    MISSING = str(missing)
    Candidate = Follower = Leader = State = object

INSTALL: Final = "danube cluster install-engine"
INSTALL_BUNDLED: Final = "python -m pip install 'danube-broker[cluster]'"
HEARTBEATS_MISSED_MAX: Final = 5  # then a leader without a majority steps down, and followers elect
ELECTION_SPREAD: Final = 2  # an election is over in a few ms, so even the shortest spread keeps two apart

InThread = Callable[[Callable[[], Any]], "asyncio.Future[Any]"]

# Names of messages in raftos; a role that takes a message has on_receive_<name>.
_NAMES: Final[dict[type[Message], str]] = {
    VoteRequest: "request_vote",
    VoteAnswer: "request_vote_response",
    PreVoteRequest: "pre_vote",
    PreVoteAnswer: "pre_vote_response",
    AppendRequest: "append_entries",
    AppendAnswer: "append_entries_response",
    SnapshotPart: "install_snapshot",
    SnapshotAnswer: "install_snapshot_response",
    Stale: "stale",
    ElectNow: "elect_now",
}


class FollowerRole(Following, Follower):
    def __init__(self, state: _State) -> None:
        super().__init__(state)
        self.election_timer.loop = state.loop
        self.begin_following()

    def on_receive_request_vote(self, data: dict[str, Any]) -> None:
        if not self.state.may_vote:
            return
        vote = self.storage.voted_for
        if vote is None:
            super().on_receive_request_vote(data)
            if self.storage.voted_for is not None:
                self.election_timer.reset()
        else:
            self.state.post(data["sender"], VoteAnswer(self.storage.term, vote == data["candidate_id"]))


class CandidateRole(Voting, Candidate):
    """Requests votes once; without an answer in time it runs a PreVote again first."""

    def __init__(self, state: _State) -> None:
        super().__init__(state)
        self.election_timer.loop = state.loop
        self.election_timer.callback = self._retry
        self.votes: set[str] = {state.id}

    def on_receive_request_vote_response(self, data: dict[str, Any]) -> None:
        if data["message"].vote_granted:
            self.votes.add(data["sender"])

    def on_receive_append_entries(self, data: dict[str, Any]) -> None:
        super().on_receive_append_entries(data)  # steps down, and forgets the message
        self.state.request_handler(data)

    on_receive_install_snapshot = on_receive_append_entries

    def _retry(self) -> None:
        self.state.to_follower()
        self.state.state.start_election()


class LeaderRole(Leading, Leader):
    def __init__(self, state: _State) -> None:
        super().__init__(state)
        for timer in (self.heartbeat_timer, self.step_down_timer):
            timer.loop = state.loop
        self.heartbeat_timer.interval = state.heartbeat_s
        self.step_down_timer.interval = HEARTBEATS_MISSED_MAX * state.heartbeat_s
        self.step_down_timer.callback = self.step_down_if_alone
        self.begin_leading()

    def start(self) -> None:
        super().start()
        self.append_first()

    def stop(self) -> None:
        super().stop()
        self.end_leading()

    def heartbeat(self) -> None:
        super().heartbeat()
        self.response_map.clear()  # which members answered is known by round

    def step_down_if_alone(self) -> None:
        """No majority has answered for long; a pause, in which no heartbeat was sent, does not count."""
        if self.rounds_missed >= HEARTBEATS_MISSED_MAX - 1:
            self.state.to_follower()

    def append_entries(self, destination: object = None) -> asyncio.Future[None]:
        """Begin a round of heartbeats, as raftos requests it; nothing leaves before the step."""
        self.begin_round(self.request_id)
        done: asyncio.Future[None] = self.state.done
        return done


class _State(State):
    """raftos' object between a role and the rest; nothing is shared with other members of the process."""

    ROLES: Final = {Follower: FollowerRole, Candidate: CandidateRole, Leader: LeaderRole}

    def __init__(self, engine: RaftosEngine, member: Member, loop: asyncio.AbstractEventLoop) -> None:
        self.member, self.loop, self.id = member, loop, member.node_id
        self.storage, self.log, self.state_machine = member.storage, member.log, member.machine
        self.wake = engine.wake
        self.heartbeat_s, self.bounds, self._random = engine.heartbeat_s, engine.bounds, engine.random
        self.leader_id = ""
        self._heard_at = -1e9
        self.done = loop.create_future()
        self.done.set_result(None)
        self.state = FollowerRole(self)

    def post(self, node_id: str, message: Message) -> None:
        self.member.post(node_id, message)
        self.wake()

    def _change_state(self, new_state: type) -> None:
        super()._change_state(self.ROLES[new_state])
        self.wake()

    def to_leader(self) -> None:
        """Change as in raftos, but for its callbacks: it checks them by a function that Python 3.16 lacks."""
        self._change_state(Leader)
        self.set_leader(self.state)

    def to_follower(self) -> None:
        """Change as in raftos, but for its callbacks."""
        self._change_state(Follower)
        self.set_leader(None)

    def set_leader(self, leader: Any) -> None:
        self.leader_id = getattr(leader, "id", leader) or ""

    def hear(self, leader_id: str) -> None:
        self.leader_id, self._heard_at = leader_id, self.loop.time()

    @property
    def leader_heard(self) -> bool:
        """Whether a leader was heard so lately that no other may be elected yet."""
        return self.loop.time() - self._heard_at < 0.95 * HEARTBEATS_MISSED_MAX * self.heartbeat_s

    @property
    def may_vote(self) -> bool:
        """Whether voters are known; a member on an empty disk may have voted before the disk was lost."""
        return bool(self.log.members.voters)

    def election_delay(self) -> float:
        shortest = HEARTBEATS_MISSED_MAX * self.heartbeat_s
        return self._random.uniform(shortest, ELECTION_SPREAD * shortest)

    def request_handler(self, data: dict[str, Any]) -> None:
        """The gate."""
        term = self.storage.term
        if data["term"] > term:
            self.storage.update({"term": data["term"]})
            if isinstance(self.state, Follower):
                self.set_leader(None)
            else:
                self.to_follower()
        elif data["term"] < term:
            if isinstance(data["message"], REQUESTS):
                self.post(data["sender"], Stale(term))
            return
        if hasattr(self.state, f"on_receive_{data['type']}"):
            super().request_handler(data)

    # Messages that raftos' roles send: the two of the vote round.

    def broadcast(self, data: dict[str, Any]) -> None:
        for voter in self.log.members.voters:
            if voter != self.id:
                self.post(voter, VoteRequest(data["term"], data["last_log_index"], data["last_log_term"]))

    def send(self, data: dict[str, Any], destination: str) -> asyncio.Future[None]:
        self.post(destination, VoteAnswer(data["term"], data["vote_granted"]))
        return self.done


class RaftosEngine:
    """The Engine of one member; made and called on the thread of ``loop``.

    ``bootstrap``: the first members of a new group, the same at each of them.  A member that joins an
    existing group has itself as its only learner.  Without ``bootstrap`` and without a journal it raises
    NotFound: a voter never starts on an empty disk.  Stored members override ``bootstrap``. Raises Damage,
    StorageFailed and ConfigInvalid, which names the command where raftos is missing.
    """

    def __init__(
        self,
        node_id: str,
        directory: Path,
        machine: Machine,
        host: Host,
        *,
        bootstrap: Members | None,
        cluster_id: str = "",
        heartbeat_ms: int = 100,
        snapshot_bytes: int = RAFT_JOURNAL_BYTES,
        bounds: Bounds | None = None,
        fsync: bool = True,
        loop: asyncio.AbstractEventLoop | None = None,
        disk: Disk | None = None,
        randomness: random.Random | None = None,
        in_thread: InThread | None = None,
    ) -> None:
        check_installed()
        self._loop = loop or asyncio.get_running_loop()
        self.heartbeat_s, self.bounds = heartbeat_ms / 1e3, bounds or Bounds()
        self.random = randomness or random.Random()  # noqa: S311 - it only keeps elections apart
        self._in_thread = in_thread or partial(self._loop.run_in_executor, None)
        self._asides: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self._member = Member(
            node_id,
            disk or DirectoryDisk(directory, synced=fsync),
            machine,
            host,
            cluster_id=cluster_id,
            bootstrap=bootstrap,
            snapshot_bytes=snapshot_bytes,
            aside=self._aside,
        )
        self._host = host
        self._started = self._ended = self._step_due = False
        self._state = _State(self, self._member, self._loop)
        self._told = ("", "", -1)
        self._told_members = self._member.members

    @property
    def role(self) -> Any:
        return self._state.state

    @property
    def status(self) -> EngineStatus:
        log = self._member.log
        return EngineStatus(
            self._member.node_id,
            *self._standing(),
            last_index=log.last_log_index,
            commit_index=log.commit_index,
            applied_index=log.last_applied,
            snapshot_index=log.snapshot_index,
            members=log.members,
        )

    def _standing(self) -> tuple[str, str, int]:
        for cls, name in ((LeaderRole, "leader"), (CandidateRole, "candidate")):
            if isinstance(self.role, cls):
                return name, self._state.leader_id, self._member.storage.term
        return "follower", self._state.leader_id, self._member.storage.term

    def statistics(self) -> Mapping[str, int]:
        journal = self._member.journal
        return {
            **self._member.counters,
            "journal_syncs": journal.sync_count,
            "journal_bytes": journal.entries_bytes + journal.snapshot_size,
        }

    # Life

    def start(self) -> None:
        self._started = True
        self._state.start()
        if list(self._member.members.voters) == [self._member.node_id]:
            self.role.start_election()  # no other member could be the leader
        self._step()

    def stop(self) -> None:
        if self._ended:
            return
        if isinstance(self.role, LeaderRole) and (successor := self.role.successor()):
            self._member.post(successor, ElectNow(self._member.storage.term))
        self._step()
        self._end()
        self._member.journal.close()

    def _end(self) -> None:
        ended, self._ended = self._ended, True
        if self._started and not ended:
            self._state.stop()

    def _fail(self, error: BaseException) -> None:
        """End the member, whose state on disk is unknown: nothing is sent ever again."""
        self._end()
        self._host.failed(error)
        if not isinstance(error, Exception):
            raise error

    # Calls

    def receive(self, node_id: str, message: bytes) -> None:
        if self._ended:
            return
        counters = self._member.counters
        try:
            content = decode(message)
        except UnknownKind:
            counters["messages_unknown"] += 1
            return
        except Unreadable:
            counters["messages_unreadable"] += 1
            return
        counters["messages_received"] += 1
        data = {"type": _NAMES[type(content)], "term": content.term, "sender": node_id, "message": content}
        if isinstance(content, VoteRequest):
            data |= {**msgspec.structs.asdict(content), "candidate_id": node_id}
        try:
            self._state.request_handler(data)
        except BaseException as error:
            self._fail(error)
        self.wake()

    def propose(self, entry: bytes) -> asyncio.Future[Any]:
        if len(entry) > RAFT_ENTRY_BYTES_MAX:
            return self._refused(InvalidArgument("an entry is too large", limit=RAFT_ENTRY_BYTES_MAX))
        return self._led(lambda role: role.execute_command(Entry(role.term, COMMAND, entry)))

    def read_barrier(self) -> asyncio.Future[int]:
        return self._led(lambda role: role.read_barrier())

    def change_members(self, members: Members) -> asyncio.Future[None]:
        return self._led(lambda role: role.change_members(members))

    def _led(self, call: Callable[[LeaderRole], asyncio.Future[Any]]) -> asyncio.Future[Any]:
        """Return the answer of the leader's role, or a future that ends with NotLeader."""
        role = self.role
        if self._ended or not isinstance(role, LeaderRole):
            leader_id = "" if self._ended else self._state.leader_id
            return self._refused(NotLeader("this member does not lead", leader_id=leader_id))
        try:
            return call(role)
        except DanubeError as error:
            if self._member.journal.closed:
                self._fail(error)
            return self._refused(error)

    def _refused(self, error: DanubeError) -> asyncio.Future[Any]:
        return refuse(self._loop.create_future(), error)

    # A step

    def wake(self) -> None:
        """Ask for a step at the end of this turn."""
        if not self._step_due:
            self._step_due = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._step_due = False
        if self._ended or not self._started:
            return
        try:
            self._elect_if_voted()
            role = self.role
            if isinstance(role, LeaderRole):
                role.take_proposals()
                role.update_commit_index()
                role.replicate()
                self._member.send_requests()
            self._member.sync()
            if isinstance(role, LeaderRole):
                role.update_commit_index()
                self._member.apply(role.proposals.applied)
                self._replicate(role)
            else:
                self._member.apply(None)
            self._member.send()
            self._member.compact_if_grown()
        except BaseException as error:
            self._fail(error)
            return
        self._tell()

    # Beside the steps

    def _aside(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """See raft_member.Aside."""
        self._asides.append((work, done))
        if len(self._asides) == 1:
            self._begin_aside()

    def _begin_aside(self) -> None:
        self._in_thread(self._asides[0][0]).add_done_callback(self._end_aside)

    def _end_aside(self, made: asyncio.Future[Any]) -> None:
        _, done = self._asides.popleft()
        if self._ended or made.cancelled():
            return
        try:
            done(made.result())
        except BaseException as error:
            self._fail(self._member.journal.failed(error))
            return
        if self._asides:
            self._begin_aside()
        self.wake()

    def _elect_if_voted(self) -> None:
        role = self.role
        if isinstance(role, CandidateRole) and has_quorum(self._member.members, role.votes):
            self._state.to_leader()

    def _replicate(self, role: LeaderRole) -> None:
        role.replicate()
        if role.removed:
            self._state.to_follower()

    def _tell(self) -> None:
        standing, members = self._standing(), self._member.members
        if members != self._told_members:
            self._told_members = members
            self._host.members_changed(members)
        if standing != self._told:
            self._told = standing
            self._host.role_changed(self.status)


def check_installed() -> None:
    """Raise ConfigInvalid, with the command, where raftos cannot be imported."""
    if MISSING:
        raise ConfigInvalid(
            "a cluster needs raftos 0.2.6, which cannot be imported",
            why=MISSING,
            hint=INSTALL_BUNDLED if find_spec("danube.bundled") is not None else INSTALL,
        )
