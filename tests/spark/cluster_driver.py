"""A driver that spark-submit starts: what a session finds there, and reads, checks and exports with it.

spark-submit ... cluster_driver.py STORAGE TOPIC LAKE ANSWER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import functions

from danube.spark import session
from danube.spark.jobs.export import export
from danube.spark.jobs.findings import Report
from danube.spark.jobs.validate import validate


def main() -> None:
    storage, topic, lake, answer = sys.argv[1:]
    spark = session("cluster")
    frame = spark.read.format("danube").option("storage", storage).option("topic", topic)
    rows = frame.option("minPartitions", 4).load()
    found = rows.agg(functions.count("offset"), functions.sum("offset")).collect()[0]
    told: dict[str, Any] = {
        "master": spark.conf.get("spark.master"),
        "speculation": spark.conf.get("spark.speculation"),
        "time_zone": spark.conf.get("spark.sql.session.timeZone"),
        "java_options": spark.conf.get("spark.executor.defaultJavaOptions"),
        "rows": found[0],
        "sum": found[1],
        "validate": counts(validate.run({"storage": storage}, spark)),
        "export": counts(export.run({"storage": storage, "topic": topic, "target": lake}, spark)),
    }
    spark.stop()
    Path(answer).write_text(json.dumps(told))


def counts(report: Report) -> dict[str, int]:
    return {**report.counts, "findings": len(report.findings)}


if __name__ == "__main__":
    main()
