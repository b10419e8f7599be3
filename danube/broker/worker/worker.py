"""One worker process: an event loop, the partitions it owns, its connections and its rings.

All work is done in *turns*.  Sockets and rings only note that there is work.  A turn takes the records of the
rings, lets the shard write and deliver, hands the output to sockets and rings, and releases the ring space.
While there is work, the next turn follows at once.  Otherwise the worker arms its bell, which another worker
rings, and sleeps in the loop's poll.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from danube import __version__
from danube.broker.admission import Admission, admission_of, authority_of
from danube.broker.api import Door, Holder, PassedConnections, RoutedSession
from danube.broker.audit.audit import Audit, open_audit
from danube.broker.audit.heads import HeadKeeper, key_of
from danube.broker.clustered.parts import ClusterParts
from danube.broker.clustered.peers import PeerTls
from danube.broker.links import LinkClient
from danube.broker.operations.context import Operations
from danube.broker.operations.examinations import Examinations
from danube.broker.operations.proposals import Proposals, open_metadata
from danube.broker.partition.opening import ahead_of
from danube.broker.partition.sums import Sums
from danube.broker.processes import last_resort
from danube.broker.processes.data_dir import broker_id
from danube.broker.processes.directories import METADATA, PARTITIONS, partition_names
from danube.broker.processes.listeners import BACKLOG, LOCAL, addresses
from danube.broker.routing.judging import Recall
from danube.broker.routing.remote import RecordKind, RemoteSessions
from danube.broker.routing.router import Router, find_topic
from danube.broker.shard.compactor import Compactor
from danube.broker.shard.shard import Shard
from danube.broker.tiers.retention import LocalRetention
from danube.broker.tiers.worker_tiers import TierOptions, Tiers
from danube.broker.traffic import Traffic
from danube.broker.worker.dead_letters import DeadLetters
from danube.broker.worker.guests import LOCAL_PLACES, Guests
from danube.broker.worker.handing_over import HandingOver
from danube.broker.worker.housekeeping import Housekeeping
from danube.broker.worker.measuring import Measuring
from danube.broker.worker.places import Places
from danube.config.plans import compaction_settings
from danube.core.metadata.commands import QuotasChanged, TopicDeleted, TopicUpdated
from danube.core.placement.workers import owner_of
from danube.errors import RingDamaged
from danube.host import clock, telemetry
from danube.host.handshakes import HANDSHAKES_MAX, Handshakes
from danube.host.tls import TlsFiles, TlsPort, TlsWatch
from danube.ipc.counters import Counter, State, snapshot
from danube.ipc.usage import used
from danube.limits import WRITE_BYTES_MAX
from danube.schema.model import Checks, Compatibility
from danube.wal.log.log import LogOptions
from danube.wal.log.syncer import LeftoverJob, Syncer
from danube.wal.segments.descriptors import connections_allowed, descriptors, descriptors_allowed

if TYPE_CHECKING:
    from pathlib import Path

    from danube.broker.processes.lease import SharedLease
    from danube.broker.processes.supervisor import WorkerContext
    from danube.config.loading import BrokerConfig
    from danube.core.metadata.commands import TopicRecord
    from danube.core.metadata.roles import Access

_log = telemetry.events("worker")
CACHE_DIRECTORY = "cache"
_TURNS = int(Counter.TURNS)
YIELDED_NS_MAX = 2_000_000  # a longer yield: some other process kept the processor
TURNS_WITHOUT_YIELD = 200  # that follow such a yield
UNUSED_TURNS = 16  # after so many turns without records, rings are not polled until a bell rings
TLS_PORTS = 3  # native, gRPC and administration; each holds descriptors for half-done handshakes
DRAIN_GRACE_S = 1.5
DRAIN_MAX_S = 7.0


class Worker:
    """Builds the parts of a worker and runs their turns."""

    def __init__(self, context: WorkerContext, config: BrokerConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.context = context
        self.config = config
        self.index = context.worker
        self.data_dir = context.settings.data_dir
        self.loop = loop
        self.counters = Traffic(context.counters)
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="danube-disk")
        self.channel = context.channel()
        # If there are partitions on disk, a missing metadata log is a loss to report, not a first start.
        partitions = self.data_dir / PARTITIONS
        partitions.mkdir(mode=0o700, exist_ok=True)
        place = self.data_dir / METADATA, context.controller_address
        self.metadata = open_metadata(*place, create=not partition_names(self.data_dir))
        self.proposals = Proposals(*place, loop.call_soon_threadsafe)
        descriptors.resize(descriptors_allowed())
        allowed = connections_allowed()
        self._handshakes_max = min(HANDSHAKES_MAX, max(1, allowed // 16)) if config.serves_tls else 0
        self.places = Places(
            allowed - TLS_PORTS * self._handshakes_max, kept=self._kept_places(), guests=self._make_guests()
        )
        self.syncer = Syncer(loop.call_soon_threadsafe, partitions)
        self.sealer = Syncer(loop.call_soon_threadsafe)
        self.reserver = Syncer(loop.call_soon_threadsafe)  # a busy log waits for it
        self.peer_tls: PeerTls | None = None  # where brokers speak TLS to each other
        self.authority = authority_of(config, self._access)
        self.admission = admission_of(config, self._access)
        self.cluster = self._make_cluster_parts(context.lease) if context.lease is not None else None
        self.dead_letters = DeadLetters(self)
        self._mover: LinkClient | None = None
        self.shard = self._make_shard(partitions)
        broker_id = self.cluster.broker_id if self.cluster is not None else 0
        self.sums = self.shard.sums = self._make_sums(broker_id)
        self.compactor = self._make_compactor()
        self.examinations = Examinations(loop.call_soon_threadsafe)
        self.remote = RemoteSessions(self.channel, self.shard, self._deliver, self.refresh_metadata)
        operations = self._make_operations()
        self.router = Router(
            context.worker, context.workers, self.shard, operations,
            schedule_turn=self.schedule_turn,
            default_partitions=config.topics.partitions,
            auto_create=config.topics.auto_create,
            remote=self.remote,
            other_brokers=self.cluster.other_brokers if self.cluster is not None else None,
            authority=self.authority,
        )  # fmt: skip
        self.audit = self.router.audit = open_audit(config, context.worker, loop)
        if self.admission is not None:
            self._follow_admissions(self.admission)
        if self.audit is not None:
            self._join_audit(self.audit, broker_id)
        self.doors: dict[str, Door] = {}
        forget = self.admission.forget if self.admission is not None else _nothing
        self.recall = Recall(self.authority, self._holders, forget, loop.call_soon)
        self.housekeeping = Housekeeping(self)
        self._metrics = self._make_metrics_link(context.metrics_link) if context.metrics_link else None
        self._begin: Callable[[], None] = self._begin_turn if context.workers > 1 else self.run_turn
        self._turn_scheduled = False
        self._asked = 0  # how often a turn was requested since the last one
        self._blocked = False  # a door waits for room in a ring
        self.flush_pending = False  # True in a turn that will flush its doors
        self._several_clients = False  # the last turn was requested several times
        self._skip_yield = 0  # number of turns that begin without a yield
        self._flushed = True
        self.rings_due = context.workers > 1  # rings are in use, a bell rang, or a regular poll is due
        self._unused_turns = 0  # consecutive turns without records from rings
        self._servers: list[asyncio.Server | Handshakes] = []
        self.certificates: TlsWatch | None = None

    def _make_sums(self, broker_id: int) -> Sums:
        look = partial(used, self.context.region)
        return Sums(self.context.usage, lambda: self.metadata.state, broker_id, look=look)

    def _follow_admissions(self, admission: Admission) -> None:
        handing_over = HandingOver(
            self._access, self.authority, self.proposals.submit, audit=self.audit,
            refresh=self.refresh_metadata, committed=self.metadata_changed,
        )  # fmt: skip
        admission.on_admitted = handing_over.admitted
        if (cluster := self.cluster) is not None:
            admission.rights_known = lambda: cluster.rights_known
        if self.audit is not None:
            admission.on_refused = self.audit.refused

    def _join_audit(self, audit: Audit, broker_id: int) -> None:
        self.router.operations.audit_lines = audit.read
        audit.heads = HeadKeeper(
            key_of(broker_id, self.index), self.config.audit_directory,
            lambda: self.metadata.state.cluster.keys, self.proposals.submit,
        )  # fmt: skip

    def _make_operations(self) -> Operations:
        operations = Operations(
            self.metadata, self.proposals, self.examinations,
            refresh=self.refresh_metadata,
            metadata_changed=self.metadata_changed,
            status=self.status,
            default_policy=self.config.topic_policy(),
            default_compatibility=Compatibility(self.config.schema.default_compatibility),
            compatibility_checks=Checks(self.config.schema.compatibility_checks),
            store=self.shard.tiers.store if self.shard.tiers is not None else None,
        )  # fmt: skip
        operations.used_of = self.sums.used
        operations.signer = self.admission.credentials if self.admission is not None else None
        return operations

    def _make_cluster_parts(self, lease: SharedLease) -> ClusterParts:
        submit, config = self.proposals.submit, self.config
        if config.tls.cert_file:
            cluster = config.cluster
            self.peer_tls = PeerTls(TlsFiles(cluster.cert_file, cluster.key_file, cluster.ca_file))
        return ClusterParts(
            self.context, lease, self.metadata, self.loop, self.refresh_metadata, submit, self.peer_tls
        )

    def _access(self) -> Access:
        return self.metadata.state.access

    def _holders(self) -> list[Holder]:
        return [holder for door in self.doors.values() for holder in door.holders()]

    def _make_shard(self, partitions: Path) -> Shard:
        parts: dict[str, Any] = {
            "root": partitions,
            "incarnation": self.context.incarnation,
            "find_topic": partial(find_topic, self.metadata, self.refresh_metadata),
            "counters": self.counters,
            "log_options": LogOptions(segment_bytes=self.config.wal.segment_bytes),
            "syncer": self.syncer,
            "sealer": self.sealer,
            "executor": self.executor,
            "call_on_loop": self.loop.call_soon_threadsafe,
            "call_later": self.loop.call_later,
            "schedule_turn": self._need_turn,
            "take_dead_letters": self.dead_letters.take,
            "make_tiers": self._make_tiers if self.context.mover_address else None,
            "unbroken_since": self.context.unbroken_since,
            "reserver": self.reserver,
            "sync_lag_max_ns": self.config.wal.sync_lag_max_ms * 1_000_000,
        }
        if self.cluster is not None:
            return self.cluster.make_shard(self._silence, **parts)
        return Shard(ahead_of=lambda topic_id: ahead_of(self.metadata.state, topic_id), **parts)

    def _kept_places(self) -> int:
        """Return how many of this worker's connections only this host may open; a quarter at most."""
        share = self.config.limits.connections_max // self.context.workers
        return min(-(-LOCAL_PLACES // self.context.workers), share // 4)

    def _make_guests(self) -> Guests | None:
        limits = self.config.limits
        address, principal = limits.connections_per_address, limits.connections_per_principal
        rate = limits.connection_rate
        if not (address or principal or rate):
            return None
        counts = self.context.tallies()
        return Guests(counts, per_address=address, per_principal=principal, per_second=rate)

    def _silence(self) -> None:
        """Drop all connections that may have asked for something, and their unsent output."""
        for door in self.doors.values():
            door.silence()

    def _make_compactor(self) -> Compactor:
        return Compactor(
            self.shard.partitions.values, ThreadPoolExecutor(1, thread_name_prefix="danube-compact"),
            self.loop.call_soon_threadsafe, self.shard.storage.roll, compaction_settings(self.config.storage),
        )  # fmt: skip

    def _make_tiers(self, shard: Shard) -> Tiers:
        """Make the worker's cold tiers; sealed segments go to the mover."""
        storage, metadata = self.config.storage, self.metadata
        options = TierOptions(
            storage.seal_after_ms,
            LocalRetention(
                storage.local_retention_ms, storage.local_retention_bytes, storage.local_retention_segments
            ),
            storage.cache_bytes // self.context.workers,
        )  # fmt: skip
        first = self.index == 0  # only one worker keeps the store's copies of the metadata
        return Tiers(
            self.data_dir / CACHE_DIRECTORY / f"worker-{self.index}", options,
            wake=shard.wake_readers,
            roll=shard.storage.roll,
            metadata=(lambda: (metadata.version, metadata.state.snapshot)) if first else None,
            connect=self._connect_mover,
        )  # fmt: skip

    def _connect_mover(self, on_connected: Callable[[], None], on_frame: Callable[[Any], None]) -> LinkClient:
        address = self.context.mover_address
        self._mover = LinkClient(self.loop, "mover", address, on_connected, on_frame)
        return self._mover

    def _make_metrics_link(self, address: str) -> LinkClient:
        tiers = self.shard.tiers
        measuring = Measuring(
            (self.index, self.context.workers),
            metadata=lambda: self.metadata.state,
            tiers=lambda: None if tiers is None else tiers.all(),
            unopened=self.housekeeping.unopened,
            call_soon=self.loop.call_soon,
            send=lambda kind, **fields: link.send(kind, **fields),
        )
        link = LinkClient(self.loop, "metrics", address, lambda: None, measuring.on_frame)
        return link

    # -- turns ------------------------------------------------------------------------------------

    def schedule_turn(self) -> None:
        """Schedule a turn for frames of a connection or records of another worker."""
        self._asked += 1
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self.loop.call_soon(self._begin)

    def _need_turn(self) -> None:
        """Schedule a turn for the worker's own work, after the callbacks that are ready."""
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self.loop.call_soon(self._begin)

    def _begin_turn(self) -> None:
        """Run a turn; with several active clients first yield the processor and poll the sockets once more.

        Then one turn takes the frames of several clients, and processes wake each other less often.  There is
        no yield for a single client, nor for some turns after a long one.  Used only with several workers.
        """
        if not (self._several_clients or self._asked > 1) or self._skip_yield:
            if self._skip_yield:
                self._skip_yield -= 1
            self.run_turn()
            return
        asked_ns = clock.monotonic_ns()
        os.sched_yield()
        if clock.monotonic_ns() - asked_ns > YIELDED_NS_MAX:
            self._skip_yield = TURNS_WITHOUT_YIELD
        self.loop.call_soon(self.run_turn)

    def _on_bell(self) -> None:
        self.channel.disarm()
        self.rings_due = True
        self.schedule_turn()

    def run_turn(self) -> None:
        """Take received frames and ring records, write, answer, deliver."""
        self._several_clients, self._asked = self._asked > 1, 0
        self.flush_pending = True
        try:
            received = self._take()
        finally:
            self._turn_scheduled = False  # requests up to here are part of this turn
        self.shard.turn()
        self.flush_pending = False
        for door in self.doors.values():
            if door.unflushed:
                door.flush()
        self.counters.block.words[_TURNS] += 1
        # Otherwise no ring was used in this turn, and an earlier turn has armed the bell.
        if self.context.workers > 1 and (
            self.rings_due or received or self._blocked or self.remote.pending or self.channel.touched
        ):
            self._leave_rings(received)

    def _leave_rings(self, received: bool) -> None:
        """Publish the output for other workers, release ring space, and arm the bell."""
        channel = self.channel
        full = self.remote.flush() or self._blocked
        unused = not (received or full or channel.touched)
        self._unused_turns = self._unused_turns + 1 if unused else 0
        if full:
            self.counters.block.add(Counter.RING_FULL)  # the peer rings the bell when it has room
        channel.release()
        self._flushed = channel.flush()
        if received or (not self._turn_scheduled and not channel.arm()):
            self.schedule_turn()
        self.rings_due = self._turn_scheduled or self._unused_turns < UNUSED_TURNS

    def _take(self) -> bool:
        """Pass records of rings and frames of doors to the shard; return whether rings had records."""
        received = bool(self._take_from_rings()) if self.rings_due else False
        # This comes before the shard writes: the frames lie in buffers that door.flush() releases.
        self._blocked = False
        for door in self.doors.values():
            if door.waiting:
                self._blocked |= door.hand_over()
        return received

    def _take_from_rings(self) -> list[tuple[int, int, memoryview]]:
        for worker in self.channel.peers_restarted():
            self.remote.worker_restarted(worker)
            for door in self.doors.values():
                door.worker_restarted(worker)
            self.dead_letters.worker_restarted(worker)
            self.router.worker_restarted(self.router.questions, worker)
        self.router.received()
        received = self._poll()
        for worker, kind, record in received:
            self.remote.take(worker, kind, record)
            if self.shard.taken_bytes >= WRITE_BYTES_MAX:  # the answers let senders continue meanwhile
                self.shard.turn()
                self.remote.flush()
                self.channel.flush()
        return received

    def _poll(self) -> list[tuple[int, int, memoryview]]:
        try:
            return self.channel.poll()
        except RingDamaged as error:
            worker = int(error.facts["worker"])
            _log.error("ring damaged", from_worker=worker, error=str(error))
            self.channel.reset(worker)
            self.loop.call_soon(self.schedule_turn)
            return []

    def _deliver(self, connection_id: int, frames: bytes) -> None:
        session = self._session(connection_id)
        if session is not None:
            self.router.answered(session, frames)
            session.send(frames)

    def _session(self, connection_id: int) -> RoutedSession | None:
        for inner in (self.dead_letters, self.router.questions):
            if connection_id == inner.connection_id:
                return inner
        for door in self.doors.values():
            session = door.session(connection_id)
            if session is not None:
                return session
        return None

    # -- metadata ---------------------------------------------------------------------------------

    def refresh_metadata(self) -> None:
        """Read newly committed metadata and apply its changes to the shard."""
        changes = self.metadata.refresh()
        for change in changes:
            if isinstance(change, TopicDeleted):
                self.shard.delete_topic(change.record)
                if self.shard.tiers is not None and self._owns_first(change.record):
                    self.shard.tiers.delete(change.record)
            elif isinstance(change, TopicUpdated):
                self.shard.update_policy(change.record)
            elif isinstance(change, QuotasChanged):
                self.shard.follow_limits(change.namespaces)
                self.recall.policies_changed()
        if changes and self.cluster is not None:
            self.cluster.follow(changes)

    def _owns_first(self, record: TopicRecord) -> bool:
        """Return whether this worker owns the topic's first partition, and so reports on the topic."""
        return owner_of(record.topic_id, 0, self.context.workers) == self.index

    def metadata_changed(self) -> None:
        """Apply the metadata that this worker has committed, and notify the other workers."""
        self.refresh_metadata()
        for worker in range(self.context.workers):
            if worker != self.index:
                self.remote.notify(worker, RecordKind.METADATA)

    def status(self) -> dict[str, Any]:
        """Return the content of `danube status`: this broker and the counters of all workers."""
        return {
            "version": __version__,
            "broker_id": str(broker_id(self.data_dir, clustered=bool(self.context.controller_address))),
            "supervisor_pid": os.getppid(),
            "data_dir": str(self.data_dir),
            **addresses(self.context.listeners),
            **({"metrics": self.context.metrics_address} if self.context.metrics_address else {}),
            "topics": self.metadata.state.topic_count,
            "workers": [
                {"worker": index, **counters} for index, counters in enumerate(snapshot(self.context.region))
            ],
        }

    # -- life -------------------------------------------------------------------------------------

    async def run(
        self, doors: Mapping[str, Door], tls: Mapping[str, TlsPort],
        passed: PassedConnections | None = None,
    ) -> None:  # fmt: skip
        """Serve until SIGTERM, then drain.  ``doors`` and ``tls`` are keyed like the listeners."""
        self.doors.update(doors)
        if tls:
            peers = [self.peer_tls.renewed] if self.peer_tls is not None else []
            self.certificates = TlsWatch([*peers, *(one for port in tls.values() for one in port.all)])
        loop = self.loop
        stopped = asyncio.Event()
        last_resort.install(loop)
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
        if self.context.drain.requested:  # the signal came before this handler was set
            stopped.set()
        self.syncer.start()
        self.sealer.start()
        self.reserver.start()
        self.sealer.submit(LeftoverJob(self.data_dir), _on_leftovers_synced)
        self.proposals.start()
        if self._mover is not None:
            self._mover.start()
        loop.add_reader(self.channel.fileno(), self._on_bell)
        for name, door in doors.items():
            listener, port = self.context.listeners[name], tls.get(name)
            if port is None:
                self._servers.append(await loop.create_server(door.factory, sock=listener))
            else:
                self._servers.append(self._handshakes(listener, port, door))
        if LOCAL in self.context.listeners:
            factory, listener = doors["native"].factory, self.context.listeners[LOCAL]
            self._servers.append(await loop.create_unix_server(factory, sock=listener, backlog=BACKLOG))
        if passed is not None:
            passed.start()
        self.housekeeping.start()
        if self.cluster is not None:
            self.cluster.start()
        if self._metrics is not None:
            self._metrics.start()
        self.context.ready()
        self.schedule_turn()
        await stopped.wait()
        if passed is not None:
            passed.stop()
        await self._drain()

    def _handshakes(self, listener: socket.socket, port: TlsPort, door: Door) -> Handshakes:
        """Return the TLS side of a door."""
        return Handshakes(
            listener, port, door.factory,
            most=self._handshakes_max,
            limit_s=self.config.limits.handshake_timeout_ms / 1000,
            count=self.counters.add,
        )  # fmt: skip

    async def _drain(self) -> None:
        """Answer all accepted requests, store all records and cursors, close."""
        self.counters.block.put(Counter.STATE, State.DRAINING)
        self.shard.draining = True
        for server in self._servers:
            server.close()
        doors = self.doors.values()
        for door in doors:
            door.drain()
        deadline_ns = clock.monotonic_ns() + int(DRAIN_MAX_S * 1e9)
        grace_ns = clock.monotonic_ns() + int(DRAIN_GRACE_S * 1e9)
        while clock.monotonic_ns() < deadline_ns:
            self.schedule_turn()
            await asyncio.sleep(0.01)
            waiting = any(hosted.waiting for hosted in self.shard.partitions.values())
            alone = not any(door.connections for door in doors) or clock.monotonic_ns() > grace_ns
            if alone and not waiting and self._flushed:
                break
        for door in doors:
            door.close_all()
        await asyncio.sleep(0)
        self.housekeeping.stop()
        self.syncer.stop()
        self.sealer.stop()
        self.reserver.stop()
        await asyncio.sleep(0)  # run the callbacks that stop() handed to the loop
        self.examinations.close()
        if self.cluster is not None:
            self.cluster.drain()
        elif self.audit is not None:  # a cluster that stops as a whole would not answer
            self.audit.tell_head()
        self.proposals.stop()
        self.shard.close()
        if self.shard.tiers is not None and self._mover is not None:
            self.shard.tiers.close()
            self._mover.stop()
            await asyncio.sleep(0)
        if self.cluster is not None:
            self.cluster.stop()
        if self._metrics is not None:
            self._metrics.stop()
            await asyncio.sleep(0)
        if self.audit is not None:
            self.audit.close()
        if self.admission is not None:
            self.admission.close()
        self.metadata.close()
        self.counters.block.put(Counter.STATE, State.STOPPED)
        _log.info("worker stopped", worker=self.index)


def _nothing() -> None:
    pass


def _on_leftovers_synced(_: LeftoverJob, error: Exception | None) -> None:
    if error is not None:
        _log.warning("records of an earlier process may not be on disk yet", why=str(error))
