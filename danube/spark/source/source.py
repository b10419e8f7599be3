"""``format("danube")``: Spark's data source for reading, and the door to the sinks for writing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from danube.spark.failures import hinted
from danube.spark.history.options import read_options
from danube.spark.history.selecting import Catalogue
from danube.spark.source.splits import PlanReader, offered_columns
from danube.spark.travelling import Travelling

if TYPE_CHECKING:
    import pyarrow as pa


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
        from danube.spark.sink.sink import stream_writer

        with hinted():
            return stream_writer(self.given, schema, overwrite)


class DanubeReader(PlanReader, DataSourceReader):
    """A batch read.  Spark plans it once: a DataFrame is a snapshot of its first action."""

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
