"""Drivers that tests kill: with the JVM, and with its Python workers, which are in groups of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.broker_process import ROOT, BrokerFailed, alive, descendants, die_with_parent, wait_until
from tests.spark.conftest import TUNING

DRIVER_S = 600.0  # a driver works within 25 s here; one that has ended is noticed at once
QUICK = {"spark.ui.enabled": "false", "spark.driver.extraJavaOptions": TUNING}


def start_driver(module: str, words: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """``python -m module words`` in a session of its own."""
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYSPARK_DRIVER_PYTHON": sys.executable,
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def wait_for_driver(
    driver: subprocess.Popen[bytes], condition: Callable[[], bool], what: str, output: Path
) -> None:
    """Wait for ``condition``; BrokerFailed tells why in vain, with the end of the driver's output."""
    deadline_s = time.monotonic() + DRIVER_S
    while not condition():
        if (ended := driver.poll() is not None) or time.monotonic() > deadline_s:
            why = f"the driver ended with {driver.returncode}" if ended else f"not within {DRIVER_S} s"
            raise BrokerFailed(f"{why}: {what}\n{output.read_text(errors='replace')[-4000:]}")
        time.sleep(0.05)


def kill_tree(driver: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the driver and all that it started; none of them is left when this returns."""
    pids = [driver.pid, *descendants(driver.pid)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait(10)
    wait_until(lambda: not any(map(alive, pids)), 10, "the killed processes are gone")


def spark_home() -> Path:
    """Where pip has put Spark, with its scripts."""
    import pyspark

    return Path(pyspark.__file__).parent


def shell_environment() -> dict[str, str]:
    """Of a shell in which Danube is installed and Java is known."""
    from danube.spark.java import find_java

    return {
        **os.environ,
        "JAVA_HOME": str(find_java()),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_JAVA_OPTS": TUNING,
        "SPARK_DAEMON_MEMORY": "256m",
    }


def submit(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``spark-submit words``; ``environment`` goes over shell_environment()."""
    quick = ["--conf", f"spark.driver.extraJavaOptions={TUNING}", "--conf", "spark.ui.enabled=false"]
    try:
        return subprocess.run(
            [str(spark_home() / "bin" / "spark-submit"), *quick, *words],
            capture_output=True, text=True, cwd=ROOT, env={**shell_environment(), **environment},
            timeout=DRIVER_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        output = (error.stderr or b"").decode(errors="replace")
        raise BrokerFailed(f"spark-submit did not end within {DRIVER_S} s\n{output[-4000:]}") from None
