"""Samples a running broker every few seconds and keeps all samples with the faults between them.

A process is known by its role (``supervisor``, ``worker-0``, ``mover``) and by its life: its id and the
moment it was started, so that a replacement is another life of the same role.  A sample counts for a slope
when it is quiet: no fault is going on and the last one ended a while ago.  Times are seconds of all sessions.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import pandas as pd

PLACES = "places"
EXCUSED_S = 10.0  # after a fault: what it did may show late, as a missed heartbeat does
_TICKS_S = os.sysconf("SC_CLK_TCK")


class Reading(NamedTuple):
    """One process at one moment; ``age_s`` since it was started."""

    life: str
    age_s: float
    private_bytes: int  # anonymous memory: what the process itself allocated
    descriptors: int  # without those of data files
    data_files: int  # open files of the data directory, as many as there are at the moment
    threads: int


METRICS = Reading._fields[2:]


@dataclass(frozen=True)
class Sample:
    """Everything at one moment: ``processes`` by role, ``places`` bytes by name, and when that was.

    ``interval`` is the number of faults so far.
    """

    processes: dict[str, Reading]
    places: dict[str, int]
    at_s: float = 0.0
    interval: int = 0
    quiet: bool = False


def read_process(pid: int, data: str = "") -> Reading | None:
    """What one process uses; None when it is gone or is no more than a zombie.

    Open files whose path begins with ``data`` are counted apart, each once and while it has its name: a
    second descriptor of one, and one that was deleted, count as descriptors.
    """
    base = Path(f"/proc/{pid}")
    try:
        facts = (base / "stat").read_text().rsplit(")", 1)[1].split()
        anonymous = re.search(r"RssAnon:\s+(\d+) kB", (base / "status").read_text())
        descriptors, data_files = _descriptors(base / "fd", data)
    except (OSError, IndexError):
        return None
    if anonymous is None:
        return None
    threads, started = int(facts[17]), int(facts[19])
    age_s = float(Path("/proc/uptime").read_text().split()[0]) - started / _TICKS_S
    life, private_bytes = f"{pid}-{started}", 1024 * int(anonymous[1])
    return Reading(life, round(age_s, 2), private_bytes, descriptors, data_files, threads)


def _descriptors(folder: Path, data: str) -> tuple[int, int]:
    """How many are open, those of data files apart."""
    names, files = os.listdir(folder), set()
    for name in names if data else ():
        with suppress(OSError):
            path = os.readlink(folder / name)
            if path.startswith(data) and not path.endswith(" (deleted)"):
                files.add(path)
    return len(names) - len(files), len(files)


def disk_bytes(root: Path) -> int:
    """Blocks of a file, also through a link, or of all under a folder; what goes away is not counted."""
    total = 0
    below = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    for path in (root, *below):  # walk() passes over a folder that is gone, rglob() does not
        with suppress(OSError):
            total += 0 if path.is_dir() else path.stat().st_blocks * 512
    return total


def take(
    processes: Callable[[], Mapping[str, int]], places: Mapping[str, Callable[[], int]], data: str = ""
) -> Sample:
    """Read every process by its role, and every place."""
    readings = {role: read_process(pid, data) for role, pid in processes().items()}
    found = {role: reading for role, reading in readings.items() if reading is not None}
    return Sample(found, {name: size() for name, size in places.items()})


class Record:
    """What was sampled so far; :meth:`add` also appends to ``path``, from which a new one is read."""

    def __init__(self, path: Path) -> None:
        path.touch()
        whole = b"".join(one for one in path.read_bytes().splitlines(True) if one.endswith(b"\n"))
        path.write_bytes(whole)  # the last line of a session that was killed may have been cut
        self.samples = [msgspec.json.decode(line, type=Sample) for line in whole.splitlines()]
        self._file = path.open("ab", buffering=0)

    def add(self, at_s: float, interval: int, quiet: bool, sample: Sample) -> None:
        self.samples.append(replace(sample, at_s=round(at_s, 2), interval=interval, quiet=quiet))
        self._file.write(msgspec.json.encode(self.latest) + b"\n")

    def close(self) -> None:
        self._file.close()

    @property
    def latest(self) -> Sample:
        return self.samples[-1] if self.samples else Sample({}, {})

    @property
    def processes(self) -> pd.DataFrame:
        """A row for each reading."""
        rows = [
            (one.at_s, one.interval, one.quiet, name, *reading)
            for one in self.samples
            for name, reading in one.processes.items()
        ]
        return pd.DataFrame(rows, columns=["at_s", "interval", "quiet", "name", *Reading._fields])

    @property
    def places(self) -> pd.DataFrame:
        """A row for each sample, a column for each place."""
        return pd.DataFrame([{"at_s": one.at_s, **one.places} for one in self.samples])

    @property
    def largest(self) -> dict[str, dict[str, float]]:
        """The most of each metric, by process, and of each place."""
        found = self.processes.groupby("name")[list(METRICS)].max().to_dict("index")
        return {**found, PLACES: self.places.drop(columns="at_s", errors="ignore").max().to_dict()}


@dataclass
class Faults:
    """How many faults there were, and since when it is quiet."""

    clock: Callable[[], float] = time.monotonic
    count: int = 0
    ended_s: float = -math.inf  # of the last one; infinite while it goes on

    def begin(self) -> None:
        self.count, self.ended_s = self.count + 1, math.inf

    def end(self) -> None:
        self.ended_s = self.clock()

    def quiet_for(self, seconds: float) -> bool:
        """Whether no fault is going on and none ended in the last ``seconds``."""
        return self.clock() - self.ended_s >= seconds


class Watch:
    """A thread that samples, and notices processes that end though nobody ended them.

    Errors of its own are raised by :meth:`check`.
    """

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
        self.record, self.faults = record, faults
        self.died: list[str] = []
        self._take = lambda: take(processes, places, data)
        self._every_s, self._settle_s, self._on_sample = every_s, settle_s, on_sample
        self._started = time.monotonic() - record.latest.at_s
        self._known: dict[str, str] = {}
        self._known_s = time.monotonic()
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, "soak-watch")

    def __enter__(self) -> Watch:
        self._started = time.monotonic() - self.record.latest.at_s
        self._sampling = self._pool.submit(self._run)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._pool.shutdown()

    @property
    def run_s(self) -> float:
        """Seconds of the run, over all its sessions."""
        return time.monotonic() - self._started

    def take_died(self) -> list[str]:
        """What was noticed since the last call."""
        taken, self.died = self.died, []
        return taken

    def check(self) -> None:
        """Raise what ended the thread."""
        if self._sampling.done():
            self._sampling.result()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.sample()
            self._on_sample()
            self._stopped.wait(self._every_s)

    def sample(self) -> None:
        """Take one sample now."""
        quiet_before, interval = self.faults.quiet_for(self._settle_s), self.faults.count
        sample = self._take()
        self._compare(sample)
        self.record.add(self.run_s, interval, quiet_before and interval == self.faults.count, sample)

    def _compare(self, sample: Sample) -> None:
        """A life that is over must have a fault to account for it."""
        lives = {role: reading.life for role, reading in sample.processes.items()}
        since_s = self.faults.clock() - self._known_s
        for role, life in self._known.items() if self.faults.quiet_for(EXCUSED_S + since_s) else ():
            if lives.get(role) != life:
                pid = life.partition("-")[0]
                self.died.append(
                    f"{role} (process {pid}) ended before {self.run_s:.0f} s and nothing had been done to it"
                )
        self._known, self._known_s = lives, self.faults.clock()
