"""A streaming query in a process of its own, which a test kills: reads a topic into Parquet files.

python -m tests.spark.stream_reader STORAGE TOPIC CHECKPOINT OUT
"""

from __future__ import annotations

import sys
from typing import Any

from danube.spark import session
from tests.spark.drivers import QUICK


def started(spark: Any, storage: str, topic: str, checkpoint: str, out: str, *, once: bool = False) -> Any:
    """The query, begun or gone on with; ``once``: up to what is there now, in larger steps."""
    reader = spark.readStream.format("danube").option("storage", storage).option("topic", topic)
    frame = (
        reader.option("startingOffsets", "earliest")
        .option("maxRecordsPerTrigger", "4000" if once else "400")
        .load()
    )
    writer = frame.writeStream.format("parquet").option("checkpointLocation", checkpoint).option("path", out)
    trigger = {"availableNow": True} if once else {"processingTime": "50 milliseconds"}
    return writer.trigger(**trigger).start()


if __name__ == "__main__":
    started(session("stream", "local[1]", **QUICK), *sys.argv[1:]).awaitTermination()
