"""Retries help and never storm: pauses, deadline and budget, on a clock that the test moves."""

from __future__ import annotations

import random
import threading

import pytest

from danube.errors import ObjectMissing, StoreRefused, StoreUnavailable
from danube.wal.stores.retries import Pauses, Retries, RetryBudget


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def retries(clock: Clock, **options: object) -> Retries:
    jitter = options.pop("jitter", lambda low, high: high)
    return Retries(sleep=clock.sleep, clock=clock, jitter=jitter, **options)  # type: ignore[arg-type]


class Failing:
    """Fails so many times, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_what_succeeds_is_asked_once() -> None:
    clock, request = Clock(), Failing()
    assert retries(clock).run(request) == "done"
    assert (request.calls, clock.slept) == (1, [])


def test_pauses_double_up_to_their_bound() -> None:
    clock = Clock()
    request = Failing(*[StoreUnavailable("no")] * 5)
    assert retries(clock, pauses=Pauses(first_s=1.0, most_s=4.0)).run(request) == "done"
    assert clock.slept == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_pauses_are_drawn_from_zero_to_the_bound() -> None:
    drawn: list[tuple[float, float]] = []
    clock = Clock()

    def jitter(low: float, high: float) -> float:
        drawn.append((low, high))
        return 0.25

    retries(clock, jitter=jitter).run(Failing(StoreUnavailable("no"), StoreUnavailable("no")))
    assert drawn == [(0.0, 0.1), (0.0, 0.2)]
    assert clock.slept == [0.25, 0.25]


def test_a_store_may_ask_for_a_longer_pause() -> None:
    clock = Clock()
    retries(clock).run(Failing(StoreUnavailable("slow down", retry_after_s=7.0)))
    assert clock.slept == [7.0]


def test_the_last_error_leaves_after_all_tries() -> None:
    clock = Clock()
    request = Failing(*[StoreUnavailable(str(number)) for number in range(9)])
    with pytest.raises(StoreUnavailable, match="3"):
        retries(clock, pauses=Pauses(tries=4)).run(request)
    assert request.calls == 4


def test_no_pause_goes_past_the_deadline() -> None:
    clock = Clock()
    request = Failing(*[StoreUnavailable("no", retry_after_s=6.0)] * 9)
    with pytest.raises(StoreUnavailable):
        retries(clock, pauses=Pauses(deadline_s=10.0)).run(request)
    assert clock.slept == [6.0]


@pytest.mark.parametrize("error", [StoreRefused("403"), ObjectMissing("404"), ValueError("a bug")])
def test_what_will_not_get_better_is_not_tried_again(error: Exception) -> None:
    request = Failing(error)
    with pytest.raises(type(error)):
        retries(Clock()).run(request)
    assert request.calls == 1


def test_a_dead_store_is_asked_little_more_than_once_per_request() -> None:
    clock, asked = Clock(), 0
    made = retries(clock, budget=RetryBudget(share=0.2, burst=10.0))

    def request() -> None:
        nonlocal asked
        asked += 1
        raise StoreUnavailable("outage")

    for _ in range(1_000):
        with pytest.raises(StoreUnavailable):
            made.run(request)
    assert asked <= 1_000 * 1.2 + 10
    assert made.budget.retries == asked - 1_000
    assert made.budget.refused > 700


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_the_budget_holds_at_every_rate_of_failure(rate: float, source: random.Random) -> None:
    asked = succeeded = 0
    made = retries(Clock())

    def request() -> None:
        nonlocal asked
        asked += 1
        if source.random() < rate:
            raise StoreUnavailable("no")

    for _ in range(5_000):
        try:
            made.run(request)
            succeeded += 1
        except StoreUnavailable:
            pass
    assert asked <= 5_000 * 1.2 + 10
    if rate <= 0.1:
        assert succeeded > 4_950, "a budget of a fifth carries one failure in ten"


def test_a_quiet_time_saves_no_more_than_the_burst() -> None:
    budget = RetryBudget(share=0.5, burst=3.0)
    for _ in range(100):
        budget.earn()
    assert [budget.spend() for _ in range(5)] == [True, True, True, False, False]


def test_threads_share_one_budget() -> None:
    budget = RetryBudget(share=0.0, burst=50.0)
    won: list[bool] = []

    def spend() -> None:
        won.extend(budget.spend() for _ in range(40))

    threads = [threading.Thread(target=spend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(won) == 50
