"""The publish rate: exact over time, a debt of a second at most, answers within a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.partition.publish_rate import PublishRate, SumRate
from danube.errors import QuotaExceeded

PARTITION = "/default/t"
NOW = 10**12
MS = 1_000_000


def take(rate: PublishRate, records: int, end: int, now_ns: int, size_bytes: int = 1) -> int:
    rate.check(PARTITION, now_ns)
    return rate.take(records, size_bytes, end, now_ns)


def test_a_second_is_saved_and_what_is_more_is_owed() -> None:
    rate = PublishRate(10, 0)
    assert take(rate, 10, 10, NOW) == 0
    assert take(rate, 5, 15, NOW) == NOW + 500 * MS
    assert rate.answered_end(15, NOW) == 14 and rate.holds
    assert rate.answered_end(15, NOW + 499 * MS) == 14
    assert rate.answered_end(15, NOW + 500 * MS) == 15 and not rate.holds


def test_a_batch_is_refused_when_a_second_is_owed_and_no_earlier() -> None:
    rate = PublishRate(10, 0)
    take(rate, 19, 19, NOW)
    take(rate, 1, 20, NOW)
    with pytest.raises(QuotaExceeded, match="max_publish_rate_per_topic is 10 a second") as refused:
        take(rate, 1, 21, NOW)
    assert refused.value.facts == {
        "limit": 10, "quota": "max_publish_rate_per_topic", "retry_after_ms": 1_001,
    }  # fmt: skip
    assert refused.value.retryable and refused.value.status == "RESOURCE_EXHAUSTED"
    take(rate, 1, 21, NOW + 1)


def test_a_batch_that_is_larger_than_the_rate_passes_and_is_paid_back() -> None:
    rate = PublishRate(10, 0)
    assert take(rate, 100, 100, NOW) == NOW + 1_000 * MS, "answered after a second, though nine are owed"
    with pytest.raises(QuotaExceeded):
        take(rate, 1, 101, NOW + 7_999 * MS)
    take(rate, 1, 101, NOW + 8_001 * MS)


def test_bytes_are_counted_by_themselves() -> None:
    rate = PublishRate(0, 100)
    assert take(rate, 1_000, 1_000, NOW, 100) == 0
    assert take(rate, 1, 1_001, NOW, 100) == NOW + 1_000 * MS
    with pytest.raises(QuotaExceeded, match="max_publish_bytes_per_topic is 100"):
        take(rate, 1, 1_002, NOW)


def test_answers_keep_their_order() -> None:
    rate = PublishRate(10, 0)
    take(rate, 15, 15, NOW)
    late = NOW + 600 * MS
    assert take(rate, 1, 16, late) == late, "it owes nothing, but follows one that did"
    assert rate.answered_end(16, late) == 16
    assert rate.answered_end(9, late) == 9


def test_what_is_owed_is_paid_at_a_rate_that_was_raised() -> None:
    rate = PublishRate(10, 0)
    take(rate, 100, 100, NOW)  # nine seconds are owed
    rate.set(1_000, 0, NOW)
    assert rate.limits == (1_000, 0)
    assert rate.answered_end(100, NOW + 89 * MS) == 99, "of 90 records, at the new rate"
    assert rate.answered_end(100, NOW + 90 * MS) == 100
    assert take(rate, 1, 101, NOW + 90 * MS) == NOW + 91 * MS


def test_what_is_owed_stays_owed_at_a_rate_that_was_lowered() -> None:
    rate = PublishRate(10, 0)
    take(rate, 25, 25, NOW)
    rate.set(1, 0, NOW)
    with pytest.raises(QuotaExceeded) as refused:
        take(rate, 1, 26, NOW)
    assert refused.value.facts["retry_after_ms"] == 1_501
    take(rate, 1, 26, NOW + 1_500 * MS)


def test_what_is_saved_is_not_touched_by_another_rate() -> None:
    rate = PublishRate(10, 0)
    rate.set(20, 0, NOW)
    assert take(rate, 20, 20, NOW) == 0


def test_nothing_is_owed_at_a_rate_that_was_taken_away() -> None:
    rate = PublishRate(10, 1)
    take(rate, 1, 1, NOW, size_bytes=9)
    rate.set(10, 1, NOW)
    with pytest.raises(QuotaExceeded, match="max_publish_bytes_per_topic"):
        take(rate, 1, 2, NOW)
    rate.set(10, 0, NOW)  # stored bytes may be limited still
    assert rate.answered_end(1, NOW) == 1, "its answer waits no longer"
    assert take(rate, 1, 2, NOW) == 0


@given(st.integers(1, 1_000), st.lists(st.tuples(st.integers(1, 500), st.integers(0, 700)), max_size=60))
def test_no_more_passes_than_the_rate_and_what_was_saved_and_owed(
    per_second: int, batches: list[tuple[int, int]]
) -> None:
    rate, now_ns, end, taken, last = PublishRate(per_second, 0), NOW, 0, 0, 0
    for records, pause_ms in batches:
        now_ns += pause_ms * MS
        try:
            due_ns = take(rate, records, end + records, now_ns)
        except QuotaExceeded as error:
            assert error.facts["retry_after_ms"] > 0
            continue
        end, taken, last = end + records, taken + records, records
        assert due_ns == 0 or due_ns <= now_ns + 1_000 * MS
    elapsed_s = (now_ns - NOW) / 1e9
    assert taken - last <= per_second * (elapsed_s + 2) + 1
    assert rate.answered_end(end, now_ns + 1_000 * MS) == end


# -- sums ----------------------------------------------------------------------------------------------


class Taken:
    """One worker's words of a sum, among those of its host."""

    def __init__(self, host: list[Taken]) -> None:
        self.host, self.records, self.size_bytes, self.held = host, 0, 0, 0
        host.append(self)

    def take(self, records: int, size_bytes: int) -> None:
        self.records += records
        self.size_bytes += size_bytes

    def hold(self) -> None:
        self.held += 1

    def others(self) -> tuple[int, int]:
        rest = [one for one in self.host if one is not self]
        return sum(one.records for one in rest), sum(one.size_bytes for one in rest)


