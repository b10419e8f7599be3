"""A job's tasks as a Spark data source: its partitions are the tasks, its rows are the results.

This way needs neither RDDs nor pandas, and works under Connect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, ClassVar, Final

import pyarrow
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from danube.spark.history.reading import enable_logging, freeze_heap
from danube.spark.travelling import Travelling, covered

WAVE_TASKS_PER_SLOT: Final = 16  # tasks between two checks of the results

_numbers = count(1)
Work = Callable[[Any], bytes]


class JobTask(InputPartition):
    """One task and its number."""

    def __init__(self, number: int, task: Any) -> None:
        super().__init__(number)
        self.number = number
        self.task = task


class JobReader(Travelling, DataSourceReader):
    """Runs one task where Spark puts it."""

    def __init__(self, work: Work, tasks: Sequence[tuple[int, Any]]) -> None:
        self._work = work
        self._tasks = tasks

    def partitions(self) -> list[InputPartition]:
        return [JobTask(number, task) for number, task in self._tasks]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        if not isinstance(partition, JobTask):
            return
        enable_logging()
        result = self._work(partition.task)
        freeze_heap()
        columns = [
            pyarrow.array([partition.number], pyarrow.int64()),
            pyarrow.array([result], pyarrow.binary()),
        ]
        yield pyarrow.RecordBatch.from_arrays(columns, names=["number", "result"])


class JobSource(Travelling, DataSource):
    """Made anew for each run, because the registered class carries the tasks."""

    source_name: ClassVar[str] = "danube.job"
    work: ClassVar[Any] = None
    tasks: ClassVar[Sequence[tuple[int, Any]]] = ()

    @classmethod
    def name(cls) -> str:
        return cls.source_name

    def schema(self) -> str:
        return "number long, result binary"

    def reader(self, schema: Any) -> DataSourceReader:
        return JobReader(type(self).work, type(self).tasks)


class SparkRunner:
    """Tasks run in the executors of a session, in waves, so that progress can be told."""

    def __init__(self, spark: SparkSession, slots: int = 0) -> None:
        self._spark = spark
        self.slots = slots or _slots_of(spark)

    def run(self, work: Work, tasks: Sequence[Any]) -> Iterator[tuple[int, bytes]]:
        numbered = list(enumerate(tasks))
        step = self.slots * WAVE_TASKS_PER_SLOT
        name = f"danube.job-{next(_numbers)}"
        for first in range(0, len(numbered), step):
            wave = numbered[first : first + step]
            members = {"source_name": name, "work": staticmethod(work), "tasks": wave}
            self._spark.dataSource.register(covered(type("JobSource", (JobSource,), members)))
            rows = self._spark.read.format(name).load().collect()
            for row in rows:
                yield int(row["number"]), bytes(row["result"])


def _slots_of(spark: SparkSession) -> int:
    """The default parallelism, which a session tells without its context (Connect has none)."""
    text = spark.conf.get("spark.default.parallelism", None) or ""
    if text.isdigit():
        return max(1, int(text))
    try:
        return max(1, int(spark.sparkContext.defaultParallelism))
    except Exception:  # Connect: there is no context on this side
        return 4
