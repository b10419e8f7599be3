"""Daemon of Spark's Python workers that imports what they need once, before it forks them.

``python -m tests.spark.daemon KIND`` stands for ``python -m pyspark.daemon KIND``.  Most kinds of workers
serve one question and end, so each would import again: to plan a read, to read, to write, to commit.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

from pyspark import daemon

NEEDS_NOTHING: Final = "pyspark.sql.worker.lookup_data_sources"
IMPORTED: Final = (
    "danube.spark.history.reading",
    "danube.spark.history.selecting",
    "danube.spark.jobs.spark_runner",
    "danube.spark.sink.sink",
    "danube.spark.source.source",
    "danube.spark.source.stream",
    "pandas",
    "pyarrow",
    "pyspark.sql.pandas.serializers",
)

if __name__ == "__main__":
    if sys.argv[1:] != [NEEDS_NOTHING]:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a fork takes no thread along
        for name in IMPORTED:
            importlib.import_module(name)
    daemon.manager()
