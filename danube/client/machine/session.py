"""The client's end of the native protocol as a machine: bytes and time in, bytes and settled replies out.

No socket, task or thread lives here.  A shell (asyncio or blocking) owns the socket and calls::

    connected()                  a socket is open: HELLO is queued
    received(view, start, end)   bytes came; returns how many were taken, the rest comes again
    disconnected(error)          the socket is gone
    take_output()                buffers to write, in order
    next_timer_ns / on_time()    the next moment something must happen, and its coming

The session keeps producers, consumers and repeatable requests beyond a connection, and opens them again on
the next one.  Everything is called from one thread at a time.

``Handles``: handle numbers of a session's connection, and their owners.

``Opened``: a producer or consumer of one partition.  ``Awaited``: callbacks to the requests of a session.
"""

from __future__ import annotations

import itertools
import os
import random
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from danube.client.machine.address import refuse_http2
from danube.client.machine.brokers import Brokers
from danube.client.machine.reply import Reply, all_settled, settled_reply
from danube.client.machine.requests import (
    ANSWERS,
    CLOSED_BY,
    PublishCredit,
    Request,
    Statistics,
    Timer,
    Timers,
    Undone,
    nothing,
)
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import (
    ClosedError,
    ConnectionFailed,
    DanubeError,
    InvalidArgument,
    LimitExceeded,
    OperationTimeout,
    Overloaded,
    OwnerMoved,
    ProtocolError,
)
from danube.host.clock import monotonic_ns
from danube.host.telemetry import events
from danube.limits import (
    CONTROL_BYTES_MAX,
    FRAME_BYTES_MAX,
    HANDLES_PER_CONNECTION_MAX,
    PUBLISH_CREDIT_BYTES,
    RECEIVE_BUFFER_BYTES,
    RECEIVE_BUFFER_BYTES_FIRST,
)


class Opened(ABC):
    """A producer or consumer of one partition, which is opened again wherever its partition is served."""

    def __init__(self, session: Session, partition: str, index: int) -> None:
        self.session = session
        self.partition = partition
        self.index = index
        self.opened = Reply()  # settles with the first answer to an open
        self.failure: DanubeError | None = None
        self.last_error: BaseException | None = None  # why it is not open
        self._handle = 0
        self._attempts = 0
        self._retry: Timer | None = None

    def start(self) -> None:
        """Open on the session's connection, now or when there is one."""
        self.session.register(self)
        if self.session.ready:
            self._open()

    @property
    @abstractmethod
    def _ended(self) -> bool: ...

    @abstractmethod
    def _open(self) -> None:
        """Ask the broker to open it; nothing happens without a connection."""

    @abstractmethod
    def _reopen(self, error: DanubeError) -> None:
        """Open again after a pause, at the broker of ``error``."""

    @abstractmethod
    def _fail(self, error: DanubeError) -> None: ...

    @abstractmethod
    def close(self) -> Reply: ...

    def _open_later(self) -> None:
        session = self.session
        pause_ns = session.pause_before_ns(self._attempts)
        self._attempts += 1
        self._cancel_retry()
        self._retry = session.call_at(session.now_ns() + pause_ns, self._open)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()

    def _go_to(self, session: Session) -> None:
        """Be served by another broker from now on."""
        if session is not self.session:
            self.session.unregister(self)
            self.session = session
            session.register(self)

    def _note_refusal(self, error: BaseException) -> None:
        if self.last_error is None or not isinstance(error, OwnerMoved):  # where to is no reason
            self.last_error = error

    # -- what the session tells -----------------------------------------------------------------

    def on_connected(self) -> None:
        """The connection is ready; open yourself on it."""
        if not self._ended:
            self._cancel_retry()
            self._open()

    @abstractmethod
    def on_disconnected(self) -> None:
        """Take note of a lost connection; the session connects again or fails."""

    def on_handle_closed(self, error: DanubeError) -> None:
        """The broker closed the handle."""
        if self._ended:
            return
        if error.retryable:
            self._reopen(error)
        else:
            self._fail(error)

    @abstractmethod
    def on_deliver(self, body: memoryview) -> None:
        """Batches came; raise to drop the connection."""

    @abstractmethod
    def on_waiting(self, reason: DanubeError | None) -> None:
        """Why no batches come now; None: they go on."""

    @abstractmethod
    def on_sought(self) -> None:
        """Handle a seek of the subscription: records that come next are handed out, even if acked before."""

    def on_session_failed(self, error: DanubeError) -> None:
        """Handle the end of the session: no further connection will be made."""
        self._fail(error)

    def on_owner_lost(self, home: Session, error: DanubeError) -> None:
        """Move to the session of ``home``, because the broker of this session is lost."""
        if not self._ended:
            self.last_error = error
            self._go_to(home)
            self._open_later()


