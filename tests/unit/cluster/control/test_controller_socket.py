"""The controller's door to its own host: what a process asks costs a bounded amount of memory."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from danube.cluster.control.door import REQUESTS_MAX, Asked, HostDoor, HostLink, serve_host
from danube.cluster.links.frames import FrameReader, Kind, pack_frame


@asynccontextmanager
async def door(asked: Asked) -> AsyncIterator[tuple[HostDoor, socket.socket]]:
    """A door, and a connection to it."""
    address = f"\0danube-test-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(address)
    listener.listen()
    served = await serve_host(listener, asked)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(address)
        link.setblocking(False)
        yield served, link
        served.close()
        await asyncio.sleep(0.01)  # the loop closes what was aborted


async def one_link(served: HostDoor) -> HostLink:
    async with asyncio.timeout(5):
        while not served._links:
            await asyncio.sleep(0)
    (link,) = served._links
    return link


def test_requests_that_come_in_one_piece_are_begun_some_at_a_time_and_all_are_answered() -> None:
    count, under_way, most = 1_000, 0, 0

    async def asked(body: bytes) -> bytes:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return body

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with door(asked) as (_, link):
            sent = b"".join(pack_frame(Kind.REQUEST, b"x", number) for number in range(count))
            sending = asyncio.ensure_future(loop.sock_sendall(link, sent))
            frames = FrameReader(64)
            answered: list[int] = []
            async with asyncio.timeout(20):
                while len(answered) < count:
                    answered += [frame.number for frame in frames.feed(await loop.sock_recv(link, 65_536))]
            await sending
            assert sorted(answered) == list(range(count))

    asyncio.run(test())
    assert 1 < most <= REQUESTS_MAX


def test_who_asks_and_does_not_read_the_answers_is_not_read_meanwhile() -> None:
    answer_bytes = 15_000

    async def asked(body: bytes) -> bytes:
        return bytes(answer_bytes)

    async def test() -> None:
        async with door(asked) as (served, link):
            transport = (await one_link(served))._transport
            requests, sent = pack_frame(Kind.REQUEST, b"x", 1) * 64, 0
            for _ in range(2_000):
                with suppress(BlockingIOError):
                    sent += link.send(requests[sent % len(requests) :])
                await asyncio.sleep(0)
                assert transport.get_write_buffer_size() < 2 * REQUESTS_MAX * answer_bytes
            begun = sent // len(pack_frame(Kind.REQUEST, b"x", 1))
            assert begun > 2 * REQUESTS_MAX, "it asked for more than that"
            loop, frames, answered = asyncio.get_running_loop(), FrameReader(answer_bytes), 0
            async with asyncio.timeout(20):
                while answered < begun:  # and once it reads, all that arrived is answered
                    answered += len(list(frames.feed(await loop.sock_recv(link, 1 << 20))))

    asyncio.run(test())
