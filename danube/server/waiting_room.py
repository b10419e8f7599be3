"""A worker's doors while its host is part of no cluster yet: every call is answered with the reason.

Native clients get an error instead of a WELCOME, gRPC calls UNAVAILABLE and health checks NOT_SERVING. The
administration port serves ``ClusterAdmin``, so that a node can be found and added.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from danube.broker.admission import admission_of, authority_of
from danube.broker.processes.listeners import BACKLOG, LOCAL
from danube.broker.worker.places import Places
from danube.cluster.control.calls import Answer, ClusterStatus, Request, Status
from danube.cluster.control.door import ControllerClient
from danube.cluster.log.waiting import Waiting, waiting_error
from danube.core.metadata.machine import Metadata
from danube.core.protocol import native as wire
from danube.errors import DanubeError, Unavailable
from danube.host import clock, telemetry
from danube.host.handshakes import Handshakes
from danube.limits import KIB
from danube.server.grpc.door import GrpcDoor
from danube.server.grpc.guard import GrpcGuard
from danube.server.grpc.methods import Method, MethodKind, methods_of, services_in
from danube.server.proto import DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2, health_pb2
from danube.server.services.calls import BrokerCalls
from danube.server.services.cluster_admin import ClusterAdmin
from danube.server.services.grpc_health import Health

if TYPE_CHECKING:
    from danube.broker.processes.contexts import WorkerContext
    from danube.config.loading import BrokerConfig
    from danube.host.tls import TlsPort

ASK_INTERVAL_S: Final = 1.0
ASK_TIMEOUT_S: Final = 5.0
GREETING_S: Final = 5.0  # limit of a native client's silence
MESSAGE_BYTES_MAX: Final = 64 * KIB
CONNECTIONS_MAX: Final = 1_000
_MODULES: Final = {
    "grpc": (DanubeApi_pb2, SchemaRegistry_pb2),
    "admin": (DanubeAdmin_pb2, SchemaRegistry_pb2),
}

_log = telemetry.events("server.waiting")


class WaitingRoom:
    """Open from ``open`` to ``close``; the listening sockets stay the worker's."""

    draining = ready = False
    clustered = True

    def __init__(self, context: WorkerContext, config: BrokerConfig, tls: Mapping[str, TlsPort]) -> None:
        self._context = context
        self._tls = tls
        self._handshake_ms = config.limits.handshake_timeout_ms
        self._waiting: Waiting | None = None
        self._servers: list[asyncio.Server | Handshakes] = []
        self._natives: set[asyncio.Transport] = set()
        self._turns = _Turns()
        self._guard = _guard_of(config)
        self._doors = {name: self._grpc_door(name) for name in _MODULES}
        self._asking: asyncio.Task[None] | None = None

    def error(self) -> Unavailable:
        return waiting_error(self._waiting, clock.wall_us())

    async def ask_controller(self, request: Request) -> Answer:
        client = ControllerClient(self._context.controller_address)
        try:
            return await asyncio.to_thread(client.ask, request, ASK_TIMEOUT_S)
        finally:
            client.close()

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._asking = loop.create_task(self._ask_again())
        for name, listener in self._context.listeners.items():
            own = listener.dup()  # a server that closes takes its socket along
            if name == LOCAL:
                self._servers.append(await loop.create_unix_server(self._native, sock=own, backlog=BACKLOG))
                continue
            door = self._doors.get(name)
            factory = door.factory if door is not None else self._native
            tls = self._tls.get(name)
            if tls is not None:
                self._servers.append(
                    Handshakes(own, tls, factory, most=CONNECTIONS_MAX, limit_s=self._handshake_ms / 1000)
                )
            else:
                self._servers.append(await loop.create_server(factory, sock=own, backlog=BACKLOG))

    def close(self) -> None:
        """Accept no more connections; connected clients connect to the serving broker later."""
        if self._asking is not None:
            self._asking.cancel()
        for server in self._servers:
            server.close()
        for door in self._doors.values():
            door.abort_all()
        for transport in list(self._natives):
            transport.abort()

    async def _ask_again(self) -> None:
        told = ""
        while True:
            with suppress(DanubeError):
                status = await self.ask_controller(Status())
                if isinstance(status, ClusterStatus):
                    self._waiting = status.waiting
            if self._waiting is not None and self._waiting.why != told:
                told = self._waiting.why
                _log.warning("this broker waits for its cluster", why=told, hint=self._waiting.hint)
            now_s = asyncio.get_running_loop().time()
            for door in self._doors.values():
                door.sweep(now_s)
            await asyncio.sleep(ASK_INTERVAL_S)

    def _native(self) -> _Native:
        return _Native(self)

    def enter(self, transport: asyncio.Transport) -> bool:
        """Return whether there is room for another native connection."""
        if len(self._natives) < CONNECTIONS_MAX:
            self._natives.add(transport)
            return True
        return False

    def leave(self, transport: asyncio.Transport) -> None:
        self._natives.discard(transport)

    def _grpc_door(self, name: str) -> GrpcDoor:
        door = GrpcDoor(
            name, connections_max=CONNECTIONS_MAX, places=Places(CONNECTIONS_MAX),
            message_bytes_max=MESSAGE_BYTES_MAX, handshake_timeout_ms=self._handshake_ms,
            turns=self._turns, count=_nothing, guard=self._guard,
        )  # fmt: skip
        for module in _MODULES[name]:
            for service in module.DESCRIPTOR.services_by_name.values():
                found = methods_of(service, _Everything())
                door.methods |= {path: self._refusing(method) for path, method in found.items()}
        if name == "admin":
            service = DanubeAdmin_pb2.DESCRIPTOR.services_by_name["ClusterAdmin"]
            door.methods |= methods_of(service, ClusterAdmin(cast(BrokerCalls, self)))
        health = Health(cast(BrokerCalls, self), [*services_in(door.methods), "grpc.health.v1.Health"])
        door.methods |= methods_of(health_pb2.DESCRIPTOR.services_by_name["Health"], health)
        self._turns.doors.append(door)
        return door

    def _refusing(self, method: Method) -> Method:
        async def one(request: Any, call: Any) -> Any:
            raise self.error()

        async def many(request: Any, call: Any) -> AsyncIterator[Any]:
            if answers := [await one(request, call)]:
                yield answers[0]

        return method._replace(handler=one if method.kind is MethodKind.UNARY else many)


