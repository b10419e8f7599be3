"""Processors and memory that this process may use, by the machine and by its control groups (v1 and v2).

A limit of any group from this process's own up to the root binds it.  A container may see the names of the
host's groups and the files of its own: then the names lead nowhere, and the root's files are the container's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from danube.limits import MIB, WORKER_MEMORY_BYTES, WORKERS_MAX

ROOT: Final = Path("/")
_UNLIMITED: Final = 1 << 62  # v1 writes the largest number of pages where there is no limit


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount that may be used, and whose limit it is."""

    value: float
    whose: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Memory of one control group; ``used`` is without pages of files that the kernel drops first."""

    limit: int
    used: int


def workers_wanted(root: Path = ROOT) -> Amount:
    """Return the number of workers that suits this process, and the limit that chose it."""
    cores, memory = usable_cores(root), _memory_limit(root)
    amounts = [
        Amount(math.ceil(cores.value), f"{cores.whose}: {cores.value:g} cores, one worker for each"),
        Amount(WORKERS_MAX, f"a broker has at most {WORKERS_MAX} workers"),
    ]
    if memory is not None:
        sizes = f"{memory.value // MIB:.0f} MiB, one worker for each {WORKER_MEMORY_BYTES // MIB}"
        amounts.append(Amount(memory.value // WORKER_MEMORY_BYTES, f"{memory.whose}: {sizes}"))
    least = min(amounts, key=lambda one: one.value)
    return Amount(max(1, int(least.value)), least.whose)


def usable_cores(root: Path = ROOT) -> Amount:
    """Return the processors' time that this process may use at most, in cores."""
    amounts = [Amount(_processors(), "processors")]
    for folder, unified in _groups("cpu", root):
        if unified:
            words = _read(folder / "cpu.max").split()
        else:
            words = [
                *_read(folder / "cpu.cfs_quota_us").split(),
                *_read(folder / "cpu.cfs_period_us").split(),
            ]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            amounts.append(Amount(int(words[0]) / int(words[1]), "CPU limit of the control group"))
    return min(amounts, key=lambda one: one.value)


def available_memory_bytes(root: Path = ROOT) -> int | None:
    """Return the memory that can still be allocated; None where the system does not say it."""
    amounts = [max(0, group.limit - group.used) for group in _memory_groups(root)]
    if (available := _meminfo(root).get("MemAvailable")) is not None:
        amounts.append(available)
    return min(amounts, default=None)


def used_memory_share(root: Path = ROOT) -> float:
    """Return the used share of the group that is nearest to its limit, else of the machine's memory."""
    shares = [min(1.0, group.used / group.limit) for group in _memory_groups(root) if group.limit]
    sizes = _meminfo(root)
    if not shares and sizes.get("MemTotal") and "MemAvailable" in sizes:
        shares = [1.0 - sizes["MemAvailable"] / sizes["MemTotal"]]
    return max(shares, default=0.0)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_limit(root: Path) -> Amount | None:
    amounts = [Amount(group.limit, "memory limit of the control group") for group in _memory_groups(root)]
    if (total := _meminfo(root).get("MemTotal")) is not None:
        amounts.append(Amount(total, "memory of the machine"))
    return min(amounts, key=lambda one: one.value, default=None)


def _memory_groups(root: Path) -> Iterator[_Group]:
    """Yield the groups around this process that have a limit."""
    for folder, unified in _groups("memory", root):
        if unified:
            names = ("memory.max", "memory.current", "inactive_file")
        else:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = (_read(folder / name).strip() for name in names[:2])
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            kinds = dict(line.partition(" ")[::2] for line in _read(folder / "memory.stat").splitlines())
            yield _Group(int(limit), max(0, int(used) - int(kinds.get(names[2], 0))))


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of ``controller`` from this process's group up; True: of v2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        place = Path(name.strip("/"))
        for folder in (place, *place.parents):
            yield top / folder, controllers == ""


def _meminfo(root: Path) -> dict[str, int]:
    """Return the machine's memory in bytes by the kernel's names; empty where the kernel has no such file."""
    lines = (line.partition(":") for line in _read(root / "proc/meminfo").splitlines())
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in lines if rest.endswith("kB")}


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
