"""Danube's own half of the roles of members: how followers answer, how leaders decide.

The other half of each class, which is raftos', brings ``state``, ``storage``, ``log``, ``id`` and the
timers (see danube.cluster.raft.raftos_engine).
"""

from __future__ import annotations

import asyncio
from typing import Any

from danube.cluster.raft.engine import Members
from danube.cluster.raft.entry import NOTHING, Entry, members_entry
from danube.cluster.raft.messages import (
    AppendAnswer,
    AppendRequest,
    PreVoteAnswer,
    PreVoteRequest,
    SnapshotAnswer,
    SnapshotPart,
)
from danube.cluster.raft.proposals import Barriers, Proposals
from danube.cluster.raft.quorum import check_change, has_quorum, peers_of
from danube.cluster.raft.replication import Arriving, Replication
from danube.errors import Overloaded, broken


class Role:
    """Attributes that raftos gives each role."""

    state: Any
    storage: Any
    log: Any
    id: str


class Voting(Role):
    """Common half of followers and candidates: the timer and PreVote."""

    election_timer: Any

    def stop(self) -> None:
        """Also of a role that a storage error kept from beginning: its timer does not run yet."""
        if self.election_timer.is_active:
            self.election_timer.stop()

    def election_interval(self) -> float:
        return float(self.state.election_delay())

    def on_receive_pre_vote(self, data: dict[str, Any]) -> None:
        request: PreVoteRequest = data["message"]
        log, state = self.log, self.state
        newer = (request.last_log_term, request.last_log_index) >= (log.last_log_term, log.last_log_index)
        granted = newer and state.may_vote and not state.leader_heard
        state.post(data["sender"], PreVoteAnswer(self.storage.term, request.round, granted))


class Following(Voting):
    """Follows a leader; runs a PreVote before an election, so that it disturbs no leader."""

    def begin_following(self) -> None:
        self.round = 0
        self.granted: set[str] = set()
        self.arriving = Arriving()

    def start_election(self) -> None:
        """No leader was heard: begin a round of PreVote."""
        state, log = self.state, self.log
        state.set_leader(None)
        if not log.electable(state.id):
            return
        self.round += 1
        self.granted = {state.id}
        for peer in log.members.voters:
            if peer != state.id:
                request = PreVoteRequest(self.storage.term, self.round, log.last_log_index, log.last_log_term)
                state.post(peer, request)
        self.elect_if_granted()

    def on_receive_pre_vote_response(self, data: dict[str, Any]) -> None:
        answer: PreVoteAnswer = data["message"]
        if answer.vote_granted and answer.round == self.round and self.granted:
            self.granted.add(data["sender"])
            self.elect_if_granted()

    def elect_if_granted(self) -> None:
        if has_quorum(self.log.members, self.granted):
            self.state.to_candidate()

    def on_receive_elect_now(self, data: dict[str, Any]) -> None:
        """The leader stops and wants this member to follow it."""
        if self.log.electable(self.state.id):
            self.state.to_candidate()

    def on_receive_append_entries(self, data: dict[str, Any]) -> None:
        request: AppendRequest = data["message"]
        log, previous_index = self.log, request.previous_index
        self._heard(data["sender"])
        match = log.accept(previous_index, request.previous_term, request.entries)
        answer = AppendAnswer(request.term, request.round, previous_index, match is not None, 0, 0)
        if match is None:
            answer.hint_index = log.hint(previous_index)
        else:
            answer.match_index = match
            self.state.member.commit_to(min(request.commit_index, match))
        self.state.post(data["sender"], answer)

    def on_receive_install_snapshot(self, data: dict[str, Any]) -> None:
        part: SnapshotPart = data["message"]
        self._heard(data["sender"])
        state = self.state
        if state.member.installing:
            return  # the leader sends the last part again now and then, until this is done
        if part.last_index > self.log.commit_index:
            snapshot = self.arriving.take(part)
            if snapshot is None:
                wanted = self.arriving.position
                state.post(data["sender"], SnapshotAnswer(part.term, part.round, part.last_index, wanted))
            else:
                self._install(data["sender"], part, snapshot)
            return
        self._confirm_snapshot(data["sender"], part)

    def _install(self, leader_id: str, part: SnapshotPart, snapshot: bytes) -> None:
        def follows() -> bool:
            return self.state.state is self and self.storage.term == part.term

        def installed() -> None:
            self._confirm_snapshot(leader_id, part)

        self.state.member.install(part, snapshot, follows, installed)

    def _confirm_snapshot(self, leader_id: str, part: SnapshotPart) -> None:
        answer = AppendAnswer(part.term, part.round, 0, True, part.last_index, 0)
        self.state.post(leader_id, answer)

    def _heard(self, leader_id: str) -> None:
        self.granted = set()
        self.state.hear(leader_id)
        self.election_timer.reset()
        if self.storage.voted_for is None:  # so that a member that joined cannot elect another in this term
            self.storage.update({"voted_for": leader_id})


