"""An answer leaves at once where the socket takes it; what it does not take goes by way of the transport."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.server.native import NativeConnection, sent_at_once
from tests.unit.native_door import Door, FakeTransport, on_loop

FRAME = wire.control_frame(Kind.PONG, None, 7)


class Wire(FakeTransport):
    """A transport over a real socket, of which the test holds the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.far.setblocking(False)

    def get_extra_info(self, name: str) -> Any:
        return self.near if name == "socket" else None

    def arrived(self) -> bytes:
        try:
            return self.far.recv(1 << 24)
        except BlockingIOError:
            return b""


@pytest.fixture
def pair() -> Iterator[tuple[Door, Wire]]:
    door, transport = Door(), Wire()
    yield door, transport
    transport.near.close()
    transport.far.close()


def connected(door: Door, transport: Wire) -> NativeConnection:
    connection, _ = door.connect(transport=transport, shake=False)
    connection.arrive(b"", answers_ping=False)
    return connection


def test_one_answer_goes_straight_to_the_socket(pair: tuple[Door, Wire]) -> None:
    def test() -> None:
        door, transport = pair
        connection = connected(door, transport)
        connection.send(FRAME)
        door.server.flush()
        assert transport.arrived() == FRAME and transport.written == b""
        assert not connection._output

    on_loop(test)


def test_behind_what_waits_in_the_transport_it_waits_too(pair: tuple[Door, Wire]) -> None:
    def test() -> None:
        door, transport = pair
        connection = connected(door, transport)
        transport.unsent = 1
        connection.send(FRAME)
        door.server.flush()
        assert transport.written == FRAME and transport.arrived() == b""

    on_loop(test)


def test_several_parts_go_by_way_of_the_transport(pair: tuple[Door, Wire]) -> None:
    def test() -> None:
        door, transport = pair
        connection = connected(door, transport)
        connection.send(FRAME, FRAME)
        door.server.flush()
        assert transport.written == FRAME * 2 and transport.arrived() == b""

    on_loop(test)


def test_the_descriptor_of_a_transport_that_closes_may_be_another_sockets(pair: tuple[Door, Wire]) -> None:
    def test() -> None:
        door, transport = pair
        connection = connected(door, transport)
        connection.send(FRAME)
        transport.closed = True
        door.server.flush()
        assert transport.arrived() == b""

    on_loop(test)


def test_what_a_full_socket_leaves_over_follows_in_order(pair: tuple[Door, Wire]) -> None:
    def test() -> None:
        door, transport = pair
        connection = connected(door, transport)
        large = os.urandom(8 << 20)
        connection.send(large)
        door.server.flush()
        first = b""
        while part := transport.arrived():
            first += part
        assert 0 < len(first) < len(large) and first + transport.written == large

    on_loop(test)


def test_a_socket_that_fails_is_left_to_its_transport(pair: tuple[Door, Wire]) -> None:
    def test() -> None:
        door, transport = pair
        connection = connected(door, transport)
        transport.far.close()
        connection.send(FRAME)
        door.server.flush()
        assert transport.written == FRAME
        assert sent_at_once(transport.near.fileno(), FRAME) == 0

    on_loop(test)
