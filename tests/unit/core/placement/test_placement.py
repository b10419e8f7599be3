"""Placement: everyone computes the same owner, and the shares are even."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.placement.workers import owner_of
from danube.errors import InvariantBroken


def test_the_answer_is_pinned() -> None:
    assert [owner_of(topic_id, 0, 4) for topic_id in range(1, 9)] == [2, 0, 3, 1, 0, 2, 1, 3]
    assert [owner_of(1, partition, 4) for partition in range(6)] == [2, 3, 0, 1, 2, 3]


@given(st.integers(0, 2**63), st.integers(0, 1023), st.integers(1, 64))
def test_an_owner_is_one_of_the_workers(topic_id: int, partition: int, worker_count: int) -> None:
    assert 0 <= owner_of(topic_id, partition, worker_count) < worker_count


@given(st.integers(0, 2**40), st.integers(1, 1024), st.integers(1, 64))
def test_the_shares_of_one_topic_differ_by_one_at_most(
    topic_id: int, partitions: int, worker_count: int
) -> None:
    shares = Counter(owner_of(topic_id, partition, worker_count) for partition in range(partitions))
    counts = [shares[worker] for worker in range(worker_count)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("worker_count", [2, 3, 4, 7, 8, 16, 64])
@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_any_run_of_topics_is_spread_evenly(worker_count: int, step: int) -> None:
    for first in (1, 1_000, 123_457):
        shares = Counter(
            owner_of(first + step * number, 0, worker_count) for number in range(worker_count * 100)
        )
        counts = [shares[worker] for worker in range(worker_count)]
        assert max(counts) <= 110 and min(counts) >= 90


def test_two_topics_use_two_workers() -> None:
    assert {owner_of(1, 0, 2), owner_of(2, 0, 2)} == {0, 1}


@pytest.mark.parametrize("arguments", [(1, 0, 0), (-1, 0, 2), (1, -1, 2)])
def test_no_worker_stops_the_shard(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(InvariantBroken):
        owner_of(*arguments)
