"""Many writers at a controller's socket, each with one request on its way; for perf/raft_processes.py."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from typing import cast

from danube.cluster.control.calls import Propose, Proposed, decode_answer, encode
from danube.cluster.control.door import REQUESTS_MAX
from danube.cluster.links.frames import FrameReader, Kind, Lane, pack_frame
from danube.core.cluster.commands import PutKey
from danube.core.metadata.commands import encode_command, join_commands

TIMEOUT_MS = 60_000
WRITERS_PER_LINK = REQUESTS_MAX // 2


class Link(asyncio.Protocol):
    """A connection of a worker that has several requests under way."""

    def __init__(self) -> None:
        self._frames = FrameReader(Lane.CALLS.frame_bytes_max)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._waiting.pop(frame.number).set_result(frame.body)

    def connection_lost(self, error: Exception | None) -> None:
        for waiting in self._waiting.values():
            waiting.set_exception(error or ConnectionError("the controller closed the connection"))

    async def ask(self, body: bytes) -> bytes:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._transport.write(pack_frame(Kind.REQUEST, body, number))
        return await waiting

    def close(self) -> None:
        self._transport.close()


async def write_many(path: str, count: int, writers: int, batch: int, size: int) -> float:
    """Have ``count`` keys put by ``writers``, ``batch`` in each proposal; keys a second."""
    loop = asyncio.get_running_loop()
    needed = -(-writers // WRITERS_PER_LINK)
    links = [(await loop.create_unix_connection(Link, path))[1] for _ in range(needed)]
    proposals = iter(range(-(-count // batch)))
    value, run = b"x" * size, secrets.token_hex(4)

    async def writer(place: int) -> None:
        puts = [PutKey(key=f"/perf/{place}/{number}", value=value) for number in range(batch)]
        commands = join_commands([encode_command(put) for put in puts])
        for sequence, _ in enumerate(proposals, 1):
            request = Propose(f"{run}-{place}", sequence, commands, TIMEOUT_MS)
            answer = decode_answer(await links[place % needed].ask(encode(request)))
            if not isinstance(answer, Proposed) or any(outcome.error for outcome in answer.outcomes):
                raise AssertionError(f"a write was not agreed on: {answer}")

    began = time.perf_counter()
    try:
        await asyncio.gather(*(writer(place) for place in range(writers)))
    finally:
        for link in links:
            link.close()
    return count / (time.perf_counter() - began)
