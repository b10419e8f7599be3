"""The supervisor with a real mover on a directory as its store: forked, killed, hung, replaced, stopped last.

The broker under test is this file run as a program.  Its worker attaches one partition whenever it has a
connection and writes down what the mover tells.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from danube.broker.links import FrameReader, encode_frame
from danube.broker.mover.mover import run_mover
from danube.broker.processes.contexts import MoverContext, SupervisorSettings, WorkerContext
from danube.broker.processes.supervisor import run
from danube.config.loading import BrokerConfig
from danube.config.sections import StorageConfig
from danube.host import telemetry
from danube.wal.stores.directory import LocalStore
from danube.wal.tier.manifest import Manifest
from tests.e2e.test_supervisor import WAIT_S, gone, wait_until
from tests.unit.faulty_store import TOPIC, make_segments, newest_manifest
from tests.unit.wal_samples import IDENTITY

COUNT = 3


def _worker(context: WorkerContext) -> int:
    """Attach at every connection; tell what is uploaded; leave slowly."""
    context.ready()
    data_dir = context.settings.data_dir
    while not context.drain.requested:
        link = socket.socket(socket.AF_UNIX)
        link.connect(context.mover_address)
        directory = str(data_dir / "partitions" / IDENTITY.directory_name)
        fields = {
            "topic_id": IDENTITY.topic_id,
            "partition": IDENTITY.partition,
            "epoch": context.incarnation,
        }
        link.sendall(encode_frame("attach", topic=TOPIC, directory=directory, log_start=0, **fields))
        _read(context, link, data_dir / "told")
        link.close()
    time.sleep(0.3)
    (data_dir / "worker-ended").write_text(str(time.monotonic_ns()))
    return 0


def _read(context: WorkerContext, link: socket.socket, told: Path) -> None:
    frames = FrameReader()
    while not context.drain.requested:
        context.heartbeat()
        if not select.select([link], [], [], 0.05)[0]:
            continue
        data = link.recv(65_536)
        if not data:
            return
        for frame in frames.feed(data):
            if frame["kind"] != "state":
                continue
            count = len(Manifest.decode(frame["manifest"]))
            with told.open("a") as lines:
                lines.write(f"{count} {frame['error']}\n")


def _mover(context: MoverContext, config: BrokerConfig) -> None:
    data_dir = context.settings.data_dir
    with (data_dir / "movers").open("a") as lines:
        lines.write(f"{os.getpid()} {context.start_count}\n")
    if (data_dir / "die-young").exists():
        os._exit(3)
    run_mover(context, config)
    (data_dir / "mover-ended").write_text(str(time.monotonic_ns()))


def _main(options: dict[str, str | int]) -> int:
    telemetry.configure("info")
    data_dir = Path(str(options.pop("data_dir")))
    storage = StorageConfig(mode="shared_fs", url=f"file://{data_dir.parent}/store")
    config = BrokerConfig(data_dir=data_dir, storage=storage)
    settings = SupervisorSettings(
        data_dir=data_dir, workers=1, native_port=0, ring_bytes=65536,
        on_ready=lambda started: print("ready", flush=True), **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return run(settings, _worker, lambda context: _mover(context, config))


class Broker:
    def __init__(self, root: Path, **options: str | int) -> None:
        self.data_dir = root / "data"
        self.store = root / "store"
        self.store.mkdir()
        make_segments(self.data_dir / "partitions" / IDENTITY.directory_name, COUNT)
        text = json.dumps({"data_dir": str(self.data_dir), **options})
        self.process = subprocess.Popen(
            [sys.executable, __file__, text],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "DANUBE_KERNELS": "off", "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    def wait_ready(self) -> Broker:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.end()
        return self

    def movers(self) -> list[tuple[int, int]]:
        """Pid and start count of each mover so far."""
        path = self.data_dir / "movers"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines if len(line.split()) == 2]

    def told(self) -> list[str]:
        path = self.data_dir / "told"
        return path.read_text().splitlines() if path.exists() else []

    def end(self) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.terminate()
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out + err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    made: list[Broker] = []

    def make(**options: str | int) -> Broker:
        made.append(Broker(tmp_path, **options))
        return made[-1]

    yield make
    for broker in made:
        if broker.process.poll() is None:
            broker.process.kill()
        broker.process.communicate(timeout=WAIT_S)


def uploaded(broker: Broker) -> None:
    wait_until(lambda: f"{COUNT} " in broker.told(), "everything is uploaded")


def test_the_mover_uploads_and_ends_after_the_workers(start: Callable[..., Broker]) -> None:
    broker = start().wait_ready()
    uploaded(broker)
    code, output = broker.end()
    assert code == 0, output
    ended = [int((broker.data_dir / f"{name}-ended").read_text()) for name in ("worker", "mover")]
    assert ended == sorted(ended)
    assert "did not drain" not in output
    manifest = newest_manifest(LocalStore(broker.store))
    assert manifest is not None and len(manifest) == COUNT


def test_a_killed_mover_is_replaced_and_goes_on(start: Callable[..., Broker]) -> None:
    broker = start().wait_ready()
    uploaded(broker)
    (broker.data_dir / "told").unlink()
    first = broker.movers()[0][0]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(broker.movers()) == 2, "another mover runs")
    uploaded(broker)
    assert [count for _, count in broker.movers()] == [0, 1]
    assert broker.end()[0] == 0


def test_a_mover_that_hangs_is_killed_and_replaced(start: Callable[..., Broker]) -> None:
    broker = start(heartbeat_timeout_ms=1_500).wait_ready()
    uploaded(broker)
    os.kill(broker.movers()[0][0], signal.SIGSTOP)
    wait_until(lambda: len(broker.movers()) == 2, "another mover runs")
    code, output = broker.end()
    assert code == 0 and "mover gives no heartbeat and is killed" in output


def test_a_mover_that_cannot_run_does_not_stop_the_broker(start: Callable[..., Broker]) -> None:
    broker = start()
    (broker.data_dir / "die-young").touch()
    broker.wait_ready()
    wait_until(lambda: len(broker.movers()) >= 5, "it is tried again and again")
    assert broker.process.poll() is None
    (broker.data_dir / "die-young").unlink()
    uploaded(broker)
    assert broker.end()[0] == 0


def test_a_mover_that_does_not_drain_is_killed_at_its_deadline(start: Callable[..., Broker]) -> None:
    broker = start(mover_drain_timeout_ms=700, heartbeat_timeout_ms=60_000).wait_ready()
    uploaded(broker)
    pid = broker.movers()[0][0]
    os.kill(pid, signal.SIGSTOP)
    code, output = broker.end()
    assert code == 0 and "mover did not drain" in output and gone(pid)


def test_no_mover_outlives_a_killed_supervisor(start: Callable[..., Broker]) -> None:
    broker = start().wait_ready()
    uploaded(broker)
    broker.process.kill()
    wait_until(lambda: gone(broker.movers()[0][0]), "the mover ends with its supervisor")


if __name__ == "__main__":
    sys.exit(_main(json.loads(sys.argv[1])))
