"""A connection that was alone in the last turn has the next one at once; others wait for each other."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from danube.broker.worker.busy_poll import BusyPoll
from danube.errors import ProtocolError
from danube.host import clock
from danube.server.native import ALONE_BYTES_MAX, NativeConnection
from tests.unit.broker.worker.test_worker_turn import Steps
from tests.unit.native_door import Door, feed, on_loop, publish


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(clock, "monotonic_ns", itertools.count(0, 10_000_000).__next__)
    steps = Steps()
    steps.worker.context = SimpleNamespace(workers=1)  # type: ignore[assignment]
    steps.worker.rings_due, steps.worker.channel.touched = False, False  # type: ignore[misc]
    steps.worker.busy_poll = BusyPoll(steps.loop.call_soon, 0, lambda: False)
    return steps


def turn_of(steps: Steps, *askers: object) -> None:
    for asker in askers:
        steps.worker.schedule_turn(asker)
    steps.worker.run_turn()


def test_who_was_alone_may_go_on_at_once(steps: Steps) -> None:
    worker, soon = steps.worker, steps.loop.call_soon
    one, other = object(), object()
    turn_of(steps, one)
    assert not worker.claim_turn(other)
    soon.reset_mock()
    for _ in range(3):
        assert worker.claim_turn(one)
        worker.schedule_turn(one)
        assert not worker.claim_turn(one), "it has it already"
        worker.run_turn()
    assert not soon.called, "nothing was left for the loop"


def test_who_shared_the_last_turn_waits(steps: Steps) -> None:
    one, other = object(), object()
    for askers in ((one, other), (None,), (one, None), (None, one)):
        turn_of(steps, one)
        turn_of(steps, *askers)
        assert not steps.worker.claim_turn(one), askers


def test_who_comes_after_somebody_else_is_part_of_that_turn(steps: Steps) -> None:
    one = object()
    turn_of(steps, one)
    steps.worker.schedule_turn(object())
    assert not steps.worker.claim_turn(one)


def test_what_asks_during_the_turn_gets_another(steps: Steps) -> None:
    worker = steps.worker
    one = object()
    turn_of(steps, one)
    steps.during["write"] = lambda: worker.schedule_turn(None)
    assert worker.claim_turn(one)
    worker.schedule_turn(one)
    steps.loop.call_soon.reset_mock()
    worker.run_turn()
    steps.loop.call_soon.assert_called_once_with(worker._begin_turn)


def test_doors_are_not_asked_in_a_claimed_turn(steps: Steps) -> None:
    worker, one, steps_taken = steps.worker, object(), list[str]()
    turn_of(steps, one)
    for step in ("hand over", "write", "flush"):
        steps.during[step] = lambda step=step: steps_taken.append(step)
    assert worker.claim_turn(one)
    worker.run_turn(claimed=True)
    assert steps_taken == ["write", "flush"]
    steps_taken.clear()
    turn_of(steps, one)
    assert steps_taken == ["hand over", "write", "flush"]


def test_while_a_door_waits_for_room_in_a_ring_nobody_has_a_turn_of_its_own(steps: Steps) -> None:
    one = object()
    steps.during["hand over"] = lambda: True
    turn_of(steps, one)
    assert not steps.worker.claim_turn(one)
    del steps.during["hand over"]
    turn_of(steps, one)
    assert steps.worker.claim_turn(one)


def test_output_of_a_turn_is_flushed_in_it(steps: Steps) -> None:
    follows = {}
    for step in ("hand over", "write", "flush", "answer"):
        steps.during[step] = lambda step=step: follows.__setitem__(step, steps.worker.flush_pending)
    steps.worker.context = SimpleNamespace(workers=2)  # type: ignore[assignment]
    steps.worker.rings_due = True
    turn_of(steps, object())
    assert follows == {"hand over": True, "write": True, "flush": False, "answer": False}


def alone(connections: int = 1) -> tuple[Door, list[NativeConnection]]:
    door = Door()
    opened = [door.connect()[0] for _ in range(connections)]
    door.turns.clear()
    door.alone = True
    return door, opened


def test_a_connection_alone_runs_the_turn_when_its_frames_are_taken() -> None:
    def test() -> None:
        door, (connection,) = alone()
        door.router.received = lambda: door.turns.append("frames")  # type: ignore[method-assign]
        feed(connection, publish(1, 104) + publish(2, 104))
        assert door.turns == ["frames", "claimed"]
        assert connection._buffer is None and door.server.buffers.lent_bytes == 0, "nothing is held"
        assert [correlation for correlation, _ in door.router.taken] == [1, 2]

    on_loop(test)


def test_with_others_it_waits_for_them() -> None:
    def test() -> None:
        door, (connection,) = alone()
        door.alone = False
        feed(connection, publish(1, 104))
        assert door.turns == ["asked"]

    on_loop(test)


def test_what_comes_with_much_waits_for_more() -> None:
    def test() -> None:
        door, (connection,) = alone()
        feed(connection, publish(1, ALONE_BYTES_MAX))
        assert door.turns == ["asked"]

    on_loop(test)


def test_a_claimed_turn_is_run_whatever_the_frames_are() -> None:
    def fail(error: Exception) -> Any:
        def route(*_: object) -> bool:
            raise error

        return route

    def test() -> None:
        door, (first, second, third) = alone(3)
        door.router.room = False
        feed(first, publish(1, 104))
        assert door.turns.count("run") == 1, "a full ring"
        door.router.route = fail(RuntimeError("a defect"))  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a defect"):
            feed(second, publish(1, 104))
        assert door.turns.count("run") == 2
        door.router.route = fail(ProtocolError("not like this"))  # type: ignore[method-assign]
        feed(third, publish(1, 104))
        assert door.turns.count("run") == 3 and door.turns[-1] == "run"

    on_loop(test)
