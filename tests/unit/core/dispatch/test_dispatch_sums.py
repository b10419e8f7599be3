"""Deliveries of a namespace together: the rate holds, turns go round, and what is not used is given back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.dispatch.rate import NOT_LIMITED, RECORD_BYTES, DispatchLimits, DispatchRate, DispatchSum
from tests.unit.core.partition.test_publish_rate import Taken

NOW = 10**12
MS = 1_000_000
TICK_NS = 20 * MS
SECOND_NS = 1_000 * MS


def summed(host: list[Taken], records: int, size_bytes: int = 0) -> DispatchSum:
    one = DispatchSum(Taken(host))
    one.set(records, size_bytes, NOW)
    return one


def reader(*sums: DispatchSum, per_second: int = 0) -> DispatchRate:
    rate = DispatchRate()
    rate.follow(DispatchLimits(per_second, sums), NOW)
    return rate


def deliver(rate: DispatchRate, now_ns: int, most: int = 1 << 40, record_bytes: int = 100) -> int:
    """Deliver what may go now, of ``most`` that wait; how many went."""
    sent = 0
    while sent < most and (allowed := rate.allowed(now_ns)) > 0:
        count = min(allowed, most - sent)
        rate.take(count, count * record_bytes)
        sent += count
    return sent


def ticked(rates: list[DispatchRate], seconds: float, **how: Any) -> Counter[int]:
    """Look at readers when their time has come, by a tick of 20 ms; what each got."""
    got: Counter[int] = Counter()
    due = dict.fromkeys(range(len(rates)), NOW)
    for now_ns in range(NOW, NOW + int(seconds * SECOND_NS) + 1, TICK_NS):
        for place, rate in enumerate(rates):
            if due[place] <= now_ns:
                got[place] += deliver(rate, now_ns, **how)
                due[place] = rate.next_ns(now_ns) or now_ns
    return got


def test_without_limits_everything_may_go() -> None:
    rate = DispatchRate()
    assert not rate.limited and rate.limits is NOT_LIMITED
    assert rate.allowed(NOW) > 1 << 40 and rate.next_ns(NOW) is None


@pytest.mark.parametrize("wanted, waits_ms", [(10, 0), (11, 0), (12, 100), (100, 8_900)])
def test_at_the_limit_all_go_at_once_and_what_is_more_waits_for_its_turn(wanted: int, waits_ms: int) -> None:
    """A second is saved; a record that is begun when nothing is owed passes, and is owed."""
    rate = reader(summed([], 10))
    got, now_ns = deliver(rate, NOW, wanted), NOW
    assert got == min(wanted, 10 + 1)
    while got < wanted:
        due_ns = rate.next_ns(now_ns)
        assert due_ns is not None and deliver(rate, due_ns - 1, 1) == 0
        now_ns = due_ns
        got += deliver(rate, now_ns, wanted - got)
    assert now_ns - NOW == waits_ms * MS


def test_one_reader_alone_has_all_of_the_rate_and_a_second_that_was_saved() -> None:
    [got] = ticked([reader(summed([], 1_000))], 20).values()
    assert 20_500 <= got <= 21_100


def test_turns_go_round_whatever_each_reader_could_take() -> None:
    total = summed([], 1_000)
    got = ticked([reader(total) for _ in range(7)], 60)
    assert sum(got.values()) <= 61_200
    fair = 60_000 / 7
    assert all(0.9 * fair <= count <= 1_000 + 1.1 * fair for count in got.values()), got


def test_bytes_are_limited_by_the_size_that_records_have() -> None:
    total = summed([], 0, 100_000)
    got = ticked([reader(total), reader(total)], 30, record_bytes=2_000)
    size_bytes = 2_000 * sum(got.values())
    assert 0.95 * 30 * 100_000 <= size_bytes <= 1.05 * 31 * 100_000


def test_a_record_that_is_larger_than_the_rate_passes_and_is_paid_back() -> None:
    rate = reader(summed([], 0, 1_000))
    assert deliver(rate, NOW, record_bytes=10_000) == 1, "its size was not known"
    due_ns = rate.next_ns(NOW)
    assert due_ns == NOW + 9 * SECOND_NS
    assert deliver(rate, due_ns, record_bytes=10_000) == 1
    assert (rate.next_ns(due_ns) or 0) - due_ns == 10 * SECOND_NS


def test_a_size_that_is_not_known_is_guessed() -> None:
    assert reader(summed([], 0, 4 * RECORD_BYTES)).allowed(NOW) == 4


def test_the_tenants_limit_and_the_subscriptions_own_hold_as_well() -> None:
    wide, narrow = summed([], 1_000), summed([], 100)
    first, second = reader(wide, narrow), reader(wide)
    got = ticked([first, second], 10)
    assert got[0] <= 1_150 and got[0] + got[1] <= 11_100
    own = reader(summed([], 1_000), per_second=50)
    [count] = ticked([own], 10).values()
    assert 500 <= count <= 560


def test_the_later_of_two_times_counts() -> None:
    rate = reader(summed([], 10), per_second=20)
    assert deliver(rate, NOW) == 0, "its own saves nothing before it was asked for"
    now_ns = NOW + SECOND_NS
    assert deliver(rate, now_ns) == 11
    assert rate.next_ns(now_ns) == now_ns + 100 * MS, "its own would allow nine more"
    rate = reader(summed([], 100), per_second=2)
    deliver(rate, NOW)
    assert deliver(rate, now_ns) == 2
    assert (rate.next_ns(now_ns) or 0) >= now_ns + 500 * MS


def test_workers_of_a_host_share_and_a_waiting_one_says_so() -> None:
    host: list[Taken] = []
    rates = [reader(summed(host, 1_000)) for _ in range(2)]
    got = ticked(rates, 20)
    assert sum(got.values()) <= 1.05 * 21_000
    assert min(got.values()) >= 8_000, got
    assert all(one.held for one in host)
    assert [one.records for one in host] == [got[0], got[1]]


def test_what_was_reserved_is_given_back_with_other_limits() -> None:
    total = summed([], 10)
    first, second = reader(total), reader(total)
    deliver(first, NOW)
    assert first.allowed(NOW) == 0, "it has reserved a turn"
    assert second.allowed(NOW) == 0 and (second.next_ns(NOW) or 0) == NOW + 200 * MS
    second.follow(NOT_LIMITED, NOW)
    first.follow(DispatchLimits(0, (total,)), NOW)
    assert not second.limited and first.next_ns(NOW) is None
    assert first.allowed(NOW) == 0 and first.next_ns(NOW) == NOW + 100 * MS


def test_a_turn_that_is_not_used_delays_nobody_else() -> None:
    total = summed([], 10)
    first, second = reader(total), reader(total)
    deliver(first, NOW)
    due_ns = first.next_ns(NOW) or 0
    assert first.allowed(due_ns) == 1, "its consumers take nothing now"
    assert second.allowed(due_ns) == 1, "so it is the next one's"


LOOKS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 900)), max_size=60)  # by which reader, after ms


@given(st.integers(1, 500), st.integers(1, 4), LOOKS)
def test_never_more_than_the_rate_and_a_second(
    per_second: int, readers: int, looks: list[tuple[int, int]]
) -> None:
    total = summed([], per_second)
    rates, now_ns, got = [reader(total) for _ in range(readers)], NOW, 0
    for place, pause_ms in looks:
        now_ns += pause_ms * MS
        got += deliver(rates[place % readers], now_ns)
    assert got <= per_second * ((now_ns - NOW) / SECOND_NS + 1) + readers * (1 + per_second * 0.02)
