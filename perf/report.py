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
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import starmap
from pathlib import Path
from typing import Any

import msgspec

from perf.rows import BY_NAME, place_of, title_of

ROOT = Path(__file__).resolve().parent.parent
OUTDATED, UNUSABLE = 1, 2
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
    ratio: float
    target: str
    met: bool
    floor_range: tuple[float, float]
    danube_range: tuple[float, float]
    time: datetime
    machine: Machine
    rounds: int = 0
    details: dict[str, Any] = {}


def read_history(folder: Path, root: Path) -> list[Line]:
    """All lines in the order of their times; ValueError names the file, as seen from ``root``, and line."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for _, line in _read(path, root) if line]
    return sorted(lines, key=lambda line: line.time)  # stable: equal times keep the order of the files


def _read(path: Path, root: Path) -> Iterator[tuple[bytes, Line | None]]:
    for number, content in enumerate(path.read_bytes().splitlines(), 1):
        if content.strip():
            try:
                yield content, _parsed(content)
            except ValueError as error:
                raise ValueError(f"{path.relative_to(root)}:{number}: {error}") from None


def _parsed(content: bytes) -> Line | None:
    """A checked line; None for one of another kind."""
    found = msgspec.json.decode(content)
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    if "kind" in found:
        return None
    line = msgspec.convert(found, Line)
    if not (math.isfinite(line.ratio) and line.ratio > 0):
        raise ValueError(f"a ratio of {line.ratio} cannot be")
    if line.time.tzinfo is None:
        raise ValueError("its time has no time zone")
    return line


def trim(folder: Path, root: Path, keep: int) -> None:
    """Leave the newest ``keep`` lines of each variant and machine; those of other kinds stay."""
    seen: Counter[Hashable] = Counter()
    for path in sorted(folder.glob("*.jsonl"), reverse=True):
        kept: list[bytes] = []
        for content, line in reversed(list(_read(path, root))):
            place = None if line is None else (variant_of(line), line.machine.key)
            seen[place] += 1
            if place is None or seen[place] <= keep:
                kept.append(content + b"\n")
        path.write_bytes(b"".join(reversed(kept)))


def replaced(document: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """The document with these lines between its two marks; ValueError when it has no place for them."""
    before, found_begin, rest = document.partition(begin)
    _, found_end, behind = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in before + behind:
        raise ValueError(f"has not exactly one line {begin!r} and one {end!r} behind it")
    return "\n".join([before + begin, *lines, end + behind])


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


def variant_of(line: Line) -> Variant:
    detail, words = BY_NAME[line.workload].varied if line.workload in BY_NAME else ("", "")
    number = line.details.get(detail)
    if not isinstance(number, int):
        return Variant(line.workload, line.size, line.durability, line.workers)
    varied = f"{number:,} {words.removesuffix('s') if number == 1 else words}"
    return Variant(line.workload, line.size, line.durability, line.workers, number, varied)


def by_machine(lines: Iterable[Line]) -> list[dict[Variant, Line]]:
    """The newest line of each variant, a machine each, the last one first.  Lines come by time."""
    machines: dict[object, dict[Variant, Line]] = {}
    for line in lines:
        key = line.machine.key
        machines[key] = {**machines.pop(key, {}), variant_of(line): line}
    return [
        dict(sorted(newest.items(), key=lambda one: one[0].order)) for newest in reversed(machines.values())
    ]


def make(lines: list[Line], document: str) -> str:
    """The document with its figures replaced; raises ValueError."""
    text: list[str] = []
    for newest in by_machine(lines):
        about = textwrap.wrap(_about(newest.values()), WIDTH)
        text += ["", *about, "", *HEAD, *starmap(_row, newest.items())]
    return replaced(document, BEGIN, END, text or ["", NOTHING])


def _about(lines: Collection[Line]) -> str:
    newest = max(lines, key=lambda line: line.time)
    judged = [line for line in lines if line.target]
    software = {"Linux": newest.machine.kernel, "Python": newest.machine.python}
    told = "".join(f", {name} {value}" for name, value in software.items() if value)
    missed = sum(not line.met for line in judged)
    met = f"of {len(judged)} targets {len(judged) - missed} are met."
    return f"{newest.machine.hardware}: last run {newest.time:%Y-%m-%d}{told}; {met}"


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


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    parser.add_argument(
        "--keep", type=int, default=0, metavar="N", help="lines of each variant in the history"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def complain(line: str) -> None:
    print(line, file=sys.stderr)


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    document, folder = given.root / "docs" / "performance.md", given.root / "perf" / "history"
    try:
        lines = read_history(folder, given.root)
    except ValueError as error:
        complain(f"{error}\nnothing was written: mend that line, or take it out")
        return UNUSABLE
    try:
        made = make(lines, document.read_text())
    except (OSError, ValueError) as error:
        complain(f"{document.relative_to(given.root)}: {error}")
        return UNUSABLE
    if given.check:
        if outdated := document.read_text() != made:
            complain("docs/performance.md is not up to date; run python -m perf.report")
        return OUTDATED if outdated else 0
    document.write_text(made)
    if given.keep:
        trim(folder, given.root, given.keep)
    print(f"{len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
