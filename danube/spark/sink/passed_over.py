"""Rows that a partition holds from an earlier attempt: repeated rows must equal the stored ones.

A task skips as many rows as its partition has of it.  That is correct only if they are the same rows in the
same order.  The mark of every batch (:mod:`danube.core.batch.row_mark`) is a digest of the task's rows up to
its end, and the last batch of a completed task is marked as last.  So a job with other rows, or with another
division into tasks, fails before it sends a row behind them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from danube.client.blocking.client import Client
from danube.core.batch.columns import BatchView, scan
from danube.core.batch.row_mark import read_mark
from danube.errors import Conflict, InvalidArgument, OffsetOutOfRange, OperationTimeout
from danube.spark.history.tail import Tail, asked

_STORED_S: Final = 30.0
_ASK_S: Final = 0.02
HINT: Final = "run it with the rows and partitions that it had, or under another jobId"


class StoredRows(NamedTuple):
    """The mark of a batch: rows before number ``end`` have the ``digest``; ``last``: there are no others."""

    end: int
    digest: str
    last: bool


def stored_rows(client: Client, partition: str, batches: Sequence[tuple[int, int, int]]) -> StoredRows | None:
    """Return a producer's stored rows, by the newest of its stored ``batches`` that is still there.

    ``batches`` are as :class:`danube.core.protocol.native.ProducerOpened` tells them.  None if they have
    all expired, or were compacted away.  The right to produce is enough.
    """
    for first, offset, count in reversed(batches):
        try:
            mark = read_mark(_mark_at(client, partition, offset))
        except InvalidArgument:  # from a broker of before
            return _read_rows(client, partition, batches)
        if mark is not None:
            return StoredRows(first + count, mark.digest, mark.last)
    return None


def _mark_at(client: Client, partition: str, offset: int) -> str:
    """Return the mark of the batch at ``offset``, once consumers may see it; empty if it is gone."""
    deadline_s = time.monotonic() + _STORED_S
    while True:
        told = asked(client, "row_mark", partition, _STORED_S, offset=offset)
        if not told["waiting"]:
            return str(told["mark"])
        if time.monotonic() >= deadline_s:
            raise OperationTimeout(
                f"records of {partition} at offset {offset} are not acknowledged",
                why=f"{_STORED_S:.0f} s have passed",
                hint="look at the broker with `danube status`",
            )
        time.sleep(_ASK_S)


def _read_rows(client: Client, partition: str, batches: Sequence[tuple[int, int, int]]) -> StoredRows | None:
    """Return stored rows by reading the batches, which needs the right to consume."""
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
