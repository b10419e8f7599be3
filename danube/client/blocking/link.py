"""One socket of the blocking client: the bytes between it and its session."""

from __future__ import annotations

import select
import socket
import time
from typing import Final

from danube.client.machine.address import Address
from danube.client.machine.dialling import closed_early, refused
from danube.client.machine.forked import let_go
from danube.client.machine.session import Session
from danube.errors import ConnectionFailed, DanubeError
from danube.host import local_socket
from danube.host import sockets as tcp
from danube.host.telemetry import events
from danube.limits import FRAME_BYTES_MAX, RECEIVE_BUFFER_BYTES, RECEIVE_BUFFER_BYTES_FIRST

SEND_STALL_S: Final = 30.0
SHAKE_ROUND_S: Final = 0.2
JOIN_BYTES: Final = 65_536
_telemetry = events("client")


class BlockingLink:
    """At most one socket at a time; everything is called with the connection's lock held."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.socket: socket.socket | None = None
        self.reason: DanubeError | None = None  # why there is none any more
        self.poller = select.poll()  # tells when the socket has something
        self._buffer = bytearray(RECEIVE_BUFFER_BYTES_FIRST)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        session.when_silent = self.drop
        session.when_forked = self.let_go

    # -- dialling -------------------------------------------------------------------------------

    def connect(self, address: Address, timeout_s: float) -> None:
        """Open a socket and greet; the answer comes with what is read."""
        sock = None
        try:
            sock = local_socket.dial(*address) or socket.create_connection(address, timeout_s)
            tcp.tune(sock)
            sock.setblocking(False)
            self.poller = select.poll()
            self.poller.register(sock, select.POLLIN)
        except BaseException as error:  # also a signal's
            if sock is not None:
                sock.close()
            if isinstance(error, OSError | ValueError):
                raise refused(address, error) from None
            raise
        self.socket = sock
        self._start = self._end = 0
        self.session.connected(tcp.on_this_host(sock))
        self.flush()

    def shake(self, address: Address, timeout_s: float) -> None:
        """Read until the broker has greeted."""
        deadline = time.monotonic() + timeout_s
        while not self.session.ready:
            if self.socket is None:
                raise closed_early(address, self.reason)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                silent = ConnectionFailed(
                    f"the broker at {address} did not greet", hint="is this Danube's native port?"
                )
                self.drop(silent, quietly=True)
                raise silent
            if _ready(self.socket, select.POLLIN, min(left_s, SHAKE_ROUND_S)):
                self.read()
        self.flush()

    def drop(self, reason: DanubeError, quietly: bool = False) -> None:
        """Close the socket and tell the session."""
        sock, self.socket = self.socket, None
        if sock is None:
            return
        self.reason = reason
        if self.session.ready and not quietly:
            _telemetry.warning("connection lost", reason=str(reason))
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed from the other side
        finally:  # whatever ends the call
            sock.close()
            self._start = self._end = 0
            self.session.disconnected(reason)

    def let_go(self) -> None:
        """In the child of a fork: hold the parent's socket no longer."""
        sock, self.socket = self.socket, None
        if sock is not None and sock.fileno() >= 0:
            let_go(sock.fileno())
            sock.close()

    # -- reading --------------------------------------------------------------------------------

    def read(self) -> None:
        """Take what the socket has."""
        sock = self.socket
        if sock is None:
            return
        try:
            self._received(sock.recv_into(self._view[self._end :]))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._received(0, str(error))
        except BaseException:  # a signal's: nobody knows what was taken
            self.drop(_cut_short())
            raise

    def _received(self, count: int, why: str = "the broker closed it") -> None:
        """So many bytes were received; 0: the connection is at its end."""
        if count == 0:
            self.drop(ConnectionFailed("the connection to the broker was lost", why=why))
            return
        self._end += count
        session = self.session
        try:
            self._start = session.received(self._view, self._start, self._end)
        except DanubeError as error:
            self.drop(error)
            return
        if self._start == self._end:
            full = self._end == len(self._buffer) < RECEIVE_BUFFER_BYTES
            self._start = self._end = 0
            if full or len(self._buffer) > RECEIVE_BUFFER_BYTES:
                self._resize(RECEIVE_BUFFER_BYTES)
        elif self._start + session.wanted > len(self._buffer) or self._end == len(self._buffer):
            self._resize(min(max(session.wanted, RECEIVE_BUFFER_BYTES), FRAME_BYTES_MAX))

    def _resize(self, size: int) -> None:
        """Move the incomplete frame to the front of a buffer that can hold all of it."""
        rest = bytes(self._view[self._start : self._end])
        if size != len(self._buffer):
            self._buffer = bytearray(size)
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    # -- writing --------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what is queued."""
        sock = self.socket
        if sock is None or not self.session.has_output:
            return
        output = self.session.take_output()
        try:
            small: list[bytes | memoryview] = []
            for one in output:
                if len(one) < JOIN_BYTES:
                    small.append(one)
                    continue
                self._send_all(sock, b"".join(small))
                small.clear()
                self._send_all(sock, one)
            self._send_all(sock, b"".join(small))
        except OSError as error:
            self.read()  # the broker may have said why before it closed the connection
            self.drop(ConnectionFailed("the connection to the broker was lost", why=str(error)))
        except BaseException:  # a signal's: a frame may be cut
            self.drop(_cut_short())
            raise

    def _send_all(self, sock: socket.socket, data: bytes | memoryview) -> None:
        """All of it, as long as the broker takes some every now and then."""
        view = memoryview(data)
        while view:
            try:
                view = view[sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                if not _ready(sock, select.POLLOUT, SEND_STALL_S):
                    raise TimeoutError(f"the broker took no bytes for {SEND_STALL_S:g} s") from None


def _ready(sock: socket.socket, event: int, wait_s: float) -> bool:
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(int(wait_s * 1000)))


def _cut_short() -> ConnectionFailed:
    return ConnectionFailed("the connection to the broker was given up", why="an exception cut a call short")
