"""One connection between two nodes: it greets, then carries frames, and ends when the other side is silent.

No bytes of a peer are parsed before its greeting was accepted; a greeting is small and has a deadline.
A connection that both sides keep is never quiet: the side that dialled pings.  If nothing arrives for
``silent_s`` and no waiting byte leaves, the connection is half open and is closed.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from danube.cluster.links.frames import (
    Frame,
    FrameReader,
    Greeting,
    GreetingReader,
    Kind,
    Lane,
    Refused,
    pack_frame,
    pack_greeting,
)
from danube.errors import ConnectionFailed, ProtocolError
from danube.host import tcp
from danube.limits import KIB, MIB

SLOW_LANE_FACTOR: Final = 5  # a large frame on a slow network is not silence
REQUESTS_MAX: Final = 64  # of one connection, under way; then it is not read

_WRITE_BUFFER_BYTES: Final = {
    Lane.RAFT: 256 * KIB,
    Lane.BULK: 1 * MIB,
    Lane.CALLS: 1 * MIB,
    Lane.GUEST: 64 * KIB,
}


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """How long a greeting may take, how often to ping, and when silence is an end."""

    handshake_s: float = 3.0
    ping_s: float = 0.2
    silent_s: float = 1.5

    @classmethod
    def of_heartbeat(cls, heartbeat_ms: int) -> LinkTimes:
        heartbeat_s = heartbeat_ms / 1000
        return cls(ping_s=2 * heartbeat_s, silent_s=max(1.5, 10 * heartbeat_s))


class LinkOwner(Protocol):
    def judge(self, link: Link, greeting: Greeting) -> Greeting:
        """Accept a greeting and say with which one it is answered; raises Refused."""

    def opened(self, link: Link) -> None: ...
    def received(self, link: Link, frame: Frame) -> None: ...
    def resumed(self, link: Link) -> None: ...
    def refused(self, link: Link, refused: Refused) -> None: ...
    def closed(self, link: Link) -> None: ...


class Link(asyncio.Protocol):
    """With a ``greeting`` it is the dialling side, which sends first; ``host`` is the dialled host."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        owner: LinkOwner,
        times: LinkTimes,
        greeting: Greeting | None = None,
        host: str = "",
    ) -> None:
        self._loop = loop
        self._owner = owner
        self._times = times
        self.greeting = greeting
        self.host = host
        self.source = host
        self.peer: Greeting | None = None  # the other side's greeting, once it is accepted
        self.lane = Lane(greeting.lane) if greeting is not None else Lane.GUEST
        self.ended = False
        self.ready: asyncio.Future[Link] = loop.create_future()
        self.ready.add_done_callback(_looked_at)
        self.calls: dict[int, asyncio.Future[bytes]] = {}  # requests that wait for their answer
        self.serving = 0
        self._transport: asyncio.Transport | None = None
        self._greetings = GreetingReader()
        self._frames = FrameReader(self.lane.frame_bytes_max)
        self._writable = self._reading = True
        self._buffered = 0
        self._heard_s = loop.time()
        self._timer: asyncio.TimerHandle = loop.call_later(times.handshake_s, self._late)

    @property
    def dialled(self) -> bool:
        return self.greeting is not None

    @property
    def open(self) -> bool:
        return self.peer is not None and not self.ended

    @property
    def room(self) -> bool:
        """Whether a frame leaves soon when it is written now."""
        return self.open and self._writable

    @property
    def certificate(self) -> dict[str, Any] | None:
        """Certificate that the other side has shown in this connection, not in one that it resumes."""
        secure = self._transport.get_extra_info("ssl_object") if self._transport is not None else None
        return secure.getpeercert() if secure is not None and not secure.session_reused else None

    def write(self, frame: bytes) -> None:
        """Hand over one packed frame; it is dropped when the connection has ended."""
        if self._transport is not None and not self.ended:
            self._transport.write(frame)

    def abort(self) -> None:
        """End it without another word."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self._end()

    def request_ended(self) -> None:
        """An answer was written: go on reading where too many requests were under way."""
        self.serving -= 1
        self._pace_reading()

    def _pace_reading(self) -> None:
        """Stop reading while many requests of the peer are under way, or its answers are not taken."""
        reading = self.serving < REQUESTS_MAX and (self._writable or self.dialled)
        if reading == self._reading or self._transport is None or self.ended:
            return
        self._reading = reading
        if reading:
            self._transport.resume_reading()
            self._take(b"")
        else:
            self._transport.pause_reading()

    # -- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast(asyncio.Transport, transport)  # the loop's own class need not be one
        if self.ended:
            made.abort()
            return
        self._transport = made
        name = made.get_extra_info("peername")
        self.source = str(name[0]) if name else self.host
        made.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES[self.lane])
        _tune(made.get_extra_info("socket"), self._silent_s)
        if self.greeting is not None:
            made.write(pack_greeting(self.greeting))

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        if self.ended:
            return
        if self.peer is None:
            self._greet(data)
        else:
            self._take(data)

    def pause_writing(self) -> None:
        self._writable = False
        self._pace_reading()

    def resume_writing(self) -> None:
        self._writable = True
        self._pace_reading()
        if self.open:
            self._owner.resumed(self)

    # -- greeting ---------------------------------------------------------------------------------

    def _greet(self, data: bytes) -> None:
        try:
            greeting = self._greetings.feed(data)
            if greeting is None:
                return
            answer = self._owner.judge(self, greeting)
        except Refused as refused:
            self._refuse(refused)
            return
        if not self.dialled:
            self.lane = Lane(greeting.lane)
            self._frames = FrameReader(self.lane.frame_bytes_max)
            self.write(pack_greeting(answer))
        self.peer = greeting
        self._timer.cancel()
        self._tick()
        if not self.ready.done():
            self.ready.set_result(self)
        self._owner.opened(self)
        rest = self._greetings.rest
        if rest and not self.ended:
            self._take(rest)

    def _refuse(self, refused: Refused) -> None:
        """Send the reason to a node; send nothing to a peer that sent no greeting."""
        if not self.ready.done():
            self.ready.set_exception(refused)
        self._owner.refused(self, refused)
        told = not self.dialled and refused.reason not in ("garbage", "oversized")
        if self._transport is not None and told:
            self._transport.write(pack_greeting(Greeting(refused=refused.reason)))
            self._transport.close()
            self._loop.call_later(1.0, self._transport.abort)  # a peer that does not read gets no more time
        else:
            self.abort()

    def _late(self) -> None:
        """No greeting in time; with TLS perhaps not even its handshake."""
        reason = "slow" if self._transport is not None else "no_tls"
        self._refuse(Refused(reason, f"no greeting within {self._times.handshake_s} s"))

    # -- frames -----------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                if self.ended:
                    return
                self._take_frame(frame)
                if not self._reading:
                    return  # received bytes behind it wait
        except ProtocolError as error:
            self._owner.refused(self, Refused("protocol", str(error)))
            self.abort()

    def _take_frame(self, frame: Frame) -> None:
        if frame.kind is Kind.PING and not self.dialled:
            self.write(pack_frame(Kind.PONG))
        elif frame.kind is Kind.ANSWER and self.dialled:
            waiting = self.calls.pop(frame.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(frame.body)
        elif frame.kind is Kind.REQUEST and not self.dialled and self.lane in (Lane.CALLS, Lane.GUEST):
            self.serving += 1
            self._pace_reading()
            self._owner.received(self, frame)
        elif frame.kind is Kind.MESSAGE and not self.dialled and self.lane in (Lane.RAFT, Lane.BULK):
            self._owner.received(self, frame)
        elif frame.kind is not Kind.PONG:
            raise ProtocolError(f"a frame {frame.kind.name} has no place on lane {self.lane.name}")

    # -- silence ----------------------------------------------------------------------------------

    @property
    def _silent_s(self) -> float:
        factor = 1 if self.lane in (Lane.RAFT, Lane.GUEST) else SLOW_LANE_FACTOR
        return self._times.silent_s * factor

    def _tick(self) -> None:
        """Ping, and end the connection when it is half open."""
        if self.ended or self._transport is None:
            return
        now_s = self._loop.time()
        buffered = self._transport.get_write_buffer_size()
        if buffered < self._buffered or self.serving >= REQUESTS_MAX:
            self._heard_s = now_s  # the peer reads, or this side has stopped reading on purpose
        self._buffered = buffered
        if now_s - self._heard_s > self._silent_s:
            self._owner.refused(self, Refused("silent", "half open"))
            self.abort()
            return
        if self.dialled and self._writable:
            self.write(pack_frame(Kind.PING))
        self._timer = self._loop.call_later(self._times.ping_s, self._tick)

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self._timer.cancel()
        if not self.ready.done():
            self.ready.set_exception(ConnectionFailed("the connection ended before it was accepted"))
        for waiting in self.calls.values():
            if not waiting.done():
                waiting.set_exception(ConnectionFailed("the connection to a member was lost"))
                _looked_at(waiting)
        self.calls.clear()
        self._owner.closed(self)


def _looked_at(future: asyncio.Future[Any]) -> None:
    """Mark the future's exception as read, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()


def _tune(link: socket.socket | None, silent_s: float) -> None:
    """Have the kernel, too, end a connection whose peer acknowledges nothing."""
    if tcp.tune(link) and link is not None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s * 1000))
