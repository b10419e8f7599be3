"""The controller's door to the processes of its own host: a Unix socket, requests in, answers out.

A connection that sends a MESSAGE is a *follower*: it gets a MESSAGE whenever there is more to read in the
host's copy, without a body.  What it does not read is not said twice, so a slow one costs nothing.  Who
asks is not read while REQUESTS_MAX requests of it are under way, nor while it does not take its answers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final, cast

from danube.cluster.links.frames import Frame, FrameReader, Kind, Lane, pack_frame
from danube.errors import ProtocolError
from danube.host import telemetry
from danube.host.unix_peer import same_user

REQUESTS_MAX: Final = 64  # of one connection, under way; then it is not read
_MORE: Final = pack_frame(Kind.MESSAGE)

_log = telemetry.events("cluster.controller")

Asked = Callable[[bytes], Awaitable[bytes]]


class HostLink(asyncio.Protocol):
    """One connection of a worker or a command; each request is a task of its own."""

    def __init__(self, asked: Asked, links: set[HostLink]) -> None:
        self._asked = asked
        self._links = links
        self._frames = FrameReader(Lane.CALLS.frame_bytes_max)
        self._transport: asyncio.Transport
        self._tasks: set[asyncio.Task[None]] = set()
        self._follows = False
        self._writable = self._reading = True
        self._over = False
        self._answers: list[bytes] = []  # that leave with the end of this turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._links.add(self)
        if not same_user(transport.get_extra_info("socket")):
            _log.warning("a connection of another user is refused")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """What is under way goes on: it may be agreed on already."""
        self._over = True
        self._links.discard(self)

    def close(self) -> None:
        self._over = True
        self._transport.abort()

    def pause_writing(self) -> None:
        self._writable = False
        self._pace_reading()

    def resume_writing(self) -> None:
        self._writable = True
        self._pace_reading()

    def tell(self) -> None:
        """There is more to read; whoever has not read the last word needs no other."""
        if self._follows and not self._transport.get_write_buffer_size():
            self._transport.write(_MORE)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        try:
            for frame in self._frames.feed(data):
                if frame.kind is Kind.MESSAGE:
                    self._follows = True
                elif frame.kind is Kind.REQUEST:
                    self._start(frame)
                else:
                    raise ProtocolError("a frame of a worker is no request")
                if not self._reading:
                    return  # what has arrived behind it waits as bytes
        except ProtocolError as error:
            _log.error("a worker's connection is closed", why=str(error))
            self.close()

    def _pace_reading(self) -> None:
        reading = self._writable and len(self._tasks) < REQUESTS_MAX
        if reading == self._reading or self._over:
            return
        self._reading = reading
        if reading:
            self._transport.resume_reading()
            self.data_received(b"")
        else:
            self._transport.pause_reading()

    def _start(self, frame: Frame) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(frame))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        self._pace_reading()

    async def _answer(self, frame: Frame) -> None:
        answer = await self._asked(frame.body)
        self._answers.append(pack_frame(Kind.ANSWER, answer, frame.number))
        if len(self._tasks) == 1:
            self._flush()
        elif len(self._answers) == 1:  # others may be answered in this turn, too
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        if answers:
            self._transport.write(b"".join(answers))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pace_reading()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


class HostDoor:
    """The listening socket and its connections."""

    def __init__(self, server: asyncio.Server, links: set[HostLink]) -> None:
        self._server = server
        self._links = links
        self._telling = False

    def committed(self) -> None:
        """Something was applied: tell who follows, once for all of this turn of the loop."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        for link in self._links:
            link.tell()

    def close(self) -> None:
        """Accept nothing more and end what is open; who waits for an answer asks the next controller."""
        self._server.close()
        for link in list(self._links):
            link.close()


async def serve_host(listener: socket.socket, asked: Asked) -> HostDoor:
    """Answer requests on a listening Unix socket; ``asked`` turns failures into answers itself."""
    links: set[HostLink] = set()
    loop = asyncio.get_running_loop()
    return HostDoor(await loop.create_unix_server(lambda: HostLink(asked, links), sock=listener), links)
