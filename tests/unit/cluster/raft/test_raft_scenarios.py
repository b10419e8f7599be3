"""Orders of events in which replicated logs are known to lose entries or to stand still, one by one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("raftos", reason="a cluster needs raftos; scripts/setup installs it")

from danube.cluster.raft.engine import Members
from danube.cluster.raft.messages import (
    AppendAnswer,
    AppendRequest,
    PreVoteRequest,
    VoteRequest,
    decode,
    encode,
)
from danube.cluster.raft.replication import Bounds
from danube.errors import InvalidArgument, NotLeader, OutcomeUnknown, Overloaded
from tests.model import raft_mutants
from tests.model.raft_stage import Stage
from tests.model.raft_world import Violation


def value_at(stage: Stage, name: str) -> str:
    return stage.nodes[name].machine.value


def outcome(future: asyncio.Future[object]) -> BaseException | object:
    assert future.done()
    return future.exception() or future.result()


def test_s1_a_vote_survives_the_voter() -> None:
    stage = Stage(3)
    stage.campaign("a")
    stage.among("ab", rounds=1)
    promised = stage.take("b", "a")
    stage.nodes["b"].crash(power=True)
    stage.nodes["b"].boot()
    stage.campaign("c")
    stage.among("bc")
    assert not stage.leads("c")
    for one in promised:
        stage.hand(*one)
    assert stage.leads("a")


def deposed_leader(stage: Stage) -> None:
    """a leads, is cut off with an entry of its own, b leads and commits; then a hears of it from c."""
    stage.elect("a", "abc")
    stage.put("a", "abc")
    stage.write(stage.nodes["a"])
    stage.lose()
    stage.heartbeat("a")
    stage.among("ac", rounds=2)  # c refuses, and what a sends it once more is lost
    stage.lose()
    stage.elect("b", "bc")
    stage.put("b", "bc")
    stage.settle("bc")
    stage.heartbeat("a")
    stage.among("ac", rounds=3)
    stage.settle("bc")
    stage.nodes["b"].crash(power=True)
    stage.elect("c", "ac")
    stage.put("c", "ac")


def test_s2_a_deposed_leader_sends_nothing_more() -> None:
    stage = Stage(3)
    deposed_leader(stage)
    stage.settle("ac")
    assert [value_at(stage, name) for name in "ac"] == ["v4", "v4"]
    assert stage.terms("a") == stage.terms("c")


def diverged_follower(stage: Stage) -> None:
    """b leads with an empty log but its own first entry; a has a tail of its own that nobody else has."""
    stage.elect("a", "abc")
    stage.put("a", "abc")
    for _ in range(6):
        stage.write(stage.nodes["a"])
    stage.lose()
    stage.nodes["a"].crash(power=True)
    stage.elect("b", "bc")
    stage.nodes["a"].boot()
    stage.lose()
    # b asks a at an entry that both have, and sends none: as a heartbeat of a bounded batch does.
    leader = stage.node("b").engine.role
    leader.replication.peers["a"].next = 3
    stage.heartbeat("b")
    ((source, target, message),) = stage.take("b", "a")
    request = decode(message)
    assert isinstance(request, AppendRequest)
    request.entries = []
    stage.lose()
    stage.hand(source, target, encode(request))
    answers = stage.take("a", "b")
    call = stage.write(stage.nodes["b"])
    stage.lose()
    for one in answers:
        stage.hand(*one)
    assert call.outcome == ""
    assert stage.node("b").engine.status.commit_index <= 3


def test_s3_a_tail_that_is_not_the_leaders_counts_for_nothing() -> None:
    stage = Stage(3)
    diverged_follower(stage)
    stage.settle("abc")
    assert stage.terms("a") == stage.terms("b") == stage.terms("c")
    assert value_at(stage, "a") == "v8"


def late_vote(stage: Stage) -> None:
    stage.campaign("a")
    stage.among("ab", rounds=1)
    late = stage.take("b", "a")
    stage.lose()
    stage.campaign("a")
    stage.lose()
    stage.campaign("c")
    stage.campaign("c")
    stage.among("bc")
    assert stage.leads("c")
    for one in late:
        stage.hand(*one)
    assert not stage.leads("a")


def test_s4_a_vote_of_an_older_term_counts_for_nothing() -> None:
    late_vote(Stage(3))


def test_s5_half_of_a_group_is_no_majority() -> None:
    stage = Stage(4)
    stage.campaign("a")
    stage.campaign("c")
    messages = [one for one in stage.network if set(one[1:3]) in ({"a", "b"}, {"c", "d"})]
    stage.network = messages
    stage.among("abcd")
    assert not any(stage.leads(name) for name in "abcd")


def test_s6_a_late_heartbeat_erases_nothing() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    stage.heartbeat("a")
    old = stage.take("a", "b")
    call = stage.put("a", "ab")
    assert call.outcome == "ok"
    for one in old:
        stage.hand(*one)
    assert stage.terms("b") == [1, 1]
    stage.nodes["a"].crash(power=True)
    stage.elect("b", "bc")
    assert value_at(stage, "b") == "v1"


def test_s7_timers_of_a_deposed_leader_are_dead() -> None:
    stage = Stage(3)
    stage.elect("a", "ab")
    old = stage.node("a").engine.role
    stage.hand("c", "a", encode(VoteRequest(9, 0, 0)))
    assert not stage.leads("a")
    assert not old.step_down_timer.is_active and not old.heartbeat_timer.is_active
    stage.hand("c", "a", encode(VoteRequest(9, 9, 9)))
    assert stage.node("a").engine._member.storage.voted_for == "c"
    role = stage.node("a").engine.role
    role.election_timer.stop()
    for _ in range(20):
        stage.fire(stage.nodes["a"])
    assert stage.node("a").engine.role is role
    assert stage.node("a").engine._member.storage.voted_for == "c"


def test_s8_each_write_is_acknowledged_when_it_is_committed_itself() -> None:
    stage = Stage(3, bounds=Bounds(batch_entries=1, in_flight=1))
    stage.elect("a", "abc")
    first = stage.write(stage.nodes["a"])
    second = stage.write(stage.nodes["a"])
    stage.among("ab", wanted=lambda one: not isinstance(one, AppendRequest) or one.previous_index < 2)
    assert (first.outcome, second.outcome) == ("ok", "")
    stage.settle("ab")
    assert second.outcome == "ok"


def test_s9_the_first_election_after_the_leader_died_succeeds() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    stage.nodes["a"].crash(power=True)
    stage.time_out("b")
    stage.among("bc")
    assert stage.leads("b")


def test_s10_a_follower_with_a_longer_log_does_not_stop_the_others() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    for _ in range(4):
        stage.write(stage.nodes["a"])
    stage.lose()
    stage.elect("b", "bc")
    stage.heartbeat("b")
    assert {one[2] for one in stage.network} == {"a", "c"}
    stage.among("abc")
    stage.settle("abc")
    assert stage.terms("a") == stage.terms("c") == [1, 2]


def test_s11_one_of_two_commits_nothing_alone() -> None:
    stage = Stage(2)
    stage.elect("a", "ab")
    committed = stage.node("a").engine.status.commit_index
    call = stage.put("a", "a")
    stage.hand("b", "a", encode(AppendAnswer(1, 1, 0, True, 0, 0)))
    assert call.outcome == ""
    assert stage.node("a").engine.status.commit_index == committed


def test_s12_a_late_refusal_does_not_stop_a_follower() -> None:
    stage = Stage(3)
    stage.elect("a", "ab")
    for _ in range(5):
        stage.put("a", "ab")
    stage.hand("b", "a", encode(AppendAnswer(1, 1, 2, False, 0, 1)))
    stage.hand("b", "a", encode(AppendAnswer(1, 1, 9, False, 0, 1)))
    for _ in range(3):
        assert stage.put("a", "ab").outcome == "ok"
    assert stage.terms("a") == stage.terms("b")


def test_an_entry_of_an_older_term_is_not_committed_by_counting() -> None:
    assert figure_8(Stage(5, bounds=Bounds(batch_entries=1, in_flight=1))) == 0


def figure_8(stage: Stage) -> int:
    """As in the Raft paper; returns what a commits when a majority has its older entries."""
    stage.campaign("a")
    stage.among("abcde", rounds=2)
    stage.lose()
    for _ in range(2):  # without the first entry of its term a leader has one entry only
        stage.write(stage.nodes["a"])
    stage.lose()
    replicate(stage, "a", "b", 2)
    stage.nodes["a"].crash(power=True)
    stage.campaign("e")
    stage.among("cde", rounds=2)
    stage.lose()
    assert stage.leads("e")
    stage.write(stage.nodes["e"])
    stage.lose()
    stage.nodes["e"].crash(power=True)
    stage.nodes["a"].boot()
    stage.campaign("a")
    stage.lose()
    stage.campaign("a")
    stage.among("abcd", rounds=2)
    stage.lose()
    assert stage.leads("a")
    replicate(stage, "a", "c", 2)
    replicate(stage, "a", "b", 2)
    assert stage.terms("c")[:2] == [1, 1]
    committed: int = stage.node("a").engine.status.commit_index
    stage.nodes["a"].crash(power=True)
    stage.nodes["e"].boot()
    for _ in range(3):
        stage.lose()
        stage.campaign("e")
    stage.among("bcde")
    assert stage.leads("e")
    return committed


def replicate(stage: Stage, leader: str, follower: str, last_index: int) -> None:
    """Bring a follower's log to ``last_index``, and let the leader know."""
    role = stage.node(leader).engine.role
    log = stage.node(leader).log
    request = AppendRequest(role.term, 1, 0, 0, 0, [log[index] for index in range(1, last_index + 1)])
    stage.hand(leader, follower, encode(request))
    for one in stage.take(follower, leader):
        stage.hand(*one)
    stage.lose()


