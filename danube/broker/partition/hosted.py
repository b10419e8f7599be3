"""A partition at its owner: the pure partition, its log, its subscriptions and waiting requests.

A published batch stays in its receive buffer or ring slot until the log's one write of the turn.  Only
batches for near subscriptions are copied, into :class:`HotBatches`.

Operator settings (failure policy, max_unacked) are applied to live subscriptions here.  Settings in the
metadata override the values of the SUBSCRIBE request, and those override the topic's policy.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from danube.broker.partition.chunks import Chunk, HotBatches
from danube.broker.partition.consumers import ConsumerLink, SubscriptionHost
from danube.broker.partition.limits import (
    check_demands,
    dispatch_limits,
    paced,
    record_bytes_max,
    storage_refusal,
)
from danube.broker.partition.lossy import LossyHost
from danube.broker.partition.producers import Producers, Waiting
from danube.broker.partition.tier import PartitionTier
from danube.broker.traffic import Traffic
from danube.core.batch.columns import check_columns, check_published
from danube.core.batch.format import BatchHeader, stamp, unpack_header
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.holed import UNUSED, HoledSubscription
from danube.core.metadata.commands import SubscriptionSettings, TopicRecord
from danube.core.metadata.policies import smallest
from danube.core.partition.partition import Duplicate, Partition, ReservedPartition
from danube.core.partition.policy import TopicPolicy
from danube.core.partition.publish_rate import ANSWER_NS_MAX, PublishRate, SumRate
from danube.core.protocol.native import DeliveryFlag, FrameFlag
from danube.errors import (
    DanubeError,
    InvalidArgument,
    PolicyMismatch,
    QuotaExceeded,
    StorageFailed,
    SubscriptionNotFound,
    TopicNotFound,
)
from danube.host import clock, telemetry
from danube.limits import READ_CHUNK_BYTES, SUBSCRIPTIONS_PER_PARTITION_MAX
from danube.wal.segments.holes import HoleKind

if TYPE_CHECKING:
    from danube.broker.api import Session
    from danube.broker.partition.metadata import OwnerMetadata
    from danube.core.batch.columns import EncodedBatch
    from danube.core.dispatch.rate import DispatchSum
    from danube.core.metadata.policies import NamespacePolicy
    from danube.core.partition.partition import OffsetBudget
    from danube.core.partition.policy import FailurePolicy
    from danube.wal.log.cursors import CursorStore
    from danube.wal.log.log import Log
    from danube.wal.segments.holes import Hole


_NONE = SubscriptionSettings()


def failure_for(record: TopicRecord, subscription: str, asked: FailurePolicy | None) -> FailurePolicy:
    """Return the failure policy of a subscription; ``asked`` comes from its first SUBSCRIBE request."""
    return record.settings.get(subscription, _NONE).failure or asked or record.policy.failure


def max_unacked_for(hosted: HostedPartition, subscription: str, asked: int) -> int:
    """Return the limit of unacked records; ``asked`` 0: the first SUBSCRIBE request named none."""
    record, limits = hosted.record, hosted.limits
    own = record.settings.get(subscription, _NONE).max_unacked or asked or record.policy.max_unacked
    return own if limits is None else smallest(own, limits.max_unacked)


def follow(hosted: HostedPartition, former: TopicRecord, record: TopicRecord) -> None:
    """Apply changed settings and a changed topic policy to live subscriptions, as a restart would."""
    if former.settings == record.settings and former.policy == record.policy:
        return
    for name, host in hosted.subscriptions.items():
        before, now = former.settings.get(name, _NONE).failure, record.settings.get(name, _NONE).failure
        if before != now:
            host.core.set_failure(now or record.policy.failure, own=now is not None)
        elif failure_for(record, name, host.core.asked.failure) != host.core.failure:
            host.core.set_failure(record.policy.failure, own=False)


_log = telemetry.events("hosted")
_COMPACTED = int(DeliveryFlag.COMPACTED)
_new = tuple.__new__  # makes a named tuple without a call of a Python function
HOT_BYTES_PER_PARTITION = 8 * 1024 * 1024
UNREADABLE_TOLD_MAX = 16


class HostedPartition:
    """One partition that this worker owns; all methods run on the worker's loop."""

    # Ten thousand of them do not fit in the processor's caches; without slots each attribute needs a dict.
    __slots__ = (
        "_chunk", "_hot_chunk", "_live_readers", "bytes_in", "core", "counters", "cursor_failure", "cursors",
        "damaged", "deleted", "delivery_flags", "directory", "dispatch_limits", "failure", "hot", "index",
        "limits", "log", "lossy", "metadata", "moved", "name", "near", "producers", "publish_rate", "record",
        "record_bytes_max", "records_in", "refusal", "reopen_delay_ns", "silent", "subscriptions",
        "sums", "sync_running", "tier", "unsynced_ns", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        record: TopicRecord,
        index: int,
        core: Partition,
        counters: Traffic,
        *,
        directory: Path | None = None,
        log: Log | None = None,
        cursors: CursorStore | None = None,
    ) -> None:
        self.name = name
        self.record = record
        self.delivery_flags = _COMPACTED if record.policy.compacts else 0
        self.publish_rate: PublishRate | None = None  # None: publishing is not limited
        self.subscriptions: dict[str, HostedSubscription] = {}
        self.limit(None)
        self.index = index
        self.core = core
        self.counters = counters
        self.directory = directory
        self.log = log
        self.cursors = cursors
        self.near: dict[HostedSubscription, None] = {}  # see danube.broker.partition.deliveries
        self.lossy: dict[str, LossyHost] = {}
        self.producers = Producers()
        self.waiting: deque[Waiting] = deque()
        self.hot = HotBatches(HOT_BYTES_PER_PARTITION)
        self.failure: DanubeError | None = None  # why the log cannot be written, until it is reopened
        self.refusal: DanubeError | None = None  # why publishes are refused: ``failure``, or a move
        self.metadata: OwnerMetadata | None = None
        self.tier: HostedTier | None = None  # None if storage is local
        self.deleted = False  # no longer hosted here
        self.silent = False  # delivers no records: deleted, or being moved
        self.moved: DanubeError | None = None  # names the new owner, if the partition was moved
        self.sync_running = False
        self.unsynced_ns = 0  # time of the oldest unsynced record, or earlier; 0: all are synced
        self.cursor_failure: DanubeError | None = None  # why the cursor file cannot be written
        self.reopen_delay_ns = 0
        self.damaged: list[tuple[int, int]] = []
        self.records_in = 0
        self.bytes_in = 0
        self._chunk: Chunk | None = None  # the last chunk that was read from the log or the tier
        self._hot_chunk: Chunk | None = None
        self._live_readers = False

    def limit(
        self,
        limits: NamespacePolicy | None,
        sums: tuple[SumRate, ...] = (),
        dispatch_sums: tuple[DispatchSum, ...] = (),
    ) -> None:
        """Take the limits of the topic's namespace, and the sums that it counts in; None: there are none."""
        self.limits, self.sums = limits, sums
        self.record_bytes_max = record_bytes_max(self.record, limits)
        self.dispatch_limits = dispatch_limits(self.record, limits, dispatch_sums)
        self.publish_rate = paced(self.publish_rate, self.record, limits, sums, clock.monotonic_ns())
        for name, host in self.subscriptions.items():
            max_unacked = max_unacked_for(self, name, host.core.asked.max_unacked)
            if max_unacked != host.core.max_unacked:
                host.core.set_max_unacked(max_unacked)

    def recall_producers(self) -> None:
        """Close the producers of a topic that its namespace would not let open now."""
        if self.limits is not None and len(self.producers):
            try:
                check_demands(self.record, self.limits)
            except PolicyMismatch as error:
                self.close_producers(error)

    def follow_storage(self) -> None:
        """Compare the stored bytes with their limit."""
        if self.publish_rate is not None:
            self.publish_rate.refusal = storage_refusal(self)

    @property
    def topic_id(self) -> int:
        return self.record.topic_id

    @property
    def policy(self) -> TopicPolicy:
        return self.record.policy

    @property
    def reliable(self) -> bool:
        """Return whether the partition has a log; otherwise records are only in memory."""
        return self.log is not None

    @property
    def high_watermark(self) -> int:
        return self.core.high_watermark

    @property
    def start(self) -> int:
        """Return the first readable offset over all tiers; raises FetchPending while it is unknown."""
        if self.log is None:
            return self.core.log_end
        return self.log.start if self.tier is None else self.tier.start

    @property
    def budget(self) -> OffsetBudget | None:
        """Return the offsets that this owner may assign; None on a single host, and without a log."""
        return self.core.budget if isinstance(self.core, ReservedPartition) else None

    # -- publish ----------------------------------------------------------------------------------

    def publish(
        self,
        session: Session,
        handle: int,
        correlation: int,
        link: ProducerLink,
        batch: memoryview,
        now_us: int,
    ) -> None:
        """Check a client's batch and queue it."""
        self.follow_metadata()
        header = check_published(batch, self.record_bytes_max)
        if header.producer_id and header.producer_id != link.producer_id:
            raise InvalidArgument("the batch names another producer than its handle")
        self._take(session, handle, correlation, batch, header, now_us)

    def publish_own(
        self, session: Session, handle: int, correlation: int, encoded: EncodedBatch, now_us: int
    ) -> None:
        """Queue a batch that this process has encoded; only the topic's record limit must be checked."""
        self.follow_metadata()
        data = bytearray(encoded.head)
        data += encoded.body
        batch, header = memoryview(data), unpack_header(data)
        if header.payload_bytes > self.record_bytes_max:  # otherwise no record can be larger
            check_columns(batch, header, self.record_bytes_max)
        self._take(session, handle, correlation, batch, header, now_us)

    def _take(
        self,
        session: Session,
        handle: int,
        correlation: int,
        batch: memoryview,
        header: BatchHeader,
        now_us: int,
    ) -> None:
        """Assign offsets to a checked batch and queue it; complete() answers at the topic's level."""
        schema = self.record.schema
        if schema is not None and self.metadata is not None:
            self.metadata.gate.check(self.name, schema, self.policy.compacts, batch, header)
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)  # one error object serves every refusal
        if self.log is not None and self.log.failure is not None:  # not yet handled by the storage agent
            raise StorageFailed(f"{self.name} cannot be written now", hint="send again")
        rate = self.publish_rate
        if rate is not None and self.core.expects(header):  # what is stored must not be called refused
            self._check_rate(session, rate)
        admitted = self.core.admit(header, now_us)
        if isinstance(admitted, Duplicate):
            self.counters.add("duplicates")
            self._answer_duplicate(session, handle, correlation, header, admitted)
            return
        base_offset, epoch = admitted.base_offset, self.core.epoch
        stamp(batch, base_offset, epoch, admitted.append_time_us)
        end_offset = base_offset + header.record_count
        header = header.stamped(base_offset, epoch, admitted.append_time_us)
        if rate is not None:
            session.rest_ns = rate.take(header.record_count, header.size, end_offset, clock.monotonic_ns())
        self.records_in += header.record_count
        self.bytes_in += header.size
        self.counters.add_in(header.record_count, header.size)
        self.waiting.append(
            _new(
                Waiting,
                (end_offset, session, correlation, handle, base_offset, epoch, header.record_count, 0),
            )
        )
        if self.log is None:
            self._offer(batch, header)
        else:
            self.log.append(batch, header)
            if self._live_readers:
                self.hot.add(base_offset, end_offset, bytes(batch))

    def _check_rate(self, session: Session, rate: PublishRate) -> None:
        """Raise QuotaExceeded beyond the publish rate; the session rests then, lest it asks again at once."""
        now_ns = clock.monotonic_ns()
        try:
            rate.check(self.name, now_ns)
        except QuotaExceeded:
            session.rest_ns = now_ns + ANSWER_NS_MAX
            raise

    def follow_metadata(self) -> None:
        """Read metadata that was committed before the last bytes came; it applies to what they ask."""
        metadata = self.metadata
        if metadata is not None and not metadata.fresh:
            metadata.freshen()
        if self.deleted:
            self.check_exists()

    def read_metadata(self) -> None:
        """Apply newly committed metadata; raises TopicNotFound if the topic was deleted."""
        if self.metadata is not None:
            self.metadata.read()
            self.check_exists()

    def check_exists(self) -> None:
        """Raise TopicNotFound if the topic was deleted, or an error with the new owner after a move."""
        if self.deleted:
            raise self.moved or TopicNotFound(f"{self.name} was deleted")

    def _answer_duplicate(
        self, session: Session, handle: int, correlation: int, header: BatchHeader, found: Duplicate
    ) -> None:
        end_offset = found.base_offset + header.record_count
        waiting = Waiting(
            end_offset, session, correlation, handle, found.base_offset, self.core.epoch, header.record_count,
            FrameFlag.DUPLICATE,
        )  # fmt: skip
        if end_offset > self.core.acknowledged_end:
            self.waiting.append(waiting)
            return
        session.send_published(
            correlation, handle, found.base_offset, self.core.epoch, header.record_count, self.core.level,
            FrameFlag.DUPLICATE,
        )  # fmt: skip

    def _offer(self, batch: memoryview, header: BatchHeader) -> None:
        hosts = [host for host in self.lossy.values() if host.links]
        for host in self.lossy.values():
            if not host.links:
                host.count_dropped(header.record_count)
        if hosts:
            chunk = Chunk(bytes(batch), header.base_offset, header.end_offset)
            for host in hosts:
                host.offer(chunk)

    def write(self) -> None:
        """Write all batches that were queued in this turn at once; on an error their publishes fail."""
        if self.log is None:
            self.core.written(self.core.log_end)
            self.complete()
            return
        try:
            written_end = self.log.write()
        except DanubeError as error:
            self.counters.add("storage_errors")
            self._unwind(error)
            raise
        self.core.written(written_end)
        self.complete()

    def _unwind(self, error: DanubeError) -> None:
        """Drop batches that were not stored and fail their publishes."""
        if self.log is not None:
            end = self.log.log_end
            self.core.rollback(end)
            self.hot.truncate(end)
            self.fail_waiting(error, end)

    def fail_waiting(self, error: DanubeError, above: int) -> None:
        """Fail every publish that ends above the offset ``above``."""
        kept: deque[Waiting] = deque()
        for waiting in self.waiting:
            if waiting.end_offset > above:
                waiting.session.send_error(error, waiting.correlation, waiting.handle)
            else:
                kept.append(waiting)
        self.waiting = kept

    def complete(self) -> None:
        """Answer every publish whose records are stored at the topic's durability level."""
        end = self.core.acknowledged_end
        if self.publish_rate is not None:
            end = self.publish_rate.answered_end(end, clock.monotonic_ns())
        waiting = self.waiting
        level = self.core.level
        while waiting and waiting[0].end_offset <= end:
            _, session, correlation, handle, base_offset, epoch, count, flags = waiting.popleft()
            session.send_published(correlation, handle, base_offset, epoch, count, level, flags)

    def answer_stored(self) -> None:
        """Answer every publish that is stored, also before its rate allows it: the partition is let go.

        Whoever were told that it failed would send it again.
        """
        self.publish_rate = None
        self.complete()

    # -- read -------------------------------------------------------------------------------------

    def chunk(self, offset: int, bytes_max: int = READ_CHUNK_BYTES) -> Chunk:
        """Return the chunk with ``offset``, or the next one over a hole, below the high watermark.

        A chunk has about ``bytes_max`` bytes at most, or one batch.  Raises OffsetOutOfRange below the start,
        StorageFailed if the disk cannot be read, and FetchPending if the bytes must be fetched first: it
        states when to try again.
        """
        for recent in (self._hot_chunk, self._chunk):
            if recent is not None and recent.first_offset <= offset < recent.next_offset:
                return recent
        end = self.core.high_watermark
        chunk = self.hot.chunk(offset, end, READ_CHUNK_BYTES)
        if chunk is not None:
            self._hot_chunk = chunk
            return chunk
        if self.log is None:
            raise StorageFailed("a non-reliable topic keeps no log")
        cold = self.tier is not None and offset < self.log.start and self.log.holes.at(offset) is None
        tier: Any = self.tier if cold else self.log
        raw = tier.read(offset, end, bytes_max)
        for damage in raw.damage:
            self._note_damage(int(damage[0]), int(damage[1]))
        # Without data, all offsets up to next_offset are damaged: the empty chunk begins there.
        first = raw.first_offset if raw.data else raw.next_offset
        chunk = self._chunk = Chunk(raw.data, first, raw.next_offset, sparse=raw.sparse)
        chunk.hole_before = "damaged" if raw.damage else "compacted"
        if raw.hole is not None:
            chunk.hole_before = raw.hole.name.lower()
        return chunk

    def _note_damage(self, start: int, end: int) -> None:
        if (start, end) not in self.damaged:
            self.damaged.append((start, end))
            self.counters.add("damaged_records", end - start)

    def update_near(self, host: HostedSubscription) -> None:
        """Note after a dispatch whether the subscription is near, i.e. reads batches in memory."""
        start, host.next = self.hot.start, host.core.next
        if host.links and host.next >= (self.core.high_watermark if start < 0 else start):
            self.near[host] = None
        else:
            self.near.pop(host, None)

    def after_dispatch(self, *, keep_chunk: bool) -> None:
        """Keep in memory, after a dispatch, the batches that near subscriptions still need."""
        end = lowest = self.core.high_watermark
        live, gone = False, []
        for host in self.near:
            if self.subscriptions.get(host.core.name) is not host:
                gone.append(host)
                continue
            place = host.next
            live = live or place >= end
            lowest = min(lowest, place)
        for host in gone:
            del self.near[host]
        self._live_readers = live
        if self.near:
            self.hot.trim(lowest)
        else:
            self.hot.clear()
        self._hot_chunk = None
        if not keep_chunk:
            self._chunk = None

    def check_topic(self, topic_id: int) -> None:
        """Raise TopicNotFound if ``topic_id`` is of another topic with this name; 0 means any."""
        if topic_id not in (0, self.topic_id):
            raise TopicNotFound(
                f"the topic of {self.name} was deleted, and another one of that name was made",
                hint="open a new producer or consumer for the topic that is there now",
                topic_id=self.topic_id,
            )

    # -- subscriptions ----------------------------------------------------------------------------

    def subscription(self, name: str) -> HostedSubscription:
        """Return the reliable subscription of this name; raises SubscriptionNotFound."""
        try:
            return self.subscriptions[name]
        except KeyError:
            raise SubscriptionNotFound(
                f"subscription {name!r} does not exist on {self.name}", hint="see: danube subscriptions list"
            ) from None

    def add_subscription(self, name: str, core: HoledSubscription) -> HostedSubscription:
        """Add a new subscription; its cursor is stored with the next write of the cursor file."""
        if len(self.subscriptions) + len(self.lossy) >= SUBSCRIPTIONS_PER_PARTITION_MAX:
            raise InvalidArgument(f"{self.name} has {SUBSCRIPTIONS_PER_PARTITION_MAX} subscriptions already")
        host = self.subscriptions[name] = HostedSubscription(self, core)
        return host

    def follow_holes(self, holes: list[Hole]) -> None:
        """Apply a changed list of holes to all subscriptions: some holes may have records again."""
        of_kind = {
            kind: np.array([hole[:2] for hole in holes if hole.kind is kind], np.int64).reshape(-1, 2)
            for kind in HoleKind
        }
        for host in self.subscriptions.values():
            host.follow_holes(*(of_kind[kind] for kind in HoleKind))

    def load_subscriptions(self, states: dict[str, bytes]) -> None:
        """Rebuild subscriptions from their stored cursors; a cursor is never beyond the log's end."""
        for name, blob in states.items():
            state = self._within_log(name, CursorState.decode(blob))
            core = HoledSubscription(
                name,
                state.mode,
                state,
                max_unacked=max_unacked_for(self, name, state.max_unacked),
                failure=failure_for(self.record, name, state.failure),
            )
            hole = self.hole_at(core.ack_floor)
            if hole is not None:
                core.skip_damaged(core.ack_floor, hole.end, why=UNUSED)
            self.subscriptions[name] = HostedSubscription(self, core)

    def _within_log(self, name: str, state: CursorState) -> CursorState:
        """Clip a cursor to the log's end.

        A crash may have lost records whose acks were already on disk.  Their offsets are assigned to other
        records, which the subscription must still get.
        """
        end = self.core.log_end
        clipped = state.clipped(end)
        if clipped is not state:
            reach = max(state.ack_floor, int(state.acked[-1, 1]) if len(state.acked) else 0)
            _log.warning(
                "cursor was ahead of the log and goes back to its end",
                partition=self.name, subscription=name, ack_floor=state.ack_floor, reach=reach, log_end=end,
            )  # fmt: skip
        return clipped

    def hole_at(self, offset: int) -> Hole | None:
        """Return the hole of this host's log at an offset, or None."""
        return self.log.holes.at(offset) if self.log is not None else None

    def lag_from(self, offset: int) -> int:
        """Return the number of records from ``offset`` to the high watermark."""
        end = self.high_watermark
        if self.log is None or not self.log.holes:
            return end - offset
        return sum(last - first for first, last in self.log.holes.uncovered(offset, end))

    def store_cursors(self) -> bool:
        """Append changed cursors to the cursor file; return whether bytes were written."""
        if self.cursors is None:
            return False
        for name, host in self.subscriptions.items():
            if host.core.version != host.stored_version and not host.temporary:
                self.cursors.store(name, host.cursor_blob())
                host.stored_version = host.core.version
        written = self.cursors.dirty
        self.cursors.write()  # includes cursors that an earlier call could not write
        return written

    def leave(self, link: ConsumerLink, now_ns: int) -> None:
        """Remove one consumer from its subscription; a temporary one goes with its last consumer."""
        of_name: tuple[dict[str, Any], ...] = (self.subscriptions, self.lossy)
        for hosts in of_name:
            host = hosts.get(link.subscription)
            if host is not None and host.links.get(link.consumer_id) is link:
                del host.links[link.consumer_id]
                host.core.leave(link.consumer_id, now_ns)
                if host.temporary and not host.links:
                    del hosts[link.subscription]

    def update(self, record: TopicRecord) -> None:
        """Apply a new policy and settings; answer waiting publishes whose new level is reached."""
        former, self.record = self.record, record
        self.limit(self.limits, self.sums, self.dispatch_limits.sums)
        self.delivery_flags = _COMPACTED if record.policy.compacts else 0
        self.core.update_policy(record.policy)
        follow(self, former, record)
        self.complete()

    def close_handles(self, error: DanubeError) -> None:
        """Close every producer and consumer of this partition with the same error."""
        self.close_producers(error)
        hosts: list[HostedSubscription | LossyHost] = [*self.subscriptions.values(), *self.lossy.values()]
        for host in hosts:
            for link in list(host.links.values()):
                link.session.consumers.pop(link.handle, None)
                link.session.send_error(error, 0, link.handle)
            host.links.clear()
        self.subscriptions = {name: one for name, one in self.subscriptions.items() if not one.temporary}
        self.lossy = {name: one for name, one in self.lossy.items() if not one.temporary}

    def close_producers(self, error: DanubeError) -> None:
        """Close every producer of this partition with the same error."""
        for session, handle in self.producers.clear():
            session.producers.pop(handle, None)
            session.send_error(error, 0, handle)

    def adopt(self, opened: OpenedStorage) -> None:
        """Continue with a log that was reopened after a failure."""
        self.log, self.core = opened
        self.core.update_policy(self.policy)  # it may have changed while the log was opened
        self.failure = self.refusal = None
        self.unsynced_ns = 0
        self.hot.clear()
        self._chunk = self._hot_chunk = None

    def _holes(self) -> list[Hole]:
        """Return the holes in the store's manifest, and later ones of this host's log."""
        manifest = self.tier.manifest if self.tier is not None else None
        stored = manifest.all_holes() if manifest is not None else []
        end = stored[-1].end if stored else 0
        return stored + [hole for hole in self.log.holes if hole.end > end] if self.log else stored

    def _damaged(self) -> list[list[int]]:
        """Return the damaged ranges of this host, and those whose object is missing or damaged."""
        objects = self.tier.unreadable() if self.tier is not None else []
        remote = [(start, end) for (start, end), error in objects if not error.retryable]
        return [list(one) for one in sorted({*self.damaged, *remote})]

    def _unreadable(self) -> list[str]:
        """Return the reasons why recent reads of stored records failed."""
        found = [str(error) for _, error in self.tier.unreadable()] if self.tier is not None else []
        waiting = [host.waits_for for host in self.subscriptions.values()]
        found += [str(reason) for reason in waiting if reason is not None]
        return list(dict.fromkeys(found))[:UNREADABLE_TOLD_MAX]

    def ends(self) -> dict[str, Any]:
        """Return where the partition begins and ends, and which of its offsets have no record."""
        log, tier = self.log, self.tier
        return {
            "partition": self.name,
            "start": tier.known_start if tier else log.start if log else self.core.log_end,
            "log_end": self.core.log_end,
            "high_watermark": self.core.high_watermark,
            "holes": [hole.described() for hole in self._holes()],
            "histories": self.metadata.histories if self.metadata is not None else [],
        }

    def statistics(self) -> dict[str, Any]:
        """Return figures of the partition: its ends, damage, producers and subscriptions."""
        core = self.core
        log = self.log
        tier = self.tier
        return self.ends() | {
            "local_start": log.start if log else core.log_end,
            "uploaded_end": tier.uploaded_end if tier else 0,
            "written_end": core.written_end,
            "synced_end": core.synced_end,
            "waits_for_disk": core.held,
            "epoch": core.epoch,
            "local_bytes": log.local_bytes if log else 0,
            "records_in": self.records_in,
            "bytes_in": self.bytes_in,
            "producers": self.producers.names(),
            "subscriptions": sorted([*self.subscriptions, *self.lossy]),
            "lost_subscriptions": sorted(self.cursors.lost - self.subscriptions.keys())
            if self.cursors
            else [],
            "durability": self.policy.durability,
            "damaged": self._damaged(),
            "unreadable": self._unreadable(),
            "state": "open" if self.failure is None else str(self.failure),
        }


