"""Balance of brokers: their loads, homes for partitions without an owner, moves that even loads out.

Load:       a number per broker.  ``fair``: its partitions.  ``balanced`` and ``weighted_load``: measures of
            its report, each relative to the mean of the brokers that take partitions, so an average broker
            has 100.  A measure that is small everywhere counts little (FLOORS), and no broker counts for
            more than OUTLIER times the median, whatever it reports.
Weight:     the part of its owner's load that goes along with a partition.
Move:       from the most to the least loaded broker, of a weight below their difference: so each one
            lessens the variance of the loads.
Spread:     partitions of one topic are on different brokers, as far as that goes.

Everything is a function of its arguments, and equal arguments give equal answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from danube.core.placement.load_report import LoadReport
from danube.core.placement.partition_table import Flags, Integers, PartitionTable

Floats = npt.NDArray[np.float64]

STRATEGIES: Final = ("fair", "balanced", "weighted_load")
AVERAGE: Final = 100.0
OUTLIER: Final = 4.0
FLOORS: Final = {"count": 1.0, "throughput": 1e6, "backlog": 1e5, "cpu": 0.1, "memory": 0.25}
MEASURES: Final = tuple(FLOORS)
WEIGHTS: Final[Mapping[str, float]] = {
    "count": 0.2,
    "throughput": 0.3,
    "backlog": 0.1,
    "cpu": 0.3,
    "memory": 0.1,
}
GAIN_MIN: Final = 5.0  # of a move where loads are measured, so that their noise moves nothing

CANDIDATES_MAX: Final = 8_192  # partitions of one broker that are looked at for a move
_HEAVIEST: Final = 256  # of them those that weigh most


class Level(NamedTuple):
    """How readily partitions are moved.  ``imbalance`` is the deviation of loads by their mean."""

    imbalance: float
    moves_per_round: int
    cooldown_s: int  # of a partition that was moved
    interval_s: int  # from one round to the next


LEVELS: Final = {
    "conservative": Level(0.40, 4, 1_800, 600),
    "balanced": Level(0.30, 16, 600, 300),
    "aggressive": Level(0.20, 64, 300, 180),
}


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """``moves_max`` is how many moves may be under way at once; ``interval_s`` 0 is the level's."""

    strategy: str = "balanced"
    aggressiveness: str = "balanced"
    automatic: bool = False
    interval_s: int = 0
    moves_max: int = 16
    weights: Mapping[str, float] = field(default_factory=lambda: WEIGHTS)

    @property
    def level(self) -> Level:
        return LEVELS[self.aggressiveness]


class Imbalance(NamedTuple):
    """Loads of the brokers that take partitions; ``cv`` is the deviation by the mean."""

    broker_count: int
    mean: float
    deviation: float
    most: float
    least: float

    @property
    def cv(self) -> float:
        return self.deviation / self.mean if self.broker_count > 1 and self.mean > 0 else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """A broker below the first is loaded little, one above the second much."""
        step = max(self.deviation, 0.2 * self.mean, 2.0) * (0.5 if self.cv > 0.3 else 1.0)
        return self.mean - step, self.mean + step


class Move(NamedTuple):
    row: int
    source: int  # slots
    target: int
    weight: float
    reason: str


@dataclass(slots=True)
class Picture:
    """Input of the planner: the table, and by slot whether a broker takes partitions and its load report."""

    table: PartitionTable
    takes: Flags
    reports: list[LoadReport | None]


class Loads(NamedTuple):
    load: Floats  # by slot
    weight: Floats  # by row
    unit: float  # of a partition of which nothing is known


# Loads


def measure(picture: Picture, settings: BalanceSettings) -> Loads:
    """Measure the load of each broker, and the share of each partition in it."""
    counts = picture.table.counts().astype(np.float64)
    owner = picture.table.column("owner")
    if settings.strategy == "fair":
        return Loads(counts, np.ones(len(owner)), 1.0)
    measures = {"count": counts, **_reported(picture)}
    shares = _shares(settings)
    scales = {name: AVERAGE * shares[name] / _mean(measures[name], picture.takes, name) for name in shares}
    load = np.zeros(len(counts))
    for name, scale in scales.items():
        load += scale * _held(measures[name], picture.takes, name)
    return Loads(load, *_weights(picture, measures, scales))


