"""The asyncio shell: moves bytes between a socket and the session, and keeps a connection up.

There is one receive buffer for the life of the connection.  Frames are read in place, and kept bytes are
copied out once.  Output is gathered for a turn of the loop and written with one call.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from danube.client.machine.address import (
    Address,
    closed_early,
    greeting_s,
    let_go,
    refused,
    told_nothing,
    unread,
)
from danube.client.machine.reply import Plan, Reply
from danube.client.machine.session import Received, Session
from danube.client.machine.tls import ClientTls, explained
from danube.errors import ConnectionFailed, DanubeError
from danube.host import local_socket, tcp
from danube.host.telemetry import events

T = TypeVar("T")
OWNER_CONNECT_TIMEOUT_S = 2.0
_telemetry = events("client")


async def until_settled(reply: Reply) -> None:
    """Wait until the reply is settled, with a value or an error."""
    if reply.settled:
        return
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: Reply) -> None:
        if not future.done():
            future.set_result(None)

    reply.when_settled(wake)
    try:
        await future
    finally:
        reply.forget(wake)


class Link(Received, asyncio.BufferedProtocol):
    """One socket's life."""

    def __init__(self, session: Session, secure: bool = False) -> None:
        super().__init__(session)
        self._secure = secure
        self.reason: DanubeError | None = None  # why it is gone
        self.transport: asyncio.Transport | None = None
        self.socket: Any = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)  # otherwise uvloop writes after all callbacks
        self.socket = transport.get_extra_info("socket")
        tcp.tune(self.socket)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._end :]

    def buffer_updated(self, count: int) -> None:
        try:
            self._take(count)
        except DanubeError as error:
            self.abort(error)

    def abort(self, error: DanubeError) -> None:
        """Drop the connection because the broker sent invalid bytes."""
        self.reason = error
        if self.transport is not None:
            self.transport.abort()

    def let_go(self) -> None:
        """In the child of a fork: hold the parent's socket no longer, and take nothing more from it."""
        if self.socket is not None and self.socket.fileno() >= 0:
            let_go(self.socket.fileno())

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if error is not None and self.reason is None and not self._secure:
            self._read_unread()
        if self.reason is None:
            why, hint = explained(error) or (str(error or "the broker closed it"), "")
            self.reason = ConnectionFailed("the connection to the broker was lost", why=why, hint=hint)
        self.session.disconnected(self.reason)
        if not self.lost.done():
            self.lost.set_result(None)

    def _read_unread(self) -> None:
        """Read the bytes that the broker sent before it closed; called after a failed write."""
        data = unread(self.socket.fileno(), len(self._buffer) - self._end)
        if data:
            self._view[self._end : self._end + len(data)] = data
            self.buffer_updated(len(data))

    def write(self, buffers: list[bytes | memoryview]) -> None:
        if self.transport is not None and not self.transport.is_closing():
            if len(buffers) == 1:
                self.transport.write(buffers[0])
            else:
                self.transport.writelines(buffers)