class HostedSubscription(SubscriptionHost):
    """A reliable subscription at its partition's owner."""

    hosted: HostedPartition


class HostedTier(PartitionTier):
    """The cold tier of a partition at its owner."""

    hosted: HostedPartition


class HostedConsumer(ConsumerLink):
    """A consumer handle that is open at its partition's owner."""

    __slots__ = ()
    hosted: HostedPartition


class ProducerLink:
    """A producer handle that is open at its partition's owner."""

    __slots__ = ("hosted", "producer_id")

    def __init__(self, hosted: HostedPartition, producer_id: int) -> None:
        self.hosted = hosted
        self.producer_id = producer_id


class OpenedStorage(NamedTuple):
    """A recovered log with the partition that continues it."""

    log: Log
    core: Partition


def leave_partitions(session: Session, now_ns: int) -> list[HostedPartition]:
    """Close the producers and consumers of a closed connection; return the partitions that had some.

    Records that were granted to these consumers become available to others.
    """
    touched: dict[HostedPartition, None] = {}
    producer: ProducerLink
    consumer: HostedConsumer
    for handle, producer in session.producers.items():
        producer.hosted.producers.drop(session, handle)
        touched[producer.hosted] = None
    for consumer in session.consumers.values():
        consumer.hosted.leave(consumer, now_ns)
        touched[consumer.hosted] = None
    session.producers.clear()
    session.consumers.clear()
    return list(touched)
