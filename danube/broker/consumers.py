"""Consumers of a partition at its owner: the link to a connection and the two kinds of delivery.

A host joins a pure subscription (:mod:`danube.core.subscription`, :mod:`danube.core.lossy`) to the
sessions of its consumers: the core decides who gets which offsets, the host turns them into frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from danube.broker.chunks import Chunk
from danube.core.cursor import CursorState
from danube.core.grants import Grant, Mode
from danube.core.subscription import Subscription
from danube.core.wire import deliver_header
from danube.errors import OffsetOutOfRange

if TYPE_CHECKING:
    from danube.broker.api import Session
    from danube.broker.hosted import HostedPartition

DUE_RECORDS_PER_TURN = 1024
TURN_BYTES = 4 * 1024 * 1024


class ConsumerLink:
    """A consumer handle that is open on this worker, with its byte credit."""

    __slots__ = (
        "consumer_id",
        "credit_bytes",
        "handle",
        "hosted",
        "name",
        "ready",
        "session",
        "subscription",
    )

    def __init__(
        self,
        session: Session,
        handle: int,
        consumer_id: int,
        name: str,
        hosted: HostedPartition,
        subscription: str,
    ) -> None:
        self.session = session
        self.handle = handle
        self.consumer_id = consumer_id
        self.name = name
        self.hosted = hosted
        self.subscription = subscription
        self.credit_bytes = 0
        self.ready = True

    def deliver(
        self, parts: list[bytes | memoryview], record_count: int, redelivery_count: int, chunk: Chunk
    ) -> int:
        """Send one DELIVER frame and take its bytes from the credit; return the bytes."""
        size = sum(map(len, parts))
        head = deliver_header(self.handle, size, redelivery_count, record_count)
        if parts[0] is chunk.data:
            self.session.send_chunk(head, chunk)
        else:
            self.session.send(head, *parts)
        self.credit_bytes -= size
        return size


class SubscriptionHost:
    """A reliable subscription with its consumers."""

    def __init__(self, hosted: HostedPartition, core: Subscription) -> None:
        self.hosted = hosted
        self.core = core
        self.links: dict[int, ConsumerLink] = {}
        self.stored_version = -1
        self.deadline_ns: int | None = None

    def update_ready(self, link: ConsumerLink) -> None:
        """Tell the core whether this consumer can take more bytes now."""
        ready = link.credit_bytes > 0 and link.session.writable
        if ready != link.ready:
            link.ready = ready
            self.core.set_ready(link.consumer_id, ready)

    def dispatch(self, now_ns: int) -> bool:
        """Send what may be sent, at most about TURN_BYTES; return whether more could follow."""
        if not self.links:
            return False
        sent = 0
        while sent < TURN_BYTES:
            due = self.core.due(now_ns, DUE_RECORDS_PER_TURN)
            if not due:
                break
            sent += sum(self._deliver(grant, None) for grant in due)
        core, hosted = self.core, self.hosted
        while sent < TURN_BYTES and core.wants_records and core.next < hosted.high_watermark:
            chunk = self._next_chunk()
            if chunk is None:
                continue
            hashes = chunk.hashes if core.mode is Mode.KEY_SHARED else None
            end = min(chunk.next_offset, hosted.high_watermark)
            before = core.next
            grants = core.grant(end, now_ns, hashes, chunk.first_offset, self._key_of)
            sent += sum(self._deliver(grant, chunk) for grant in grants)
            if not grants and core.next == before:
                break
        self.deadline_ns = core.tick(now_ns)
        return sent >= TURN_BYTES

    def _next_chunk(self) -> Chunk | None:
        """The chunk at ``core.next``; None after the place moved over expired or damaged records."""
        core = self.core
        try:
            chunk = self.hosted.chunk(core.next)
        except OffsetOutOfRange as error:
            core.skip_to(int(error.facts["start"]))
            return None
        if chunk.first_offset > core.next:
            core.skip_damaged(core.next, chunk.first_offset)
        return chunk if chunk.next_offset > chunk.first_offset else None

    def _key_of(self, offset: int) -> bytes:
        return self.hosted.chunk(offset).key(offset)

    def _deliver(self, grant: Grant, chunk: Chunk | None) -> int:
        link = self.links[grant.consumer_id]
        sent = 0
        start = grant.start
        while start < grant.end:
            if chunk is None or not chunk.first_offset <= start < chunk.next_offset:
                chunk = self.hosted.chunk(start)
                if chunk.first_offset > start:  # damaged since it was granted: never served, counted
                    start = min(chunk.first_offset, grant.end)
                    self.core.skip_damaged(grant.start, start)
                    continue
            end = min(grant.end, chunk.next_offset)
            if grant.offsets is None:
                parts, count = chunk.cut(start, end), end - start
            else:
                low, high = np.searchsorted(grant.offsets, (start, end))
                picked = grant.offsets[low:high]
                parts, count = (chunk.pick(picked), len(picked)) if len(picked) else ([], 0)
            if parts:
                sent += link.deliver(parts, count, grant.redelivery_count, chunk)
            start = end
        self.hosted.counters.add_out(grant.record_count, sent, grant.redelivery_count)
        self.update_ready(link)
        return sent

    def cursor_blob(self) -> bytes:
        state: CursorState = self.core.cursor_state()
        return state.encode()

    def statistics(self, now_ns: int) -> dict[str, Any]:
        core = self.core
        return {
            **core.statistics(),
            "lag": self.hosted.high_watermark - core.ack_floor,
            "state": core.explain(now_ns),
            "consumer_names": [link.name for link in self.links.values()],
        }
