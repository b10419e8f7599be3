"""Half-done handshakes are bounded in number and in time; what is no TLS is told so."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from danube.errors import InvariantBroken
from danube.host.handshakes import Handshakes, speaks_tls
from danube.host.tls import NATIVE, TlsPort, client_context
from tests.certificates import Authority


class Door(asyncio.Protocol):
    """A door that keeps what it was told."""

    def __init__(self, made: list[asyncio.BaseTransport], received: list[bytes]) -> None:
        self.made, self.received = made, received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(transport)

    def data_received(self, data: bytes) -> None:
        self.received.append(data)


class Site:
    """A port with its handshakes, and connections to it."""

    def __init__(self, directory: Path, **options: Any) -> None:
        authority = Authority(directory / "authority")
        files = authority.sign("server", "IP:127.0.0.1")
        self.ca_file = str(authority.cert)
        self.made: list[asyncio.BaseTransport] = []
        self.received: list[bytes] = []
        self.failed = 0
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        listener.setblocking(False)
        self.address = listener.getsockname()
        peers = files if options.pop("peers", False) else None
        self.port = TlsPort(files, [NATIVE], "off", peers, refusal=b"TLS, please")

        def count(name: str, amount: int) -> None:
            assert name == "tls_handshakes_failed"
            self.failed += amount

        def door() -> asyncio.BaseProtocol:
            return Door(self.made, self.received)

        self.handshakes = Handshakes(listener, self.port, door, count=count, **options)

    def dial(self) -> socket.socket:
        return socket.create_connection(self.address)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = client_context(self.port.all[0].source._replace(ca_file=self.ca_file), [NATIVE])
        return await asyncio.open_connection(*self.address, ssl=context, server_hostname="127.0.0.1")


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@asynccontextmanager
async def site(directory: Path, **options: Any) -> AsyncIterator[Site]:
    made = Site(directory, **options)
    try:
        yield made
    finally:
        made.handshakes.close()
        made.handshakes.close()  # a second time is nothing


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def told(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    try:
        return await asyncio.to_thread(connection.recv, 1000)
    except ConnectionResetError:  # it is closed with bytes that nobody reads
        return b""


@on_a_loop
async def test_a_connection_is_the_doors_after_its_handshake(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        _, writer = await here.connect()
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == NATIVE
        writer.write(b"hello")
        await until(lambda: here.received == [b"hello"])
        await until(lambda: not here.handshakes.pending)
        assert len(here.made) == 1 and here.failed == 0
        writer.close()


@on_a_loop
async def test_the_oldest_makes_room_and_the_newest_gets_in(tmp_path: Path) -> None:
    async with site(tmp_path, most=8) as here:
        silent = [here.dial() for _ in range(40)]
        await until(lambda: here.failed >= 32)
        assert len(here.handshakes.pending) == 8
        _, writer = await here.connect()
        writer.write(b"in")
        await until(lambda: here.received == [b"in"])
        assert await told(silent[0]) == b"", "the oldest was closed"
        for one in silent:
            one.close()
        writer.close()


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00" + b"\x01" * 20])
@pytest.mark.parametrize("peers", [False, True])
@on_a_loop
async def test_a_handshake_that_is_not_done_in_time_ends(tmp_path: Path, begun: bytes, peers: bool) -> None:
    async with site(tmp_path, limit_s=0.3, peers=peers) as here:
        with closing(here.dial()) as connection:
            connection.sendall(begun)
            assert await told(connection) == b""
        await until(lambda: not here.handshakes.pending)
        assert here.failed == 1 and not here.made


@on_a_loop
async def test_what_ends_before_it_greets_is_forgotten(tmp_path: Path) -> None:
    async with site(tmp_path, peers=True) as here:
        here.dial().close()  # nothing has failed: a probe of the port
        with closing(here.dial()) as connection:
            connection.sendall(b"\x16\x03\x01\x02\x00 and no more")
            connection.shutdown(socket.SHUT_WR)
            await until(lambda: here.failed == 1)
        assert not here.handshakes.pending


@on_a_loop
async def test_a_greeting_in_pieces_is_read_when_it_is_whole(tmp_path: Path) -> None:
    async with site(tmp_path, peers=True) as here:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = client_context(here.port.all[0].source._replace(ca_file=here.ca_file), [NATIVE])
        secure = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with pytest.raises(ssl.SSLWantReadError):
            secure.do_handshake()
        hello = outgoing.read()
        with closing(here.dial()) as connection:
            for piece in (hello[:3], hello[3:100], hello[100:]):
                connection.sendall(piece)
                await asyncio.sleep(0.05)
            incoming.write(await told(connection))
            while True:
                try:
                    secure.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    incoming.write(await told(connection))
            connection.sendall(outgoing.read())
            await until(lambda: len(here.made) == 1)


@on_a_loop
async def test_a_client_without_tls_is_told(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        with closing(here.dial()) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert await told(connection) == b"TLS, please"
            assert await told(connection) == b""
        assert here.failed == 1 and not here.made


@on_a_loop
async def test_garbage_behind_the_first_byte_of_tls_ends(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        with closing(here.dial()) as connection:
            connection.sendall(b"\x16\x03\x01\x00\x05garbage")
            while await told(connection):
                pass
        await until(lambda: here.failed == 1)
        assert not here.made and not here.handshakes.pending


@on_a_loop
async def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        with closing(here.dial()) as silent, closing(here.dial()) as begun:
            begun.sendall(b"\x16\x03\x01\x02\x00" + b"\x01" * 20)
            await until(lambda: len(here.handshakes.pending) == 2)
            await asyncio.sleep(0.05)
            here.handshakes.close()
            assert not here.handshakes.pending
            assert await told(silent) == b"" and await told(begun) == b""


@on_a_loop
async def test_without_descriptors_it_pauses_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Poor:
        """A listener that runs out of descriptors once."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener, self.refused = listener, 0

        def accept(self) -> Any:
            if not self.refused:
                self.refused += 1
                raise OSError(24, "Too many open files")
            return self.listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.listener, name)

    async with site(tmp_path) as here:
        poor = Poor(here.handshakes._listener)
        monkeypatch.setattr(here.handshakes, "_listener", poor)
        _, writer = await here.connect()
        assert poor.refused == 1
        writer.close()


