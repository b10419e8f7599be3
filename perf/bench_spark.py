"""Measures reading history with Spark, beside Parquet of the same rows in the same run.

    python -m perf.bench_spark [--megabytes 1024] [--sizes 1024,100] [--rounds 3] [--keep DIRECTORY]

One JSON line for each payload size: gigabytes of segment bytes a second, from the page cache, through
``local[2]`` into the JVM (sink ``noop``) with all checksums on, also those of Parquet's pages; the best of
the rounds.  What begins with ``read`` is :func:`danube.spark.read`, without it ``format("danube")``.
Parquet is neither compressed nor has dictionaries, for payloads repeat here as they would not elsewhere.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from danube.limits import MIB
from danube.spark import read, session
from perf import machine
from perf.spark_data import Shape, fill_partition, make_directory

TOPIC = "/default/bench"
BATCH_BYTES = 512 * 1024  # what Danube's client gathers
SEGMENT_BYTES = 128 * MIB
PAIR = "key binary, payload binary"
NARROW = "offset long, publish_time timestamp"
SIX = "topic string, partition int, offset long, publish_time timestamp, key binary, payload binary"


def best(rounds: int, run: Callable[[], Any]) -> float:
    """Seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def drained(frame: Any) -> None:
    """Bring every row into the JVM and throw it away."""
    frame.write.format("noop").mode("overwrite").save()


def columns_of(frame: Any, schema: str) -> Any:
    return frame.select(*(column.split()[0] for column in schema.split(", ")))


def measure(spark: Any, root: Path, payload_bytes: int, megabytes: int, rounds: int) -> dict[str, Any]:
    data = root / f"data-{payload_bytes}"
    shape = Shape(payload_bytes, max(1, BATCH_BYTES // (payload_bytes + 8)))
    identity = make_directory(data, TOPIC)
    segment_bytes = min(SEGMENT_BYTES, megabytes * MIB // 2)
    segments = megabytes * MIB // segment_bytes
    rows = fill_partition(data, identity, shape, segments=segments, segment_bytes=segment_bytes)
    size = sum(path.stat().st_size for path in data.glob("partitions/*/*.seg"))

    def frame(schema: str = "") -> Any:
        reader = spark.read.format("danube").option("storage", str(data)).option("topic", TOPIC)
        return (reader.schema(schema) if schema else reader).load()

    def bulk(schema: str = "") -> Any:
        names = [column.split()[0] for column in schema.split(", ")] if schema else None
        return read(spark, {"storage": data, "topic": TOPIC}, names)

    path = str(root / f"parquet-{payload_bytes}")
    frame().write.options(**{"compression": "none", "parquet.enable.dictionary": "false"}).parquet(path)

    def parquet() -> Any:
        return spark.read.option("parquet.page.verify-checksum.enabled", "true").parquet(path)

    found = {
        "all_columns": best(rounds, lambda: drained(frame())),
        "six_columns": best(rounds, lambda: drained(frame(SIX))),
        "key_payload": best(rounds, lambda: drained(frame(PAIR))),
        "two_columns": best(rounds, lambda: drained(frame(NARROW))),
        "read_all_columns": best(rounds, lambda: drained(bulk())),
        "read_six_columns": best(rounds, lambda: drained(bulk(SIX))),
        "read_key_payload": best(rounds, lambda: drained(bulk(PAIR))),
        "parquet": best(rounds, lambda: drained(parquet())),
        "parquet_six": best(rounds, lambda: drained(columns_of(parquet(), SIX))),
        "parquet_key_payload": best(rounds, lambda: drained(columns_of(parquet(), PAIR))),
    }
    figures = {f"{name}_gb_s": round(size / seconds / 1e9, 3) for name, seconds in found.items()}
    return {
        "payload_bytes": payload_bytes,
        "rows": rows,
        "segment_bytes": size,
        "segments": segments,
        **figures,
    }


def main(words: list[str] | None = None, spark: Any = None) -> None:
    """``spark`` is a session that is there already and is left running."""
    parser = argparse.ArgumentParser(
        prog="perf.bench_spark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--sizes", default="1024,100")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--keep", type=Path, default=None)
    options = parser.parse_args(words)
    root = options.keep or Path(tempfile.mkdtemp(prefix="danube-bench-spark-"))
    own = None if spark is not None else session("danube-bench", options.master, **{
        "spark.ui.enabled": False, "spark.sql.shuffle.partitions": 1, "spark.driver.memory": "2g",
        "spark.log.level": "ERROR",
    })  # fmt: skip
    try:
        print(json.dumps({"machine": machine.fingerprint(root)}), flush=True)
        for size in options.sizes.split(","):
            figures = measure(spark or own, root, int(size), options.megabytes, options.rounds)
            print(json.dumps(figures), flush=True)
    finally:
        if own is not None:
            own.stop()
        if options.keep is None:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
