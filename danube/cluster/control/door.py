"""The controller's door to the processes of its own host: a Unix socket, requests in, answers out.

A connection that sends a MESSAGE is a *follower*: it gets a MESSAGE without a body whenever the host's copy
has more to read.  An unread MESSAGE is not repeated, so a slow follower costs nothing.  The controller stops
reading from a connection while REQUESTS_MAX of its requests are under way, or while it does not read its
answers.

:class:`ControllerClient` sends requests to the controller of this host, from a thread that may block.

A connection that is lost is made again until the deadline: the controller may be starting anew.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from time import sleep
from typing import Final, cast

import msgspec

from danube.cluster.control.calls import (
    Answer,
    Change,
    Failed,
    Request,
    decode_answer,
    encode,
    received_error,
)
from danube.cluster.links.frames import Frame, FrameReader, Kind, Lane, pack_frame
from danube.errors import ConnectionFailed, OperationTimeout, OutcomeUnknown, ProtocolError
from danube.host import telemetry
from danube.host.clock import monotonic_ns
from danube.host.local_socket import same_user

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
        """Close the link; requests under way go on, as their proposals may be agreed on already."""
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
        """Announce that there is more to read, unless an earlier announcement was not read yet."""
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
                    return  # received bytes behind it wait
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
        """Announce applied entries to the followers, once for a turn of the loop."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        for link in self._links:
            link.tell()

    def close(self) -> None:
        """Accept nothing more and end open links; waiting clients ask the next controller."""
        self._server.close()
        for link in list(self._links):
            link.close()


async def serve_host(listener: socket.socket, asked: Asked) -> HostDoor:
    """Answer requests on a listening Unix socket; ``asked`` turns failures into answers itself."""
    links: set[HostLink] = set()
    loop = asyncio.get_running_loop()
    return HostDoor(await loop.create_unix_server(lambda: HostLink(asked, links), sock=listener), links)


RETRY_S: Final = 0.02
_RECEIVE_BYTES: Final = 256 * 1024


class ControllerClient:
    """One connection, used by one thread at a time; ``address`` is a path or an abstract name."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._link: socket.socket | None = None
        self._frames = FrameReader(Lane.CALLS.frame_bytes_max)
        self._number = 0

    def ask(self, request: Request, timeout_s: float) -> Answer:
        """Return the answer; raises the controller's error, OutcomeUnknown or ConnectionFailed.

        A request that may be repeated without harm is repeated until the deadline.
        """
        deadline_ns = monotonic_ns() + int(timeout_s * 1e9)
        sent, failure = False, None
        while True:
            try:
                self._connect(deadline_ns)
                if sent and isinstance(request, Change):
                    request = msgspec.structs.replace(request, repeated=True)
                sent = True
                answer = self._exchange(encode(request), deadline_ns)
            except ProtocolError:
                self.close()  # where the next frame begins is not known
                raise
            except OSError as error:
                self.close()
                if failure is None or not isinstance(error, TimeoutError):
                    failure = error  # this is told, also where time runs out in the pause behind it
                if monotonic_ns() + int(RETRY_S * 1e9) >= deadline_ns:
                    raise self._given_up(sent, timeout_s, failure) from None
                sleep(RETRY_S)
                continue
            if isinstance(answer, Failed):
                raise received_error(answer.error)
            return answer

    def _given_up(
        self, sent: bool, timeout_s: float, error: OSError
    ) -> OutcomeUnknown | OperationTimeout | ConnectionFailed:
        if sent:
            return OutcomeUnknown("the controller did not answer", why=f"within {timeout_s:.1f} s")
        if isinstance(error, TimeoutError):
            return OperationTimeout("the controller is not reached", why=f"within {timeout_s:.1f} s")
        return ConnectionFailed(
            "the controller is not reached", why=str(error), hint="is the broker running?"
        )

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._frames = FrameReader(Lane.CALLS.frame_bytes_max)

    def _connect(self, deadline_ns: int) -> None:
        if self._link is not None:
            return
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            link.settimeout(_left_s(deadline_ns))
            link.connect(self._address)
        except BaseException:
            link.close()
            raise
        self._link = link

    def _exchange(self, body: bytes, deadline_ns: int) -> Answer:
        link = self._link
        if link is None:
            raise ConnectionError("not connected")
        self._number += 1
        link.settimeout(_left_s(deadline_ns))
        link.sendall(pack_frame(Kind.REQUEST, body, self._number))
        while True:
            link.settimeout(_left_s(deadline_ns))
            data = link.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the controller closed the connection")
            for frame in list(self._frames.feed(data)):
                if frame.kind is Kind.ANSWER and frame.number == self._number:
                    return decode_answer(frame.body)


def _left_s(deadline_ns: int) -> float:
    """Seconds until the deadline; raises TimeoutError behind it."""
    left_ns = deadline_ns - monotonic_ns()
    if left_ns <= 0:
        raise TimeoutError("the deadline is over")
    return left_ns / 1e9
