"""Credentials that are exchanged, handed on and taken back, with everything open that they opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from danube import sync
from danube.core.security.principals import Principal
from danube.host import clock
from tests.broker_process import BrokerProcess, Brokers, wait_until
from tests.e2e.authority_site import CREDENTIALS, Site, ended, token
from tests.e2e.grpc_parts import OK, UNAUTHENTICATED, UNIMPLEMENTED, DanubeCalls, pb
from tests.grpc_client import GrpcError, Stream

GENEROUS_S = 30.0  # a right ends within 5 s; a slow and loaded machine gets more
WRONG_TOKENS = 1_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    brokers = Brokers(tmp_path_factory.mktemp("taken-back"))
    made = Site(brokers.make, workers=1)  # a right that was given is known at once
    yield made
    made.close()
    brokers.kill()


@pytest.fixture
def calls(site: Site) -> Iterator[Callable[[str], DanubeCalls]]:
    """gRPC connections, by the credential that each shows."""
    opened: list[DanubeCalls] = []

    def of(credential: str) -> DanubeCalls:
        made = DanubeCalls(site.process.grpc_address)
        opened.append(made)
        made.fields = [("authorization", f"Bearer {credential}")] if credential else []
        return made

    yield of
    for one in opened:
        one.close()


def until(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, GENEROUS_S, what)


# -- the exchange -----------------------------------------------------------------------------------


def exchange(client: DanubeCalls, api_key: str) -> str:
    return str(client.unary("AuthService/Authenticate", pb.AuthRequest(api_key=api_key)).token)


def test_an_api_key_is_exchanged_as_earlier_clients_do(site: Site, calls: Callable[..., DanubeCalls]) -> None:
    topic = "/default/exchanged"
    site.bind("old", "producer", "topic", topic)
    made = site.admin.admin.create_api_key("service_account:old", name="old-key")
    client = calls("")
    given = exchange(client, made["key"])
    claims = CREDENTIALS.examine(given, clock.wall_us())
    assert 3_500 < claims["exp"] - clock.wall_us() // 1_000_000 <= 3_600
    client.fields = [("authorization", f"Bearer {given}")]
    producer_id = client.create(topic)
    client.send(topic, producer_id, b"one")
    site.admin.admin.delete_api_key("old-key")

    def refused() -> bool:
        try:
            client.send(topic, producer_id, b"more")
        except GrpcError as error:
            assert error.code == UNAUTHENTICATED
            return True
        return False

    until(refused, "its token outlives the key")


@pytest.mark.parametrize("shown", ["", "x", "dnb_none_" + "a" * 43, "a token"])
def test_nothing_else_is_exchanged(shown: str, calls: Callable[..., DanubeCalls]) -> None:
    began_s = time.monotonic()
    with pytest.raises(GrpcError) as caught:
        exchange(calls(""), token("a") if shown == "a token" else shown)
    assert caught.value.code == UNAUTHENTICATED and time.monotonic() - began_s >= 0.2
    assert "the credential is not accepted" in caught.value.message


def test_a_broker_that_asks_nobody_exchanges_nothing(shared_broker: Callable[..., BrokerProcess]) -> None:
    client = DanubeCalls(shared_broker(2).grpc_address)
    with pytest.raises(GrpcError) as caught:
        exchange(client, "x")
    assert caught.value.code == UNIMPLEMENTED
    client.close()


# -- what is taken back -----------------------------------------------------------------------------


class Open(NamedTuple):
    """All that one principal has open on a topic."""

    client: sync.Client
    producer: sync.Producer
    consumer: sync.Consumer
    stream: Stream


def opened(site: Site, grpc: DanubeCalls, topic: str, credential: str) -> Open:
    client = sync.connect(site.process.address, token=credential, timeout=10).open()
    producer = client.producer(topic).open()
    producer.send(b"before")
    consumer = client.consumer(topic, "native", start="earliest").open()
    assert consumer.receive(timeout=GENEROUS_S).payload == b"before"
    stream = grpc.receive(grpc.subscribe(topic))
    producer.send(b"before")
    assert stream.next(GENEROUS_S).payload == b"before"
    assert consumer.receive(timeout=GENEROUS_S).payload == b"before"
    return Open(client, producer, consumer, stream)


Take = Callable[[Site, str, str], None]
TAKEN: dict[str, Take] = {
    "token": lambda site, name, topic: site.ask("revoke", kind="token", value=f"id-{name}"),
    "parent": lambda site, name, topic: site.ask("revoke", kind="token", value=f"parent-{name}"),
    "principal": lambda site, name, topic: site.ask(
        "revoke", kind="principal", value=f"service_account:{name}"
    ),
    "role": lambda site, name, topic: site.put_role(f"role-{name}", "Lookup"),
    "binding": lambda site, name, topic: site.unbind(name, f"role-{name}", "topic", topic),
    "key": lambda site, name, topic: site.admin.admin.delete_api_key(f"key-{name}"),
}


def credential_of(site: Site, kind: str, name: str) -> str:
    if kind == "key":
        made = site.admin.admin.create_api_key(f"service_account:{name}", name=f"key-{name}")
        return str(made["key"])
    jti = f"{'parent' if kind == 'parent' else 'id'}-{name}"
    text = CREDENTIALS.sign(Principal("service_account", name), 3_600, clock.wall_us(), jti=jti)
    if kind != "parent":
        return text
    with sync.connect(site.process.address, token=text) as client:
        return str(client.admin.issue_token()["token"])


@pytest.mark.parametrize("kind", TAKEN)
def test_everything_open_ends(kind: str, site: Site, calls: Callable[..., DanubeCalls]) -> None:
    name, topic = f"taken-{kind}", f"/default/taken-{kind}"
    site.admin.admin.create_topic(topic)
    site.put_role(f"role-{name}", "Produce", "Consume", "Lookup")
    site.bind(name, f"role-{name}", "topic", topic)
    credential = credential_of(site, kind, name)
    held = opened(site, calls(credential), topic, credential)
    TAKEN[kind](site, name, topic)
    until(lambda: ended(lambda: held.producer.send(b"refused soon")), "it still publishes")
    until(lambda: ended(lambda: held.consumer.receive(timeout=0.2)), "it still receives")
    assert held.stream.wait_ended(GENEROUS_S).code != OK
    delivered = len(held.stream.messages)
    with site.admin.producer(topic) as producer:
        producer.send(b"after")
    assert ended(lambda: held.consumer.receive(timeout=1)), "a record was delivered afterwards"
    assert len(held.stream.messages) == delivered
    held.client.close()


# -- beside wrong ones ------------------------------------------------------------------------------


def test_good_load_goes_on_beside_a_thousand_wrong_tokens(
    site: Site, calls: Callable[..., DanubeCalls]
) -> None:
    topic = "/default/beside-wrong"
    site.bind("beside", "producer", "topic", topic)
    codes: list[int] = []

    def guess() -> None:
        client = calls(token("beside") + "A")
        for _ in range(WRONG_TOKENS // 100):
            request = pb.ProducerRequest(request_id=1, producer_name="p", topic_name=topic)
            path = "/danube.ProducerService/CreateProducer"
            begun = [client.start(path, request, pb.ProducerResponse) for _ in range(25)]
            codes.extend(one.wait_ended(GENEROUS_S).code for one in begun)

    guessing = [threading.Thread(target=guess) for _ in range(4)]
    with site.connect("beside") as client, client.producer(topic) as producer:
        for one in guessing:
            one.start()
        count = 0
        while any(one.is_alive() for one in guessing):
            producer.send(b"x")
            count += 1
    assert codes == [UNAUTHENTICATED] * WRONG_TOKENS and count > 20
