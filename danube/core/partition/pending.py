"""Pending data as workers measured it for the metrics, added up by topic and for the host.

A number that is not known is left out; it is never reported too small.  A topic has no number while one of
its partitions is not open yet, or while an owner did not answer; then the host has no number either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from danube.core.partition.exposure import NOTHING, Pending

OTHER: Final = "other"  # no topic is called so: their names begin with a slash


class TopicRow(msgspec.Struct, array_like=True):
    """The partitions of one topic, or of all topics without a name, that one worker owns."""

    topic: str
    partition_count: int  # of the whole topic, wherever they are; 0 for OTHER
    unknown: int = 0  # owned here, stored on disk, and not open
    pending_bytes: int = 0
    oldest_us: int = 0


class Measured(msgspec.Struct):
    """The answer of one worker."""

    topic_count: int  # of the broker
    tiered: bool
    rows: list[TopicRow]


@dataclass(frozen=True, slots=True)
class HostMeasured:
    """The answers of all workers together; None is not known."""

    topic_count: int | None
    tiered: bool | None
    unknown_partitions: int
    pending: Pending | None
    pending_by_topic: dict[str, Pending]


def together(answers: Collection[Measured], worker_count: int) -> HostMeasured:
    """``answers`` of as many of the ``worker_count`` workers as answered."""
    complete = len(answers) == worker_count
    rows: dict[str, list[TopicRow]] = {}
    for answer in answers:
        for row in answer.rows:
            rows.setdefault(row.topic, []).append(row)
    unknown = sum(row.unknown for found in rows.values() for row in found)
    tiered = any(answer.tiered for answer in answers)
    by_topic = {topic: _pending(found) for topic, found in rows.items() if complete or _alone(found)}
    told = {topic: pending for topic, pending in by_topic.items() if pending is not None}
    total: Pending | None = None
    if complete and tiered and not unknown:
        total = NOTHING
        for pending in told.values():
            total = total.joined(pending)
    return HostMeasured(
        topic_count=max((answer.topic_count for answer in answers), default=None),
        tiered=tiered if answers else None,
        unknown_partitions=unknown,
        pending=total,
        pending_by_topic=told,
    )


def _alone(rows: Sequence[TopicRow]) -> bool:
    """Return whether every topic of ``rows`` has one partition, so that no other worker owns a part of it."""
    return all(row.partition_count == 1 for row in rows)


def _pending(rows: Sequence[TopicRow]) -> Pending | None:
    found = NOTHING
    for row in rows:
        if row.unknown:
            return None
        found = found.joined(Pending(row.pending_bytes, row.oldest_us))
    return found
