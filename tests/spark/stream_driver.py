"""A driver to be killed: lines of text files into a topic, one file a batch, all that there are."""

from __future__ import annotations

import sys

from danube.spark.env import prepare_environment, settings_of


def main(source: str, checkpoint: str, broker: str, topic: str, warehouse: str) -> None:
    prepare_environment()
    from pyspark.sql import SparkSession

    from tests.spark.sink_source import SinkOnly

    builder = SparkSession.builder.master("local[2]")
    chosen = {"spark.ui.enabled": "false", "spark.sql.warehouse.dir": warehouse, **settings_of({})}
    for key, value in chosen.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(SinkOnly)
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(source)
    # Small batches, one at a time: a kill finds some of them sent and others not.
    query = (
        lines.selectExpr("value AS payload")
        .writeStream.format("danube.sink")
        .options(broker=broker, topic=topic, partitions="2", batchBytes="1KiB", maxInFlightBytes="1KiB")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
