"""Clients that come with tokens of an OpenID Connect issuer, and have their roles by its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from danube import sync
from danube.errors import IssuerUnavailable, NotAllowed, NotAuthenticated
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.authority_site import ENVIRONMENT, comes_in, root
from tests.e2e.grpc_parts import DENIED, UNAUTHENTICATED, UNAVAILABLE, DanubeCalls
from tests.fakes.issuer import AUDIENCE, Issuer
from tests.grpc_client import GrpcError

TOPIC = "/default/orders"
WITHIN_S = 120.0  # the broker asks an issuer that is away every ten seconds


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    made.use("one", algorithm="ES256")
    yield made
    made.close()


def environment(issuer: Issuer) -> dict[str, str]:
    oidc = {"DANUBE_AUTH__OIDC__ISSUER": issuer.name, "DANUBE_AUTH__OIDC__AUDIENCE": AUDIENCE}
    return {**ENVIRONMENT, **oidc}


def let_writers_in(process: BrokerProcess) -> None:
    with sync.connect(process.address, token=root()) as client:
        client.admin.create_topic(TOPIC)
        client.admin.put_binding("team", "group:writers", ["producer"], "topic", TOPIC)


def test_a_group_publishes_over_both_protocols(broker: Callable[..., BrokerProcess], issuer: Issuer) -> None:
    process = broker(workers=1, environment=environment(issuer))
    let_writers_in(process)
    writer, reader = issuer.token("ann", "writers"), issuer.token("bob", "readers")
    wait_until(lambda: comes_in(process, writer), WITHIN_S, "the issuer's keys are read")

    with sync.connect(process.address, token=writer) as client:
        with client.producer(TOPIC) as producer:
            assert producer.send(b"native").offset == 0
        told = client.admin.can("Produce", TOPIC)
        assert told["allowed"] and told["principal"] == "user:ann"
        assert "bound to group:writers, which it is in," in told["reason"]
        with pytest.raises(NotAllowed):
            client.consumer(TOPIC, "s").open()
    with sync.connect(process.address, token=reader) as client, pytest.raises(NotAllowed):
        client.producer(TOPIC).open()
    with pytest.raises(NotAuthenticated):
        sync.connect(process.address, token=issuer.token("ann", "writers", aud="another")).open()

    for token, outcome in ((reader, DENIED), (writer + "x", UNAUTHENTICATED)):
        with DanubeCalls(process.grpc_address) as calls:
            calls.fields = [("authorization", f"Bearer {token}")]
            with pytest.raises(GrpcError) as caught:
                calls.create(TOPIC)
            assert caught.value.code == outcome
    with DanubeCalls(process.grpc_address) as calls:
        calls.fields = [("authorization", f"Bearer {writer}")]
        calls.send(TOPIC, calls.create(TOPIC), b"grpc")
    with sync.connect(process.address, token=root()) as client:
        consumer = client.consumer(TOPIC, "all", start="earliest").open()
        assert [consumer.receive(timeout=30).payload for _ in range(2)] == [b"native", b"grpc"]
        client.admin.delete_binding("team", "topic", TOPIC)
    with sync.connect(process.address, token=writer) as client, pytest.raises(NotAllowed):
        client.producer(TOPIC).open()


def test_a_client_outlives_a_restart_while_the_issuer_is_away(broker: Callable[..., BrokerProcess]) -> None:
    first = Issuer()
    first.use("one")
    process = broker(workers=1, environment=environment(first))
    let_writers_in(process)
    token = first.token("ann", "writers")
    wait_until(lambda: comes_in(process, token), WITHIN_S, "the issuer's keys are read")
    with sync.connect(process.address, token=token, timeout=WITHIN_S, reconnect_timeout=WITHIN_S) as client:
        with client.producer(TOPIC) as producer:
            producer.send(b"before")
            first.close()
            process.kill()
            process.start()
            with pytest.raises(IssuerUnavailable, match="read again"):
                sync.connect(process.address, token=token).open()
            with DanubeCalls(process.grpc_address) as calls:
                calls.fields = [("authorization", f"Bearer {token}")]
                with pytest.raises(GrpcError) as caught:
                    calls.create(TOPIC)
                assert caught.value.code == UNAVAILABLE
            second = Issuer(first.port)
            second.private = first.private
            second.use("one")
            assert producer.send(b"after").offset == 1
    second.close()
