"""Reads the lines of perf/history; a line that cannot be trusted is an error with its file and number.

A line with a ``kind`` is of another tool and left alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec


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

    def like(self, other: Machine) -> bool:
        """Whether ratios of both may stand in one plot; kernels and versions may differ.

        What is left of the memory depends on the kernel a little.
        """
        same = (self.cpu, self.cores, self.filesystem) == (other.cpu, other.cores, other.filesystem)
        return same and math.isclose(self.memory_gib, other.memory_gib, rel_tol=0.05)


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


@dataclass(frozen=True)
class History:
    """All lines in the order of their times, what was wrong with others, and how many are of other kinds."""

    lines: list[Line]
    errors: list[str]
    others: int = 0


def read_history(folder: Path, root: Path) -> History:
    """All ``*.jsonl`` of a folder; errors name files as seen from ``root``."""
    lines: list[Line] = []
    errors: list[str] = []
    others = 0
    for path in sorted(folder.glob("*.jsonl")):
        for where, content in _numbered(path, root):
            try:
                line = _parsed(content)
            except (ValueError, msgspec.MsgspecError) as error:
                errors.append(f"{where}: {error}")
                continue
            if line is None:
                others += 1
            else:
                lines.append(line)
    lines.sort(key=lambda line: line.time)  # stable: equal times keep the order of the files
    return History(lines, errors, others)


def _numbered(path: Path, root: Path) -> Iterator[tuple[str, bytes]]:
    for number, content in enumerate(path.read_bytes().splitlines(), 1):
        if content.strip():
            yield f"{path.relative_to(root)}:{number}", content


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


def trim(folder: Path, keep: int, variant: Callable[[Line], Hashable]) -> None:
    """Leave the newest ``keep`` lines of each variant and machine; those of other kinds stay."""
    seen: Counter[Hashable] = Counter()
    for path in sorted(folder.glob("*.jsonl"), reverse=True):
        kept: list[bytes] = []
        for content in reversed([one for one in path.read_bytes().splitlines() if one.strip()]):
            line = _parsed(content)
            place = None if line is None else (variant(line), line.machine.hardware)
            seen[place] += 1
            if place is None or seen[place] <= keep:
                kept.append(content + b"\n")
        path.write_bytes(b"".join(reversed(kept)))
