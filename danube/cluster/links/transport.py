"""Messages and requests between the members of a cluster, over TCP.

Every node dials every other node.  It sends on the connections that it dialled, and reads from those that it
accepted.  Heartbeats, large messages and requests have connections of their own
(:class:`~danube.cluster.links.frames.Lane`). A connection begins with a greeting each way: the cluster, the
node, and with TLS a certificate of this node.  Foreign clusters, unknown nodes, nodes with another id than
the dialled one, garbage and slow peers are refused before any other byte of them is read, and counted by
reason.

Messages are lost if a node is away or slow, and never repeated; an engine tolerates both loss and repetition.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, Protocol

from danube.cluster.links.addresses import split_address
from danube.cluster.links.frames import (
    GUEST_FRAME_BYTES_MAX,
    SMALL_MESSAGE_BYTES_MAX,
    VERSION,
    Frame,
    Greeting,
    Kind,
    Lane,
    Refused,
    pack_frame,
)
from danube.cluster.links.lane import OutgoingLane
from danube.cluster.links.link import Link, LinkTimes
from danube.cluster.links.tls import TlsContexts, identity_problem
from danube.errors import ConfigInvalid, ConnectionFailed, LimitExceeded, OperationTimeout
from danube.host import telemetry

GREETING_LINKS_MAX: Final = 64  # accepted, not greeted yet
GUEST_LINKS_MAX: Final = 32
BACKLOG: Final = 128
HAPPY_EYEBALLS_S: Final = 0.25

_log = telemetry.events("cluster.transport")


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this node; ``cluster_id`` is "" until it belongs to a cluster."""

    cluster: str
    node_id: str
    address: str
    cluster_id: str = ""


class TransportHost(Protocol):
    """Callbacks of the transport to the node it runs in."""

    def received(self, node_id: str, message: bytes) -> None:
        """A message of a member."""

    def called(self, caller: Greeting, body: bytes) -> Awaitable[bytes]:
        """Answer a request; ``caller.lane`` says whether a member or a guest asks."""

    def stranger(self, node_id: str) -> None:
        """A node of this cluster that is not known here was refused; it may be a new member."""

    def moved(self, node_id: str, address: str) -> None:
        """A member greets with another address than the one known here."""


