"""A driver to be killed: lines of text files into a topic, one file a batch, all that there are."""

from __future__ import annotations

import sys
from typing import Any

from danube.spark import session
from tests.spark.drivers import QUICK


def started(spark: Any, source: str, checkpoint: str, broker: str, topic: str) -> Any:
    """The query, begun or gone on with."""
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(source)
    # Small batches, one at a time: a kill finds some of them sent and others not.
    return (
        lines.selectExpr("value AS payload")
        .writeStream.format("danube")
        .options(broker=broker, topic=topic, partitions="2", batchBytes="1KiB", maxInFlightBytes="1KiB")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )


if __name__ == "__main__":
    *words, warehouse = sys.argv[1:]
    spark = session("killed", "local[1]", **QUICK, **{"spark.sql.warehouse.dir": warehouse})
    started(spark, *words).awaitTermination()
    spark.stop()