def test_a_confirmation_of_an_older_term_counts_for_nothing() -> None:
    stage = Stage(5)
    stale_confirmation(stage)


def stale_confirmation(stage: Stage) -> None:
    """b confirms entries of a's first leadership; a loses them to d's, leads again, and hears of it."""
    stage.elect("a", "abcde")
    for _ in range(4):
        stage.write(stage.nodes["a"])
    late = confirmations(stage, "a", "b")
    stage.campaign("d")
    stage.among("cde", rounds=2)
    stage.lose()
    assert stage.leads("d")
    replicate(stage, "d", "a", 2)
    stage.nodes["d"].crash(power=True)
    assert stage.terms("a") == [1, 2]
    stage.campaign("a")
    stage.among("ace", rounds=2)
    stage.lose()
    assert stage.leads("a")
    stage.put("a")
    replicate(stage, "a", "c", 4)
    for one in late:
        stage.hand(*one)
    assert stage.node("a").engine.status.commit_index <= 1


def confirmations(stage: Stage, leader: str, follower: str) -> list[tuple[str, str, bytes]]:
    """What a follower answers when it has all entries of the leader; the leader does not get it."""
    role = stage.node(leader).engine.role
    log = stage.node(leader).log
    entries = [log[index] for index in range(1, log.last_log_index + 1)]
    stage.lose()
    stage.hand(leader, follower, encode(AppendRequest(role.term, 1, 0, 0, 0, entries)))
    return stage.take(follower, leader)


