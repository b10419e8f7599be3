"""Consumers of a partition at its owner, and the host of a reliable subscription.

A host connects a pure subscription (:mod:`danube.core.dispatch.subscription`) to the sessions of its
consumers.  The core decides which consumer gets which offsets; the host reads the records and sends frames.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from danube.broker.partition.chunks import Chunk
from danube.core.dispatch.acks import Ranges, sound
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import Grant, Mode, Offsets, within, without
from danube.core.dispatch.holed import GIVEN_UP, UNUSED, HoledSubscription
from danube.core.dispatch.rate import UNLIMITED, DispatchLimits, DispatchRate
from danube.core.protocol.native import Kind, control_frame, deliver_header, waiting_frame
from danube.errors import DanubeError, FetchPending, OffsetOutOfRange
from danube.host import telemetry
from danube.limits import CONSUMER_NAMES_LISTED_MAX, READ_CHUNK_BYTES

if TYPE_CHECKING:
    from danube.broker.api import Session
    from danube.broker.traffic import Traffic
    from danube.core.metadata.commands import TopicRecord
    from danube.core.partition.partition import Partition

_log = telemetry.events("consumers")
_NO_LOSS: Final = frozenset({"compacted", UNUSED})
DUE_RECORDS_PER_TURN = 1024
_KEY_SHARED: Final = Mode.KEY_SHARED  # a member of an IntEnum costs as much to look up as five numbers
OPEN_HOLE = "open"  # reason of a chunk that begins behind the requested offset


class ReadPartition(Protocol):
    """Members of :class:`danube.broker.partition.hosted.HostedPartition` that readers use."""

    name: str
    record: TopicRecord
    core: Partition
    counters: Traffic
    delivery_flags: int  # of each DELIVER frame
    dispatch_limits: DispatchLimits

    @property
    def high_watermark(self) -> int: ...
    def chunk(self, offset: int, bytes_max: int = READ_CHUNK_BYTES) -> Chunk: ...
    def lag_from(self, offset: int) -> int: ...


class ConsumerLink:
    """A consumer handle that is open on this worker, with its byte credit."""

    __slots__ = (
        "consumer_id",
        "credit_bytes",
        "earlier_end",
        "handle",
        "hosted",
        "name",
        "ready",
        "session",
        "subscription",
        "told",
    )

    def __init__(
        self,
        session: Session,
        handle: int,
        consumer_id: int,
        name: str,
        hosted: ReadPartition,
        subscription: str,
    ) -> None:
        self.session = session
        self.handle = handle
        self.consumer_id = consumer_id
        self.name = name
        self.hosted = hosted
        self.subscription = subscription
        self.credit_bytes = 0
        self.earlier_end = 0  # records below may have been delivered to it before it reconnected
        self.ready = True
        self.told = ""  # the reported reason why it gets no records; empty if it gets some

    def tell_waiting(self, reason: DanubeError | None) -> None:
        """Report once why this consumer gets no records now; None reports the end of the wait."""
        words = "" if reason is None else str(reason)
        if words != self.told:
            self.told = words
            self.session.send(waiting_frame(reason, self.handle))

    def deliver(self, parts: list[bytes | memoryview], record_count: int, redelivery_count: int) -> int:
        """Send one DELIVER frame and take its bytes from the credit; return the bytes."""
        size = sum(map(len, parts))
        self.told = ""  # for the client, a delivery ends the reported wait
        head = deliver_header(self.handle, size, redelivery_count, record_count, self.hosted.delivery_flags)
        self.session.send(head, *parts)
        self.credit_bytes -= size
        return size


def names_of(links: Iterable[ConsumerLink]) -> list[str]:
    """Return consumer names for an answer, at most CONSUMER_NAMES_LISTED_MAX."""
    return [link.name for link in islice(links, CONSUMER_NAMES_LISTED_MAX)]


class SubscriptionHost:
    """Host of a reliable subscription: reads records, delivers them to its consumers, takes their acks."""

    def __init__(self, hosted: ReadPartition, core: HoledSubscription) -> None:
        self.hosted = hosted
        self.core = core
        self.links: dict[int, ConsumerLink] = {}
        self.next = core.next  # the core's next offset after the last dispatch
        self.stored_version = -1
        self.temporary = False  # never stored, and gone with its last consumer
        self.deadline_ns: int | None = None
        self.sought = False  # a returning consumer may have acked records that a seek repeats
        self.rate = DispatchRate()
        self.bytes_sent = 0
        self._read_bytes = READ_CHUNK_BYTES
        self.pending_new: FetchPending | None = None  # the fetch that new records wait for
        self.pending_again: FetchPending | None = None  # the fetch that redeliveries wait for
        self.read_error: DanubeError | None = None  # the error of this host's disk at the last dispatch
        self.dead_letter_error = ""  # why the last copies to the dead-letter topic were not made
        self._pending_next = -1
        self._holes_changed = False

    def update_ready(self, link: ConsumerLink) -> None:
        """Tell the core whether this consumer can take more bytes now."""
        ready = link.credit_bytes > 0 and link.session.writable
        if ready != link.ready:
            link.ready = ready
            self.core.set_ready(link.consumer_id, ready)

    def ack(self, link: ConsumerLink, ranges: Ranges, now_ns: int) -> int:
        """Ack records for a consumer; return the number of records that were not acked before.

        Records that the consumer may have received before it reconnected are acked even if they are granted
        to another consumer now, or if this owner never granted them.
        """
        result = self.core.ack(link.consumer_id, ranges, now_ns)
        if not link.earlier_end or not result.ignored + result.refused:
            return result.acked
        return result.acked + self.core.ack_earlier(within(sound(ranges), 0, link.earlier_end))

    def seek(self, offset: int, now_ns: int) -> None:
        """Deliver from ``offset`` on, acked records too; tell the consumers, which then drop older acks."""
        self.core.seek(offset, self.hosted.high_watermark, now_ns)
        self.sought = True
        for link in self.links.values():
            link.earlier_end = 0
            link.session.send(control_frame(Kind.SOUGHT, None, 0, link.handle))

    def follow_holes(self, open_holes: Offsets, unused: Offsets, given_up: Offsets) -> None:
        """Apply a new list of holes: some have records again, others are given up for good."""
        withheld = self.core.withheld
        lost = without(withheld, without(withheld, given_up)) if len(given_up) else given_up
        self.core.follow_holes(open_holes, unused, given_up)
        for start, end in lost.tolist():
            self._tell_passed(start, end, end - start, GIVEN_UP)
        self._holes_changed = True

    def expire(self, start: int) -> None:
        """Skip and log unacked records below ``start``, the log's first offset."""
        floor = self.core.ack_floor
        count = self.core.skip_to(start)
        if floor < start:
            self._tell_passed(floor, start, count, "expired")

    def pass_missing(self, start: int, end: int, why: str) -> None:
        """Skip ``start .. end``, which has no readable records for the reason ``why``."""
        self._tell_passed(start, end, self.core.skip_damaged(start, end, why=why), why)

    def _tell_passed(self, start: int, end: int, count: int, why: str) -> None:
        """Log records that the subscription will not get, unless the range is empty or compacted."""
        if why not in _NO_LOSS:
            facts = {"partition": self.hosted.name, "subscription": self.core.name, "records": count}
            _log.warning("records are passed over", **facts, start=start, end=end, fact=why)

    @property
    def needs_dispatch(self) -> bool:
        """Return whether holes have changed or requested bytes have arrived since the last dispatch."""
        return self._holes_changed or self.bytes_arrived

    @property
    def bytes_arrived(self) -> bool:
        """Return whether bytes that the subscription waits for have arrived."""
        return any(
            pending is not None and pending.ready() for pending in (self.pending_new, self.pending_again)
        )

    def dispatch(self, now_ns: int, bytes_max: int) -> bool:
        """Send records to consumers, about ``bytes_max`` at most; return whether more can follow."""
        self._read_bytes = min(bytes_max, READ_CHUNK_BYTES)
        self._holes_changed = False
        if not self.links:
            # Even without consumers, records become dead letters when their deadline has passed.
            self.deadline_ns = self.core.tick(now_ns, self.hosted.high_watermark)
            return False
        core, end, rate, sent = self.core, self.hosted.core.high_watermark, self.rate, 0
        if self.hosted.dispatch_limits is not rate.limits:
            rate.follow(self.hosted.dispatch_limits, now_ns)
        if self.pending_again is not None or core.has_due(now_ns):
            sent = self._dispatch_again(now_ns, bytes_max)
        if sent < bytes_max and (self.pending_new is not None or core.wants_records):
            sent += self._dispatch_new(now_ns, bytes_max - sent)
        self.bytes_sent += sent
        self.deadline_ns = core.tick(now_ns, end)
        if rate.limited:
            next_ns = rate.next_ns(now_ns)
            if next_ns is not None and self._has_more():
                self.deadline_ns = min(next_ns, self.deadline_ns or next_ns)
        if self.pending_new is None and self.pending_again is None:
            return sent >= bytes_max
        return sent >= bytes_max or self.bytes_arrived

    def _has_more(self) -> bool:
        return self.core.next < self.hosted.high_watermark or self.core.explain(0) != "caught_up"

    def _dispatch_again(self, now_ns: int, bytes_max: int) -> int:
        """Send the redeliveries that are due; return the bytes sent."""
        sent = 0
        if self.pending_again is not None and not self.pending_again.ready():
            return 0
        allowed = self.rate.allowed(now_ns) if self.rate.limited else UNLIMITED
        self.pending_again = None
        while sent < bytes_max and allowed > 0 and self.pending_again is None:
            try:
                due = self.core.due(now_ns, min(DUE_RECORDS_PER_TURN, allowed))
            except FetchPending as pending:
                self.pending_again = pending
                break
            if not due:
                break
            allowed -= sum(grant.record_count for grant in due)
            sent += self._deliver_all(due, None)
        return sent

    def _dispatch_new(self, now_ns: int, bytes_max: int) -> int:
        """Send records that were never granted; return the bytes sent."""
        pending, self.pending_new = self.pending_new, None
        start = self.core.next
        if pending is not None and not pending.ready() and self._pending_next == start:
            self.pending_new = pending
            return 0
        if start >= self.hosted.core.high_watermark or (pending is not None and not self.core.wants_records):
            return 0
        sent = 0
        try:
            while sent < bytes_max:
                granted, size = self._grant_new(start, now_ns)
                sent += size
                before, start = start, self.core.next
                if start == before and not granted:
                    break
                if start >= self.hosted.core.high_watermark or not self.core.wants_records:
                    break
        except FetchPending as pending:
            self.pending_new, self._pending_next = pending, self.core.next
        return sent

    def _grant_new(self, start: int, now_ns: int) -> tuple[int, int]:
        """Grant and send records of the chunk at ``start``; return the number of grants and bytes."""
        core, rate = self.core, self.rate
        allowed = rate.allowed(now_ns) if rate.limited else UNLIMITED
        chunk = self._next_chunk(start) if allowed > 0 else None
        if chunk is None:
            return 0, 0
        if chunk.sparse:
            self._pass_missing(chunk)
        end = min(chunk.next_offset, self.hosted.core.high_watermark)
        if allowed < UNLIMITED:
            end = min(end, core.next + allowed)
        hashes = chunk.hashes if core.mode is _KEY_SHARED else None
        grants = core.grant(end, now_ns, hashes, chunk.first_offset, self._key_of)
        return len(grants), self._deliver_all(grants, chunk)

    def _next_chunk(self, start: int) -> Chunk | None:
        """Return the chunk at ``start``, the subscription's next offset.

        Offsets without readable records are skipped.  None if the next offset is then outside the chunk, or
        at an open hole.
        """
        try:
            chunk = self.hosted.chunk(start, self._read_bytes)
        except OffsetOutOfRange as error:
            self.expire(int(error.facts["start"]))
            return None
        if chunk.first_offset <= start < chunk.next_offset:
            return chunk
        if chunk.first_offset > start and chunk.hole_before == OPEN_HOLE:
            self.core.withhold(chunk.first_offset)
        elif chunk.first_offset > start:
            self.pass_missing(start, chunk.first_offset, chunk.hole_before)
        return chunk if chunk.first_offset <= self.core.next < chunk.next_offset else None

    def _pass_missing(self, chunk: Chunk) -> None:
        """Mark offsets that key compaction removed as acked, before a record of the chunk is granted."""
        missing = chunk.missing
        missing = missing[np.searchsorted(missing[:, 1], self.core.next, "right") :]
        if len(missing):
            self.core.skip(np.maximum(missing, self.core.next), "compacted")

    def _chunk_at(self, offset: int) -> Chunk | None:
        """Return the chunk at ``offset``; None if retention has removed it: then expire() was called."""
        try:
            return self.hosted.chunk(offset, self._read_bytes)
        except OffsetOutOfRange as error:
            self.expire(int(error.facts["start"]))
            return None

    def _key_of(self, offset: int) -> bytes:
        """Return the key of an unacked record; empty if the record has expired or is damaged."""
        try:
            chunk = self.hosted.chunk(offset)
        except OffsetOutOfRange:
            return b""
        return chunk.key(offset) if chunk.first_offset <= offset < chunk.next_offset else b""

    def _deliver_all(self, grants: list[Grant], chunk: Chunk | None) -> int:
        """Send grants in their order; return the bytes.

        If the bytes of one must be fetched first, it and all later ones are given back: later records of the
        same keys must not overtake it.
        """
        sent = 0
        for place, grant in enumerate(grants):
            size, missing = self._deliver(grant, chunk)
            sent += size
            if missing:
                for later in grants[place + 1 :]:
                    self.core.give_back(later, later.start)
                break
        return sent

    def _deliver(self, grant: Grant, chunk: Chunk | None) -> tuple[int, bool]:
        """Send a grant; return the bytes, and whether its rest was given back until its bytes are fetched."""
        link = self.links[grant.consumer_id]
        sent, missing = 0, False
        start = grant.start
        while start < grant.end:
            if chunk is None or not chunk.first_offset <= start < chunk.next_offset:
                try:
                    chunk = self._chunk_at(start)
                except FetchPending as pending:
                    self.pending_again = pending
                    self.core.give_back(grant, start)
                    missing = True
                    break
                if chunk is None:  # the record has expired since; the floor is the log's new start
                    start = min(max(self.core.settled_end, start + 1), grant.end)
                    continue
                if chunk.first_offset > start and chunk.hole_before == OPEN_HOLE:
                    break  # it is delivered again after its ack deadline
                if chunk.first_offset > start:  # damaged or compacted since: skip and log it
                    hole_start, start = start, min(chunk.first_offset, grant.end)
                    self._lose(grant, grant.within(hole_start, start), chunk.hole_before)
                    continue
                if chunk.next_offset <= start:
                    break  # not readable now: it is delivered again after its ack deadline
            end = min(grant.end, chunk.next_offset)
            sent += self._deliver_part(link, grant, chunk, start, end)
            start = end
        if self.rate.limited:
            self.rate.take(len(grant.within(grant.start, start)) if missing else grant.record_count, sent)
        if link.ready != (link.credit_bytes > 0 and link.session.writable):
            self.update_ready(link)
        return sent, missing

    def _deliver_part(self, link: ConsumerLink, grant: Grant, chunk: Chunk, start: int, end: int) -> int:
        """Send the grant's records ``start .. end``, which lie in this chunk; return the bytes sent."""
        if grant.offsets is None and not chunk.sparse:
            count = end - start
            whole = start <= chunk.first_offset and end >= chunk.next_offset
            parts: list[bytes | memoryview] = [chunk.data] if whole else chunk.cut(start, end)
        else:
            offsets = grant.within(start, end)
            held = chunk.held(offsets)
            if not held.all():  # compacted since they were granted
                self._lose(grant, offsets[~held], "compacted")
                offsets = offsets[held]
            if not len(offsets):
                return 0
            count, parts = len(offsets), chunk.pick(offsets)
        sent = link.deliver(parts, count, grant.redelivery_count)
        self.hosted.counters.add_out(count, sent, grant.redelivery_count)
        return sent

    def _lose(self, grant: Grant, offsets: Offsets, why: str) -> None:
        """Mark granted records without stored bytes as acked, and end their grant."""
        if len(offsets):
            lost = Grant(grant.consumer_id, int(offsets[0]), int(offsets[-1]) + 1, offsets, 0)
            self.core.give_back(lost, lost.start)
            self._tell_passed(lost.start, lost.end, len(offsets), why)
            self.core.skip(np.stack((offsets, offsets + 1), axis=1), why)

    @property
    def waits_for(self) -> DanubeError | None:
        """Return the fault for which the consumers get no records now; None without one."""
        if self.read_error is not None:
            return self.read_error
        for pending in (self.pending_new, self.pending_again):
            if pending is not None and pending.why and not pending.ready():
                return pending.cause or pending
        return None

    def tell_waiting(self) -> bool:
        """Report the reason of a wait, or its end, to the consumers; return False when it has ended."""
        reason = self.waits_for
        fetching = self.pending_new is not None or self.pending_again is not None
        if reason is None and fetching:
            return True  # the fetch runs without a known fault: the last report stays valid until it ends
        for link in self.links.values():
            link.tell_waiting(reason)
        return reason is not None

    def _pending_state(self) -> str:
        """Return why reading waits for the object store; empty if it does not wait."""
        pending = self.pending_new or self.pending_again
        if pending is None or pending.ready():
            return ""
        return f"waiting_for_store: {pending.why}" if pending.why else "waiting_for_store"

    def cursor_blob(self) -> bytes:
        """Return the cursor, encoded for the cursor file."""
        state: CursorState = self.core.cursor_state()
        return state.encode()

    def statistics(self, now_ns: int) -> dict[str, Any]:
        """Return figures of the subscription: its progress, its state and its consumers."""
        core = self.core
        return {
            **core.statistics(),
            "lag": self.hosted.lag_from(core.settled_end),
            "state": self._pending_state() or core.explain(now_ns),
            "consumer_names": names_of(self.links.values()),
            "dead_letter_error": self.dead_letter_error,
        }