@pytest.mark.parametrize("place", ["context", "handshake"])
@on_a_loop
async def test_a_bug_of_our_own_ends_one_connection_and_nothing_else(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncaught: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: uncaught.append(context))
    async with site(tmp_path) as here:
        with monkeypatch.context() as patched:

            def broken(*_: Any, **__: Any) -> Any:
                raise RuntimeError("a bug")

            if place == "context":
                patched.setattr(here.port, "context", broken)
            else:
                patched.setattr(here.handshakes, "factory", broken)
            with closing(here.dial()) as connection:
                connection.sendall(b"\x16\x03\x01\x02\x00" + b"\x01" * 20)
                assert await told(connection) == b""
            await until(lambda: here.failed == 1)
        assert not here.handshakes.pending and not here.made
        _, writer = await here.connect()
        writer.write(b"in")
        await until(lambda: here.received == [b"in"])
        writer.close()
    assert uncaught == []


@on_a_loop
async def test_a_broken_invariant_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncaught: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: uncaught.append(context))
    async with site(tmp_path) as here:

        async def broken(*_: Any, **__: Any) -> Any:
            raise InvariantBroken("a bug")

        monkeypatch.setattr(loop, "connect_accepted_socket", broken)
        with closing(here.dial()) as connection:
            connection.sendall(b"\x16\x03\x01\x02\x00" + b"\x01" * 20)
            await until(lambda: bool(uncaught))
        assert isinstance(uncaught[0]["exception"], InvariantBroken)


@on_a_loop
async def test_a_connection_that_cannot_be_watched_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async with site(tmp_path) as here:
        monkeypatch.setattr(here.handshakes.loop, "add_reader", full)
        with closing(here.dial()) as connection:
            assert await told(connection) == b""
        assert here.failed == 1 and not here.handshakes.pending


def test_a_frame_of_the_native_protocol_is_not_taken_for_tls() -> None:
    assert speaks_tls(b"\x16\x03\x01\x00\xff") and speaks_tls(b"\x16\x03\x03\x00\xff")
    assert not speaks_tls(b"\x16\x03\x00\x00\x01") and not speaks_tls(b"PRI * HTTP/2.0")
