"""Chooses the latest line of each variant of a row, and writes them as one table between two markers."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from perf.report.history import Line, Machine
from perf.rows import BY_NAME, group_of, place_of, title_of

BEGIN = "<!-- figures: made by `python -m perf.report` out of perf/history; what is written here is lost -->"
END = "<!-- figures: end -->"
NOTHING = "Nothing has been measured yet; `scripts/bench` does it."
HEAD = (
    "| workload | size | level | workers | floor | Danube | range | ratio | target | met | run |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
LEVELS = ("memory", "written", "fsync", "quorum")
WIDTH = 119


class MarkersMissing(Exception):
    """The document has no place for the figures."""


@dataclass(frozen=True)
class Variant:
    """A row with what was varied; equal for the runs that are one history."""

    workload: str
    size: int
    durability: str
    workers: int
    number: int = 0  # of what else was varied
    varied: str = ""  # the same in words: "4 consumers"

    @property
    def order(self) -> tuple[object, ...]:
        level = LEVELS.index(self.durability) if self.durability in LEVELS else len(LEVELS)
        return (place_of(self.workload), self.workload, level, self.size, self.number, self.workers)

    @property
    def title(self) -> str:
        return title_of(self.workload) + (f", {self.varied}" if self.varied else "")


@dataclass(frozen=True)
class Series:
    """All runs of a variant on one machine, the latest last."""

    variant: Variant
    lines: tuple[Line, ...]

    @property
    def group(self) -> str:
        return group_of(self.variant.workload)


def variant_of(line: Line) -> Variant:
    detail, words = BY_NAME[line.workload].varied if line.workload in BY_NAME else ("", "")
    number = line.details.get(detail)
    if not isinstance(number, int):
        return Variant(line.workload, line.size, line.durability, line.workers)
    varied = f"{number:,} {words.removesuffix('s') if number == 1 else words}"
    return Variant(line.workload, line.size, line.durability, line.workers, number, varied)


def by_machine(lines: Iterable[Line]) -> dict[str, list[Series]]:
    """Series by machine; the machine that was measured last comes first.  Lines come in order of time."""
    known: list[Machine] = []
    machines: dict[str, dict[Variant, list[Line]]] = {}
    for line in lines:
        machine = next((one for one in known if one.like(line.machine)), line.machine)
        if machine is line.machine:
            known.append(machine)
        variants = machines.pop(machine.hardware, defaultdict(list))
        variants[variant_of(line)].append(line)
        machines[machine.hardware] = variants
    return {
        hardware: sorted(
            (Series(variant, tuple(found)) for variant, found in variants.items()),
            key=lambda series: series.variant.order,
        )
        for hardware, variants in reversed(machines.items())
    }


def make(lines: list[Line], document: str) -> str:
    """The document with its figures replaced; raises MarkersMissing."""
    begin, end = document.find(BEGIN), document.find(END)
    if document.count(BEGIN) != 1 or document.count(END) != 1 or end < begin:
        raise MarkersMissing(f"has not exactly one line {BEGIN!r} and one {END!r} behind it")
    text: list[str] = []
    for hardware, series in by_machine(lines).items():
        about = textwrap.wrap(f"{hardware}: {_about(series)}", WIDTH)
        text += ["", *about, "", *HEAD, *(_row(one.variant, one.lines[-1]) for one in series)]
    content = "\n".join(["", *(text or ["", NOTHING]), ""])
    return document[: begin + len(BEGIN)] + content + document[end:]


def _about(series: list[Series]) -> str:
    newest = max((line for one in series for line in one.lines), key=lambda line: line.time)
    judged = [one.lines[-1] for one in series if one.lines[-1].target]
    software = {"Linux": newest.machine.kernel, "Python": newest.machine.python}
    told = "".join(f", {name} {value}" for name, value in software.items() if value)
    missed = sum(not line.met for line in judged)
    return f"last run {newest.time:%Y-%m-%d}{told}; of {len(judged)} targets {len(judged) - missed} are met."


def _row(variant: Variant, line: Line) -> str:
    low, high = map(number, line.danube_range)
    verdict = "met" if line.met else "**missed**"
    cells = [
        variant.title, size(line.size), line.durability, str(line.workers),
        f"{number(line.floor)} {line.unit}", f"{number(line.danube)} {line.unit}", f"{low} to {high}",
        ratio(line.ratio), line.target or "none", verdict if line.target else "",
        f"{line.time:%Y-%m-%d} {line.machine.commit}",
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float) -> str:
    """Three digits, or all of those before the point; millions and above are shortened."""
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def size(octets: int) -> str:
    """Payload bytes as people write them."""
    return f"{octets // 1024} KiB" if octets >= 1024 and octets % 1024 == 0 else f"{octets} B"
