"""The receiving half of one partition: credit, prefetched batches, and acknowledgements merged into ranges.

Credit is counted as the broker counts it: a delivery takes its records and the bytes of its batches.  When
the application has handled half of the window, the broker gets that credit back in one frame.  Records count
as handled when the application requests the next ones.  Without a fixed ``prefetch_records`` the window
follows the application's pace (:mod:`danube.core.dispatch.consumer_window`), so slow handlers do not hoard
records that others could have had, and fast ones never wait.

After a lost connection or a moved owner the consumer subscribes again under the same name: batches that were
prefetched and not yet handed out are dropped (the broker sends them again), acknowledgements that were not
sent are kept and sent then.  sync_acks() and close() wait for that, or fail: they never report success for an
acknowledgement that the broker may not have.  A temporary subscription is gone then, and is made anew behind
the last record that was acknowledged.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from danube.client.machine.received import ReceivedBatch, ranges_of, take_batch
from danube.client.machine.reply import Reply, failed_reply, settled_reply
from danube.client.machine.requests import Request, nothing
from danube.client.machine.sent_acks import LatelyAcked, SentAcks
from danube.client.machine.session import Opened, Session
from danube.core.dispatch.consumer_window import WINDOW_MAX, ConsumerWindow, span_of
from danube.core.protocol import native as wire
from danube.core.protocol.native import DELIVERY_BYTES, DeliveryFlag, FrameFlag, Kind
from danube.errors import (
    ClosedError,
    ConnectionFailed,
    Damage,
    DanubeError,
    OperationTimeout,
    OwnerMoved,
)
from danube.host.telemetry import events

_telemetry = events("client")
ACKED_OFFSETS_MAX: Final = 4096  # acks that wait for the end of the turn
RANGES_PER_FRAME: Final = 4096
CLOSE_TIMEOUT_NS: Final = 5_000_000_000
REFUSED_NS: Final = 1_000_000_000  # time of refused subscribes before the application is informed
_RANGE: Final = struct.Struct("<QQ")
_COMPACTED: Final = int(DeliveryFlag.COMPACTED)


class PartitionConsumer(Opened):
    """Receives the batches of one partition for one consumer."""

    _ended = False

    def __init__(
        self, session: Session, body: wire.Subscribe, index: int, reliable: bool, window: ConsumerWindow
    ) -> None:
        super().__init__(session, body.partition, index)
        self.ready: deque[ReceivedBatch] = deque()
        self.ready_records = 0
        self.ready_bytes = 0
        self.active = True
        self.waiting: DanubeError | None = None  # why the broker sends no records now
        self.shell: Any = None  # of the blocking client: its lock guards this against other threads
        self.when_ready: Callable[[PartitionConsumer], None] = nothing
        self.when_reset: Callable[[PartitionConsumer], None] = nothing
        self.when_repeated: Callable[[PartitionConsumer], None] = nothing  # acks that a connection had lost
        self._body = body
        self._reliable = reliable
        self._subscribed = False
        self._window = window
        self._handed_records = 0  # records that the application has taken since it last wanted more
        self._taken_records = 0  # handled, and not given back as credit
        self._taken_bytes = 0
        self._refused_since_ns = -1  # every subscribe was refused since then
        self._told_refusal = ""
        self._ack_start = 0  # one open range; equal: none
        self._ack_end = 0
        self._acked: list[int] = []
        self._acked_ranges: list[tuple[int, int]] = []
        self._nacked: list[wire.Nack] = []
        self._dirty = False
        self._sent_acks = SentAcks(session.now_ns)
        self._syncing: Request | None = None
        self._syncs: list[Reply] = []  # each settles when every ack so far is stored
        self._asked: list[Reply] = []  # replies that wait for the open request
        self._request: Request | None = None  # the SUBSCRIBE that is not answered yet
        self._closing: Reply | None = None  # acks have to be sent before it can be closed
        self._lost_acks = False  # it failed with acks that were not sent
        self._lately_acked = LatelyAcked()
        self._late_end = 0  # below it are acks that were sent late or again, and are not confirmed yet
        self._doubtful = 0  # the oldest ``ready`` batches, which came before they were
        self._read_end = -1  # of a temporary subscription: where it goes on

    # -- deliveries -----------------------------------------------------------------------------

    def on_deliver(self, body: memoryview) -> None:
        if self._closing is not None:
            return
        delivery = wire.decode_delivery(body)
        compacted = bool(delivery.flags & _COMPACTED)
        position, end = DELIVERY_BYTES, len(body)
        statistics = self.session.statistics
        ready = self.ready
        if not ready and not self._handed_records:
            self._window.began(self.session.now_ns())
        self.waiting = None
        while position < end:
            try:
                batch = take_batch(body, position, delivery.redelivery_count, compacted=compacted)
            except Damage:
                statistics.damaged_batches += 1
                raise
            size = batch.header.size
            position += size
            statistics.batches_delivered += 1
            statistics.records_delivered += batch.record_count
            statistics.bytes_delivered += size
            ready.append(batch)
            self.ready_records += batch.record_count
            self.ready_bytes += size
        self.when_ready(self)

    def on_waiting(self, reason: DanubeError | None) -> None:
        self.waiting = reason
        if reason is not None:
            _telemetry.warning(f"no records come now: {reason}", partition=self.partition)

    def on_sought(self) -> None:
        self._ack_start = self._ack_end = 0
        self._acked, self._acked_ranges = [], []
        self._sent_acks.clear()
        self._lately_acked.clear()
        self._late_end = self._doubtful = 0
        self._read_end = -1

    def take(self) -> ReceivedBatch | None:
        """Hand the oldest batch to the application; only when one is ``ready``.

        None if all of it was acked meanwhile, after an earlier delivery.
        """
        batch = self.ready.popleft()
        self.ready_records -= batch.record_count
        self.ready_bytes -= batch.header.size
        self._handed_records += batch.record_count
        self._taken_bytes += batch.header.size
        if batch.redelivery_count or batch.header.base_offset < self._late_end or self._doubtful:
            self._doubtful = max(0, self._doubtful - 1)
            return self._without_acked(batch)
        return batch

    def rest_of(self, batch: ReceivedBatch, start: int) -> ReceivedBatch | None:
        """Return the part of a batch, handed out up to record ``start``, that was not acked; None: none."""
        return self._lately_acked.split(batch, self.session.now_ns(), start)[0]

    def _without_acked(self, batch: ReceivedBatch) -> ReceivedBatch | None:
        self.write_acks()
        rest, acked = self._lately_acked.split(batch, self.session.now_ns())
        if acked:
            self.ack_ranges(acked)  # the first time it may have come too late
        return rest

    def asked_for_more(self) -> None:
        """Return the credit of handled records; called when the application requests more."""
        handed, self._handed_records = self._handed_records, 0
        if handed:
            self._taken_records += handed + self._window.handled(handed, self.session.now_ns())
            self._give_credit_back()

    def _give_credit_back(self) -> None:
        """Once half of the window was handled, or it has grown."""
        records, size_bytes = self._taken_records, self._taken_bytes
        enough = 2 * records >= self._window.records or 2 * size_bytes >= self._body.credit_bytes
        if enough and self._subscribed:
            self._taken_bytes = 0
            self._taken_records = min(records, 0)
            self.session.send(wire.credit_frame(self._handle, max(records, 0), size_bytes))

    def half_full(self, records: int) -> bool:
        """Whether ``records`` are here, or as many as credit lets come."""
        return (
            self.ready_records >= min(records, -(-self._window.records // 2))
            or 2 * self.ready_bytes >= self._body.credit_bytes
        )

    def widen(self, records: int) -> None:
        """Let at least so many records come, where the window is not fixed."""
        if not self._window.fixed:
            self._window.least = min(records, WINDOW_MAX)
            more = self._window.least - self._window.records
            if more > 0:
                self._window.records += more
                if self._subscribed:
                    self.session.send(wire.credit_frame(self._handle, more, 0))

    # -- acknowledgements -----------------------------------------------------------------------

    def ack(self, offset: int) -> None:
        """Acknowledge one record; sent with others at the end of the turn."""
        if offset == self._ack_end and self._ack_end != self._ack_start:
            self._ack_end = offset + 1
            return
        if not self._reliable:
            return
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._ack_end != self._ack_start:
            self._close_range()
        self._ack_start, self._ack_end = offset, offset + 1
        if not self._dirty:
            self._mark_dirty()

    def ack_ranges(self, ranges: list[tuple[int, int]]) -> None:
        """Acknowledge half-open offset ranges."""
        if not self._reliable:
            return
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        self._acked_ranges += ranges
        if len(self._acked_ranges) >= ACKED_OFFSETS_MAX:
            self._merge()
        if not self._dirty:
            self._mark_dirty()

    def _close_range(self) -> None:
        start, end = self._ack_start, self._ack_end
        if end - start == 1:
            self._acked.append(start)
            if len(self._acked) >= ACKED_OFFSETS_MAX:
                self._merge()
        else:
            self._acked_ranges.append((start, end))
        self._ack_start = self._ack_end = 0

    def hand_back(self, ranges: list[tuple[int, int]]) -> None:
        """Give untried records back: at once, and without counting as a failure."""
        self.nack(ranges, -1, "", True)

    def nack(self, ranges: list[tuple[int, int]], delay_ms: int, reason: str, returned: bool = False) -> None:
        """Give records back, to be delivered again after ``delay_ms`` (-1: the policy's delay)."""
        if not self._reliable:
            return
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        nacked = self._nacked
        last = nacked[-1] if nacked else None
        if (
            last is not None
            and (last.delay_ms, last.reason, last.returned) == (delay_ms, reason, returned)
            and len(last.ranges) < RANGES_PER_FRAME
        ):
            last.ranges.extend(ranges)
        else:
            nacked.append(wire.Nack(list(ranges), delay_ms, reason, returned))
        if not self._dirty:
            self._mark_dirty()

    def _mark_dirty(self) -> None:
        if self._subscribed:
            self.session.mark_dirty(self)
        self._dirty = True

    def _merge(self) -> None:
        """Merge pending acks into few ranges; while disconnected only these are kept."""
        ranges = self._acked_ranges
        if self._acked:
            ranges += ranges_of(np.array(self._acked, np.int64))
            self._acked = []
        merged: list[tuple[int, int]] = []
        for start, end in sorted(ranges):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        self._acked_ranges = merged
        if len(merged) >= ACKED_OFFSETS_MAX and self._subscribed:
            self._write_ranges()

    def _pending_end(self) -> int:
        """Above the acks that wait for a connection: the broker may send their records before it hears it."""
        if self._ack_end != self._ack_start:
            self._close_range()
        self._merge()
        return self._acked_ranges[-1][1] if self._acked_ranges else 0

    def write_acks(self) -> None:
        """Queue everything pending; the session calls this before it hands out its output."""
        if not self._subscribed:
            return
        self._dirty = False
        if self._ack_end != self._ack_start:
            self._acked_ranges.append((self._ack_start, self._ack_end))
            self._ack_start = self._ack_end = 0
        if self._acked or len(self._acked_ranges) > 1:
            self._merge()
        if self._acked_ranges:
            self._write_ranges()
        for nack in self._nacked:
            self.session.send(wire.control_frame(Kind.NACK, nack, 0, self._handle))
        self._nacked.clear()

    def _write_ranges(self) -> None:
        ranges, self._acked_ranges = self._acked_ranges, []
        if self._read_end >= 0:
            self._read_end = max(self._read_end, ranges[-1][1])
        self._sent_acks.add(ranges)
        self._lately_acked.acked(ranges, self.session.now_ns())
        for position in range(0, len(ranges), RANGES_PER_FRAME):
            few = ranges[position : position + RANGES_PER_FRAME]
            packed = _RANGE.pack(*few[0]) if len(few) == 1 else np.array(few, "<u8").tobytes()
            self.session.send(wire.ack_frame(self._handle, packed))

    def sync_acks(self) -> Reply:
        """Settles when the broker has stored the cursor with every ack so far; waits for a connection."""
        if self.failure is not None:
            return failed_reply(self.failure)
        if not self._dirty and not self._sent_acks.unsure and self._syncing is None:
            return settled_reply()
        reply = self._within(self.session.request_timeout_ns, "storing acknowledgements")
        self._syncs.append(reply)
        self._sync()
        return reply

    def _sync(self) -> None:
        """Send the sync that sync_acks() waits for, unless one is under way or no subscription is open."""
        self._syncs = [one for one in self._syncs if not one.settled]
        if not self._syncs or not self._subscribed or self._syncing is not None:
            return
        lost = self._sent_acks.take_lost()
        self._acked_ranges += lost
        self.write_acks()
        if lost:  # until it answers it may send their records again, as new ones where it was killed
            self._late_end = max(self._late_end, *(end for _, end in lost))
            self.when_repeated(self)
        last, self._asked, self._syncs = self._sent_acks.begin_sync(), self._syncs, []
        if last is None:  # records were given back, and none was acknowledged
            self._answer_syncs(None)
            return
        request = self.session.await_ack(self._handle, _RANGE.pack(*last), int(FrameFlag.SYNC))
        self._syncing = request
        request.when_settled(self._on_synced)

    def _on_synced(self, request: Reply) -> None:
        if self._syncing is not request:
            return
        self._syncing = None
        error = request.error
        if isinstance(error, ConnectionFailed | OwnerMoved):
            self._syncs, self._asked = self._asked + self._syncs, []  # asked again where it subscribes next
            return
        self._sent_acks.end_sync(error is None)
        if self._late_end and error is None:
            self._late_end, self._doubtful = 0, len(self.ready)
        self._answer_syncs(error)
        self._sync()

    def _answer_syncs(self, error: BaseException | None) -> None:
        asked, self._asked = self._asked, []
        for reply in asked:
            if error is None:
                reply.resolve(None)
            else:
                reply.fail(error)

    def _within(self, timeout_ns: int, what: str) -> Reply:
        """Return a reply that fails if it is not settled in time."""
        home = self.session.brokers.home  # its timers run as long as the client lives
        return home.bounded(timeout_ns, lambda: self._late(timeout_ns, what))

    def _late(self, timeout_ns: int, what: str) -> OperationTimeout:
        return OperationTimeout(
            f"{what} of {self.partition} took longer than {timeout_ns / 1e9:g} s",
            why="the broker did not answer" if self._subscribed else "there is no connection to the broker",
            hint="whether they are stored is not known; records that are not acknowledged come again",
            partition=self.partition,
        )

    # -- opening --------------------------------------------------------------------------------

    def _open(self) -> None:
        self._retry = None
        if self._ended or not self.session.ready:
            return
        self._handle = handle = self.session.new_handle(self)
        self._body.credit_records = self._window.records
        if self._read_end >= 0:
            self._body.start, self._body.start_value = "offset", max(self._read_end, self._pending_end())
        self._handed_records = self._taken_records = self._taken_bytes = 0
        self._window.began(self.session.now_ns())
        self._request = request = self.session.request(Kind.SUBSCRIBE, self._body, handle=handle)
        request.when_settled(lambda _: self._on_subscribed(request, handle))

    def _on_subscribed(self, request: Request, handle: int) -> None:
        if request is self._request:
            self._request = None
        if handle != self._handle or self._ended:
            return
        error = request.error
        if error is None:
            self._attempts = 0
            self._refused_since_ns, self._told_refusal = -1, ""
            self.last_error = self.waiting = None
            self._late_end = self._pending_end()
            self._subscribed = True
            self.active = request.value.active
            self._body.epoch = request.value.epoch  # a returning consumer does not create it again
            if request.value.temporary and self._reliable:
                self._read_end = max(self._read_end, request.value.ack_floor)
            if request.value.ack_timeout_ms:
                self._window.span_ns = span_of(request.value.ack_timeout_ms * 1_000_000)
            self._give_credit_back()  # batches may have come before this answer
            if self._dirty:
                self.session.mark_dirty(self)
            self.opened.resolve(request.value)
            self._sync()
            if self._closing is not None:
                self._unsubscribe(self._closing)
            return
        self._note_refusal(error)
        self.session.drop_handle(handle)
        if isinstance(error, DanubeError) and not error.retryable:
            self._fail(error)
        elif self.session.ready:
            self._reopen(error)
            self._tell_of_refusal()

    def _tell_of_refusal(self) -> None:
        """Report after a while why the partition cannot be opened; it may open soon."""
        now_ns, reason = self.session.now_ns(), self.last_error
        if self._refused_since_ns < 0:
            self._refused_since_ns = now_ns
        if now_ns - self._refused_since_ns >= REFUSED_NS and isinstance(reason, DanubeError):
            if str(reason) != self._told_refusal:
                self.on_waiting(reason)
            self.waiting, self._told_refusal = reason, str(reason)

    def _reopen(self, error: BaseException) -> None:
        """Subscribe again after a pause, where ``error`` points to."""
        self._forget_deliveries()
        self._go_to(self.session.brokers.after(self.session, error))
        self._open_later()

    def _forget_deliveries(self) -> None:
        """Drop prefetched batches of the old subscription: they will come again, some acked ones as well."""
        self._subscribed = False
        if self._syncing is not None:  # it may never be answered; the next subscription asks again
            self.session.drop_request(self._syncing)
            self._syncing = None
            self._syncs, self._asked = self._asked + self._syncs, []
        self._sent_acks.lose()
        self._lately_acked.clear()
        self._late_end = self._doubtful = 0
        self.waiting = None
        self.ready.clear()
        self.ready_records = self.ready_bytes = 0
        self.when_reset(self)

    # -- what the session tells -----------------------------------------------------------------

    def on_disconnected(self) -> None:
        self._forget_deliveries()

    # -- ending ---------------------------------------------------------------------------------

    def close(self, timeout_ns: int = CLOSE_TIMEOUT_NS) -> Reply:
        """Send pending acks, then unsubscribe; the future settles when the broker has applied every ack.

        Without a connection it waits for one if acks are pending, else the consumer is gone already.
        """
        if self._closing is not None:
            return self._closing
        if self._ended:
            lost, self._lost_acks = self._lost_acks, False
            return failed_reply(self.failure) if lost and self.failure is not None else settled_reply()
        if not self._subscribed and not self._dirty:
            reply = self._give_up_subscribing()
            self._end(ClosedError("the consumer is closed"))
            return reply
        self._closing = closing = self._within(timeout_ns, "closing a consumer")
        closing.when_settled(lambda _: self._end(ClosedError("the consumer is closed")))
        if self._subscribed:
            self._unsubscribe(closing)
        return closing

    def _unsubscribe(self, closing: Reply) -> None:
        """Write the last acks and leave; again on the next connection, where this one is lost meanwhile."""
        self._acked_ranges += self._sent_acks.take_lost()
        self.write_acks()
        unsure = self._sent_acks.unsure
        request = self.session.request(Kind.CLOSE_CONSUMER, None, handle=self._handle)
        self.session.drop_handle(self._handle)
        self._subscribed = False
        self._handle = 0
        self.failure = ClosedError("the consumer is closed")

        def left(_: Reply) -> None:
            if request.error is None or not unsure:
                closing.resolve(None)
            elif not isinstance(request.error, ConnectionFailed):
                closing.fail(request.error)

        request.when_settled(left)

    def _give_up_subscribing(self) -> Reply:
        """Undo at the broker a SUBSCRIBE that is not answered yet."""
        request, self._request = self._request, None
        return settled_reply() if request is None else self.session.undo(request)

    def _fail(self, error: DanubeError) -> None:
        if not self._ended:
            self._lost_acks = self._dirty and not isinstance(error, ClosedError)
            self._end(error)
            self.when_ready(self)

    def _end(self, error: DanubeError) -> None:
        if self._ended:
            return
        self._ended = True
        self.failure = error
        self._forget_deliveries()
        self._cancel_retry()
        self._give_up_subscribing()
        self.session.unregister(self)
        self.opened.fail(error)
        self._ack_start = self._ack_end = 0
        for reply in [*self._syncs, *([] if self._closing is None else [self._closing])]:
            reply.fail(error)
