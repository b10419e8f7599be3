"""All samples of a run with the faults between them, kept as columns of numbers and in a file.

A sample counts for a slope when it is quiet: no fault is going on and the last one ended a while ago.
Times are seconds of the run, which go on where they stopped when the run is resumed.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from perf.soak.sampling import METRICS, Sample
from perf.soak.slopes import Floats

PLACES = "places"
_COLUMNS = ("at_s", "age_s", "life", "interval", "quiet", *METRICS)


class Column:
    """The readings of one role, a row each."""

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, row: list[float]) -> None:
        self._values.extend(row)

    def columns(self) -> dict[str, Floats]:
        table = np.array(self._values, dtype=np.float64).reshape(-1, len(_COLUMNS))
        return {name: table[:, number] for number, name in enumerate(_COLUMNS)}


class Record:
    """What was sampled so far; :meth:`add` also appends to ``path``, from which a new one is read."""

    def __init__(self, path: Path) -> None:
        self.processes: dict[str, Column] = defaultdict(Column)
        self.places: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.place_times = array("d")
        self.largest: dict[str, dict[str, float]] = defaultdict(dict)
        self.last_s = 0.0
        self.latest: Sample | None = None
        self._lives: dict[str, int] = {}
        if path.exists():
            for line in _whole_lines(path):
                self._keep(line["at_s"], line["interval"], line["quiet"], Sample.from_dict(line))
        self._file = path.open("a", buffering=1)

    def add(self, at_s: float, interval: int, quiet: bool, sample: Sample) -> None:
        """``interval`` is the number of faults so far."""
        line = {"at_s": round(at_s, 2), "interval": interval, "quiet": quiet, **sample.as_dict()}
        self._file.write(json.dumps(line) + "\n")
        self._keep(at_s, interval, quiet, sample)

    def close(self) -> None:
        self._file.close()

    def _keep(self, at_s: float, interval: int, quiet: bool, sample: Sample) -> None:
        self.last_s, self.latest = at_s, sample
        for role, reading in sample.processes.items():
            life = self._lives.setdefault(f"{role} {reading.life}", len(self._lives))
            metrics = [float(getattr(reading, name)) for name in METRICS]
            self.processes[role].add([at_s, reading.age_s, life, interval, quiet, *metrics])
            self._note_largest(role, dict(zip(METRICS, metrics, strict=True)))
        self.place_times.append(at_s)
        for name, size in sample.places.items():
            self.places[name].append(size)
        self._note_largest(PLACES, {name: float(size) for name, size in sample.places.items()})

    def _note_largest(self, whose: str, values: dict[str, float]) -> None:
        largest = self.largest[whose]
        for name, value in values.items():
            largest[name] = max(value, largest.get(name, 0.0))


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of an earlier session; the last one may have been cut when it was killed, and is removed."""
    whole = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            yield json.loads(line)
    with path.open("rb+") as file:
        file.truncate(whole)
