"""Subscriptions of a non-reliable topic: batches wait in memory; when full, the oldest are dropped.

A batch token is the :class:`~danube.broker.partition.chunks.Chunk` that holds one published batch, shared by
all subscriptions of the partition.
"""

from __future__ import annotations

from typing import Any

from danube.broker.partition.chunks import Chunk
from danube.broker.partition.consumers import ConsumerLink, ReadPartition, names_of
from danube.core.dispatch.grants import Mode
from danube.core.dispatch.lossy import LossyGrant, LossySubscription
from danube.core.dispatch.rate import DispatchRate


class LossyHost:
    """Host of a non-reliable subscription with its consumers; its state is lost with the worker."""

    def __init__(self, hosted: ReadPartition, core: LossySubscription) -> None:
        self.hosted = hosted
        self.core = core
        self.links: dict[int, ConsumerLink] = {}
        self.rate = DispatchRate()
        self.temporary = False  # gone with its last consumer

    def update_ready(self, link: ConsumerLink) -> None:
        """Tell the core whether this consumer can take more bytes now."""
        ready = link.credit_bytes > 0 and link.session.writable
        if ready != link.ready:
            link.ready = ready
            self.core.set_ready(link.consumer_id, ready)

    def offer(self, chunk: Chunk) -> None:
        """Queue one published batch; beyond the limits the oldest batches are dropped and counted."""
        hashes = chunk.hashes if self.core.mode is Mode.KEY_SHARED else None
        dropped = self.core.offer(
            chunk, chunk.first_offset, chunk.next_offset - chunk.first_offset, len(chunk.data), hashes=hashes
        )
        if dropped:
            self.hosted.counters.add("dropped_records", dropped)

    def count_dropped(self, record_count: int) -> None:
        """Count records published while no consumer is connected; this subscription never gets them."""
        self.core.count_dropped(record_count)
        self.hosted.counters.add("dropped_records", record_count)

    def dispatch(self, now_ns: int) -> int | None:
        """Send the batches that consumers have credit for; return when to do it again, if a rate delays some.

        The queue is bounded still: what does not fit meanwhile is dropped, as for any slow consumer.
        """
        rate = self.rate
        if self.hosted.dispatch_limits is not rate.limits:
            rate.follow(self.hosted.dispatch_limits, now_ns)
        if not rate.limited:
            self._send(self.core.grant())
            return None
        while self.core.has_more:
            allowed = rate.allowed(now_ns)
            if allowed < 1:
                return rate.next_ns(now_ns)
            records, size_bytes = self._send(self.core.grant(allowed))
            if not records:  # what is queued is for consumers without credit
                break
            rate.take(records, size_bytes)
        rate.give_back(now_ns)
        return None

    def _send(self, grants: list[LossyGrant]) -> tuple[int, int]:
        """Send what was granted; return the records and bytes."""
        records = size_bytes = 0
        for chunk, consumer_id, indexes in grants:
            link = self.links[consumer_id]
            if indexes is None:
                parts, count = [chunk.data], chunk.next_offset - chunk.first_offset
            else:
                parts, count = chunk.pick(chunk.first_offset + indexes), len(indexes)
            sent = link.deliver(parts, count, 0)
            self.hosted.counters.add_out(count, sent, 0)
            self.update_ready(link)
            records, size_bytes = records + count, size_bytes + sent
        return records, size_bytes

    def statistics(self, now_ns: int) -> dict[str, Any]:
        """Return figures of the subscription and its consumers."""
        return {
            **self.core.statistics(),
            "consumer_names": names_of(self.links.values()),
        }
