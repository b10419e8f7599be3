"""Does something grow?  Robust slopes with their confidence, and what growth is allowed.

The estimator is Theil and Sen's: the median over the slopes of all pairs of points, which single
outliers do not move; its confidence interval is Sen's, from the variance of Kendall's statistic.
Points may lie in strata that have nothing to do with each other (the lives of a process, the pauses
between two faults): then only pairs within a stratum count and the variances add up (Hirsch and Slack's
seasonal form), so a drop from one stratum to the next hides no growth and makes none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Stratum = tuple[Floats, Floats]  # seconds, values

CONFIDENCE_Z = 2.576  # 99 % of a normal distribution lie within
POINTS_MIN = 4  # in a stratum; fewer say nothing about their spread
PAIRS_MIN = 45  # as ten points in a row make
STRATUM_POINTS_MAX = 400
HOUR_S = 3600.0


@dataclass(frozen=True)
class Slope:
    """Growth an hour: the estimate, the interval around it, and how much it stands on."""

    per_hour: float
    low: float
    high: float
    points: int
    strata: int
    span_s: float  # of all strata together


@dataclass(frozen=True)
class Bound:
    """Allowed growth: ``per_hour``, or ``slack`` over the whole time that was looked at if that is more.

    Without the slack a short run could not tell growth from the noise of an allocator.
    """

    per_hour: float
    slack: float

    def limit(self, span_s: float) -> float:
        """Allowed growth an hour for points that span this time."""
        return max(self.per_hour, self.slack * HOUR_S / span_s) if span_s > 0 else math.inf


class Growth(StrEnum):
    """What a slope says of a bound."""

    WITHIN = "within"  # with confidence not above the bound
    BEYOND = "beyond"  # with confidence above the bound
    OPEN = "open"  # the points do not tell


def slope(strata: Sequence[Stratum], z: float = CONFIDENCE_Z) -> Slope | None:
    """The slope that the strata share; None when they are too few or too short to have one."""
    used = [_thinned(*stratum) for stratum in strata if len(stratum[0]) >= POINTS_MIN]
    if not used:
        return None
    slopes = np.sort(np.concatenate([_pair_slopes(*stratum) for stratum in used]))
    if len(slopes) < PAIRS_MIN:
        return None
    half = z * math.sqrt(sum(_kendall_variance(values) for _, values in used))
    count = len(slopes)
    low = slopes[max(0, math.floor((count - half) / 2))]
    high = slopes[min(count - 1, math.ceil((count + half) / 2))]
    return Slope(
        per_hour=float(np.median(slopes)) * HOUR_S,
        low=float(low) * HOUR_S,
        high=float(high) * HOUR_S,
        points=sum(len(times) for times, _ in used),
        strata=len(used),
        span_s=float(sum(times[-1] - times[0] for times, _ in used)),
    )


def judge(found: Slope | None, bound: Bound) -> Growth:
    """Beyond and within need the whole interval on their side."""
    if found is None:
        return Growth.OPEN
    limit = bound.limit(found.span_s)
    if found.low > limit:
        return Growth.BEYOND
    return Growth.WITHIN if found.high <= limit else Growth.OPEN


def blocks(times: Floats, values: Floats, block_s: float) -> Stratum:
    """The median of each block of time: neighbours that follow each other closely are not independent."""
    if not len(times):
        return times, values
    numbers = np.floor((times - times[0]) / block_s).astype(np.int64)
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    pairs = [
        (np.median(times[start:end]), np.median(values[start:end]))
        for start, end in zip(starts, [*starts[1:], len(times)], strict=True)
    ]
    return np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])


def _thinned(times: Floats, values: Floats) -> Stratum:
    """At most so many points of a stratum, evenly chosen: pairs grow with the square."""
    if len(times) <= STRATUM_POINTS_MAX:
        return times, values
    chosen = np.linspace(0, len(times) - 1, STRATUM_POINTS_MAX).astype(np.int64)
    return times[chosen], values[chosen]


def _pair_slopes(times: Floats, values: Floats) -> Floats:
    first, second = np.triu_indices(len(times), k=1)
    apart = times[second] - times[first]
    kept = apart > 0
    return np.asarray((values[second] - values[first])[kept] / apart[kept], dtype=np.float64)


def _kendall_variance(values: Floats) -> float:
    """Variance of Kendall's statistic without a trend, with its correction for equal values."""
    count = len(values)
    _, equal = np.unique(values, return_counts=True)
    ties = float(np.sum(equal * (equal - 1) * (2 * equal + 5)))
    return (count * (count - 1) * (2 * count + 5) - ties) / 18