def _shares(settings: BalanceSettings) -> dict[str, float]:
    """How much each measure counts; together 1."""
    if settings.strategy == "balanced":
        return {"count": 0.5, "throughput": 0.5}
    total = sum(settings.weights.values()) or 1.0
    return {name: weight / total for name, weight in settings.weights.items() if weight > 0}


def _reported(picture: Picture) -> dict[str, Floats]:
    """Return loads by measure and slot; a broker without a report counts as an average one."""
    rows = [
        (np.nan,) * 4 if one is None else (one.bytes_per_s, float(one.backlog_records), one.cpu, one.memory)
        for one in picture.reports
    ]
    columns = np.array(rows, np.float64).reshape(-1, 4)
    for column in columns.T:
        known = ~np.isnan(column)
        column[~known] = column[known].mean() if known.any() else 0.0
    return dict(zip(("throughput", "backlog", "cpu", "memory"), columns.T, strict=True))


def _held(values: Floats, takes: Flags, name: str) -> Floats:
    """Values without outliers."""
    if name == "count" or not takes.any():
        return values
    return np.minimum(values, max(FLOORS[name], OUTLIER * float(np.median(values[takes]))))


def _mean(values: Floats, takes: Flags, name: str) -> float:
    held = _held(values, takes, name)
    return max(float(held[takes].mean()) if takes.any() else 0.0, FLOORS[name])


def _weights(picture: Picture, measures: dict[str, Floats], scales: dict[str, float]) -> tuple[Floats, float]:
    """Return the weight of each row, and of an average partition; memory does not count."""
    table = picture.table
    owner = table.column("owner")
    counts = np.maximum(measures["count"], 1.0)
    held = {name: _held(measures[name], picture.takes, name) for name in measures}
    shown = held["throughput"] / np.maximum(measures["throughput"], 1e-9)  # an outlier's partitions shrink
    rate = measures["throughput"] / counts  # which partition is the busy one is not told
    even = scales.get("count", 0.0) + scales.get("backlog", 0.0) * held["backlog"] / counts
    busy = scales.get("throughput", 0.0) * shown
    busy += scales.get("cpu", 0.0) * held["cpu"] / np.maximum(measures["throughput"], 1e-9)
    idle = measures["throughput"] <= 0
    even[idle] += scales.get("cpu", 0.0) * held["cpu"][idle] / counts[idle]
    busy[idle] = 0.0
    owned = counts.sum()
    unit = float((even * measures["count"]).sum() + (busy * measures["throughput"]).sum()) / max(owned, 1.0)
    by_slot = np.append(even + busy * rate, unit)  # the last is that of unowned partitions
    return by_slot[owner], max(unit, 1e-9)


def imbalance(load: Floats, takes: Flags) -> Imbalance:
    """Return the imbalance of the brokers that take partitions."""
    held = load[takes]
    if not len(held):
        return Imbalance(0, 0.0, 0.0, 0.0, 0.0)
    return Imbalance(len(held), float(held.mean()), float(held.std()), float(held.max()), float(held.min()))


# Placing


