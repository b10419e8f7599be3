"""Who of many gets the next free thread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.partition.step_queue import FAIR_SHARE, StepQueue


def drained(queue: StepQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_the_most_urgent_goes_before_all_that_came_earlier() -> None:
    queue: StepQueue[str] = StepQueue()
    for number in range(3_000):
        queue.put(f"quiet {number}", (3, 0))
    queue.put("young", (1, 200))
    queue.put("old", (1, 100))
    assert [queue.pop(), queue.pop()] == ["old", "young"]
    assert drained(queue)[0] == "quiet 0"


def test_whoever_becomes_urgent_while_it_waits_moves_and_is_taken_once() -> None:
    queue: StepQueue[str] = StepQueue()
    for name in "abc":
        queue.put(name, (3, 0))
    queue.put("c", (1, 5))
    queue.put("c", (1, 5))
    assert drained(queue) == ["c", "a", "b"] and not len(queue)
    with pytest.raises(KeyError):
        queue.pop()
    queue.put("d", (3, 0))
    queue.discard("d")
    queue.discard("d")
    for _ in range(FAIR_SHARE):
        with pytest.raises(KeyError):
            queue.pop()


def test_nobody_waits_for_ever_behind_those_that_are_always_more_urgent() -> None:
    queue: StepQueue[str] = StepQueue()
    queue.put("quiet", (3, 0))
    taken = []
    for number in range(FAIR_SHARE):
        queue.put(f"urgent {number}", (1, 0))
        taken.append(queue.pop())
    assert "quiet" in taken


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=200))
def test_each_is_taken_once_and_old_places_do_not_grow(steps: list[tuple[int, int, bool]]) -> None:
    queue: StepQueue[int] = StepQueue()
    waiting: set[int] = set()
    for item, urgency, taking in steps:
        if taking and waiting:
            waiting.remove(queue.pop())
        else:
            queue.put(item, (urgency, 0))
            waiting.add(item)
        assert len(queue) == len(waiting)
        assert len(queue._heap) <= 2 * (len(waiting) + 1) + FAIR_SHARE
    while waiting:
        waiting.remove(queue.pop())
