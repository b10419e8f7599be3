"""What one turn measured, and what the turns of one row come to."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from perf.compare.levels import Level, level_of
from perf.turns import rounded

MILLION = 1_000_000
KIND = "comparison"  # of its lines in the history, which other readers leave alone


@dataclass(frozen=True, kw_only=True)
class Spent:
    """CPU seconds of all threads and processes of one side."""

    server: float
    client: float


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

    def server_per_million(self) -> float | None:
        return None if self.spent is None else self.spent.server / max(1, self.records) * MILLION

    def client_per_million(self) -> float | None:
        return None if self.spent is None else self.spent.client / max(1, self.records) * MILLION


@dataclass(frozen=True)
class Spread:
    """Median and range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def line(self) -> list[float]:
        return [rounded(self.median), rounded(self.low), rounded(self.high)]


FIGURES = ("rate", "p50_us", "p99_us", "server_per_million", "client_per_million")


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
        found = {**vars(self), "level": self.level.label}
        found["client_kind"] = found.pop("kind")
        for name in FIGURES:
            spread = getattr(self, name)
            found[name] = None if spread is None else spread.line()
        return {"kind": KIND, **found}

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Row:
        """The row that :meth:`line` wrote; ValueError when it is none."""
        try:
            if line["kind"] != KIND:
                raise ValueError(f"this is no line of a comparison but of kind {line['kind']!r}")
            known = {name: line[name] for name in cls.__dataclass_fields__ if name != "kind"}
            known["kind"], known["level"] = line["client_kind"], level_of(line["level"])
            for name in FIGURES:
                known[name] = None if line[name] is None else Spread(*line[name])
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no line of a comparison: {error!r}") from None


def spread_of(values: list[float | None]) -> Spread | None:
    """Median and range of what is known; None when nothing is."""
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None


def summary(turns: list[Turn]) -> dict[str, Any]:
    """The figures of a row."""
    return {
        "rounds": len(turns),
        "rate": Spread.of([turn.rate for turn in turns]),
        "p50_us": spread_of([turn.p50_us for turn in turns]),
        "p99_us": spread_of([turn.p99_us for turn in turns]),
        "server_per_million": spread_of([turn.server_per_million() for turn in turns]),
        "client_per_million": spread_of([turn.client_per_million() for turn in turns]),
        "lost": sum(turn.lost for turn in turns),
    }
