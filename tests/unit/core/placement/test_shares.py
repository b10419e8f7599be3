"""Shares of brokers in a sum: never more than the limit together, and soon what is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.cluster.keys import KeySpace
from danube.core.placement.load_report import LOAD_PREFIX, LoadReport, demands_of, report_command, report_of
from danube.core.placement.shares import FLOOR, Demand, key_of, share

LIMIT = 10_000
Taken = dict[int, tuple[float, bool]]


def shares(limit: int, taken: Taken) -> dict[int, int]:
    return {broker_id: share(limit, broker_id, taken) for broker_id in taken}


def test_alone_a_broker_has_the_whole_limit() -> None:
    assert share(LIMIT, 0, {}) == share(LIMIT, 7, {7: (0.0, False)}) == LIMIT
    assert share(0, 1, {1: (5.0, True), 2: (0.0, False)}) == 0, "no limit"
    assert share(LIMIT, 3, {1: (5.0, True), 2: (0.0, False)}) == LIMIT, "it is not alive, and serves nothing"


def test_idle_brokers_have_equal_shares() -> None:
    assert shares(9_000, dict.fromkeys((1, 2, 3), (0.0, False))) == {1: 3_000, 2: 3_000, 3: 3_000}


def test_one_that_is_held_back_gets_what_the_others_do_not_take() -> None:
    found = shares(LIMIT, {1: (3_000.0, True), 2: (0.0, False), 3: (0.0, False)})
    assert found[1] >= 0.96 * LIMIT and found[2] == found[3] >= LIMIT // FLOOR // 3


def test_those_that_are_held_back_share_alike() -> None:
    found = shares(LIMIT, {1: (9_600.0, True), 2: (9_600.0, True), 3: (500.0, False)})
    assert abs(found[1] - found[2]) <= 1 and 500 <= found[3] <= 800


@given(
    st.integers(1, 1 << 53),
    st.dictionaries(
        st.integers(1, 1 << 60), st.tuples(st.floats(0, 1e15), st.booleans()), min_size=2, max_size=9
    ),
)
def test_together_they_are_the_limit_and_everybody_has_some(limit: int, taken: Taken) -> None:
    found = shares(limit, taken)
    assert sum(found.values()) <= limit * 1.000001 + len(taken)
    assert sum(found.values()) >= limit * 0.999999 - len(taken)
    assert min(found.values()) >= max(1, int(limit / FLOOR / len(taken) * 0.999))


@pytest.mark.parametrize(
    "phases",
    [
        [(100_000, 0, 0)],
        [(100_000, 100_000, 100_000)],
        [(100_000, 0, 0), (100_000, 2_000, 0)],
        [(0, 0, 100_000), (100_000, 0, 0)],
        [(4_000, 4_000, 4_000), (20_000, 1_000, 100)],
        [(9_000, 500, 0), (500, 500, 9_500)],
    ],
)
def test_three_reports_after_a_change_what_is_taken_is_within_a_tenth(
    phases: list[tuple[int, int, int]],
) -> None:
    taken: Taken = dict.fromkeys((1, 2, 3), (0.0, False))
    for offered in phases:
        for round_number in range(12):
            found = shares(LIMIT, taken)
            got = {one: min(found[one], offered[one - 1]) for one in taken}
            taken = {one: (float(got[one]), offered[one - 1] > found[one]) for one in taken}
            assert sum(got.values()) <= LIMIT + 3
            if round_number >= 3:
                assert sum(got.values()) >= 0.9 * min(LIMIT, sum(offered))


def test_a_key_stands_for_a_name() -> None:
    assert key_of("namespace team") != key_of("tenant team") and key_of("namespace team")
    assert -(1 << 63) <= key_of("tenant acme") < 1 << 63


def test_demands_come_with_load_reports_and_are_cut_to_their_bounds() -> None:
    keys = KeySpace()
    assert demands_of(keys, 4) == {}
    told = {"5": Demand(1.5, 20.0, True, 300), "6": Demand(-1.0, 1e30, False, -5)}
    command = report_command(4, 0, LoadReport(usage=told))
    keys.put(1, command.key, command.value, 0)
    assert demands_of(keys, 4) == {"5": Demand(1.5, 20.0, True, 300), "6": Demand(0.0, 1e15, False, 0)}
    report = report_of(keys, 4)
    assert report is not None and report.usage["5"].held
    assert b"usage" not in report_command(4, 0, LoadReport()).value, "it is told where there is any"
    keys.put(2, f"{LOAD_PREFIX}4", b"{", 0)
    assert demands_of(keys, 4) == {}
