"""Danube's history in Spark: a data source, a session that suits it, and jobs over whole topics.

    from danube.spark import session
    spark = session()
    spark.read.format("danube").option("storage", "/var/lib/danube").option("topic", "/default/orders").load()

The modules that plan, fetch and decode need neither Spark nor Java; pyspark is imported by
:func:`session`, :func:`register` and the modules ``source`` and ``stream`` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "session"]


def session(name: str = "danube", where: str = "", **settings: Any) -> SparkSession:
    """A Spark session with the settings that Danube's source is measured with and the source registered.

    ``where`` is a master (``local[2]``, ``spark://host:7077``); without it the one that spark-submit or the
    installation names counts, else all cores of this machine.  ``settings`` are Spark's own, with ``_`` for
    ``.``: ``spark_ui_enabled=False``.  A Java runtime is looked for on this machine and among pip's
    packages; ConfigInvalid where there is none.
    """
    from danube.spark.env import make_session

    return make_session(name, where, settings)


def register(spark: SparkSession) -> None:
    """Make ``format("danube")`` known to a session that was made elsewhere."""
    from danube.spark.source import DanubeDataSource

    spark.dataSource.register(DanubeDataSource)
