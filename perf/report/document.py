"""The generated part of docs/performance.md and the plots beside it: made, written, compared."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from perf.report.figures import Series, by_machine, grouped
from perf.report.history import Line
from perf.report.plots import plot
from perf.report.tables import table
from perf.report.workloads import GROUPS

BEGIN = "<!-- figures: made by `python -m perf.report` out of perf/history; what is written here is lost -->"
END = "<!-- figures: end -->"
WIDTH = 119
PLOT_PREFIX = "ratios-"
NOTHING = "Nothing has been measured yet; `scripts/bench` does it."


class MarkersMissing(Exception):
    """The document has no place for the figures."""


@dataclass(frozen=True)
class Made:
    """Files of the report with their contents."""

    document: str
    plots: dict[str, str]  # by file name


def make(lines: list[Line], document: str) -> Made:
    """The document with its figures replaced, and the plots; raises MarkersMissing."""
    begin, end = document.find(BEGIN), document.find(END)
    if document.count(BEGIN) != 1 or document.count(END) != 1 or end < begin:
        raise MarkersMissing(f"has not exactly one line {BEGIN!r} and one {END!r} behind it")
    figures, plots = _figures(lines)
    content = "\n".join(["", *figures, ""])
    return Made(document[: begin + len(BEGIN)] + content + document[end:], plots)


def _figures(lines: list[Line]) -> tuple[list[str], dict[str, str]]:
    text: list[str] = []
    plots: dict[str, str] = {}
    machines = by_machine(lines)
    for hardware, series in machines.items():
        text += ["", f"### {hardware}", "", *textwrap.wrap(_about(series), WIDTH)]
        groups = grouped(series)
        for group in GROUPS:
            if group not in groups:
                continue
            name = f"{PLOT_PREFIX}{_slug(hardware)}-{_slug(group)}.svg"
            plots[name] = plot(groups[group], f"{group}: Danube over its floor, run by run")
            text += ["", f"#### {group}", "", *table(groups[group]), "", f"![{group}, ratios](plots/{name})"]
    return text or ["", NOTHING], plots


def _about(series: list[Series]) -> str:
    lines = [line for one in series for line in one.lines]
    judged = [one.latest for one in series if one.latest.target]
    missed = sum(not line.met for line in judged)
    first, last = min(line.time for line in lines), max(line.time for line in lines)
    days = [f"{first:%Y-%m-%d}", f"{last:%Y-%m-%d}"]
    runs = (
        f"{len(lines)} runs on {days[0]}"
        if days[0] == days[1]
        else f"{len(lines)} runs from {' to '.join(days)}"
    )
    newest = max(lines, key=lambda line: line.time).machine
    software = ", ".join(
        filter(None, [newest.kernel and f"Linux {newest.kernel}", f"Python {newest.python}"])
    )
    targets = f"of {len(judged)} targets {len(judged) - missed} are met by the latest run"
    return f"{runs}, the last with {software}; {targets}."


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def outdated(made: Made, document: Path, folder: Path) -> list[str]:
    """Which files differ from what was made, are missing, or are nobody's any more."""
    found = [] if document.read_text() == made.document else [document.name]
    for name, content in made.plots.items():
        path = folder / name
        if not path.is_file() or path.read_text() != content:
            found.append(f"{folder.name}/{name}")
    return found + [f"{folder.name}/{path.name}" for path in _surplus(made, folder)]


def write(made: Made, document: Path, folder: Path) -> None:
    """Put the document and its plots in place, and take away plots that are made no more."""
    folder.mkdir(exist_ok=True)
    for path in _surplus(made, folder):
        path.unlink()
    for name, content in made.plots.items():
        (folder / name).write_text(content)
    document.write_text(made.document)


def _surplus(made: Made, folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob(f"{PLOT_PREFIX}*.svg")) if path.name not in made.plots]
