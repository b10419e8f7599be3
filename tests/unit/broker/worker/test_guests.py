"""Bounds of connections: at each limit and one above, over all workers; and places that this host keeps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from danube.broker.worker import guests as guests_module
from danube.broker.worker.guests import LOCAL_PLACES, SECOND_NS, Guests
from danube.broker.worker.places import Places
from danube.errors import LimitExceeded, Overloaded

FAR, HERE = "192.0.2.1", "127.0.0.1"


class Counts:
    """Those of one host."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def add(self, name: str, amount: int) -> None:
        self.of[name] += amount

    def total(self, name: str) -> int:
        return self.of[name]


class Host:
    """Two workers that count together, at a time in the test's hands."""

    def __init__(self, **limits: int) -> None:
        self.now_ns, self.counts = 10**12, Counts()
        bounds = {"per_address": 0, "per_principal": 0, "per_second": 0} | limits
        self.workers = [Guests(self.counts, **bounds, now_ns=lambda: self.now_ns) for _ in range(2)]


def refused(call: Any, *args: Any, **named: Any) -> dict[str, Any]:
    with pytest.raises(Overloaded) as caught:
        call(*args, **named)
    assert caught.value.retryable
    return caught.value.facts


def test_an_address_has_so_many_connections_whichever_workers_it_reaches() -> None:
    host = Host(per_address=3)
    one, other = host.workers
    for guests in (one, other, one):
        guests.come(FAR, local=False)
    for guests in (one, other):
        facts = refused(guests.come, FAR, local=False)
        assert (facts["quota"], facts["limit"]) == ("connections_per_address", 3)
    other.come("192.0.2.2", local=False)
    one.leave(FAR)
    other.arrive(FAR)  # another worker has judged and passed it on
    refused(other.come, FAR, local=False)
    one.leave(FAR)
    other.come(FAR, local=False)


def test_a_principal_has_so_many_connections_from_wherever() -> None:
    one, other = Host(per_principal=2).workers
    one.enter("user:anna", local=False)
    other.carry("user:anna")
    facts = refused(one.enter, "user:anna", local=False)
    assert (facts["quota"], facts["limit"]) == ("connections_per_principal", 2)
    one.enter("user:bert", local=False)
    other.exit("user:anna")
    one.enter("user:anna", local=False)


def test_an_address_opens_so_many_a_second_and_saves_a_second_of_it() -> None:
    host = Host(per_second=4)
    one, other = host.workers
    for guests in (one, other, one, other):
        guests.come(FAR, local=False)
        guests.leave(FAR)
    facts = refused(one.come, FAR, local=False)
    assert (facts["quota"], facts["limit"]) == ("connection_rate", 4) and 0 < facts["retry_after_ms"] <= 251
    one.come("192.0.2.2", local=False)
    host.now_ns += SECOND_NS // 4
    one.come(FAR, local=False)
    refused(one.come, FAR, local=False)
    host.now_ns += 10 * SECOND_NS
    for _ in range(4):
        one.come(FAR, local=False)
    refused(one.come, FAR, local=False)


def test_the_rates_of_only_so_many_addresses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests_module, "ADDRESSES_MAX", 3)
    host = Host(per_second=1)
    guests = host.workers[0]
    for number in range(9):
        guests.come(f"192.0.2.{number}", local=False)
    assert len(guests._rates) == 3
    refused(guests.come, "192.0.2.2", local=False)
    host.now_ns += 3 * SECOND_NS
    guests.come("192.0.2.10", local=False)
    assert list(guests._rates) == ["192.0.2.10"], "the others have saved all that they may"


def test_this_host_keeps_some_connections_whatever_the_limits_are() -> None:
    guests = Host(per_address=1, per_principal=1, per_second=1).workers[0]
    for _ in range(LOCAL_PLACES):
        guests.come(HERE, local=True)
        guests.enter("user:root", local=True)
    assert refused(guests.come, HERE, local=True)["quota"] == "connections_per_address"
    assert refused(guests.enter, "user:root", local=True)["quota"] == "connections_per_principal"


def test_the_last_places_are_for_this_host() -> None:
    places = Places(100, kept=2)
    with pytest.raises(LimitExceeded, match="2 more are kept for this host"):
        places.take(FAR, 8, 10)
    for host in (HERE, "a process of this host", "::/64"):
        places.take(host, 9, 10)
    places.take(FAR, 9, 10, arrived=True)
    with pytest.raises(LimitExceeded, match="holds 10 connections"):
        places.take(HERE, 10, 10)
    full = Places(3, kept=1)
    full.take(FAR, 0, 10)
    full.take(FAR, 0, 10)
    with pytest.raises(LimitExceeded, match="descriptors for 3 connections"):
        full.take(FAR, 0, 10)
    full.take(HERE, 0, 10)


def test_places_count_their_guests_and_those_that_are_refused_not() -> None:
    counts = Counts()
    bounds = {"per_address": 1, "per_principal": 1, "per_second": 0}
    places = Places(2, guests=Guests(counts, **bounds))
    places.take(FAR, 0, 10)
    places.enter("user:anna", FAR)
    with pytest.raises(Overloaded):
        places.take(FAR, 1, 10)
    with pytest.raises(Overloaded):
        places.enter("user:anna", FAR)
    places.take(FAR, 1, 10, arrived=True)
    places.enter("user:anna", FAR, arrived=True)
    with pytest.raises(LimitExceeded):
        places.take("192.0.2.2", 2, 10)
    assert counts.of == {FAR: 2, "principal user:anna": 2}
    for _ in range(2):
        places.give_back(FAR)
        places.exit("user:anna")
    assert not counts.total(FAR) and not counts.total("principal user:anna")
    places.take("192.0.2.2", 0, 10)