# More of what a bare raftos gets wrong


def test_a_new_leader_commits_what_older_terms_left_behind() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    stage.write(stage.nodes["a"])
    stage.among("ab", rounds=1)
    stage.nodes["a"].crash(power=True)
    stage.elect("b", "bc")
    stage.settle("bc")
    assert value_at(stage, "b") == value_at(stage, "c") == "v1"


def test_a_leader_without_a_majority_answers_no_barrier_and_steps_down() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    read = stage.read(stage.nodes["a"])
    write = stage.write(stage.nodes["a"])
    stage.lose()
    for _ in range(12):
        stage.fire(stage.nodes["a"])
        stage.lose()
    assert not stage.leads("a")
    assert (read.outcome, write.outcome) == ("NotLeader", "OutcomeUnknown")


def test_a_leader_that_was_paused_asks_before_it_steps_down() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    stage.settle("abc")
    stage.nodes["a"].loop.now += 60.0
    for _ in range(3):
        stage.fire(stage.nodes["a"])
    assert stage.leads("a")
    stage.among("abc")
    stage.settle("abc")
    assert stage.leads("a") and stage.nodes["a"].term == 1


def test_a_barrier_waits_for_a_heartbeat_that_began_after_it() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    stage.heartbeat("a")
    early = stage.take("a", "b")
    stage.lose()
    read = stage.read(stage.nodes["a"])
    stage.lose()
    for one in early:
        stage.hand(*one)
    stage.among("ab")
    assert read.outcome == ""
    stage.settle("ab", rounds=1)
    assert read.outcome == "ok"


