"""Options of TCP sockets: what is set, and kernels that do not have it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from danube.host import tcp

THIN_LINEAR_TIMEOUTS, RTO_MAX_MS = 16, 44  # linux/tcp.h


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        yield one


def option(raw: socket.socket, name: int) -> int:
    return raw.getsockopt(socket.IPPROTO_TCP, name)


@pytest.mark.skipif(sys.platform != "linux", reason="options of Linux")
def test_small_frames_leave_at_once_and_what_is_lost_comes_soon(connected: socket.socket) -> None:
    assert tcp.tune(connected)
    assert option(connected, socket.TCP_NODELAY) and option(connected, THIN_LINEAR_TIMEOUTS)
    try:
        assert option(connected, RTO_MAX_MS) == tcp.RTO_MAX_MS
    except OSError:
        pytest.skip("this kernel has no TCP_RTO_MAX_MS")


class OldSocket:
    """A socket of a kernel that has none of the newer options."""

    family = socket.AF_INET

    def __init__(self, address: tuple[Any, ...] | None) -> None:
        self.address = address
        self.options: list[tuple[int, Any]] = []

    def getpeername(self) -> tuple[Any, ...]:
        if self.address is None:
            raise OSError("not connected")
        return self.address

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        self.options.append((name, value))
        if name != socket.TCP_NODELAY:
            raise OSError("Protocol not available")


def test_a_kernel_without_the_newer_options_is_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    old = OldSocket(("127.0.0.1", 1))
    assert tcp.tune(old) and (socket.TCP_NODELAY, 1) in old.options
    monkeypatch.setattr(sys, "platform", "darwin")
    other = OldSocket(("10.0.0.1", 1))
    assert tcp.tune(other) and other.options == [(socket.TCP_NODELAY, 1)]


def test_what_is_no_tcp_socket_is_left_as_it_is() -> None:
    one, other = socket.socketpair()
    assert not tcp.tune(one) and not tcp.tune(None)
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("address", "near"),
    [
        (("127.0.0.1", 1), True), (("127.8.0.1", 1), True), (("::1", 1, 0, 0), True),
        (("::ffff:127.0.0.1", 1, 0, 0), True), (("10.0.0.1", 1), False), (("fe80::1", 1, 0, 0), False),
        ((), False), (None, False),
    ],
)  # fmt: skip
def test_loopback_is_known_by_its_addresses(address: Any, near: bool) -> None:
    assert tcp.on_this_host(OldSocket(address)) is near


@pytest.mark.parametrize(
    ("name", "host"),
    [
        (("192.0.2.1", 40_000), "192.0.2.1"),
        (("::ffff:192.0.2.1", 1, 0, 0), "192.0.2.1"),
        (("2001:db8::1:2", 1, 0, 0), "2001:db8::/64"),
        (("2001:db8::ffff:9", 2, 0, 0), "2001:db8::/64"),
        (("fe80::1%eth0", 2, 0, 2), "fe80::/64"),
        (("somewhere", 1), "somewhere"),
        ("", "a process of this host"),
        (None, "a process of this host"),
    ],
)
def test_a_peer_is_its_host_whatever_its_port(name: Any, host: str) -> None:
    assert tcp.host_of(name) == host
