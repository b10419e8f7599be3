"""Drivers that tests kill: with the JVM, and with its Python workers, which are in groups of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.broker_process import ROOT, alive, descendants, die_with_parent, wait_until


def start_driver(module: str, words: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """``python -m module words`` in a session of its own."""
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def kill_tree(driver: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the driver and all that it started; none of them is left when this returns."""
    pids = [driver.pid, *descendants(driver.pid)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait(10)
    wait_until(lambda: not any(map(alive, pids)), 10, "the killed processes are gone")
