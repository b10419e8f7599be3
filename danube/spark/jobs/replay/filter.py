"""A replay of chosen records: the lanes as rows of Spark, an SQL expression over them, and a writer per lane.

A lane is one partition of the DataFrame, and a filter moves no row to another, so the order stays and the
writer's partition number is the lane's.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from danube.errors import InvalidArgument, InvariantBroken
from danube.host import files
from danube.spark.history.reading import freeze_heap
from danube.spark.jobs.replay.plan import Lane, read_lane
from danube.spark.jobs.replay.target import LaneReport, Target, columns_kept, write_lane
from danube.spark.jobs.spark_runner import JobTask
from danube.spark.sink.sink import current_task
from danube.spark.source.schema import check_requested, columns_of

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame, SparkSession


class LaneReader(DataSourceReader):
    """Reads each lane by a task of its own."""

    def __init__(self, lanes: Sequence[Lane], columns: list[str]) -> None:
        self._lanes = lanes
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        return [JobTask(lane.range.number, lane) for lane in self._lanes]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        if isinstance(partition, JobTask):
            yield from read_lane(partition.task, self._columns)
            freeze_heap()


@dataclass
class LaneDone(WriterCommitMessage):
    """Report of a task."""

    report: LaneReport


class LaneWriter(DataSourceArrowWriter):
    """Writes each lane's rows to the target; the reports are put into a file for the driver."""

    def __init__(self, lanes: Sequence[Lane], target: Target, answer: str) -> None:
        self._ranges = [lane.range for lane in lanes]
        self._target = target
        self._answer = answer

    def write(self, iterator: Iterator[RecordBatch]) -> LaneDone:
        number = current_task().partitionId()
        return LaneDone(write_lane(iterator, self._ranges[number], self._target))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        reports = [each.report for each in messages if isinstance(each, LaneDone)]
        files.replace_durably(Path(self._answer), msgspec.json.encode(reports))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave written records in place: the next run passes over them."""


class ReplaySource(DataSource):
    """Made anew for each replay, because the registered class carries the lanes."""

    source_name: ClassVar[str] = "danube.replay"
    lanes: ClassVar[Sequence[Lane]] = ()
    target: ClassVar[Target | None] = None
    answer: ClassVar[str] = ""

    @classmethod
    def name(cls) -> str:
        return cls.source_name

    def schema(self) -> StructType:
        return columns_of()

    def reader(self, schema: StructType) -> DataSourceReader:
        return LaneReader(type(self).lanes, check_requested(schema, columns_of()))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        target = type(self).target
        if target is None:
            raise InvariantBroken("a dry run writes nothing")
        return LaneWriter(type(self).lanes, target, type(self).answer)


def _registered(spark: SparkSession, **members: Any) -> str:
    name = f"danube.replay-{uuid.uuid4().hex}"
    spark.dataSource.register(type("ReplaySource", (ReplaySource,), {"source_name": name, **members}))
    return name


def chosen(spark: SparkSession, name: str, where: str, kept: Sequence[str]) -> DataFrame:
    """The rows that the expression is true for; InvalidArgument if it is no expression over them.

    Only the columns that are kept or that the expression may mean are read: each costs time in the JVM.
    """
    words = {word.lower() for word in re.findall(r"\w+", where)}
    offered = columns_of()
    fields = [one for one in offered.fields if one.name in kept or one.name in words]
    try:
        return spark.read.format(name).schema(StructType(fields)).load().filter(where)
    except AnalysisException as error:
        raise InvalidArgument(
            "where cannot be evaluated",
            why=str(error).partition("\n")[0],
            hint=f"columns are {', '.join(offered.names)}",
        ) from None


def replay_chosen(
    spark: SparkSession, lanes: Sequence[Lane], target: Target, where: str, scratch: Path
) -> list[LaneReport]:
    """Write the lanes' chosen rows; ``scratch`` is a directory of the driver."""
    answer = scratch / "reports.json"
    name = _registered(spark, lanes=list(lanes), target=target, answer=str(answer))
    chosen(spark, name, where, columns_kept(target)).write.format(name).mode("append").save()
    return msgspec.json.decode(answer.read_bytes(), type=list[LaneReport])


def count_chosen(spark: SparkSession, lanes: Sequence[Lane], where: str) -> dict[int, int]:
    """How many rows of each partition the expression is true for."""
    name = _registered(spark, lanes=list(lanes))
    rows = chosen(spark, name, where, ["partition"]).groupBy("partition").count().collect()
    return {int(row["partition"]): int(row["count"]) for row in rows}
