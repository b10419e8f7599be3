"""Figures as Markdown: what was measured last, with the level, the workers and the target beside it."""

from __future__ import annotations

from collections.abc import Sequence

from perf.report.figures import Series
from perf.report.history import Line
from perf.report.workloads import title_of

HEAD = (
    "| workload | size | level | workers | floor | Danube | range | ratio | target | met | run |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def table(series: Sequence[Series]) -> list[str]:
    return [*HEAD, *(_row(one) for one in series)]


def _row(series: Series) -> str:
    line, variant = series.latest, series.variant
    title = title_of(line.workload) + (f", {variant.varied}" if variant.varied else "")
    low, high = (number(value) for value in line.danube_range)
    cells = [
        title,
        size(line.size),
        line.durability,
        str(line.workers),
        with_unit(line.floor, line.unit),
        with_unit(line.danube, line.unit),
        f"{low} to {high}",
        ratio(line.ratio),
        line.target or "none",
        verdict(line),
        f"{line.time:%Y-%m-%d} {line.machine.commit}",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def verdict(line: Line) -> str:
    if not line.target:
        return ""
    return "met" if line.met else "**missed**"


def number(value: float) -> str:
    """Three digits, or all of those before the point; millions and above are shortened."""
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def with_unit(value: float, unit: str) -> str:
    return f"{number(value)} {unit}"


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def size(octets: int) -> str:
    """Payload bytes as people write them."""
    return f"{octets // 1024} KiB" if octets >= 1024 and octets % 1024 == 0 else f"{octets} B"