class Transport:
    """The connections of one node; all calls on its loop."""

    def __init__(
        self,
        identity: Identity,
        host: TransportHost,
        *,
        times: LinkTimes | None = None,
        tls: TlsContexts | None = None,
    ) -> None:
        self._identity = identity
        self._host = host
        self._times = times or LinkTimes()
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._addresses: dict[str, str] = {}
        self._lanes: dict[tuple[str, Lane], OutgoingLane] = {}
        self._accepted: dict[tuple[str, Lane], Link] = {}  # the newest of each
        self._incoming: dict[Link, None] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = count(1)
        self._counters: Counter[str] = Counter()

    # -- life -------------------------------------------------------------------------------------

    async def listen(self, listener: socket.socket) -> None:
        """Accept connections on a bound socket."""
        limit_s = self._times.handshake_s if self._tls is not None else None
        self._server = await self._loop.create_server(
            self._accept,
            sock=listener,
            backlog=BACKLOG,
            ssl=self._tls.server if self._tls is not None else None,
            ssl_handshake_timeout=limit_s,
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for lane in self._lanes.values():
            lane.close()
        for link in list(self._incoming):
            link.abort()
        for task in self._tasks:
            task.cancel()
        self._lanes.clear()

    @property
    def identity(self) -> Identity:
        return self._identity

    def join_cluster(self, cluster_id: str) -> None:
        """Set the cluster of this node; members are greeted with its id from now on."""
        self._identity = replace(self._identity, cluster_id=cluster_id)

    def set_members(self, addresses: Mapping[str, str]) -> None:
        """Set the nodes that may connect as members, with their addresses; this node is left out."""
        wanted = {node: address for node, address in addresses.items() if node != self._identity.node_id}
        for key in [key for key in self._lanes if key[0] not in wanted]:
            self._lanes.pop(key).close()
        for (node_id, _), link in list(self._accepted.items()):
            if node_id not in wanted:
                link.abort()
        former, self._addresses = self._addresses, wanted
        for (node_id, _), lane in self._lanes.items():
            if former.get(node_id) != wanted[node_id]:
                lane.renew()
        for node_id in wanted:
            self._lane(node_id, Lane.RAFT).connect()

    def connected(self, node_id: str) -> bool:
        """Whether messages reach this node now, as far as can be told."""
        lane = self._lanes.get((node_id, Lane.RAFT))
        return lane is not None and lane.connected

    def statistics(self) -> dict[str, int]:
        """Counters: sent, received, dropped, and ``refused_*`` by reason."""
        dropped = sum(lane.dropped_count for lane in self._lanes.values())
        return {**self._counters, "dropped": self._counters["dropped"] + dropped}

    # -- sending ----------------------------------------------------------------------------------

    def send(self, node_id: str, message: bytes) -> None:
        """Send a message of the engine; it may be lost."""
        lane = Lane.RAFT if len(message) <= SMALL_MESSAGE_BYTES_MAX else Lane.BULK
        if node_id not in self._addresses or len(message) > lane.frame_bytes_max:
            self._counters["dropped"] += 1
            return
        self._counters["sent"] += 1
        self._lane(node_id, lane).send(pack_frame(Kind.MESSAGE, message))

    async def call(self, node_id: str, body: bytes, timeout_s: float) -> bytes:
        """Ask a member; raises OperationTimeout, or ConnectionFailed if it cannot be reached.

        After either the request may have been carried out.
        """
        if node_id not in self._addresses:
            raise ConnectionFailed(f"node {node_id} is not a member that is known here")
        if len(body) > Lane.CALLS.frame_bytes_max:
            raise LimitExceeded("a request to a member is too large", why=f"it has {len(body)} bytes")
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._lane(node_id, Lane.CALLS).link()
                return await self._ask(link, body)
        except TimeoutError:
            raise OperationTimeout(
                f"node {node_id} did not answer", why=f"within {timeout_s:.1f} s"
            ) from None

    async def call_address(self, address: str, body: bytes, timeout_s: float) -> tuple[Greeting, bytes]:
        """Send a request to ``address`` as a guest; return the node that serves there, and its answer.

        Raises ConnectionFailed and OperationTimeout.
        """
        if len(body) > GUEST_FRAME_BYTES_MAX:
            raise LimitExceeded("a guest's request is too large", why=f"it has {len(body)} bytes")
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._dial(address, Lane.GUEST, "")
                try:
                    answer = await self._ask(link, body)
                    return link.peer or Greeting(), answer
                finally:
                    link.abort()
        except TimeoutError:
            raise OperationTimeout(f"{address} did not answer", why=f"within {timeout_s:.1f} s") from None
        except Refused as refused:
            raise ConnectionFailed(f"{address} is refused: {refused.reason}", why=refused.detail) from None
        except OSError as error:
            raise ConnectionFailed(f"{address} is not reached", why=str(error)) from None

    async def _ask(self, link: Link, body: bytes) -> bytes:
        number = next(self._numbers)
        waiting: asyncio.Future[bytes] = self._loop.create_future()
        if not link.open:
            raise ConnectionFailed("the connection to a member was lost")
        link.calls[number] = waiting
        try:
            link.write(pack_frame(Kind.REQUEST, body, number))
            return await waiting
        finally:
            link.calls.pop(number, None)

    def _lane(self, node_id: str, lane: Lane) -> OutgoingLane:
        found = self._lanes.get((node_id, lane))
        if found is None:

            def dial() -> Awaitable[Link]:
                return self._dial_member(node_id, lane)

            found = self._lanes[node_id, lane] = OutgoingLane(self._loop, node_id, lane, dial)
        return found

    async def _dial_member(self, node_id: str, lane: Lane) -> Link:
        async with asyncio.timeout(self._times.handshake_s):
            return await self._dial(self._addresses[node_id], lane, node_id)

    async def _dial(self, address: str, lane: Lane, wanted: str) -> Link:
        """A connection whose greeting was accepted; raises OSError, Refused, ConnectionFailed."""
        try:
            host, port = split_address(address)
        except ConfigInvalid as error:
            raise ConnectionFailed(str(error)) from None
        me = self._identity
        greeting = Greeting(me.cluster, me.cluster_id, me.node_id, me.address, lane, wanted)
        link = Link(self._loop, self, self._times, greeting, host)
        try:
            with_tls = {"ssl": self._tls.client, "server_hostname": host} if self._tls is not None else {}
            await self._loop.create_connection(
                lambda: link, host, port, happy_eyeballs_delay=_race_delay_s(host), **with_tls
            )  # type: ignore[call-overload]
            return await asyncio.shield(link.ready)
        except BaseException:
            link.abort()
            raise

    # -- greetings --------------------------------------------------------------------------------

    def _accept(self) -> Link:
        link = Link(self._loop, self, self._times)
        self._incoming[link] = None
        silent = [one for one in self._incoming if one.peer is None]
        if len(silent) > GREETING_LINKS_MAX:
            # A member greets within moments, so among too many it is the oldest that never will.
            # It counts no more at once: its end is told in a later turn, and many may come in this one.
            oldest = silent[0]
            del self._incoming[oldest]
            self.refused(oldest, Refused("crowded"))
            oldest.abort()
        return link

    def judge(self, link: Link, greeting: Greeting) -> Greeting:
        """Accept a greeting, see LinkOwner."""
        me = self._identity
        if greeting.refused:
            raise Refused("refused_there", greeting.refused)
        if greeting.version != VERSION:
            raise Refused("version", str(greeting.version))
        foreign = me.cluster_id and greeting.cluster_id and me.cluster_id != greeting.cluster_id
        if greeting.cluster != me.cluster or foreign:
            raise Refused("foreign_cluster", greeting.cluster)
        if link.greeting is not None:
            self._judge_answer(link, link.greeting, greeting)
        else:
            self._judge_caller(link, greeting)
        self._check_certificate(link, greeting)
        return Greeting(me.cluster, me.cluster_id, me.node_id, me.address, greeting.lane)

    def _judge_answer(self, link: Link, mine: Greeting, greeting: Greeting) -> None:
        """Check that the dialled member is the one that answers."""
        if mine.wanted and (greeting.node_id != mine.wanted or not greeting.cluster_id):
            raise Refused("wrong_node", greeting.node_id)

    def _judge_caller(self, link: Link, greeting: Greeting) -> None:
        me = self._identity
        if greeting.lane not in list(Lane):
            raise Refused("garbage", f"lane {greeting.lane}")
        if greeting.wanted not in ("", me.node_id):
            raise Refused("wrong_node", f"{greeting.wanted} is not here")
        if greeting.lane == Lane.GUEST:
            guests = sum(one.open and one.lane is Lane.GUEST for one in self._incoming)
            if guests >= GUEST_LINKS_MAX:
                raise Refused("crowded", "too many guests")
            return
        if not me.cluster_id or not greeting.cluster_id:
            raise Refused("no_cluster", "one of the two belongs to no cluster yet")
        if greeting.node_id == me.node_id:
            raise Refused("wrong_node", "this node's own id")
        if greeting.node_id not in self._addresses:
            self._host.stranger(greeting.node_id)
            raise Refused("unknown_node", greeting.node_id)

    def _check_certificate(self, link: Link, greeting: Greeting) -> None:
        if self._tls is None:
            return
        host = link.host
        if not link.dialled:
            address = self._addresses.get(greeting.node_id, greeting.address)
            try:
                host, _ = split_address(address)
            except ConfigInvalid:
                raise Refused("garbage", "no address") from None
        problem = identity_problem(link.certificate, greeting.node_id, host)
        if problem:
            raise Refused("certificate", problem)

    # -- links ------------------------------------------------------------------------------------

    def opened(self, link: Link) -> None:
        peer = link.peer
        if link.dialled or peer is None or link.lane is Lane.GUEST:
            return
        former = self._accepted.get((peer.node_id, link.lane))
        self._accepted[peer.node_id, link.lane] = link
        if former is not None:
            former.abort()  # the node dials once a lane, so the former one is half open
        if peer.address and peer.address != self._addresses.get(peer.node_id):
            self._host.moved(peer.node_id, peer.address)

    def received(self, link: Link, frame: Frame) -> None:
        peer = link.peer
        if peer is None:
            return
        self._counters["received"] += 1
        if frame.kind is Kind.MESSAGE:
            self._host.received(peer.node_id, frame.body)
        else:
            task = self._loop.create_task(self._answer(link, peer, frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, link: Link, peer: Greeting, frame: Frame) -> None:
        try:
            answer = await self._host.called(peer, frame.body)
            link.write(pack_frame(Kind.ANSWER, answer, frame.number))
        finally:
            link.request_ended()

    def resumed(self, link: Link) -> None:
        for lane in self._lanes.values():
            lane.resumed()

    def refused(self, link: Link, refused: Refused) -> None:
        self._counters[f"refused_{refused.reason}"] += 1
        if not link.dialled:
            why = f"{refused.reason} {refused.detail}".strip()
            _log.limited("connection of a node refused", source=link.source, why=why)

    def closed(self, link: Link) -> None:
        self._incoming.pop(link, None)
        if link.peer is not None:
            key = (link.peer.node_id, link.lane)
            if self._accepted.get(key) is link:
                del self._accepted[key]
        if link.greeting is not None and link.greeting.wanted:
            lane = self._lanes.get((link.greeting.wanted, link.lane))
            if lane is not None:
                lane.lost(link)


def _race_delay_s(host: str) -> float | None:
    """Return when a name's next address is tried beside the one before; None for a plain address.

    asyncio's race, when it is given up in the turn in which it is won, forgets the winner's socket.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return HAPPY_EYEBALLS_S
    return None


def bind(host: str, port: int) -> socket.socket:
    """A listening socket for members; an empty host is every address of this host, IPv6 too."""
    family = socket.AF_INET6 if ":" in host or not host else socket.AF_INET
    with suppress(OSError):
        if host and family == socket.AF_INET:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server(
            (host, port),
            family=family,
            backlog=BACKLOG,
            dualstack_ipv6=family == socket.AF_INET6 and not host,
        )
    except OSError as error:
        raise ConfigInvalid(
            f"the cluster's address {host}:{port} cannot be used",
            why=str(error),
            hint="choose another cluster.raft_addr, or find the process that uses the port",
        ) from None
