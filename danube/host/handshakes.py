"""TLS handshakes of a listening port: begun by the client's first bytes, bounded in number and in time.

A connection becomes one of its door only after the handshake.  Until then it costs a socket, and after the
client's first bytes a TLS state, of which there are at most so many: the oldest makes room for a new one,
because a client greets within moments and among too many it is the oldest that never will.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from danube.host import tcp, telemetry

if TYPE_CHECKING:
    from danube.host.tls import TlsPort

HANDSHAKE_MAX_S: Final = 5.0
HANDSHAKES_MAX: Final = 1_000
SHUTDOWN_MAX_S: Final = 2.0  # for the other side to answer the end of TLS
ACCEPTED_AT_ONCE: Final = 64
PAUSE_S: Final = 0.5  # without a descriptor for another connection
_RECORD_HEADER_BYTES: Final = 5
_RECORD_BYTES_MAX: Final = 16 * 1024 + _RECORD_HEADER_BYTES
_HANDSHAKE: Final = 0x16

_log = telemetry.events("tls")


def _uncounted(name: str, amount: int) -> None:
    pass


def speaks_tls(first: bytes) -> bool:
    """Return whether these are the first three bytes or more of a TLS connection."""
    return first[0] == _HANDSHAKE and first[1] == 3 and 1 <= first[2] <= 4


class Handshakes:
    """Accepts the connections of one listening socket, and hands them over once they are encrypted."""

    def __init__(
        self,
        listener: socket.socket,
        port: TlsPort,
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        most: int = HANDSHAKES_MAX,
        limit_s: float = HANDSHAKE_MAX_S,
        count: Callable[[str, int], None] = _uncounted,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.port = port
        self.factory = factory
        self.limit_s = min(limit_s, HANDSHAKE_MAX_S)
        self.count = count
        self.pending: dict[_Handshake, None] = {}  # oldest first
        self._most = most
        self._listener = listener
        self._closed = False
        self._listen()

    def _listen(self) -> None:
        if not self._closed:
            self.loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more, and end the handshakes that are not done."""
        if self._closed:
            return
        self._closed = True
        self.loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for one in list(self.pending):
            one.end()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.limited("no connection is accepted for a moment", source="accept", why=str(error))
                self.loop.remove_reader(self._listener.fileno())
                self.loop.call_later(PAUSE_S, self._listen)
                return
            if len(self.pending) >= self._most:
                self.failed(next(iter(self.pending)), "too many others began after it")
            one = _Handshake(self, accepted, tcp.host_of(peer))
            self.pending[one] = None
            one.start()

    def failed(self, one: _Handshake, why: str) -> None:
        """End a handshake that will not be done."""
        self.count("tls_handshakes_failed", 1)
        _log.limited("a TLS handshake failed", source=one.host, why=why)
        one.end()

    def broke(self, one: _Handshake, error: Exception) -> None:
        """End a handshake on which our own code failed: one connection ends, and the worker goes on."""
        self.count("tls_handshakes_failed", 1)
        why = f"{type(error).__name__}: {error}"
        _log.limited("a TLS handshake hit a bug", source=one.host, level=logging.ERROR, why=why)
        one.end()
        one.close()


class _Handshake:
    """One connection, from its acceptance to the end of its handshake."""

    def __init__(self, owner: Handshakes, accepted: socket.socket, host: str) -> None:
        self.host = host
        self._owner = owner
        self._socket = accepted
        self._wanted = 1  # bytes, before the socket counts as readable
        self._task: asyncio.Task[object] | None = None
        self._timer = owner.loop.call_later(owner.limit_s, self._late)

    def start(self) -> None:
        try:
            self._socket.setblocking(False)
            self._owner.loop.add_reader(self._socket.fileno(), self._look)
        except OSError as error:
            self._owner.failed(self, str(error))

    def _late(self) -> None:
        self._owner.failed(self, f"it was not done within {self._owner.limit_s:g} s")

    def _look(self) -> None:
        try:
            self._read_greeting()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._owner.failed(self, str(error))
        except Exception as error:  # else it would end the worker, and all its connections
            self._owner.broke(self, error)

    def _read_greeting(self) -> None:
        """Begin once the client's first record is there, which lies in the socket until TLS reads it."""
        first = self._socket.recv(_RECORD_BYTES_MAX, socket.MSG_PEEK)
        if not first:
            self.end()  # a probe of the port
        elif len(first) < _RECORD_HEADER_BYTES:
            self._wait_for(_RECORD_HEADER_BYTES)
        elif not speaks_tls(first):
            self._answer_plain(first)
        elif self._owner.port.reads_greeting and len(first) < (size := _record_bytes(first)):
            self._wait_for(size)
        else:
            self._begin(first)

    def _wait_for(self, size: int) -> None:
        """Be called again when so much is there; called with less, the client has ended its side."""
        if self._wanted >= size:
            self._owner.failed(self, "the client's greeting ends early")
            return
        self._wanted = size
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def _answer_plain(self, first: bytes) -> None:
        with suppress(OSError):
            self._socket.recv(len(first))  # closed with unread bytes, a socket is reset
            self._socket.send(self._owner.port.refusal)
            self._socket.shutdown(socket.SHUT_WR)
        self._owner.failed(self, "the client does not speak TLS")

    def _begin(self, first: bytes) -> None:
        owner = self._owner
        owner.loop.remove_reader(self._socket.fileno())
        if self._wanted > 1:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._task = owner.loop.create_task(
            owner.loop.connect_accepted_socket(
                owner.factory, self._socket, ssl=owner.port.context(first),
                ssl_handshake_timeout=owner.limit_s, ssl_shutdown_timeout=SHUTDOWN_MAX_S,
            )
        )  # fmt: skip
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[object]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            self.end()
        elif isinstance(error, OSError):  # ssl.SSLError is one
            self._owner.failed(self, str(error) or "the client ended it")
        elif isinstance(error, Exception):
            self._owner.broke(self, error)
        else:  # a broken invariant is not one connection's
            self.end()
            self.close()
            self._owner.loop.call_exception_handler({"message": "a TLS handshake", "exception": error})

    def close(self) -> None:
        """Close the socket, which no transport may have taken."""
        self._socket.close()

    def end(self) -> None:
        """Forget this handshake, and its connection if it is not handed over."""
        if self not in self._owner.pending:
            return
        del self._owner.pending[self]
        self._timer.cancel()
        if self._task is None:
            self._owner.loop.remove_reader(self._socket.fileno())
            self._socket.close()
        elif not self._task.done():
            self._task.cancel()


def _record_bytes(first: bytes) -> int:
    return min(_RECORD_HEADER_BYTES + int.from_bytes(first[3:5]), _RECORD_BYTES_MAX)
