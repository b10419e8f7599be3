"""Rows that a partition holds from an earlier attempt: what comes again must be what is stored.

A task passes over as many rows as its partition has of it.  That is right only while the rows are the same in
the same order.  So the last stored batches are read back, and the rows with their numbers are compared: a job
that comes with other rows, or cut into other tasks, fails before it sends anything behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow
import pyarrow.compute

from danube.client.blocking_client import Client
from danube.errors import Conflict, OffsetOutOfRange
from danube.spark.decode import Decoder, Losses
from danube.spark.tail import Tail

_RECORDS_MAX: Final = 65_536  # from the first to the last that is read back, others between them included
HINT: Final = "run it with the rows and partitions that it had, or under another jobId"


class StoredRows(NamedTuple):
    """Rows from number ``first`` on, as one batch of the log has them."""

    first: int
    payloads: pyarrow.Array
    keys: pyarrow.Array


def read_back(
    client: Client, topic: str, partition: str, index: int, batches: Sequence[tuple[int, int, int]]
) -> list[StoredRows]:
    """The last stored batches of a producer; none where they have expired.

    ``batches`` are as :class:`danube.core.wire.ProducerOpened` tells them.
    """
    wanted = list(batches)
    while len(wanted) > 1 and wanted[-1][1] + wanted[-1][2] - wanted[0][1] > _RECORDS_MAX:
        del wanted[0]
    if not wanted:
        return []
    start, end = wanted[0][1], wanted[-1][1] + wanted[-1][2]
    decoder, losses = Decoder(("offset", "payload", "key")), Losses(allowed=True)
    found: list[pyarrow.RecordBatch] = []
    try:
        for octets, first in Tail.over(client).read(partition, start, end):
            found += decoder.decode_batches(octets, topic, index, first, end, losses)
    except OffsetOutOfRange:
        return []
    if not found:
        return []
    table = pyarrow.Table.from_batches(found).combine_chunks()
    return [one for batch in wanted if (one := _of_batch(table, *batch)) is not None]


def _of_batch(table: pyarrow.Table, sequence: int, offset: int, count: int) -> StoredRows | None:
    """None where not all of the batch is there any more."""
    offsets = table.column("offset")
    inside = pyarrow.compute.and_(
        pyarrow.compute.greater_equal(offsets, offset), pyarrow.compute.less(offsets, offset + count)
    )
    rows = table.filter(inside)
    if rows.num_rows != count:
        return None
    return StoredRows(sequence, _octets(rows.column("payload")), _octets(rows.column("key")))


def check_passed(
    stored: Sequence[StoredRows], first: int, rows: pyarrow.RecordBatch, name: str, partition: str
) -> None:
    """Raise Conflict where ``rows``, numbered from ``first``, are not what is stored under their numbers."""
    for one in stored:
        start, end = max(first, one.first), min(first + rows.num_rows, one.first + len(one.payloads))
        if start >= end:
            continue
        came = rows.slice(start - first, end - start)
        held = slice(start - one.first, end - one.first)
        place = came.schema.get_field_index("key")
        keys = pyarrow.nulls(came.num_rows) if place < 0 else came.column(place)
        same = _octets(came.column("payload")).equals(one.payloads[held])
        if not same or not _octets(keys).equals(one.keys[held]):
            raise Conflict(
                f"rows {start} to {end} of {name} are not those that {partition} holds",
                why="an earlier attempt had other rows, in another order, or cut into other tasks",
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


def _octets(values: pyarrow.Array | pyarrow.ChunkedArray) -> pyarrow.Array:
    if isinstance(values, pyarrow.ChunkedArray):
        values = values.combine_chunks()
    return values.cast(pyarrow.large_binary()).fill_null(b"")
