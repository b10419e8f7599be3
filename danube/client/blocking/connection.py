"""The blocking shell: the same sessions over plain sockets, without a loop.

A waiting thread reads the sockets; of several waiting threads, one does so for all.  While no thread waits, a
thread of the client polls them now and then, so that a program that is busy for long answers the broker's
PING (:mod:`danube.client.blocking.attendance`).  One lock guards the sessions and is not held while a
thread sleeps. Works under gevent's monkey patching, because it uses nothing but socket, select, threading
and time.  There is one socket, except in a cluster, where each owner of something that is open has one (see
danube.client.machine.brokers).

One socket of the blocking client: the bytes between it and its session.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from danube.client.blocking.attendance import Attendance
from danube.client.machine.address import Address, closed_early, greeting_s, let_go, refused, told_nothing
from danube.client.machine.reply import Plan, Reply
from danube.client.machine.session import Received, Session
from danube.client.machine.tls import ClientTls, explained
from danube.errors import ConnectionFailed, DanubeError, OperationTimeout
from danube.host import local_socket, tcp
from danube.host.polling import READABLE, WRITABLE, make_poller
from danube.host.telemetry import events

SEND_STALL_S: Final = 30.0
SHAKE_ROUND_S: Final = 0.2
JOIN_BYTES: Final = 65_536
_telemetry = events("client")


class BlockingLink(Received):
    """Link with at most one socket; every call holds the connection's lock."""

    def __init__(self, session: Session, tls: ClientTls | None = None) -> None:
        super().__init__(session)
        self.socket: Any = None
        self._tls = tls
        self.reason: DanubeError | None = None  # why there is none any more
        self.poller = make_poller()  # for bytes that can be read
        session.when_silent = self.drop
        session.when_forked = self.let_go

    # -- dialling -------------------------------------------------------------------------------

    def connect(self, address: Address, timeout_s: float) -> None:
        """Open a socket and send HELLO; read() handles the answer."""
        sock: Any = None
        try:
            near = local_socket.dial(*address) if self._tls is None else None
            sock = near or socket.create_connection(address, timeout_s)
            tcp.tune(sock)
            sock.setblocking(False)
            if self._tls is not None:
                from danube.client.blocking.encrypted import encrypted

                sock = encrypted(sock, self._tls, address.host, timeout_s)
            self.poller = make_poller()
            self.poller.register(sock, READABLE)
        except BaseException as error:  # also a signal's
            if sock is not None:
                sock.close()
            if isinstance(error, OSError | ValueError):
                raise refused(address, error, self._tls) from None
            raise
        self.socket = sock
        self._start = self._end = 0
        try:
            self.session.connected(private=self._tls is not None or tcp.on_this_host(sock))
        except DanubeError as error:
            self.drop(error, quietly=True)
            raise
        self.flush()

    def greet(self, address: Address, timeout_s: float, greeted_s: float) -> None:
        """Connect, and read until the broker has greeted; once more if it ends that without a reason.

        ``timeout_s`` is for the connection, ``greeted_s`` for the greeting.
        """
        self.connect(address, timeout_s)
        try:
            self._shake(address, greeted_s)
        except ConnectionFailed:
            if not told_nothing(self.reason):
                raise
            self.connect(address, timeout_s)
            self._shake(address, greeted_s)

    def _shake(self, address: Address, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.session.ready:
            if self.socket is None:
                raise closed_early(address, self.reason, self._tls)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                silent = _silent(address)
                self.drop(silent, quietly=True)
                raise silent
            if _ready(self.socket, READABLE, min(left_s, SHAKE_ROUND_S)):
                self.read()
        self.flush()

    def drop(self, reason: DanubeError, quietly: bool = False) -> None:
        """Close the socket and notify the session."""
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
        """Read the available bytes of the socket."""
        self._read_once()
        if self._tls is not None:
            while self.socket is not None and self.socket.pending():  # no poller shows decrypted bytes
                self._read_once()

    def _read_once(self) -> None:
        sock = self.socket
        if sock is None:
            return
        try:
            self._received(sock.recv_into(self._view[self._end :]))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._received(0, *(explained(error) or (str(error),)))
        except BaseException:  # raised by a signal handler: the state of the read is unknown
            self.drop(_cut_short())
            raise

    def _received(self, count: int, why: str = "the broker closed it", hint: str = "") -> None:
        """Hand received bytes to the session; 0: the connection is at its end."""
        if count == 0:
            self.drop(ConnectionFailed("the connection to the broker was lost", why=why, hint=hint))
            return
        try:
            self._take(count)
        except DanubeError as error:
            self.drop(error)

    # -- writing --------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the queued frames."""
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
            self.read()  # the broker may have sent the reason before it closed the connection
            self.drop(ConnectionFailed("the connection to the broker was lost", why=str(error)))
        except BaseException:  # raised by a signal's handler: a frame may be cut
            self.drop(_cut_short())
            raise

    def _send_all(self, sock: Any, data: bytes | memoryview) -> None:
        """All of it, as long as the broker takes some every now and then."""
        view = memoryview(data)
        while view:
            try:
                view = view[sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                if not _ready(sock, WRITABLE, SEND_STALL_S):
                    raise TimeoutError(f"the broker took no bytes for {SEND_STALL_S:g} s") from None


def _ready(sock: Any, event: int, wait_s: float) -> bool:
    poller = make_poller()
    poller.register(sock, event)
    return bool(poller.poll(int(wait_s * 1000)))


def _cut_short() -> ConnectionFailed:
    return ConnectionFailed("the connection to the broker was given up", why="an exception cut a call short")


T = TypeVar("T")
ATTENDED_READS_MAX = 256  # a PING may lie behind as much as credit allows
READ_TURN_S = 0.5  # a reader looks up so often, for work that other threads left to it
OWNER_CONNECT_TIMEOUT_S = 2.0


class BlockingConnection:
    """Sockets of home and of owners, read by one of the waiting threads for all."""

    def __init__(
        self,
        session: Session,
        addresses: list[Address],
        connect_timeout_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        self.session = session
        self._tls = tls
        self.lock = threading.Lock()
        self._changed: threading.Event | None = None  # a thread waits for it
        self._addresses = addresses
        self._connect_timeout_s = connect_timeout_s
        self._reader = 0  # the thread that watches the sockets for all
        self._attendance = Attendance()
        self._home = BlockingLink(session, tls)
        session.when_forked = self._let_go
        self._owners: dict[Session, BlockingLink] = {}
        self._to_dial: dict[Session, Address] = {}
        session.brokers.dial = self._to_dial.__setitem__
        session.brokers.drop = self._drop_owner

    def open(self) -> None:
        """Connect once, or raise the error of the last address."""
        with self.lock:
            self._connect()
            self._attendance.start(self)

    def close(self) -> None:
        """Write the queued frames and close the sockets."""
        self._attendance.stop()
        with self.lock:
            self.flush()
            for link in [*self._owners.values(), self._home]:
                link.drop(ConnectionFailed("the client is closed"), quietly=True)
            self._tell()

    def _let_go(self) -> None:
        """Drop the sockets in the child of a fork, where no other thread runs or holds the lock."""
        self.lock = threading.Lock()
        self._changed = None
        self._reader = 0
        self._to_dial.clear()
        self._owners.clear()  # each lets go of its own socket
        self._home.let_go()

    def attend(self) -> None:
        """Read arrived bytes, unless a thread reads already, and write the answers; never wait."""
        with self.lock:
            for _ in range(ATTENDED_READS_MAX):
                if self._reader:  # whose thread sleeps in a poller, which takes one call at a time
                    break
                links = [link for link in self._links if link.socket is not None and link.poller.poll(0)]
                if not links:
                    break
                for link in links:
                    link.read()
            self.flush()
            self._tell()

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, reply: Reply, timeout_s: float | None = None, what: str = "the call") -> Any:
        """The reply's value, or its error raised; OperationTimeout after ``timeout_s``."""
        if not self.wait_until(lambda: reply.settled, timeout_s):
            raise OperationTimeout(f"{what} took longer than {timeout_s:g} s")
        if reply.error is not None:
            raise reply.error.with_traceback(None)
        return reply.value

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Move bytes until ``condition`` holds (True) or time is up (False), once at the least.

        A signal's handler may raise anywhere in here.  So the lock is held by ``with`` alone, no thread
        sleeps with it, and the thread that sleeps for all has read nothing from a socket.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        me, moved = threading.get_ident(), False
        while True:
            watched: dict[int, tuple[BlockingLink, Any]] = {}
            changed: threading.Event | None = None
            try:
                with self.lock:
                    self.flush()
                    if condition():
                        return True
                    self.flush()  # send the requests of the condition, such as one for more records
                    left_s = READ_TURN_S if deadline is None else deadline - time.monotonic()
                    if left_s <= 0 and moved:
                        return False
                    left_s = max(0.0, left_s)
                    if self._reader not in (0, me):
                        changed, left_s = self._change(), self._until_timer_s(min(left_s, READ_TURN_S))
                    else:
                        self._reader = me
                        watched, left_s = self._begin_turn(min(left_s, READ_TURN_S))
                ready = _sleep(watched, changed, left_s)
            finally:
                if self._reader == me:
                    self._reader = 0
            with self.lock:
                self._end_turn([watched[descriptor] for descriptor in ready])
            moved = True

    def _change(self) -> threading.Event:
        """Event that is set when the reading thread has read something, or has ended."""
        if self._changed is None:
            self._changed = threading.Event()
        return self._changed

    def _tell(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

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
            self.leave(plan.close)  # a call that was cut short is undone at the broker, without waiting

    def leave(self, close: Callable[[], Any]) -> None:
        """Close a producer or consumer without waiting for the broker's answer."""
        with self.lock:
            close()
            self.flush()

    # -- one turn -------------------------------------------------------------------------------

    @property
    def _links(self) -> list[BlockingLink]:
        return [self._home, *self._owners.values()]

    def _until_timer_s(self, wait_s: float) -> float:
        """Return the smaller of ``wait_s`` and the time until the next timer."""
        for link in self._links:
            moment_ns = link.session.next_timer_ns
            if moment_ns is not None:
                wait_s = min(wait_s, max(0.0, (moment_ns - link.session.now_ns()) / 1e9))
        return wait_s

    def _begin_turn(self, wait_s: float) -> tuple[dict[int, tuple[BlockingLink, Any]], float]:
        """Dial due addresses; return the sockets to watch by their descriptors, and the time to wait."""
        wait_s = self._until_timer_s(wait_s)
        if self._to_dial:
            self._dial_owner()
            wait_s = 0.0
        elif self._home.socket is None:
            wait_s = min(wait_s, self._reconnect())
        return {
            link.socket.fileno(): (link, link.socket) for link in self._links if link.socket is not None
        }, wait_s

    def _end_turn(self, readable: list[tuple[BlockingLink, Any]]) -> None:
        """Handle received bytes, and run due timers."""
        for link, sock in readable:
            if link.socket is sock:
                link.read()
        links = self._links
        for link in links:
            link.session.on_time()
        for link in [one for one in self._owners.values() if one.socket is None]:
            self._owner_lost(link, link.reason)
        self.flush()
        self._tell()

    def flush(self) -> None:
        """Write the queued frames; the caller holds the lock."""
        self._home.flush()
        for link in self._owners.values():
            link.flush()

    @property
    def has_output(self) -> bool:
        """Whether a flush would write anything."""
        return self.session.has_output or any(one.has_output for one in self._owners)

    # -- owners ---------------------------------------------------------------------------------

    def _dial_owner(self) -> None:
        session, address = next(iter(self._to_dial.items()))
        del self._to_dial[session]
        link = self._owners[session] = BlockingLink(session, self._tls)
        try:
            link.connect(address, min(self._connect_timeout_s, OWNER_CONNECT_TIMEOUT_S))
        except DanubeError as error:
            self._owner_lost(link, error)
            return
        late_ns = session.now_ns() + int(greeting_s(session.silence_ns, self._connect_timeout_s) * 1e9)
        session.call_at(late_ns, lambda: None if session.ready else link.drop(_silent(address)))

    def _owner_lost(self, link: BlockingLink, error: DanubeError | None) -> None:
        self._owners.pop(link.session, None)
        self.session.brokers.lost(link.session, error or ConnectionFailed("the connection is closed"))

    def _drop_owner(self, session: Session) -> None:
        self._to_dial.pop(session, None)
        link = self._owners.pop(session, None)
        if link is not None:
            link.flush()
            link.drop(ConnectionFailed("nothing is open there any more"), quietly=True)

    # -- dialling home --------------------------------------------------------------------------

    def _connect(self) -> None:
        """Try every address; raise the last failure."""
        failure: DanubeError | None = None
        timeout_s = min(self._connect_timeout_s, OWNER_CONNECT_TIMEOUT_S) if self._owners else None
        brokers = self.session.brokers
        for address in brokers.homes(self._addresses):
            try:
                greeted_s = greeting_s(self.session.silence_ns, self._connect_timeout_s)
                self._home.greet(address, timeout_s or self._connect_timeout_s, greeted_s)
                brokers.found(address)
                return
            except DanubeError as error:
                failure = error
            except BaseException:  # a signal's
                self._home.drop(ConnectionFailed("connecting was cut short"), quietly=True)
                raise
        raise failure or ConnectionFailed("no broker address was given")

    _dial_at_ns = 0
    _dial_failure: DanubeError | None = None
    _tried_until_ns = 0

    def _reconnect(self) -> float:
        """One attempt when its time has come; the session fails when it is time to give up.

        Return the seconds until there is something to do.  Between calls of the application nobody tries, so
        that time does not count for ``reconnect_timeout``.
        """
        session = self.session
        session.not_tried(max(0, session.now_ns() - self._tried_until_ns))
        wait_s = self._try_again(session)
        self._tried_until_ns = session.now_ns() + int(wait_s * 1e9)
        return wait_s

    def _try_again(self, session: Session) -> float:
        if session.failure is not None:
            raise session.failure.with_traceback(None)
        if self._dial_at_ns == 0:
            try:
                self._dial_at_ns = session.now_ns() + session.backoff_ns(self._dial_failure)
            except ConnectionFailed as error:
                session.fail(error)
                return 0.0
        pause_s = (self._dial_at_ns - session.now_ns()) / 1e9
        if pause_s > 0:
            return pause_s
        self._dial_at_ns = 0
        try:
            self._connect()
            self._dial_failure = None
        except DanubeError as error:
            self._dial_failure = error
            if not error.retryable:
                session.fail(error)
        return 0.0


def _sleep(
    watched: dict[int, tuple[BlockingLink, Any]], changed: threading.Event | None, wait_s: float
) -> list[int]:
    """Wait until a socket has something, or until another thread that watches them has read."""
    if changed is not None:
        changed.wait(wait_s)
        return []
    if len(watched) == 1:
        [(link, _)] = watched.values()
        poller = link.poller
    else:
        poller = make_poller()
        for descriptor in watched:
            poller.register(descriptor, READABLE)
    return [descriptor for descriptor, _ in poller.poll(int(wait_s * 1000) + (wait_s > 0))]


def _silent(address: Address) -> ConnectionFailed:
    return ConnectionFailed(f"the broker at {address} did not greet", hint="is this Danube's native port?")
