"""Parts of a worker that only a broker in a cluster has, and their composition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from danube.broker.clustered.directory import Directory
from danube.broker.clustered.owning import Owning
from danube.broker.clustered.parked import Parked
from danube.broker.clustered.peers import Peers, PeerTls
from danube.broker.clustered.reserving import Reserving
from danube.broker.clustered.shard import ClusterShard
from danube.broker.links import Dialled
from danube.broker.processes.data_dir import broker_id
from danube.broker.processes.listeners import own_address
from danube.cluster.links.frames import Kind as LinkKind
from danube.cluster.links.frames import pack_frame
from danube.core.cluster.commands import BrokerChanged, OwnershipChanged
from danube.core.protocol.native import Admin, Kind, decode_control
from danube.errors import DanubeError, OwnerMoved
from danube.host import clock

if TYPE_CHECKING:
    from danube.broker.api import RoutedSession
    from danube.broker.operations.context import Answer
    from danube.broker.processes.contexts import WorkerContext
    from danube.broker.processes.lease import SharedLease
    from danube.broker.routing.questions import Route
    from danube.client.machine.publishing import PartitionProducer
    from danube.cluster.log.local_log import LocalLog
    from danube.core.metadata.commands import Change, TopicRecord
    from danube.core.protocol.native import Frame

RIGHTS_KEPT_NS: Final = 10_000_000_000  # for so long after a lease rights are judged by what is known of them

_FOLLOW: Final = pack_frame(LinkKind.MESSAGE)


class CommitNotices(Dialled):
    """Notices of the controller that the host's copy of the metadata has grown; ``read`` applies the rest.

        worker --MESSAGE--> controller       send notices
        worker <--MESSAGE-- controller       read again; the next notice waits until this one is received

    A lost connection is made again, and then all new metadata is read, so lost notices do no harm.
    """

    retry_max_s = 0.1

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str, read: Callable[[], None]) -> None:
        super().__init__(loop, "controller", address)
        self._read = read

    def on_made(self, transport: asyncio.Transport) -> None:
        transport.write(_FOLLOW)
        self._read()

    def data_received(self, data: bytes) -> None:
        self._read()


class OtherBrokers:
    """Access of a router to the other brokers: :class:`danube.broker.routing.router.Elsewhere`."""

    def __init__(self, directory: Directory, parked: Parked, peers: Peers) -> None:
        self.elsewhere, self.describe = directory.elsewhere, directory.describe
        self._parked, self._peers = parked, peers

    def take(
        self, session: RoutedSession, frame: Frame, buffer: memoryview, error: DanubeError, answer: Answer
    ) -> bool:
        if self._parked.take(session, frame, buffer, error):
            return True
        if frame.kind != Kind.ADMIN or not isinstance(error, OwnerMoved):
            return False
        request = decode_control(buffer[frame.start : frame.end], Admin)
        answer = self._parked.or_park(session, frame, buffer, answer)
        return self._peers.forward(error, request, answer, session.identity)


class ClusterParts:
    """All cluster parts of one worker; all methods run on its loop.  ``read`` applies new metadata."""

    def __init__(
        self,
        context: WorkerContext,
        lease: SharedLease,
        metadata: LocalLog,
        loop: asyncio.AbstractEventLoop,
        read: Callable[[], None],
        submit: Any,
        tls: PeerTls | None = None,
    ) -> None:
        self._lease = lease
        self._began_ns = clock.elapsed_ns()
        self._worker = context.worker
        self._home = own_address(context.listeners["native"])
        self.broker_id = broker_id(context.settings.data_dir, clustered=True)
        self.directory = Directory(self.broker_id, metadata, read)
        self._owning = Owning((context.worker, context.workers), metadata, self.directory, submit)
        self._reserving = Reserving(self.directory, submit)
        self._notices = CommitNotices(loop, context.controller_address, read)
        self._peers = Peers(loop, tls)
        self._shard: ClusterShard
        self._parked: Parked

    @property
    def metadata_whole(self) -> bool:
        """Return whether the host's copy has all metadata from before this broker's registration."""
        return 0 < self._lease.registration <= self.directory.version

    @property
    def rights_known(self) -> bool:
        """Return whether this host has heard from its cluster lately, and so of rights that are taken away.

        Before the first lease the start counts.
        """
        return clock.elapsed_ns() < (self._lease.end_ns or self._began_ns) + RIGHTS_KEPT_NS

    def make_shard(self, silence: Callable[[], None], **parts: Any) -> ClusterShard:
        """Make the worker's shard; ``silence`` drops the connections with their unsent output."""
        self._shard = ClusterShard(
            self.directory, self._owning, self._reserving, self._lease, silence, **parts
        )
        return self._shard

    def other_brokers(self, route: Route) -> OtherBrokers:
        """Return the router's access to other brokers; ``route`` routes a parked frame again."""
        self._parked = Parked(route)
        return OtherBrokers(self.directory, self._parked, self._peers)

    def start(self) -> None:
        self._notices.start()

    def drain(self) -> None:
        """Close the reservations at each log's end, for the next owners; the worker accepts no more."""
        self._shard.end_reservations()

    def stop(self) -> None:
        self._notices.stop()
        self._peers.close()

    def follow(self, changes: Iterable[Change]) -> None:
        """Apply changes of the metadata."""
        concerned = False
        for change in changes:
            if isinstance(change, OwnershipChanged):
                self._shard.follow(change.record)
                concerned = True
            elif isinstance(change, BrokerChanged):
                concerned = True
        if concerned and len(self._parked):
            self._parked.offer()

    def producer_elsewhere(self, record: TopicRecord, partition: str, name: str) -> PartitionProducer | None:
        """Return a producer that follows the owner of a topic's first partition; None if it is owned here."""
        if not isinstance(self.directory.elsewhere(record.topic_id, 0), OwnerMoved):
            return None
        return self._peers.producer(self._home, partition, f"{name}-{self.broker_id}-{self._worker}")

    def tick(self) -> None:
        """Run the timers of the cluster parts; called many times a second."""
        self._parked.tick(clock.monotonic_ns())
