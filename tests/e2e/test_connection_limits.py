"""Bounds of connections over two workers and both doors; who is on this host keeps some."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from danube.core.protocol import native as wire
from danube.core.protocol.native import Hello, Kind
from danube.errors import Overloaded
from tests.broker_process import wait_until
from tests.e2e import authority_site
from tests.e2e.authority_cluster import ClusterSite
from tests.e2e.grpc_parts import EXHAUSTED, DanubeCalls
from tests.e2e.test_native_door import RawPeer
from tests.grpc_client import Disconnected, GrpcError

LIMIT = 18  # above the connections that this host has anyway
TIMES = 10


def test_an_address_has_so_many_connections_over_all_doors_and_workers(broker: Any) -> None:
    process = broker(workers=2, environment={"DANUBE_LIMITS__CONNECTIONS_PER_ADDRESS": str(LIMIT)})
    with ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(process.port)) for _ in range(LIMIT - 4)]
        for peer in peers:
            peer.shake()
        for number in range(4):  # one after another: while one is passed on, it counts at both workers
            stack.enter_context(DanubeCalls(process.grpc_address)).create(f"/default/t{number}")
        for _ in range((TIMES - 1) * LIMIT):
            with RawPeer(process.port) as late:
                error = late.error()
                assert isinstance(error, Overloaded) and error.retryable
                assert error.facts["quota"] == "connections_per_address" and error.facts["limit"] == LIMIT
                assert late.frame() is None, "and it is closed"
        assert refused(process.grpc_address)
        with sync.connect(process.address) as client:  # through the Unix socket, which no address has
            assert client.admin.namespaces()
        peers.pop().socket.close()
        wait_until(lambda: enters(process.port), 20, "the place of the closed one is free")


def refused(address: str) -> bool:
    try:
        with DanubeCalls(address) as calls:
            calls.create("/default/late")
    except Disconnected:
        return True
    except GrpcError as error:
        return error.code == EXHAUSTED
    return False


def enters(port: int) -> bool:
    try:
        with RawPeer(port) as peer:
            peer.shake()
    except (AssertionError, OSError):
        return False
    return True


def test_a_principal_has_so_many_connections(broker: Any, monkeypatch: Any) -> None:
    limits = {"DANUBE_LIMITS__CONNECTIONS_PER_PRINCIPAL": str(LIMIT)}
    monkeypatch.setattr(authority_site, "ENVIRONMENT", authority_site.ENVIRONMENT | limits)
    site = authority_site.Site(broker)
    with ExitStack() as stack:
        stack.callback(site.close)
        for _ in range(LIMIT):
            stack.enter_context(site.connect("app"))
        hello = wire.control_frame(Kind.HELLO, Hello(token=authority_site.token("app")), 1)
        for _ in range((TIMES - 1) * LIMIT):
            with RawPeer(site.process.port) as late:
                late.send(hello)
                error = late.error()
                assert isinstance(error, Overloaded) and error.facts["quota"] == "connections_per_principal"
        with site.connect("other"):
            pass  # it was welcomed


def test_a_principal_has_so_many_connections_at_each_of_three_brokers(tmp_path: Path) -> None:
    """The bound is of each broker: what one refuses another one takes, up to its own."""
    site = ClusterSite(tmp_path)
    for broker in site.brokers:
        broker.environment["DANUBE_LIMITS__CONNECTIONS_PER_PRINCIPAL"] = str(LIMIT)
    app, other = authority_site.token("app"), authority_site.token("other")
    with site.cluster, ExitStack() as stack:
        for broker in site.brokers:
            held = [site.connect(broker, app).open() for _ in range(LIMIT)]
            for client in held:
                stack.callback(client.close)
            for _ in range((TIMES - 1) * LIMIT):
                with pytest.raises(Overloaded) as caught:
                    site.connect(broker, app).open()
                assert caught.value.facts["quota"] == "connections_per_principal"
                assert caught.value.facts["limit"] == LIMIT
            site.connect(broker, other).open().close()
