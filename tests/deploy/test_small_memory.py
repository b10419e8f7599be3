"""A broker in a control group of the kernel with 256 MiB, as in a small container."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import ROOT, BrokerProcess, wait_until

LIMIT_BYTES = 256 << 20
HIERARCHIES = {"memory": "memory.limit_in_bytes", ".": "memory.max"}  # v1, v2
pytestmark = pytest.mark.slow


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with the limit, whichever version the kernel has."""
    folder = next((made for made in map(limited, HIERARCHIES) if made), None)
    if folder is None:
        pytest.skip("this user may make no control group that limits memory")
    yield folder
    wait_until(lambda: removed(folder), 10, f"{folder} without a process")


def limited(hierarchy: str) -> Path | None:
    folder = Path("/sys/fs/cgroup") / hierarchy / f"danube-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        (folder / HIERARCHIES[hierarchy]).write_text(str(LIMIT_BYTES))
    except OSError:
        folder.rmdir()
        return None
    return folder


def removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def times_killed(group: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        if (group / name).exists():
            words = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(words["oom_kill"])
    raise AssertionError(f"{group} counts no kills")


def fill(broker: BrokerProcess) -> None:
    """Publish more bytes than the group may have memory."""
    command = ["bench", "publish", "-s", broker.address, "-t", "/default/large", "--size", "1000"]
    subprocess.run(
        [sys.executable, "-m", "danube", *command, "--count", "400000"], cwd=ROOT, check=True, timeout=200
    )


def test_it_starts_one_worker_takes_more_than_its_memory_and_starts_again(
    group: Path, tmp_path: Path
) -> None:
    inside = ("sh", "-c", f'echo $$ >{group}/cgroup.procs; exec "$@"', "inside")
    broker = BrokerProcess(tmp_path / "data", workers="auto", prefix=inside)
    with broker:
        assert "memory limit of the control group: 256 MiB" in broker.output_path.read_text()
        assert len(broker.worker_pids) == 1
        fill(broker)
        broker.stop()
        # What the log wrote fills the group now, and the kernel drops it where memory is wanted.
        broker.start()
        assert times_killed(group) == 0