class Leading(Role):
    """Replicates in the term of its election, and in no other."""

    step_down_timer: Any
    heartbeat: Any

    def begin_leading(self) -> None:
        state = self.state
        self.term: int = self.storage.term
        self.proposals, self.barriers = Proposals(state.loop), Barriers(state.loop)
        self.replication = Replication(self.log, self.term, state.member.journal.snapshot_part, state.bounds)
        self.round_due = self.commit_moved = False
        self.round_answered = 0
        self._members: Members = self.log.members

    def append_first(self) -> None:
        """An entry of this term, so that those of older terms can be committed."""
        self.log.put_from(self.log.last_log_index + 1, [Entry(self.term, NOTHING, b"")])

    def end_leading(self) -> None:
        self.proposals.fail("")
        self.barriers.fail("")

    def init_log(self) -> None:
        """Know the peers."""
        self._members = self.log.members
        self.replication.set_peers(peers_of(self._members, self.id))

    def begin_round(self, number: int) -> None:
        """A heartbeat begins; it leaves with this step."""
        self.replication.begin_round(number)
        self.barriers.begin(number)
        self.round_due = True
        self.state.wake()

    # Calls

    def execute_command(self, entry: Entry) -> asyncio.Future[Any]:
        self.state.wake()
        return self.proposals.add(entry)

    def read_barrier(self) -> asyncio.Future[int]:
        self.state.wake()
        return self.barriers.add()

    def change_members(self, members: Members) -> asyncio.Future[None]:
        log = self.log
        self.take_proposals()  # so that a change that waits is in the log
        if log.members_index > log.commit_index:
            raise Overloaded("another change of members is on its way", hint="try again when it is done")
        if log.term_at(log.commit_index) != self.term:
            raise Overloaded("this leader has just been elected", hint="try again in a moment")
        check_change(log.members, members, self.replication.caught_up)
        outcome = self.execute_command(members_entry(self.term, members))
        self.take_proposals()
        return outcome

    # Answers

    def on_receive_append_entries_response(self, data: dict[str, Any]) -> None:
        self.replication.on_append_answer(data["sender"], data["message"])

    def on_receive_install_snapshot_response(self, data: dict[str, Any]) -> None:
        self.replication.on_snapshot_answer(data["sender"], data["message"])

    def on_receive_append_entries(self, data: dict[str, Any]) -> None:
        broken("two leaders in one term", term=self.term, other=data["sender"])

    # A step

    def take_proposals(self) -> None:
        first_index = self.log.last_log_index + 1
        entries = self.proposals.take(first_index)
        if entries:
            self.log.put_from(first_index, entries)
        if self.log.members is not self._members:
            self.init_log()

    def update_commit_index(self) -> None:
        """Commit entries that a majority has.

        Only an entry of this term can prove it, also for all entries before.
        """
        index = self.replication.match_quorum(self.log.members, self.id)
        if index > self.log.commit_index and self.log.term_at(index) == self.term:
            self.state.member.commit_to(index)
            self.commit_moved = True

    def replicate(self) -> None:
        if self.term != self.storage.term:
            broken("a deposed leader would send", term=self.term, newer=self.storage.term)
        if self.barriers.due:
            self.heartbeat()
        self._count_answers()
        for peer in self.replication.peers:
            due = {"heartbeat": self.round_due, "commit_moved": self.commit_moved}
            for request in self.replication.requests(peer, **due):
                self.state.post(peer, request)
        self.round_due = self.commit_moved = False

    def _count_answers(self) -> None:
        log = self.log
        answered = self.replication.acked_quorum(log.members, self.id)
        if answered > self.round_answered:
            self.round_answered = answered
            self.step_down_timer.reset()
        if log.term_at(log.commit_index) == self.term:
            self.barriers.answered(answered, log.commit_index)

    @property
    def rounds_missed(self) -> int:
        """Heartbeats since the last one that a majority answered."""
        return self.replication.round - self.replication.acked_quorum(self.log.members, self.id)

    @property
    def removed(self) -> bool:
        """Whether it is agreed on that this member decides no more."""
        log = self.log
        return self.id not in log.members.voters and log.members_index <= log.commit_index

    def successor(self) -> str:
        """The voter that is to lead when this member stops; "" if none is ready."""
        ready = [one for one in self.log.members.voters if self.replication.caught_up(one)]
        return max(ready, key=lambda one: self.replication.peers[one].match, default="")
