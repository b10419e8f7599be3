"""Rows that a partition holds from an earlier attempt: repeated rows must equal the stored ones.

A task skips as many rows as its partition has of it.  That is correct only if they are the same rows in the
same order.  The mark of every batch (:mod:`danube.core.batch.row_mark`) is a digest of the task's rows up to
its end, and the last batch of a completed task is marked as last.  So a job with other rows, or with another
division into tasks, fails before it sends a row behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from danube.client.blocking.client import Client
from danube.core.batch.columns import BatchView, scan
from danube.errors import Conflict, OffsetOutOfRange
from danube.spark.history.tail import Tail

HINT: Final = "run it with the rows and partitions that it had, or under another jobId"


class StoredRows(NamedTuple):
    """The mark of a batch: rows before number ``end`` have the ``digest``; ``last``: there are no others."""

    end: int
    digest: str
    last: bool


def stored_rows(client: Client, partition: str, batches: Sequence[tuple[int, int, int]]) -> StoredRows | None:
    """Return a producer's stored rows, by the newest of its stored ``batches`` that is still there.

    ``batches`` are as :class:`danube.core.protocol.native.ProducerOpened` tells them.  None if they have
    all expired, or were compacted away.
    """
    tail = Tail.over(client)
    for first, offset, count in reversed(batches):
        try:
            for octets, _ in tail.read(partition, offset, offset + count):
                for position in scan(octets.data, 0, len(octets)).positions.tolist():
                    view = BatchView(octets.data, position=position)
                    mark = view.row_mark
                    if mark is not None and view.header.base_offset == offset:
                        return StoredRows(first + count, mark.digest, mark.last)
        except OffsetOutOfRange:
            return None
    return None


def check_passed(stored: StoredRows, digest: str, name: str, partition: str) -> None:
    """Raise Conflict where the rows before ``stored.end`` that came are not those that are stored."""
    if digest != stored.digest:
        raise Conflict(
            f"rows 0 to {stored.end} of {name} are not those that {partition} holds",
            why="an earlier attempt had other rows, in another order, or cut into other tasks",
            hint=HINT,
        )


def check_more(stored: StoredRows, name: str, partition: str) -> None:
    """Raise Conflict where an earlier attempt was done, and rows come behind its last one."""
    if stored.last:
        raise Conflict(
            f"{name} was done with the {stored.end} rows that {partition} holds, and has more now",
            why="an earlier attempt had fewer rows, or was cut into more tasks",
            hint=HINT,
        )


def check_all_came(stored: int, came: int, name: str, partition: str) -> None:
    """Raise Conflict where an earlier attempt has stored more rows than this one has."""
    if came < stored:
        raise Conflict(
            f"{partition} holds {stored} rows of {name}, which has only {came} now",
            why="an earlier attempt had other rows, or was cut into other tasks",
            hint=HINT,
        )
