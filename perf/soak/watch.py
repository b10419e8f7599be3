"""Samples a running broker every few seconds and keeps all samples with the faults between them.

A process is known by its role (``supervisor``, ``worker-0``, ``mover``) and by its life: its id and the
moment it was started, so that a replacement is another life of the same role.  A sample counts for a slope
when it is quiet: no fault is going on and the last one ended a while ago.  Times are seconds of all sessions.
"""

from __future__ import annotations

import json
import os
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
PLACES = "places"
EXCUSED_S = 10.0  # after a fault: what it did may show late, as a missed heartbeat does
METRICS = (
    "private_bytes",  # anonymous memory: what the process itself allocated
    "proportional_bytes",  # with its share of what several processes map
    "resident_bytes",
    "shared_bytes",  # of the region that workers share, and other shared memory
    "descriptors",  # without those of data files
    "data_files",  # open files of the data directory, as many as there are at the moment
    "threads",
)
_STATUS_FIELDS = {"VmRSS": "resident_bytes", "RssAnon": "private_bytes", "RssShmem": "shared_bytes"}
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Reading:
    """One process at one moment; sizes in bytes, ``age_s`` since it was started."""

    life: str
    age_s: float
    private_bytes: int
    proportional_bytes: int
    resident_bytes: int
    shared_bytes: int
    descriptors: int
    data_files: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """Everything at one moment: ``processes`` by role, ``places`` bytes by name."""

    processes: dict[str, Reading]
    places: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return {
            "processes": {role: asdict(one) for role, one in self.processes.items()},
            "places": self.places,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Sample:
        processes = {role: Reading(**one) for role, one in found["processes"].items()}
        return cls(processes, dict(found["places"]))


def read_process(pid: int, data: str = "") -> Reading | None:
    """What one process uses; None when it is gone or is no more than a zombie.

    Open files whose path begins with ``data`` are counted apart, each once and while it has its name: a
    second descriptor of one, and one that was deleted, count as descriptors.
    """
    base = Path(f"/proc/{pid}")
    try:
        status = (base / "status").read_text()
        proportional = (base / "smaps_rollup").read_text()
        started = int((base / "stat").read_text().rsplit(")", 1)[1].split()[19])
        descriptors, data_files = _descriptors(base / "fd", data)
    except (OSError, IndexError):
        return None
    found = {"proportional_bytes": 1024 * _number(proportional, "Pss")}
    found |= {"descriptors": descriptors, "data_files": data_files}
    found |= {name: 1024 * _number(status, field) for field, name in _STATUS_FIELDS.items()}
    found["threads"] = _number(status, "Threads")
    if not found["resident_bytes"]:
        return None
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return Reading(life=f"{pid}-{started}", age_s=round(up_s - started / _TICKS_S, 2), **found)


def _descriptors(folder: Path, data: str) -> tuple[int, int]:
    """How many are open, those of data files apart."""
    names, files = os.listdir(folder), set()
    for name in names if data else ():
        with suppress(OSError):
            path = os.readlink(folder / name)
            if path.startswith(data) and not path.endswith(" (deleted)"):
                files.add(path)
    return len(names) - len(files), len(files)


def _number(text: str, wanted: str) -> int:
    lines = (line.partition(":") for line in text.splitlines())
    return next((int(value.split()[0]) for name, _, value in lines if name == wanted), 0)


def disk_bytes(root: Path) -> int:
    """Bytes that the files under ``root`` occupy on disk; files that go away meanwhile are not counted."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def take(
    processes: Callable[[], Mapping[str, int]], places: Mapping[str, Callable[[], int]], data: str = ""
) -> Sample:
    """Read every process by its role, and every place."""
    readings = {role: read_process(pid, data) for role, pid in processes().items()}
    return Sample(
        {role: reading for role, reading in readings.items() if reading is not None},
        {name: size() for name, size in places.items()},
    )


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


@dataclass
class Faults:
    """Which fault is going on, how many there were, and since when it is quiet."""

    clock: Callable[[], float] = time.monotonic
    count: int = 0
    running: str = ""
    ended_s: float = field(default=float("-inf"))

    def begin(self, name: str) -> None:
        self.count += 1
        self.running = name

    def end(self) -> None:
        self.running = ""
        self.ended_s = self.clock()

    def quiet_for(self, seconds: float) -> bool:
        """Whether no fault is going on and none ended in the last ``seconds``."""
        return not self.running and self.clock() - self.ended_s >= seconds


class Watch:
    """A thread that samples; errors of its own are raised by :meth:`check`."""

    def __init__(
        self,
        record: Record,
        faults: Faults,
        processes: Callable[[], Mapping[str, int]],
        places: Mapping[str, Callable[[], int]],
        *,
        data: str = "",
        every_s: float = 5.0,
        settle_s: float = 5.0,
        on_sample: Callable[[], None] = lambda: None,
    ) -> None:
        self.record = record
        self.faults = faults
        self.died: list[str] = []
        self._processes = processes
        self._places = places
        self._data = data
        self._every_s = every_s
        self._settle_s = settle_s
        self._on_sample = on_sample
        self._started = time.monotonic() - record.last_s
        self._known: dict[str, str] = {}
        self._known_s = time.monotonic()
        self._stopped = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._started = self._known_s = time.monotonic()
        self._started -= self.record.last_s
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def run_s(self) -> float:
        """Seconds of the run, over all its sessions."""
        return time.monotonic() - self._started

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def take_died(self) -> list[str]:
        """What was noticed since the last call."""
        taken, self.died = self.died, []
        return taken

    def check(self) -> None:
        """Raise what ended the thread."""
        if self._error is not None:
            raise RuntimeError(f"sampling failed: {self._error}") from self._error

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self.sample()
                self._on_sample()
                self._stopped.wait(self._every_s)
        except Exception as error:  # told by check(), in the thread that can end the run
            self._error = error

    def sample(self) -> None:
        """Take one sample now."""
        quiet_before = self.faults.quiet_for(self._settle_s)
        interval = self.faults.count
        sample = take(self._processes, self._places, self._data)
        quiet = quiet_before and interval == self.faults.count
        self._compare(sample)
        self.record.add(self.run_s, interval, quiet, sample)

    def _compare(self, sample: Sample) -> None:
        """A life that is over must have a fault to account for it."""
        lives = {role: reading.life for role, reading in sample.processes.items()}
        since_s = self.faults.clock() - self._known_s
        if self.faults.quiet_for(EXCUSED_S + since_s):
            for role, life in self._known.items():
                if lives.get(role) != life:
                    self.died.append(
                        f"{role} (process {life.partition('-')[0]}) ended before {self.run_s:.0f} s"
                        " and nothing had been done to it"
                    )
        self._known, self._known_s = lives, self.faults.clock()
