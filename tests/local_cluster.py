"""``scripts/cluster``: brokers on loopback that make a cluster, with one directory as their store.

All of it lies in DANUBE_CLUSTER_DIR, or in ``cluster-run`` of the repository: ``cluster.json`` (ports, and
which processes were started), and of each broker its data (``b1``) and its output (``b1.log``).  Only
processes that stand in ``cluster.json`` are ever signalled, by id and time of start.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.broker_process import ROOT, free_port
from tests.process_session import ProcessSession

DIRECTORY_VARIABLE = "DANUBE_CLUSTER_DIR"
READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0
SIZE_MAX = 9
LOCK = "lock"
STATE = "cluster.json"
STORE = "store"
DOORS = ("native", "grpc", "admin", "raft")


class Refused(Exception):
    """What was asked for cannot be done as it stands: exit code 2."""


class Failed(Exception):
    """A broker did not do what was asked: exit code 1."""


@dataclass
class Broker:
    """One broker: where it listens, and the process that runs it, or did."""

    number: int
    ports: dict[str, int]
    process: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"b{self.number}"

    @property
    def session(self) -> ProcessSession | None:
        return ProcessSession(**self.process) if self.process else None

    def state(self) -> str:
        """running, paused, stopped (also when it was killed)."""
        letter = self.session.leader_state() if self.session else ""
        return "stopped" if not letter else "paused" if letter in "Tt" else "running"

    def address(self, door: str) -> str:
        return f"127.0.0.1:{self.ports[door]}"


@dataclass
class LocalCluster:
    """The brokers of one directory; ``save`` after every change of what runs."""

    directory: Path
    brokers: list[Broker] = field(default_factory=list)
    workers: str = "1"
    arguments: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, directory: Path, size: int, workers: str, arguments: Sequence[str]) -> LocalCluster:
        """Choose ports for new brokers; raises Refused for a directory that holds something else."""
        if any(one.name != LOCK for one in directory.iterdir()):
            raise Refused(
                f"{directory} is not empty and holds no cluster; set {DIRECTORY_VARIABLE} to another"
            )
        ports: set[int] = set()
        while len(ports) < size * len(DOORS):
            ports.add(free_port())
        brokers = [Broker(number, {door: ports.pop() for door in DOORS}) for number in range(1, size + 1)]
        (directory / STORE).mkdir()
        cluster = cls(directory, brokers, workers, list(arguments))
        cluster.save()
        return cluster

    @classmethod
    def load(cls, directory: Path) -> LocalCluster:
        """What is there; raises Refused when nothing is."""
        try:
            kept = json.loads((directory / STATE).read_text())
            brokers = [Broker(**one) for one in kept["brokers"]]
            return cls(directory, brokers, kept["workers"], kept["arguments"])
        except FileNotFoundError:
            raise Refused(f"there is no cluster in {directory}; begin with: scripts/cluster up 3") from None
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(
                f"{directory / STATE} is not what was written ({error}); remove {directory}"
            ) from None

    def save(self) -> None:
        kept = {
            "workers": self.workers,
            "arguments": self.arguments,
            "brokers": [asdict(one) for one in self.brokers],
        }
        new = self.directory / f"{STATE}.new"
        new.write_text(json.dumps(kept, indent=1) + "\n")
        new.replace(self.directory / STATE)

    def broker(self, number: int) -> Broker:
        if not 1 <= number <= len(self.brokers):
            raise Refused(f"there is no broker {number}; this cluster has 1 to {len(self.brokers)}")
        return self.brokers[number - 1]

    def log_path(self, broker: Broker) -> Path:
        return self.directory / f"{broker.name}.log"

    # -- processes --------------------------------------------------------------------------------

    def launch(self, broker: Broker) -> None:
        """Start its process; it is written down before anything else is done."""
        seeds = ",".join(one.address("raft") for one in self.brokers)
        command = [
            *(sys.executable, "-m", "danube", "start", "--host", "127.0.0.1", "--workers", self.workers),
            *("--data-dir", str(self.directory / broker.name)),
            *("--storage", (self.directory / STORE).as_uri()),
            *("--native-port", str(broker.ports["native"]), "--grpc-port", str(broker.ports["grpc"])),
            *("--admin-port", str(broker.ports["admin"]), "--raft-addr", broker.address("raft")),
            *("--seed-nodes", seeds, *self.arguments),
        ]
        environment = {name: value for name, value in os.environ.items() if name != DIRECTORY_VARIABLE}
        with self.log_path(broker).open("ab") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment, start_new_session=True,
            )  # fmt: skip
        broker.process = asdict(ProcessSession.of(process.pid))
        self.save()
        process.returncode = 0  # it is to outlive this program, which does not wait for it

    def wait_ready(self, brokers: Sequence[Broker]) -> None:
        """Until all serve; raises Failed with the end of a broker's output."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        for broker in brokers:
            while not self.ready(broker):
                if broker.state() == "stopped" or time.monotonic() > deadline:
                    lines = self.log_path(broker).read_text(errors="replace").splitlines()[-12:]
                    raise Failed(f"broker {broker.number} does not serve:\n" + "\n".join(lines))
                time.sleep(0.05)

    def ready(self, broker: Broker) -> bool:
        """Whether it says so itself, and takes connections."""
        with suppress(OSError, ValueError, KeyError):
            said = json.loads((self.directory / broker.name / "danube.json").read_text())
            if broker.process and said["ready"] and said["pid"] == broker.process["pid"]:
                socket.create_connection(("127.0.0.1", broker.ports["native"]), 1).close()
                return True
        return False

    def end(self, broker: Broker) -> None:
        """Stop it in order, by force where that takes too long."""
        session = broker.session
        if session is None:
            return
        session.send(signal.SIGCONT)
        session.terminate()
        if not session.wait_gone(STOP_TIMEOUT_S):
            session.kill()

    def end_all(self) -> None:
        """Stop all at once, so that none waits for partitions of another."""
        sessions = [broker.session for broker in self.brokers if broker.session is not None]
        for session in sessions:
            session.send(signal.SIGCONT)
            session.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for session in sessions:
            if not session.wait_gone(max(0.0, deadline - time.monotonic())):
                session.kill()

    def remove(self) -> None:
        """What this program made; anything else in the directory stays."""
        for broker in self.brokers:
            shutil.rmtree(self.directory / broker.name, ignore_errors=True)
            self.log_path(broker).unlink(missing_ok=True)
        shutil.rmtree(self.directory / STORE, ignore_errors=True)
        for name in (STATE, LOCK):
            (self.directory / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.directory.rmdir()


def place() -> Path:
    return Path(os.environ.get(DIRECTORY_VARIABLE) or ROOT / "cluster-run").absolute()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One change at a time; raises Refused while another command works on the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused(f"another command works on {directory}; wait for it") from None
        yield


if __name__ == "__main__":
    from tests.local_cluster_commands import main

    sys.exit(main(sys.argv[1:]))
