"""Sockets that find out who is gone: what the kernel is told, and what it is asked."""

from __future__ import annotations

import socket
from typing import Any

from danube.server import half_open
from danube.server.half_open import GONE_MS, gone, tune_socket, untaken_bytes
from tests.broker_process import wait_until


class Told:
    """A socket whose kernel says this."""

    family = socket.AF_INET

    def __init__(self, retransmits: int, silent_ms: int, size: int = 60) -> None:
        info = bytearray(104)
        info[2] = retransmits
        info[56:60] = silent_ms.to_bytes(4, "little")
        self._info = bytes(info[:size])

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return self._info[:size]


def test_who_repeats_and_hears_nothing_has_lost_its_peer() -> None:
    assert gone(Told(7, GONE_MS + 1))
    assert not gone(Told(7, GONE_MS - 1)), "not for long enough"
    assert not gone(Told(0, 10 * GONE_MS)), "it has nothing to say, or the peer only does not read"
    assert not gone(Told(7, GONE_MS + 1, size=40)), "a kernel that tells less"


def test_what_is_no_tcp_or_closed_is_not_gone() -> None:
    one, other = socket.socketpair()
    assert not gone(one) and not gone(None)
    tune_socket(one)
    one.close()
    other.close()
    closed = socket.socket()
    closed.close()
    assert not gone(closed)


def test_a_connection_is_asked_by_the_kernel_within_half_a_minute() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as dialled, listener.accept()[0] as accepted:
            tune_socket(accepted)
            told: dict[str, Any] = {
                name: accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in half_open.KEEPALIVE
            }
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert told == half_open.KEEPALIVE
            assert told["TCP_KEEPIDLE"] + told["TCP_KEEPINTVL"] * told["TCP_KEEPCNT"] <= GONE_MS / 1000
            accepted.sendall(b"x")
            assert dialled.recv(1) == b"x" and not gone(accepted)


def test_a_number_falls_while_a_peer_takes_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as sender, listener.accept()[0] as taker:
            before = untaken_bytes(sender)
            sender.sendall(bytes(10_000))
            assert len(taker.recv(10_000, socket.MSG_WAITALL)) == 10_000
            wait_until(lambda: untaken_bytes(sender) == before - 10_000, 10, "acknowledged")
        assert untaken_bytes(sender) >= before, "a closed socket has taken nothing"
    near, far = socket.socketpair()
    with near, far:
        assert untaken_bytes(near) >= before, "nor has one that is no TCP socket"
