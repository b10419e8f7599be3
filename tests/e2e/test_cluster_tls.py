"""Three brokers whose clients speak TLS, and who speak TLS to each other by the cluster's certificates."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import danube.sync
from danube.core.partition.policy import FailurePolicy
from danube.core.protocol import native as wire
from danube.host.tls import PEER_NAME, TlsFiles
from tests.broker_cluster import BrokerCluster
from tests.broker_process import BrokerProcess, free_port
from tests.certificates import Authority
from tests.e2e.test_native_tls import refuses_what_is_weak

NAMES = "IP:127.0.0.1"
ALERT = 21  # the first byte of a record of TLS that says what is wrong
LISTENING = "0A"  # the state of such a socket in /proc/net/tcp
GREETINGS = (  # of clients, browsers, HTTP/2, and of members before there was TLS
    bytes(wire.control_frame(wire.Kind.HELLO, wire.Hello(client="test"))),
    b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)),
    bytes(64),
)


class Site:
    """The cluster, and the two authorities: that of its members, and that of servers and clients."""

    def __init__(self, place: Path) -> None:
        self.members = Authority(place / "members", "members")
        self.servers = Authority(place / "servers", "servers")
        self.node = self.members.sign("node", NAMES)
        self.server = self.servers.sign("server", NAMES)
        self.client = self.servers.sign("client", "URI:danube:service_account:app")
        self.cluster = BrokerCluster(place, 3)
        self.metrics_port = free_port()
        self.cluster.brokers[0].arguments += ["--metrics-port", str(self.metrics_port)]
        for broker in self.cluster.brokers:
            broker.environment |= {
                "DANUBE_CLUSTER__CERT_FILE": self.node.cert_file,
                "DANUBE_CLUSTER__KEY_FILE": self.node.key_file,
                "DANUBE_CLUSTER__CA_FILE": self.node.ca_file,
                "DANUBE_TLS__CERT_FILE": self.server.cert_file,
                "DANUBE_TLS__KEY_FILE": self.server.key_file,
                "DANUBE_TLS__CA_FILE": self.server.ca_file,
                "DANUBE_TLS__CLIENT_CERTIFICATES": "required",
            }

    def connect(self, broker: BrokerProcess) -> danube.sync.Client:
        options = danube.TlsOptions(
            ca_file=self.server.ca_file, cert_file=self.client.cert_file, key_file=self.client.key_file
        )
        return danube.sync.connect(f"danube+tls://127.0.0.1:{broker.port}", tls=options)

    def greeted_as_peer(self, broker: BrokerProcess, shown: TlsFiles | None) -> bool:
        """Whether a broker answers HELLO of one that asks for the name of peers."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(self.node.ca_file)
        if shown is not None:
            context.load_cert_chain(shown.cert_file, shown.key_file)
        try:
            plain = socket.create_connection(("127.0.0.1", broker.port), 20)
            with context.wrap_socket(plain, server_hostname=PEER_NAME) as connection:
                connection.sendall(wire.control_frame(wire.Kind.HELLO, wire.Hello(client="test")))
                return bool(connection.recv(1))
        except OSError:
            return False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("cluster-tls"))
    with made.cluster:
        yield made


def test_clients_reach_every_owner_by_tls(site: Site) -> None:
    topic, payloads = "/default/spread", [b"%d" % number for number in range(600)]
    one, two, _ = site.cluster.brokers
    with site.connect(one) as client:
        client.admin.create_topic(topic, partitions=6)
        with client.producer(topic) as producer:
            producer.send_many(payloads)
    with site.connect(two) as client, client.consumer(topic, "all", start="earliest") as consumer:
        found: list[bytes] = []
        for batch in consumer.batches():
            found += map(bytes, batch.payloads)
            batch.ack()
            if len(found) == len(payloads):
                break
    assert sorted(found) == sorted(payloads)
    assert len({site.cluster.id_of(site.cluster.owner(topic, index)) for index in range(6)}) > 1, (
        "several brokers own it"
    )


def test_brokers_forward_requests_to_each_other(site: Site) -> None:
    topic = "/default/forwarded"
    with site.connect(site.cluster.brokers[0]) as client:
        client.admin.create_topic(topic, partitions=6)
        with client.producer(topic) as producer:
            producer.send_many([b"x"] * 60)
    for broker in site.cluster.brokers:
        with site.connect(broker) as client:
            described = client.admin.describe_topic(topic)
            assert len(described.partitions) == 6


def test_dead_letters_reach_another_broker(site: Site) -> None:
    topic, dead = "/default/failing", "/default/dead"
    policy = FailurePolicy(
        max_redelivery_count=0, base_redelivery_delay_ms=1, poison="dead_letter", dead_letter_topic=dead
    )
    with site.connect(site.cluster.brokers[0]) as client:
        client.admin.create_topic(topic, partitions=3)
        client.admin.create_topic(dead)
        with client.producer(topic) as producer:
            producer.send_many([b"%d" % number for number in range(30)])
        with (
            client.consumer(topic, "s", start="earliest", failure=policy) as consumer,
            client.consumer(dead, "d", start="earliest") as graves,
        ):
            for _ in range(30):
                consumer.receive(30).nack()
            found = {bytes(graves.receive(30).payload) for _ in range(30)}
    assert len(found) == 30


def test_members_take_no_weak_tls(site: Site) -> None:
    """As the ports for clients in test_native_tls; a member of the cluster shows its certificate."""
    port = int(site.cluster.brokers[0].arguments[1].rpartition(":")[2])
    refuses_what_is_weak(port, "-cert", site.node.cert_file, "-key", site.node.key_file)


def test_no_port_of_any_process_is_left_without_tls(site: Site) -> None:
    """Every socket on which a process of a broker listens, whoever opened it."""
    broker = site.cluster.brokers[0]
    ports = listening(broker.pids)
    members = int(broker.arguments[1].rpartition(":")[2])
    assert ports >= {broker.port, broker.grpc_port, broker.admin_port, site.metrics_port, members}
    for port in ports:
        for greeting in GREETINGS:
            answer = answered(port, greeting)
            assert not answer or b"TLS" in answer or answer[0] == ALERT, (port, greeting, answer)


def listening(pids: Iterable[int]) -> set[int]:
    """Ports of TCP on which these processes listen."""
    held = set()
    for pid in pids:
        with suppress(FileNotFoundError):  # a process of the schema compiler may have ended
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    held.add(os.readlink(descriptor))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in held:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def answered(port: int, greeting: bytes) -> bytes:
    """What a port says to this, until it closes the connection or is silent."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), 20) as connection, suppress(OSError):
        connection.sendall(greeting)
        connection.settimeout(20)
        while part := connection.recv(4_096):
            found += part
    return found


def test_who_has_no_certificate_of_the_cluster_is_no_broker(site: Site) -> None:
    broker = site.cluster.brokers[0]
    assert site.greeted_as_peer(broker, site.node)
    assert not site.greeted_as_peer(broker, None)
    assert not site.greeted_as_peer(broker, site.client), "not even with one that clients may show"
    pretender = site.servers.sign("pretender", "URI:danube:node:1,IP:127.0.0.1")
    assert not site.greeted_as_peer(broker, pretender)
