"""What a soak found, for people: a text for the terminal and a row for docs/reliability.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perf.soak.growth import shown
from perf.soak.slopes import Growth

EXAMPLES_SHOWN = 40


def text(found: dict[str, Any]) -> str:
    return "\n".join(_lines(found))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['verdict']}: {found['minutes']:.1f} min in {found['epochs']} epochs, seed {found['seed']}"
    yield f"faults: {_counts(found['faults'])}"
    totals = found["totals"]
    yield ", ".join(
        f"{totals.get(name, 0):,} {name.replace('_', ' ')}"
        for name in ("acknowledged", "not_acknowledged", "in_log", "deliveries", "redeliveries", "acks")
    )
    yield f"violations: {_counts(found['violations'])}"
    yield from (f"  {line}" for line in found["examples"][:EXAMPLES_SHOWN])
    yield from found["notes"]
    for one in found["growth"]:
        yield f"{one['growth']:7} {one['whose']} {one['metric']} {one['when']}: {_slope(one)}"


def _slope(one: dict[str, Any]) -> str:
    slope = one["slope"]
    if slope is None:
        return "too few points"
    show = shown(one["metric"])
    around = f"{show(slope['low'])} to {show(slope['high'])}"
    return (
        f"{show(slope['per_hour'])} an hour ({around}), at most {show(one['limit_per_hour'])};"
        f" {slope['points']} points over {slope['span_s'] / 60:.1f} min"
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def markdown(found: dict[str, Any]) -> str:
    """A row of the table of results in docs/reliability.md."""
    growth = {Growth(one["growth"]) for one in found["growth"]}
    slopes = "a slope beyond its bound" if Growth.BEYOND in growth else "no slope beyond its bound"
    totals = found["totals"]
    return (
        f"| soak, store {found['store']}, {found['workers']} workers | {found['minutes']:.0f} min,"
        f" {found['epochs']} epochs | {_counts(found['faults'])} | {totals.get('acknowledged', 0):,} |"
        f" {totals.get('deliveries', 0):,} | {_counts(found['violations'])}, {slopes} |"
    )
