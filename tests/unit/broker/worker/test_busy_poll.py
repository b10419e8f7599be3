"""When a worker looks at its sockets again before it sleeps, and when it must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from danube.broker.worker.busy_poll import LATE_NS, REST_NS, BusyPoll
from danube.host import clock

LIMIT_US = 200
LOOK_NS = 5_000


class Loop:
    """A loop with a clock of its own: each round takes LOOK_NS."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10 * REST_NS
        self.soon: list[Callable[[], None]] = []
        self.busy = False
        self.poll = BusyPoll(self.soon.append, LIMIT_US, lambda: self.busy)
        monkeypatch.setattr(clock, "monotonic_ns", lambda: self.now_ns)

    def turn(self, after_us: int, asker: str | None = "client") -> None:
        self.now_ns += after_us * 1_000
        self.poll.turn_ended(self.now_ns, asker)

    def looks(self) -> int:
        """Rounds until the loop sleeps."""
        count = 0
        while self.soon:
            self.now_ns += LOOK_NS
            self.soon.pop(0)()
            count += 1
        return count


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


def test_it_looks_for_the_limit_after_a_turn_that_followed_closely(loop: Loop) -> None:
    loop.turn(0)
    assert loop.looks() == 0, "nothing was before it"
    loop.turn(LIMIT_US - 1)
    assert loop.looks() == LIMIT_US * 1_000 // LOOK_NS
    loop.turn(LIMIT_US)
    assert loop.looks() == 0, "one that was that late is not expected sooner the next time"


def test_a_turn_while_it_looks_makes_it_look_on(loop: Loop) -> None:
    loop.turn(0)
    loop.turn(100)
    for _ in range(50):
        assert len(loop.soon) == 1, "one look at a time"
        loop.now_ns += LOOK_NS
        loop.soon.pop(0)()
        loop.turn(90)
    assert loop.looks() == LIMIT_US * 1_000 // LOOK_NS


def test_it_looks_only_where_one_connection_asks_again(loop: Loop) -> None:
    loop.turn(0)
    loop.turn(10, None)
    assert loop.looks() == 0, "several asked, or another worker"
    loop.turn(10)
    assert loop.looks() == 0, "nobody knows yet who will"
    loop.turn(10, "another client")
    assert loop.looks() == 0
    loop.turn(10, "another client")
    assert loop.looks() > 0


def test_whoever_wants_the_processor_ends_it_for_a_while(loop: Loop) -> None:
    loop.turn(0)
    loop.turn(10)
    loop.now_ns += LATE_NS  # another process ran
    assert loop.looks() == 1
    loop.turn(10)
    assert loop.looks() == 0, "it rests"
    loop.now_ns += REST_NS
    loop.turn(10)
    loop.turn(10)
    assert loop.looks() > 1


def test_threads_of_the_worker_do_not_wait_for_it(loop: Loop) -> None:
    loop.turn(0)
    loop.busy = True
    loop.turn(10)
    assert loop.looks() == 0
    loop.busy = False
    loop.turn(10)
    assert len(loop.soon) == 1
    loop.busy = True  # a sync begins meanwhile
    assert loop.looks() == 1
    loop.busy = False
    loop.turn(10)
    assert loop.looks() > 1


def test_a_long_turn_is_nobody_elses_doing(loop: Loop) -> None:
    loop.turn(0)
    loop.turn(10)
    began_ns = loop.now_ns
    loop.now_ns += 2 * LATE_NS  # the turn itself
    loop.poll.turn_ended(began_ns, "client")
    assert loop.looks() > 1


def test_without_a_limit_it_never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    loop.poll = BusyPoll(loop.soon.append, 0, lambda: False)
    for _ in range(3):
        loop.turn(0)
    assert loop.looks() == 0
