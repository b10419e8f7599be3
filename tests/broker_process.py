"""A real broker in a process of its own, for tests, benchmarks and the crash checker.

The broker leads its own session and process group.  It dies with the thread that started it, or with the
process where a fork server starts it (PR_SET_PDEATHSIG): nothing is left even when the test runner itself is
killed with SIGKILL.
Only processes of that group and their descendants are ever signalled.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from danube.config.exposure import loopback
from tests import fork_server
from tests.fork_server import ROOT as ROOT
from tests.fork_server import die_with_parent as die_with_parent

READY_TIMEOUT_S = 180.0  # a first start compiles kernels, and a shared machine is slow for minutes
STOP_TIMEOUT_S = 15.0
_PORTS_FROM = 10_240
_RUNNERS_MAX = 8
_ports: tuple[int, Iterator[int]] | None = None  # of the process with this id


class BrokerFailed(Exception):
    """The broker did not do what was asked; the message holds the end of its output."""


def _own_ports() -> Iterator[int]:
    """Ports of this process: each test runner has a part of them, and none comes again before all have come.

    They lie under the ephemeral range: no client is handed one, and who restarts finds its own again.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    count = (max(end, 12_000) - _PORTS_FROM) // _RUNNERS_MAX
    runner = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first = _PORTS_FROM + (int(runner) if runner.isdecimal() else 0) % _RUNNERS_MAX * count
    start = random.SystemRandom().randrange(count)
    return cycle([first + (start + number) % count for number in range(count)])


