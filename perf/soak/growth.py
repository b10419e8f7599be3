"""Which slopes of a record are within their bounds: by role, between faults and over the long run.

Between faults every pause of every process is a stratum of its own, and within lives every process that
lived long: so growth is seen that a restart would hide.  Over the long run the level of each role counts,
whichever process plays it: so growth is seen that restarts do not undo, like that of files which must be
loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from perf.soak.record import PLACES, Record
from perf.soak.slopes import Bound, Floats, Growth, Slope, Stratum, blocks, judge, slope

MIB = 1 << 20
BLOCKS = 120  # points of the long run
BLOCK_S_MIN = 60.0
LIFE_BLOCKS = 6  # of the shortest life that counts as long

LONG_RUN = {
    "private_bytes": Bound(per_hour=1 * MIB, slack=16 * MIB),
    "proportional_bytes": Bound(per_hour=1 * MIB, slack=16 * MIB),
    "descriptors": Bound(per_hour=0.0, slack=4),
    "threads": Bound(per_hour=0.0, slack=2),
}
# Pauses are short, so a slope of one process says little; all of them together must stay below this.
BETWEEN_FAULTS = {
    "private_bytes": Bound(per_hour=64 * MIB, slack=16 * MIB),
    "descriptors": Bound(per_hour=6.0, slack=4),
    "threads": Bound(per_hour=6.0, slack=2),
}
WITHIN_LIVES = {
    "private_bytes": Bound(per_hour=8 * MIB, slack=16 * MIB),
    "descriptors": Bound(per_hour=1.0, slack=4),
    "threads": Bound(per_hour=1.0, slack=2),
}
ON_DISK = Bound(per_hour=16 * MIB, slack=256 * MIB)


@dataclass(frozen=True)
class Rules:
    """What counts: seconds after which a run, a process and the disk have warmed up, and the bounds."""

    warm_up_s: float = 0.0
    disk_warm_up_s: float = 0.0
    life_warm_up_s: float = 20.0
    long_life_s: float = 120.0
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
    roles: dict[str, list[dict[str, Floats]]] = {}
    for name in sorted(record.processes):
        roles.setdefault(name.partition("-")[0], []).append(record.processes[name].columns())
    found = []
    for role, members in roles.items():
        for metric, bound in rules.between_faults.items():
            strata = [part for member in members for part in _pieces(member, metric, rules, _PAUSE)]
            found.append(_finding(role, metric, "between faults", strata, bound))
        for metric, bound in rules.within_lives.items():
            lives = [part for member in members for part in _pieces(member, metric, rules, _LIFE)]
            found.append(_finding(role, metric, "within lives", _long_ones(lives, rules), bound))
        for metric, bound in rules.long_run.items():
            strata = [_level(member, metric, rules) for member in members]
            found.append(_finding(role, metric, "long run", strata, bound))
    times = np.array(record.place_times)
    for name in sorted(record.places):
        sizes = np.array(record.places[name])
        chosen = times[-len(sizes) :] >= rules.disk_warm_up_s
        strata = [_blocked(times[-len(sizes) :][chosen], sizes[chosen], rules)]
        found.append(_finding(PLACES, name, "long run", strata, rules.on_disk))
    return found


def _finding(whose: str, metric: str, when: str, strata: list[Stratum], bound: Bound) -> Finding:
    found = slope(strata)
    limit = bound.limit(found.span_s) if found is not None else None
    return Finding(whose, metric, when, judge(found, bound), found, limit)


_PAUSE, _LIFE = ("life", "interval"), ("life",)


def _pieces(columns: dict[str, Floats], metric: str, rules: Rules, keys: tuple[str, ...]) -> list[Stratum]:
    """The quiet samples cut wherever one of the ``keys`` changes."""
    chosen = (columns["quiet"] > 0) & (columns["age_s"] >= rules.life_warm_up_s)
    times, values = columns["at_s"][chosen], columns[metric][chosen]
    if not len(times):
        return []
    changes = np.any([np.diff(columns[key][chosen]) != 0 for key in keys], axis=0)
    edges = np.flatnonzero(changes) + 1
    return list(zip(np.split(times, edges), np.split(values, edges), strict=True))


def _long_ones(lives: list[Stratum], rules: Rules) -> list[Stratum]:
    return [
        blocks(times, values, rules.long_life_s / LIFE_BLOCKS)
        for times, values in lives
        if times[-1] - times[0] >= rules.long_life_s
    ]


def _level(columns: dict[str, Floats], metric: str, rules: Rules) -> Stratum:
    """The role's level over the whole run."""
    chosen = (
        (columns["quiet"] > 0)
        & (columns["age_s"] >= rules.life_warm_up_s)
        & (columns["at_s"] >= rules.warm_up_s)
    )
    return _blocked(columns["at_s"][chosen], columns[metric][chosen], rules)


def _blocked(times: Floats, values: Floats, rules: Rules) -> Stratum:
    span_s = float(times[-1] - times[0]) if len(times) else 0.0
    return blocks(times, values, max(rules.block_s_min, span_s / BLOCKS))


def shown(metric: str) -> Callable[[float], str]:
    """How a value of the metric, or its growth, is written."""
    if metric in ("descriptors", "threads"):
        return lambda value: f"{value:+.1f}"
    return lambda value: f"{value / MIB:+.2f} MiB"
