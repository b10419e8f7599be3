"""History as a DataFrame whose rows Spark copies once: planned by a data source, read by ``mapInArrow``.

Spark puts a projection over every scan of rows, which copies each row a second time.  It puts none over the
result of ``mapInArrow``. So the data source here yields the splits of the plan, one in each task, and the
function behind it reads them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import BinaryType, StructField, StructType

from danube.errors import ConfigInvalid, InvalidArgument
from danube.spark.failures import hinted
from danube.spark.history.options import read_options
from danube.spark.history.places import AnyPlace
from danube.spark.history.plan import Split
from danube.spark.history.selecting import places_of
from danube.spark.source.source import DanubeDataSource, DanubeReader
from danube.spark.source.splits import PlanReader, SplitPartition, offered_columns
from danube.spark.travelling import Travelling, covered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class SplitSource(DanubeDataSource):
    """The splits of a batch read, as a column of bytes."""

    @classmethod
    def name(cls) -> str:
        return "danube.splits"

    def schema(self) -> StructType:
        return StructType([StructField("split", BinaryType())])

    def reader(self, schema: StructType) -> SplitReader:
        with hinted():
            return SplitReader(read_options(self.given, streaming=False), StructType([]))


class SplitReader(DanubeReader):
    """Yields the planned splits and reads no record."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, SplitPartition):
            split = pa.array([msgspec.msgpack.encode(partition.split)], pa.binary())
            yield pa.RecordBatch.from_arrays([split], names=["split"])


class RowsOfSplits(Travelling):
    """Work of a task on the splits that reach it."""

    def __init__(self, reader: PlanReader, places: Sequence[AnyPlace]) -> None:
        self._reader = reader
        self._places = places

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for octets in batch.column(0).to_pylist():
                split = msgspec.msgpack.decode(octets, type=Split)
                yield from self._reader.read_records(SplitPartition(split, self._places))


def read_frame(
    spark: SparkSession, given: Mapping[str, Any], columns: Sequence[str] | None = None
) -> DataFrame:
    """See :func:`danube.spark.read`."""
    if importlib.util.find_spec("pandas") is None:
        raise ConfigInvalid(
            "history cannot be read in bulk", why="Spark's mapInArrow wants pandas, which is not installed",
            hint="pip install 'danube-broker[spark]', or read with format('danube')",
        )  # fmt: skip
    words = {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()
    }
    with hinted():
        options = read_options(words, streaming=False)
        schema = _chosen(offered_columns(options), columns)
        rows = RowsOfSplits(PlanReader(options, schema), places_of(options))
    spark.dataSource.register(covered(SplitSource))
    splits = spark.read.format(SplitSource.name()).options(**words).load()
    return splits.mapInArrow(rows, schema)


def _chosen(offered: StructType, columns: Sequence[str] | None) -> StructType:
    if columns is None:
        return offered
    known = {field.name: field for field in offered.fields}
    unknown = [name for name in columns if name not in known]
    if unknown or not columns:
        why = f"there is no column {', '.join(unknown)}" if unknown else "none is named"
        raise InvalidArgument("these columns cannot be read", why=why, hint=f"columns are {', '.join(known)}")
    return StructType([known[name] for name in columns])