def free_port() -> int:
    """A loopback port that is free now, and that nobody else of this run is given meanwhile."""
    global _ports
    if _ports is None or _ports[0] != os.getpid():
        _ports = os.getpid(), _own_ports()
    for port in islice(_ports[1], 1_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise BrokerFailed("no free loopback port")


def descendants(pid: int) -> list[int]:
    """Ids of all living descendants of ``pid``, parents first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        parent = queue.pop(0)
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with suppress(OSError):
                    children = [int(word) for word in (task / "children").read_text().split()]
                    found += children
                    queue += children
    return found


def group_of(leader: int) -> list[int]:
    """Ids of the living processes of a group but its leader.

    The kernel may leave children out of a list while one of them ends, so a kill asks for the group as well.
    """
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = place.read_text().rsplit(")", 1)[1].split()[:3]
            if int(group) == leader and state not in "ZX" and int(place.parent.name) != leader:
                found.append(int(place.parent.name))
    return found


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll ``condition`` every 10 ms; raise BrokerFailed naming ``what`` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise BrokerFailed(f"not within {timeout_s} s: {what}")
        time.sleep(0.01)


class BrokerProcess:
    """``python -m danube start`` on one data directory and one port, started and stopped at will."""

    def __init__(
        self,
        data_dir: Path,
        *,
        workers: int | str = 1,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        """``prefix`` runs the command elsewhere, for instance on the host of another network namespace."""
        self.data_dir = Path(data_dir)
        self.host = host
        self.workers = workers
        self.arguments = list(arguments)
        self.environment = dict(environment or {})
        self.prefix = list(prefix)
        self.port = free_port()
        self.grpc_port = free_port()
        self.admin_port = free_port()
        self.output_path = self.data_dir.parent / f"{self.data_dir.name}.output"
        self.ready: dict[str, Any] = {}
        self._process: fork_server.Process | None = None

    @property
    def address(self) -> str:
        return f"danube://{self.host}:{self.port}"

    @property
    def grpc_address(self) -> str:
        """``host:port`` of the Danube gRPC API."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def admin_address(self) -> str:
        """``host:port`` of the administration API over gRPC."""
        return f"{self.host}:{self.admin_port}"

    @property
    def pid(self) -> int:
        """Id of the supervisor."""
        return int(self.ready["pid"])

    @property
    def worker_pids(self) -> list[int]:
        """Ids of the worker processes, in the order of their numbers; 0 for one that is being replaced."""
        return [int(worker["pid"]) for worker in self._read_ready().get("workers", [])]

    @property
    def pids(self) -> list[int]:
        """The supervisor and everything under it."""
        return [self.pid, *descendants(self.pid)]

    def processes(self) -> dict[str, int]:
        """Process ids by role: ``supervisor``, ``worker-0``, ``mover``; only what runs at this moment.

        All but the supervisor are there too while it starts.
        """
        found = {"supervisor": self.pid} if self.ready and alive(self.pid) else {}
        for pid in self._own_pids()[1:]:
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("danube-") and alive(pid):
                    found[name.removeprefix("danube-")] = pid
        return found

    def statistics(self) -> dict[str, Any]:
        """What the broker wrote about itself: pid, addresses, workers with pid and incarnation."""
        return self._read_ready()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> BrokerProcess:
        """Start the process without waiting for it."""
        if self.running:
            raise BrokerFailed("the broker is running already")
        command = [
            *self.prefix,
            *(sys.executable, "-m", "danube", "start", "--data-dir", str(self.data_dir)),
            *("--native-port", str(self.port), "--workers", str(self.workers)),
            *("--grpc-port", str(self.grpc_port), "--admin-port", str(self.admin_port)),
            *("--host", self.host),
            *(() if loopback(self.host) else ("--insecure",)),  # hosts of tests are in networks of their own
            *self.arguments,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}
        with self.output_path.open("ab") as output:
            self._process = fork_server.popen(
                command, environment=environment, stdout=output, stderr=subprocess.STDOUT
            )
        return self

    def start(self, timeout_s: float = READY_TIMEOUT_S) -> BrokerProcess:
        """Start and wait until the broker says that it is ready and accepts a connection."""
        self.launch()
        try:
            self.wait_ready(timeout_s)
        except BrokerFailed:
            self.kill()
            raise
        return self

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        try:
            wait_until(self._answers, timeout_s, "broker ready")
        except BrokerFailed as error:
            if not self.running:
                raise
            raise BrokerFailed(f"{error}\n{self.output_tail()}") from None

    def _answers(self) -> bool:
        if not self.running:
            raise BrokerFailed(f"the broker ended with {self.exit_code}\n{self.output_tail()}")
        ready = self._read_ready()
        if not ready.get("ready") or int(ready["pid"]) not in self._own_pids():
            return False
        self.ready = ready
        with suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
            return True
        return False

    def _own_pids(self) -> list[int]:
        return [self._process.pid, *descendants(self._process.pid)] if self._process else []

    def _read_ready(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return dict(json.loads((self.data_dir / "danube.json").read_text()))
        return {}

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode if self._process else None

    def output_tail(self, size: int = 4_000) -> str:
        """The last characters of what the broker printed."""
        with suppress(OSError):
            return self.output_path.read_text(errors="replace")[-size:]
        return ""

    def terminate(self) -> None:
        """SIGTERM to the supervisor, without waiting."""
        os.kill(self.pid, signal.SIGTERM)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, wait, and return the exit code; raise BrokerFailed when it takes too long."""
        if self._process is None:
            return 0
        if self.running:
            self.terminate()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            tail = self.output_tail()
            self.kill()
            raise BrokerFailed(f"the broker did not stop within {timeout_s} s\n{tail}") from None

    def pause(self) -> None:
        """SIGSTOP to every process of the broker, the supervisor first; kill() ends them all the same."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL to every process of the broker at once; leaves nothing running."""
        if self._process is None:
            return
        pids = [self._process.pid, *sorted({*self._own_pids()[1:], *group_of(self._process.pid)})]
        fork_server.note_killed(pids[1:])
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for pid in pids:
            wait_until(lambda pid=pid: not alive(pid), 10, f"process {pid} gone after SIGKILL")  # type: ignore[misc]

    def kill_worker(self, number: int = 0) -> int:
        """SIGKILL one worker and return the process id it had."""
        pid = self.running_workers()[number]
        os.kill(pid, signal.SIGKILL)
        return pid

    def running_workers(self, timeout_s: float = 10.0) -> list[int]:
        """Worker ids once none of them is being replaced."""
        wait_until(
            lambda: bool(self.worker_pids) and all(map(alive, self.worker_pids)), timeout_s, "all workers run"
        )
        return self.worker_pids

    def wait_worker_replaced(self, old_pid: int, timeout_s: float = 10.0) -> None:
        """Wait until the worker that had ``old_pid`` runs again under another id."""
        count = len(self.worker_pids)
        wait_until(
            lambda: old_pid not in self.worker_pids and sum(map(alive, self.worker_pids)) >= count,
            timeout_s,
            f"worker {old_pid} replaced\n{self.output_tail()}",
        )

    def restart(self) -> BrokerProcess:
        """Stop (gracefully when running) and start again on the same directory and port."""
        self.stop()
        return self.start()

    def __enter__(self) -> BrokerProcess:
        return self if self.running else self.start()

    def __exit__(self, *exception: object) -> None:
        self.kill()


class Brokers:
    """Brokers of one test, each in a directory of its own under ``place`` where none is named."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._made: list[BrokerProcess] = []

    def make(self, data_dir: Path | None = None, *, start: bool = True, **options: Any) -> BrokerProcess:
        """A running one; ``start=False`` only prepares it."""
        process = BrokerProcess(data_dir or self._place / f"data-{len(self._made)}", **options)
        self._made.append(process)
        return process.start() if start else process

    def kill(self) -> None:
        for process in self._made:
            process.kill()
