"""Levels of durability, settings and work of a comparison, and the figures of its turns and rows.

The rule: nothing of ours at a weaker level stands beside something of theirs at a stronger one.  A group is
named after one of Danube's levels; a peer joins the first group that is at least as strong as it is.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from perf.turns import rounded

MILLION = 1_000_000
TURN_TIMEOUT_S = 300.0


class Level(IntEnum):
    """Ordered: a higher one survives all that a lower one survives."""

    TAKEN = 0
    IN_MEMORY = 1
    WRITTEN_LATER = 2
    WRITTEN = 3
    FSYNC = 4

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


MEANINGS = {
    Level.TAKEN: "the server took it; nothing is stored, and a reader that is slow or absent loses it",
    Level.IN_MEMORY: "kept for readers in the server's memory; lost with its process",
    Level.WRITTEN_LATER: "in the server's memory, and handed to the operating system some time after the ack",
    Level.WRITTEN: "in the operating system's page cache before the ack; survives the death of the process",
    Level.FSYNC: "an fsync that covers it returned before the ack; survives a power cut",
}
LABELLED = {level.label: level for level in Level}
GROUPS = {"memory": Level.TAKEN, "written": Level.WRITTEN, "fsync": Level.FSYNC}  # Danube's name: its level


class Unfair(Exception):
    """A comparison that would flatter Danube; it is not measured and not printed."""


class Failed(Exception):
    """A server or a tool did not do what was asked; the message ends with what it printed last."""


def group_of(level: Level) -> str:
    """The group of a peer's setting: the weakest that is not weaker than it."""
    return next(name for name, floor in GROUPS.items() if floor >= level)


def refuse_unfair(group: str, members: Iterable[Row]) -> None:
    """Raise Unfair when something of ours is weaker than the group, or something of theirs stronger."""
    floor = GROUPS[group]
    for one in members:
        if (one.ours and one.level < floor) or (not one.ours and one.level > floor):
            raise Unfair(
                f"{one.name} acknowledges at the level {one.level.label!r} and does not stand in the group"
                f" {group!r}: nothing of ours is below {floor.label!r} there, and no peer above"
            )


# -- what is compared ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A product configured so that its acknowledgements have one meaning; ``promise`` says which."""

    name: str
    level: Level
    promise: str


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one turn does.

    ``count`` is how many records are measured, about ``seconds`` of them, ``stored`` how many a topic for
    replays should hold, ``rate`` the records/s of one at a time.
    """

    workload: str
    size: int
    count: int
    topic: str
    stored: int = 0
    seconds: float = 1.0
    rate: int = 1_000


@dataclass(kw_only=True)
class Running:
    """A started server of one setting.

    ``pids`` are those of its process tree; ``address`` is what clients are told, as options of their own;
    ``stored`` is how many records each topic for replays holds.
    """

    setting: Setting
    directory: Path
    pids: Callable[[], list[int]]
    stop: Callable[[], None]
    address: Mapping[str, object]
    stored: dict[str, int] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def next_name(self) -> str:
        """A name for a reader whose place is kept, that was never used."""
        return f"reader{next(self.numbers)}"


# A client has name, kind (python or tool), missing(setting, workload) and turn(running, work) -> Turn.
Client = Any


@dataclass(frozen=True, kw_only=True)
class Product:
    """A broker: its settings, how one is started, and what drives it at which level.

    ``missing`` says why a setting cannot run here, or nothing; ``stored_max`` records are stored in a moment.
    """

    name: str
    settings: tuple[Setting, ...]
    start: Callable[[Setting, Path], Running]
    drivers: Mapping[Level, tuple[Client, ...]]
    version: Callable[[], str]
    missing: Callable[[Setting], str]
    stored_max: int = 2_000_000
    ours: bool = False

    def clients(self, setting: Setting) -> tuple[Client, ...]:
        return self.drivers[setting.level]


# -- figures ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spent:
    """CPU seconds of all threads and processes of one side."""

    server: float
    client: float

    def __sub__(self, before: Spent) -> Spent:
        return Spent(server=self.server - before.server, client=self.client - before.client)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One measurement.

    ``rate`` is records/s acknowledged or delivered, ``seconds`` how long that was measured, ``spent`` None
    where the measured part cannot be told from the rest.
    """

    rate: float
    seconds: float
    records: int
    spent: Spent | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    lost: int = 0

    def per_million(self, side: str) -> float | None:
        return None if self.spent is None else getattr(self.spent, side) / max(1, self.records) * MILLION


class Spread(NamedTuple):
    """Median and range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of what is known; None when nothing is."""
        known = [value for value in values if value is not None]
        return cls(*map(rounded, (statistics.median(known), min(known), max(known)))) if known else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: who, at which level, through what, and the figures over all turns."""

    workload: str
    size: int
    group: str
    product: str
    setting: str
    level: Level
    promise: str
    client: str
    kind: str  # python or tool
    ours: bool
    version: str
    rounds: int
    rate: Spread
    server_per_million: Spread | None = None
    client_per_million: Spread | None = None
    p50_us: Spread | None = None
    p99_us: Spread | None = None
    lost: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.setting} ({self.client})"

    def line(self) -> dict[str, Any]:
        """For a line of history: spreads are [median, lowest, highest]."""
        return {**msgspec.to_builtins(self), "level": self.level.label}

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Row:
        """The row that :meth:`line` wrote; KeyError or ValueError when it is none."""
        return msgspec.convert({**line, "level": LABELLED[line["level"]]}, cls)


def summary(turns: list[Turn]) -> dict[str, Any]:
    """The figures of a row."""
    figures = {
        name: Spread.of(getattr(turn, name) for turn in turns) for name in ("rate", "p50_us", "p99_us")
    }
    for side in ("server", "client"):
        figures[f"{side}_per_million"] = Spread.of(turn.per_million(side) for turn in turns)
    return {"rounds": len(turns), "lost": sum(turn.lost for turn in turns), **figures}
