"""The blocking shell: the same session over a plain socket, without a loop and without threads of its own.

Whoever waits reads the socket; of several threads that wait, one reads for all.  One lock guards the
session and is not held while a thread sleeps in recv.  Works under gevent's monkey patching, because
it uses nothing but socket, threading and time.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from danube.client.address import Address
from danube.client.dialling import closed_early, refused, tune_socket
from danube.client.reply import Plan, Reply
from danube.client.session import Session
from danube.errors import ConnectionFailed, DanubeError, OperationTimeout
from danube.limits import FRAME_BYTES_MAX, HANDSHAKE_TIMEOUT_S, RECEIVE_BUFFER_BYTES
from danube.telemetry import events

T = TypeVar("T")
SEND_STALL_S = 30.0
READ_TURN_S = 0.5  # a reader looks up so often, for work that other threads left to it
JOIN_BYTES = 65_536
_telemetry = events("client")


class BlockingConnection:
    """One socket, read by whoever waits."""

    def __init__(self, session: Session, addresses: list[Address], connect_timeout_s: float) -> None:
        self.session = session
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._addresses = addresses
        self._connect_timeout_s = connect_timeout_s
        self._socket: socket.socket | None = None
        self._reading = False
        self._buffer = bytearray(RECEIVE_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        session.when_silent = self._drop

    def open(self) -> None:
        """Connect once, or raise what went wrong at the last address."""
        with self.lock:
            self._connect()

    def close(self) -> None:
        """Write what is queued and close the socket."""
        with self.lock:
            self.flush()
            self._drop(ConnectionFailed("the client is closed"), quietly=True)

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, reply: Reply, timeout_s: float | None = None, what: str = "the call") -> Any:
        """The reply's value, or its error raised; OperationTimeout after ``timeout_s``."""
        if not self.wait_until(lambda: reply.settled, timeout_s):
            raise OperationTimeout(f"{what} took longer than {timeout_s:g} s")
        if reply.error is not None:
            raise reply.error.with_traceback(None)
        return reply.value

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Move bytes until ``condition`` holds (True) or time is up (False)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.lock:
            while True:
                self.flush()
                if condition():
                    return True
                left_s = READ_TURN_S if deadline is None else deadline - time.monotonic()
                if left_s <= 0:
                    return False
                if self._reading:
                    self._changed.wait(min(left_s, READ_TURN_S))
                else:
                    self._turn(min(left_s, READ_TURN_S))

    def run(self, plan: Plan[T]) -> T:
        """Carry out a plan: wait for each reply it yields and hand back value or error."""
        error: Exception | None = None
        value: Any = None
        try:
            while True:
                try:
                    with self.lock:
                        reply = plan.send(value) if error is None else plan.throw(error)
                except StopIteration as stop:
                    return cast(T, stop.value)
                error = value = None
                try:
                    value = self.wait(reply)
                except Exception as caught:
                    error = caught
        finally:
            with self.lock:
                plan.close()

    # -- one turn -------------------------------------------------------------------------------

    def _turn(self, wait_s: float) -> None:
        """Read once, for at most ``wait_s`` or until the next timer, and run what is due."""
        session = self.session
        moment_ns = session.next_timer_ns
        if moment_ns is not None:
            wait_s = min(wait_s, max(0.0, (moment_ns - session.now_ns()) / 1e9))
        if self._socket is None:
            self._reconnect(wait_s)
        else:
            self._read(wait_s)
        session.on_time()
        self.flush()

    def _read(self, wait_s: float) -> None:
        sock = cast(socket.socket, self._socket)
        view = self._view[self._end :]
        count = -1
        failure: DanubeError | None = None
        self._reading = True
        self.lock.release()  # other threads send meanwhile
        try:
            sock.settimeout(wait_s)
            count = sock.recv_into(view)
        except (TimeoutError, BlockingIOError, InterruptedError):
            count = -1
        except OSError as error:
            failure = ConnectionFailed("the connection to the broker was lost", why=str(error))
        finally:
            self.lock.acquire()
            self._reading = False
            self._changed.notify_all()
        if sock is not self._socket:
            return
        if count == 0:
            failure = ConnectionFailed("the connection to the broker was lost", why="the broker closed it")
        if failure is None and count > 0:
            failure = self._take(count)
        if failure is not None:
            self._drop(failure)

    def _take(self, count: int) -> DanubeError | None:
        self._end += count
        session = self.session
        try:
            self._start = session.received(self._view, self._start, self._end)
        except DanubeError as error:
            return error
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > RECEIVE_BUFFER_BYTES:
                self._resize(RECEIVE_BUFFER_BYTES)
        elif self._start + session.wanted > len(self._buffer) or self._end == len(self._buffer):
            self._resize(min(max(session.wanted, RECEIVE_BUFFER_BYTES), FRAME_BYTES_MAX))
        return None

    def _resize(self, size: int) -> None:
        """Move the incomplete frame to the front of a buffer that can hold all of it."""
        rest = bytes(self._view[self._start : self._end])
        if size != len(self._buffer):
            self._buffer = bytearray(size)
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def flush(self) -> None:
        """Write what is queued; the lock is held."""
        sock = self._socket
        if sock is None or not self.session.has_output:
            return
        output = self.session.take_output()
        try:
            small: list[bytes] = []
            for one in output:
                if len(one) < JOIN_BYTES:
                    small.append(one)
                    continue
                self._send_all(sock, b"".join(small))
                small.clear()
                self._send_all(sock, one)
            self._send_all(sock, b"".join(small))
        except OSError as error:
            self._drop(ConnectionFailed("the connection to the broker was lost", why=str(error)))

    def _send_all(self, sock: socket.socket, data: bytes) -> None:
        """Like sendall, but a reader's shorter timeout on the same socket does not cut it short."""
        view = memoryview(data)
        stalled_since = time.monotonic()
        while view:
            try:
                view = view[sock.send(view) :]
                stalled_since = time.monotonic()
            except (TimeoutError, BlockingIOError, InterruptedError):
                if time.monotonic() - stalled_since > SEND_STALL_S:
                    raise TimeoutError(f"the broker took no bytes for {SEND_STALL_S:g} s") from None
                time.sleep(0.0005)

    # -- dialling -------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Try every address once; raise the last failure."""
        failure: DanubeError | None = None
        for address in self._addresses:
            try:
                self._connect_to(address)
                return
            except DanubeError as error:
                failure = error
        raise failure or ConnectionFailed("no broker address was given")

    def _connect_to(self, address: Address) -> None:
        try:
            sock = socket.create_connection(address, self._connect_timeout_s)
        except OSError as error:
            raise refused(address, error) from None
        tune_socket(sock)
        self._socket = sock
        self._start = self._end = 0
        self.session.connected()
        self.flush()
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        while not self.session.ready:
            if self._socket is None:
                raise closed_early(address, self._reason)
            if time.monotonic() > deadline:
                self._drop(ConnectionFailed(f"the broker at {address} did not greet"), quietly=True)
                raise ConnectionFailed(
                    f"the broker at {address} did not greet", hint="is this Danube's native port?"
                )
            self._read(0.2)
        self.flush()

    def _drop(self, reason: DanubeError, quietly: bool = False) -> None:
        sock, self._socket = self._socket, None
        if sock is None:
            return
        self._reason = reason
        if self.session.ready and not quietly:
            _telemetry.warning("connection lost", reason=str(reason))
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed from the other side
        sock.close()
        self._start = self._end = 0
        self.session.disconnected(reason)
        self._changed.notify_all()

    _reason: DanubeError | None = None
    _dial_at_ns = 0
    _dial_failure: DanubeError | None = None

    def _reconnect(self, wait_s: float) -> None:
        """One attempt when its time has come, else a pause; the session fails when it is time to give up."""
        session = self.session
        if session.failure is not None:
            raise session.failure.with_traceback(None)
        if self._dial_at_ns == 0:
            try:
                self._dial_at_ns = session.now_ns() + session.backoff_ns()
            except ConnectionFailed as error:
                error.why = str(self._dial_failure) if self._dial_failure is not None else error.why
                session.fail(error)
                return
        pause_s = min(wait_s, (self._dial_at_ns - session.now_ns()) / 1e9)
        if pause_s > 0:
            self._changed.wait(pause_s)
        if not 0 < self._dial_at_ns <= session.now_ns() or self._socket is not None:
            return
        self._dial_at_ns = 0
        try:
            self._connect()
            self._dial_failure = None
        except DanubeError as error:
            self._dial_failure = error
            if not error.retryable:
                session.fail(error)
