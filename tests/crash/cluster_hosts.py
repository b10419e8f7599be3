"""Real brokers, each on a host of its own (a network namespace), and a host for their clients.

The test itself reaches all hosts over the bridge, and reads each broker's copy of the metadata from its disk.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from danube import sync
from danube.cluster.control.cluster_log import ClusterLog
from danube.core.cluster.commands import Ownership
from danube.core.metadata.machine import Metadata
from danube.core.placement.load_report import DECIDING_KEY
from danube.errors import DanubeError
from tests.broker_process import BrokerFailed, BrokerProcess, wait_until
from tests.crash.power import PowerDisk
from tests.crash.storage_run import s3_proxy
from tests.etcd_server import EtcdServer
from tests.network_namespaces import Hosts

RAFT_PORT = 7650
READY_S = 150.0
SETTLED_S = 90.0


class ClusterOnHosts:
    """``with ClusterOnHosts(directory) as cluster``: nothing is left of it at the end."""

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 3,
        workers: int = 1,
        rough: bool = False,
        power: bool = False,
        store: bool = False,
        etcd: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """With ``power`` each broker has a disk whose power can be cut.  With ``store`` an S3 server behind a
        proxy is the store, else a directory.  With ``etcd`` one on the bridge keeps what they agree on."""
        directory.mkdir(parents=True, exist_ok=True)
        self.size = size
        self._stack = ExitStack()
        self.hosts = Hosts(size + 1, reached=True, rough=rough)
        self._stack.callback(self.hosts.close)
        self.clients_place = size
        self.disks = [PowerDisk(directory / f"b{place}") for place in range(size)] if power else []
        environment, words = dict(environment or {}), []
        try:
            if store:
                self.proxy, more = self._stack.enter_context(s3_proxy(0, self.hosts.bridge))
                environment |= more
            else:
                (directory / "store").mkdir(exist_ok=True)
                words = ["--storage", f"file://{directory / 'store'}"]
            seeds = ",".join(f"{self.hosts.host(place)}:{RAFT_PORT}" for place in range(size))
            words += ["--metadata", self._etcd()] if etcd else ["--seed-nodes", seeds]
        except BaseException:
            self._stack.close()
            raise
        self.brokers = [
            BrokerProcess(
                directory / f"b{place}",
                workers=workers,
                host=self.hosts.host(place),
                prefix=self.hosts.prefix(place),
                environment=environment,
                arguments=[
                    *("--raft-addr", f"{self.hosts.host(place)}:{RAFT_PORT}"),
                    *words,
                ],
            )
            for place in range(size)
        ]
        self._logs: dict[int, ClusterLog] = {}
        self._paused: list[int] = []

    def _etcd(self) -> str:
        """Start one that all hosts reach; its URL."""
        server = EtcdServer(self.hosts.bridge)
        self._stack.callback(server.stop)
        server.start()
        return f"etcd://{server.host}:{server.port}/crash"

    def __enter__(self) -> ClusterOnHosts:
        try:
            for disk in self.disks:
                self._stack.enter_context(disk)
            for broker in self.brokers:
                self._stack.callback(broker.kill)
            self.start(range(self.size))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs.clear()
        self.resume()
        self._stack.close()

    def start(self, places: Iterable[int]) -> None:
        """Start brokers side by side, as none is ready before a majority runs."""
        wanted = [self.brokers[place] for place in places if not self.brokers[place].running]
        for broker in wanted:
            broker.launch()
        for broker in wanted:
            broker.wait_ready(READY_S)

    def power_back(self, place: int) -> None:
        """The disk is mounted again; the broker on it has ended."""
        log = self._logs.pop(place, None)
        if log is not None:
            log.close()
        self.disks[place].back()

    def pause(self, place: int) -> None:
        """SIGSTOP to every process of a broker."""
        for pid in self.brokers[place].pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._paused.append(pid)

    def resume(self) -> None:
        while self._paused:
            with suppress(ProcessLookupError):
                os.kill(self._paused.pop(), signal.SIGCONT)

    # -- what the members agreed on ---------------------------------------------------------------

    @property
    def url(self) -> str:
        """All brokers, as clients on their own host dial them."""
        return "danube://" + ",".join(f"{broker.host}:{broker.port}" for broker in self.brokers)

    def state(self) -> Metadata:
        """The metadata of the host that has come furthest; what it has may be a moment old."""
        for place, broker in enumerate(self.brokers):
            with suppress(DanubeError, OSError, KeyError, ValueError):
                if place not in self._logs:
                    self._logs[place] = ClusterLog(broker.data_dir / "metadata", "nobody is asked")
                self._logs[place].refresh()
        if not self._logs:
            raise BrokerFailed("no broker has a copy of the metadata")
        return max(self._logs.values(), key=lambda log: log.version).state

    def id_of(self, place: int) -> int:
        return int((self.brokers[place].data_dir / "node_id").read_text().split()[0])

    def leader(self) -> int:
        """The place of the broker that decides, by the last word of the metadata."""
        record = self.state().cluster.keys.find(DECIDING_KEY)
        ids = [self.id_of(place) for place in range(self.size)]
        return ids.index(int(record.value)) if record is not None and int(record.value) in ids else 0

    def partitions(self) -> list[tuple[str, int, Ownership]]:
        """Topic, partition and ownership of everything that can be owned."""
        state = self.state()
        return [
            (record.topic, partition, state.cluster.owners.of(record.topic_id, partition))
            for record in state.topics()
            for partition in range(record.partition_count)
        ]

    def reserved(self, ownership: Ownership) -> int:
        """The end of the offsets that an owner may give: where the next one begins when it dies."""
        reservations = self.state().cluster.reservations
        return reservations.of(ownership.topic_id, ownership.partition).end

    def unsettled(self) -> str:
        """What keeps the cluster from being whole; empty where nothing does."""
        brokers = self.state().cluster.brokers.records()
        alive = [one for one in brokers if one.alive and one.mode == "active"]
        if len(alive) < self.size:
            return f"{len(alive)} of {self.size} brokers are registered and active"
        waiting = [
            (topic, number) for topic, number, one in self.partitions() if not one.broker_id or one.reason
        ]
        return f"without an owner, or moving: {waiting}" if waiting else ""

    def wait_settled(self, timeout_s: float = SETTLED_S) -> float:
        """Wait until all brokers are registered and own all partitions; how long it took, in seconds."""
        begun = time.monotonic()
        outputs = lambda: "\n".join(one.output_tail(1_500) for one in self.brokers)  # noqa: E731
        try:
            wait_until(lambda: not self.unsettled(), timeout_s, "settled")
        except BrokerFailed:
            raise BrokerFailed(f"not whole within {timeout_s} s: {self.unsettled()}\n{outputs()}") from None
        return time.monotonic() - begun

    # -- what brokers say -------------------------------------------------------------------------

    def ask(self, op: str, **arguments: Any) -> Any:
        """An operation of the administration, asked of all brokers at once."""
        with sync.connect(self.url, connect_timeout=2.0, timeout=10.0) as client:
            return client.admin.cluster(op, **arguments)

    def holes(self, topics: Iterable[str]) -> dict[tuple[str, int], list[dict[str, Any]]]:
        """The holes of each partition, as its owner describes them."""
        found = {}
        with sync.connect(self.url, connect_timeout=2.0, timeout=10.0) as client:
            for topic in topics:
                for number, one in enumerate(client.admin.describe_topic(topic).partitions):
                    found[topic, number] = list(one.get("holes") or [])
        return found

    def wait_returned(self, topics: list[str], timeout_s: float = 180.0) -> float:
        """Wait until what every disk had is installed: no hole is open; how long it took, in seconds."""
        begun = time.monotonic()
        left: dict[Any, Any] = {"nothing was": "described"}

        def installed() -> bool:
            nonlocal left
            with suppress(DanubeError):
                open_holes = {
                    place: [hole for hole in holes if hole["kind"] != "unused"]
                    for place, holes in self.holes(topics).items()
                }
                left = {place: holes for place, holes in open_holes.items() if holes}
            time.sleep(0.2)
            return not left

        try:
            wait_until(installed, timeout_s, "returned")
        except BrokerFailed:
            outputs = "\n".join(one.output_tail(3_000) for one in self.brokers)
            raise BrokerFailed(f"not returned within {timeout_s} s: {left}\n{outputs}") from None
        return time.monotonic() - begun