def place(picture: Picture, loads: Loads, rows: list[int], avoid: dict[int, int]) -> list[tuple[int, int]]:
    """Return (row, slot) for rows without an owner; ``avoid`` names a slot that is the last choice.

    Rows are left out where no broker takes partitions.
    """
    takes = picture.takes
    takers = int(takes.sum())
    if not takers:
        return []
    table = picture.table
    load = np.where(takes, loads.load, np.inf)
    owner, topic_ids = table.column("owner"), table.column("topic_id")
    same: dict[int, Integers] = {}
    placed: list[tuple[int, int]] = []
    for row in rows:
        topic_id = int(topic_ids[row])
        siblings = table.rows_of_topic(topic_id)
        if len(siblings) == 1:
            slot = _cheapest(load, load, avoid.get(row, -1))
        else:
            held = same.get(topic_id)
            if held is None:
                owners = owner[siblings]
                held = same[topic_id] = np.bincount(owners[owners >= 0], minlength=len(load))
            cost = np.where(held < -(-len(siblings) // takers), load, np.inf)
            slot = _cheapest(cost, load, avoid.get(row, -1))
            held[slot] += 1
        placed.append((row, slot))
        load[slot] += loads.unit
    return placed


def _cheapest(cost: Floats, load: Floats, avoided: int) -> int:
    """The first of the least; the avoided slot only where there is no other."""
    for values in (cost, load):
        if avoided >= 0:
            values = values.copy()
            values[avoided] = np.inf
        slot = int(values.argmin())
        if values[slot] != np.inf:
            return slot
    return avoided


# Moving


def plan_moves(
    picture: Picture, loads: Loads, settings: BalanceSettings, free: Flags, targets: Flags, count_max: int
) -> list[Move]:
    """Plan at most ``count_max`` moves of ``free`` rows to ``targets``, each of which makes loads more equal.

    Planning ends when loads differ by less than half of the difference that begins a round.
    """
    planner = _Planner(picture, loads, settings, free)
    sources = picture.takes.copy()
    moves: list[Move] = []
    targets = targets & picture.takes
    while len(moves) < count_max and targets.any():
        now = imbalance(planner.load, picture.takes)
        source = int(np.where(sources, planner.load, -np.inf).argmax())
        if not sources[source] or planner.load[source] <= now.mean:
            break
        if settings.strategy != "fair" and now.cv <= settings.level.imbalance / 2:
            break
        target = int(np.where(targets, planner.load, np.inf).argmin())
        move = planner.move(source, target, now.mean)
        if move is None:
            sources[source] = False
        else:
            moves.append(move)
    return moves


class _Planner:
    """Loads and counts as they are after the moves that were planned."""

    def __init__(self, picture: Picture, loads: Loads, settings: BalanceSettings, free: Flags) -> None:
        self._table = picture.table
        self._weight = loads.weight
        self._owner = picture.table.column("owner")
        self._topic = picture.table.column("topic")
        self._gain_min = 0.0 if settings.strategy == "fair" else GAIN_MIN
        self._free = free.copy()
        self._candidates: dict[int, Integers] = {}  # by slot
        self._held: dict[int, Integers] = {}  # by slot: partitions of each topic
        self.load = loads.load.copy()

    def move(self, source: int, target: int, mean: float) -> Move | None:
        """The move between two brokers that makes them most equal; None if no partition fits."""
        gap = float(self.load[source] - self.load[target])
        rows = self._rows(source)
        weight = self._weight[rows]
        fits = np.flatnonzero((weight > 0) & (weight < gap) & (gap - weight >= self._gain_min))
        if not len(fits):
            return None
        rows, weight = rows[fits], weight[fits]
        topics = self._topic[rows]
        spread = self._of_topics(source)[topics] - self._of_topics(target)[topics]
        best = int((np.abs(weight / gap - 0.5) - 0.5 * np.sign(spread - 1)).argmin())
        row, moved = int(rows[best]), float(weight[best])
        return self._note(row, source, target, moved, mean)

    def _note(self, row: int, source: int, target: int, weight: float, mean: float) -> Move:
        ids = self._table.broker_ids
        reason = (
            f"broker {ids[source]} has load {self.load[source]:.4g}, broker {ids[target]} has"
            f" {self.load[target]:.4g}, the mean is {mean:.4g}"
        )
        self.load[source] -= weight
        self.load[target] += weight
        self._free[row] = False
        self._candidates[source] = self._candidates[source][self._candidates[source] != row]
        topic = int(self._topic[row])
        self._of_topics(source)[topic] -= 1
        self._of_topics(target)[topic] += 1
        return Move(row, source, target, weight, reason)

    def _rows(self, slot: int) -> Integers:
        """Return candidate partitions to move off a broker: the heaviest, plus every n-th of the rest."""
        rows = self._candidates.get(slot)
        if rows is None:
            rows = np.flatnonzero(self._free & (self._owner == slot))
            if len(rows) > CANDIDATES_MAX:
                heaviest = rows[np.argpartition(-self._weight[rows], _HEAVIEST)[:_HEAVIEST]]
                step = -(-len(rows) // (CANDIDATES_MAX - _HEAVIEST))
                rows = np.unique(np.concatenate((heaviest, rows[::step])))
            self._candidates[slot] = rows
        return rows

    def _of_topics(self, slot: int) -> Integers:
        held = self._held.get(slot)
        if held is None:
            topics = self._topic[self._owner == slot]
            held = self._held[slot] = np.bincount(topics, minlength=self._table.topic_count)
        return held
