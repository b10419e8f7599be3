"""The shard: every partition that this worker owns, driven by frames and by turns of the loop.

It takes frames of connections of this worker and of other workers.  A frame only queues its work;
:meth:`Shard.turn` then writes once for each changed partition, answers and delivers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from danube.broker.api import Session
from danube.broker.operations.arguments import arguments_of
from danube.broker.partition.deliveries import DeadLetterTaker, Deliveries
from danube.broker.partition.hosted import (
    HostedConsumer,
    HostedPartition,
    OpenedStorage,
    ProducerLink,
    leave_partitions,
)
from danube.broker.partition.limits import check_producer
from danube.broker.partition.opening import (
    after_cut,
    follow_recovery,
    open_log,
    open_partition,
    outcome_of,
)
from danube.broker.partition.subscribing import subscribe
from danube.broker.processes.removing import remove_directory
from danube.broker.processes.unbroken import ALWAYS, Since
from danube.broker.shard.admin import (
    CURSOR_OPERATIONS,
    NackedRecord,
    answered_later,
    partition_operation,
    reply_frame,
    settle,
)
from danube.broker.shard.storage import Storage
from danube.broker.traffic import Traffic
from danube.core.metadata.commands import TopicRecord
from danube.core.metadata.quotas import namespace_of
from danube.core.placement.recovered import LOG_EPOCHS
from danube.core.protocol import native as wire
from danube.core.protocol.native import (
    Admin,
    Frame,
    FrameFlag,
    Kind,
    Nack,
    OpenProducer,
    ProducerOpened,
    Subscribe,
)
from danube.errors import (
    ClosedError,
    DanubeError,
    FetchPending,
    InvalidArgument,
    OwnerMoved,
    ProtocolError,
    TopicNotFound,
)
from danube.host import clock, telemetry
from danube.limits import (
    DEDUP_BATCHES_KEPT,
    DELIVER_CREDIT_BYTES_MAX,
    HANDLES_PER_CONNECTION_MAX,
    SYNC_LAG_MAX_MS,
)

if TYPE_CHECKING:
    from danube.broker.partition.metadata import OwnerMetadata
    from danube.broker.partition.sums import Sums
    from danube.broker.tiers.worker_tiers import Tiers
    from danube.core.partition.partition import OffsetBudget
    from danube.wal.log.log import LogOptions
    from danube.wal.log.syncer import Syncer
    from danube.wal.segments.local_holes import OffsetJump

_log = telemetry.events("shard")
_ACK_RANGE_BYTES = 16
_SYNC = int(FrameFlag.SYNC)
PENDING_MAX_NS = 20_000_000_000  # limit of a request's wait for bytes to be fetched

Handler = Callable[[Session, Frame, memoryview], None]
TopicFinder = Callable[[str], tuple[TopicRecord, int]]


class Shard:
    """The partitions of one worker; all methods run on its loop."""

    def __init__(
        self,
        *,
        root: Path,
        incarnation: int,
        find_topic: TopicFinder,
        counters: Traffic,
        log_options: LogOptions,
        syncer: Syncer,
        sealer: Syncer,
        executor: Executor,
        call_on_loop: Callable[..., object],
        call_later: Callable[..., object],
        schedule_turn: Callable[[], None],
        take_dead_letters: DeadLetterTaker,
        make_tiers: Callable[[Shard], Tiers] | None = None,
        ahead_of: Callable[[int], OffsetJump | None] = lambda topic_id: None,
        unbroken_since: Since = ALWAYS,
        reserver: Syncer | None = None,
        sync_lag_max_ns: int = SYNC_LAG_MAX_MS * 1_000_000,
    ) -> None:
        """``make_tiers``: None if storage is local.  ``ahead_of``: the jump of offsets in older logs."""
        self.partitions: dict[str, HostedPartition] = {}
        self.counters = counters
        self.draining = False
        self.unbroken_since = unbroken_since
        self.metadata: OwnerMetadata | None = None
        self.sums: Sums | None = None
        self.ahead_of = ahead_of
        self._root = root
        self._incarnation = incarnation
        self._epoch = incarnation * LOG_EPOCHS
        self._find_topic = find_topic
        self._log_options = log_options
        self._executor = executor
        self._call_on_loop = call_on_loop
        self._schedule_turn = schedule_turn
        self._opening: dict[str, list[Callable[[HostedPartition | DanubeError], None]]] = {}
        self._dirty: dict[HostedPartition, None] = {}
        self._deliveries = Deliveries(counters, schedule_turn, call_later, take_dead_letters)
        self._paced: dict[HostedPartition, None] = {}  # with answers that wait for their publish rate
        self._consumer_id = 0
        self.taken_bytes = 0  # bytes of publishes since the last turn
        self.storage = Storage(
            self, syncer, sealer, reserver or sealer, executor, call_on_loop, call_later, sync_lag_max_ns
        )
        self.tiers = make_tiers(self) if make_tiers is not None else None
        self._handlers: dict[int, Handler] = {
            Kind.PUBLISH: self._on_publish,
            Kind.ACK: self._on_ack,
            Kind.CREDIT: self._on_credit,
            Kind.NACK: self._on_nack,
            Kind.OPEN_PRODUCER: self._on_open_producer,
            Kind.CLOSE_PRODUCER: self._on_close_producer,
            Kind.SUBSCRIBE: self._on_subscribe,
            Kind.CLOSE_CONSUMER: self._on_close_consumer,
            Kind.ADMIN: self._on_admin,
        }

    # -- frames -----------------------------------------------------------------------------------

    def on_frame(self, session: Session, frame: Frame, buffer: memoryview) -> None:
        """Take one frame; ``buffer`` must not change until the end of this turn."""
        handler = self._handlers.get(frame.kind)
        try:
            if handler is None:
                raise ProtocolError(f"frame kind {frame.kind} is not for a partition's owner")
            handler(session, frame, buffer)
        except DanubeError as error:
            self.counters.add("errors")
            session.send_error(error, frame.correlation, frame.handle if frame.correlation == 0 else 0)

    def _on_publish(self, session: Session, frame: Frame, buffer: memoryview) -> None:
        link: ProducerLink | None = session.producers.get(frame.handle)
        if link is None:
            raise OwnerMoved("this producer is not open here", hint="open it again")
        batch = buffer[frame.start : frame.end]
        link.hosted.publish(session, frame.handle, frame.correlation, link, batch, clock.wall_us())
        self.taken_bytes += frame.end - frame.start
        self._dirty[link.hosted] = None
        self._schedule_turn()

    def write_soon(self, hosted: HostedPartition) -> None:
        """Write the partition's queued batches in the next turn."""
        self._dirty[hosted] = None
        self._schedule_turn()

    def _on_ack(self, session: Session, frame: Frame, buffer: memoryview) -> None:
        if (frame.end - frame.start) % _ACK_RANGE_BYTES:
            raise ProtocolError("ACK body is not a list of ranges")
        link = self._consumer(session, frame)
        host = link.hosted.subscriptions.get(link.subscription)
        if host is not None:
            ranges = np.frombuffer(buffer[frame.start : frame.end], np.uint64).reshape(-1, 2)
            self.counters.add("acks_in", host.ack(link, ranges, clock.monotonic_ns()))
            self._deliveries.settled(host)
        if frame.flags & _SYNC:
            reply = wire.result_frame(None, frame.correlation)
            self._reply_when_stored(link.hosted, session, frame.correlation, reply)

    def settle(self, partition: str, subscription: str, acks: bytes, nacks: list[NackedRecord]) -> bool:
        """Carry out the operation "settle" if the partition is open here; otherwise return False.

        Raises SubscriptionNotFound.
        """
        hosted = self.partitions.get(partition)
        if hosted is None:
            return False
        if hosted.log is not None:
            host = hosted.subscription(subscription)
            settle(hosted, host.core, acks, nacks, clock.monotonic_ns())
            if nacks:
                self._deliveries.wake_one(hosted, subscription)  # it notes when the nacked records are due
            else:
                self._deliveries.settled(host)
        return True

    def _on_credit(self, session: Session, frame: Frame, buffer: memoryview) -> None:
        records, size_bytes = wire.decode_credit(buffer[frame.start : frame.end])
        link = self._consumer(session, frame)
        link.credit_bytes = min(link.credit_bytes + size_bytes, DELIVER_CREDIT_BYTES_MAX)
        host = link.hosted.subscriptions.get(link.subscription)
        each = host or link.hosted.lossy[link.subscription]
        each.core.credit(link.consumer_id, records)
        each.update_ready(link)
        if host is None:
            self._deliveries.wake_one(link.hosted, link.subscription)
        else:
            self._deliveries.settled(host)

    def _on_nack(self, session: Session, frame: Frame, buffer: memoryview) -> None:
        nack = wire.decode_control(buffer[frame.start : frame.end], Nack)
        link = self._consumer(session, frame)
        host = link.hosted.subscriptions.get(link.subscription)
        if host is None:
            return
        try:
            ranges = np.array(nack.ranges, np.int64).reshape(-1, 2)
        except OverflowError:
            raise InvalidArgument("NACK names offsets that cannot be") from None
        if nack.returned:
            host.core.hand_back(link.consumer_id, ranges)
        else:
            host.core.nack(link.consumer_id, ranges, nack.delay_ms, nack.reason[:1024], clock.monotonic_ns())
            self.counters.add("nacks")
        self._deliveries.wake_one(link.hosted, link.subscription)

    def _consumer(self, session: Session, frame: Frame) -> HostedConsumer:
        link: HostedConsumer | None = session.consumers.get(frame.handle)
        if link is None:
            raise OwnerMoved("this consumer is not open here", hint="subscribe again")
        return link

    def _on_open_producer(self, session: Session, frame: Frame, buffer: memoryview) -> None:
        request = wire.decode_control(buffer[frame.start : frame.end], OpenProducer)

        def opened(hosted: HostedPartition) -> None:
            self._check_handle(session, frame.handle)
            hosted.check_topic(request.topic_id)
            hosted.producers.check(hosted.name, request.name, request.exclusive)
            hosted.follow_metadata()
            if hosted.limits is not None:
                check_producer(hosted, hosted.limits, request.name, internal=request.internal)
            grant = hosted.core.open_producer(
                request.name, request.producer_id, request.epoch, clock.wall_us()
            )
            session.producers[frame.handle] = ProducerLink(hosted, grant.producer_id)
            hosted.producers.add(
                session, frame.handle, request.name, request.exclusive, internal=request.internal
            )
            policy = hosted.policy
            body = ProducerOpened(
                grant.producer_id, grant.epoch, grant.next_sequence, policy.durability,
                hosted.record_bytes_max,
                hosted.core.recall(grant.producer_id, min(request.recall, DEDUP_BATCHES_KEPT)),
            )  # fmt: skip
            session.send(wire.control_frame(Kind.PRODUCER_OPENED, body, frame.correlation, frame.handle))

        self._with_partition(request.partition, session, frame, opened, opens=True)

    def _check_handle(self, session: Session, handle: int) -> None:
        if self.draining:
            raise OwnerMoved("the broker is stopping", hint="open it again in a moment")
        if handle == 0 or handle in session.producers or handle in session.consumers:
            raise InvalidArgument(f"handle {handle} is in use on this connection")
        if len(session.producers) + len(session.consumers) >= HANDLES_PER_CONNECTION_MAX:
            raise InvalidArgument(f"a connection holds at most {HANDLES_PER_CONNECTION_MAX} handles")

    def _on_close_producer(self, session: Session, frame: Frame, buffer: memoryview) -> None:
        session.opening.pop(frame.handle, None)
        link: ProducerLink | None = session.producers.pop(frame.handle, None)
        if link is not None:
            link.hosted.producers.drop(session, frame.handle)
        session.send(wire.result_frame(None, frame.correlation))

    def _on_subscribe(self, session: Session, frame: Frame, buffer: memoryview) -> None:
        request = wire.decode_control(buffer[frame.start : frame.end], Subscribe)

        def opened(hosted: HostedPartition) -> None:
            self._check_handle(session, frame.handle)
            hosted.check_topic(request.topic_id)
            known = request.subscription in hosted.subscriptions
            self._consumer_id += 1
            body = subscribe(hosted, session, frame.handle, request, self._consumer_id, clock.monotonic_ns())
            reply = wire.control_frame(Kind.SUBSCRIBED, body, frame.correlation, frame.handle)
            self._deliveries.wake_one(hosted, request.subscription)
            if known or body.temporary or not hosted.reliable:
                session.send(reply)
                return

            def stored(error: DanubeError | None) -> None:
                if error is None:
                    self._subscriptions_changed(hosted)
                    self._send_later(session, reply)
                else:
                    self._refuse_subscribe(hosted, session, frame, error)

            try:  # the subscription exists once its cursor is on disk
                self.storage.when_cursors_stored(hosted, stored)
            except DanubeError:
                self._leave(hosted, session, frame.handle)
                raise

        self._with_partition(request.partition, session, frame, opened, opens=True)

    def _refuse_subscribe(
        self, hosted: HostedPartition, session: Session, frame: Frame, error: DanubeError
    ) -> None:
        self._leave(hosted, session, frame.handle)
        self._send_later(session, wire.error_frame(error, frame.correlation))

    def _leave(self, hosted: HostedPartition, session: Session, handle: int) -> None:
        link: HostedConsumer | None = session.consumers.pop(handle, None)
        if link is not None:
            hosted.leave(link, clock.monotonic_ns())

    def _on_close_consumer(self, session: Session, frame: Frame, buffer: memoryview) -> None:
        session.opening.pop(frame.handle, None)
        link: HostedConsumer | None = session.consumers.pop(frame.handle, None)
        if link is not None:
            link.hosted.leave(link, clock.monotonic_ns())
            link.hosted.store_cursors()
            self.wake(link.hosted)
        session.send(wire.result_frame(None, frame.correlation))

    def _on_admin(self, session: Session, frame: Frame, buffer: memoryview) -> None:
        request = wire.decode_control(buffer[frame.start : frame.end], Admin)

        def answer(value: Any) -> None:
            self._send_later(session, reply_frame(value, frame.correlation))

        def opened(hosted: HostedPartition) -> None:
            args = arguments_of(request)
            if answered_later(hosted, request.op, args, self.storage, self.tiers, answer):
                return
            value = partition_operation(hosted, request.op, args, clock.monotonic_ns())
            self.wake(hosted)
            reply = wire.result_frame(value, frame.correlation)
            if request.op in CURSOR_OPERATIONS:
                self._reply_when_stored(hosted, session, frame.correlation, reply)
            else:
                session.send(reply)

        self._with_partition(request.partition, session, frame, opened)

    def _reply_when_stored(
        self, hosted: HostedPartition, session: Session, correlation: int, reply: bytes
    ) -> None:
        """Answer once the cursors are on disk, or with the error of writing them."""

        def stored(error: DanubeError | None) -> None:
            if error is None:
                self._subscriptions_changed(hosted)
            self._send_later(session, reply if error is None else wire.error_frame(error, correlation))

        self.storage.when_cursors_stored(hosted, stored)

    def _send_later(self, session: Session, frame: bytes) -> None:
        if not session.closed:
            session.send(frame)
            self._schedule_turn()

    # -- partitions -------------------------------------------------------------------------------

    def _with_partition(
        self,
        name: str,
        session: Session,
        frame: Frame,
        then: Callable[[HostedPartition], None],
        opens: bool = False,
    ) -> None:
        """Call ``then`` once the partition is open; if it ``opens`` a handle, not after that was closed."""
        deadline_ns = clock.monotonic_ns() + PENDING_MAX_NS
        if opens:
            session.opening[frame.handle] = frame

        def opened(outcome: HostedPartition | DanubeError) -> None:
            if session.closed:
                return
            try:
                if opens and session.opening.get(frame.handle) is not frame:
                    raise ClosedError("the handle was closed before it was open")
                if isinstance(outcome, DanubeError):
                    raise outcome
                then(outcome)
            except DanubeError as error:
                if isinstance(error, FetchPending) and self.tiers and clock.monotonic_ns() < deadline_ns:
                    self.tiers.when_ready(error, deadline_ns, lambda: opened(outcome))
                    return
                self.counters.add("errors")
                session.send_error(error, frame.correlation)
            if opens and session.opening.get(frame.handle) is frame:
                del session.opening[frame.handle]
            self._schedule_turn()

        self.open(name, opened)

    def open(self, name: str, then: Callable[[HostedPartition | DanubeError], None]) -> None:
        """Open a partition unless it is open; then call ``then`` with it or the error, on the loop."""
        hosted = self.partitions.get(name)
        if hosted is not None:
            then(hosted)
            return
        if name in self._opening:
            self._opening[name].append(then)
            return
        try:
            record, index = self._find_topic(name)
        except DanubeError as error:
            then(error)
            return
        self._opening[name] = [then]
        future = self._executor.submit(
            open_partition, self._root, name, record, index, self._epoch_of(record, index), self._log_options,
            self.counters, self._budget_of(record, index), self._ahead(record, index),
            tiered=self.tiers is not None,
        )  # fmt: skip
        future.add_done_callback(lambda done: self._call_on_loop(self._opened, name, done))

    def _epoch_of(self, record: TopicRecord, index: int) -> int:
        return self._epoch  # higher than every earlier one of the partition

    def _ahead(self, record: TopicRecord, index: int) -> OffsetJump | None:
        """Return the jump of offsets for a log that is older than the topic's history or the last crash."""
        return after_cut(self.unbroken_since, record, self.ahead_of(record.topic_id))

    def _budget_of(self, record: TopicRecord, index: int) -> OffsetBudget | None:
        """Return the budget of offsets; None if no other broker can ever own the partition."""
        return None

    def serves(self, topic_id: int, index: int) -> bool:
        """Return whether this broker owns a partition; a single host owns all."""
        return True

    def _opened(self, name: str, done: Any) -> None:
        waiters = self._opening.pop(name)
        outcome = outcome_of(name, done)
        if isinstance(outcome, HostedPartition):
            outcome = self._adopt(outcome)
        if isinstance(outcome, DanubeError):
            self.counters.add("storage_errors")
            _log.error("partition cannot be opened", partition=name, error=str(outcome))
        for then in waiters:
            then(outcome)

    def _adopt(self, hosted: HostedPartition) -> HostedPartition | DanubeError:
        """Host a partition that a thread has opened, unless its topic was deleted meanwhile."""
        self.counters.add("partitions_open")
        try:
            current: TopicRecord | None = self._find_topic(hosted.name)[0]
        except TopicNotFound:
            current = None
        if current is None or current.topic_id != hosted.topic_id:
            gone = TopicNotFound(f"{hosted.name} was deleted")
            self._forget(hosted, gone)
            return gone
        self.partitions[hosted.name] = hosted
        hosted.metadata = self.metadata
        if self.metadata is not None:
            self._limit(hosted, current)
        if current != hosted.record:  # the policy was changed meanwhile
            hosted.update(current)
        follow_recovery(hosted)
        if self.tiers is not None:
            self.tiers.attach(hosted)
        return hosted

    def reopen(self, hosted: HostedPartition, trusted_end: int | None) -> OpenedStorage:
        """Open a failed log anew; called in a thread."""
        # It gets the next epoch, or repeatedly the last one of this incarnation.  That is safe: recovery
        # treats every file as a former owner's, and one thread both drops and makes spare segments.
        epoch = min(hosted.core.epoch + 1, hosted.core.epoch | LOG_EPOCHS - 1)
        return open_log(
            self._root, hosted.name, hosted.record, hosted.index, epoch, self._log_options, trusted_end,
            hosted.budget, self.ahead_of(hosted.topic_id),
            hosted.log.witness if hosted.log is not None else None,
        )  # fmt: skip

    def reopened(self, hosted: HostedPartition) -> None:
        """Attach the tier to the partition's new log."""
        if self.tiers is not None:
            self.tiers.attach(hosted)

    def reopen_ended(self, hosted: HostedPartition) -> None:
        """Take note that an attempt to reopen the partition's log has ended."""

    def sealed(self, hosted: HostedPartition) -> None:
        """Report a newly sealed segment to the tiers."""
        if self.tiers is not None:
            self.tiers.sealed(hosted)

    def _subscriptions_changed(self, hosted: HostedPartition) -> None:
        """Report to the tiers that changed cursors are on disk."""
        if self.tiers is not None:
            self.tiers.subscriptions_changed(hosted)

    def wake(self, hosted: HostedPartition) -> None:
        """Dispatch the partition's subscriptions in the next turn."""
        self._deliveries.wake(hosted)

    def progressed(self, hosted: HostedPartition) -> None:
        """Have records delivered that have reached their topic's durability level."""
        self._deliveries.written(hosted)
        self._schedule_turn()

    def wake_readers(self, hosted: HostedPartition) -> None:
        """Dispatch the subscriptions that wait for fetched bytes, as some have arrived."""
        self._deliveries.wake_readers(hosted)

    def drop_session(self, session: Session) -> None:
        """Close all handles of a closed connection."""
        session.closed = True
        for hosted in leave_partitions(session, clock.monotonic_ns()):
            self.wake(hosted)

    def session_writable(self, session: Session) -> None:
        """Note that the connection takes bytes again, or no longer."""
        link: HostedConsumer
        for link in session.consumers.values():
            hosted = link.hosted
            host = hosted.subscriptions.get(link.subscription) or hosted.lossy.get(link.subscription)
            if host is not None:
                host.update_ready(link)
                self._deliveries.wake_one(hosted, link.subscription)

    # -- turns ------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Write the batches queued since the last turn, answer them, and deliver records."""
        now_ns = clock.monotonic_ns()
        if self._dirty:
            dirty, self._dirty = self._dirty, {}
            self._deliveries.published(self.taken_bytes, now_ns)
            self.taken_bytes = 0
            for hosted in dirty:
                self.storage.write(hosted)
                self._deliveries.written(hosted)
                if hosted.publish_rate is not None:
                    self._paced[hosted] = None
        if self._paced:
            self._answer_paced()
        self._deliveries.turn(now_ns)

    def tick(self) -> None:
        """Run due timers of subscriptions: ack deadlines and redeliveries."""
        if self._paced:
            self._schedule_turn()  # it answers publishes that have waited for their rate
        self._deliveries.tick(clock.monotonic_ns())

    def _answer_paced(self) -> None:
        paced, self._paced = self._paced, {}
        for hosted in paced:
            hosted.complete()
            if hosted.publish_rate is not None and hosted.publish_rate.holds:
                self._paced[hosted] = None

    def second(self) -> None:
        """Report to consumers why they wait, and compare stored bytes with their limits; once a second."""
        if self.metadata is not None and self.metadata.limited:
            for hosted in self.partitions.values():
                hosted.follow_storage()
        if self.sums is not None:
            self.sums.second(self.partitions.values())
        self._deliveries.second()

    def store_cursors(self) -> None:
        """Append the cursors that changed since the last call to their files."""
        touched, self._deliveries.touched = self._deliveries.touched, {}
        for hosted in [one for one in touched if not one.deleted]:
            try:
                if hosted.store_cursors():
                    self.storage.cursors_written(hosted)
            except DanubeError as error:
                self._deliveries.touched[hosted] = None
                self.counters.add("storage_errors")
                _log.warning("cursors not stored", partition=hosted.name, error=str(error))

    def update_policy(self, record: TopicRecord) -> None:
        """Apply a topic's changed policy to its open partitions."""
        for name in record.physical_names:
            hosted = self.partitions.get(name)
            if hosted is not None and hosted.topic_id == record.topic_id:
                hosted.update(record)
                self.storage.follow_level(hosted)
                self.wake(hosted)

    def follow_limits(self, namespaces: Collection[str]) -> None:
        """Apply the changed limits of these namespaces to their open partitions."""
        if self.metadata is None:
            return
        for hosted in self.partitions.values():
            if namespace_of(hosted.record.topic) in namespaces:
                self._limit(hosted, hosted.record)
                hosted.recall_producers()
                hosted.follow_storage()
                self.wake(hosted)

    def _limit(self, hosted: HostedPartition, record: TopicRecord) -> None:
        """Apply the limits of a partition's namespace."""
        limits = None if self.metadata is None else self.metadata.limits(record)
        if limits is None or self.sums is None:
            hosted.limit(limits)
        else:
            hosted.limit(limits, *self.sums.of(namespace_of(record.topic)))

    def delete_topic(self, record: TopicRecord) -> None:
        """Close the partitions of a deleted topic, and remove their files."""
        for name in record.physical_names:
            hosted = self.partitions.get(name)
            if hosted is not None and hosted.topic_id == record.topic_id:
                del self.partitions[name]
                self._forget(hosted, TopicNotFound(f"topic {record.topic} was deleted"))

    def _forget(self, hosted: HostedPartition, error: DanubeError) -> None:
        """Stop hosting a partition whose topic was deleted, and remove its files."""
        self._let_go(hosted, error)
        if hosted.directory is not None:
            self._executor.submit(remove_directory, hosted.directory)

    def _let_go(self, hosted: HostedPartition, error: DanubeError) -> None:
        """Stop hosting a partition: write nothing more, send ``error`` to its open handles."""
        hosted.deleted = hosted.silent = True
        hosted.answer_stored()
        hosted.fail_waiting(error, -1)
        hosted.close_handles(error)
        self._dirty.pop(hosted, None)
        self._deliveries.forget(hosted)
        self.counters.add("partitions_open", -1)
        if self.tiers is not None:
            self.tiers.forget(hosted)
        if hosted.log is not None:
            self.storage.drop_spare(hosted.log.spare)
            hosted.log.abandon()
        if hosted.cursors is not None:
            hosted.cursors.close()
        self._schedule_turn()

    def close(self) -> None:
        """Store cursors, sync and close all logs; the worker ends after this."""
        for hosted in self.partitions.values():
            self.storage.close(hosted)
