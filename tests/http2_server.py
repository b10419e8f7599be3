"""A server that answers every request with 200 and a few bytes: what scripts/h2spec is let loose on.

python -m tests.http2_server [PORT]        prints the port that it listens on, ends with its input
"""

from __future__ import annotations

import asyncio
import sys
import time

from danube.core.http2.connection import Http2Settings, ServerConnection, Stream
from danube.core.http2.headers import response_block

HEAD = response_block([(":status", "200"), ("content-type", "text/plain")])
TRAILERS = response_block([("x-end", "1")])
BODY = b"the Danube flows through ten countries\n"


class Driver(asyncio.Protocol):
    """Bytes between one socket and one machine; the handler of that machine too."""

    def __init__(self) -> None:
        self.machine = ServerConnection(self, Http2Settings(), time.monotonic_ns())
        self.rest = b""
        self.transport: asyncio.Transport | None = None
        self.told: list[str] = []

    # -- the socket's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.flush()

    def data_received(self, data: bytes) -> None:
        view = memoryview(self.rest + data)
        taken = self.machine.receive(view, 0, len(view), time.monotonic_ns())
        self.rest = bytes(view[taken:])
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.machine.disconnected(str(error or "closed"))

    def flush(self) -> None:
        assert self.transport is not None
        output, self.machine.output = self.machine.output, []
        if not self.transport.is_closing():
            self.transport.writelines(output)
            if self.machine.failed:
                self.transport.close()

    # -- the machine's side

    def request(self, stream: Stream, ended: bool) -> None:
        if ended:
            self.machine.answer(stream, HEAD, BODY, TRAILERS)

    def data(self, stream: Stream, data: memoryview, ended: bool) -> None:
        self.machine.consumed(stream, len(data))
        if ended:
            self.machine.answer(stream, HEAD, BODY, TRAILERS)

    def cancelled(self, stream: Stream, code: int) -> None:
        self.told.append(f"cancelled {stream.stream_id} {code}")

    def writable(self, stream: Stream) -> None:
        self.told.append(f"writable {stream.stream_id}")


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Driver, "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
