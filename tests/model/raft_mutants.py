"""Bugs planted into the engine, one at a time: what a simulation is worth is what it finds.

Each takes pytest's monkeypatch and breaks one rule; the product knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from danube.cluster.raft import entries as raft_log
from danube.cluster.raft import journal as raft_journal
from danube.cluster.raft import raftos_engine
from danube.cluster.raft import roles as raft_roles
from danube.cluster.raft.messages import AppendAnswer, VoteAnswer

Mutant = Callable[[pytest.MonkeyPatch], None]


def vote_wiped(patch: pytest.MonkeyPatch) -> None:
    """A follower that starts forgets its vote, as raftos asks for."""

    def update(self: Any, values: dict[str, Any]) -> None:
        term = max(self.term, values.get("term", 0))
        voted_for = None if term > self.term else self.voted_for
        self.term, self.voted_for = term, values.get("voted_for", voted_for)
        self._journal.promise(self.term, self.voted_for)

    patch.setattr(raft_log.HardState, "update", update)


def old_term_committed(patch: pytest.MonkeyPatch) -> None:
    """A leader commits what older terms left behind as soon as a majority has it, and begins with nothing."""

    def update_commit_index(self: Any) -> None:
        index = self.replication.match_quorum(self.log.members, self.id)
        if index > self.log.commit_index:
            self.state.member.commit_to(index)
            self.commit_moved = True

    patch.setattr(raft_roles.Leading, "append_first", lambda self: None)
    patch.setattr(raftos_engine.LeaderRole, "update_commit_index", update_commit_index)


def _follower_answers(patch: pytest.MonkeyPatch, change: Callable[[Any, Any, AppendAnswer], None]) -> None:
    real = raft_roles.Following.on_receive_append_entries

    def on_receive_append_entries(self: Any, data: dict[str, Any]) -> None:
        post = self.state.post

        def posted(node_id: str, message: Any) -> None:
            if isinstance(message, AppendAnswer) and message.success:
                change(self, data["message"], message)
            post(node_id, message)

        self.state.post = posted
        try:
            real(self, data)
        finally:
            del self.state.post

    patch.setattr(raftos_engine.FollowerRole, "on_receive_append_entries", on_receive_append_entries)


def tail_committed(patch: pytest.MonkeyPatch) -> None:
    """A follower commits as far as its own log goes, not as far as the leader's is known to."""

    def change(role: Any, request: Any, answer: AppendAnswer) -> None:
        role.state.member.commit_to(min(request.commit_index, role.log.last_log_index))

    _follower_answers(patch, change)


def vote_for_anybody(patch: pytest.MonkeyPatch) -> None:
    """A voter does not look at the candidate's log."""

    def receiving(self: Any, data: dict[str, Any]) -> None:
        data |= {"last_log_term": 1 << 40, "last_log_index": 1 << 40}
        raw(self, data)

    def asked_before(self: Any, data: dict[str, Any]) -> None:
        data["message"].last_log_term = 1 << 40
        before(self, data)

    raw = raftos_engine.FollowerRole.on_receive_request_vote
    before = raft_roles.Voting.on_receive_pre_vote
    patch.setattr(raftos_engine.FollowerRole, "on_receive_request_vote", receiving)
    patch.setattr(raft_roles.Voting, "on_receive_pre_vote", asked_before)


def _counted_late(patch: pytest.MonkeyPatch, kind: type) -> None:
    """Answers of an older term pass the gate."""
    real = raftos_engine._State.request_handler

    def request_handler(self: Any, data: dict[str, Any]) -> None:
        if isinstance(data["message"], kind):
            data["term"] = max(data["term"], self.storage.term)
        real(self, data)

    patch.setattr(raftos_engine._State, "request_handler", request_handler)


def stale_votes_counted(patch: pytest.MonkeyPatch) -> None:
    """A vote of an older term counts in this one."""
    _counted_late(patch, VoteAnswer)


def stale_success_accepted(patch: pytest.MonkeyPatch) -> None:
    """What a follower confirmed to an older leadership counts in this one."""
    _counted_late(patch, AppendAnswer)


def own_last_index(patch: pytest.MonkeyPatch) -> None:
    """A follower confirms all that it has, the leader's or not."""

    def change(role: Any, request: Any, answer: AppendAnswer) -> None:
        answer.match_index = role.log.last_log_index

    _follower_answers(patch, change)


def deposed_leader_sends(patch: pytest.MonkeyPatch) -> None:
    """A leader that hears of a newer term sends once more, as if that were its own."""
    real = raftos_engine.LeaderRole.stop

    def stop(self: Any) -> None:
        real(self)
        self.term = self.replication._term = self.storage.term
        for peer in self.replication.peers:
            for request in self.replication.requests(peer, heartbeat=True, commit_moved=True):
                self.state.post(peer, request)

    patch.setattr(raftos_engine.LeaderRole, "stop", stop)


def step_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A step is written, and then sent as if it had been synced."""

    def write_step(self: Any) -> None:
        sync, self._disk.sync = self._disk.sync, lambda: None
        try:
            real(self)
        finally:
            self._disk.sync = sync

    real = raft_journal.Journal._write_step
    patch.setattr(raft_journal.Journal, "_write_step", write_step)


MUTANTS: tuple[Mutant, ...] = (
    vote_wiped,
    old_term_committed,
    tail_committed,
    vote_for_anybody,
    stale_votes_counted,
    own_last_index,
    stale_success_accepted,
    deposed_leader_sends,
    step_not_synced,
)
