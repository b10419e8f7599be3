"""The publish rate: exact over time, a debt of a second at most, answers within a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.partition.publish_rate import PublishRate
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
