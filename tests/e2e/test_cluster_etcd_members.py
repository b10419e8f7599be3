"""Brokers on an etcd of three members, of which each is killed in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from danube import sync
from tests.broker_cluster import BrokerCluster
from tests.broker_process import free_port, wait_until
from tests.cloud_servers import CloudServer
from tests.e2e.test_cluster_etcd import under_load
from tests.e2e.test_cluster_owners import TOPIC, Running
from tests.etcd_server import EtcdServer
from tests.s3_server import NoServer

SIZE = 3
LEASE = "6s"  # longer than an election of etcd takes, which blocks renewals


class Member(EtcdServer):
    """One of several members; the thread that starts it lives as long as the test."""

    def __init__(self, name: str, peers: dict[str, int]) -> None:
        super().__init__()
        self.name = name
        self.port = free_port()
        self._peers = peers
        self.starter = ThreadPoolExecutor(1)

    def start(self) -> CloudServer:
        return self.starter.submit(super().start).result()

    def command(self) -> list[str]:
        peer = f"http://127.0.0.1:{self._peers[self.name]}"
        cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in self._peers.items())
        return [
            str(self.program()), "--name", self.name, "--data-dir", str(self._folder / "etcd"),
            "--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", cluster, "--logger", "zap", "--log-level", "warn",
        ]  # fmt: skip


@pytest.fixture
def members() -> Iterator[list[Member]]:
    peers = {f"m{number}": free_port() for number in range(SIZE)}
    try:
        EtcdServer.program()
    except NoServer as error:
        pytest.skip(str(error))
    made = [Member(name, peers) for name in peers]
    with ThreadPoolExecutor(SIZE) as together:  # none answers before most are up
        list(together.map(Member.start, made))
    yield made
    for member in made:
        member.stop()
        member.starter.shutdown()


def test_any_member_of_etcd_may_die(tmp_path: Path, members: list[Member]) -> None:
    hosts = ",".join(f"127.0.0.1:{member.port}" for member in members)
    prefix = f"danube-{os.getpid()}"
    (tmp_path / "store").mkdir()
    arguments = ["--storage", (tmp_path / "store").as_uri()]
    made = BrokerCluster(tmp_path, 2, arguments=arguments, metadata=f"etcd://{hosts}/{prefix}")
    for broker in made.brokers:
        broker.environment["DANUBE_CLUSTER__LEASE"] = LEASE
    with made as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)

        def kill_each(running: Running) -> None:
            owned = cluster.ownership(TOPIC)
            for member in members:
                member.kill()
                running.wait_more(100, 40)
                wait_until(lambda: len(cluster.alive()) == 2, 30, "both brokers are registered")
                with sync.connect(cluster.brokers[1].address) as client:
                    client.admin.create_topic(f"/default/while-{member.name}-is-away")
                member.start()
                running.wait_more(20, 40)
            assert cluster.ownership(TOPIC) == owned, "no lease was lost"

        under_load(cluster, kill_each)
