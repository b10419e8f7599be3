"""Where clients are sent: addresses that a broker advertises, a wrong one, and one that changes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from danube import sync
from danube.broker.processes.listeners import own_address
from danube.errors import OperationTimeout
from tests.broker_cluster import BrokerCluster
from tests.broker_process import BrokerProcess, free_port
from tests.e2e.grpc_parts import DanubeCalls, pb
from tests.e2e.test_cluster_owners import TOPIC


class PublishedPort:
    """What connects to ``port`` reaches a broker at another one, as behind NAT; ``used`` counts it."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self.used = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with suppress(OSError):
                    broker = socket.create_connection(("127.0.0.1", self._target), 5)
                    self.used += 1
                    threading.Thread(target=self._copy, args=(client, broker), daemon=True).start()
                    threading.Thread(target=self._copy, args=(broker, client), daemon=True).start()
                    continue
                client.close()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source:
            while data := source.recv(65_536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> PublishedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def advertising(
    cluster: BrokerCluster, addresses: Mapping[str, str]
) -> Iterator[tuple[BrokerProcess, BrokerProcess]]:
    """The first broker owns the topic and says by section where it is; it and the other one."""
    first, other = cluster.brokers
    first.environment |= {f"DANUBE_{name.upper()}__ADVERTISED": text for name, text in addresses.items()}
    with cluster:
        with sync.connect(other.address) as client:
            client.admin.create_topic(TOPIC)
        cluster.ask(other)
        cluster.owner(TOPIC)
        cluster.place(TOPIC, first)
        yield first, other


@pytest.fixture
def cluster(tmp_path: Path) -> BrokerCluster:
    (tmp_path / "store").mkdir()
    made = BrokerCluster(tmp_path, 2, arguments=["--storage", f"file://{tmp_path}/store"])
    for broker in made.brokers:  # a busy machine is to take the topic from nobody
        broker.environment["DANUBE_CLUSTER__LEASE"] = "20s"
    return made


def test_clients_of_both_protocols_are_sent_where_a_broker_says_that_it_is(cluster: BrokerCluster) -> None:
    first = cluster.brokers[0]
    with ExitStack() as stack:
        native = stack.enter_context(PublishedPort(first.port))
        grpc = stack.enter_context(PublishedPort(first.grpc_port))
        addresses = {"server": f"127.0.0.1:{native.port}", "grpc": f"127.0.0.1:{grpc.port}"}
        _, other = stack.enter_context(advertising(cluster, addresses))
        with sync.connect(other.address) as client, client.producer(TOPIC) as producer:
            assert producer.send(b"x").offset == 0
        assert native.used > 0
        with DanubeCalls(other.grpc_address) as calls:
            request = pb.TopicLookupRequest(request_id=1, topic=TOPIC)
            found = calls.unary("Discovery/TopicLookup", request)
        assert found.response_type == pb.TopicLookupResponse.Redirect
        assert found.connect_url == f"http://{addresses['grpc']}"
        with DanubeCalls(addresses["grpc"]) as calls:
            found = calls.unary("Discovery/TopicLookup", request)
            assert found.response_type == pb.TopicLookupResponse.Connect
            assert found.connect_url == f"http://{addresses['grpc']}"
        assert grpc.used > 0


def test_a_wrong_advertised_address_is_named_by_the_error(cluster: BrokerCluster) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    with (
        advertising(cluster, {"server": nowhere}) as (_, other),
        sync.connect(other.address, timeout=3) as client,
        pytest.raises(OperationTimeout) as failed,
    ):
        with client.producer(TOPIC) as producer:
            producer.send(b"x")
    said = str(failed.value)
    assert nowhere in said and "advertised" in f"{said} {failed.value.hint}", (said, failed.value.hint)


def test_a_broker_that_comes_back_on_another_port_is_found(cluster: BrokerCluster) -> None:
    with advertising(cluster, {}) as (first, other), sync.connect(other.address, timeout=40) as client:
        with client.producer(TOPIC, name="p") as producer:
            assert producer.send(b"0").offset == 0
            first.stop()
            first.port, first.grpc_port = free_port(), free_port()
            cluster.start([first])
            cluster.owner(TOPIC)
            cluster.place(TOPIC, first)
            assert producer.send(b"1").offset == 1
        with DanubeCalls(other.grpc_address) as calls:
            found = calls.unary("Discovery/TopicLookup", pb.TopicLookupRequest(request_id=1, topic=TOPIC))
        assert found.connect_url == f"http://{first.grpc_address}"


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]")],
)
def test_a_host_reaches_itself_whatever_it_listens_on(host: str, own: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        assert own_address(one) == f"{own}:{one.getsockname()[1]}"
