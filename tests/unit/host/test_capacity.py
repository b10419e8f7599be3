"""Processors and memory by a tree of files like the kernel's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from danube.host.capacity import (
    available_memory_bytes,
    usable_cores,
    used_memory_share,
    workers_wanted,
)
from danube.limits import MIB, WORKER_MEMORY_BYTES, WORKERS_MAX

GIB = 1024 * MIB
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\nHugePages_Total: 0\n"
V2 = {"proc/self/cgroup": "0::/pods/broker\n"}
V1 = {"proc/self/cgroup": "4:memory:/docker/a1\n3:cpu,cpuacct:/docker/a1\n1:name=systemd:/\n"}


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def tree(root: Path, *parts: Mapping[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | {k: v for part in parts for k, v in part.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(group: str, **values: str) -> dict[str, str]:
    return {f"sys/fs/cgroup/{group}/{name.replace('_', '.', 1)}": text for name, text in values.items()}


def v1(controller: str, **values: str) -> dict[str, str]:
    """Files of a container that sees the host's names: they lie in the root."""
    return {f"sys/fs/cgroup/{controller}/{controller}.{name}": text for name, text in values.items()}


def memory_v2(limit: object, used: int = 0, dropped: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {dropped}\n"
    return v2("pods/broker", memory_max=f"{limit}\n", memory_current=f"{used}\n", memory_stat=stat)


def memory_v1(limit: int, used: int = 0, dropped: int = 0) -> dict[str, str]:
    stat = f"cache 5\ninactive_file 1\ntotal_inactive_file {dropped}\n"
    names = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}
    return {f"sys/fs/cgroup/memory/{name}": text for name, text in names.items()}


def test_without_control_groups_the_processors_count(tmp_path: Path) -> None:
    wanted = workers_wanted(tree(tmp_path))
    assert (wanted.value, wanted.whose) == (8, "processors: 8 cores, one worker for each")


@pytest.mark.parametrize(
    ("text", "cores", "workers"), [("max 100000", 8, 8), ("150000 100000", 1.5, 2), ("20000 100000", 0.2, 1)]
)
def test_a_limit_of_cpu_counts_in_v2(tmp_path: Path, text: str, cores: float, workers: int) -> None:
    tree(tmp_path, V2, v2("pods/broker", cpu_max=text + "\n"))
    assert (usable_cores(tmp_path).value, workers_wanted(tmp_path).value) == (cores, workers)


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 2.5), ("?", 8)])
def test_a_limit_of_cpu_counts_in_v1(tmp_path: Path, quota: str, cores: float) -> None:
    tree(tmp_path, V1, v1("cpu", cfs_quota_us=quota + "\n", cfs_period_us="100000\n"))
    assert usable_cores(tmp_path).value == cores


def test_a_group_further_up_binds_too(tmp_path: Path) -> None:
    tree(tmp_path, V2, v2("pods/broker", cpu_max="max 100000\n"), v2("pods", cpu_max="300000 100000\n"))
    wanted = workers_wanted(tmp_path)
    assert (wanted.value, wanted.whose) == (
        3,
        "CPU limit of the control group: 3 cores, one worker for each",
    )


@pytest.mark.parametrize("memory", [memory_v2, memory_v1])
@pytest.mark.parametrize(("limit", "workers"), [(256 * MIB, 1), (GIB, 2), (2 * GIB, 5), (16 * GIB, 8)])
def test_a_limit_of_memory_bounds_the_workers(tmp_path: Path, memory, limit: int, workers: int) -> None:
    tree(tmp_path, V1 if memory is memory_v1 else V2, memory(limit))
    wanted = workers_wanted(tmp_path)
    assert wanted.value == workers
    assert wanted.whose.startswith("memory limit of the control group" if workers < 8 else "processors")


def test_a_small_machine_bounds_the_workers(tmp_path: Path) -> None:
    tree(tmp_path, {"proc/meminfo": f"MemTotal: {3 * WORKER_MEMORY_BYTES // 1024} kB\n"})
    wanted = workers_wanted(tmp_path)
    assert (wanted.value, wanted.whose) == (
        3,
        "memory of the machine: 1152 MiB, one worker for each 384",
    )


def test_a_large_machine_has_no_more_than_a_broker_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(300)))
    wanted = workers_wanted(tree(tmp_path))
    assert (wanted.value, wanted.whose) == (WORKERS_MAX, "a broker has at most 64 workers")


def test_no_limit_is_none(tmp_path: Path) -> None:
    for root, parts in (
        (tmp_path / "v2", (V2, memory_v2("max"))),
        (tmp_path / "v1", (V1, memory_v1(2**63 - 4096))),
    ):
        tree(root, *parts)
        assert workers_wanted(root).value == 8
        assert available_memory_bytes(root) == 48 * GIB
        assert used_memory_share(root) == 0.25


@pytest.mark.parametrize(("memory", "groups"), [(memory_v2, V2), (memory_v1, V1)])
def test_pages_of_files_that_can_be_dropped_are_available(tmp_path: Path, memory, groups) -> None:
    tree(tmp_path, groups, memory(400 * MIB, used=390 * MIB, dropped=290 * MIB))
    assert available_memory_bytes(tmp_path) == 300 * MIB
    assert used_memory_share(tmp_path) == 0.25


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    tree(tmp_path, V2, memory_v2(MIB, used=2 * MIB))
    assert (available_memory_bytes(tmp_path), used_memory_share(tmp_path)) == (0, 1.0)


def test_a_system_without_these_files_is_bounded_by_its_processors(tmp_path: Path) -> None:
    assert workers_wanted(tmp_path).value == 8
    assert available_memory_bytes(tmp_path) is None
    assert used_memory_share(tmp_path) == 0
