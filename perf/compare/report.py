"""A run as it is printed, recorded and shown in docs/comparison.md."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perf.compare import table
from perf.compare.figures import KIND, Row
from perf.compare.run import KIND_OF_SKIP, Skip

ROOT = Path(__file__).resolve().parents[2]
HISTORY = ROOT / "perf" / "history"
DOCUMENT = ROOT / "docs" / "comparison.md"
BEGIN = "<!-- table: made by `python -m perf.compare --write` out of perf/history; edits are lost -->"
END = "<!-- table: end -->"
NOTHING = "Nothing has been recorded yet; the command is below."
WIDTH = 119
ABOUT_RUN = ("time", "rounds", "scale", "network")
ABOUT_MACHINE = ("cpu", "cores", "memory_gib", "kernel", "python", "filesystem", "load_average", "commit")


@dataclass(frozen=True)
class Run:
    """The rows of one run, what was left out, and what all of it was measured on."""

    rows: Sequence[Row]
    skips: Sequence[Skip]
    facts: dict[str, Any]
    lines: Sequence[dict[str, Any]]


def run_of(lines: Sequence[dict[str, Any]]) -> Run:
    """The run that lines of one time are; ValueError when one cannot be read."""
    rows = [Row.from_line(line) for line in lines if line["kind"] == KIND]
    skips = [
        Skip(line["what"], line["why"], line["failed"]) for line in lines if line["kind"] == KIND_OF_SKIP
    ]
    last = lines[-1]
    facts = {name: last[name] for name in ABOUT_RUN if name in last}
    facts["machine"] = ", ".join(
        f"{name} {last['machine'][name]}" for name in ABOUT_MACHINE if name in last.get("machine", {})
    )
    return Run(rows, skips, facts, lines)


def last_runs(files: Iterable[Path]) -> list[Run]:
    """What is newest of each workload and size in files of history, newest run first, the first one whole.

    Raises ValueError when there is none or a line cannot be read.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in files:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is no JSON: {error}") from None
            if line.get("kind") in (KIND, KIND_OF_SKIP):
                runs.setdefault(line["time"], []).append(line)
    if not runs:
        raise ValueError("no comparison is recorded; record one with --append")
    found: list[Run] = []
    known: set[tuple[str, int]] = set()
    for time in sorted(runs, reverse=True):
        run = run_of(runs[time])
        newest = [row for row in run.rows if (row.workload, row.size) not in known]
        if newest or not found:
            found.append(replace(run, rows=newest))
        known |= {(row.workload, row.size) for row in newest}
    return found


def show(run: Run, output: str) -> str:
    """The result as it is printed: json, text or markdown."""
    if output == "json":
        return "\n".join(map(json.dumps, run.lines))
    if output == "markdown":
        return "\n".join(markdown([run]))
    head = [f"{name}: {value}" for name, value in run.facts.items()]
    return "\n".join([*head, "", table.text(run.rows), "", *table.legend(run.rows), *map(str, run.skips)])


def markdown(runs: Sequence[Run]) -> list[str]:
    """Lines of the document: a table for each run, and once what their levels and settings mean."""
    lines = []
    for run in runs:
        about = ", ".join(f"{name} {value}" for name, value in run.facts.items())
        lines += [*textwrap.wrap(f"Measured: {about}.", WIDTH), ""]
        lines += [*table.markdown(run.rows).splitlines(), ""]
    notes = table.legend([row for run in runs for row in run.rows])
    notes += dict.fromkeys(str(skip) for run in runs for skip in run.skips)
    for note in notes:
        lines += textwrap.wrap(f"- {note}", WIDTH, subsequent_indent="  ")
    return lines


def written(document: str, runs: Sequence[Run]) -> str:
    """The document with the runs in their place; ValueError when it has none."""
    begin, end = document.find(BEGIN), document.find(END)
    if document.count(BEGIN) != 1 or document.count(END) != 1 or end < begin:
        raise ValueError(f"the document has not exactly one line {BEGIN!r} and one {END!r} behind it")
    content = markdown(runs) if runs else [NOTHING]
    return document[: begin + len(BEGIN)] + "\n".join(["", "", *content, "", ""]) + document[end:]
