"""Who a handle belongs to, and what a client must close."""

from __future__ import annotations

from typing import Any

from danube.client.machine.session import Handles
from danube.client.records.handles import OpenHandles


class Thing:
    def __init__(self) -> None:
        self.closed = False


def opened() -> Any:
    return Thing()


def test_a_number_is_given_once() -> None:
    handles, one, other = Handles(), opened(), opened()
    numbers = [handles.give(one), handles.give(other), handles.give(one)]
    assert numbers == [1, 2, 3]
    assert [handles.owner(number) for number in numbers] == [one, other, one]
    assert handles.drop(1) is one
    assert handles.owner(1) is None and handles.drop(1) is None
    assert handles.give(one) == 4


def test_the_number_0_means_none_and_is_left_out() -> None:
    handles = Handles()
    handles._numbers = iter(range(2**32 - 1, 2**32 + 2))  # type: ignore[assignment]
    assert [handles.give(opened()) for _ in range(2)] == [2**32 - 1, 1]


def test_a_number_that_is_in_use_is_passed_when_they_begin_again() -> None:
    handles, one, other = Handles(), opened(), opened()
    assert handles.give(one) == 1
    handles._numbers = iter(range(2**32 - 1, 2**32 + 9))  # type: ignore[assignment]
    assert [handles.give(other) for _ in range(2)] == [2**32 - 1, 2]
    assert handles.owner(1) is one


def test_all_numbers_of_one_are_dropped_and_nothing_of_it_is_left() -> None:
    handles, one, other = Handles(), opened(), opened()
    mine = [handles.give(one) for _ in range(3)]
    handles.drop(mine[1])
    kept = handles.give(other)
    handles.drop_all(one)
    handles.drop_all(one)
    assert [handles.owner(number) for number in (*mine, kept)] == [None, None, None, other]
    assert handles.drop(kept) is other
    assert not handles._of and not handles._owners


def test_a_connection_that_is_gone_takes_all_numbers_along() -> None:
    handles, one = Handles(), opened()
    number = handles.give(one)
    handles.clear()
    handles.drop_all(one)
    assert handles.owner(number) is None and handles.give(one) == number + 1


def test_what_is_open_is_kept_in_order() -> None:
    kept: OpenHandles[Thing] = OpenHandles()
    things = [Thing() for _ in range(300)]
    for number, thing in enumerate(things):
        kept.add(thing)
        thing.closed = number % 3 == 0
    assert [one for one in kept.take() if not one.closed] == [one for one in things if not one.closed]
    assert kept.take() == []


def test_what_was_closed_is_forgotten() -> None:
    kept: OpenHandles[Thing] = OpenHandles()
    for _ in range(10_000):
        thing = Thing()
        kept.add(thing)
        thing.closed = True
        assert len(kept) <= 65
