"""Which slopes of a record are within their bounds: by role, and over which stretches of time.

    between faults   every pause of every process is a stratum of its own: growth that a restart would hide
    within lives     processes that lived long, from when they have settled: growth that nothing else shows
    long run         the level of young processes of a role, whichever process plays it: growth that
                     restarts do not undo, like that of files which must be loaded again

A process grows while it is young: caches fill, the allocator keeps what it had at its busiest moment.  So
young and old ones are never compared with each other.  All processes of a role are taken together, because
connections and partitions move from one to another when one of them is killed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from danube.wal.cold.cache import SEGMENTS_MAX
from perf.soak.record import PLACES, Record
from perf.soak.sampling import METRICS
from perf.soak.slopes import Bound, Floats, Growth, Slope, Stratum, blocks, judge, slope

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
