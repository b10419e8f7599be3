"""Time that members agree on: who follows keeps it going, never ahead of the leader's, whoever leads next."""

from __future__ import annotations

import random

import pytest

from danube.core.cluster.agreement import AgreedTime

SECOND_US = 1_000_000


@pytest.mark.parametrize("seed", range(20))
def test_who_follows_is_never_ahead_and_loses_no_more_than_the_way_of_an_entry(seed: int) -> None:
    chance = random.Random(seed)
    leader, follower = AgreedTime(), AgreedTime()
    leader_start_ns, follower_start_ns = (chance.randrange(10**15) for _ in range(2))
    wall_us = chance.randrange(10**15)
    real_ns = agreed_us = 0
    shortest_ns = 10**12
    for _ in range(50):
        real_ns += chance.randrange(2 * 10**9)
        agreed_us = leader.now_us(agreed_us, leader_start_ns + real_ns, wall_us)
        delay_ns = chance.randrange(1, 10**8)
        shortest_ns = min(shortest_ns, delay_ns)
        real_ns += delay_ns
        follower.now_us(agreed_us, follower_start_ns + real_ns, 0)
    real_ns += chance.randrange(10**10)  # nobody leads
    true_us = leader.now_us(agreed_us, leader_start_ns + real_ns, wall_us)
    found_us = follower.now_us(agreed_us, follower_start_ns + real_ns, 0)
    assert found_us <= true_us
    assert true_us - found_us <= shortest_ns // 1_000 + 2


def test_without_following_an_election_prolongs_what_lasts() -> None:
    leader, other = AgreedTime(), AgreedTime()
    agreed_us = leader.now_us(0, 0, SECOND_US)
    assert other.now_us(agreed_us, 5 * 10**9, 0) == agreed_us, "it knows of no time that has passed"
