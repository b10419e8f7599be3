"""What a figure was measured on: hardware, kernel, software, file system and state of the tree; its memory.

Memory is touched right before it is measured: a guest's free memory may not be there.  Some hosts take free
pages back within seconds, and the first write to such a page costs as much as ten to twenty later ones.  A
file written and deleted gets its pages from the kernel and gives them back, and the next file gets the same;
so passes are repeated until one takes about as long as the one before it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
import timeit
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("uvloop", "numpy", "numba", "google-crc32c", "msgspec")
PASSES_MAX = 8
_ALIKE = 0.75
_PIECE = bytes(1 << 20)

ROOT = Path(__file__).resolve().parent.parent


def fingerprint(data_dir: Path) -> dict[str, Any]:
    """Facts that decide whether two figures may be compared."""
    models = (line.partition(":")[2].strip() for line in lines_of("/proc/cpuinfo") if "model name" in line)
    return {
        "cpu": next(models, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "python_call_ns": python_call_ns(),
        "packages": {name: _version(name) for name in PACKAGES},
        "filesystem": file_system(data_dir),
        "tcp_congestion_default": "".join(lines_of("/proc/sys/net/ipv4/tcp_congestion_control")),
        "load_average": round(os.getloadavg()[0], 2),
        "commit": _commit(),
    }


def file_system(path: Path) -> str:
    """Type of the file system that holds ``path``."""
    target, best = path.resolve(), (0, "unknown")
    for line in lines_of("/proc/mounts"):
        _, mount, kind, *_ = line.split()
        if target.is_relative_to(mount):
            best = max(best, (len(mount), kind), key=lambda one: one[0])
    return best[1]


def python_call_ns() -> float:
    """What calling an empty function takes at best: between hosts of one model it differs by half."""
    seconds = timeit.repeat("f()", "def f(): pass", repeat=50, number=2_000)
    return round(min(seconds) / 2_000 * 1e9, 1)


def stolen_s() -> float:
    """Seconds of all processors that a hypervisor gave to others since this host has started (proc(5))."""
    fields = next(iter(lines_of("/proc/stat")), "").split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    """Short hash of the tree that was measured, with ``+`` when it had changes."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def touch(directory: Path, size: int) -> int:
    """Touch about ``size`` bytes by way of a file in ``directory``; return how many passes it took."""
    before_s = 0.0
    for number in range(1, PASSES_MAX + 1):
        started, path = time.monotonic(), directory / "touched"
        with path.open("wb", buffering=0) as file:
            path.unlink()
            for _ in range(size // len(_PIECE)):
                file.write(_PIECE)
        took_s = time.monotonic() - started
        if min(before_s, took_s) >= _ALIKE * max(before_s, took_s):
            return number
        before_s = took_s
    return PASSES_MAX
