"""What the processes of a broker use at one moment, read from /proc, and what lies on disk.

A process is known by its role (``supervisor``, ``worker-0``, ``mover``) and by its life: its id and the
moment it was started, so that a replacement is another life of the same role.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    found = {"proportional_bytes": _kib(proportional, "Pss")}
    found |= {"descriptors": descriptors, "data_files": data_files}
    found |= {name: _kib(status, field) for field, name in _STATUS_FIELDS.items()}
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


def _number(text: str, field: str) -> int:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    return 0


def _kib(text: str, field: str) -> int:
    return _number(text, field) * 1024


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
