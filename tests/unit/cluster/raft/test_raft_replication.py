"""What a leader sends to a peer that gets large requests slowly, while small ones pass them on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube.cluster.raft.engine import Members
from danube.cluster.raft.entries import RaftLog
from danube.cluster.raft.entry import COMMAND, Entry
from danube.cluster.raft.journal import Base, Identity, Promise, Recovered
from danube.cluster.raft.messages import AppendAnswer, AppendRequest
from danube.cluster.raft.replication import Bounds, Replication

TERM = 1
LARGE = Entry(TERM, COMMAND, bytes(1 << 20))
SMALL = Entry(TERM, COMMAND, b"x")


def a_log(*entries: Entry) -> RaftLog:
    journal: Any = SimpleNamespace(put=lambda *_: None, snapshot_size=0)
    members = Members({"a": "", "b": ""})
    recovered = Recovered(Identity("c", "a"), Base(0, 0, 0, 0, members, 0), Promise(TERM, None), [*entries])
    return RaftLog(journal, recovered)


class Line:
    """A leader and one follower; each large request takes the whole line for ``rounds`` heartbeats."""

    def __init__(self, rounds: int, followed: bool) -> None:
        self.rounds = rounds
        self.log, self.other = a_log(SMALL), a_log(*([SMALL] if followed else []))
        self.replication = Replication(self.log, TERM, lambda position: b"", Bounds())
        self.replication.set_peers(["b"])
        self.bulk: list[AppendRequest] = []
        self.left = 0
        self.large_count = 0
        self.heartbeat()

    def put(self, entry: Entry) -> None:
        self.log.put_from(self.log.last_log_index + 1, [entry])
        self.step(heartbeat=False)

    def heartbeat(self) -> None:
        self.replication.begin_round(self.replication.round + 1)
        self.step(heartbeat=True)
        if self.bulk:
            self.left -= 1
            if self.left <= 0:
                self.deliver(self.bulk.pop(0))
                self.left = self.rounds

    def step(self, *, heartbeat: bool) -> None:
        for one in self.replication.requests("b", heartbeat=heartbeat, commit_moved=False):
            assert isinstance(one, AppendRequest)
            if any(len(entry.content) > 1_000 for entry in one.entries):
                self.large_count += 1
                self.left = self.left if self.bulk else self.rounds
                self.bulk.append(one)
            else:
                self.deliver(one)

    def deliver(self, request: AppendRequest) -> None:
        match = self.other.accept(request.previous_index, request.previous_term, request.entries)
        answer = AppendAnswer(TERM, request.round, request.previous_index, match is not None, match or 0, 0)
        if match is None:
            answer.hint_index = self.other.hint(request.previous_index)
        self.replication.on_append_answer("b", answer)
        self.step(heartbeat=False)

    @property
    def level(self) -> bool:
        return self.other.last_log_index == self.log.last_log_index


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_a_large_request_that_is_passed_by_small_ones_is_not_sent_again_each_time(
    rounds: int, followed: bool
) -> None:
    line = Line(rounds, followed)
    for _ in range(3):
        line.put(LARGE)
        for _ in range(rounds):
            line.put(SMALL)
            line.heartbeat()
    for _ in range(30):
        line.heartbeat()
    assert line.level
    assert line.large_count <= 2 * 3, "each twice at most: what passed it is sent again, and what came behind"


def test_a_large_request_that_was_lost_is_sent_again_within_some_heartbeats() -> None:
    line = Line(1_000, followed=True)
    line.put(LARGE)
    line.bulk.clear()
    line.rounds = 1
    for _ in range(8):
        line.heartbeat()
    assert line.level
