"""Write the table of docs/performance.md from perf/history.

    python -m perf.report             write
    python -m perf.report --check     say whether it is up to date, and change nothing
    python -m perf.report --keep 3    and leave the newest three lines of each variant in perf/history

The same history gives the same bytes.  A line that cannot be trusted is an error with its file and number;
one with a ``kind`` is of another tool and left alone.  Exit code: 0; 1 with --check when something is not up
to date; 2 when the history or the document cannot be used, and then nothing is written.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from perf.rows import BY_NAME, Row

ROOT = Path(__file__).resolve().parent.parent
OUTDATED, UNUSABLE = 1, 2
DOCUMENT = "docs/performance.md"
BEGIN = "<!-- figures: made by `python -m perf.report` out of perf/history; what is written here is lost -->"
END = "<!-- figures: end -->"
NOTHING = "Nothing has been measured yet; `scripts/bench` does it."
HEAD = (
    "| workload | size | level | workers | floor | Danube | range | ratio | target | met | run |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
LEVELS = ("memory", "written", "fsync", "quorum")
WIDTH = 119


class Machine(msgspec.Struct, frozen=True):
    """The part of a fingerprint (``perf/machine.py``) that decides what may be compared."""

    cpu: str
    cores: int
    memory_gib: float
    filesystem: str
    commit: str = "unknown"
    kernel: str = ""
    python: str = ""

    @property
    def hardware(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {round(self.memory_gib)} GiB, {self.filesystem}"

    @property
    def key(self) -> tuple[object, ...]:
        """Of machines whose ratios may stand in one table; kernels and versions may differ.

        What is left of the memory depends on the kernel a little.
        """
        return self.cpu, self.cores, self.filesystem


class Line(msgspec.Struct, frozen=True):
    """One comparison of Danube and the floor."""

    workload: str
    size: int
    durability: str
    workers: int
    unit: str
    floor: float
    danube: float
    ratio: Annotated[float, msgspec.Meta(gt=0)]
    target: str
    met: bool
    floor_range: tuple[float, float]
    danube_range: tuple[float, float]
    time: Annotated[datetime, msgspec.Meta(tz=True)]
    machine: Machine
    rounds: int = 0
    details: dict[str, Any] = {}

    @property
    def row(self) -> Row:
        """The row that it is a run of; one of its own name if that row is no more."""
        return BY_NAME.get(self.workload, Row(self.workload, "", title=self.workload))

    @property
    def number(self) -> int | None:
        """What else was varied, if anything was."""
        found = self.details.get(self.row.varied[0])
        return found if isinstance(found, int) else None

    @property
    def title(self) -> str:
        if self.number is None:
            return self.row.title
        words = self.row.varied[1].removesuffix("s") if self.number == 1 else self.row.varied[1]
        return f"{self.row.title}, {self.number:,} {words}"

    @property
    def variant(self) -> tuple[Any, ...]:
        """Equal for the lines of one history, and in the order of the table; what is unknown is last."""
        place = [*BY_NAME, self.workload].index(self.workload)
        level = [*LEVELS, self.durability].index(self.durability)
        return place, self.workload, level, self.durability, self.size, self.number or 0, self.workers


def read_history(folder: Path, root: Path) -> list[Line]:
    """All lines in the order of their times; ValueError names the file, as seen from ``root``, and line."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for _, line in _read(path, root) if line]
    return sorted(lines, key=lambda line: line.time)  # stable: equal times keep the order of the files


def _read(path: Path, root: Path) -> Iterator[tuple[bytes, Line | None]]:
    """Each line as it stands, and what it says; None for one of another kind."""
    for number, content in enumerate(path.read_bytes().splitlines(), 1):
        if content.strip():
            try:
                found = msgspec.json.decode(content, type=dict[str, Any])
                yield content, None if "kind" in found else msgspec.convert(found, Line)
            except ValueError as error:
                raise ValueError(f"{path.relative_to(root)}:{number}: {error}") from None


def trim(folder: Path, root: Path, keep: int) -> None:
    """Leave the newest ``keep`` lines of each variant and machine; those of other kinds stay."""
    seen: Counter[Hashable] = Counter()
    for path in sorted(folder.glob("*.jsonl"), reverse=True):
        kept: list[bytes] = []
        for content, line in reversed(list(_read(path, root))):
            place = None if line is None else (line.variant, line.machine.key)
            seen[place] += 1
            if place is None or seen[place] <= keep:
                kept.append(content + b"\n")
        path.write_bytes(b"".join(reversed(kept)))


def replaced(document: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """The document with these lines between its two marks; ValueError when it has no place for them."""
    before, found_begin, rest = document.partition(begin)
    _, found_end, behind = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in before + behind:
        raise ValueError(f"the document has not exactly one line {begin!r} and one {end!r} behind it")
    return "\n".join([before + begin, *lines, end + behind])


def by_machine(lines: Iterable[Line]) -> list[list[Line]]:
    """The newest line of each variant, a machine each, the last one first.  Lines come by time."""
    machines: dict[object, dict[tuple[Any, ...], Line]] = {}
    for line in lines:
        key = line.machine.key
        machines[key] = {**machines.pop(key, {}), line.variant: line}
    return [[newest[variant] for variant in sorted(newest)] for newest in reversed(machines.values())]


def make(lines: list[Line], document: str) -> str:
    """The document with its figures replaced; raises ValueError."""
    text: list[str] = []
    for newest in by_machine(lines):
        text += ["", *textwrap.wrap(_about(newest), WIDTH), "", *HEAD, *map(_row, newest)]
    return replaced(document, BEGIN, END, text or ["", NOTHING])


def _about(lines: list[Line]) -> str:
    newest = max(lines, key=lambda line: line.time)
    judged = [line for line in lines if line.target]
    software = {"Linux": newest.machine.kernel, "Python": newest.machine.python}
    told = "".join(f", {name} {value}" for name, value in software.items() if value)
    missed = sum(not line.met for line in judged)
    met = f"of {len(judged)} targets {len(judged) - missed} are met."
    return f"{newest.machine.hardware}: last run {newest.time:%Y-%m-%d}{told}; {met}"


def _row(line: Line) -> str:
    low, high = map(number, line.danube_range)
    verdict = "met" if line.met else "**missed**"
    cells = [
        line.title, size(line.size), line.durability, str(line.workers),
        f"{number(line.floor)} {line.unit}", f"{number(line.danube)} {line.unit}", f"{low} to {high}",
        f"{line.ratio:.{2 if line.ratio < 10 else 1}f}", line.target or "none",
        verdict if line.target else "", f"{line.time:%Y-%m-%d} {line.machine.commit}",
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float) -> str:
    """Three digits, or all of those before the point; millions and above are shortened."""
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def size(octets: int) -> str:
    """Payload bytes as people write them."""
    return f"{octets // 1024} KiB" if octets >= 1024 and octets % 1024 == 0 else f"{octets} B"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m perf.report", description=f"Write the table of {DOCUMENT}.")
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="lines of each variant to leave")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    document, folder = given.root / DOCUMENT, given.root / "perf" / "history"
    try:
        lines = read_history(folder, given.root)
        written = document.read_text()
        made = make(lines, written)
    except (OSError, ValueError) as error:
        print(f"{error}\nnothing was written to {DOCUMENT}: mend what is named", file=sys.stderr)
        return UNUSABLE
    if given.check:
        if written == made:
            return 0
        print(f"{DOCUMENT} is not up to date; run python -m perf.report", file=sys.stderr)
        return OUTDATED
    document.write_text(made)
    if given.keep:
        trim(folder, given.root, given.keep)
    print(f"{len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
