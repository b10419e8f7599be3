"""Load of this host's broker: its workers' shared counters, and the kernel's figures in /proc.

Rates are between two readings.  A figure that cannot be read counts as 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from danube.core.placement.load_report import LoadReport
from danube.core.placement.shares import Demand
from danube.host import clock
from danube.host.capacity import ROOT, usable_cores, used_memory_share
from danube.ipc.counters import Counter, snapshot
from danube.ipc.usage import NOT_USED, used

if TYPE_CHECKING:
    from danube.ipc.region import Region

_TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class LoadSource:
    """Source of load reports; the first report's rates count from when it was made."""

    def __init__(self, region: Region, *, root: Path = ROOT) -> None:
        self._region = region
        self._root = root
        self._cores = usable_cores(root).value
        self._at_ns = clock.monotonic_ns()
        self._cpu_by_pid: dict[int, int] = {}
        self._bytes, self._records = self._totals(snapshot(region))
        self._used = used(region)

    def report(self) -> LoadReport:
        now_ns = clock.monotonic_ns()
        seconds = max(1e-3, (now_ns - self._at_ns) / 1e9)
        self._at_ns = now_ns
        counters = snapshot(self._region)
        total_bytes, total_records = self._totals(counters)
        moved_bytes, self._bytes = total_bytes - self._bytes, total_bytes
        moved_records, self._records = total_records - self._records, total_records
        busy_ns = self._busy_ns(one[Counter.PID.name.lower()] for one in counters)
        return LoadReport(
            cpu=round(min(1.0, busy_ns / 1e9 / seconds / self._cores), 3),
            memory=round(used_memory_share(self._root), 3),
            bytes_per_s=round(max(0.0, moved_bytes / seconds), 1),
            records_per_s=round(max(0.0, moved_records / seconds), 1),
            backlog_records=sum(one["backlog_records"] for one in counters),
            partition_count=sum(one["partitions_open"] for one in counters),
            usage=self._usage(seconds),
        )

    def _usage(self, seconds: float) -> dict[str, Demand]:
        """Return what was taken of sums since the last report, without those that were not touched."""
        former, self._used = self._used, used(self._region)
        found = {}
        for key, now in self._used.items():
            before = former.get(key, NOT_USED)
            records, size_bytes = now.records - before.records, now.size_bytes - before.size_bytes
            if records > 0 or now.held > before.held or now.stored_bytes:
                found[str(key)] = Demand(
                    round(max(0, records) / seconds, 1), round(max(0, size_bytes) / seconds, 1),
                    now.held > before.held, now.stored_bytes,
                )  # fmt: skip
        return found

    @staticmethod
    def _totals(counters: list[dict[str, int]]) -> tuple[int, int]:
        return (
            sum(one["bytes_in"] + one["bytes_out"] for one in counters),
            sum(one["records_in"] + one["records_out"] for one in counters),
        )

    def _busy_ns(self, pids: Iterable[int]) -> int:
        """Return the workers' processor time since the last reading; a new process counts from its start."""
        before, self._cpu_by_pid = self._cpu_by_pid, {}
        busy_ns = 0
        for pid in pids:
            used_ns = self._cpu_ns(pid) if pid else 0
            if used_ns:
                busy_ns += max(0, used_ns - before.get(pid, used_ns))
                self._cpu_by_pid[pid] = used_ns
        return busy_ns

    def _cpu_ns(self, pid: int) -> int:
        try:
            text = (self._root / "proc" / str(pid) / "stat").read_text("ascii", "replace")
            words = text.rpartition(")")[2].split()
            return (int(words[11]) + int(words[12])) * _TICK_NS  # utime, stime
        except (OSError, ValueError, IndexError):
            return 0
