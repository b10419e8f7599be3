"""A real controller in a process of its own: one member of a cluster on loopback, killed at will."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from danube.cluster.control.calls import Change, Changed, ClusterStatus, Status
from danube.cluster.control.cluster_log import ClusterLog, copy_exists
from danube.cluster.control.door import ControllerClient
from danube.cluster.links.tls import TlsFiles
from danube.cluster.raft.engine import Members
from danube.errors import DanubeError
from tests import fork_server
from tests.broker_process import ROOT, free_port, wait_until

HEARTBEAT_MS = 100
METADATA = "metadata"


class MemberProcess:
    """``python -m tests.cluster_process`` on one data directory and one port."""

    def __init__(
        self,
        data_dir: Path,
        *,
        seeds: Sequence[str] = (),
        join: Sequence[str] = (),
        port: int = 0,
        tls: TlsFiles | None = None,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        self.data_dir = data_dir
        self.port = port or free_port()
        self.address = f"{host}:{self.port}"
        self.prefix = list(prefix)
        self.seeds = list(seeds)
        self.join = list(join)
        self.tls = tls
        self.socket_path = str(data_dir.parent / f"{data_dir.name}.sock")
        self.output_path = data_dir.parent / f"{data_dir.name}.output"
        self._process: fork_server.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    @property
    def output(self) -> str:
        return self.output_path.read_text() if self.output_path.exists() else ""

    def start(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "MEMBER_DATA_DIR": str(self.data_dir),
            "MEMBER_SOCKET": self.socket_path,
            "DANUBE_CLUSTER__RAFT_ADDR": self.address,
            "DANUBE_CLUSTER__SEED_NODES": ",".join(self.seeds),
            "DANUBE_CLUSTER__JOIN": ",".join(self.join),
            "DANUBE_CLUSTER__HEARTBEAT": f"{HEARTBEAT_MS}ms",
        }
        if self.tls is not None:
            environment |= {
                "DANUBE_CLUSTER__CERT_FILE": self.tls.cert_file,
                "DANUBE_CLUSTER__KEY_FILE": self.tls.key_file,
                "DANUBE_CLUSTER__CA_FILE": self.tls.ca_file,
            }
        with self.output_path.open("ab") as output:
            self._process = fork_server.popen(
                [*self.prefix, sys.executable, "-m", "tests.cluster_process"],
                cwd=ROOT, environment=environment, stdout=output, stderr=output,
            )  # fmt: skip

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stop(self) -> int:
        return self._signal(signal.SIGTERM)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)
        return self._process.wait(10)

    def status(self, timeout_s: float = 1.0) -> ClusterStatus | None:
        """None while it does not answer."""
        client = ControllerClient(self.socket_path)
        try:
            answer = client.ask(Status(), timeout_s)
        except DanubeError:
            return None
        finally:
            client.close()
        assert isinstance(answer, ClusterStatus)
        return answer

    def change(self, what: str, node_id: str, address: str = "", timeout_s: float = 10.0) -> Members:
        client = ControllerClient(self.socket_path)
        try:
            answer = client.ask(Change(what, node_id, address, int(timeout_s * 1000)), timeout_s + 1)
        finally:
            client.close()
        assert isinstance(answer, Changed)
        return answer.members

    def log(self, propose_timeout_s: float = 15.0) -> ClusterLog:
        """The metadata as a worker of this host sees it."""
        directory = self.data_dir / METADATA
        wait_until(lambda: copy_exists(directory), 15, f"copy of {self.data_dir.name}\n{self.output}")
        return ClusterLog(directory, self.socket_path, propose_timeout_s=propose_timeout_s)


class Cluster:
    """Members on loopback that know each other as seeds."""

    def __init__(self, directory: Path, size: int = 3, tls: TlsFiles | None = None) -> None:
        self.directory = directory
        self.tls = tls
        ports = [free_port() for _ in range(size)]
        self.seeds = [f"127.0.0.1:{port}" for port in ports]
        self.members = [
            MemberProcess(directory / f"n{place}", seeds=self.seeds, port=port, tls=tls)
            for place, port in enumerate(ports)
        ]

    def start(self) -> None:
        for member in self.members:
            member.start()
        self.leader(20)

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()

    def leader(self, timeout_s: float = 10.0) -> MemberProcess:
        """The member that leads, by its own word and that of a majority."""
        found: list[MemberProcess] = []

        def agreed() -> bool:
            found.clear()
            running = [member for member in self.members if member.running]
            statuses = {member: member.status(0.5) for member in running}
            for member, status in statuses.items():
                if status is None or status.role != "leader":
                    continue
                followed = sum(
                    other is not None and other.leader_id == status.self_node_id
                    for other in statuses.values()
                )
                if followed > len(status.voters) // 2:
                    found.append(member)
            return bool(found)

        outputs = "\n".join(member.output[-1500:] for member in self.members)
        wait_until(agreed, timeout_s, f"a leader\n{outputs}")
        return found[0]

    def add(self, **options: object) -> MemberProcess:
        """Start one more, which joins as a learner."""
        place = len(self.members)
        member = MemberProcess(self.directory / f"n{place}", join=self.seeds, tls=self.tls)
        self.members.append(member)
        member.start()
        return member


def main() -> None:
    """The process itself."""
    from danube.broker.clustered.controller import open_door, run_controller
    from danube.broker.processes.contexts import ControllerContext, DrainSignal, Pulse, SupervisorSettings
    from danube.config import loading as config
    from danube.host import telemetry

    data_dir = Path(os.environ["MEMBER_DATA_DIR"])
    loaded = config.load().config
    loaded = replace(loaded, data_dir=data_dir)
    telemetry.configure()
    path = os.environ["MEMBER_SOCKET"]
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(path)
    listener.listen(64)
    context = ControllerContext(
        listener=listener,
        door=open_door(loaded.cluster),
        drain=DrainSignal(),
        settings=SupervisorSettings(data_dir=data_dir),
        pulse=Pulse(),
    )
    sys.exit(run_controller(context, loaded) or 0)


if __name__ == "__main__":
    threading.current_thread().name = "controller"
    main()