def test_a_member_that_was_cut_off_does_not_raise_the_term() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    stage.settle("abc")
    for _ in range(10):
        stage.fire(stage.nodes["c"])
        stage.lose()
    assert stage.nodes["c"].term == 1
    stage.heartbeat("a")
    stage.among("ab")
    stage.fire(stage.nodes["c"])
    stage.among("abc")
    assert stage.leads("a") and stage.nodes["a"].term == 1


def test_a_voter_that_hears_its_leader_wants_no_other() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    stage.settle("abc")
    stage.hand("c", "b", encode(PreVoteRequest(1, 1, 99, 99)))
    ((_, _, answer),) = stage.take("b", "c")
    assert not decode(answer).vote_granted  # type: ignore[union-attr]


def test_a_single_member_decides_at_once_and_after_a_restart() -> None:
    stage = Stage(1)
    assert stage.leads("a")
    assert stage.put("a").outcome == "ok"
    assert stage.read(stage.nodes["a"]).outcome == "ok"
    stage.nodes["a"].crash(power=True)
    stage.nodes["a"].boot()
    assert stage.leads("a")
    assert value_at(stage, "a") == "v1"


def test_who_is_far_behind_gets_the_snapshot_in_parts() -> None:
    stage = Stage(3, snapshot_bytes=400)
    stage.elect("a", "abc")
    stage.nodes["c"].crash(power=True)
    for _ in range(40):
        stage.put("a", "ab")
    assert stage.node("a").engine.status.snapshot_index > 10
    stage.nodes["c"].boot()
    stage.settle("abc", rounds=8)
    assert value_at(stage, "c") == "v40"
    assert stage.node("c").engine.statistics()["snapshots_installed"] == 1


def test_a_member_joins_catches_up_votes_and_goes() -> None:
    stage = Stage(1)
    for _ in range(5):
        stage.put("a")
    stage.join("b")
    one, both = {"a": "a:1"}, {"a": "a:1", "b": "b:1"}
    added = stage.change(stage.nodes["a"], Members(one, {"b": "b:1"}))
    assert outcome(added) is None
    refused = stage.change(stage.nodes["a"], Members(both))
    assert isinstance(outcome(refused), InvalidArgument)
    stage.settle("ab", rounds=4)
    promoted = stage.change(stage.nodes["a"], Members(both))
    assert not promoted.done()
    again = stage.change(stage.nodes["a"], Members(one))
    assert isinstance(outcome(again), Overloaded)
    stage.settle("ab")
    assert outcome(promoted) is None
    assert value_at(stage, "b") == "v5"
    gone = stage.change(stage.nodes["a"], Members({"b": "b:1"}))
    stage.settle("ab")
    assert outcome(gone) is None
    assert not stage.leads("a")
    stage.elect("b", "b")
    assert stage.put("b").outcome == "ok"


