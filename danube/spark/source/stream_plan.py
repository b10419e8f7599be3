"""The tasks of a micro-batch: which records each of them has follows from the batch's ends and options alone.

Spark repeats a batch that was not committed, and a sink counts the rows of each task.  Meanwhile segments may
have been uploaded, merged or removed; so where records lie decides how a task reads them, and never which.
Batches are cut by offset, in steps of at most RECORDS records, and small partitions share a task.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from danube.spark.history.offsets import PartitionKey, offset_behind, records_between
from danube.spark.history.plan import PIECE_BYTES_MAX, SPLIT_BYTES, SPLITS_MAX, Piece, cut
from danube.wal.segments.holes import Hole

RECORDS: Final = 262_144  # of a task at the default of splitBytes: as if a record had 512 bytes


class Range(NamedTuple):
    """Records ``start .. end`` of a partition."""

    key: PartitionKey
    start: int
    end: int


def cut_ranges(
    start: Mapping[PartitionKey, int],
    end: Mapping[PartitionKey, int],
    holes: Mapping[PartitionKey, Sequence[Hole]],
    splits_min: int = 0,
    split_bytes: int = SPLIT_BYTES,
) -> list[list[Range]]:
    """What each task reads.

    ``holes`` are offsets that no record ever had; they are made before anything behind them, so a batch
    that reaches over one knows it each time.
    """
    waiting = [
        (key, first, last, records_between(first, last, holes.get(key, ())))
        for key, last in sorted(end.items())
        if (first := start.get(key, last)) < last
    ]
    total = sum(count for *_, count in waiting)
    step = max(1, RECORDS * split_bytes // SPLIT_BYTES)
    step = min(step, max(1, -(-total // splits_min))) if splits_min > 0 else step
    step = max(step, -(-total // SPLITS_MAX))
    tasks: list[list[Range]] = []
    room = 0
    for key, first, last, count in waiting:
        at = first
        while True:
            if room == 0:
                tasks.append([])
                room = step
            taken = min(count, room)
            count, room = count - taken, room - taken
            stop = last if not count else offset_behind(at, taken, holes.get(key, ()))
            tasks[-1].append(Range(key, at, stop))
            at = stop
            if not count:
                break
    return tasks


def pieces_between(pieces: Sequence[Piece], start: int, end: int) -> Iterator[Piece]:
    """The pieces' records ``start .. end``, each piece small enough for a read."""
    for number in range(bisect_right(pieces, start, key=lambda piece: piece.end), len(pieces)):
        piece = pieces[number]
        first, last = max(piece.start, start), min(piece.end, end)
        if first >= last:
            return
        octets = max(1, piece.bytes * (last - first) // (piece.end - piece.start))
        yield from cut(piece._replace(start=first, end=last, bytes=octets), PIECE_BYTES_MAX)
