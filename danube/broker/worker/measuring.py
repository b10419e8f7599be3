"""A worker's part of the metrics: by topic, the data that is only on this host.

The metrics process requests it.  The answer is computed in slices of some partitions, so that many topics do
not block the loop.  Topics beyond the limit are summed in one row.  All workers choose the same topics, by
their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from danube.broker.links import Frame
from danube.core.partition.pending import OTHER, Measured, TopicRow
from danube.core.placement.workers import owner_of

if TYPE_CHECKING:
    from danube.broker.partition.hosted import HostedTier
    from danube.core.metadata.commands import TopicRecord
    from danube.core.metadata.machine import Metadata

PARTITIONS_AT_ONCE: Final = 128


class Measuring:
    """Answers the metrics process for one worker; all methods run on the worker's loop.

    ``send`` sends a frame to the metrics process.  ``tiers`` returns the tiers of all open partitions, or
    None if storage is local.  ``unopened`` returns the topics of partitions on disk that are not opened yet,
    one entry for each partition.
    """

    def __init__(
        self,
        place: tuple[int, int],
        metadata: Callable[[], Metadata],
        tiers: Callable[[], list[HostedTier] | None],
        unopened: Callable[[], list[TopicRecord]],
        call_soon: Callable[..., object],
        send: Callable[..., None],
    ) -> None:
        self._index, self._workers = place  # this worker's number, and how many there are
        self._metadata = metadata
        self._tiers = tiers
        self._unopened = unopened
        self._call_soon = call_soon
        self._send = send
        self._asked = -1  # id of the last request; an older one is dropped
        self._named: frozenset[int] = frozenset()
        self._spoken_for: list[TopicRecord] = []
        self._chosen_for = (-1, -1)

    def on_frame(self, frame: Frame) -> None:
        """Begin an answer to a request of the metrics process; it replaces an unfinished one."""
        if frame["kind"] == "measure":
            self._asked = frame["id"]
            self._go_on(self._asked, self._measure(frame["topics_max"]))

    def _go_on(self, question: int, measuring: Iterator[Measured | None]) -> None:
        if question != self._asked:
            return
        answer = next(measuring)
        if answer is None:
            self._call_soon(self._go_on, question, measuring)
        else:
            blob = msgspec.msgpack.encode(answer)
            self._send("measured", id=question, worker=self._index, answer=blob)

    def _measure(self, topics_max: int) -> Iterator[Measured | None]:
        """Yield None after each slice of the work, then the answer."""
        tiers = self._tiers()
        rows: dict[int, TopicRow] = {}
        if tiers is not None:
            self._choose(topics_max)
            for number, _ in enumerate(self._counted_into(rows, tiers), 1):
                if number % PARTITIONS_AT_ONCE == 0:
                    yield None
        yield Measured(self._metadata().topic_count, tiers is not None, list(rows.values()))

    def _counted_into(self, rows: dict[int, TopicRow], tiers: list[HostedTier]) -> Iterator[None]:
        """Add up all rows, with one step for each topic and partition."""
        for record in self._spoken_for:  # a topic without data has a row, too
            self._row(rows, record)
            yield
        for tier in tiers:
            pending = tier.pending()
            row = self._row(rows, tier.hosted.record)
            row.pending_bytes += pending.size_bytes
            row.oldest_us = min(filter(None, (row.oldest_us, pending.oldest_us)), default=0)
            yield
        for record in self._unopened():
            self._row(rows, record).unknown += 1
            yield

    def _choose(self, topics_max: int) -> None:
        """Choose the topics with rows of their own, and those of them that this worker reports if empty."""
        metadata = self._metadata()
        if self._chosen_for == (metadata.version, topics_max):
            return
        self._chosen_for = (metadata.version, topics_max)
        named = metadata.oldest_topics(topics_max)
        self._named = frozenset(named)
        mine = [one for one in named if owner_of(one, 0, self._workers) == self._index]
        found = map(metadata.topic_with_id, mine)
        self._spoken_for = [record for record in found if record is not None and record.policy.reliable]

    def _row(self, rows: dict[int, TopicRow], record: TopicRecord) -> TopicRow:
        key = record.topic_id if record.topic_id in self._named else 0
        row = rows.get(key)
        if row is None:
            row = TopicRow(record.topic, max(1, record.partitions)) if key else TopicRow(OTHER, 0)
            rows[key] = row
        return row
