"""The Unix socket beside the native port: who finds it, who does not, and what both sides get."""

from __future__ import annotations

import errno
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from danube.broker.processes.listeners import LOCAL, addresses, close_listeners, open_listeners
from danube.host import local_socket, tcp
from danube.server.half_open import gone, tune_socket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")

HOST = "127.0.0.1"
Listen = Callable[..., socket.socket]


@pytest.fixture
def port() -> Iterator[int]:
    """One that nobody else takes meanwhile."""
    with socket.create_server((HOST, 0)) as held:
        yield int(held.getsockname()[1])


@pytest.fixture
def listen() -> Iterator[Listen]:
    with ExitStack() as stack:

        def opened(host: str, port: int, worker: int = 0, backlog: int = 100) -> socket.socket:
            listener = local_socket.listen(host, port, worker, backlog)
            assert listener is not None
            return stack.enter_context(listener)

        yield opened


def reached(host: str, port: int) -> bool:
    raw = local_socket.dial(host, port)
    if raw is not None:
        raw.close()
    return raw is not None


def test_who_dials_the_address_reaches_who_listens_there(listen: Listen, port: int) -> None:
    listener = listen(HOST, port)
    raw = local_socket.dial(HOST, port)
    assert raw is not None and raw.family == socket.AF_UNIX and not raw.getblocking()
    with raw, listener.accept()[0] as accepted:
        tune_socket(accepted)
        accepted.sendall(b"welcome")
        assert raw.recv(100) == b"welcome"
        for one in (raw, accepted):
            assert tcp.on_this_host(one) and not tcp.tune(one) and not gone(one)
        sizes = {one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for one in (raw, accepted)}
        most = int(Path("/proc/sys/net/core/wmem_max").read_text())
        assert sizes == {2 * min(most, local_socket.BUFFER_BYTES)}


@pytest.mark.parametrize(
    ("listens", "dials", "found"),
    [
        ("127.0.0.1", "127.0.0.1", True), ("127.0.0.1", "localhost", True), ("::1", "localhost", True),
        ("::1", "::1", True), ("127.0.0.2", "127.0.0.2", True), ("0.0.0.0", "127.0.0.1", True),
        ("::", "::1", True), ("127.0.0.1", "127.0.0.2", False), ("127.0.0.1", "::1", False),
        ("127.0.0.1", "10.0.0.1", False), ("127.0.0.1", "example.org", False),
    ],
)  # fmt: skip
def test_only_the_same_address_of_this_host_is_found(
    listen: Listen, port: int, listens: str, dials: str, found: bool
) -> None:
    listen(listens, port)
    assert reached(dials, port) is found
    assert not reached(dials, port + 1)


def test_beside_an_address_of_the_network_nobody_listens(port: int) -> None:
    assert local_socket.listen("10.0.0.1", port, 0, 1) is None


def test_clients_spread_over_the_workers(listen: Listen, port: int) -> None:
    random.seed(7)
    for count in (1, 2, 3, 8):
        listeners = [listen(f"127.0.1.{count}", port, worker) for worker in range(count)]
        for _ in range(50 * count):
            assert reached(f"127.0.1.{count}", port)
        taken = []
        for listener in listeners:
            taken.append(0)
            while True:
                try:
                    listener.accept()[0].close()
                except BlockingIOError:
                    break
                taken[-1] += 1
        assert sum(taken) == 50 * count and min(taken) >= 20, taken


def test_where_somebody_else_has_the_name_tcp_is_left(listen: Listen, port: int) -> None:
    listen(HOST, port)
    assert local_socket.listen(HOST, port, 0, 1) is None


def test_a_name_that_cannot_be_had_for_another_reason_is_an_error(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "_name", lambda *_: "\0" + "1" * 200)
    with pytest.raises(OSError, match="too long"):
        local_socket.listen(HOST, port, 0, 1)


def test_another_users_listener_is_left_alone(
    listen: Listen, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = listen(HOST, port)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert not reached(HOST, port)
    with listener.accept()[0] as accepted:
        accepted.setblocking(True)
        assert accepted.recv(1) == b"", "it was told nothing"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_who_is_another_user_takes_tcp(listen: Listen, port: int) -> None:
    listen(HOST, port)
    child = os.fork()
    if not child:
        try:
            os.setuid(65_534)
            os._exit(int(reached(HOST, port)))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert reached(HOST, port)


def test_a_full_backlog_is_left_alone(listen: Listen, port: int) -> None:
    listen(HOST, port, backlog=1)
    with ExitStack() as stack:
        for _ in range(10):
            raw = local_socket.dial(HOST, port)
            if raw is None:
                return
            stack.enter_context(raw)
    pytest.fail("ten connections wait in a backlog of one")


def test_elsewhere_there_is_none(listen: Listen, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    listen(HOST, port)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not reached(HOST, port) and not local_socket.has_room()
    assert local_socket.listen(HOST, port + 1, 0, 1) is None


def test_room_is_what_the_kernel_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    assert local_socket.has_room() is (most >= local_socket.BUFFER_BYTES)
    monkeypatch.setattr(local_socket, "BUFFER_BYTES", most)
    assert local_socket.has_room()
    monkeypatch.setattr(local_socket, "BUFFER_BYTES", most + 4096)
    assert not local_socket.has_room()


def test_each_worker_has_one_beside_its_port_and_nobody_is_told_of_it() -> None:
    opened = open_listeners(HOST, {"native": 0, "grpc": 0}, 3, local=True)
    try:
        port = opened[0]["native"].getsockname()[1]
        assert len({sockets[LOCAL].getsockname() for sockets in opened}) == 3
        assert all(list(addresses(sockets)) == ["native", "grpc"] for sockets in opened)
        assert reached(HOST, port)
    finally:
        close_listeners(opened)
    assert not reached(HOST, port)


def test_without_a_name_the_ports_are_opened_all_the_same(listen: Listen, port: int) -> None:
    opened = open_listeners(HOST, {"native": 0}, 2)
    assert all(LOCAL not in sockets for sockets in opened)
    close_listeners(opened)
    with socket.socket() as free:
        free.bind((HOST, 0))
        taken = free.getsockname()[1]
    listen(HOST, taken)
    opened = open_listeners(HOST, {"native": taken}, 2, local=True)
    assert all(LOCAL not in sockets for sockets in opened)
    close_listeners(opened)


def test_nothing_is_left_open_where_the_name_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(host: str, port: int, worker: int, backlog: int) -> None:
        asked.append(port)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(local_socket, "listen", refuse)
    with pytest.raises(OSError, match="open files"):
        open_listeners(HOST, {"native": 0}, 2, local=True)
    with socket.socket() as again:
        again.bind((HOST, asked[0]))
