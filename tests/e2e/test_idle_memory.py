"""Memory of a broker that has nothing to do: what all its processes have, shared pages counted once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from danube.core import kernels
from tests.broker_process import BrokerProcess, free_port

MIB = 1024 * 1024
IDLE_BYTES_MAX = 150 * MIB  # 130 alone on a host, as shared libraries count in full there


def proportional_bytes(pid: int) -> int:
    """Pages of a process, each divided by the number of processes that have it (proc(5))."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_an_idle_broker_of_two_workers_takes_little_memory(tmp_path: Path) -> None:
    if not kernels.load().available:
        pytest.skip("no kernels here")
    arguments = ["--metrics-port", str(free_port())]
    # Imports may read this variable, so the broker is not forked from the tests and shares nothing with them.
    alone = {"OF_ITS_OWN": "1"}
    with BrokerProcess(tmp_path / "data", workers=2, arguments=arguments, environment=alone) as process:
        found = {name: proportional_bytes(pid) for name, pid in process.processes().items()}
    assert set(found) == {"supervisor", "worker-0", "worker-1", "metrics"}
    shown = {name: f"{size / MIB:.0f} MiB" for name, size in found.items()}
    assert sum(found.values()) < IDLE_BYTES_MAX, shown
