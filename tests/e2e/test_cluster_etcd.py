"""Brokers whose cluster agrees through a real etcd: kills, an outage, a move and a pause, under load."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from danube import sync
from danube.errors import DanubeError
from tests.broker_cluster import BrokerCluster
from tests.broker_process import ROOT, wait_until
from tests.cloud_servers import CloudServer
from tests.e2e.test_cluster_brokers import danube, status
from tests.e2e.test_cluster_owners import TOPIC, Running
from tests.etcd_server import EtcdServer
from tests.s3_server import NoServer

LEASE_S = 2.0  # of a broker, by default
EXIT_CONFLICT = 4
EXIT_NOT_FOUND = 3
EXIT_NOT_SUPPORTED = 2


class Restarted(EtcdServer):
    """An etcd that any thread may start: it lives as long as the thread that does it in its name."""

    def __init__(self) -> None:
        super().__init__()
        self.starter = ThreadPoolExecutor(1)

    def start(self) -> CloudServer:
        return self.starter.submit(super().start).result()


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    try:
        EtcdServer.program()
        started = Restarted()
        started.start()
    except NoServer as error:
        pytest.skip(str(error))
    yield started
    started.stop()
    started.starter.shutdown()


@pytest.fixture
def metadata(server: EtcdServer) -> str:
    return f"etcd://127.0.0.1:{server.port}{server.new_prefix()}"


@pytest.fixture
def cluster(tmp_path: Path, metadata: str) -> Iterator[BrokerCluster]:
    """Three brokers that share a store; raftos cannot be imported."""
    (tmp_path / "raftos.py").write_text("raise ImportError('hidden by the test')\n")
    (tmp_path / "store").mkdir()
    arguments = ["--storage", (tmp_path / "store").as_uri()]
    made = BrokerCluster(tmp_path, 3, arguments=arguments, metadata=metadata)
    for broker in made.brokers:
        broker.environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    with made:
        with sync.connect(made.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)
        yield made


def under_load(cluster: BrokerCluster, work: Callable[[Running], None]) -> None:
    """Do the work while records are sent and received; every acknowledged one is received, as it was sent."""
    running = Running(cluster.brokers[0].address, TOPIC)
    running.pause_s = 0.01

    def run() -> None:
        running.wait_more(50)
        work(running)

    asyncio.run(running.during(run))
    assert not running.errors, running.errors
    assert len(set(running.offsets)) == len(running.offsets), "no offset is given twice"
    lost = [offset for offset in running.offsets if offset not in running.seen]
    assert not lost, f"acknowledged and not there: {lost[:10]}"
    numbers = {offset: number for number, offset in enumerate(running.offsets)}
    assert all(int(running.seen[offset]) == number for offset, number in numbers.items())


def whole(cluster: BrokerCluster) -> None:
    """All brokers are there, one owns the topic, and what a disk brought back is in its place."""
    wait_until(lambda: len(cluster.alive()) == len(cluster.brokers), 30, "all are registered")

    def settled() -> bool:
        with suppress(DanubeError), sync.connect(cluster.owner(TOPIC).address, timeout=20) as client:
            [described] = client.admin.describe_topic(TOPIC).partitions
            return not any(hole["kind"] == "open" for hole in described["holes"])
        return False

    wait_until(settled, 60, "no records are away")


def test_each_broker_is_killed_in_turn_and_nothing_acknowledged_is_lost(cluster: BrokerCluster) -> None:
    def kill_each(running: Running) -> None:
        for broker in cluster.brokers:
            cluster.ask(cluster.others(broker)[0])
            broker.kill()
            running.wait_more(50, 40)
            cluster.start([broker])
            whole(cluster)
            running.wait_more(20, 40)

    under_load(cluster, kill_each)


def test_without_etcd_brokers_serve_as_long_as_their_lease_and_go_on_when_it_is_back(
    cluster: BrokerCluster, server: EtcdServer
) -> None:
    def outage(running: Running) -> None:
        epoch = cluster.ownership(TOPIC).epoch
        server.kill()
        killed_s = time.monotonic()
        running.wait_more(10, LEASE_S)  # the lease holds
        time.sleep(max(0.0, killed_s + LEASE_S + 1.0 - time.monotonic()))
        count = len(running.offsets)
        time.sleep(1.5)
        assert len(running.offsets) == count, "nothing is acknowledged without a lease"
        assert "etcd" in status(cluster.brokers[1], code=6)["waiting"]["why"]
        server.start()
        running.wait_more(100, 40)
        wait_until(lambda: len(cluster.alive()) == 3, 30, "all are registered again")
        assert cluster.ownership(TOPIC).epoch >= epoch

    under_load(cluster, outage)


def test_a_partition_moves_and_a_paused_owner_acknowledges_nothing(cluster: BrokerCluster) -> None:
    def move_and_pause(running: Running) -> None:
        source = cluster.owner(TOPIC)
        target = next(one for one in cluster.others(source) if one is not cluster.brokers[0])
        cluster.place(TOPIC, target)
        running.wait_more(50)
        owner = cluster.owner(TOPIC)
        cluster.ask(cluster.others(owner)[0])
        epoch = cluster.ownership(TOPIC).epoch
        pids = owner.pids
        with (
            sync.connect(owner.address, timeout=60) as client,
            client.producer(TOPIC, name="late") as producer,
        ):
            last = producer.send(b"late").offset
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            sending = threading.Thread(target=lambda: late.append(producer.send(b"late").offset))
            sending.start()  # it lies in the socket of the paused broker
            try:
                wait_until(lambda: cluster.ownership(TOPIC).epoch > epoch, 20, "another one takes over")
                running.wait_more(30, 30)
                taken = running.offsets[-1]
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            sending.join(60)
        assert late and late[0] > taken > last, "the new owner acknowledged it, and the paused one did not"
        whole(cluster)

    late: list[int] = []
    under_load(cluster, move_and_pause)


def test_a_removed_broker_stops_and_does_not_come_back(cluster: BrokerCluster) -> None:
    removed = cluster.brokers[2]
    other = cluster.brokers[0]
    cluster.ask(other)
    node_id = str(cluster.id_of(removed))
    danube("cluster", "remove-node", "--data-dir", str(other.data_dir), "--node-id", node_id)
    wait_until(lambda: not removed.running, 30, f"it ends\n{removed.output_tail()}")
    assert removed.exit_code == EXIT_CONFLICT
    removed.launch()
    wait_until(lambda: not removed.running, 30, f"it ends again\n{removed.output_tail()}")
    assert removed.exit_code == EXIT_CONFLICT
    assert sorted(status(other)["voters"]) == sorted(str(cluster.id_of(one)) for one in cluster.brokers[:2])
    data_dir = ("--data-dir", str(other.data_dir))
    danube("cluster", "promote-node", *data_dir, "--node-id", node_id, code=EXIT_NOT_FOUND)
    danube(
        "cluster", "add-node", *data_dir, "--node-id", node_id, "--raft-addr", "127.0.0.1:1",
        code=EXIT_NOT_SUPPORTED,
    )  # fmt: skip
