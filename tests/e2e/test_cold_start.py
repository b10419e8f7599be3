"""First starts: kernels are compiled beside the broker, whatever place there is for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import danube.sync
from danube.core.kernels import jit
from tests.broker_process import ROOT, BrokerProcess, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(jit.reason), reason=jit.reason)]

SERVES_S = 15.0  # 3 s on a quiet machine; compiling before serving takes longer than this
COMPILED_S = 280.0
COMPILING = "compiling kernels beside the broker"
COMPILED = "kernels are compiled"
USED = "kernels are used from now on"  # by the supervisor and each worker


@pytest.fixture
def process(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that finds no kernels."""
    made = BrokerProcess(
        tmp_path / "data", workers=2, environment={"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    )
    yield made
    made.stop()


def output(process: BrokerProcess) -> str:
    return process.output_path.read_text()


def publish(process: BrokerProcess, first: int, count: int) -> None:
    with danube.sync.connect(process.address) as client, client.producer("/default/cold") as producer:
        for start in range(first, first + count, 100):
            producer.send_many([b"%d" % number for number in range(start, start + 100)])


def consume(process: BrokerProcess, count: int) -> list[int]:
    with (
        danube.sync.connect(process.address) as client,
        client.consumer("/default/cold", f"of-{uuid4()}", start="earliest") as consumer,
    ):
        found: list[int] = []
        while len(found) < count:
            message = consumer.receive(timeout=30)
            assert message is not None
            found.append(int(message.payload))
            message.ack()
        return found


def test_a_first_start_serves_at_once_and_goes_over_to_kernels(process: BrokerProcess) -> None:
    """What the twins wrote the kernels read, and the next start has them from the disk."""
    began = time.monotonic()
    process.start()
    assert time.monotonic() - began < SERVES_S
    publish(process, 0, 1_000)
    assert consume(process, 1_000) == list(range(1_000))
    assert COMPILING in output(process) and COMPILED not in output(process)
    wait_until(lambda: COMPILED in output(process), COMPILED_S, "kernels are compiled")
    assert "kernels" not in process.processes(), "who compiled has ended"
    wait_until(lambda: output(process).count(USED) == 3, 10, "all processes use them")
    publish(process, 1_000, 1_000)
    assert consume(process, 2_000) == list(range(2_000))
    process.kill_worker(0)
    publish(process, 2_000, 1_000)
    assert consume(process, 3_000) == list(range(3_000))
    process.restart()
    assert consume(process, 3_000) == list(range(3_000))
    assert output(process).count(COMPILING) == 1


def test_without_a_place_for_kernels_a_broker_serves_and_stops_at_once(tmp_path: Path) -> None:
    """A file where the folder should be refuses root as well.  Kernels are being compiled all the while."""
    (tmp_path / "kernels").touch()
    process = BrokerProcess(tmp_path / "data", environment={"NUMBA_CACHE_DIR": str(tmp_path / "kernels")})
    try:
        began = time.monotonic()
        process.start()
        assert time.monotonic() - began < SERVES_S
        publish(process, 0, 100)
        assert consume(process, 100) == list(range(100))
        assert "kernels" in process.processes()
    finally:
        began = time.monotonic()
        process.stop()
    assert time.monotonic() - began < SERVES_S


def test_a_detached_first_start_tells_what_it_does(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    danube_command = [sys.executable, "-m", "danube"]
    place = ["--data-dir", str(tmp_path / "data")]
    ports = ["--native-port", "0", "--grpc-port", "0", "--admin-port", "0", "--workers", "1"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*danube_command, *words], env=environment, capture_output=True, text=True, timeout=60
        )

    began = time.monotonic()
    started = run("start", "--detach", *place, *ports)
    try:
        assert started.returncode == 0, started.stderr
        assert time.monotonic() - began < SERVES_S
        assert COMPILING in started.stderr
    finally:
        assert run("stop", *place).returncode == 0