def test_only_one_member_changes_at_a_time_and_the_last_voter_stays() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    wrong = (Members({"a": "a:1"}), Members({}), Members({"a": "", "b": "", "c": "", "d": ""}))
    for members in wrong:
        assert isinstance(outcome(stage.change(stage.nodes["a"], members)), InvalidArgument)


def test_who_came_with_an_empty_disk_does_not_vote_before_a_leader_was_heard() -> None:
    stage = Stage(3)
    node = stage.join("d")
    stage.hand("a", "d", encode(VoteRequest(5, 9, 9)))
    stage.hand("a", "d", encode(PreVoteRequest(5, 1, 9, 9)))
    assert [
        decode(one[2]) for one in stage.take("d", "a") if getattr(decode(one[2]), "vote_granted", 0)
    ] == []
    assert node.engine is not None and node.engine._member.storage.voted_for is None


def test_a_leader_that_stops_names_its_successor() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    stage.settle("abc")
    engine = stage.node("a").engine
    stage.step(stage.nodes["a"], engine.stop)
    stage.nodes["a"].crash(power=False)
    stage.among("bc" + "a")
    assert stage.leads("b") or stage.leads("c")


def test_a_proposal_at_a_follower_names_the_leader() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    stage.settle("abc")
    engine = stage.node("b").engine
    for future in (engine.propose(b"x"), engine.read_barrier(), engine.change_members(Members({"a": "a:1"}))):
        error = future.exception()
        assert isinstance(error, NotLeader) and error.facts["leader_id"] == "a"


def test_proposals_end_when_their_leader_does() -> None:
    stage = Stage(3)
    stage.elect("a", "abc")
    engine = stage.node("a").engine
    sent = engine.propose(b"v1")
    stage.step(stage.nodes["a"], lambda: None)
    waiting = engine.propose(b"v2")
    stage.hand("c", "a", encode(VoteRequest(9, 0, 0)))
    assert isinstance(sent.exception(), OutcomeUnknown)
    assert isinstance(waiting.exception(), NotLeader)


def test_messages_of_a_newer_version_and_of_nobody_are_dropped_and_counted() -> None:
    stage = Stage(3)
    for message in (b"\xff\x90", b"\x05garbage", b"", b"\x05", b"\x02\x92\x01\xc3trail"):
        stage.hand("b", "a", message)
    counted = stage.node("a").engine.statistics()
    assert (counted["messages_unknown"], counted["messages_unreadable"]) == (1, 4)
    assert stage.nodes["a"].term == 0


def bounds_of(play: object) -> Bounds:
    return Bounds(batch_entries=1, in_flight=1) if play is figure_8 else Bounds(batch_entries=8)


@pytest.mark.parametrize(
    ("mutant", "play", "size", "seen"),
    [
        (raft_mutants.deposed_leader_sends, deposed_leader, 3, "a committed entry would be cut"),
        (raft_mutants.own_last_index, diverged_follower, 3, "b commits"),
        (raft_mutants.stale_votes_counted, late_vote, 3, "term 2 has two leaders"),
        (raft_mutants.old_term_committed, figure_8, 5, "leader e .* another entry|lacks committed"),
        (raft_mutants.stale_success_accepted, stale_confirmation, 5, "a commits 4 with"),
    ],
)
def test_a_planted_bug_is_seen(
    monkeypatch: pytest.MonkeyPatch, mutant: raft_mutants.Mutant, play: Any, size: int, seen: str
) -> None:
    mutant(monkeypatch)
    with pytest.raises(Violation, match=seen):
        play(Stage(size, bounds=bounds_of(play)))
