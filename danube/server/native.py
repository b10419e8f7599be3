"""The native door: frames from a socket to the router, frames from partitions to the socket.

Bytes are received into a lent buffer, cut into frames where they lie, and referred to until the end
of the turn.  Output is collected during a turn and handed to the transport in one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec

from danube import __version__
from danube.broker.admission import Admission
from danube.broker.api import Holder, RoutedSession, Turns
from danube.broker.routing.passing import ConnectionPassing
from danube.broker.routing.router import Router
from danube.broker.worker.places import Places
from danube.core.protocol import native as wire
from danube.core.protocol.native import Authenticate, Expiring, Frame, FrameDecoder, Hello, Kind, Welcome
from danube.core.protocol.silence import Silence, Verdict
from danube.core.security.principals import INTERNAL, Identity
from danube.errors import (
    DanubeError,
    Draining,
    IssuerUnavailable,
    LimitExceeded,
    NotAuthenticated,
    NotSupported,
    OperationTimeout,
    Overloaded,
    ProtocolError,
    TokenExpired,
    UnsupportedVersion,
)
from danube.host import clock, tcp, telemetry
from danube.host.tls import of_peer
from danube.limits import FRAME_BYTES_MAX, OUTPUT_BUFFER_BYTES_MAX, PUBLISH_CREDIT_BYTES, RECEIVE_BUFFER_BYTES
from danube.server.expiries import Expiries
from danube.server.half_open import gone, tune_socket, unsent_bytes, untaken_bytes
from danube.server.receive_buffers import LENT_BYTES_MAX, ReceiveBuffer, ReceiveBuffers


def answers_in(output: bytes) -> int:
    """How many requests after HELLO are answered by these whole frames."""
    frames = FrameDecoder().frames(output, 0, len(output))
    return sum(1 for frame in frames if frame.correlation and frame.kind != Kind.WELCOME)


_log = telemetry.events("native")
_PONG = int(Kind.PONG)
_PING = int(Kind.PING)  # a member of an IntEnum costs several times as much to look up
_SHARE_MEMORY = int(Kind.SHARE_MEMORY)
_AUTHENTICATE = int(Kind.AUTHENTICATE)
_ASKS = frozenset(
    map(int, (Kind.PING, Kind.LOOKUP, Kind.ADMIN, Kind.AUTHENTICATE))
)  # answered, and then forgotten
_OWN = frozenset(
    map(int, (Kind.PING, Kind.PONG, Kind.SHARE_MEMORY, Kind.AUTHENTICATE))
)  # for the door itself
_OPENS = frozenset(map(int, (Kind.OPEN_PRODUCER, Kind.SUBSCRIBE)))
HANDSHAKE_FRAME_BYTES_MAX = 64 * 1024
HIGH_WATER_BYTES = 4 * 1024 * 1024
FRAMES_AT_ONCE = 16  # frames of a connection between two checks of the clock
SHARE_NS = 10_000_000  # of a turn, for one connection; its other frames wait for the next turn
HELD_UP_NS = 5_000_000_000  # one sweep is made each second
SWEPT_MAX = 512  # connections whose peers are checked in one second


class NativeServer:
    """Connections of the native protocol on one worker."""

    def __init__(
        self,
        worker: int,
        router: Router,
        *,
        connections_max: int,
        places: Places,
        handshake_timeout_s: float,
        session_timeout_ms: int,
        turns: Turns,
        count: Callable[[str, int], None],
        address: Callable[[], str] = str,
        passing: ConnectionPassing | None = None,
        admission: Admission | None = None,
    ) -> None:
        """``address``: host:port by which other brokers name this one; "" on a single host.

        ``passing``: the way to other workers of this host; None if there are none.  ``admission``: who
        may come in; None where nobody is asked.
        """
        self.admission = admission
        self._expiries = Expiries(admission.leeway_us if admission is not None else 0)
        self.address = address
        self.passing = passing
        self.worker = worker
        self.router = router
        self.connections: dict[int, NativeConnection] = {}
        self.buffers = ReceiveBuffers()
        self.count = count
        self.turns = turns
        self.draining = False
        self.unflushed = False  # there is output, or bytes of this turn lie in receive buffers
        self._connections_max = connections_max
        self._places = places
        self._handshake_timeout_s = handshake_timeout_s
        self.session_timeout_ms = session_timeout_ms
        self._swept_ns = 0
        self._next_id = 0
        self._dirty: dict[NativeConnection, None] = {}
        self.waiting: dict[NativeConnection, None] = {}  # for the next turn, or for room in a ring
        self._resting: dict[NativeConnection, None] = {}  # have frames for the next turn
        self._unswept: list[NativeConnection] = []  # connections that the current sweep has still to check
        self._shaking: dict[NativeConnection, float] = {}

    def factory(self) -> NativeConnection:
        self._next_id += 1
        return NativeConnection(self, self._next_id)

    def arrived(self, unread: bytes, sent_bytes: int, told: bytes = b"") -> NativeConnection:
        """The protocol of a connection that another worker has welcomed and passed on with these bytes.

        ``sent_bytes`` only tells whether its client answers PING, and ``told`` who it is: the worker that
        welcomed it knows.
        """
        connection = self.factory()
        connection.arrive(unread, answers_ping=sent_bytes > 0)
        if told:
            connection.identity = msgspec.msgpack.decode(told, type=Identity)
            self.identified(connection)
            self.entered(connection, arrived=True)
        return connection

    def entered(self, connection: NativeConnection, *, arrived: bool = False) -> None:
        """Count the connection for its principal; raises Overloaded if that has as many as it may."""
        if self.admission is not None and connection.identity.how != "internal":
            principal = str(connection.identity.principal)
            self._places.enter(principal, connection.host, arrived=arrived)
            connection.entered = principal

    def identified(self, connection: NativeConnection) -> int:
        """Follow the connection's credential to its end; return the seconds until then, 0 for never."""
        if self.admission is None or not connection.identity.expires_us:
            return 0
        now_us = self.admission.now_us()
        self._expiries.watch(connection, now_us)
        return max(1, (connection.identity.expires_us - now_us) // 1_000_000)

    def opened(self, connection: NativeConnection, now_s: float) -> None:
        if connection.welcomed and self.taken_back(connection):  # while it was passed on
            connection.refuse(_taken_back())
            return
        held, most = len(self.connections), self._connections_max
        try:
            self._places.take(connection.host, held, most, arrived=connection.welcomed)
        except (LimitExceeded, Overloaded) as error:
            connection.refuse(error)
            return
        self.connections[connection.connection_id] = connection
        self.count("connections", 1)
        if not connection.welcomed:
            self._shaking[connection] = now_s + self._handshake_timeout_s
            self.count("connections_total", 1)

    def taken_back(self, connection: NativeConnection) -> bool:
        """Return whether the credential that the connection began with is good no longer."""
        return self.admission is not None and self.admission.revoked(connection.identity)

    def shaken(self, connection: NativeConnection) -> None:
        self._shaking.pop(connection, None)

    def closed(self, connection: NativeConnection) -> None:
        self._dirty.pop(connection, None)
        self.waiting.pop(connection, None)
        self._resting.pop(connection, None)
        self._shaking.pop(connection, None)
        if connection.entered:
            self._places.exit(connection.entered)
        if self.connections.pop(connection.connection_id, None) is not None:
            self._places.give_back(connection.host)
            self.count("connections", -1)
            self.router.session_gone(connection)

    def has_output(self, connection: NativeConnection) -> None:
        self._dirty[connection] = None
        self.unflushed = True
        if not self.turns.flush_pending:
            self.turns.schedule_turn()

    def block(self, connection: NativeConnection) -> None:
        self.waiting[connection] = None

    def rest(self, connection: NativeConnection) -> None:
        """Let a connection that had its share of this turn go on in the next."""
        self._resting[connection] = None

    def rest_until(self, connection: NativeConnection, until_ns: int) -> None:
        """Let a connection go on when its publishes are within their limit again."""
        delay_s = (until_ns - clock.monotonic_ns()) / 1e9
        asyncio.get_running_loop().call_later(max(0.0, delay_s), self._rested, connection)

    def _rested(self, connection: NativeConnection) -> None:
        if not connection.closed:
            self.waiting[connection] = None
            self.turns.schedule_turn()

    def session(self, connection_id: int) -> RoutedSession | None:
        """The connection that frames from an owner elsewhere are for."""
        return self.connections.get(connection_id)

    def holders(self) -> list[Holder]:
        return list(self.connections.values())

    def worker_restarted(self, worker: int) -> None:
        for connection in list(self.connections.values()):
            self.router.worker_restarted(connection, worker)

    def hand_over(self) -> bool:
        """Process frames that waited for this turn, or for room in a ring.

        Return True if a ring is still full.
        """
        if self.waiting:
            blocked, self.waiting = self.waiting, {}
            for connection in blocked:
                connection.unblock()
        return bool(self.waiting)

    def flush(self) -> None:
        """Hand the output of this turn to the transports; the receive buffers are free again."""
        self.unflushed = False
        if self._dirty:
            dirty, self._dirty = self._dirty, {}
            for connection in dirty:
                connection.flush()
        self.buffers.end_turn()
        if self._resting:
            self.waiting.update(self._resting)
            self._resting.clear()
            self.turns.schedule_turn()

    def sweep(self, now_s: float) -> None:
        """Close connections without a handshake in time, and those whose peer has vanished."""
        late = [connection for connection, deadline_s in self._shaking.items() if deadline_s <= now_s]
        for connection in late:
            connection.refuse(OperationTimeout("no HELLO came in time", hint="is this a Danube client?"))
        if not self._unswept:
            self._unswept = list(self.connections.values())
        for connection in self._unswept[-SWEPT_MAX:]:
            connection.leave_gone_peer()
        del self._unswept[-SWEPT_MAX:]
        self._look_for_silence(clock.monotonic_ns())
        if self.admission is not None:
            for holder, left_s in self._expiries.due(self.admission.now_us()):
                holder.expire(left_s)

    def _look_for_silence(self, now_ns: int) -> None:
        """Send PING to silent clients, and end the sessions of those that do not answer."""
        held_up = now_ns - self._swept_ns > HELD_UP_NS  # this process was, so it can have heard no client
        self._swept_ns = now_ns
        timeout_ns = self.session_timeout_ms * 1_000_000
        for connection in list(self.connections.values()):
            silence = connection.silence
            if silence is None or not silence.quiet(now_ns, timeout_ns):
                continue
            if held_up or connection.waiting:
                silence.heard_ns = now_ns
            else:
                connection.look_for_silence(silence, now_ns, timeout_ns)

    def drain(self) -> None:
        """Announce to every client that this broker stops, so that it closes or connects elsewhere."""
        self.draining = True
        for connection in list(self.connections.values()):
            connection.send_error(
                Draining("the broker is stopping", hint="the client connects again by itself")
            )

    def close_all(self) -> None:
        for connection in list(self.connections.values()):
            connection.close()

    def silence(self) -> None:
        """Drop every connection that was greeted, with its unsent output; others have asked nothing yet."""
        for connection in list(self.connections.values()):
            if connection.welcomed:
                connection.abort()

    def abort_entered(self) -> None:
        """Drop every connection that was let in; one that has not greeted yet is judged when it does."""
        for connection in list(self.connections.values()):
            if connection.entered:
                connection.abort()


class NativeConnection(RoutedSession, asyncio.BufferedProtocol):
    """One socket of the native protocol."""

    def __init__(self, server: NativeServer, connection_id: int) -> None:
        super().__init__(connection_id)
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder(HANDSHAKE_FRAME_BYTES_MAX)
        self._buffer: ReceiveBuffer | None = None  # with the beginning of a frame, or with waiting frames
        self._received_bytes = 0
        self._output: list[bytes | memoryview] = []
        self.welcomed = False
        self._placed = False  # the handshake is done, and the connection stays with this worker
        self._owed = 0  # number of unanswered requests, until the connection is placed
        self._unread = b""  # read by the worker that passed it on
        self._blocked = False
        self._reading = True
        self._descriptor = -1
        self._tls = False
        self.silence: Silence | None = None  # where its client answers PING
        self._certificate = b""  # of the client, which TLS has verified
        self.peer = self.host = ""
        self.entered = ""  # the principal that it is counted for

    # -- transport --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        raw = transport.get_extra_info("socket")
        tune_socket(raw)
        self._descriptor = raw.fileno()
        ssl_object = transport.get_extra_info("ssl_object")
        self._tls = ssl_object is not None
        if of_peer(ssl_object):
            self.identity = INTERNAL
        elif ssl_object is not None:
            self._certificate = ssl_object.getpeercert(True) or b""
        self.peer = str(transport.get_extra_info("peername") or "a process of this host")
        self.host = tcp.host_of(transport.get_extra_info("peername"))
        self._server.opened(self, asyncio.get_running_loop().time())
        if self._unread and not self._transport.is_closing():
            unread, self._unread = self._unread, b""
            self.get_buffer(len(unread))[: len(unread)] = unread
            self.buffer_updated(len(unread))

    def arrive(self, unread: bytes, *, answers_ping: bool) -> None:
        """Go on where another worker has stopped: with these bytes, which begin a frame."""
        self.welcomed = self._placed = True
        if answers_ping:
            self.silence = Silence(clock.monotonic_ns())
        self._decoder.size_max = FRAME_BYTES_MAX
        self._unread = unread

    def connection_lost(self, exc: Exception | None) -> None:
        if self._buffer is not None:
            self._server.buffers.give_back(self._buffer)
            self._buffer = None
        self._output.clear()
        self.closed = True
        self._transport = None
        self._server.closed(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        room, self._buffer = self._server.buffers.room(self._buffer, self._decoder.wanted)
        return room

    def buffer_updated(self, nbytes: int) -> None:
        buffers = self._server.buffers
        self._server.unflushed = True
        buffer = buffers.received(self._buffer, nbytes)
        self._received_bytes += nbytes
        if self._blocked:
            self._keep(buffer)
            return
        self._consume(buffer)
        if buffers.lent_bytes > LENT_BYTES_MAX:
            self._server.turns.run_turn()

    def pause_writing(self) -> None:
        self.writable = False
        self._set_reading(False)
        self._server.router.session_writable(self)

    def resume_writing(self) -> None:
        self.writable = True
        self._set_reading(not self._blocked)
        self._server.router.session_writable(self)

    def eof_received(self) -> bool:
        return False

    def _set_reading(self, reading: bool) -> None:
        transport = self._transport
        if transport is None or reading == self._reading or transport.is_closing():
            return
        self._reading = reading
        if reading:
            transport.resume_reading()
        else:
            transport.pause_reading()

    # -- frames -----------------------------------------------------------------------------------

    def _consume(self, buffer: ReceiveBuffer) -> None:
        """Take the frames in ``buffer``; the next turn executes them."""
        self._server.unflushed = True
        if self._take(buffer):
            self._server.turns.schedule_turn()
        if buffer.start == buffer.end and buffer is self._server.buffers.scratch:
            self._buffer = None
        else:
            self._keep(buffer)

    def _keep(self, buffer: ReceiveBuffer) -> None:
        """Hold bytes that are not taken yet; the rest of the buffer belongs to the turn."""
        earned = self._received_bytes >= RECEIVE_BUFFER_BYTES
        self._buffer = self._server.buffers.keep(buffer, self._decoder.wanted, earned=earned)

    def _take(self, buffer: ReceiveBuffer) -> bool:
        """Take the whole frames; False if they end with a refusal, a full ring or this turn's share."""
        server = self._server
        router = server.router
        view = buffer.view
        router.received()
        taken, now_ns = 0, clock.monotonic_ns()
        end_ns = now_ns + SHARE_NS
        if self.silence is not None:
            self.silence.heard_ns = now_ns
        try:
            for frame in self._decoder.frames(view, buffer.start, buffer.end):
                if not self._placed and self._settle(frame, buffer):
                    if self.closed:
                        buffer.start = buffer.end
                        return False  # another worker continues with this frame
                elif frame.kind in _OWN:
                    self._take_own(frame, view)
                elif server.draining and frame.kind == Kind.PUBLISH:
                    self.send_error(Draining("the broker is stopping", hint="send again"), frame.correlation)
                elif not router.route(self, frame, view):
                    self._stop_at(buffer, frame.start - wire.FRAME_HEADER_BYTES)
                    server.block(self)
                    return False
                if self.rest_ns:
                    self._stop_at(buffer, self._decoder.position)
                    server.rest_until(self, self.rest_ns)
                    self.rest_ns = 0
                    return False
                taken += 1
                if taken % FRAMES_AT_ONCE == 0 and clock.monotonic_ns() >= end_ns:
                    self._stop_at(buffer, self._decoder.position)
                    server.rest(self)
                    return False
            buffer.start = self._decoder.position
        except DanubeError as error:
            buffer.start = buffer.end  # it holds taken frames until they are written
            server.turns.schedule_turn()
            late = isinstance(error, NotAuthenticated | TokenExpired | IssuerUnavailable)
            if server.admission is not None and late:
                self._refuse_late(error, server.admission.pause_s(self.host))
            else:
                self.refuse(error)
            return False
        return True

    def _take_own(self, frame: Frame, view: memoryview) -> None:
        """Take a frame that is for this door alone; a PONG was heard, and that is all."""
        if frame.kind == _PING:
            self.send(wire.control_frame(Kind.PONG, None, frame.correlation))
        elif frame.kind == _SHARE_MEMORY:
            self._refuse_memory(frame)
        elif frame.kind == _AUTHENTICATE:
            self._authenticate(frame, view)

    def _authenticate(self, frame: Frame, view: memoryview) -> None:
        """Take a newer credential of the same principal."""
        server, expires_s = self._server, 0
        given = wire.decode_control(view[frame.start : frame.end], Authenticate)
        if server.admission is not None:
            identity = server.admission.admit(given.token, self.host, self._certificate)
            if identity.principal != self.identity.principal:
                raise ProtocolError(
                    "a connection belongs to one principal",
                    why=f"it was {self.identity.principal}, and now is {identity.principal}",
                    hint="connect again",
                )
            former, self.identity = self.identity, identity
            expires_s = server.identified(self)
            if identity.groups != former.groups:
                self.judge_again()
        self.send(wire.result_frame(expires_s, frame.correlation))

    def _refuse_late(self, error: DanubeError, pause_s: float) -> None:
        """Refuse after a pause, in which nothing more is taken, so that guessing takes time."""
        self._blocked = True
        self._set_reading(False)
        asyncio.get_running_loop().call_later(pause_s, self.refuse, error)

    def expire(self, left_s: int) -> None:
        """Tell the client that its credential ends in so many seconds; 0: it has, so the connection ends."""
        if left_s:
            self.send(wire.control_frame(Kind.EXPIRING, Expiring(left_s)))
        else:
            self.refuse(TokenExpired("the credential has expired", hint="connect again with a new one"))

    def _settle(self, frame: Frame, buffer: ReceiveBuffer) -> bool:
        """Take a frame before the connection is placed; return False to route it like any other."""
        if not self.welcomed:
            self._shake(frame, buffer.view)
            return True
        if frame.kind == _PONG:
            return False
        if frame.kind in _ASKS:
            self._owed += 1
            return False
        self._placed = True
        return frame.kind in _OPENS and self._pass_on(frame, buffer)

    def _pass_on(self, frame: Frame, buffer: ReceiveBuffer) -> bool:
        """Pass the socket to the owner of the opened partition; False if this worker still owes answers."""
        server, transport = self._server, self._transport
        if server.passing is None or server.draining or transport is None:
            return False
        if self._owed or self._output or transport.get_write_buffer_size():
            return False
        owner = server.router.owner_of_opened(frame, buffer.view)
        unread = buffer.view[frame.start - wire.FRAME_HEADER_BYTES : buffer.end]
        descriptor = transport.get_extra_info("socket").fileno()
        answers_ping = int(self.silence is not None)
        told = b"" if server.admission is None else msgspec.msgpack.encode(self.identity)
        if owner is None or not server.passing.offer(owner, descriptor, unread, answers_ping, told):
            return False
        server.count("connections_passed", 1)
        self.abort()
        return True

    def _refuse_memory(self, frame: Frame) -> None:
        """Clients up to 0.1 offer memory for large batches; refused, they send them through the socket."""
        error = NotSupported("this broker reads batches from the socket only")
        self.send_error(error, frame.correlation)

    def _stop_at(self, buffer: ReceiveBuffer, position: int) -> None:
        """Keep the bytes behind ``position``, and stop reading until the server allows it."""
        buffer.start = position
        self._blocked = True
        self._set_reading(False)
        self._server.turns.schedule_turn()

    def unblock(self) -> None:
        self._blocked = False
        if self._buffer is not None and not self.closed:
            self._consume(self._buffer)
        if not self._blocked:
            self._set_reading(self.writable)

    def _shake(self, frame: Frame, view: memoryview) -> None:
        if frame.kind != Kind.HELLO:
            raise ProtocolError("the first frame must be HELLO")
        hello = wire.decode_control(view[frame.start : frame.end], Hello)
        if wire.VERSION not in hello.versions:
            raise UnsupportedVersion(
                f"the client speaks versions {hello.versions[:8]}", why=f"this broker speaks {wire.VERSION}"
            )
        admission = self._server.admission
        if admission is not None and self.identity is not INTERNAL:
            self.identity = admission.admit(hello.token, self.host, self._certificate)
            self._server.entered(self)
        self.welcomed = True
        if hello.answers_ping:
            self.silence = Silence(clock.monotonic_ns())
        self._placed = self._server.passing is None or self._tls  # TLS cannot go on in another process
        self._decoder.size_max = FRAME_BYTES_MAX
        self._server.shaken(self)
        welcome = Welcome(
            wire.VERSION,
            __version__,
            self.connection_id,
            self._server.worker,
            FRAME_BYTES_MAX,
            PUBLISH_CREDIT_BYTES,
            self._server.address(),
            self._server.session_timeout_ms,
            str(self.identity.principal) if admission is not None else "",
            self._server.identified(self),
        )
        self.send(wire.control_frame(Kind.WELCOME, welcome, frame.correlation))

    def judge_again(self) -> int:
        """Give up what its principal may not do any more; return how many handles were looked at."""
        server = self._server
        if server.taken_back(self):
            self.refuse(_taken_back())
            return 1
        return 1 if server.router.judging is None else server.router.judging.again(self)

    # -- output -----------------------------------------------------------------------------------

    def send(self, *parts: bytes | memoryview) -> None:
        if self.closed:
            return
        if not self._output:
            self._server.has_output(self)
        self._output.extend(parts)

    def flush(self) -> None:
        output, self._output = self._output, []
        transport = self._transport
        if transport is None or not output:
            return
        if not self._placed:
            self._owed -= answers_in(b"".join(output))
        transport.writelines(output)
        if transport.get_write_buffer_size() > OUTPUT_BUFFER_BYTES_MAX:
            _log.limited("slow client closed", source=self.host, peer=self.peer)
            transport.abort()

    def refuse(self, error: DanubeError) -> None:
        """Send a connection-level error and close."""
        self._server.count("errors", 1)
        if self._transport is not None and not self._transport.is_closing():
            self.flush()
            self._transport.write(wire.error_frame(error))
            self._transport.close()

    def close(self) -> None:
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def leave_gone_peer(self) -> None:
        """End the connection if the kernel shows that its peer has vanished."""
        if self._transport is not None and gone(self._transport.get_extra_info("socket")):
            _log.limited("a client is gone without a word", source=self.host, peer=self.peer)
            self.abort()

    @property
    def waiting(self) -> bool:
        """Return whether input is unread because a ring is full, or other connections have their turn."""
        return self._blocked

    def look_for_silence(self, silence: Silence, now_ns: int, timeout_ns: int) -> None:
        """Send PING to a silent client, or end its session."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        unsent = transport.get_write_buffer_size() + unsent_bytes(self._descriptor)
        if self._tls and unsent:
            unsent = untaken_bytes(transport.get_extra_info("socket"))
        verdict = silence.look(now_ns, timeout_ns, unsent)
        if verdict is Verdict.ASK:
            transport.write(wire.control_frame(Kind.PING))
        elif verdict is Verdict.END:
            timeout_ms = timeout_ns // 1_000_000
            _log.limited("a client does not answer", source=self.host, peer=self.peer, timeout_ms=timeout_ms)
            self.abort()

    def abort(self) -> None:
        self._output.clear()
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


def _taken_back() -> NotAuthenticated:
    return NotAuthenticated("the credential is not accepted any more", hint="get a new one")
