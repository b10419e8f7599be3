"""The HTTP side of the metrics over real sockets: what is answered, refused and cut."""

from __future__ import annotations

import asyncio
import functools
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from danube.server.metrics.server import LATE_BYTES_MAX, MetricsServer

WAIT_S = 20.0
GET = b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n"
PAGE = b"danube_up 1\n"


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), WAIT_S))

    return run


class Served:
    """A server on a free port; ``page`` waits for ``ready``."""

    def __init__(self, body: bytes = PAGE, **bounds: Any) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.pages = 0
        self._body = body
        self.server = MetricsServer(self._page, "text/test", **bounds)
        self.writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def _page(self) -> bytes:
        await self.ready.wait()
        self.pages += 1
        return self._body

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, header fields and body of the answer to these bytes."""
        reader, writer = await self.connect()
        writer.write(data)
        return answer_in(await reader.read())

    async def gone(self) -> None:
        """Until the server holds no connection."""
        while self.server.connections:
            await asyncio.sleep(0.005)


def answer_in(data: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    return int(first.split(" ")[1]), fields, body


@asynccontextmanager
async def served(body: bytes = PAGE, **bounds: Any) -> AsyncIterator[Served]:
    made = Served(body, **bounds)
    listening = await asyncio.get_running_loop().create_server(made.server.factory, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        listening.close()
        made.server.close()
        for writer in made.writers:
            writer.close()
        await asyncio.sleep(0)


@on_a_loop
async def test_get_and_head() -> None:
    async with served() as web:
        status, fields, body = await web.ask(GET)
        assert (status, body) == (200, PAGE)
        assert fields == {"Content-Length": "12", "Connection": "close", "Content-Type": "text/test"}
        status, head_fields, body = await web.ask(GET.replace(b"GET", b"HEAD"))
        assert (status, body, head_fields) == (200, b"", fields)
        assert (await web.ask(b"GET http://h:9040/metrics?x=1 HTTP/1.0\r\n\r\n"))[0] == 200


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", 404), (b"GET /metrics/ HTTP/1.1", 404), (b"POST /elsewhere HTTP/1.1", 404),
        (b"POST /metrics HTTP/1.1", 405), (b"DELETE /metrics HTTP/1.1", 405), (b"get /metrics HTTP/1.1", 405),
        (b"GET /metrics", 400), (b"GET /metrics HTTP/2.0", 505),
        (b"GET /" + b"x" * 3_000 + b" HTTP/1.1", 414),
    ],
)  # fmt: skip
@on_a_loop
async def test_everything_else_is_refused_in_words(request_line: bytes, status: int) -> None:
    async with served() as web:
        found, fields, body = await web.ask(request_line + b"\r\nHost: h\r\n\r\n")
        assert found == status and body.endswith(b"\n") and len(body) == int(fields["Content-Length"])
        assert fields["Content-Type"].startswith("text/plain")
        assert fields.get("Allow") == ("GET, HEAD" if status == 405 else None)
        assert web.pages == 0


@on_a_loop
async def test_a_body_is_never_read() -> None:
    async with served() as web:
        body = b"Host: h\r\nContent-Length: 5\r\n\r\nhello"
        assert (await web.ask(b"POST /metrics HTTP/1.1\r\n" + body))[0] == 405
        assert (await web.ask(b"PUT / HTTP/1.1\r\n" + body))[0] == 404
        assert (await web.ask(b"GET /metrics HTTP/1.1\r\n" + body))[0] == 400
        assert web.pages == 0


@on_a_loop
async def test_a_head_that_is_too_large_is_answered_although_more_is_coming() -> None:
    async with served() as web:
        fields = b"X-Filler: " + b"a" * 100 + b"\r\n"
        status, _, body = await web.ask(b"GET /metrics HTTP/1.1\r\n" + fields * 200)
        assert status == 431 and b"8192" in body


@on_a_loop
async def test_a_request_that_never_ends_is_answered_and_cut() -> None:
    async with served(head_max_s=0.2, answer_max_s=0.2) as web:
        reader, writer = await web.connect()
        for byte in GET[:10]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.001)
        status, _, body = answer_in(await reader.read())
        assert status == 408 and b"0.2 s" in body
        await web.gone()


@on_a_loop
async def test_who_says_nothing_holds_a_connection_for_a_bounded_time() -> None:
    async with served(head_max_s=0.1, answer_max_s=0.1) as web:
        reader, _ = await web.connect()
        assert answer_in(await reader.read())[0] == 408
        await web.gone()


@on_a_loop
async def test_who_does_not_read_the_answer_is_cut() -> None:
    async with served(body=b"x" * 50_000_000, answer_max_s=0.5) as web:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", web.port))
            await loop.sock_sendall(client, GET)
            while not web.pages:
                await asyncio.sleep(0.005)
            assert web.server.connections
            await web.gone()


@on_a_loop
async def test_who_reads_and_does_not_close_is_cut() -> None:
    async with served(answer_max_s=0.2) as web:
        reader, _ = await web.connect()
        web.writers[-1].write(GET)
        assert answer_in(await reader.read())[0] == 200
        await web.gone()


@on_a_loop
async def test_a_client_may_end_its_side_before_the_answer() -> None:
    async with served() as web:
        web.ready.clear()
        reader, writer = await web.connect()
        writer.write(GET)
        writer.write_eof()
        await asyncio.sleep(0.05)
        web.ready.set()
        assert answer_in(await reader.read())[2] == PAGE
        await web.gone()


@on_a_loop
async def test_a_client_that_leaves_costs_nothing_more() -> None:
    async with served() as web:
        web.ready.clear()
        for data in (b"", b"GET /met", GET):
            _, writer = await web.connect()
            writer.write(data)
            await asyncio.sleep(0.02)
            gone = writer.get_extra_info("socket")  # without this it only says that it sends no more
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        await web.gone()
        web.ready.set()
        await asyncio.sleep(0.02)
        assert web.pages == 0
        assert (await web.ask(GET))[0] == 200


@on_a_loop
async def test_what_comes_after_the_request_is_not_read_without_bound() -> None:
    async with served(answer_max_s=10 * WAIT_S) as web:
        web.ready.clear()
        _, writer = await web.connect()
        writer.write(GET + GET)  # a second request is none: one answer a connection
        await asyncio.sleep(0.02)
        assert web.server.connections
        writer.write(b"x" * (4 * LATE_BYTES_MAX))
        await web.gone()
        assert web.pages == 0


@on_a_loop
async def test_connections_beyond_the_bound_are_refused_and_the_others_are_served() -> None:
    async with served(connections_max=3) as web:
        web.ready.clear()
        held = [await web.connect() for _ in range(3)]
        for _, writer in held:
            writer.write(GET)
        while len(web.server.connections) < 3:
            await asyncio.sleep(0.005)
        reader, _ = await web.connect()
        status, _, body = answer_in(await reader.read())
        assert status == 503 and b"at most 3" in body
        web.ready.set()
        assert [answer_in(await reader.read())[0] for reader, _ in held] == [200] * 3


@on_a_loop
async def test_a_hundred_clients_at_once() -> None:
    async with served() as web:
        found = await asyncio.gather(*[web.ask(GET) for _ in range(100)])
        assert {(status, body) for status, _, body in found} == {(200, PAGE)}
