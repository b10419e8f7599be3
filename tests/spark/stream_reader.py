"""A streaming query in a process of its own, which a test kills: reads a topic into Parquet files.

python -m tests.spark.stream_reader STORAGE TOPIC CHECKPOINT OUT [BROKER]
"""

from __future__ import annotations

import sys

from danube.spark import session


def main() -> None:
    storage, topic, checkpoint, out, *broker = sys.argv[1:]
    quick = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    spark = session("stream", "local[2]", spark_ui_enabled=False, **quick)
    reader = spark.readStream.format("danube").option("storage", storage).option("topic", topic)
    if broker:
        reader = reader.option("broker", broker[0])
    frame = reader.option("startingOffsets", "earliest").option("maxRecordsPerTrigger", "400").load()
    writer = frame.writeStream.format("parquet").option("checkpointLocation", checkpoint).option("path", out)
    writer.trigger(processingTime="50 milliseconds").start().awaitTermination()


if __name__ == "__main__":
    main()
