"""A gRPC port on one worker: its connections, its methods, and its part of every turn.

The data port (6650) and the administration port (50051) are two doors with different tables.  The data
door owns the halves that publish, consume and settle; see :mod:`danube.server.grpc.doors` for how both
are put together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from danube.broker.api import Holder, Turns
from danube.broker.worker.places import Places
from danube.core.http2.frames import Http2Settings
from danube.errors import LimitExceeded, Overloaded
from danube.host import clock
from danube.server.grpc.connection import GrpcConnection
from danube.server.grpc.guard import GrpcGuard
from danube.server.grpc.methods import Method
from danube.server.grpc.socket import GrpcSocket
from danube.server.messages.session import CONNECTION_ID, BrokerSession

if TYPE_CHECKING:
    from danube.broker.audit.audit import Audit
    from danube.core.security.principals import Identity
    from danube.server.grpc.placing import Placing
    from danube.server.messages.consuming import Consuming, GrpcConsumer
    from danube.server.messages.publishing import Publishing
    from danube.server.messages.settling import Settling

RECEIVE_BUFFER_BYTES = 256 * 1024
REFUSED_MAX = 64  # refused connections that are not closed yet; each holds a descriptor
STREAM_QUEUE_BYTES_MAX = 32 * 1024 * 1024  # a consumer's credit, and the largest batch beyond it
CONNECTION_QUEUE_BYTES_MAX = 256 * 1024 * 1024
# A client whose stream ended calls again at once.  Answered with UNAVAILABLE it waits and comes back;
# tonic takes a connection that closes under its call for a fault that no second attempt can mend.
GOAWAY_DELAY_S = 0.05


class DataHalves:
    """Parts of the data port alone: publishing, consuming and settling, over one session."""

    def __init__(
        self, session: BrokerSession, publishing: Publishing, consuming: Consuming, settling: Settling
    ) -> None:
        self.session = session
        self.publishing = publishing
        self.consuming = consuming
        self.settling = settling


class GrpcDoor:
    """See the module; implements :class:`danube.broker.worker.worker.Door`."""

    def __init__(
        self,
        name: str,
        *,
        connections_max: int,
        places: Places,
        message_bytes_max: int,
        handshake_timeout_ms: int,
        turns: Turns,
        count: Callable[[str, int], None],
        data: DataHalves | None = None,
        placing: Placing | None = None,
        guard: GrpcGuard | None = None,
        audit: Audit | None = None,
    ) -> None:
        """``placing``: the way to other workers of this host; None if connections stay.  ``guard``: who may
        call what; None where nobody is asked.  ``audit``: told of calls that administer.
        """
        self.guard = guard
        self.audit = audit
        self.name = name
        self.methods: dict[str, Method] = {}
        self.message_bytes_max = message_bytes_max
        self.http2_settings = Http2Settings(
            handshake_timeout_ns=handshake_timeout_ms * 1_000_000,
            queued_bytes_per_stream_max=STREAM_QUEUE_BYTES_MAX,
            queued_bytes_max=CONNECTION_QUEUE_BYTES_MAX,
        )
        self.scratch = memoryview(bytearray(RECEIVE_BUFFER_BYTES))  # every connection is read into it
        self.connections: dict[GrpcSocket, None] = {}
        self.turns = turns
        self.count = count
        self.draining = False
        self.placing = placing
        self._data = data
        self.waiting = data is not None
        self._connections_max = connections_max
        self._places = places
        self._dirty: dict[GrpcSocket, None] = {}
        self.unflushed = False
        self._refused: dict[GrpcSocket, None] = {}  # refused for lack of room, and not closed yet

    # -- connections ------------------------------------------------------------------------------

    def factory(self) -> GrpcConnection:
        return GrpcConnection(self)

    def arrived(self, unread: bytes, sent_bytes: int, told: bytes = b"") -> GrpcConnection:
        """The protocol of a connection that another worker has passed on, with all that it received.

        So its calls show their credentials here again, and nothing is told.
        """
        connection = self.factory()
        connection.arrive(unread, sent_bytes)
        return connection

    def opened(self, connection: GrpcSocket, *, arrived: bool = False) -> None:
        held = len(self.connections)
        try:
            self._places.take(connection.host, held, self._connections_max, arrived=arrived)
        except (LimitExceeded, Overloaded) as error:
            if len(self._refused) >= REFUSED_MAX:
                connection.abort()
                return
            connection.refuse(error)
            self._refused[connection] = None
            return
        self.connections[connection] = None
        self.count("connections", 1)
        if not arrived:
            self.count("connections_total", 1)

    def enter(self, connection: GrpcSocket, identity: Identity) -> None:
        """Count the connection for who calls on it now; raises Overloaded if that one has too many."""
        principal = str(identity.principal)
        if principal == connection.entered:
            return
        judged, connection.judged = connection.judged, False
        self._places.enter(principal, connection.host, arrived=judged)
        self._exit(connection)
        connection.entered = principal

    def _exit(self, connection: GrpcSocket) -> None:
        if connection.entered:
            self._places.exit(connection.entered)
            connection.entered = ""

    def closed(self, connection: GrpcSocket) -> None:
        self._dirty.pop(connection, None)
        self._refused.pop(connection, None)
        if connection in self.connections:
            del self.connections[connection]
            self._places.give_back(connection.host)
            self._exit(connection)
            self.count("connections", -1)
            if self._data is not None:
                self._data.consuming.connection_lost(connection)
                self._data.publishing.connection_lost(connection)
            self.turns.schedule_turn()

    def leave(self, consumer: GrpcConsumer) -> None:
        """The client dropped the stream of this consumer."""
        if self._data is not None:
            self._data.consuming.leave(consumer)

    def judge_again(self, connection: GrpcSocket) -> int:
        """End the streams of a connection that its callers may not receive any more; how many there were."""
        connection.forget_caller()
        return 1 if self._data is None else self._data.consuming.judge_again(connection)

    def writable(self, connection: GrpcSocket) -> None:
        """The socket takes bytes again: consumers on it may have more."""
        if self._data is not None:
            for consumer in self._data.consuming.of_connection(connection):
                consumer.give_credit()

    def has_output(self, connection: GrpcSocket) -> None:
        self._dirty[connection] = None
        self.unflushed = True
        if not self.turns.flush_pending:
            self.turns.schedule_turn()

    # -- the worker's door ------------------------------------------------------------------------

    def session(self, connection_id: int) -> BrokerSession | None:
        return self._data.session if self._data is not None and connection_id == CONNECTION_ID else None

    def holders(self) -> list[Holder]:
        return list(self.connections)

    def worker_restarted(self, worker: int) -> None:
        if self._data is not None:
            self._data.session.worker_restarted(worker)

    def hand_over(self) -> bool:
        """Give the calls of this turn to the partitions' owners; True while a ring is full."""
        data = self._data
        if data is None:
            return False
        if data.settling.pending:
            data.settling.hand_over()
        if data.publishing.calls or data.publishing.dirty:
            data.publishing.hand_over()
        return bool(data.session.held) and data.session.offer_held()

    def flush(self) -> None:
        """Hand the output of this turn to the sockets."""
        self.unflushed = False
        while self._dirty:
            dirty, self._dirty = self._dirty, {}
            for connection in dirty:
                connection.flush()

    def sweep(self, now_s: float) -> None:
        """Keepalive and deadlines of the protocol."""
        now_ns = clock.monotonic_ns()
        for connection in [*self.connections, *self._refused]:
            connection.tick(now_ns)
        if self.guard is not None:
            for connection in self.connections:
                connection.forget_caller()
            if self._data is not None:
                self._data.consuming.end_expired(self.guard.ended)

    def drain(self) -> None:
        """End streams, refuse new calls, finish running ones."""
        self.draining = True
        if self._data is not None:
            self._data.publishing.draining = True
            self._data.consuming.drain()
        asyncio.get_running_loop().call_later(GOAWAY_DELAY_S, self._go_away)

    def _go_away(self) -> None:
        for connection in list(self.connections):
            connection.go_away()

    def close_all(self) -> None:
        for connection in list(self.connections):
            connection.close()

    def abort_all(self) -> None:
        """Drop every connection with its unsent output."""
        self._dirty.clear()
        for connection in list(self.connections):
            connection.abort()

    def silence(self) -> None:
        """Drop every connection that has made a call, with its unsent output."""
        for connection in list(self.connections):
            if connection.called:
                connection.abort()

    def abort_entered(self) -> None:
        """Drop every connection that has shown a credential; another one is judged when it does."""
        for connection in list(self.connections):
            if connection.entered:
                connection.abort()