def partitions_of(workers: int, records: int, size_bytes: int = 0) -> tuple[list[PublishRate], list[Taken]]:
    """A partition at each worker of a host; all are limited together."""
    host: list[Taken] = []
    sums = [SumRate(Taken(host)) for _ in range(workers)]
    for one in sums:
        one.set(records, size_bytes, NOW)
    return [PublishRate(0, 0, (one,)) for one in sums], host


def test_partitions_of_one_worker_share_what_they_may_take_together() -> None:
    host: list[Taken] = []
    total = SumRate(Taken(host))
    total.set(10, 0, NOW)
    first, second = PublishRate(0, 0, (total,)), PublishRate(0, 0, (total,))
    assert take(first, 10, 10, NOW) == 0
    assert take(second, 5, 5, NOW) == NOW + 500 * MS
    assert take(first, 5, 15, NOW) == NOW + 1_000 * MS
    assert first.answered_end(15, NOW) == 14 and first.holds
    with pytest.raises(QuotaExceeded, match="its share of max_publish_rate is 10 a second") as refused:
        take(second, 1, 6, NOW)
    assert refused.value.facts == {"limit": 10, "quota": "max_publish_rate", "retry_after_ms": 1_001}
    assert host[0].held == 3, "two waited, and one was refused"


def test_workers_of_a_host_owe_what_the_others_take() -> None:
    (first, second), _ = partitions_of(2, 10)
    assert take(first, 10, 10, NOW) == 0
    assert take(second, 10, 10, NOW) == NOW + 1_000 * MS, "the other one has used what was saved"
    with pytest.raises(QuotaExceeded):
        take(first, 1, 11, NOW)
    take(first, 1, 11, NOW + 1)


def test_a_worker_that_began_again_is_followed_from_there() -> None:
    (first, _), host = partitions_of(2, 10)
    host[1].take(10, 0)
    with pytest.raises(QuotaExceeded):
        take(first, 11, 11, NOW)
        take(first, 1, 12, NOW)
    host[1].records = 0
    later = NOW + 10_000 * MS
    assert take(first, 1, 12, later) <= later
    host[1].take(10, 0)
    assert take(first, 9, 21, later) == later + 1_000 * MS


def test_bytes_of_a_sum_and_its_refusal() -> None:
    (first, second), _ = partitions_of(2, 0, 100)
    take(first, 1, 1, NOW, 300)
    with pytest.raises(QuotaExceeded, match="max_publish_bytes is 100"):
        take(second, 1, 1, NOW)
    (first, _), _ = partitions_of(2, 0, 0)
    first.sums[0].refusal = QuotaExceeded("it stores too much")
    with pytest.raises(QuotaExceeded, match="stores too much"):
        take(first, 1, 1, NOW)


def test_a_partition_has_its_own_rate_and_those_of_its_sums() -> None:
    wide, narrow = SumRate(Taken([])), SumRate(Taken([]))
    wide.set(1_000, 0, NOW)
    narrow.set(20, 0, NOW)
    rate = PublishRate(10, 0, (wide, narrow))
    assert take(rate, 15, 15, NOW) == NOW + 500 * MS, "its own is the smallest"
    other = PublishRate(0, 0, (wide, narrow))
    assert take(other, 10, 10, NOW) == NOW + 250 * MS
    rate.set(0, 0, NOW)
    assert rate.answered_end(15, NOW + 499 * MS) == 14 and rate.answered_end(15, NOW + 500 * MS) == 15


@given(
    st.integers(1, 4),
    st.integers(1, 1_000),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 500), st.integers(0, 400)), max_size=80),
)
def test_no_more_passes_over_all_workers_than_the_sum_allows(
    workers: int, per_second: int, batches: list[tuple[int, int, int]]
) -> None:
    rates, _ = partitions_of(workers, per_second)
    now_ns, taken, last, ends = NOW, 0, 0, [0] * workers
    for worker, records, pause_ms in batches:
        place = worker % workers
        now_ns += pause_ms * MS
        try:
            take(rates[place], records, ends[place] + records, now_ns)
        except QuotaExceeded:
            continue
        ends[place] += records
        taken, last = taken + records, records
    assert taken - last <= per_second * ((now_ns - NOW) / 1e9 + 2) + 2
