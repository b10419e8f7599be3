"""Three brokers that ask everybody: clients by certificate, each other by the cluster's own certificates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import danube.sync
from danube.broker.audit.heads import KnownHeads, heads_of
from danube.broker.audit.trail import verify
from danube.broker.processes.directories import METADATA
from danube.cluster.log.committed import read_committed
from danube.cluster.log.node_files import load_node
from danube.core.partition.policy import FailurePolicy
from danube.errors import DanubeError, IssuerUnavailable, NotAllowed, NotAuthenticated
from danube.host.tls import TlsFiles
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e import test_cluster_tls
from tests.e2e.authority_site import SECRET, first_token
from tests.fakes.issuer import AUDIENCE, Issuer

WITHIN_S = 10.0  # a change reaches the other brokers, and their sweep looks once a second


class Site(test_cluster_tls.Site):
    """The cluster, in which the service account ``root`` may do everything, and an issuer of tokens."""

    def ask_everybody(self, issuer: Issuer) -> None:
        self.issuer = issuer
        for broker in self.cluster.brokers:
            broker.environment |= {
                "DANUBE_AUTH__MODE": "tls", "DANUBE_AUTH__SUPER_ADMINS": "service_account:root",
                "DANUBE_AUDIT__MODE": "on", "DANUBE_AUTH__JWT__SECRET_KEY": SECRET,
                "DANUBE_AUTH__OIDC__ISSUER": issuer.name, "DANUBE_AUTH__OIDC__AUDIENCE": AUDIENCE,
            }  # fmt: skip
        self.client = self.of("root")

    def of(self, name: str) -> TlsFiles:
        return self.servers.sign(name, f"URI:danube:service_account:{name}", "extendedKeyUsage=clientAuth")

    def connect_as(self, files: TlsFiles, broker: BrokerProcess, token: str = "") -> danube.sync.Client:
        options = danube.TlsOptions(
            ca_file=self.server.ca_file, cert_file=files.cert_file, key_file=files.key_file
        )
        return danube.sync.connect(
            f"danube+tls://127.0.0.1:{broker.port}", tls=options, timeout=15, token=token
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("cluster-authority"))
    issuer = Issuer()
    issuer.use("one")
    made.ask_everybody(issuer)
    with made.cluster:
        yield made
    issuer.close()


def test_requests_are_forwarded_for_who_asked(site: Site) -> None:
    topic, brokers = "/default/forwarded", site.cluster.brokers
    viewer, nobody = site.of("viewer"), site.of("nobody")
    with site.connect(brokers[0]) as root:
        root.admin.create_topic(topic, partitions=6)
        with root.producer(topic) as producer:
            producer.send_many([b"x"] * 60)
        root.admin.put_binding("b", "service_account:viewer", ["viewer"], "topic", topic)
    for broker in brokers:
        with site.connect_as(viewer, broker) as client:

            def described(client: danube.sync.Client = client) -> bool:
                try:
                    return len(client.admin.describe_topic(topic).partitions) == 6
                except NotAllowed:
                    return False  # this broker has not heard of the binding yet

            wait_until(described, WITHIN_S, "a viewer is told by every broker")
            with pytest.raises(NotAllowed):
                client.admin.delete_topic(topic)
        with site.connect_as(nobody, broker) as client, pytest.raises(NotAllowed):
            client.admin.describe_topic(topic)


def test_groups_are_forwarded_with_who_asked(site: Site) -> None:
    topic, brokers = "/default/grouped", site.cluster.brokers
    nameless = site.servers.sign("nameless", "DNS:proxy", "extendedKeyUsage=clientAuth")
    with site.connect(brokers[0]) as root:
        root.admin.create_topic(topic, partitions=6)
        root.admin.put_binding("g", "group:viewers", ["viewer"], "topic", topic)
    for broker in brokers:

        def described(token: str, broker: BrokerProcess = broker) -> bool:
            try:
                with site.connect_as(nameless, broker, token) as client:
                    return len(client.admin.describe_topic(topic).partitions) == 6
            except (NotAllowed, IssuerUnavailable):
                return False  # this broker has not heard of the binding yet, or not read the keys

        member = site.issuer.token("ann", "viewers")
        wait_until(lambda token=member: described(token), 60.0, "a group is known by every broker")
        assert not described(site.issuer.token("bob", "others"))


def test_dead_letters_reach_another_broker(site: Site) -> None:
    topic, dead = "/default/failing", "/default/dead"
    policy = FailurePolicy(
        max_redelivery_count=0, base_redelivery_delay_ms=1, poison="dead_letter", dead_letter_topic=dead
    )
    with site.connect(site.cluster.brokers[0]) as root:
        root.admin.create_topic(dead)
        root.admin.create_topic(topic, partitions=6)
        with root.producer(topic) as producer:
            producer.send_many([b"bad"] * 12)
        with root.consumer(topic, "s", start="earliest", failure=policy) as consumer:
            for _ in range(12):
                consumer.receive(timeout=20).nack(reason="no")
            consumer.flush()
            with root.consumer(dead, "s", start="earliest") as letters:
                assert {bytes(letters.receive(timeout=20).payload) for _ in range(12)} == {b"bad"}


def test_a_right_ends_on_every_broker(site: Site) -> None:
    topic, name = "/default/ends", site.of("ends")
    with site.connect(site.cluster.brokers[0]) as root:
        root.admin.create_topic(topic, partitions=6)
        root.admin.put_binding("ends", "service_account:ends", ["consumer"], "topic", topic)
        for broker in site.cluster.brokers:
            with site.connect_as(name, broker) as client:
                wait_until(lambda client=client: _may_look(client, topic), WITHIN_S, "the binding is known")
        with site.connect_as(name, site.cluster.brokers[1]) as client:
            consumer = client.consumer(topic, "s", start="earliest").open()
            root.admin.delete_binding("ends", "topic", topic)
            wait_until(lambda: _ended(consumer), WITHIN_S, "it still receives")
            with root.producer(topic) as producer:
                producer.send_many([b"after"] * 12)
            time.sleep(1)
            with pytest.raises(NotAllowed):
                consumer.receive(timeout=1)


def test_audit_heads_of_each_broker_are_known_to_the_others(site: Site) -> None:
    first, second, _ = site.cluster.brokers
    for broker, other in ((first, second), (second, first)):
        own, there = broker.data_dir, other.data_dir
        broker_id = int(load_node(own).node_id)

        def known(there: Path = there, broker_id: int = broker_id) -> dict[int, KnownHeads]:
            return heads_of(read_committed(there / METADATA / "metadata.log").cluster.keys, broker_id)

        wait_until(lambda known=known: bool(known()), 60, "a head of each worker, a second after the start")
        heads = {worker: [head.place for head in one.heads] for worker, one in known().items()}
        assert all(one.directory == str((own / "audit").resolve()) for one in known().values())
        assert not verify(own / "audit", kept=heads).findings
        assert verify(there / "audit", kept=heads).findings  # of another chain


def _may_look(client: danube.sync.Client, topic: str) -> bool:
    try:
        client.consumer(topic, "look", start="latest").open().close()
    except NotAllowed:
        return False
    return True


def _ended(consumer: danube.sync.Consumer) -> bool:
    try:
        consumer.receive(timeout=0.2)
    except NotAllowed:
        return True
    except DanubeError:
        return False
    return False


def test_a_certificate_of_a_client_makes_nobody_a_broker(site: Site) -> None:
    broker = site.cluster.brokers[0]
    assert not site.greeted_as_peer(broker, site.client) and not site.greeted_as_peer(broker, None)
    assert site.greeted_as_peer(broker, site.node)


def test_a_certificate_without_a_principal_opens_nothing(site: Site) -> None:
    plain = site.servers.sign("plain", "DNS:plain", "extendedKeyUsage=clientAuth")
    with pytest.raises(NotAuthenticated):
        site.connect_as(plain, site.cluster.brokers[0]).open()


def test_a_first_token_ends_on_every_broker(site: Site) -> None:
    """Its certificate names nobody, so that the token alone says who it is."""
    files = site.servers.sign("unnamed", "DNS:unnamed.example", "extendedKeyUsage=clientAuth")
    one, two, three = site.cluster.brokers
    with site.connect(one) as root:
        root.admin.create_topic("/default/first", partitions=6)
    token = first_token()  # a later one: root has come before
    for broker in site.cluster.brokers:
        with site.connect_as(files, broker, token) as client:
            client.admin.put_binding("first", "service_account:app", ["producer"], "topic", "/default/first")
            with pytest.raises(NotAllowed, match="first token"):
                client.admin.describe_topic("/default/first")
            with pytest.raises(NotAllowed, match="first token"):
                client.producer("/default/first").open()
    with site.connect(two):
        pass
    for broker in (three, one, two):
        wait_until(lambda broker=broker: _refused(site, files, broker, token), 3 * WITHIN_S, "it is refused")


def _refused(site: Site, files: TlsFiles, broker: BrokerProcess, token: str) -> bool:
    try:
        with site.connect_as(files, broker, token):
            return False
    except NotAuthenticated:
        return True
