"""Which producers may be open on a partition together."""

from __future__ import annotations

from typing import Any

import pytest

from danube.broker.partition.producers import Producers
from danube.errors import ProducerBusy

NEAR: Any = object()
FAR: Any = object()


def test_shared_producers_of_any_name_meet() -> None:
    producers = Producers()
    for handle, name in enumerate(("b", "a", "b"), 1):
        producers.check("p", name, exclusive=False)
        producers.add(NEAR, handle, name, False)
    assert producers.names() == ["a", "b"] and len(producers) == 3


def test_an_exclusive_producer_meets_only_those_of_its_name() -> None:
    producers = Producers()
    producers.add(NEAR, 1, "a", True)
    producers.check("p", "a", exclusive=True)
    producers.check("p", "a", exclusive=False)
    producers.add(FAR, 1, "a", False)
    for exclusive in (True, False):
        with pytest.raises(ProducerBusy, match="has producer 'a'") as caught:
            producers.check("p", "b", exclusive)
        assert caught.value.why == "it is exclusive"
    producers.drop(NEAR, 1)
    producers.check("p", "b", exclusive=False)
    with pytest.raises(ProducerBusy) as caught:
        producers.check("p", "b", exclusive=True)
    assert caught.value.why == "exclusive access was asked for"
    producers.drop(FAR, 1)
    producers.check("p", "b", exclusive=True)


def test_a_name_is_open_until_its_last_handle_is_closed() -> None:
    producers = Producers()
    for session, handle in ((NEAR, 1), (NEAR, 2), (FAR, 1)):
        producers.add(session, handle, "a", True)
    for session, handle in ((NEAR, 2), (NEAR, 2), (FAR, 1), (FAR, 9)):
        producers.drop(session, handle)
    with pytest.raises(ProducerBusy):
        producers.check("p", "b", exclusive=False)
    assert producers.clear() == [(NEAR, 1)]
    producers.check("p", "b", exclusive=True)
    assert producers.names() == [] and len(producers) == 0


def test_a_broker_s_own_producers_are_there_and_not_counted() -> None:
    producers = Producers()
    producers.add(NEAR, 1, "letters", False, internal=True)
    with pytest.raises(ProducerBusy, match="has producer 'letters'"):
        producers.check("p", "a", exclusive=True)
    producers.add(NEAR, 2, "a", False)
    assert producers.names() == ["a", "letters"] and producers.name_count == 1
    assert not producers.has("letters"), "a client of that name counts"
    producers.drop(NEAR, 1)
    assert producers.names() == ["a"]
