"""The floor: what a bare Python process reaches when it does only what no broker can leave out.

The pump receives frames over loopback TCP, checks the CRC32C of each, writes all whole frames that
arrived with one call per turn of the loop into a fresh preallocated file, and answers each frame.
Its client has the frames ready and only sends and counts answers.  With ``sync`` an answer waits
for an fdatasync that started after the write; one runs at a time, off the loop.  The ping-pong sends
64 bytes there and back.

Frame: <IIQ size, crc32c of the body, number; body.  Answer: <QQ number, position.  Both processes
set Danube's socket options.

``serve`` prints its port and runs until it is stopped; ``send`` and ``ping`` are roles of perf/child.py.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections import deque
from pathlib import Path
from typing import Any

from danube.core import kernels
from danube.core.batch import checksum
from danube.host.tcp import tune
from perf.child import Options, go, moments, percentiles, serve, timed_us

FRAME = struct.Struct("<IIQ")
ANSWER = struct.Struct("<QQ")
RECEIVE_BYTES = 2 << 20
WINDOW_BYTES = 32 << 20  # the publish credit of a Danube connection
PING_BYTES = 64


class Pump(asyncio.BufferedProtocol):
    """Receives, checks, writes once per turn, answers."""

    def __init__(self, file: int, frame_bytes: int, sync: bool) -> None:
        self.file = file
        self.sync = sync
        self.buffer = bytearray(max(RECEIVE_BYTES, 2 * frame_bytes))
        self.view = memoryview(self.buffer)
        self.filled = 0
        self.position = 0
        self.waiting: deque[bytes] = deque()
        self.syncing = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        tune(transport.get_extra_info("socket"))

    def connection_lost(self, error: Exception | None) -> None:
        os.close(self.file)  # the file is unlinked: its pages go to the next run

    def get_buffer(self, hint: int) -> memoryview:
        return self.view[self.filled :]

    def buffer_updated(self, count: int) -> None:
        self.filled += count
        start, answers = 0, []
        while self.filled - start >= FRAME.size:
            size, crc, number = FRAME.unpack_from(self.buffer, start)
            if self.filled - start < size:
                break
            if not number:  # a ping: nothing is kept of it
                self.transport.write(bytes(self.view[start : start + size]))
                self._keep(start + size)
                return
            if checksum.crc32c(self.view[start + FRAME.size : start + size]) != crc:
                raise SystemExit("the pump received a damaged frame")
            answers.append(ANSWER.pack(number, self.position + start))
            start += size
        if start:
            os.pwrite(self.file, self.view[:start], self.position)
            self.position += start
            self._keep(start)
            self._answer(b"".join(answers))

    def _keep(self, start: int) -> None:
        rest = self.filled - start
        self.view[:rest] = self.view[start : self.filled]
        self.filled = rest

    def _answer(self, answers: bytes) -> None:
        if not self.sync:
            self.transport.write(answers)
            return
        self.waiting.append(answers)
        if not self.syncing:
            self.syncing = True
            self.task = asyncio.ensure_future(self._sync_all())

    async def _sync_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self.waiting:
            group = b"".join(self.waiting)
            self.waiting.clear()
            await loop.run_in_executor(None, os.fdatasync, self.file)
            self.transport.write(group)
        self.syncing = False


async def serve_floor(options: Options) -> None:
    """Serve one connection after another until the process is stopped; each writes a fresh file."""
    kernels.load()  # the fastest CRC32C that Danube itself may use
    path = Path(options["directory"]) / "floor.segment"

    def fresh() -> Pump:
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
        path.unlink()
        os.posix_fallocate(file, 0, max(1 << 20, options["total_bytes"]))
        return Pump(file, options["frame_bytes"], options["sync"])

    server = await asyncio.get_running_loop().create_server(fresh, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Sender(asyncio.Protocol):
    """Keeps up to WINDOW_BYTES of frames un-answered until ``count`` were answered."""

    def __init__(self, frame: bytes, count: int) -> None:
        self.frame = frame
        self.count = count
        self.sent = 0
        self.answered_bytes = 0
        self.window = max(1, WINDOW_BYTES // len(frame))
        self.writable = True
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=4 << 20)
        tune(transport.get_extra_info("socket"))

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self.push()

    def push(self) -> None:
        answered = self.answered_bytes // ANSWER.size
        while self.writable and self.sent < self.count and self.sent - answered < self.window:
            self.sent += 1
            self.transport.write(self.frame)

    def data_received(self, data: bytes) -> None:
        self.answered_bytes += len(data)
        if self.answered_bytes == self.count * ANSWER.size:
            self.done.set_result(None)
        self.push()


async def send(options: Options) -> Options:
    """Send ``frame_count`` frames of ``frame_bytes`` when the parent says so."""
    body = os.urandom(options["frame_bytes"] - FRAME.size)
    frame = FRAME.pack(options["frame_bytes"], checksum.crc32c(body), 1) + body
    loop = asyncio.get_running_loop()
    _, sender = await loop.create_connection(
        lambda: Sender(frame, options["frame_count"]), "127.0.0.1", options["port"]
    )
    await go()
    started = time.monotonic_ns()
    sender.push()
    await sender.done
    return moments(started, options["frame_count"])


class Ponger(asyncio.Protocol):
    """Waits for one answer at a time, as an application that awaits would."""

    def __init__(self) -> None:
        self.received = 0
        self.waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        tune(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if self.received >= PING_BYTES and self.waiter is not None:
            self.received -= PING_BYTES
            self.waiter.set_result(None)


async def ping(options: Options) -> Options:
    """Round trips of 64 bytes: back to back, or ``rate`` a second; returns microseconds."""
    loop = asyncio.get_running_loop()
    _, ponger = await loop.create_connection(Ponger, "127.0.0.1", options["port"])
    data = FRAME.pack(PING_BYTES, 0, 0) + bytes(PING_BYTES - FRAME.size)

    def there_and_back() -> asyncio.Future[None]:
        ponger.waiter = loop.create_future()
        ponger.transport.write(data)
        return ponger.waiter

    return percentiles((await timed_us(options["count"] + 50, there_and_back, options.get("rate", 0)))[50:])


if __name__ == "__main__":
    serve({"serve": serve_floor, "send": send, "ping": ping})
