"""A driver to be killed: lines of text files into a topic, one file a batch, all that there are."""

from __future__ import annotations

import sys

from danube.spark import session


def main(source: str, checkpoint: str, broker: str, topic: str, warehouse: str) -> None:
    spark = session("killed", "local[2]", **{"spark.ui.enabled": False, "spark.sql.warehouse.dir": warehouse})
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(source)
    # Small batches, one at a time: a kill finds some of them sent and others not.
    query = (
        lines.selectExpr("value AS payload")
        .writeStream.format("danube")
        .options(broker=broker, topic=topic, partitions="2", batchBytes="1KiB", maxInFlightBytes="1KiB")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
