"""The order of a worker's turn, on which the bytes of un-written batches depend."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from danube.broker.worker.worker import TURNS_WITHOUT_YIELD, UNUSED_TURNS, YIELDED_NS_MAX, Worker
from danube.errors import RingDamaged
from danube.host import clock
from danube.limits import WRITE_BYTES_MAX


def test_frames_that_a_full_ring_held_back_are_written_before_their_buffers_are_free() -> None:
    order: list[str] = []

    def note(name: str, result: Any = None) -> Any:
        return lambda *_: order.append(name) or result

    worker = Worker.__new__(Worker)
    worker.doors = {
        "native": SimpleNamespace(
            hand_over=note("hand over", False), flush=note("free buffers"), unflushed=True, waiting=True
        )
    }  # type: ignore[dict-item]
    worker.shard = SimpleNamespace(turn=note("write"), taken_bytes=0)  # type: ignore[assignment]
    worker.router = SimpleNamespace(received=lambda: None)  # type: ignore[assignment]
    worker.remote = SimpleNamespace(take=note("take"), flush=note("answer", False), pending=False)  # type: ignore[assignment]
    worker.channel = SimpleNamespace(  # type: ignore[assignment]
        peers_restarted=list,
        poll=lambda: [(1, 1, memoryview(b""))],
        release=note("free ring"),
        flush=note("publish", True),
    )
    worker.counters = MagicMock()
    worker.context = SimpleNamespace(workers=2)  # type: ignore[assignment]
    worker.loop = MagicMock()
    worker._turn_scheduled, worker._asked, worker._several_clients, worker._skip_yield = True, 1, False, 0
    worker.rings_due = True
    worker._unused_turns, worker._blocked, worker._begin = 0, False, worker._begin_turn
    worker.run_turn()
    for taken in ("take", "hand over"):
        assert order.index(taken) < order.index("write")
    for freed in ("free buffers", "free ring"):
        assert order.index("write") < order.index(freed)


class Steps:
    """A worker of which only turns are left; each step of a turn runs what the test put there."""

    def __init__(self) -> None:
        self.during: dict[str, Any] = {}
        worker = self.worker = Worker.__new__(Worker)
        door: Any = SimpleNamespace(
            hand_over=self._step("hand over", False), flush=self._step("flush"), unflushed=True, waiting=True
        )
        worker.doors = {"native": door}
        worker.shard = SimpleNamespace(turn=self._step("write"), taken_bytes=0)  # type: ignore[assignment]
        worker.router = SimpleNamespace(received=lambda: None)  # type: ignore[assignment]
        self.remote = SimpleNamespace(take=self._step("take"), flush=self._step("answer"), pending=False)
        worker.remote = self.remote  # type: ignore[assignment]
        self.records: list[Any] = []
        worker.channel = MagicMock(peers_restarted=list, poll=self._poll)
        worker.counters = MagicMock()
        worker.context = SimpleNamespace(workers=2)  # type: ignore[assignment]
        worker.loop = self.loop = MagicMock()
        worker._turn_scheduled, worker._asked = False, 0
        worker._several_clients, worker._skip_yield = False, 0
        worker.rings_due = True
        worker._unused_turns, worker._blocked, worker.flush_pending = 0, False, False
        worker._begin = worker._begin_turn

    def _step(self, name: str, result: Any = None) -> Any:
        return lambda *_: self.during.get(name, lambda: None)() or result

    def _poll(self) -> list[Any]:
        self._step("poll")()
        return self.records

    def turns_asked(self) -> int:
        """How many turns are scheduled after one that was."""
        self.worker.schedule_turn()
        self.loop.call_soon.reset_mock()
        self.worker.run_turn()
        return int(self.loop.call_soon.call_count)


@pytest.mark.parametrize(
    ("step", "turns"), [("take", 0), ("hand over", 0), ("write", 1), ("flush", 1), ("answer", 1)]
)
def test_only_what_a_turn_has_passed_asks_for_another(step: str, turns: int) -> None:
    steps = Steps()
    steps.during[step] = steps.worker.schedule_turn
    if step == "take":
        steps.records = [(1, 1, memoryview(b""))]
        turns = 1  # there may be more in the rings
    assert steps.turns_asked() == turns
    steps.records = []
    steps.during.clear()
    assert steps.turns_asked() == 0


def test_output_of_a_turn_is_flushed_in_it() -> None:
    steps, follows = Steps(), {}
    for step in ("hand over", "write", "flush", "answer"):
        steps.during[step] = lambda step=step: follows.__setitem__(step, steps.worker.flush_pending)
    steps.turns_asked()
    assert follows == {"hand over": True, "write": True, "flush": False, "answer": False}


def test_what_others_sent_is_answered_as_soon_as_a_write_is_worth_it() -> None:
    steps, order = Steps(), []
    worker = steps.worker
    shard: Any = worker.shard
    worker.channel.flush.side_effect = lambda: order.append("publish") or True  # type: ignore[attr-defined]

    def take() -> None:
        order.append("take")
        shard.taken_bytes += WRITE_BYTES_MAX // 2

    def write() -> None:
        order.append("write")
        shard.taken_bytes = 0

    steps.during = {"take": take, "write": write, "answer": lambda: order.append("answer")}
    steps.records = [(1, 1, memoryview(b""))] * 5
    worker.run_turn()
    round_of_two = ["take", "take", "write", "answer", "publish"]
    assert order == [*round_of_two, *round_of_two, "take", "write", "answer", "publish"]
    assert worker.channel.release.call_count == 1, "the ring's space is given back when all is written"  # type: ignore[attr-defined]


def test_rings_that_nobody_uses_are_left_alone_until_a_bell_rings_or_something_is_sent() -> None:
    steps = Steps()
    worker, polls = steps.worker, []
    arm: Any = worker.channel.arm
    steps.during["poll"] = lambda: polls.append(1)

    def turn(*, touched: bool = False) -> None:
        worker.channel.touched = touched  # type: ignore[misc]
        arm.reset_mock()
        assert steps.turns_asked() == 0

    for _ in range(UNUSED_TURNS):
        turn()
        assert arm.called
    assert len(polls) == UNUSED_TURNS and not worker.rings_due
    turn()
    assert len(polls) == UNUSED_TURNS and not arm.called, "nobody rang"
    turn(touched=True)
    assert arm.called and worker.rings_due, "an answer may have come before the bell was armed"
    for _ in range(UNUSED_TURNS + 1):
        turn()
    assert len(polls) == 2 * UNUSED_TURNS and not worker.rings_due
    answers: list[int] = []
    steps.during["answer"] = lambda: answers.append(1)
    turn()
    assert not answers
    steps.remote.pending = True
    turn()
    assert answers, "what waits for others goes out also where rings are not due"
    steps.remote.pending = False
    worker._on_bell()
    assert worker.rings_due and steps.loop.call_soon.called
    worker.run_turn()
    assert len(polls) == 2 * UNUSED_TURNS + 1 and not worker.rings_due
    steps.records = [(1, 1, memoryview(b""))]
    worker._on_bell()
    worker.run_turn()
    assert worker.rings_due and worker._unused_turns == 0


def test_rings_stay_due_where_another_turn_follows() -> None:
    steps = Steps()
    steps.worker._unused_turns = UNUSED_TURNS
    steps.worker.channel.touched = False  # type: ignore[misc]
    steps.worker.channel.arm = lambda: False  # type: ignore[method-assign]
    assert steps.turns_asked() == 1 and steps.worker.rings_due, "something came before the bell was armed"
    steps.during["write"] = steps.worker.schedule_turn
    assert steps.turns_asked() == 1 and steps.worker.rings_due, "the bell was not armed"


def test_a_turn_that_fails_before_it_writes_does_not_stop_turns() -> None:
    def fail() -> None:
        raise OSError("a socket broke")

    steps = Steps()
    steps.during["hand over"] = fail
    with pytest.raises(OSError, match="broke"):
        steps.turns_asked()
    steps.worker.schedule_turn()
    assert steps.worker._turn_scheduled and steps.loop.call_soon.call_count == 1


def test_a_damaged_ring_is_looked_at_again() -> None:
    def damage() -> None:
        raise RingDamaged("bytes that nobody wrote", worker=1)

    steps = Steps()
    steps.during["poll"] = damage
    assert steps.turns_asked() == 1 and steps.loop.call_soon.call_args.args == (steps.worker.schedule_turn,)


def test_who_is_alone_is_served_at_once_and_several_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps()
    worker, soon = steps.worker, steps.loop.call_soon
    turns: list[str] = []
    steps.during["write"] = lambda: turns.append("turn")

    def ask(times: int) -> None:
        soon.reset_mock()
        for _ in range(times):
            worker.schedule_turn()
        soon.assert_called_once_with(worker._begin_turn)
        soon.reset_mock()
        worker._begin_turn()

    monkeypatch.setattr(os, "sched_yield", lambda: None)
    monkeypatch.setattr(clock, "monotonic_ns", itertools.repeat(0).__next__)
    ask(1)
    assert turns == ["turn"] and not soon.called
    ask(2)
    assert turns == ["turn"] and soon.call_args.args == (worker.run_turn,)
    worker.run_turn()
    ask(1)
    assert len(turns) == 2, "there were several before"
    worker.run_turn()
    ask(1)
    assert len(turns) == 4


def test_a_connection_and_its_own_partition_are_not_several() -> None:
    steps = Steps()
    worker, soon = steps.worker, steps.loop.call_soon
    turns: list[str] = []
    steps.during["write"] = lambda: turns.append("turn")
    for number in range(3):
        soon.reset_mock()
        worker._need_turn()  # as a partition that has something to write
        worker.schedule_turn()
        soon.assert_called_once_with(worker._begin_turn)
        worker._begin_turn()
        assert len(turns) == number + 1, "it is served at once"


def test_nobody_waits_where_somebody_else_keeps_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    worker, soon = steps.worker, steps.loop.call_soon
    yields: list[int] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
    monkeypatch.setattr(clock, "monotonic_ns", itertools.count(0, YIELDED_NS_MAX + 1).__next__)

    def turn() -> None:
        worker.schedule_turn()
        worker.schedule_turn()
        soon.reset_mock()
        worker._begin_turn()
        if soon.called:
            worker.run_turn()

    for _ in range(2 * TURNS_WITHOUT_YIELD + 2):
        turn()
    assert len(yields) == 2, "once, and once more after so many turns"
