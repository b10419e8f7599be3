"""What clients are told by a broker that is part of no cluster yet."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import danube
from danube import app
from danube.cluster.control import cluster_log
from danube.cluster.control.calls import ClusterStatus
from danube.cluster.log.waiting import Waiting
from danube.config.loading import BrokerConfig
from danube.errors import Unavailable
from danube.server.proto import DanubeAdmin_pb2 as admin_pb
from danube.server.proto import DanubeApi_pb2 as pb
from danube.server.proto import health_pb2
from danube.server.waiting_room import WaitingRoom
from tests.grpc_client import GrpcClient, GrpcError
from tests.unit.asynchronous import asynchronous

UNAVAILABLE = 14
WAITING = Waiting("b:1 does not answer", "start it", 0, ["b:1"])
STATUS = ClusterStatus("7", "a:1", "danube", "", "waiting", "", 0, 0, 0, 0, {}, {}, waiting=WAITING)


class Site:
    """Listening sockets of a worker, and a room behind them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listeners = {
            name: socket.create_server(("127.0.0.1", 0)) for name in ("native", "grpc", "admin")
        }
        for listener in self.listeners.values():
            listener.setblocking(False)
        self.context: Any = SimpleNamespace(
            listeners=self.listeners, controller_address="", settings=SimpleNamespace(data_dir=Path("/none")),
            drain=SimpleNamespace(requested=False), heartbeat=lambda: None,
        )  # fmt: skip

        async def ask(room: WaitingRoom, request: Any) -> Any:
            return STATUS

        monkeypatch.setattr(WaitingRoom, "ask_controller", ask)

    def port(self, name: str) -> int:
        return int(self.listeners[name].getsockname()[1])

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.port(name)}"

    def close(self) -> None:
        for listener in self.listeners.values():
            listener.close()

    async def during(self, work: Callable[[], Any]) -> Any:
        """The result of blocking work in a thread, while the room is open."""
        room = WaitingRoom(self.context, BrokerConfig(workers=1), {})
        await room.open()
        await asyncio.sleep(0)
        try:
            return await asyncio.to_thread(work)
        finally:
            room.close()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Site(monkeypatch)
    yield found
    found.close()


@asynchronous
async def test_native_clients_are_told_for_whom_it_waits(site: Site) -> None:
    def connect() -> Unavailable:
        with pytest.raises(Unavailable) as caught:
            with danube.sync.connect(f"danube://127.0.0.1:{site.port('native')}", timeout=2.0) as client:
                client.admin.list_topics()
        return caught.value

    error = await site.during(connect)
    assert "waits for its cluster" in error.what and "b:1 does not answer" in error.why
    assert error.hint == "start it"


@asynchronous
async def test_grpc_calls_are_unavailable_and_health_is_not_serving(site: Site) -> None:
    def ask() -> tuple[int, list[int]]:
        with GrpcClient(site.address("grpc")) as client:
            with pytest.raises(GrpcError, match="b:1 does not answer") as caught:
                client.call("/danube.Discovery/TopicLookup", pb.TopicLookupRequest(), pb.TopicLookupResponse)
            checks = [
                client.call(
                    "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(service=name),
                    health_pb2.HealthCheckResponse,
                ).status
                for name in ("", "danube.ProducerService")
            ]  # fmt: skip
        return caught.value.code, checks

    code, checks = await site.during(ask)
    assert code == UNAVAILABLE
    assert checks == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2


@asynchronous
async def test_the_administration_port_tells_the_node_and_nothing_else(site: Site) -> None:
    def ask() -> Any:
        with GrpcClient(site.address("admin")) as client:
            for path in ("BrokerAdmin/ListBrokers", "BrokerAdmin/GetLeaderBroker"):
                with pytest.raises(GrpcError) as caught:
                    client.call(f"/danube_admin.{path}", admin_pb.Empty(), admin_pb.Empty)
                assert caught.value.code == UNAVAILABLE
            return client.call(
                "/danube_admin.ClusterAdmin/ClusterStatus", admin_pb.Empty(), admin_pb.ClusterStatusResponse
            )

    found = await site.during(ask)
    assert (found.self_node_id, found.raft_addr, found.leader_id) == (7, "a:1", 0)


@asynchronous
async def test_a_worker_opens_the_room_while_it_waits_and_keeps_its_sockets(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed = asyncio.Event()
    monkeypatch.setattr(app, "WAITING_ROOM_S", 0.0)
    monkeypatch.setattr(cluster_log, "agreed_copy_exists", lambda *place: agreed.is_set())
    joined = asyncio.ensure_future(app._cluster_joined(site.context, BrokerConfig(workers=1), {}))
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port("native"))
    writer.write(b"anything")
    assert await reader.read(1)
    agreed.set()
    assert await joined
    with pytest.raises(ConnectionError):
        while await reader.read(4096):  # the room let go of it
            pass
        raise ConnectionError
    writer.close()
    assert site.listeners["native"].fileno() >= 0
