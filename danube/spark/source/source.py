"""``format("danube")``: Spark's data source for reading, and the door to the sinks for writing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructType

from danube.spark.failures import hinted
from danube.spark.history.decode import Decoder, Losses
from danube.spark.history.options import ReadOptions, read_options
from danube.spark.history.places import AnyPlace
from danube.spark.history.plan import Lost, Piece, Run, Selection, Split, pieces_of, plan_splits, refuse_lost
from danube.spark.history.reading import freeze_once, read_split, speak_up
from danube.spark.history.selecting import Catalogue, Known
from danube.spark.history.tail_runs import tail_runs
from danube.spark.source.schema import VALUE, check_requested, columns_of
from danube.spark.source.stream_plan import Range, cut_ranges, pieces_between
from danube.spark.source.typed_rows import TypedRows
from danube.spark.source.values import Schemas, find_schemas
from danube.spark.travelling import Travelling

if TYPE_CHECKING:
    import pyarrow as pa

    from danube.spark.history.offsets import Ends, PartitionKey


class SplitPartition(InputPartition):
    """One task's part of a plan, and the places that it is read from."""

    def __init__(self, split: Split, places: Sequence[AnyPlace]) -> None:
        super().__init__(None)
        self.split = split
        self.places = places


class DanubeDataSource(Travelling, DataSource):
    """Reads history from segments and objects, and writes through a broker."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self.given = dict(options)

    @classmethod
    def name(cls) -> str:
        return "danube"

    def schema(self) -> StructType:
        with hinted():
            return offered_columns(read_options(self.given, streaming=None))

    def reader(self, schema: StructType) -> DanubeReader:
        with hinted():
            return DanubeReader(read_options(self.given, streaming=False), schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802
        from danube.spark.source.stream import DanubeStreamReader

        with hinted():
            return DanubeStreamReader(read_options(self.given, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from danube.spark.sink.sink import arrow_writer

        with hinted():
            return arrow_writer(self.given, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        from danube.spark.sink.sink_stream import stream_writer

        with hinted():
            return stream_writer(self.given, schema, overwrite)


def offered_columns(options: ReadOptions, schemas: Schemas | None = None) -> StructType:
    """The columns of a read: those of every record, and the decoded value where that is asked for."""
    if schemas is None and options.decode:
        schemas = _schemas(options)
    value = None if schemas is None else from_arrow_type(schemas.target.value_type)
    return columns_of(options.include_attributes, value)


def _schemas(options: ReadOptions) -> Schemas | None:
    """By which schemas payloads are decoded; None where they stay bytes."""
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
    """What batch reads and streams have in common: a selection's splits, and reading one of them."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schemas = _schemas(options)
        self.columns = check_requested(schema, offered_columns(options, self.schemas))
        self.arrow_schema = to_arrow_schema(schema, timezone="UTC")

    def planned(
        self, catalogue: Catalogue, known: Sequence[Known], start: Ends, end: Ends
    ) -> list[InputPartition]:
        """Tasks for the records between ``start`` and ``end``; raises where some are lost."""
        planned: list[tuple[Selection, list[Piece]]] = []
        tails: list[Split] = []
        lost: list[Lost] = []
        for part in known:
            first, last = start[part.key], end[part.key]
            if first >= last:
                continue
            stored = min(last, max(part.stored_end, first))
            selection = part.selection(first, stored)
            pieces, gone = pieces_of(selection)
            planned.append((selection, pieces))
            lost += gone
            if stored < last:
                tails += [Split((run,)) for run in tail_runs(part, stored, last, lost)]
        if self.options.fail_on_data_loss:
            refuse_lost(lost)
        options = self.options
        splits = plan_splits(planned, split_bytes=options.split_bytes, splits_min=options.partitions_min)
        return [SplitPartition(split, catalogue.places) for split in splits + tails]

    def planned_anew(
        self, catalogue: Catalogue, known: Sequence[Known], start: Ends, end: Ends
    ) -> list[InputPartition]:
        """Like planned(), and each task has the same records whenever the same ends are planned again."""
        pieces: dict[PartitionKey, list[Piece]] = {}
        tails: dict[PartitionKey, list[Run]] = {}
        lost: list[Lost] = []
        for part in known:
            first, last = start[part.key], end[part.key]
            if first >= last:
                continue
            stored = min(last, max(part.stored_end, first))
            pieces[part.key], gone = pieces_of(part.selection(first, stored))
            lost += gone
            if stored < last:
                tails[part.key] = tail_runs(part, stored, last, lost)
        if self.options.fail_on_data_loss:
            refuse_lost(lost)
        holes = {part.key: part.holes for part in known}
        tasks = cut_ranges(start, end, holes, self.options.partitions_min, self.options.split_bytes)
        splits = [
            Split(tuple(run for one in task for run in _runs_of(one, pieces.get(one.key, ()), tails)))
            for task in tasks
        ]
        return [SplitPartition(split, catalogue.places) for split in splits]

    def read_records(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One task's records; nothing for the empty partition that Spark makes of an empty plan."""
        if not isinstance(partition, SplitPartition):
            return
        speak_up()
        allowed = not self.options.fail_on_data_loss
        typed = None
        if self.schemas is not None and VALUE in self.columns:
            typed = TypedRows(self.schemas, self.columns, self.arrow_schema, allowed=allowed)
        decoder = Decoder(self.columns if typed is None else typed.needed)
        losses = Losses(allowed=allowed)
        found = read_split(partition.split, partition.places, decoder, losses, self.options.broker)
        with hinted():
            yield from found if typed is None else map(typed.take, found)
        freeze_once()


def _runs_of(one: Range, pieces: Sequence[Piece], tails: Mapping[PartitionKey, list[Run]]) -> Iterator[Run]:
    """How a range is read: what places hold of it, and what only the broker has."""
    found = tuple(pieces_between(pieces, one.start, one.end))
    if found:
        yield Run(*one.key, found[0].start, found[-1].end, found)
    for tail in tails.get(one.key, ()):
        start, end = max(one.start, tail.start), min(one.end, tail.end)
        if start < end:
            yield tail._replace(start=start, end=end)


class DanubeReader(PlanReader, DataSourceReader):
    """A batch read.  Spark plans it once: a DataFrame is a snapshot of what was there at its first action."""

    def partitions(self) -> Sequence[InputPartition]:
        with hinted():
            return self._partitions()

    def _partitions(self) -> Sequence[InputPartition]:
        catalogue = Catalogue(self.options)
        try:
            known = catalogue.partitions(unsynced=True)
            start = catalogue.resolve(self.options.starting, known, ending=False)
            end = catalogue.resolve(self.options.ending, known, ending=True)
            return self.planned(catalogue, known, start, end)
        finally:
            catalogue.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.read_records(partition)