class Awaited(Protocol):
    """Owner of a correlation."""

    def on_answer(self, kind: int, flags: int, body: memoryview) -> None: ...

    def on_error(self, error: DanubeError) -> None: ...


class Handles:
    """Handle numbers, each given once, so that late frames cannot be mistaken."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._owners: dict[int, Opened] = {}
        self._of: dict[Opened, list[int]] = {}  # without those that have none
        self.owner = self._owners.get  # for every frame with batches

    def give(self, opened: Opened) -> int:
        """Return a handle number that is free and was not used lately on this connection."""
        number = next(self._numbers) & 0xFFFFFFFF
        while not number or number in self._owners:  # 32 bits begin again after some time
            number = next(self._numbers) & 0xFFFFFFFF
        self._owners[number] = opened
        self._of.setdefault(opened, []).append(number)
        return number

    def drop(self, number: int) -> Opened | None:
        """Forget one; whose it was."""
        opened = self._owners.pop(number, None)
        if opened is not None:
            numbers = self._of[opened]
            numbers.remove(number)
            if not numbers:
                del self._of[opened]
        return opened

    def drop_all(self, opened: Opened) -> None:
        """Forget those of ``opened``."""
        for number in self._of.pop(opened, ()):
            del self._owners[number]

    def clear(self) -> None:
        """Forget all handles; called when the connection is lost, which ends their meaning."""
        self._owners.clear()
        self._of.clear()


BACKOFF_FIRST_NS = 50_000_000
BACKOFF_LAST_NS = 2_000_000_000
CLUSTER_ATTEMPTS_MAX = 3
REQUESTS_MAX = 10_000
REFUSALS_MAX = 3  # lost connections after which a request is not repeated: it may be their cause
SILENCE_NS = 10_000_000_000  # then a PING is sent; after as long again the connection counts as lost

_PUBLISH = int(Kind.PUBLISH)  # a member of an IntEnum costs several times as much to look up
_PING = int(Kind.PING)
_PUBLISHED = int(Kind.PUBLISHED)
_DELIVER = int(Kind.DELIVER)

_telemetry = events("client")
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Session(Timers):
    """One client's state with one broker over all its connections, of which there is one at a time."""

    def __init__(
        self,
        *,
        client: str = "",
        token: Callable[[], str] = lambda: "",
        plaintext_token: bool = False,
        reconnect_timeout_ns: int | None = 60_000_000_000,
        request_timeout_ns: int = 30_000_000_000,
        now_ns: Callable[[], int] = monotonic_ns,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(now_ns)
        self.ready = False
        self.welcome = wire.Welcome()
        self.failure: DanubeError | None = None
        self.statistics = Statistics()
        self.request_timeout_ns = request_timeout_ns
        self.when_output: Callable[[], None] = nothing
        self.when_ready: Callable[[], None] = nothing
        self.when_silent: Callable[[DanubeError], None] = nothing
        self.when_forked: Callable[[], None] = nothing  # this is a child now: let go of the parent's socket
        self.silence_ns = SILENCE_NS
        self.credit = PublishCredit()
        self.brokers: Brokers[Session] = Brokers(self)
        self._hello = wire.Hello(client=client, answers_ping=True)
        self._token = token
        self._plaintext_token = plaintext_token
        self._token_sent = ""
        self._reconnect_timeout_ns = reconnect_timeout_ns
        self._jitter = jitter
        self._open = False
        self._decoder = wire.FrameDecoder()
        self._output: list[bytes | memoryview] = []
        self._awaited: dict[int, Awaited] = {}
        self._handles = Handles()
        self._opened: dict[Opened, None] = {}
        self._waiting: dict[Request, None] = {}
        self._dirty: dict[Any, None] = {}
        self._correlations = itertools.count(1)
        self._lost_since_ns = -1
        self._heard = False
        self._pinged = False
        self._listening: Timer | None = None
        self._attempts = 0
        self.process = os.getpid()
        _sessions.add(self)

    # -- what a shell calls ---------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """Bytes of the frame that is incomplete: the receive buffer must hold as many."""
        return self._decoder.wanted

    def connected(self, *, private: bool = True) -> None:
        """A socket is open; greet.  ``private``: nobody else can read what is sent on it.

        Raises InvalidArgument if there is no token to be had, or if it must not be sent there.
        """
        token = self._token()
        if token and not (private or self._plaintext_token):
            raise InvalidArgument(
                "the token is not sent over a connection that others can read",
                why="the broker is on another host, and the connection has no TLS",
                hint="connect with TLS, or give allow_plaintext_token=True",
            )
        self._open = True
        self._decoder = wire.FrameDecoder()
        self._output.clear()
        self._token_sent = token
        hello = self._hello if not token else msgspec.structs.replace(self._hello, token=token)
        self.send(wire.control_frame(Kind.HELLO, hello))

    def received(self, view: memoryview, start: int, end: int) -> int:
        """Take the frames in ``view[start:end]``; return the position after the last whole one.

        Raises DanubeError when the peer broke the protocol or bytes are damaged: the shell then
        closes the socket and calls disconnected() with that error.
        """
        decoder = self._decoder
        if not self._heard:
            refuse_http2(view[start:end])
            self._heard = True
        for kind, flags, correlation, handle, body_start, body_end in decoder.frames(view, start, end):
            body = view[body_start:body_end]
            if kind == _PUBLISHED:
                awaited = self._awaited.pop(correlation, None)
                if awaited is not None:
                    awaited.on_answer(kind, flags, body)
            elif kind == _DELIVER:
                opened = self._handles.owner(handle)
                if opened is not None:
                    opened.on_deliver(body)
            else:
                self._on_control(kind, flags, correlation, handle, body)
        return decoder.position

    def disconnected(self, error: DanubeError) -> None:
        """Fail requests that must not be repeated after a lost connection; others wait for the next one."""
        if not self._open:
            return
        self._open = self.ready = False
        if self._listening is not None:
            self._listening.cancel()
        if self._lost_since_ns < 0:
            self._lost_since_ns = self.now_ns()
        self._output.clear()
        self._handles.clear()
        self.credit.reset(0)
        awaited, self._awaited = self._awaited, {}
        for one in awaited.values():
            if isinstance(one, Request):
                self._keep_or_fail(one, error)
        for opened in list(self._opened):
            opened.on_disconnected()

    def take_output(self) -> list[bytes | memoryview]:
        """Buffers to write, in order; acknowledgements that were merged meanwhile go along."""
        if self._dirty:
            self.flush_acks()
        output = self._output
        if output:
            self._output = []
        return output

    @property
    def has_output(self) -> bool:
        return bool(self._output or self._dirty)

    def backoff_ns(self, last: DanubeError | None = None) -> int:
        """Return the wait before the next attempt to connect; raises when the time for attempts is over.

        ``last`` is why the last attempt failed.
        """
        waited_ns = self.now_ns() - self._lost_since_ns if self._lost_since_ns >= 0 else 0
        if self._reconnect_timeout_ns is not None and waited_ns >= self._reconnect_timeout_ns:
            raise ConnectionFailed(
                f"the broker was not reached again for {waited_ns / 1e9:.0f} s",
                why="reconnect_timeout has passed" if last is None else str(last),
                hint="check the broker, then make a new client",
            )
        self._attempts += 1
        return self.pause_ns(self._attempts - 1)

    def not_tried(self, idle_ns: int) -> None:
        """Leave time in which nobody tried to connect out of what ``reconnect_timeout`` bounds."""
        if self._lost_since_ns >= 0:
            self._lost_since_ns = min(self._lost_since_ns + idle_ns, self.now_ns())

    def pause_ns(self, attempt: int) -> int:
        """A pause before attempt 0, 1, ...: random in the upper half of 50 ms * 2**attempt, at most 2 s."""
        bound = min(BACKOFF_FIRST_NS << min(attempt, 10), BACKOFF_LAST_NS)
        return int(bound * (0.5 + self._jitter() / 2))

    def pause_before_ns(self, attempt: int) -> int:
        """A pause before attempt 0, 1, ... to open a partition: none before the first.

        The brokers of a cluster keep the question while there is no owner, so it is asked again soon.
        """
        if not attempt:
            return 0
        return self.pause_ns(min(attempt - 1, CLUSTER_ATTEMPTS_MAX) if self.brokers.known else attempt - 1)

    def fail(self, error: DanubeError) -> None:
        """End for good: everything that waits fails with ``error``, and so does every later call."""
        if self.failure is not None:
            return
        self.failure = error
        self.ready = self._open = False
        self._output.clear()
        for tell in self._failure_callbacks():
            tell(error)
        if self.brokers.home is self:
            self.brokers.fail(error)

    def _failure_callbacks(self) -> list[Callable[[DanubeError], None]]:
        """Return the parts to inform that no connection follows; each of them ends by itself."""
        requests = [one for one in self._awaited.values() if isinstance(one, Request)]
        requests += self._waiting
        self._awaited.clear()
        self._waiting.clear()
        return [*(one.on_session_failed for one in self._opened), *(one.on_error for one in requests)]

    def disown(self, error: DanubeError) -> None:
        """End in the child of a fork without sending anything, because the connection is the parent's."""
        self.when_forked()
        self.brokers.dial, self.brokers.drop = None, nothing
        self.failure = self.failure or error
        self.ready = self._open = False
        self._output, self._dirty = [], {}
        for tell in self._failure_callbacks():
            try:
                tell(error)
            except RuntimeError:  # the caller's loop is closed, or of another thread
                pass

    def sibling(self) -> Session:
        """A session of the same client with another broker."""
        other = Session(
            reconnect_timeout_ns=self._reconnect_timeout_ns, request_timeout_ns=self.request_timeout_ns,
            now_ns=self.now_ns, jitter=self._jitter,
        )  # fmt: skip
        other.statistics, other.brokers, other._hello = self.statistics, self.brokers, self._hello
        other._token, other._plaintext_token = self._token, self._plaintext_token
        return other

    @property
    def in_use(self) -> bool:
        """Whether producers, consumers or requests need it."""
        return bool(self._opened or self._awaited or self._waiting)

    def move_to(self, home: Session, error: DanubeError) -> None:
        """Tell the producers and consumers of partitions that are served here to ask at home."""
        for opened in list(self._opened):
            opened.on_owner_lost(home, error)

    def check_usable(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    # -- requests -------------------------------------------------------------------------------

    def request(
        self, kind: int, body: Any, *, handle: int = 0, repeatable: bool = True, timeout_ns: int | None = None
    ) -> Request:
        """Send a control frame; the reply settles with the decoded answer.

        A ``repeatable`` one without a handle waits for a connection and is sent again after a loss.
        """
        self.check_usable()
        if len(self._waiting) >= REQUESTS_MAX:
            raise Overloaded("too many requests are waiting for the broker", limit=REQUESTS_MAX)
        request = Request(kind, body, handle, repeatable and handle == 0, ANSWERS.get(kind))
        timeout_ns = self.request_timeout_ns if timeout_ns is None else timeout_ns
        request.timer = self.call_at(self.now_ns() + timeout_ns, lambda: self._expire(request, timeout_ns))
        if self.ready:
            self._transmit(request)
        elif handle == 0:
            self._waiting[request] = None
        else:
            request.on_error(ConnectionFailed("the connection to the broker is down"))
        return request

    def await_ack(self, handle: int, ranges: bytes, flags: int) -> Request:
        """Send an ACK that is answered."""
        request = Request(Kind.ACK, None, handle, False, None)
        request.correlation = self.next_correlation()
        timeout_ns = self.request_timeout_ns
        request.timer = self.call_at(self.now_ns() + timeout_ns, lambda: self._expire(request, timeout_ns))
        self._awaited[request.correlation] = request
        self.send(wire.ack_frame(handle, ranges, request.correlation, flags))
        return request

    def admin(self, op: str, partition: str = "", *, repeatable: bool = True, **arguments: Any) -> Request:
        """An ADMIN request."""
        return self.request(Kind.ADMIN, wire.Admin(op, partition, arguments), repeatable=repeatable)

    def _transmit(self, request: Request) -> None:
        correlation = self.next_correlation()
        frame = wire.control_frame(request.kind, request.body, correlation, request.handle)
        if len(frame) - wire.FRAME_HEADER_BYTES > CONTROL_BYTES_MAX:
            request.on_error(
                ProtocolError("request is too large", why=f"the limit is {CONTROL_BYTES_MAX} bytes")
            )
            return
        request.correlation = correlation
        self._awaited[correlation] = request
        self.send(frame)

    def drop_request(self, request: Request) -> None:
        """Forget a request whose answer is not awaited any more and may never come."""
        self._awaited.pop(request.correlation, None)
        self._waiting.pop(request, None)
        if request.timer is not None:
            request.timer.cancel()

    def undo(self, request: Request) -> Reply:
        """Give up an open that is not answered; settles when it is undone at the broker, if it can be.

        The close follows the open at once, and once more when the answer comes after all.
        """
        if not request.correlation or self._awaited.get(request.correlation) is not request:
            return settled_reply()
        self.drop_request(request)
        self.drop_handle(request.handle)
        kind = CLOSED_BY[request.kind]
        self._awaited[request.correlation] = Undone(
            lambda: self.send(wire.control_frame(kind, None, 0, request.handle))
        )
        return all_settled([self.request(kind, None, handle=request.handle)])

    def _expire(self, request: Request, timeout_ns: int) -> None:
        if request.kind in CLOSED_BY:
            self.undo(request)
        else:
            self.drop_request(request)
        why = "the broker did not answer" if request.correlation else "there was no connection to a broker"
        request.fail(
            OperationTimeout(
                f"{Kind(request.kind).name} took longer than {timeout_ns / 1e9:g} s",
                why=why,
                hint="whether it was done is not known; ask again",
            )
        )

    def _keep_or_fail(self, request: Request, error: DanubeError) -> None:
        request.refused += not error.retryable
        if request.refused == REFUSALS_MAX:
            request.on_error(error)
        elif request.repeatable:
            request.correlation = 0
            self._waiting[request] = None
        else:
            request.on_error(
                ConnectionFailed(
                    f"the connection was lost before {Kind(request.kind).name} was answered",
                    why=str(error),
                    hint="whether it was done is not known; look before doing it again",
                )
            )

    # -- what producers and consumers call -------------------------------------------------------

    def register(self, opened: Opened) -> None:
        """Notify ``opened`` of new and lost connections until it is unregistered."""
        self.check_usable()
        if len(self._opened) >= HANDLES_PER_CONNECTION_MAX:
            raise LimitExceeded(
                "too many producers and consumers are open",
                why=f"the limit is {HANDLES_PER_CONNECTION_MAX} partitions on a connection",
                hint="close some, or use a second client",
            )
        self._opened[opened] = None

    def unregister(self, opened: Opened) -> None:
        self._opened.pop(opened, None)
        self._dirty.pop(opened, None)
        self._handles.drop_all(opened)

    def new_handle(self, opened: Opened) -> int:
        """A handle number that was never used on this connection, so that late frames cannot be mistaken."""
        return self._handles.give(opened)

    def drop_handle(self, number: int) -> None:
        self._handles.drop(number)

    def next_correlation(self) -> int:
        number = next(self._correlations) & 0xFFFFFFFF
        while number == 0 or number in self._awaited:
            number = next(self._correlations) & 0xFFFFFFFF
        return number

    def send(self, frame: bytes) -> None:
        """Queue a frame for the socket; only while ``ready``."""
        output = self._output
        if not output:
            self.when_output()  # before anything has changed: it may raise
        output.append(frame)

    def publish(self, awaited: Awaited, head: bytes, body: bytes | memoryview, handle: int) -> int:
        """Queue a PUBLISH frame; return its correlation.  The caller took credit before."""
        correlation = self.next_correlation()
        self._awaited[correlation] = awaited
        size = len(head) + len(body)
        start = wire.frame_header(_PUBLISH, size, correlation, handle) + head
        if size < 16_384:
            self.send(start + body)
            return correlation
        self.send(start)
        self._output.append(body)
        return correlation

    def forget(self, correlation: int) -> None:
        """An answer is no longer waited for."""
        self._awaited.pop(correlation, None)

    def mark_dirty(self, consumer: Any) -> None:
        """``consumer.write_acks()`` is called before the next output is taken."""
        if not self._dirty:
            self.when_output()
        self._dirty[consumer] = None

    def flush_acks(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for consumer in dirty:
            consumer.write_acks()

    # -- inside ---------------------------------------------------------------------------------

    def _on_control(self, kind: int, flags: int, correlation: int, handle: int, body: memoryview) -> None:
        if not self.ready:
            self._on_handshake(kind, body)
        elif kind == Kind.ERROR:
            self._on_error(correlation, handle, wire.decode_error(body))
        elif kind == _PING:
            self.send(wire.control_frame(Kind.PONG, None, correlation))
        elif correlation:
            awaited = self._awaited.pop(correlation, None)
            if awaited is not None:
                awaited.on_answer(kind, flags, body)
        elif kind == Kind.WAITING:
            opened = self._handles.owner(handle)
            if opened is not None:
                opened.on_waiting(wire.decode_error(body) if body else None)
        elif kind == Kind.SOUGHT:
            opened = self._handles.owner(handle)
            if opened is not None:
                opened.on_sought()
        elif kind == Kind.EXPIRING:
            self._authenticate()
        elif kind < 32:
            raise ProtocolError(f"the broker sent a frame of kind {kind}")

    def _on_handshake(self, kind: int, body: memoryview) -> None:
        if kind == Kind.ERROR:
            raise wire.decode_error(body)
        if kind != Kind.WELCOME:
            raise ProtocolError(
                f"the broker greeted with a frame of kind {kind}", hint="is this Danube's native port?"
            )
        welcome = wire.decode_control(body, wire.Welcome)
        if welcome.version not in self._hello.versions:
            raise ProtocolError(f"the broker chose protocol version {welcome.version}, which was not offered")
        self.welcome = welcome
        self.credit.reset(welcome.publish_credit_bytes or PUBLISH_CREDIT_BYTES)
        self.ready = True
        if self.statistics.connections:
            waited_ms = (self.now_ns() - self._lost_since_ns) // 1_000_000 if self._lost_since_ns >= 0 else 0
            _telemetry.info("connected again", broker=welcome.broker, away_ms=waited_ms)
        self.statistics.connections += 1
        self._lost_since_ns = -1
        self._attempts = 0
        self._pinged = False
        self._listening = self.call_at(self.now_ns() + self.silence_ns, self._listen)
        waiting, self._waiting = self._waiting, {}
        for opened in list(self._opened):
            opened.on_connected()
        for request in waiting:
            self._transmit(request)
        self.when_ready()

    def _authenticate(self) -> None:
        """Send a newer token before the broker ends the connection, if there is one."""
        try:
            token = self._token()
        except DanubeError as error:
            _telemetry.warning("no new token", why=str(error))
            return
        if token and token != self._token_sent:
            self._token_sent = token
            self.request(Kind.AUTHENTICATE, wire.Authenticate(token), repeatable=False)

    def _listen(self) -> None:
        """Send PING to a silent broker, and end the connection if it does not answer."""
        if self._heard:
            self._pinged = False
        elif not self._pinged:
            self._pinged = True
            self.send(wire.control_frame(Kind.PING, None, 0))
        else:
            self.when_silent(
                ConnectionFailed(
                    "the connection to the broker was lost",
                    why=f"it answered nothing for {self.silence_ns * 2 // 1_000_000_000} s",
                )
            )
            return
        self._heard = False
        self._listening = self.call_at(self.now_ns() + self.silence_ns, self._listen)

    def _on_error(self, correlation: int, handle: int, error: DanubeError) -> None:
        if correlation:
            awaited = self._awaited.pop(correlation, None)
            if awaited is not None:
                awaited.on_error(error)
        elif handle:
            opened = self._handles.drop(handle)
            if opened is not None:
                opened.on_handle_closed(error)
        else:
            raise error


class Received:
    """Bytes that a socket has received for a session; frames are read in place.

    The buffer grows when a read fills it, and holds the whole of a large frame while that comes.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._buffer = bytearray(RECEIVE_BUFFER_BYTES_FIRST)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def _take(self, count: int) -> None:
        """Hand ``count`` bytes more to the session; raise as its received() does."""
        self._end += count
        start = self._start = self.session.received(self._view, self._start, self._end)
        if start == self._end:
            full = self._end == len(self._buffer) < RECEIVE_BUFFER_BYTES
            self._start = self._end = 0
            if full or len(self._buffer) > RECEIVE_BUFFER_BYTES:
                self._resize(RECEIVE_BUFFER_BYTES)
        elif start + self.session.wanted > len(self._buffer) or self._end == len(self._buffer):
            self._resize(min(max(self.session.wanted, RECEIVE_BUFFER_BYTES), FRAME_BYTES_MAX))

    def _resize(self, size: int) -> None:
        """Move the incomplete frame to the front of a buffer that can hold all of it."""
        rest = bytes(self._view[self._start : self._end])
        if size != len(self._buffer):
            self._buffer = bytearray(size)
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


def _after_fork_in_child() -> None:
    """The child shares the parent's sockets; a byte from it would ruin the parent's stream."""
    for session in list(_sessions):
        session.disown(
            ClosedError(
                "this client was made before a fork",
                why=f"process {session.process} owns its connection",
                hint="make a new client in the child process",
            )
        )


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork_in_child)
