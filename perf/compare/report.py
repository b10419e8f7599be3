"""A run as it is printed, recorded and shown in docs/comparison.md: one table, a level beside each figure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from perf.compare.model import MEANINGS, Row, Spread, refuse_unfair
from perf.compare.run import Skip
from perf.report import replaced

ROOT = Path(__file__).resolve().parents[2]
HISTORY = ROOT / "perf" / "history"
DOCUMENT = ROOT / "docs" / "comparison.md"
BEGIN = "<!-- table: made by `python -m perf.compare --write` out of perf/history; edits are lost -->"
END = "<!-- table: end -->"
NOTHING = "Nothing has been recorded yet; the command is below."
KIND = "comparison"  # of its lines in the history, which other readers leave alone
WIDTH = 119
ABOUT_RUN = ("time", "rounds", "scale", "network")
ABOUT_MACHINE = ("cpu", "cores", "memory_gib", "kernel", "python", "filesystem", "load_average", "commit")
HEAD = (
    "workload", "size", "level", "product and setting", "driven by", "median", "range",
    "server CPU s/M", "client CPU s/M", "lost",
)  # fmt: skip
RIGHT = {"size", "median", "range", "server CPU s/M", "client CPU s/M", "lost"}


@dataclass(frozen=True)
class Run:
    """The rows of one run, what was left out, and what all of it was measured on."""

    facts: dict[str, Any]
    rows: Sequence[Row]
    skips: Sequence[Skip] = ()

    def line(self) -> dict[str, Any]:
        """A line of history."""
        rows, skips = [row.line() for row in self.rows], [vars(skip) for skip in self.skips]
        return {"kind": KIND, **self.facts, "rows": rows, "skips": skips}

    @property
    def about(self) -> str:
        machine = self.facts.get("machine", {})
        facts = {name: self.facts[name] for name in ABOUT_RUN if name in self.facts}
        facts["machine"] = ", ".join(f"{name} {machine[name]}" for name in ABOUT_MACHINE if name in machine)
        return ", ".join(f"{name} {value}" for name, value in facts.items())


def run_of(line: dict[str, Any]) -> Run:
    """The run that :meth:`Run.line` wrote; ValueError when it is none."""
    try:
        facts = dict(line)
        rows, skips = facts.pop("rows"), facts.pop("skips")
        del facts["kind"]
        return Run(facts, list(map(Row.from_line, rows)), msgspec.convert(skips, list[Skip]))
    except (KeyError, ValueError) as error:
        raise ValueError(f"this is no line of a comparison: {error!r}") from None


def last_runs(files: Iterable[Path]) -> list[Run]:
    """What is newest of each workload and size in files of history, newest run first, the first one whole.

    Raises ValueError when there is none or a line cannot be read.
    """
    runs: list[Run] = []
    for path in files:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is no JSON: {error}") from None
            if line.get("kind") == KIND:
                runs.append(run_of(line))
    if not runs:
        raise ValueError("no comparison is recorded; record one with --append")
    found: list[Run] = []
    known: set[tuple[str, int]] = set()
    for run in sorted(runs, key=lambda run: str(run.facts["time"]), reverse=True):
        newest = [row for row in run.rows if (row.workload, row.size) not in known]
        if newest or not found:
            found.append(replace(run, rows=newest))
        known |= {(row.workload, row.size) for row in newest}
    return found


# -- the table ----------------------------------------------------------------------------------------


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that stand beside each other, best first; Unfair when some must not."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.workload, row.size, row.group), []).append(row)
    for (_, _, group), together in found.items():
        refuse_unfair(group, together)
        together.sort(key=lambda row: row.p50_us.median if row.p50_us else -row.rate.median)
    return list(found.values())


def plain(value: float) -> str:
    """Three significant digits at least, none that say nothing."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _range(spread: Spread) -> str:
    return f"{plain(spread.low)}-{plain(spread.high)}"


def _median(spread: Spread | None) -> str:
    return "not known" if spread is None else plain(spread.median)


def cells(row: Row) -> list[str]:
    """The row in the order of the head; median and range are of what the workload is about."""
    middle, around = f"{plain(row.rate.median)}/s", _range(row.rate)
    if row.p50_us and row.p99_us:
        middle = f"p50 {plain(row.p50_us.median)} us, p99 {plain(row.p99_us.median)} us, {middle}"
        around = f"{_range(row.p50_us)}; {_range(row.p99_us)}"
    return [
        row.workload, f"{row.size:,}", row.level.label, row.setting, row.client, middle, around,
        _median(row.server_per_million), _median(row.client_per_million), f"{row.lost:,}" if row.lost else "",
    ]  # fmt: skip


def table(rows: Iterable[Row]) -> list[str]:
    """Lines of markdown; Danube's rows are bold."""
    found = [HEAD, ["---:" if name in RIGHT else "---" for name in HEAD]]
    for row in (row for together in grouped(rows) for row in together):
        found.append([f"**{cell}**" if cell and row.ours else cell for cell in cells(row)])
    return [f"| {' | '.join(line)} |" for line in found]


def legend(rows: Sequence[Row]) -> list[str]:
    """What the levels mean, what each setting promises, and which version it was."""
    lines = [f"{level.label}: {MEANINGS[level]}" for level in sorted({row.level for row in rows})]
    settings = sorted({(row.level, row.setting, row.promise, row.version) for row in rows})
    for _, together in groupby(settings, key=lambda known: known[0]):
        lines += [f"{setting} ({version}): {promise}" for _, setting, promise, version in together]
    return lines


def show(run: Run, output: str) -> str:
    """The result as it is printed: json, or as it would stand in the document."""
    return json.dumps(run.line()) if output == "json" else "\n".join(markdown([run]))


def markdown(runs: Sequence[Run]) -> list[str]:
    """Lines of the document: a table for each run, and once what their levels and settings mean."""
    lines = []
    for run in runs:
        lines += [*textwrap.wrap(f"Measured: {run.about}.", WIDTH), "", *table(run.rows), ""]
    notes = legend([row for run in runs for row in run.rows])
    notes += dict.fromkeys(str(skip) for run in runs for skip in run.skips)
    for note in notes:
        lines += textwrap.wrap(f"- {note}", WIDTH, subsequent_indent="  ")
    return lines


def written(document: str, runs: Sequence[Run]) -> str:
    """The document with the runs in their place; ValueError when it has none."""
    return replaced(document, BEGIN, END, ["", *(markdown(runs) if runs else [NOTHING]), ""])
