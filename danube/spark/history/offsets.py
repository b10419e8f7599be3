"""Offsets of a stream, as Spark keeps them in its checkpoint.

    {"/default/orders": {"id": 7, "history": "5f2c...", "offsets": {"0": 23, "1": 5}}}

Spark compares these as text, so topics and partitions are always in the same order.  ``id`` is the topic's
id: a topic that was deleted and made again under its old name has another one, and other records.
``history`` is the one that the offsets were found in (:mod:`danube.spark.history.selecting`); it is left
out for the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from danube.errors import InvalidArgument
from danube.wal.segments.holes import Hole


class PartitionKey(NamedTuple):
    """A partition of a topic as it is now."""

    topic: str
    topic_id: int
    partition: int


Ends = dict[PartitionKey, int]


def pack(ends: Mapping[PartitionKey, int], history_id: str = "") -> dict[str, Any]:
    """Plain values for JSON, in a stable order."""
    packed: dict[str, Any] = {}
    named = {"history": history_id} if history_id else {}
    for key, offset in sorted(ends.items()):
        topic = packed.setdefault(key.topic, {"id": key.topic_id, **named, "offsets": {}})
        topic["offsets"][str(key.partition)] = offset
    return packed


def history_in(packed: Mapping[str, Any]) -> str:
    """The history that the offsets were found in; "" for the first one."""
    return next((str(facts.get("history", "")) for facts in packed.values() if "history" in facts), "")


def unpack(packed: Mapping[str, Any]) -> Ends:
    """Decode the result of pack(); raises InvalidArgument for a checkpoint of another source."""
    try:
        return {
            PartitionKey(topic, int(facts["id"]), int(partition)): int(offset)
            for topic, facts in packed.items()
            for partition, offset in facts["offsets"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidArgument(
            "the checkpoint holds offsets of another source",
            why=f"they are {str(packed)[:200]}",
            hint="use a checkpoint directory of its own for each query",
        ) from None


def limited(
    start: Mapping[PartitionKey, int],
    end: Mapping[PartitionKey, int],
    records_max: int,
    holes: Mapping[PartitionKey, Sequence[Hole]] = MappingProxyType({}),
) -> Ends:
    """``end``, but at most ``records_max`` records behind ``start``, shared out by how much is waiting.

    At least one record is let through where any waits, and every partition comes to its turn.  Offsets in
    ``holes``, by offset, are no records.
    """
    waiting = {
        key: max(0, records_between(start.get(key, offset), offset, holes.get(key, ())))
        for key, offset in end.items()
    }
    total = sum(waiting.values())
    if total <= records_max:
        return dict(end)
    chosen: Ends = {}
    left = records_max
    for key, count in sorted(waiting.items(), key=lambda item: (item[1], item[0])):
        share = min(count, left, -(-records_max * count // total))
        chosen[key] = end[key] if share == count else offset_behind(start[key], share, holes.get(key, ()))
        left -= share
    return chosen


def records_between(start: int, end: int, holes: Sequence[Hole]) -> int:
    """How many offsets of ``start .. end`` lie in no hole."""
    return end - start - sum(max(0, min(hole.end, end) - max(hole.start, start)) for hole in holes)


def offset_behind(start: int, count: int, holes: Sequence[Hole]) -> int:
    """The offset behind ``count`` records from ``start`` on, and behind the hole that follows them."""
    at = start
    for hole in holes:
        if hole.end <= at:
            continue
        if at + count < hole.start:
            break
        count -= max(0, hole.start - at)
        at = hole.end
    return at + count


def behind(start: Mapping[PartitionKey, int], end: Mapping[PartitionKey, int]) -> Iterable[PartitionKey]:
    """The partitions that have something between ``start`` and ``end``, in order."""
    return [key for key in sorted(end) if start.get(key, 0) < end[key]]
