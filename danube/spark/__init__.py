"""Danube's history in Spark: a data source, a session that suits it, and jobs over whole topics.

    from danube.spark import session
    spark = session()
    spark.read.format("danube").option("storage", "/var/lib/danube").option("topic", "/default/orders").load()

Planning, fetching and decoding need neither Spark nor Java; pyspark is imported by :func:`session`,
:func:`read`, :func:`register`, the folders ``source`` and ``sink``, and the job that exports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from danube.spark.submit import JOBS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["read", "register", "session"]


def __getattr__(name: str) -> Any:
    """The jobs as modules, imported on first use: ``from danube.spark import validate``."""
    if name in JOBS:
        return import_module(f"danube.spark.jobs.{name}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def session(name: str = "danube", where: str = "", **settings: Any) -> SparkSession:
    """A Spark session with the settings that Danube's source is measured with and the source registered.

    ``where`` is a master (``local[2]``, ``spark://host:7077``); without it the one that spark-submit or the
    installation names counts, else all cores of this machine.  ``settings`` are Spark's own, with ``_`` for
    ``.``: ``spark_ui_enabled=False``.  A Java runtime is looked for on this machine and among pip's
    packages; ConfigInvalid if there is none.
    """
    from danube.spark.env import make_session

    spark = make_session(name, where, settings)
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Make ``format("danube")`` known to a session that was made elsewhere."""
    from danube.spark.source.source import DanubeDataSource
    from danube.spark.travelling import covered

    spark.dataSource.register(covered(DanubeDataSource))


def read(spark: SparkSession, options: Mapping[str, Any], columns: Sequence[str] | None = None) -> DataFrame:
    """The rows of ``format("danube")`` with the same ``options``, at up to twice its speed.

    ``columns`` are names; without them a frame has all, and reads all: Spark cannot tell this reader which
    of them a query uses.  InvalidArgument for a column or an option that there is not; ConfigInvalid if
    pandas is missing, which Spark wants for this.
    """
    from danube.spark.source.frame import read_frame

    return read_frame(spark, options, columns)
