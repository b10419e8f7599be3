"""The blocking shell: the same sessions over plain sockets, without a loop and without threads of its own.

Whoever waits reads the sockets; of several threads that wait, one reads for all.  One lock guards the
sessions and is not held while a thread sleeps in recv or poll.  Works under gevent's monkey patching,
because it uses nothing but socket, select, threading and time.  There is one socket, except in a cluster,
where each owner of something that is open has one (see danube.client.brokers).
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from danube.client.address import Address
from danube.client.blocking_link import BlockingLink
from danube.client.dialling import greeting_s
from danube.client.reply import Plan, Reply
from danube.client.session import Session
from danube.errors import ConnectionFailed, DanubeError, OperationTimeout

T = TypeVar("T")
READ_TURN_S = 0.5  # a reader looks up so often, for work that other threads left to it
OWNER_CONNECT_TIMEOUT_S = 2.0


class BlockingConnection:
    """The socket of home and those of owners, read by whoever waits."""

    def __init__(self, session: Session, addresses: list[Address], connect_timeout_s: float) -> None:
        self.session = session
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._addresses = addresses
        self._connect_timeout_s = connect_timeout_s
        self._reading = False
        self._home = BlockingLink(session)
        session.when_forked = self._let_go
        self._owners: dict[Session, BlockingLink] = {}
        self._to_dial: dict[Session, Address] = {}
        session.brokers.dial = self._to_dial.__setitem__
        session.brokers.drop = self._drop_owner

    def open(self) -> None:
        """Connect once, or raise what went wrong at the last address."""
        with self.lock:
            self._connect()

    def close(self) -> None:
        """Write what is queued and close the sockets."""
        with self.lock:
            self.flush()
            for link in [*self._owners.values(), self._home]:
                link.drop(ConnectionFailed("the client is closed"), quietly=True)
            self._changed.notify_all()

    def _let_go(self) -> None:
        """In the child of a fork: no thread but this one goes on, so nobody else holds the lock or reads."""
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._reading = False
        self._to_dial.clear()
        self._owners.clear()  # each lets go of its own socket
        self._home.let_go()

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
                self.flush()  # what was cut short is undone at the broker, also where nobody waits any more

    def leave(self, close: Callable[[], Any]) -> None:
        """Close something without waiting for the broker's word."""
        with self.lock:
            close()
            self.flush()

    # -- one turn -------------------------------------------------------------------------------

    def _turn(self, wait_s: float) -> None:
        """Read once, for at most ``wait_s`` or until the next timer, and run what is due."""
        links = [self._home, *self._owners.values()]
        for link in links:
            moment_ns = link.session.next_timer_ns
            if moment_ns is not None:
                wait_s = min(wait_s, max(0.0, (moment_ns - link.session.now_ns()) / 1e9))
        if self._to_dial:
            self._dial_owner()
        elif self._home.socket is None and not self._owners:
            self._reconnect(wait_s)
        else:
            if self._home.socket is None:
                self._reconnect(0.0)
            self._read(wait_s)
        for link in links:
            link.session.on_time()
        for link in [one for one in self._owners.values() if one.socket is None]:
            self._owner_lost(link, link.reason)
        self.flush()

    def _read(self, wait_s: float) -> None:
        links = [link for link in (self._home, *self._owners.values()) if link.socket is not None]
        if len(links) == 1:
            self._read_one(links[0], wait_s)
        elif links:
            self._read_ready(links, wait_s)

    def _read_one(self, link: BlockingLink, wait_s: float) -> None:
        sock, room = cast(Any, link.socket), link.room
        count, why = -1, "the broker closed it"
        self._reading = True
        self.lock.release()  # other threads send meanwhile
        try:
            sock.settimeout(wait_s)
            count = sock.recv_into(room)
        except (TimeoutError, BlockingIOError, InterruptedError):
            count = -1
        except OSError as error:
            count, why = 0, str(error)
        finally:
            self.lock.acquire()
            self._reading = False
            self._changed.notify_all()
        if sock is link.socket and count >= 0:
            link.received(count, why)

    def _read_ready(self, links: list[BlockingLink], wait_s: float) -> None:
        """Wait for any of several sockets, and read those that have something."""
        poller = select.poll()
        by_descriptor = {cast(Any, link.socket).fileno(): link for link in links}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        ready: list[tuple[int, int]] = []
        self._reading = True
        self.lock.release()
        try:
            ready = poller.poll(int(wait_s * 1000) + (wait_s > 0))
        finally:
            self.lock.acquire()
            self._reading = False
            self._changed.notify_all()
        for descriptor, _ in ready:
            by_descriptor[descriptor].read()

    def flush(self) -> None:
        """Write what is queued; the lock is held."""
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
        link = self._owners[session] = BlockingLink(session)
        try:
            link.connect(address, min(self._connect_timeout_s, OWNER_CONNECT_TIMEOUT_S))
        except DanubeError as error:
            self._owner_lost(link, error)
            return
        late_ns = session.now_ns() + int(greeting_s(session) * 1e9)
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
        """Try every address once; raise the last failure."""
        failure: DanubeError | None = None
        timeout_s = min(self._connect_timeout_s, OWNER_CONNECT_TIMEOUT_S) if self._owners else None
        brokers = self.session.brokers
        for address in brokers.homes(self._addresses):
            try:
                self._home.connect(address, timeout_s or self._connect_timeout_s)
                self._home.shake(address)
                brokers.found(address)
                return
            except DanubeError as error:
                failure = error
        raise failure or ConnectionFailed("no broker address was given")

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
        if not 0 < self._dial_at_ns <= session.now_ns() or self._home.socket is not None:
            return
        self._dial_at_ns = 0
        try:
            self._connect()
            self._dial_failure = None
        except DanubeError as error:
            self._dial_failure = error
            if not error.retryable:
                session.fail(error)


def _silent(address: Address) -> ConnectionFailed:
    return ConnectionFailed(f"the broker at {address} did not greet", hint="is this Danube's native port?")
