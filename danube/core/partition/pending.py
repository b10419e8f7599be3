"""Pending data, which is only on this host: of a partition, of a topic, of all topics.

Workers measure it for the metrics, which add it up by topic and for the host.  A number that is not known is
left out; it is never reported too small.  A topic has no number while one of its partitions is not open yet,
or while an owner did not answer; then the host has no number either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

SECOND_US: Final = 1_000_000


class Pending(NamedTuple):
    """Bytes of batches that are not known to be off this host, and the append time of their oldest record.

    ``oldest_us`` is microseconds of 1970, and 0 if nothing is pending.
    """

    size_bytes: int = 0
    oldest_us: int = 0

    def joined(self, other: Pending) -> Pending:
        """Add two pending amounts."""
        times = [time_us for time_us in (self.oldest_us, other.oldest_us) if time_us]
        return Pending(self.size_bytes + other.size_bytes, min(times, default=0))

    def age_s(self, now_us: int) -> float:
        """Return the age of the oldest pending record; a clock that was set back gives 0."""
        return max(0, now_us - self.oldest_us) / SECOND_US if self.oldest_us else 0.0


NOTHING = Pending()


def together(parts: Iterable[Pending]) -> Pending:
    """All of them."""
    found = NOTHING
    for part in parts:
        found = found.joined(part)
    return found


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


def host_of(answers: Collection[Measured], worker_count: int) -> HostMeasured:
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
    total = together(told.values()) if complete and tiered and not unknown else None
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
    if any(row.unknown for row in rows):
        return None
    return together(Pending(row.pending_bytes, row.oldest_us) for row in rows)
