"""The socket half of a gRPC connection: bytes to the HTTP/2 machine, its output back, once a turn.

Whatever the machine tells of calls is :mod:`danube.server.grpc.connection`'s.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, cast

from danube.core.http2.connection import ServerConnection
from danube.errors import DanubeError
from danube.host import clock, tcp, telemetry
from danube.limits import OUTPUT_BUFFER_BYTES_MAX
from danube.server.grpc.placing import Unplaced
from danube.server.half_open import tune_socket
from danube.server.native import HIGH_WATER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from danube.broker.api import Turns
    from danube.broker.audit.audit import Audit
    from danube.core.http2.frames import Http2Settings
    from danube.core.security.principals import Identity
    from danube.server.grpc.guard import GrpcGuard
    from danube.server.grpc.methods import Method
    from danube.server.grpc.placing import Placing
    from danube.server.messages.consuming import GrpcConsumer

_log = telemetry.events("grpc")
NEVER_NS = 1 << 63
LAST_WRITE_S = 0.01
LAST_WORDS_NS_MAX = 3_000_000_000  # to read why it was refused
UNREAD_NS_MAX = 300_000_000_000  # a peer that takes less than HIGH_WATER_BYTES in this time is given up


class SocketDoor(Protocol):
    """The port as its connections see it: :class:`danube.server.grpc.door.GrpcDoor`."""

    methods: dict[str, Method]
    message_bytes_max: int
    http2_settings: Http2Settings
    scratch: memoryview
    turns: Turns
    count: Callable[[str, int], None]
    draining: bool
    placing: Placing | None
    guard: GrpcGuard | None
    audit: Audit | None

    def opened(self, connection: GrpcSocket, *, arrived: bool = False) -> None: ...
    def closed(self, connection: GrpcSocket) -> None: ...
    def enter(self, connection: GrpcSocket, identity: Identity) -> None: ...
    def leave(self, consumer: GrpcConsumer) -> None: ...
    def judge_again(self, connection: GrpcSocket) -> int: ...
    def writable(self, connection: GrpcSocket) -> None: ...
    def has_output(self, connection: GrpcSocket) -> None: ...


class GrpcSocket(asyncio.BufferedProtocol):
    """Transport of one gRPC connection, see the module; a subclass handles the calls."""

    _http2: ServerConnection

    def __init__(self, door: SocketDoor) -> None:
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._rest = b""  # the beginning of a frame
        self._dirty = False
        self._give_up_ns = NEVER_NS
        self._refused = False  # the peer broke the protocol and got an error; its further bytes are not read
        self._unplaced = Unplaced() if door.placing is not None else None
        self._arrived = b""  # read by the worker that passed it on
        self._sent_bytes = 0  # by that one, and still to be left out
        self.congested = False
        self._certificate = b""  # of the client, which TLS has verified
        self.peer = self.host = ""
        self.entered = ""  # the principal that it is counted for
        self.judged = False  # by the worker that passed it on, so the first caller is counted without a limit
        self.local_address = ""

    def _placed(self, unplaced: Unplaced) -> None:
        """This worker serves the connection: begin the calls that were held."""
        raise NotImplementedError

    def _room(self) -> None:
        """The socket takes bytes again."""
        raise NotImplementedError

    def forget_caller(self) -> None:
        """Have the credentials of the next call checked anew."""

    def judge_again(self) -> int:
        """Give up what its callers may not do any more; return how much was looked at."""
        return self._door.judge_again(self)

    # -- transport --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        tune_socket(transport.get_extra_info("socket"))
        ssl_object = transport.get_extra_info("ssl_object")
        if ssl_object is not None:
            self._certificate = ssl_object.getpeercert(True) or b""
        self.peer = str(transport.get_extra_info("peername"))
        self.host = tcp.host_of(transport.get_extra_info("peername"))
        self.local_address = _address(transport.get_extra_info("sockname"))
        self._door.opened(self, arrived=bool(self._arrived))
        self.flush()  # the greeting, at once: it shows a client of another protocol its mistake
        if self._arrived:
            arrived, self._arrived = self._arrived, b""
            self.get_buffer(len(arrived))[: len(arrived)] = arrived
            self.buffer_updated(len(arrived))

    def arrive(self, received: bytes, sent_bytes: int) -> None:
        """Process again all bytes that another worker received.

        ``sent_bytes`` of the output were sent already.
        """
        self._unplaced = None
        self._arrived, self._sent_bytes, self.judged = received, sent_bytes, True

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest = b""
        self._transport = None
        self._http2.disconnected("the client is gone")
        self._door.closed(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer, which all connections share; callees copy the bytes that they keep."""
        rest, buffer = self._rest, self._door.scratch
        if rest:
            buffer[: len(rest)] = rest
            return buffer[len(rest) :]
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._refused:
            return
        buffer, start = self._door.scratch, len(self._rest)
        end = start + nbytes
        if self._unplaced is not None:
            self._unplaced.received += buffer[start:end]
        taken = self._http2.receive(buffer, 0, end, clock.monotonic_ns())
        if taken < end or start:
            self._rest = bytes(buffer[taken:end])
        if self._unplaced is not None and self._unplaced.decided(self._http2.last_stream_id > 0):
            self._place(self._unplaced)
        if not self._dirty and (self._http2.output or self._http2.failed):
            self.has_output()
        self._door.turns.schedule_turn()
        if self._http2.calls_received > 1:
            self._door.turns.schedule_turn()  # with several calls, count as several clients

    def _place(self, unplaced: Unplaced) -> None:
        """Pass the connection to the worker of the first call, or keep it for good and process held bytes."""
        door, transport = self._door, self._transport
        if transport is None or self._unplaced is not unplaced:
            return
        unsent = transport.get_write_buffer_size() > 0
        if unsent and not unplaced.deferred:  # as it is with some loops until their turn ends
            unplaced.deferred = True
            asyncio.get_running_loop().call_soon(self._place, unplaced)
            return
        self._unplaced = None
        placing = None if unsent or door.draining or self._http2.failed else door.placing
        if placing is not None and placing.pass_on(unplaced, transport.get_extra_info("socket").fileno()):
            door.count("connections_passed", 1)
            self.abort()
            return
        self._placed(unplaced)
        self.has_output()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.congested = self._http2.reading_paused = True
        self._give_up_ns = clock.monotonic_ns() + UNREAD_NS_MAX
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.congested = self._http2.reading_paused = False
        self._give_up_ns = NEVER_NS
        if self._transport is not None:
            self._transport.resume_reading()
        self._door.writable(self)
        self._room()

    # -- output and the door's turns --------------------------------------------------------

    def has_output(self) -> None:
        if not self._dirty:
            self._dirty = True
            self._door.has_output(self)

    def flush(self) -> None:
        """Hand the turn's output to the socket, unless its worker is not known yet."""
        self._dirty = False
        http2, transport = self._http2, self._transport
        if self._unplaced is not None and self._unplaced.calls:
            return
        output, http2.output = http2.output, []
        if transport is None:
            return
        if output:
            if self._unplaced is not None:
                self._unplaced.sent_bytes += sum(map(len, output))
                if http2.last_stream_id:  # the output may be an answer, which another worker cannot know
                    self._unplaced = None
            if self._sent_bytes:
                output = self._unsent(output)
            transport.writelines(output)
        if http2.failed:
            self._end_failed(transport)
        elif http2.closing and not http2.streams and not self._refused:
            transport.close()
        elif transport.get_write_buffer_size() > OUTPUT_BUFFER_BYTES_MAX:
            _log.limited("slow client closed", source=self.host, peer=self.peer)
            transport.abort()

    def _unsent(self, output: list[bytes]) -> list[bytes]:
        whole = b"".join(output)
        rest = whole[self._sent_bytes :]
        self._sent_bytes -= len(whole) - len(rest)
        return [rest]

    def _end_failed(self, transport: asyncio.Transport) -> None:
        """Say why, then let the peer read it: closing at once on unread bytes would reset the socket."""
        if self._refused:
            return
        self._refused = True
        _log.limited("connection refused", source=self.host, peer=self.peer, why=self._http2.failed)
        self._end_output(transport)

    def _end_output(self, transport: asyncio.Transport) -> None:
        self._give_up_ns = clock.monotonic_ns() + LAST_WORDS_NS_MAX
        if transport.can_write_eof():
            # Not at once: uvloop writes output at the end of this turn of the loop.
            asyncio.get_running_loop().call_later(LAST_WRITE_S, _write_eof, transport)
        else:
            transport.close()

    def tick(self, now_ns: int) -> None:
        if now_ns > self._give_up_ns and self._transport is not None:
            self._transport.abort()
        if self._refused or (self._unplaced is not None and self._unplaced.calls):
            return
        self._http2.tick(now_ns)
        if self._http2.output or self._http2.failed:
            self._unplaced = None  # output that depends on the time does not follow from received bytes
            self.has_output()

    def go_away(self) -> None:
        """Refuse further calls; running ones are finished."""
        self._http2.go_away("the broker is stopping")
        self.has_output()

    def refuse(self, error: DanubeError) -> None:
        """Refuse a connection for lack of room; a later sweep closes its socket."""
        if self._sent_bytes:  # the worker that passed it on has greeted it
            self._http2.output.clear()
            self._sent_bytes = 0
        self._http2.go_away(str(error), code=11)  # ENHANCE_YOUR_CALM
        self._refused = True
        self.flush()
        if self._transport is not None:
            self._end_output(self._transport)

    def close(self) -> None:
        self.flush()
        if self._transport is not None:
            self._transport.close()

    @property
    def called(self) -> bool:
        """Return whether its client has made a call."""
        return self._http2.last_stream_id > 0

    def abort(self) -> None:
        """Drop the connection with all that was to be sent."""
        transport, self._transport = self._transport, None
        self._http2.output = []
        if transport is not None:
            transport.abort()


def _write_eof(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.write_eof()


def _address(name: Any) -> str:
    if not isinstance(name, tuple) or len(name) < 2:
        return ""
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
