"""The native door over transports and a router that the test holds."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, cast

from danube.broker.api import RoutedSession
from danube.broker.routing.passing import ConnectionPassing
from danube.broker.routing.router import Router
from danube.broker.worker.places import Places
from danube.core.protocol import native as wire
from danube.core.protocol.native import Frame, Kind
from danube.limits import OUTPUT_BUFFER_BYTES_MAX
from danube.server.native import NativeConnection, NativeServer
from tests.unit.broker_parts import Received, frames_in

DESCRIPTOR = os.open(os.devnull, os.O_RDONLY)  # of every fake transport, which takes what this refuses


class FakeSocket:
    family = socket.AF_INET

    def fileno(self) -> int:
        return DESCRIPTOR

    def getpeername(self) -> tuple[str, int]:
        return ("192.0.2.1", 40_000)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """Whatever is wanted of it."""

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        return b""  # as a kernel that does not tell


class FakeTransport:
    def __init__(self) -> None:
        self.written = b""
        self.reading = True
        self.closed = self.aborted = False
        self.unsent = 0

    def get_extra_info(self, name: str) -> Any:
        return FakeSocket() if name == "socket" else None

    def set_write_buffer_limits(self, high: int) -> None:
        assert high < OUTPUT_BUFFER_BYTES_MAX

    def writelines(self, parts: list[bytes | memoryview]) -> None:
        self.written += b"".join(parts)

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = self.closed = True


class FakeRouter:
    """Takes frames while there is room, and keeps the bytes as they were when they were taken."""

    def __init__(self) -> None:
        self.room = True
        self.taken: list[tuple[int, memoryview]] = []
        self.owner: int | None = None
        self.gone: list[RoutedSession] = []
        self.restarted: list[int] = []

    def received(self) -> None:
        """There is no metadata to look at."""

    def route(self, session: RoutedSession, frame: Frame, view: memoryview) -> bool:
        if self.room:
            self.taken.append((frame.correlation, view[frame.start : frame.end]))
        return self.room

    def owner_of_opened(self, frame: Frame, view: memoryview) -> int | None:
        return self.owner

    def session_writable(self, session: RoutedSession) -> None: ...

    def session_gone(self, session: RoutedSession) -> None:
        self.gone.append(session)

    def answered(self, session: RoutedSession, frames: bytes) -> None: ...

    def worker_restarted(self, session: RoutedSession, worker: int) -> None:
        self.restarted.append(worker)


class Door:
    def __init__(
        self,
        connections_max: int = 10,
        passing: ConnectionPassing | None = None,
        places: Places | None = None,
    ) -> None:
        self.router = FakeRouter()
        self.counted: dict[str, int] = {}
        self.turns: list[str] = []
        self.flush_pending = False
        self.server = NativeServer(
            0, cast(Router, self.router), connections_max=connections_max,
            places=places or Places(1_000), handshake_timeout_s=5,
            session_timeout_ms=30_000,
            turns=self, count=self._count, passing=passing,
        )  # fmt: skip

    def schedule_turn(self) -> None:
        self.turns.append("asked")

    def run_turn(self) -> None:
        self.turns.append("run")

    def _count(self, name: str, amount: int) -> None:
        self.counted[name] = self.counted.get(name, 0) + amount

    def connect(
        self, *, shake: bool = True, transport: FakeTransport | None = None
    ) -> tuple[NativeConnection, FakeTransport]:
        transport, connection = transport or FakeTransport(), self.server.factory()
        connection.connection_made(cast(asyncio.BaseTransport, transport))
        if shake:
            feed(connection, wire.control_frame(Kind.HELLO, wire.Hello()))
            assert [frame.kind for frame in self.sent(transport)] == [Kind.WELCOME]
        return connection, transport

    def sent(self, transport: FakeTransport) -> list[Received]:
        self.server.flush()
        written, transport.written = transport.written, b""
        return frames_in(written)


def feed(connection: NativeConnection, data: bytes, step: int = 1 << 30) -> None:
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        while piece:
            buffer = connection.get_buffer(-1)
            size = min(len(buffer), len(piece))
            assert size
            buffer[:size] = piece[:size]
            connection.buffer_updated(size)
            piece = piece[size:]


def publish(correlation: int, size: int) -> bytes:
    return wire.frame_header(Kind.PUBLISH, size, correlation, 1) + bytes([correlation]) * size


def on_loop(test: Callable[[], None]) -> None:
    async def inside() -> None:
        test()

    asyncio.run(inside())
