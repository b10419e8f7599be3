"""A worker's end of the link to the mover: over a real socket, lost and made again."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from danube.broker.links import Frame, FrameReader, LinkClient, encode_frame


class Mover:
    """Listens; keeps frames of all connections."""

    def __init__(self) -> None:
        self.address = f"\0danube-test-{secrets.token_hex(8)}"
        self.frames: list[Frame] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.address)
        listener.listen(4)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.changed.set()
        frames = FrameReader()
        try:
            while data := await reader.read(65_536):
                self.frames += frames.feed(data)
                self.changed.set()
        except ConnectionError:
            pass

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


SEALED: dict[str, Any] = {"topic_id": 1, "partition": 2}


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Any], None]:
    def runner(main: Any) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main)

    return runner


def test_frames_go_both_ways_and_a_lost_connection_is_made_again(run: Callable[[Any], None]) -> None:
    async def scenario() -> None:
        mover, received, connections = Mover(), [], []
        await mover.start()
        client = LinkClient(
            asyncio.get_running_loop(), "mover", mover.address, lambda: connections.append(1), received.append
        )
        client.send("sealed", **SEALED)  # dropped: whoever connects says everything
        assert not client.connected and client.crowded
        client.start()
        await mover.until(lambda: bool(mover.writers))
        while not client.connected:
            await asyncio.sleep(0)
        assert not client.crowded
        client.send("sealed", **SEALED)
        await mover.until(lambda: len(mover.frames) == 1)
        assert mover.frames[0] == {"kind": "sealed", **SEALED}
        mover.writers[0].write(encode_frame("fetched", id=3, error=""))
        while not received:
            await asyncio.sleep(0.001)
        assert received[0]["id"] == 3
        mover.writers.pop().transport.abort()
        await mover.until(lambda: bool(mover.writers))
        while len(connections) < 2:
            await asyncio.sleep(0.001)
        mover.writers[-1].write(b"\xff\xff\xff\xff nonsense")
        await mover.until(lambda: len(mover.writers) >= 2)
        while len(connections) < 3:
            await asyncio.sleep(0.001)
        client.stop()
        client.start()
        await mover.stop()
        while client.connected:
            await asyncio.sleep(0.001)

    run(scenario())


def test_nobody_listens_at_first(run: Callable[[Any], None]) -> None:
    async def scenario() -> None:
        mover, connections = Mover(), []
        client = LinkClient(
            asyncio.get_running_loop(),
            "mover",
            mover.address,
            lambda: connections.append(1),
            lambda frame: None,
        )
        client.start()
        await asyncio.sleep(0.1)
        assert not connections
        await mover.start()
        async with asyncio.timeout(10):
            while not connections:
                await asyncio.sleep(0.01)
        await mover.until(lambda: bool(mover.writers))  # who is not served yet could not be let go
        client.stop()
        await mover.stop()
        await asyncio.sleep(0.01)

    run(scenario())
