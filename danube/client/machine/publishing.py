"""The sending half of one partition: pipelined batches with sequences, answered once each.

A batch is numbered when it is encoded and checked again when it is sent, because the epoch or the numbers may
have changed in between.  Only then it is stamped again, which is rare and costs one copy.

    opening   an OPEN_PRODUCER is on its way, or will be after a pause
    open      batches go out as publish credit and the window allow
    resting   a batch was refused by a quota: its number is free, and the rest cannot pass it.
              Wait for the answers to what is out and for the time that was told, then send on.
    settling  a batch was refused: its number is missing from the log, so the rest cannot follow.
              Wait for the answers to what is out, then open with a new epoch and send on.
    ended     closed or failed

After a lost connection or a moved owner the producer resumes its epoch and sends every un-answered batch
again, in order and with its old sequence.  For a stored batch the broker answers with the old offset.  An
owner that knows fewer batches than were acknowledged gets them in a new epoch.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from operator import attrgetter
from typing import Any, Final

from danube.client.machine.ack import Ack
from danube.client.machine.reply import Reply, settled_reply
from danube.client.machine.requests import Request, Timer
from danube.client.machine.session import Opened, Session
from danube.core.batch.builder import EncodedBatch
from danube.core.batch.checksum import crc32c
from danube.core.batch.format import BODY_CRC_START
from danube.core.partition.policy import Durability
from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameFlag, Kind
from danube.errors import (
    ClosedError,
    ConnectionFailed,
    DanubeError,
    Fenced,
    NotFound,
    OperationTimeout,
    OwnerMoved,
    QuotaExceeded,
    SequenceGap,
)
from danube.limits import DEDUP_BATCHES_PER_PRODUCER

UNACKED_BATCHES_MAX: Final = DEDUP_BATCHES_PER_PRODUCER // 2
REST_MS: Final = 1_000  # where a broker does not say how long
_DUPLICATE: Final = int(FrameFlag.DUPLICATE)  # an IntFlag operation costs a microsecond
_LEVELS: Final = {int(level): level.label for level in Durability}

# Where the numbers lie in the body, which starts at byte 36 of the batch.
_PRODUCER: Final = struct.Struct("<QQ")
_PRODUCER_POSITION: Final = 56 - BODY_CRC_START
_EPOCH: Final = struct.Struct("<I")
_EPOCH_POSITION: Final = 80 - BODY_CRC_START
_BODY_CRC: Final = struct.Struct("<I")
_BODY_CRC_POSITION: Final = 28


_order = attrgetter("order")


class State(Enum):
    OPENING = "opening"
    OPEN = "open"
    RESTING = "resting"
    SETTLING = "settling"
    ENDED = "ended"


_OPEN: Final = State.OPEN  # a member of an Enum costs as much to look up as several attributes


class Outgoing(Reply):
    """One batch on its way to a partition; settles with its Ack."""

    base_sequence: int  # this and the next three from when it is given to the partition
    deadline_ns: int
    epoch: int
    producer_id: int

    __slots__ = (
        "base_sequence", "body", "correlation", "deadline_ns", "epoch", "group", "head", "order", "partition",
        "producer_id", "record_count", "sent", "size",
    )  # fmt: skip

    def __init__(self, partition: PartitionProducer, encoded: EncodedBatch) -> None:
        super().__init__()
        self.partition = partition
        self.head = encoded.head
        self.body = encoded.body
        self.record_count = encoded.record_count
        self.size = wire.FRAME_HEADER_BYTES + encoded.size
        self.order = 0  # position in the order of sending, whatever its sequence becomes
        self.correlation = 0  # 0: not out on this connection
        self.sent = False  # under this epoch: it may be in the log, so its number is in use
        self.group: Any = None  # the call that waits for these records, if any

    def on_answer(self, kind: int, flags: int, body: memoryview) -> None:
        self.partition.on_published(self, flags, wire.decode_published(body))

    def on_error(self, error: DanubeError) -> None:
        self.partition.on_refused(self, error)


class PartitionProducer(Opened):
    """Sends batches to one partition, in order."""

    def __init__(
        self, session: Session, name: str, partition: str, index: int, timeout_ns: int, topic_id: int = 0
    ) -> None:
        super().__init__(session, partition, index)
        self.name = name
        self.producer_id = 0
        self.epoch = 0
        self.recall = 0  # of how many stored batches the broker is to say where they are
        self.internal = False  # a broker's own, for dead letters
        self.max_record_bytes = 0
        self.when_settled: Callable[[Outgoing], None] | None = None
        self.when_late: Callable[[Outgoing], None] | None = None  # it has failed, and may be settled yet
        self.timeout_ns = timeout_ns
        self._topic_id = topic_id  # 0: whichever topic has the name
        self._state = State.OPENING
        self._order = 0
        self._sent_sequence = 0  # of the next batch to be sent
        self._queue: deque[Outgoing] = deque()
        self._unacked: deque[Outgoing] = deque()
        self._expiry: Timer | None = None
        self._rest: Timer | None = None  # its coming ends a pause that a quota asked for
        self._refusal: QuotaExceeded | None = None  # why it rests, or did
        self._request: Request | None = None  # the OPEN_PRODUCER that was sent last

    @property
    def _ended(self) -> bool:
        return self._state is State.ENDED

    def unanswered(self) -> list[Outgoing]:
        """Batches that are queued or out, in order."""
        return [*self._unacked, *self._queue]

    @property
    def next_sequence(self) -> int:
        """The number that the next batch to be encoded will most likely have."""
        if self._queue:
            last = self._queue[-1]
            return last.base_sequence + last.record_count
        return self._sent_sequence

    # -- sending --------------------------------------------------------------------------------

    def send(self, outgoing: Outgoing, producer_id: int, epoch: int, base_sequence: int) -> None:
        """Queue a batch that was encoded with these numbers."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        self._order += 1
        outgoing.order = self._order
        outgoing.producer_id = producer_id
        outgoing.epoch = epoch
        outgoing.base_sequence = base_sequence
        outgoing.deadline_ns = self.session.now_ns() + self.timeout_ns
        if self._expiry is None:
            self._expiry = self.session.call_at(outgoing.deadline_ns, self._expire)
        if self._queue or not self._goes_out(outgoing):
            self._queue.append(outgoing)

    def transmit(self) -> None:
        """Send as many batches as the window and the connection's publish credit allow."""
        queue = self._queue
        while queue and self._goes_out(queue[0]):
            queue.popleft()

    def _goes_out(self, outgoing: Outgoing) -> bool:
        """Send the batch that is next, if it may go now."""
        unacked, session = self._unacked, self.session
        if self._state is not _OPEN or len(unacked) >= UNACKED_BATCHES_MAX:
            return False
        if not session.credit.take(outgoing.size, self):
            return False
        if (
            outgoing.base_sequence != self._sent_sequence
            or outgoing.epoch != self.epoch
            or outgoing.producer_id != self.producer_id
        ):
            self._stamp(outgoing)
        outgoing.correlation = session.publish(outgoing, outgoing.head, outgoing.body, self._handle)
        outgoing.sent = True
        unacked.append(outgoing)
        self._sent_sequence += outgoing.record_count
        return True

    def _stamp(self, outgoing: Outgoing) -> None:
        """Give a batch the numbers that hold now."""
        body = bytearray(outgoing.body)
        _PRODUCER.pack_into(body, _PRODUCER_POSITION, self.producer_id, self._sent_sequence)
        _EPOCH.pack_into(body, _EPOCH_POSITION, self.epoch)
        outgoing.body = bytes(body)
        head = bytearray(outgoing.head)
        _BODY_CRC.pack_into(head, _BODY_CRC_POSITION, crc32c(outgoing.body))
        outgoing.head = bytes(head)
        outgoing.producer_id, outgoing.epoch = self.producer_id, self.epoch
        outgoing.base_sequence = self._sent_sequence

    def withdraw(self, outgoing: Outgoing) -> bool:
        """Take back a batch that was not sent; False when it was, and its outcome is open."""
        if outgoing.sent or outgoing not in self._queue:
            return False
        self._queue.remove(outgoing)
        self._settle(outgoing, None, ClosedError("the send was cancelled before the batch was sent"))
        return True

    # -- answers --------------------------------------------------------------------------------

    def on_published(self, outgoing: Outgoing, flags: int, published: wire.Published) -> None:
        self._unacked.remove(outgoing)
        session = self.session
        statistics = session.statistics
        statistics.batches_published += 1
        statistics.records_published += outgoing.record_count
        statistics.bytes_published += outgoing.size
        duplicate = flags & _DUPLICATE != 0
        if duplicate:
            statistics.duplicates += 1
        base_offset, epoch, _, number, _ = published
        level = _LEVELS.get(number) or str(number)
        ack = Ack(base_offset, self.index, level, epoch, duplicate, outgoing.record_count)
        self._settle(outgoing, ack, None)
        session.credit.give_back(outgoing.size)
        if self._queue or self._state is not _OPEN:
            self._after_answer()

    def on_refused(self, outgoing: Outgoing, error: DanubeError) -> None:
        """Handle an ERROR for this batch, which is not in the log."""
        if isinstance(error, OwnerMoved):
            outgoing.correlation = 0
            credit = self.session.credit
            self._reopen(error)
            credit.give_back(outgoing.size)
            return
        self._unacked.remove(outgoing)
        if isinstance(error, Fenced | NotFound):
            self._settle(outgoing, None, error)
            self.session.credit.give_back(outgoing.size)
            self._fail(error)
            return
        if isinstance(error, SequenceGap) and self._state in (State.SETTLING, State.RESTING):
            # It follows a refused batch; nothing is wrong with it but its number.
            self._take_back(outgoing)
        elif isinstance(error, QuotaExceeded):
            self._refused_for_now(outgoing, error)
        else:
            self._settle(outgoing, None, error)
            if self._state in (State.OPEN, State.RESTING):
                self._state = State.SETTLING
        self.session.credit.give_back(outgoing.size)
        self._after_answer()

    def _refused_for_now(self, outgoing: Outgoing, error: QuotaExceeded) -> None:
        """Send a batch again when its quota allows, or fail it if that is too late for it."""
        told_ms = error.facts.get("retry_after_ms")
        pause_ms = told_ms if isinstance(told_ms, int) and told_ms > 0 else REST_MS
        now_ns = self.session.now_ns()
        until_ns = now_ns + pause_ms * 1_000_000
        self._refusal = error
        if self._state is State.OPEN:
            self._state = State.RESTING
            self._sent_sequence = outgoing.base_sequence
        if until_ns < outgoing.deadline_ns and not outgoing.settled:
            self._take_back(outgoing)
        else:
            until_ns = now_ns  # the next one may be smaller, or have more time
            self._settle(outgoing, None, error)
        if self._rest is not None:
            self._rest.cancel()
        self._rest = self.session.call_at(until_ns, self._rested)

    def _take_back(self, outgoing: Outgoing) -> None:
        """Put a batch that is not in the log back to those that were not sent, if someone waits for it."""
        outgoing.correlation = 0
        outgoing.sent = False
        if outgoing.settled:
            self._settle(outgoing, None, self.timed_out("it is not stored"))
        else:
            self._queue_again([outgoing])

    def _rested(self) -> None:
        self._rest = None
        self._after_answer()

    def _queue_again(self, batches: Iterable[Outgoing]) -> None:
        """Put batches back where they were in the order of their sending."""
        self._queue = deque(sorted([*batches, *self._queue], key=_order))

    def _after_answer(self) -> None:
        if self._state is _OPEN:
            self.transmit()
        elif self._state is State.SETTLING and not self._unacked:
            self._open_anew()
        elif self._state is State.RESTING and not self._unacked and self._rest is None:
            self._state = State.OPEN
            self.transmit()

    def _settle(self, outgoing: Outgoing, ack: Ack | None, error: DanubeError | None) -> None:
        outgoing.head = b""  # keeping the outcome shall not keep the bytes
        outgoing.body = b""
        if error is None:
            outgoing.resolve(ack)
        else:
            self.session.statistics.send_failures += 1
            outgoing.fail(error)
        if self.when_settled is not None:
            self.when_settled(outgoing)

    # -- opening --------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the partition with a new epoch, or again with the current one."""
        self._state = State.OPENING
        self._retry = None
        if not self.session.ready:
            return
        self._handle = self.session.new_handle(self)
        body = wire.OpenProducer(
            self.partition, self.name, self.producer_id, self.epoch,
            topic_id=self._topic_id, recall=self.recall, internal=self.internal,
        )  # fmt: skip
        self._request = request = self.session.request(Kind.OPEN_PRODUCER, body, handle=self._handle)
        handle = self._handle
        request.when_settled(lambda _: self._on_opened(request, handle))

    def _first_unanswered(self) -> int:
        """The number from which on nothing is acknowledged.

        Behind a batch that a quota refused some are out with numbers that are not used.
        """
        first = next((one for one in (*self._unacked, *self._queue) if one.sent), None)
        return self._sent_sequence if first is None else min(first.base_sequence, self._sent_sequence)

    def _open_anew(self) -> None:
        """Start a new epoch: the old one's numbers have a hole."""
        if self.session.ready:
            self.session.drop_handle(self._handle)
            self.session.send(wire.control_frame(Kind.CLOSE_PRODUCER, None, 0, self._handle))
        self.producer_id = self.epoch = 0
        self._open()

    def _on_opened(self, request: Request, handle: int) -> None:
        if handle != self._handle or self._state is not State.OPENING:
            return
        if request.error is not None:
            self.session.drop_handle(handle)
            self._on_open_failed(request.error)
            return
        opened: wire.ProducerOpened = request.value
        self._attempts = 0
        resumed = (opened.producer_id, opened.epoch) == (self.producer_id, self.epoch) and self.epoch != 0
        first = self._first_unanswered()
        if resumed and opened.next_sequence < first:
            # An owner that is gone took the numbers up to there, and may come back with them: in this epoch
            # they are never given to other batches.
            self._open_anew()
            return
        self.producer_id, self.epoch = opened.producer_id, opened.epoch
        self.max_record_bytes = opened.max_record_bytes
        unacked, self._unacked = self._unacked, deque()
        self._queue_again(unacked)
        for outgoing in self._queue:
            outgoing.correlation = 0
            outgoing.sent = outgoing.sent and resumed
        self._sent_sequence = first if resumed else opened.next_sequence
        self._state = State.OPEN
        self.last_error = None
        self.opened.resolve(opened)
        self.transmit()

    def _on_open_failed(self, error: BaseException) -> None:
        if not isinstance(error, DanubeError):
            error = DanubeError("the producer could not be opened", why=str(error))
        self._note_refusal(error)
        if not error.retryable:
            self._fail(error)
        elif self.session.ready:
            self._reopen(error)
        # Without a connection on_connected() comes when there is one.

    def _reopen(self, error: DanubeError) -> None:
        """Resume after a pause, at the broker of ``error``; unanswered batches are sent again then."""
        if self._retry is not None or self._ended:
            return
        if self._state is State.SETTLING:
            self.producer_id = self.epoch = 0
        self._state = State.OPENING
        self._give_up_handle()
        self._go_to(self.session.brokers.after(self.session, error))
        self._open_later()

    def _go_to(self, session: Session) -> None:
        if session is self.session:
            return
        super()._go_to(session)
        if self._expiry is not None:
            self._expiry.cancel()
            self._set_expiry()

    def _give_up_handle(self) -> None:
        """Forget the handle and the correlations of its batches: none of them will be answered any more."""
        self.session.drop_handle(self._handle)
        for outgoing in list(self._unacked):
            if outgoing.correlation:
                self.session.forget(outgoing.correlation)
                outgoing.correlation = 0
                self.session.credit.give_back(outgoing.size)

    # -- what the session tells -----------------------------------------------------------------

    def on_disconnected(self) -> None:
        for outgoing in self._unacked:
            outgoing.correlation = 0
        if self._state is State.SETTLING:
            self.producer_id = self.epoch = 0
        if not self._ended:
            self._state = State.OPENING

    def on_deliver(self, body: memoryview) -> None:
        """A producer is sent no batches; a broker that does so is ignored."""

    def on_waiting(self, reason: DanubeError | None) -> None:
        """A producer waits for no batches."""

    def on_sought(self) -> None:
        """A producer has no subscription."""

    # -- ending ---------------------------------------------------------------------------------

    def close(self) -> Reply:
        """Close the handle; queued batches fail, so flush first."""
        if self._ended:
            return settled_reply()
        opened = self._state in (State.OPEN, State.RESTING, State.SETTLING)
        handle, request = self._handle, self._request
        self.failure = ClosedError(f"the producer {self.name!r} is closed")
        self._end(ClosedError("the producer was closed before the batch was answered"))
        if opened and self.session.ready:
            return self.session.request(Kind.CLOSE_PRODUCER, None, handle=handle)
        return settled_reply() if request is None else self.session.undo(request)

    def _fail(self, error: DanubeError) -> None:
        if not self._ended:
            self.failure = error
            self._end(error)

    def _end(self, error: DanubeError) -> None:
        self._state = State.ENDED
        for timer in (self._retry, self._expiry, self._rest):
            if timer is not None:
                timer.cancel()
        left = [*self._unacked, *self._queue]
        self._unacked.clear()
        self._queue.clear()
        self.session.unregister(self)
        returned = 0
        for outgoing in left:
            if outgoing.correlation:
                self.session.forget(outgoing.correlation)
                returned += outgoing.size
            self._settle(outgoing, None, self._lost(outgoing, error))
        self.opened.fail(error)
        if returned and self.session.ready:
            self.session.credit.give_back(returned)

    def _lost(self, outgoing: Outgoing, error: DanubeError) -> DanubeError:
        if isinstance(error, ConnectionFailed) and outgoing.sent:
            return ConnectionFailed(
                error.what,
                why=error.why,
                hint="these records were sent; whether they are stored is not known",
            )
        return error

    def _expire(self) -> None:
        """Fail batches that took too long.  A sent batch keeps its number, so the numbers stay contiguous."""
        self._expiry = None
        now_ns = self.session.now_ns()
        for outgoing in [*self._unacked, *self._queue]:
            if outgoing.deadline_ns > now_ns or outgoing.settled:
                continue
            if outgoing.sent:
                self.session.statistics.send_failures += 1
                outgoing.fail(
                    self.timed_out("it was sent and not answered; whether it is stored is not known")
                )
                if self.when_late is not None:
                    self.when_late(outgoing)
            else:
                self._queue.remove(outgoing)
                refusal = self._refusal if self._state is State.RESTING else None
                self._settle(outgoing, None, refusal or self.timed_out("it was not sent"))
        self._set_expiry()

    def _set_expiry(self) -> None:
        """Set the timer of the batch that must be answered first."""
        waiting = [one.deadline_ns for one in self.unanswered() if not one.settled]
        self._expiry = self.session.call_at(min(waiting), self._expire) if waiting else None

    def timed_out(self, why: str) -> OperationTimeout:
        """The error of records that took too long."""
        if self._state is not _OPEN and self.last_error is not None:
            why = f"{why}, for the partition cannot be opened: {self.last_error}"
        return OperationTimeout(
            f"a batch for {self.partition} was not acknowledged within {self.timeout_ns / 1e9:g} s",
            why=why,
            hint="records that were sent are still stored at most once",
            partition=self.partition,
        )
