"""A data source for the tests of the sink: rows whose reading fails once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition


class Failing(DataSource):
    """``format("failing")``: numbers in partitions; the first attempt of each reads only ``until`` rows.

    ``fate``: ``raise``, or ``kill`` for a worker that dies on the spot.
    """

    @classmethod
    def name(cls) -> str:
        return "failing"

    def schema(self) -> str:
        return "payload string, key string"

    def reader(self, schema: Any) -> DataSourceReader:
        return _FailingReader(
            *(int(self.options[name]) for name in ("partitions", "rows", "until")), self.options["fate"]
        )


class _FailingReader(DataSourceReader):
    def __init__(self, partitions: int, rows: int, until: int, fate: str) -> None:
        self._partitions, self._rows, self._until, self._fate = partitions, rows, until, fate

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        task = TaskContext.get()
        first = task is not None and task.attemptNumber() == 0
        for start in range(0, self._rows, 500):
            if first and start >= self._until:
                if self._fate == "kill":
                    os._exit(1)
                raise ValueError("this attempt was meant to fail")
            numbers = range(start, min(start + 500, self._rows))
            names = [f"{partition.value}-{number}" for number in numbers]
            keys = [f"k{number % 11}" for number in numbers]
            yield pyarrow.RecordBatch.from_pydict({"payload": names, "key": keys})