class Connection:
    """Keeps the session connected until closed: dials, greets, dials again with growing pauses.

    That of home has one for each owner that its session names, which is connected once: when it is lost
    all that was there comes home.
    """

    def __init__(
        self,
        session: Session,
        addresses: list[Address],
        connect_timeout_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        self.session = session
        self._tls = tls
        self._addresses = addresses
        self._connect_timeout_s = connect_timeout_s
        self._link: Link | None = None
        self._loop = asyncio.get_running_loop()
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._left = False
        self._owners: dict[Session, Connection] = {}
        session.when_output = self.schedule_flush
        session.when_timer = self._arm
        session.when_silent = self._on_silence
        session.when_forked = self._let_go

    async def open(self) -> None:
        """Connect once, or raise the error of the last address."""
        await self._connect()
        self._keep_by(self._keep(), self._end)
        brokers = self.session.brokers
        brokers.dial, brokers.drop = self._dial_owner, self._drop_owner

    def _dial_owner(self, session: Session, address: Address) -> None:
        owner = self._owners[session] = Connection(session, [address], self._connect_timeout_s, self._tls)
        owner._keep_by(owner._serve_owner(), lambda error: session.brokers.lost(session, error))

    def _keep_by(self, work: Coroutine[Any, Any, None], end: Callable[[DanubeError], None]) -> None:
        """Start a task that keeps this connection; if it ends by itself, fail all waiting calls."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if self._left or (error is None and not task.cancelled()):
                return
            end(
                ConnectionFailed(
                    "the task that keeps a connection to the broker has ended",
                    why="it was cancelled" if error is None else repr(error),
                    hint="leave the client's tasks alone, and make a new client",
                )
            )

        self._keeper = self._loop.create_task(work, name="danube client connection")
        self._keeper.add_done_callback(ended)

    def _end(self, error: DanubeError) -> None:
        self.session.fail(error)
        if self._link is not None:
            self._link.abort(error)

    def _drop_owner(self, session: Session) -> None:
        owner = self._owners.pop(session, None)
        if owner is not None:
            owner.leave()

    async def _serve_owner(self) -> None:
        try:
            error = await self.serve_once()
        except DanubeError as failure:
            error = failure
        self.session.brokers.lost(self.session, error)

    async def serve_once(self) -> DanubeError:
        """Connect, and serve the connection until it ends; return its error, or raise that of connecting."""
        await self._connect()
        if self._link is not None:
            await asyncio.shield(self._link.lost)
            if self._link.reason is not None:
                return self._link.reason
        return ConnectionFailed("the connection is closed")

    def _let_go(self) -> None:
        """In the child of a fork: drop the socket, which is the parent's, and its references."""
        link, self._link = self._link, None
        if link is not None:
            link.let_go()
        if self._timer is not None:
            self._timer.cancel()
        self._keeper = self._timer = None
        self._owners = {}

    async def close(self) -> None:
        """Write queued bytes, as far as the broker takes them at once, and close the socket."""
        owners = list(self._owners.values())
        self.leave()
        for owner in owners:
            await owner.close()
        link = self._link
        if link is not None and link.transport is not None:
            try:
                await asyncio.wait_for(asyncio.shield(link.lost), 1.0)
            except TimeoutError:
                if link.transport is not None:
                    link.transport.abort()
        if self._keeper is not None:
            await asyncio.gather(self._keeper, return_exceptions=True)

    def leave(self) -> None:
        """Write queued bytes and close the sockets after them, without waiting."""
        self._left = True
        self.flush()
        owners, self._owners = self._owners, {}
        for owner in owners.values():
            owner.leave()
        if self._keeper is not None:
            self._keeper.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None and self._link.transport is not None:
            self._link.transport.close()

    # -- output and time ------------------------------------------------------------------------

    def schedule_flush(self) -> None:
        """Write at the end of this turn of the loop."""
        if not self._flush_scheduled:
            self._loop.call_soon(self.flush)
            self._flush_scheduled = True

    def flush(self) -> None:
        """Write the queued frames now."""
        self._flush_scheduled = False
        link = self._link
        if link is not None:
            output = self.session.take_output()
            if output:
                link.write(output)
        for owner in self._owners.values():
            owner.flush()

    def _arm(self) -> None:
        moment_ns = self.session.next_timer_ns
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if moment_ns is not None:
            delay_s = max(0.0, (moment_ns - self.session.now_ns()) / 1e9)
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self.session.on_time()
        finally:  # one that fails must not keep the others from coming
            if self._timer is None:
                self._arm()

    def _on_silence(self, error: DanubeError) -> None:
        if self._link is not None:
            self._link.abort(error)

    # -- waiting --------------------------------------------------------------------------------

    async def wait(self, reply: Reply) -> Any:
        """The reply's value, or its error raised."""
        await until_settled(reply)
        if reply.error is not None:
            raise reply.error.with_traceback(None)
        return reply.value

    async def run(self, plan: Plan[T]) -> T:
        """Carry out a plan: wait for each reply it yields and hand back value or error."""
        error: Exception | None = None
        value: Any = None
        try:
            while True:
                try:
                    reply = plan.send(value) if error is None else plan.throw(error)
                except StopIteration as stop:
                    return cast(T, stop.value)
                error = value = None
                try:
                    value = await self.wait(reply)
                except Exception as caught:
                    error = caught
        finally:
            plan.close()  # after a cancelled task close the handles that the plan opened

    # -- dialling -------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Try every address; raise the last failure."""
        failure: DanubeError | None = None
        brokers = self.session.brokers
        at_home = brokers.home is self.session
        for address in brokers.homes(self._addresses) if at_home else self._addresses:
            try:
                await self._greet(address)
                if at_home:
                    brokers.found(address)
                return
            except DanubeError as error:
                failure = error
        raise failure or ConnectionFailed("no broker address was given")

    async def _greet(self, address: Address) -> None:
        """Connect, and wait until the broker has greeted; once more if it ends that without a reason."""
        link = await self._connect_to(address)
        try:
            await self._greeted(link, address)
        except ConnectionFailed:
            if not told_nothing(link.reason):
                raise
            await self._greeted(await self._connect_to(address), address)

    async def _connect_to(self, address: Address) -> Link:
        timeout_s = self._connect_timeout_s
        at_home = self.session.brokers.home is self.session
        try:
            async with asyncio.timeout(timeout_s if at_home else min(timeout_s, OWNER_CONNECT_TIMEOUT_S)):
                link = await self._linked(address)
        except (OSError, TimeoutError, ValueError) as error:
            raise refused(address, error, self._tls) from None
        self._link = link
        try:
            self.session.connected(private=self._tls is not None or tcp.on_this_host(link.socket))
        except DanubeError as error:
            link.abort(error)
            raise
        self.flush()
        return link

    async def _greeted(self, link: Link, address: Address) -> None:
        try:
            async with asyncio.timeout(greeting_s(self.session.silence_ns, self._connect_timeout_s)):
                while not self.session.ready:
                    if link.lost.done():
                        raise closed_early(address, link.reason, self._tls)
                    await asyncio.wait([link.lost, self._welcome()], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            silent = ConnectionFailed(
                f"the broker at {address} did not greet", hint="is this the native port?"
            )
            link.abort(silent)
            raise silent from None
        except asyncio.CancelledError:
            link.abort(ConnectionFailed("connecting was cancelled"))
            raise

    async def _linked(self, address: Address) -> Link:
        """Dial; never by the Unix socket of this host for TLS, where the certificates of both sides count."""
        tls = self._tls
        link = Link(self.session, secure=tls is not None)
        near = local_socket.dial(*address) if tls is None else None
        if near is not None:
            await self._loop.create_unix_connection(lambda: link, sock=near)
            return link
        secure: dict[str, Any] = {}
        if tls is not None:
            secure = {"ssl": tls.context(), "server_hostname": tls.server_name(address.host)}
        await self._loop.create_connection(lambda: link, *address, family=socket.AF_UNSPEC, **secure)
        if tls is not None and link.transport is not None:
            try:
                tls.check(link.transport.get_extra_info("ssl_object"), address.host)
            except ConnectionFailed as error:
                link.abort(error)
                raise
        return link

    def _welcome(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()

        def ready() -> None:
            if not future.done():
                future.set_result(None)

        self.session.when_ready = ready
        return future

    async def _keep(self) -> None:
        """Dial again whenever the connection is lost, until the session gives up."""
        while True:
            link = self._link
            if link is not None:
                await asyncio.shield(link.lost)
            if self.session.failure is not None:
                return
            if link is not None:
                _telemetry.warning("connection lost", reason=str(link.reason))
            try:
                await self._dial_until_connected()
            except DanubeError as error:
                self.session.fail(error)
                return

    async def _dial_until_connected(self) -> None:
        last: DanubeError | None = None
        while True:
            await asyncio.sleep(self.session.backoff_ns(last) / 1e9)
            self.session.check_usable()
            try:
                await self._connect()
                return
            except DanubeError as error:
                if not error.retryable:
                    raise
                last = error
