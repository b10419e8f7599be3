"""Who a handle belongs to, and what a client must close."""

from __future__ import annotations

from typing import Any

import danube.sync
from danube.client.machine.session import Handles
from danube.core.partition.policy import TopicPolicy
from tests.fakes.broker import FakeBroker

TOPIC = "/default/t"


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


def test_what_is_open_is_closed_with_the_client_in_order(fake: FakeBroker) -> None:
    fake.create(TOPIC, 0, TopicPolicy())
    client = danube.sync.connect(fake.url).open()
    producers = [client.producer(TOPIC).open() for _ in range(9)]
    for producer in producers[::3]:
        producer.close()
    kept = [one for one in producers if not one.closed]
    assert list(client._open) == kept
    closed = []
    for one in kept:
        one._when_closed = lambda one=one: closed.append(one)  # type: ignore[misc]
    client.close()
    assert closed == kept


def test_what_was_closed_is_forgotten(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client:
        for _ in range(300):
            client.producer(TOPIC).close()
            client.consumer(TOPIC, "s").close()
        assert not client._open
