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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pandas as pd

from danube.wal.cold.cache import SEGMENTS_MAX
from perf.soak.watch import METRICS, PLACES, Record

Floats = npt.NDArray[np.float64]
Stratum = tuple[Floats, Floats]  # seconds, values
CONFIDENCE_Z = 2.576  # 99 % of a normal distribution lie within
POINTS_MIN = 4  # in a stratum; fewer say nothing about their spread
PAIRS_MIN = 45  # as ten points in a row make
STRATUM_BLOCKS = 120  # at most: pairs grow with the square
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
    used = [stratum for stratum in strata if len(stratum[0]) >= POINTS_MIN]
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
    """The median of each block of time: neighbours that follow each other closely are not independent.

    Blocks last ``block_s``, or longer where there would be too many.
    """
    table = pd.DataFrame({"times": times, "values": values})
    since_s = table["times"] - table["times"].min()
    found = table.groupby(since_s // max(block_s, since_s.max() / STRATUM_BLOCKS)).median()
    return found["times"].to_numpy(), found["values"].to_numpy()


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
LIFE_BLOCKS = 6  # of the shortest life that counts as long
EACH_S = 0.001  # blocks in which no two samples are
_WITHIN_LIVES = {
    "private_bytes": Bound(per_hour=1 * MIB, slack=16 * MIB),
    "descriptors": Bound(per_hour=0.0, slack=6),
    "threads": Bound(per_hour=0.0, slack=2),
}
BOUNDS = {
    # Pauses are short and processes young, so these only catch what would fill a machine within hours.
    "between faults": {
        "private_bytes": Bound(per_hour=256 * MIB, slack=16 * MIB),
        "descriptors": Bound(per_hour=120.0, slack=6),
        "threads": Bound(per_hour=60.0, slack=2),
    },
    "within lives": _WITHIN_LIVES,
    # Young processes differ among each other by how young they are.
    "long run": {**_WITHIN_LIVES, "private_bytes": Bound(per_hour=1 * MIB, slack=24 * MIB)},
}
DATA_FILES_MAX = SEGMENTS_MAX + 512  # the cache of objects, and the logs of this load
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
    block_s_min: float = 60.0  # of the long run
    bounds: Mapping[str, Mapping[str, Bound]] = field(default_factory=lambda: BOUNDS)


@dataclass(frozen=True)
class Finding:
    """One slope with its bound; ``when`` is ``between faults``, ``within lives`` or ``long run``."""

    whose: str
    metric: str
    when: str
    growth: Growth
    slope: Slope | None
    limit_per_hour: float | None


def findings(record: Record, rules: Rules) -> list[Finding]:
    """Every slope that has a bound, in a fixed order."""
    found, readings = [], record.processes
    for role, members in readings.groupby(readings["name"].str.partition("-")[0]):
        table = _together(members)
        table = table[table["quiet"] & (table["at_s"] >= rules.warm_up_s)]
        settled = table[table["age_s"] >= rules.settled_s]
        old = table[table["age_s"] >= rules.life_warm_up_s]
        young = old[old["age_s"] <= rules.young_s]
        pauses = [one for _, one in old.groupby(["interval", "life"])]
        lives = [one for _, one in settled.groupby("life") if np.ptp(one["at_s"]) >= rules.long_life_s]
        chosen = {
            "between faults": (pauses, EACH_S),
            "within lives": (lives, rules.long_life_s / LIFE_BLOCKS),
            "long run": ([young], rules.block_s_min),
        }
        for when, (tables, block_s) in chosen.items():
            for metric, bound in rules.bounds[when].items():
                strata = [blocks(one["at_s"], one[metric], block_s) for one in tables]
                found.append(_finding(role, metric, when, strata, bound))
    places = record.places
    for name in sorted(places.columns.drop("at_s", errors="ignore")):
        table = places[places["at_s"] >= rules.disk_warm_up_s]
        stratum = blocks(table["at_s"], table[name], rules.block_s_min)
        found.append(_finding(PLACES, name, "long run", [stratum], ON_DISK))
    return found


def over_capacity(record: Record) -> list[str]:
    """What was more than it may be at any moment, as sentences."""
    return [
        f"{role} had {largest['data_files']:.0f} data_files at once, at most {DATA_FILES_MAX}"
        for role, largest in sorted(record.largest.items())
        if largest.get("data_files", 0) > DATA_FILES_MAX
    ]


def _together(members: pd.DataFrame) -> pd.DataFrame:
    """One process out of several of a role, for the moments at which all of them were there."""
    rules = {**dict.fromkeys(METRICS, "sum"), "age_s": "min", "quiet": "first", "interval": "first"}
    table = members.groupby("at_s").agg({**rules, "life": tuple, "name": "count"}).reset_index()
    table = table[table["name"] == members["name"].nunique()]
    return table.assign(life=(table["life"] != table["life"].shift()).cumsum())


def _finding(whose: str, metric: str, when: str, strata: list[Stratum], bound: Bound) -> Finding:
    found = slope(strata)
    limit = bound.limit(found.span_s) if found is not None else None
    return Finding(whose, metric, when, judge(found, bound), found, limit)
