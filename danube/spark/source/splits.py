"""The tasks of a read: planned over the content of each place, cut, and read one by one.

Which records each task of a micro-batch has follows from its ends and options alone.  Spark repeats a batch
that was not committed, and a sink counts the rows of each task.  Meanwhile segments may have been uploaded,
merged or removed.  So the place of records decides how a task reads them, never which ones.  Batches are cut
by offset, in steps of at most RECORDS records, and small partitions share a task.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructType

from danube.spark.failures import hinted
from danube.spark.history.decode import Decoder, Losses
from danube.spark.history.offsets import Ends, PartitionKey, offset_behind, records_between
from danube.spark.history.options import ReadOptions
from danube.spark.history.places import AnyPlace
from danube.spark.history.plan import (
    PIECE_BYTES_MAX,
    SPLIT_BYTES,
    SPLITS_MAX,
    Lost,
    Piece,
    Run,
    Split,
    cut,
    plan_splits,
    refuse_lost,
)
from danube.spark.history.reading import enable_logging, freeze_heap, read_split
from danube.spark.history.selecting import Catalogue, Held, Known, held
from danube.spark.source.schema import check_requested, columns_of
from danube.spark.source.value_types import VALUE
from danube.spark.source.values import Schemas, TypedRows, find_schemas
from danube.spark.travelling import Travelling
from danube.wal.segments.holes import Hole

if TYPE_CHECKING:
    import pyarrow as pa

RECORDS: Final = 262_144  # of a task at the default of splitBytes: as if a record had 512 bytes


class SplitPartition(InputPartition):
    """One task's part of a plan, and the places that it is read from."""

    def __init__(self, split: Split, places: Sequence[AnyPlace]) -> None:
        super().__init__(None)
        self.split = split
        self.places = places


def offered_columns(options: ReadOptions, schemas: Schemas | None = None) -> StructType:
    """The columns of a read: those of every record, and the decoded value where that is asked for."""
    if schemas is None and options.decode:
        schemas = _schemas(options)
    value = None if schemas is None else from_arrow_type(schemas.target.value_type)
    return columns_of(options.include_attributes, value)


def _schemas(options: ReadOptions) -> Schemas | None:
    """By which schemas payloads are decoded; None if they stay bytes."""
    if not options.decode:
        return None
    catalogue = Catalogue(options)
    try:
        named = options.decode.lower() != "true"  # else the topics say which schema
        topics = [topic for topic, _, _ in catalogue.topics(under_way=named)]
        return find_schemas(catalogue.metadata(), topics, options.decode)
    finally:
        catalogue.close()


class PlanReader(Travelling):
    """Common part of batch reads and streams: a selection's splits, and reading one of them."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schemas = _schemas(options)
        self.columns = check_requested(schema, offered_columns(options, self.schemas))
        self.arrow_schema = to_arrow_schema(schema, timezone="UTC")

    def planned(
        self, catalogue: Catalogue, known: Sequence[Known], start: Ends, end: Ends
    ) -> list[InputPartition]:
        """Tasks for the records between ``start`` and ``end``; raises where some are lost."""
        held_by_key, options = self._held(known, start, end), self.options
        planned = [(one.selection, one.pieces) for one in held_by_key.values()]
        tails = [Split((run,)) for one in held_by_key.values() for run in one.tails]
        splits = plan_splits(planned, split_bytes=options.split_bytes, splits_min=options.partitions_min)
        return [SplitPartition(split, catalogue.places) for split in splits + tails]

    def planned_anew(
        self, catalogue: Catalogue, known: Sequence[Known], start: Ends, end: Ends
    ) -> list[InputPartition]:
        """Like planned(), and each task has the same records whenever the same ends are planned again."""
        held_by_key = self._held(known, start, end)
        holes = {part.key: part.holes for part in known}
        tasks = cut_ranges(start, end, holes, self.options.partitions_min, self.options.split_bytes)
        splits = [  # a deleted topic has no place any more
            Split(tuple(run for one in task if (at := held_by_key.get(one.key)) for run in _runs_of(one, at)))
            for task in tasks
        ]
        return [SplitPartition(split, catalogue.places) for split in splits]

    def _held(self, known: Sequence[Known], start: Ends, end: Ends) -> dict[PartitionKey, Held]:
        lost: list[Lost] = []
        found = {
            part.key: held(part, start[part.key], end[part.key], lost)
            for part in known
            if start[part.key] < end[part.key]
        }
        if self.options.fail_on_data_loss:
            refuse_lost(lost)
        return found

    def read_records(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One task's records; nothing for the empty partition that Spark makes of an empty plan."""
        if not isinstance(partition, SplitPartition):
            return
        enable_logging()
        allowed = not self.options.fail_on_data_loss
        typed = None
        if self.schemas is not None and VALUE in self.columns:
            typed = TypedRows(self.schemas, self.columns, self.arrow_schema, allowed=allowed)
        decoder = Decoder(self.columns if typed is None else typed.needed)
        losses = Losses(allowed=allowed)
        options = self.options
        found = read_split(partition.split, partition.places, decoder, losses, options.broker, options.access)
        with hinted():
            yield from found if typed is None else map(typed.take, found)
        freeze_heap()


def _runs_of(one: Range, known: Held) -> Iterator[Run]:
    """Return the runs of a range: the parts that places hold, and those that only the broker has."""
    found = tuple(pieces_between(known.pieces, one.start, one.end))
    if found:
        yield Run(*one.key, found[0].start, found[-1].end, found)
    for tail in known.tails:
        start, end = max(one.start, tail.start), min(one.end, tail.end)
        if start < end:
            yield tail._replace(start=start, end=end)


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
    """Return the ranges that each task reads.

    ``holes`` are offsets that no record ever had.  A hole is made before any record behind it, so every plan
    of a batch across it includes it.
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
