"""The token bucket of a subscription's dispatch rate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from danube.core.dispatch.rate import SECOND_NS, UNLIMITED, RecordRate


def test_no_rate_is_no_limit() -> None:
    rate = RecordRate()
    assert rate.allowed(5) == UNLIMITED
    rate.take(1_000_000)
    assert rate.allowed(6) == UNLIMITED
    assert rate.next_ns(6) is None


def test_at_most_one_second_is_saved_up() -> None:
    rate = RecordRate(10)
    assert rate.allowed(1) == 10
    rate.take(10)
    assert rate.allowed(2) == 0
    assert rate.allowed(1 + SECOND_NS // 2) == 5
    assert rate.allowed(1 + 100 * SECOND_NS) == 10


def test_the_next_record_may_go_when_it_says() -> None:
    rate = RecordRate(10)
    rate.allowed(1)
    rate.take(10)
    due_ns = rate.next_ns(1)
    assert due_ns is not None
    assert rate.allowed(due_ns - SECOND_NS // 100) == 0
    assert rate.allowed(due_ns) == 1


def test_a_slower_rate_takes_away_what_was_saved() -> None:
    rate = RecordRate(1_000)
    rate.allowed(1)
    rate.set(10)
    assert rate.allowed(2) == 10


@given(st.integers(1, 1_000), st.lists(st.integers(1, SECOND_NS), max_size=50))
def test_never_more_than_the_rate_and_one_second(per_second: int, gaps_ns: list[int]) -> None:
    rate = RecordRate(per_second)
    now_ns, taken = 1, 0
    for gap_ns in gaps_ns:
        now_ns += gap_ns
        allowed = rate.allowed(now_ns)
        rate.take(allowed)
        taken += allowed
    assert taken <= per_second * (1 + now_ns / SECOND_NS) + 1
