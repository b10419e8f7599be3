"""Periodic work of a worker: heartbeat, timers, background sync, cursors, retention, sweeping."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from danube.broker.processes.directories import PARTITIONS
from danube.broker.processes.removing import SUFFIX, put_aside, remove_directory
from danube.broker.tiers.inheritance import RETURNING
from danube.broker.tiers.retention import expired_end
from danube.config.exposure import open_doors
from danube.core.placement.recovered import may_be_lost
from danube.core.placement.workers import owner_of
from danube.errors import DanubeError
from danube.host import clock, telemetry
from danube.host.disk_reserve import reserve
from danube.ipc.counters import Counter
from danube.wal.recovery.witness import DIRECTORY as WITNESSES
from danube.wal.segments.descriptors import descriptors, descriptors_allowed

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    from danube.broker.admission import Admission
    from danube.broker.api import Door
    from danube.broker.audit.audit import Audit
    from danube.broker.clustered.parts import ClusterParts
    from danube.broker.partition.hosted import HostedPartition
    from danube.broker.processes.contexts import WorkerContext
    from danube.broker.routing.judging import Recall
    from danube.broker.shard.compactor import Compactor
    from danube.broker.shard.shard import Shard
    from danube.broker.traffic import Traffic
    from danube.cluster.log.local_log import LocalLog
    from danube.config.loading import BrokerConfig
    from danube.core.metadata.commands import TopicRecord
    from danube.host.tls import TlsWatch

_log = telemetry.events("housekeeping")
TICK_S = 0.02
SECOND_S = 1.0
RETENTION_S = 10.0
OPEN_S = 3_600.0
COMPACTION_S = 1.0
PART_PAUSE_S = 0.005  # pause between two parts of a round, so that the loop handles other work
RETAINED_AT_ONCE = 500  # partitions; a thousand that are not in the processor's caches take some 20 ms
_DIRECTORY = re.compile(rf"([0-9a-f]{{16}})-([0-9]+)({re.escape(SUFFIX)})?\Z")
_SET_ASIDE = re.compile(rf"([0-9a-f]{{16}})-([0-9]+)-[0-9]{{10}}(-[0-9]+)?({re.escape(SUFFIX)})?\Z")


class KeptWorker(Protocol):
    """Members of :class:`danube.broker.worker.worker.Worker` that Housekeeping uses."""

    config: BrokerConfig
    context: WorkerContext
    index: int
    data_dir: Path
    loop: asyncio.AbstractEventLoop
    counters: Traffic
    executor: ThreadPoolExecutor
    metadata: LocalLog
    shard: Shard
    compactor: Compactor
    cluster: ClusterParts | None
    audit: Audit | None
    doors: dict[str, Door]
    certificates: TlsWatch | None
    recall: Recall
    admission: Admission | None
    rings_due: bool

    def refresh_metadata(self) -> None: ...


class Housekeeping:
    """Timers of one worker, all on its loop."""

    def __init__(self, worker: KeptWorker) -> None:
        self._worker = worker
        self._stopped = False
        self._found: dict[str, int] = {}  # topic ids of partitions on disk that are not opened yet, by name
        self._rights_unknown = False
        self._sync_s = worker.config.wal.sync_interval_ms / 1000

    def start(self) -> None:
        """Start all timers, and open the partitions on disk one after another."""
        reserve.keep(self._worker.data_dir / f"reserve-{self._worker.index}")
        self._every(TICK_S, self._tick)
        self._every(self._sync_s, self._sync)
        self._every(SECOND_S, self._second)
        self._every(RETENTION_S, self._retention)
        if self._worker.shard.tiers is None:  # otherwise the mover compacts, in the object store
            self._every(COMPACTION_S, self._worker.compactor.look)
        if self._worker.index == 0:  # one line for the broker, not for each worker
            self._every(OPEN_S, self._tell_open)
        self._sweep_directories()

    def stop(self) -> None:
        """Stop all timers; a running one is the last."""
        self._stopped = True

    def _every(self, interval_s: float, action: Callable[[], None]) -> None:
        def run() -> None:
            if not self._stopped:
                action()
                self._worker.loop.call_later(interval_s, run)

        run()

    def _tick(self) -> None:
        worker = self._worker
        worker.counters.block.put(Counter.HEARTBEAT_NS, clock.monotonic_ns())
        worker.shard.tick()
        worker.rings_due = worker.context.workers > 1  # a replaced worker may not have rung the bell
        if worker.cluster is not None:
            worker.cluster.tick()
        if worker.shard.tiers is not None:
            worker.shard.tiers.tick()

    def _tell_open(self) -> None:
        """Say each hour what others reach without being asked anything."""
        for key, sentence in open_doors(self._worker.config):
            _log.warning(sentence, key=key)

    def _sync(self) -> None:
        self._worker.shard.storage.sync_written()
        self._worker.shard.store_cursors()

    def _second(self) -> None:
        worker = self._worker
        if worker.context.compiler is not None:
            worker.context.compiler.take()
        doors = worker.doors.values()
        for door in doors:
            door.sweep(worker.loop.time())
        descriptors.resize(descriptors_allowed(sum(len(door.connections) for door in doors)))
        self._look_at_certificates()
        self._look_at_keys()
        worker.refresh_metadata()
        worker.recall.look()
        self._look_at_rights()
        worker.shard.storage.sync_cursors()
        worker.shard.second()
        if worker.audit is not None:
            worker.audit.sweep()
        reserve.fill()
        if worker.shard.tiers is not None:
            worker.shard.tiers.second()

    def _look_at_certificates(self) -> None:
        worker = self._worker
        watch, reloads = worker.certificates, worker.context.settings.reloads
        if watch is None or reloads is None:
            return
        watch.look(reloads.count)
        worker.counters.block.put(Counter.TLS_RELOAD_FAILED, int(watch.failed))
        worker.counters.block.put(Counter.TLS_RELOADS, watch.renewed_count)

    def _look_at_rights(self) -> None:
        """End all connections once the broker is cut off for so long that it knows nobody's rights."""
        worker = self._worker
        if worker.admission is None:
            return
        unknown = not worker.admission.rights_known()
        if unknown and not self._rights_unknown:
            _log.warning(
                "nobody but super admins is let in: the cluster is not heard, nor what it takes back",
                hint="see why this broker does not reach most of the others",
            )
            for door in worker.doors.values():
                door.abort_entered()
        self._rights_unknown = unknown
        worker.counters.block.put(Counter.RIGHTS_UNKNOWN, int(unknown))

    def _look_at_keys(self) -> None:
        worker = self._worker
        admission, reloads = worker.admission, worker.context.settings.reloads
        if admission is None or reloads is None or admission.keys is None:
            return
        if admission.look_at_keys(reloads):
            worker.recall.begin()
        failed = admission.keys.failed or reloads.refused
        worker.counters.block.put(Counter.KEYS_RELOAD_FAILED, int(failed))
        worker.counters.block.put(Counter.KEYS_RELOADS, admission.keys.renewed_count)

    def _retention(self) -> None:
        self._worker.shard.storage.drop_spares(clock.wall_us())
        self._retain_next(list(self._worker.shard.partitions.values()), 0)

    def _retain_next(self, left: list[HostedPartition], backlog: int) -> None:
        """Continue a retention round over all partitions, with a pause between two parts."""
        if self._stopped:
            return
        now_us = clock.wall_us()
        for hosted in left[-RETAINED_AT_ONCE:]:
            if hosted.log is not None and hosted.failure is None and not hosted.deleted:
                self._retain(hosted, now_us)
                hosts = hosted.subscriptions.values()
                backlog += sum(max(0, hosted.lag_from(host.core.ack_floor)) for host in hosts)
        del left[-RETAINED_AT_ONCE:]
        if left:
            self._worker.loop.call_later(PART_PAUSE_S, self._retain_next, left, backlog)
        else:
            self._worker.counters.block.put(Counter.BACKLOG_RECORDS, backlog)

    def _retain(self, hosted: HostedPartition, now_us: int) -> None:
        tiers = self._worker.shard.tiers
        try:
            if tiers is not None:
                start = tiers.retain(hosted, now_us)
            else:
                start = self._retain_local(hosted, now_us)
        except DanubeError as error:
            _log.warning("retention failed", partition=hosted.name, error=str(error))
            return
        if start is None:
            return
        late = [host for host in hosted.subscriptions.values() if host.core.ack_floor < start]
        for host in late:
            host.expire(start)
        if late:
            self._worker.shard.wake(hosted)

    def _retain_local(self, hosted: HostedPartition, now_us: int) -> int | None:
        """Delete expired records; return the new start of the log, or None if nothing expires."""
        log, policy = hosted.log, hosted.policy
        bounds = (policy.retention_ms, policy.retention_bytes, policy.retention_segments)
        if log is None or not policy.expires or not any(bounds):
            return None
        former = log.start
        deleted = log.retain(now_us, policy.retention_ms, policy.retention_bytes)
        if policy.retention_segments:
            end = expired_end(None, 0, log, policy, now_us, confirmed=False).end
            deleted += log.evict(end, sealed=False)
        if log.should_roll:
            self._worker.shard.storage.roll(hosted)
        if deleted:
            facts = {"count": len(deleted), "start": former, "end": log.start}
            fact = "beyond retention of {} ms, {} bytes, {} segments (0: no bound)".format(*bounds)
            _log.info("segments deleted by retention", partition=hosted.name, **facts, fact=fact)
        return log.start

    def _sweep_directories(self) -> None:
        """Open this worker's partitions, so that they recover and expire; remove those of deleted topics."""
        worker = self._worker
        root, witnesses = worker.data_dir / PARTITIONS, worker.data_dir / WITNESSES
        places = (root, witnesses) if worker.cluster is None else (root,)
        known = [path for path in places if path.is_dir()]
        state = worker.metadata.state
        names, unknown = [], []
        for directory in sorted({root / path.name for place in known for path in place.iterdir()}):
            match = _DIRECTORY.match(directory.name)
            if match is None:
                continue
            topic_id, index = int(match[1], 16), int(match[2])
            if owner_of(topic_id, index, worker.context.workers) != worker.index:
                continue
            record = state.topic_with_id(topic_id)
            if match[3]:  # a process that ended early removed only a part of it
                worker.executor.submit(remove_directory, directory)
            elif record is None:
                unknown.append((topic_id, directory))
            elif worker.shard.serves(topic_id, index):
                names.append(record.physical_name(index))
                self._found[names[-1]] = topic_id
        self._open_next(names[::-1])
        self._remove_deleted(unknown + self._set_aside())

    def _set_aside(self) -> list[tuple[int, Path]]:
        """Return directories set aside for returning whose topics are unknown, with their topic ids."""
        worker, root = self._worker, self._worker.data_dir / RETURNING
        found = []
        for directory in sorted(root.iterdir()) if root.is_dir() else ():
            match = _SET_ASIDE.match(directory.name)
            topic_id, index = (int(match[1], 16), int(match[2])) if match is not None else (0, 0)
            ours = match is not None and owner_of(topic_id, index, worker.context.workers) == worker.index
            if ours and worker.metadata.state.topic_with_id(topic_id) is None:
                found.append((topic_id, directory))
        return found

    def _remove_deleted(self, directories: list[tuple[int, Path]]) -> None:
        """Remove the directories of deleted topics.

        In a cluster this waits until the copy of the metadata is whole.  A power cut may have cut the end of
        the copy, and with it a topic whose records are on the disk.
        """
        worker = self._worker
        if not directories or self._stopped:
            return
        if worker.cluster is not None and not worker.cluster.metadata_whole:
            worker.loop.call_later(SECOND_S, self._remove_deleted, directories)
            return
        state = worker.metadata.state
        for topic_id, directory in directories:
            if state.topic_with_id(topic_id) is not None or may_be_lost(state, topic_id):
                continue
            if topic_id < state.next_topic_id:  # the id was assigned, so its topic was deleted
                worker.executor.submit(remove_directory, directory)
            elif directory.parent.name != RETURNING:
                worker.executor.submit(put_aside, directory, worker.data_dir)

    def unopened(self) -> list[TopicRecord]:
        """Return the topics of partitions on disk that are not opened yet, one entry for each partition."""
        opened, state = self._worker.shard.partitions, self._worker.metadata.state
        records = {name: state.topic_with_id(topic_id) for name, topic_id in self._found.items()}
        known = {name: record for name, record in records.items() if record and name not in opened}
        self._found = {name: self._found[name] for name in known}
        return list(known.values())

    def _open_next(self, names: list[str]) -> None:
        if not names or self._stopped:
            return
        name = names.pop()
        self._worker.shard.open(name, lambda _: self._open_later(names))

    def _open_later(self, names: list[str]) -> None:
        self._worker.loop.call_later(PART_PAUSE_S, self._open_next, names)