def _guard_of(config: BrokerConfig) -> GrpcGuard | None:
    """Let in those whom the configuration names; the cluster's roles are not known here yet."""
    state = Metadata()
    admission = admission_of(config, lambda: state.access)
    if admission is None:
        return None
    return GrpcGuard(admission, authority_of(config, lambda: state.access), lambda: state)


class _Everything:
    """Stands for any servicer while a table of methods is made."""

    def __getattr__(self, name: str) -> None:
        return None


class _Turns:
    """Turns for the doors, which write at a turn's end; here no worker provides them."""

    flush_pending = False

    def __init__(self) -> None:
        self.doors: list[GrpcDoor] = []
        self._due = False

    def schedule_turn(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.run_turn)

    def run_turn(self) -> None:
        self._due = False
        for door in self.doors:
            door.flush()


class _Native(asyncio.Protocol):
    """Answers a greeting with an error, and lets the client close.

    If this side closed first, late bytes of the client could reset the connection before it reads the error.
    """

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._told = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._room.enter(self._transport):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(GREETING_S, self._transport.abort)
        else:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._told:
            self._told = True
            self._transport.write(wire.error_frame(self._room.error()))

    def connection_lost(self, error: Exception | None) -> None:
        self._room.leave(self._transport)
        if self._timer is not None:
            self._timer.cancel()


def _nothing(name: str, amount: int) -> None:
    pass
