"""Growth is found where it is, with confidence, and nowhere else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from perf.soak.growth import Bound, Floats, Growth, Stratum, blocks, judge, slope

MIB = float(1 << 20)
HOUR_S = 3600.0


def walk(
    source: random.Random,
    *,
    count: int = 100,
    step_s: float = 60.0,
    per_hour: float = 0.0,
    noise: float = 0.0,
) -> Stratum:
    """Points with a trend and noise around it."""
    times = np.linspace(0.0, (count - 1) * step_s, count)
    values: Floats = np.array(
        [100 * MIB + per_hour * time / HOUR_S + source.gauss(0, noise) for time in times]
    )
    return times, values


def test_a_line_has_its_own_slope(source: random.Random) -> None:
    found = slope([walk(source, per_hour=3 * MIB)])
    assert found is not None
    assert found.low == pytest.approx(found.high, rel=1e-6)
    assert found.per_hour == pytest.approx(3 * MIB, rel=1e-6)
    assert (found.points, found.strata, found.span_s) == (100, 1, 99 * 60.0)


@pytest.mark.parametrize("grown_mib", [2, 10, 100])
def test_growth_above_the_bound_is_found_through_noise(source: random.Random, grown_mib: int) -> None:
    found = slope([walk(source, count=120, per_hour=grown_mib * MIB, noise=0.3 * MIB)])
    assert judge(found, Bound(per_hour=1 * MIB, slack=0)) is Growth.BEYOND


def test_noise_alone_is_no_growth(source: random.Random) -> None:
    found = slope([walk(source, count=120, noise=0.5 * MIB)])
    assert judge(found, Bound(per_hour=1 * MIB, slack=0)) is Growth.WITHIN
    assert found is not None and found.low < 0 < found.high


def test_a_few_wild_points_change_nothing(source: random.Random) -> None:
    times, values = walk(source, count=120, noise=0.2 * MIB)
    for place in source.sample(range(120), 20):
        values[place] += 500 * MIB
    assert judge(slope([(times, values)]), Bound(per_hour=1 * MIB, slack=0)) is Growth.WITHIN


def test_too_few_points_leave_it_open(source: random.Random) -> None:
    assert slope([]) is None
    assert slope([walk(source, count=3, per_hour=1e9)]) is None
    assert judge(None, Bound(1.0, 1.0)) is Growth.OPEN
    wide = slope([walk(source, count=8, step_s=5.0, noise=4 * MIB)])
    assert judge(wide, Bound(per_hour=1 * MIB, slack=0)) is Growth.OPEN


def test_steps_between_strata_are_not_growth_and_growth_within_them_is(source: random.Random) -> None:
    """A process that is killed begins again: what it loses must not hide what it had grown."""
    flat, growing = [], []
    for life in range(40):
        times, values = walk(source, count=10, step_s=5.0, noise=0.01 * MIB)
        flat.append((times + 60 * life, values + life * 5 * MIB))
        growing.append((times + 60 * life, values + times * 0.1 * MIB - life * 5 * MIB))
    bound = Bound(per_hour=32 * MIB, slack=0)
    assert judge(slope(flat), bound) is Growth.WITHIN
    found = slope(growing)
    assert judge(found, bound) is Growth.BEYOND
    assert found is not None and found.per_hour == pytest.approx(360 * MIB, rel=0.1)


def test_many_points_are_put_together_and_tell_the_same(source: random.Random) -> None:
    times, values = walk(source, count=20_000, step_s=1.0, per_hour=2 * MIB, noise=0.1 * MIB)
    found = slope([blocks(times, values, 20.0)])
    assert found is not None and found.points == 121
    assert found.per_hour == pytest.approx(2 * MIB, rel=0.1)


def test_a_bound_gives_short_runs_some_slack() -> None:
    bound = Bound(per_hour=1 * MIB, slack=8 * MIB)
    assert bound.limit(HOUR_S) == 8 * MIB
    assert bound.limit(72 * HOUR_S) == 1 * MIB
    assert bound.limit(60) == pytest.approx(480 * MIB)
    assert bound.limit(0) == float("inf")


def test_blocks_are_medians_of_stretches_of_time() -> None:
    times = np.array([0.0, 1.0, 2.0, 10.0, 11.0, 35.0])
    values = np.array([1.0, 9.0, 2.0, 4.0, 6.0, 7.0])
    block_times, block_values = blocks(times, values, 10.0)
    assert block_times.tolist() == [1.0, 10.5, 35.0]
    assert block_values.tolist() == [2.0, 5.0, 7.0]
    assert blocks(times[:0], values[:0], 10.0)[0].tolist() == []


def test_equal_values_are_flat_for_certain() -> None:
    found = slope([(np.linspace(0.0, 49 * 60.0, 50), np.full(50, 42.0))])
    assert found is not None and (found.per_hour, found.low, found.high) == (0.0, 0.0, 0.0)
    assert judge(found, Bound(per_hour=0.0, slack=0.0)) is Growth.WITHIN
