"""Requests about partitions of other brokers: forwarded, and answered as if they were local.

This worker is a native client of each broker that it sends requests to, with one connection each.  A lost
connection is dropped; unanswered requests may have been executed or not, as with any owner that restarts.
The worker's own records go through one more connection, whose home is its own broker.  Where clients speak
TLS, brokers do so among each other by the cluster's certificates.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from danube.broker.operations.context import Answer
from danube.client.aio.connection import Connection
from danube.client.machine.address import SCHEME, parse_url
from danube.client.machine.publishing import PartitionProducer
from danube.client.machine.session import Session
from danube.client.machine.tls import ClientTls, TlsOptions
from danube.cluster.links.tls import broker_problem
from danube.core.protocol.native import Admin, Kind
from danube.core.security.principals import INTERNAL, Identity
from danube.errors import ClosedError, ConnectionFailed, DanubeError, OwnerMoved
from danube.host import telemetry
from danube.host.tls import PEER_NAME, Renewed, TlsFiles, peer_client_context

if TYPE_CHECKING:
    import ssl

    from danube.client.machine.reply import Reply

CONNECT_TIMEOUT_S: Final = 4.0  # to connect, and again for the handshake
QUESTION_TIMEOUT_NS: Final = 10_000_000_000
PUBLISH_TIMEOUT_NS: Final = 30_000_000_000
RETRY_S: Final = 0.2
SILENCE_NS: Final = 2_000_000_000

_log = telemetry.events("peers")


class PeerTls(ClientTls):
    """TLS to the other brokers of the cluster: both sides show certificates of the cluster's authority."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the files; raises ConfigInvalid."""
        super().__init__(TlsOptions())
        self.renewed: Renewed = Renewed(files, peer_client_context)
        self._renewed = self.renewed

    def server_name(self, host: str) -> str:
        return PEER_NAME

    def check(self, ssl_object: ssl.SSLObject | ssl.SSLSocket, host: str) -> None:
        problem = broker_problem(ssl_object.getpeercert(), host)
        if problem:
            raise ConnectionFailed(f"another broker is at {host}", why=problem)


class Peers:
    """One worker's connections to other brokers; all methods run on its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tls: PeerTls | None = None) -> None:
        self._loop = loop
        self._tls = tls
        self._sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._publisher: Session | None = None
        self._closing = asyncio.Event()  # never set: the task is cancelled

    def forward(self, moved: OwnerMoved, request: Admin, answer: Answer, asking: Identity = INTERNAL) -> bool:
        """Forward a request to the owner in ``moved``; False without one, or if the request came from it.

        The owner judges it for who is ``asking``, where access is controlled.
        """
        address = moved.facts.get("address")
        if request.forwarded or not isinstance(address, str) or not address:
            return False
        session = self._sessions.get(address) or self._connect(address)
        on_behalf, groups = request.on_behalf, request.groups
        if asking.how not in ("internal", "none"):
            on_behalf, groups = str(asking.principal), asking.groups
        body = Admin(request.op, request.partition, request.args, True, on_behalf, groups)
        reply = session.request(Kind.ADMIN, body, repeatable=False, timeout_ns=QUESTION_TIMEOUT_NS)
        reply.when_settled(lambda settled: answer(_outcome(settled)))
        return True

    def _connect(self, address: str) -> Session:
        session = self._sessions[address] = Session(client="broker", reconnect_timeout_ns=0)
        session.silence_ns = SILENCE_NS
        task = self._loop.create_task(self._serve(address, session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return session

    async def _serve(self, address: str, session: Session) -> None:
        """Keep one connection until it is lost; waiting requests then fail."""
        error: DanubeError = OwnerMoved("the connection to the partition's owner is closed")
        try:
            connection = Connection(session, parse_url(SCHEME + address), CONNECT_TIMEOUT_S, self._tls)
            error = await connection.serve_once()
        except DanubeError as failure:
            error = failure
        finally:
            if self._sessions.get(address) is session:
                del self._sessions[address]
            session.fail(error)
        _log.limited("a broker is not reached", source=address, why=str(error))

    # -- publishing -------------------------------------------------------------------------------

    def producer(self, home: str, partition: str, name: str) -> PartitionProducer:
        """Return a producer that follows the partition's owner; ``home`` is this broker's address."""
        session = self._publisher
        if session is None:
            session = self._publisher = Session(client="broker", reconnect_timeout_ns=None)
            task = self._loop.create_task(self._publish_from(session, home))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        producer = PartitionProducer(session, name, partition, 0, PUBLISH_TIMEOUT_NS)
        producer.internal = True
        producer.start()
        return producer

    async def _publish_from(self, session: Session, home: str) -> None:
        connection = Connection(session, parse_url(SCHEME + home), CONNECT_TIMEOUT_S, self._tls)
        while True:
            try:
                await connection.open()
                await self._closing.wait()
            except DanubeError as error:
                _log.limited("this broker is not reached", source=home, why=str(error))
                await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.fail(ClosedError("the worker ends"))
        for task in self._tasks:
            task.cancel()


def _outcome(reply: Reply) -> object:
    error = reply.error
    if error is None:
        return reply.value
    if isinstance(error, DanubeError):
        return error
    return DanubeError("the owner did not answer", why=str(error))
