"""Does something grow?  Robust slopes of a record with their confidence, and how much growth is allowed.

The estimator is Theil and Sen's: the median over the slopes of all pairs of points, which single outliers do
not move; its confidence interval is Sen's, from the variance of Kendall's statistic.  Points may lie in
strata that have nothing to do with each other: then only pairs within a stratum count and the variances add
up (Hirsch and Slack's seasonal form), so a drop from one stratum to the next hides no growth and makes none.

    between faults   every pause of every process is a stratum of its own: growth that a restart would hide
    within lives     processes that lived long, from when they have settled: growth that nothing else shows
    long run         the level of young processes of a role, whichever process plays it: growth that
                     restarts do not undo, like that of files which must be loaded again

A process grows while it is young: caches fill, the allocator keeps what it had at its busiest moment.  So
young and old ones are never compared.  All processes of a role are taken together, because connections and
partitions move from one to another when one of them is killed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from danube.wal.cold.cache import SEGMENTS_MAX
from perf.soak.watch import METRICS, PLACES, Floats, Record

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


MIB = 1 << 20
Columns = dict[str, Floats]
BLOCKS = 120  # points of the long run
BLOCK_S_MIN = 60.0
LIFE_BLOCKS = 6  # of the shortest life that counts as long

# Proportional memory has no bound: it changes with whoever else maps the same libraries.
WITHIN_LIVES = {
    "private_bytes": Bound(per_hour=1 * MIB, slack=16 * MIB),
    "descriptors": Bound(per_hour=0.0, slack=6),
    "threads": Bound(per_hour=0.0, slack=2),
}
# Young processes differ among each other by how young they are.
LONG_RUN = {**WITHIN_LIVES, "private_bytes": Bound(per_hour=1 * MIB, slack=24 * MIB)}
# Pauses are short and processes young, so these only catch what would fill a machine within hours.
BETWEEN_FAULTS = {
    "private_bytes": Bound(per_hour=256 * MIB, slack=16 * MIB),
    "descriptors": Bound(per_hour=120.0, slack=6),
    "threads": Bound(per_hour=60.0, slack=2),
}
CAPACITIES = {"data_files": SEGMENTS_MAX + 512}  # the cache of objects, and the logs of this load
ON_DISK = Bound(per_hour=16 * MIB, slack=256 * MIB)


@dataclass(frozen=True)
class Rules:
    """What counts: seconds after which a run, the disk and a process have warmed up, and the bounds.

    A process is young from ``life_warm_up_s`` to ``young_s`` and has settled after ``settled_s``.
    """

    warm_up_s: float = 0.0
    disk_warm_up_s: float = 0.0
    life_warm_up_s: float = 60.0
    young_s: float = 180.0
    settled_s: float = 600.0
    long_life_s: float = 120.0  # that a settled process must go on to live
    block_s_min: float = BLOCK_S_MIN
    long_run: Mapping[str, Bound] = field(default_factory=lambda: LONG_RUN)
    between_faults: Mapping[str, Bound] = field(default_factory=lambda: BETWEEN_FAULTS)
    within_lives: Mapping[str, Bound] = field(default_factory=lambda: WITHIN_LIVES)
    on_disk: Bound = ON_DISK


@dataclass(frozen=True)
class Finding:
    """One slope with its bound; ``when`` is ``between faults``, ``within lives`` or ``long run``."""

    whose: str
    metric: str
    when: str
    growth: Growth
    slope: Slope | None
    limit_per_hour: float | None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "growth": str(self.growth)}


def findings(record: Record, rules: Rules) -> list[Finding]:
    """Every slope that has a bound, in a fixed order."""
    roles: dict[str, list[Columns]] = {}
    for name in sorted(record.processes):
        roles.setdefault(name.partition("-")[0], []).append(record.processes[name].columns())
    found = []
    for role, members in roles.items():
        columns = _together(members)
        for metric, bound in rules.between_faults.items():
            pauses = _pieces(columns, metric, rules, (rules.life_warm_up_s, math.inf), "interval", "life")
            found.append(_finding(role, metric, "between faults", pauses, bound))
        for metric, bound in rules.within_lives.items():
            lives = _pieces(columns, metric, rules, (rules.settled_s, math.inf), "life")
            found.append(_finding(role, metric, "within lives", _long_ones(lives, rules), bound))
        for metric, bound in rules.long_run.items():
            times, values = _chosen(columns, metric, rules, (rules.life_warm_up_s, rules.young_s))
            found.append(_finding(role, metric, "long run", [_blocked(times, values, rules)], bound))
    moments = np.array(record.place_times)
    for name in sorted(record.places):
        sizes = np.array(record.places[name])
        counting = moments >= rules.disk_warm_up_s
        strata = [_blocked(moments[counting], sizes[counting], rules)]
        found.append(_finding(PLACES, name, "long run", strata, rules.on_disk))
    return found


def over_capacity(record: Record) -> list[str]:
    """What was more than it may be at any moment, as sentences."""
    return [
        f"{role} had {largest[name]:.0f} {name} at once, at most {most}"
        for role, largest in sorted(record.largest.items())
        for name, most in CAPACITIES.items()
        if largest.get(name, 0) > most
    ]


def _together(members: list[Columns]) -> Columns:
    """One process out of several, for the moments at which all of them were there."""
    times = members[0]["at_s"]
    for member in members[1:]:
        times = np.intersect1d(times, member["at_s"])
    rows = [{name: column[np.isin(one["at_s"], times)] for name, column in one.items()} for one in members]
    together = {metric: np.sum([one[metric] for one in rows], axis=0) for metric in METRICS}
    together["at_s"] = times
    together["age_s"] = np.min([one["age_s"] for one in rows], axis=0)
    together["quiet"] = rows[0]["quiet"]
    together["interval"] = rows[0]["interval"]
    lives = np.stack([one["life"] for one in rows], axis=1)
    together["life"] = np.cumsum(np.any(np.diff(lives, axis=0, prepend=lives[:1]) != 0, axis=1))
    return together


def _finding(whose: str, metric: str, when: str, strata: list[Stratum], bound: Bound) -> Finding:
    found = slope(strata)
    limit = bound.limit(found.span_s) if found is not None else None
    return Finding(whose, metric, when, judge(found, bound), found, limit)


def _chosen(
    columns: Columns, metric: str, rules: Rules, ages_s: tuple[float, float], *more: str
) -> tuple[Floats, ...]:
    """Times, values and ``more`` columns of the samples that count."""
    counting = (columns["quiet"] > 0) & (columns["at_s"] >= rules.warm_up_s)
    counting &= (columns["age_s"] >= ages_s[0]) & (columns["age_s"] <= ages_s[1])
    return tuple(columns[name][counting] for name in ("at_s", metric, *more))


def _pieces(
    columns: Columns, metric: str, rules: Rules, ages_s: tuple[float, float], *keys: str
) -> list[Stratum]:
    """The samples that count, cut wherever one of the ``keys`` changes."""
    times, values, *marks = _chosen(columns, metric, rules, ages_s, *keys)
    if not len(times):
        return []
    edges = np.flatnonzero(np.any([np.diff(mark) != 0 for mark in marks], axis=0)) + 1
    return list(zip(np.split(times, edges), np.split(values, edges), strict=True))


def _long_ones(lives: list[Stratum], rules: Rules) -> list[Stratum]:
    return [
        blocks(times, values, rules.long_life_s / LIFE_BLOCKS)
        for times, values in lives
        if times[-1] - times[0] >= rules.long_life_s
    ]


def _blocked(times: Floats, values: Floats, rules: Rules) -> Stratum:
    span_s = float(times[-1] - times[0]) if len(times) else 0.0
    return blocks(times, values, max(rules.block_s_min, span_s / BLOCKS))


def shown(metric: str) -> Callable[[float], str]:
    """How a value of the metric, or its growth, is written."""
    if metric in ("descriptors", "data_files", "threads"):
        return lambda value: f"{value:+.1f}"
    return lambda value: f"{value / MIB:+.2f} MiB"
