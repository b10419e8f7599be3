"""Rows of Spark: reading history, the jobs on a store, and a replay.

Segments are in the page cache, the session is ``local[2]`` with all checksums on, also those of Parquet's
pages.  Parquet is neither compressed nor has dictionaries, because payloads repeat here as nowhere else.
What is exported is on disk (fsync) when the time ends, by either way; TMPDIR=/dev/shm leaves the disk out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from danube import sync
from danube.core.batch.checksum import crc32c
from danube.limits import GIB, MIB
from perf.turns import Bench, Plan, Skipped, timed
from tests.broker_process import BrokerProcess
from tests.spark.segments import TOPIC, Shape, fill_partition, make_directory, make_store

BATCH_BYTES = 512 * 1024  # what Danube's client gathers
SEGMENT_BYTES = 128 * MIB
KEY_PAYLOAD = "key binary, payload binary"
READ_GB_S_MIN = {1_024: 1.0, 100: 0.5}
LANES = 2


def spark_session(bench: Bench) -> Any:
    """A session for this comparison; raises Skipped."""
    try:
        from danube.spark import session
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed: pip install 'danube-broker[spark]'") from None
    settings = {
        "spark.ui.enabled": False, "spark.sql.shuffle.partitions": 1, "spark.driver.memory": "2g",
        "spark.log.level": "ERROR",
    }  # fmt: skip
    spark = session("danube-bench", "local[2]", **settings)
    bench.callback(spark.stop)
    return spark


def gb_s(size: int, run: Callable[[], Any]) -> float:
    """Gigabytes a second of one call that works through ``size`` bytes."""
    return float(f"{size / timed(run) / 1e9:.3g}")


def drained(frame: Any) -> None:
    """Bring every row into the JVM and throw it away."""
    frame.write.format("noop").mode("overwrite").save()


def names_of(schema: str) -> list[str]:
    return [column.split()[0] for column in schema.split(", ")]


def read_history(bench: Bench) -> Plan:
    """All columns through ``danube.spark.read``; ``format_*`` is format("danube"), others choose columns."""
    spark, settings = spark_session(bench), bench.settings
    from danube.spark import read

    data, path = settings.directory / "data", str(settings.directory / "parquet")
    total = settings.scaled(GIB, 2 * MIB)
    segment_bytes = min(SEGMENT_BYTES, total // 2)
    shape = Shape(settings.size, max(1, BATCH_BYTES // (settings.size + 8)))
    identity = make_directory(data)
    rows = fill_partition(data, identity, shape, segments=total // segment_bytes, segment_bytes=segment_bytes)
    size = sum(file.stat().st_size for file in data.glob("partitions/*/*.seg"))

    def by_format(schema: str = "") -> Any:
        reader = spark.read.format("danube").option("storage", str(data)).option("topic", TOPIC)
        return (reader.schema(schema) if schema else reader).load()

    def by_read(schema: str = "") -> Any:
        return read(spark, {"storage": data, "topic": TOPIC}, names_of(schema) if schema else None)

    def parquet(schema: str = "") -> Any:
        frame = spark.read.option("parquet.page.verify-checksum.enabled", "true").parquet(path)
        return frame.select(*names_of(schema)) if schema else frame

    def side(way: Callable[..., Any], name: str) -> dict[str, float]:
        found = {f"{name}_key_payload": gb_s(size, lambda: drained(way(KEY_PAYLOAD)))}
        return {"value": gb_s(size, lambda: drained(way())), **found}

    def danube() -> dict[str, float]:
        formatted = side(by_format, "format")
        formatted["format_all"] = formatted.pop("value")
        return {**formatted, **side(by_read, "read")}

    by_format().write.options(**{"compression": "none", "parquet.enable.dictionary": "false"}).parquet(path)
    least, details = READ_GB_S_MIN.get(settings.size, 0), {"rows": rows, "segment_bytes": size}
    return Plan(
        lambda: side(parquet, "parquet"), danube, "GB/s", ratio_min=1, danube_min=least, details=details
    )


# -- jobs ---------------------------------------------------------------------------------------------


class Store:
    """A store of one topic, and a folder for what a job writes."""

    def __init__(self, bench: Bench) -> None:
        settings = bench.settings
        self.root = settings.directory / "store"
        self.out = settings.directory / "out"
        shape = Shape(settings.size, settings.batch or 1_000, key_bytes=8)
        self.size = make_store(self.root, shape, settings.scaled(2 * GIB, MIB))
        self.url = f"file://{self.root}"
        self.files = [path for path in self.root.rglob("*") if path.is_file()]

    def emptied(self) -> Path:
        shutil.rmtree(self.out, ignore_errors=True)
        return self.out


def job(store: Store, run: Callable[..., Any], spark: Any, options: dict[str, str]) -> dict[str, float]:
    """GB/s of a job in Spark, and of the same in processes alone."""

    def once(where: Any) -> float:
        store.emptied()
        return gb_s(store.size, lambda: run({"storage": store.url, "processes": "2", **options}, where))

    return {"value": once(spark), "without_spark": once(None)}


def validate_store(bench: Bench) -> Plan:
    """Validate a store, against the checksum of its bytes in one process."""
    spark, store = spark_session(bench), Store(bench)
    from danube.spark.jobs.validate import validate

    def clean(options: dict[str, str], where: Any) -> None:
        report = validate.run(options, where)
        if report.exit_code:
            raise RuntimeError(report.findings)

    def summed() -> None:
        for path in store.files:
            crc32c(path.read_bytes())

    return Plan(lambda: gb_s(store.size, summed), lambda: job(store, clean, spark, {}), "GB/s", danube_min=5)


def export_topic(bench: Bench) -> Plan:
    """Export a topic to Parquet with zstd, against ``df.write.parquet`` of the same rows."""
    spark, store = spark_session(bench), Store(bench)
    from danube.spark.jobs.export import export

    def by_spark() -> None:
        frame = spark.read.format("danube").options(storage=store.url, topic=TOPIC).load()
        frame.write.option("compression", "zstd").parquet(str(store.out))
        for path in store.out.iterdir():  # as safe as what export has made
            with path.open("rb") as made:
                os.fsync(made.fileno())

    def floor() -> float:
        store.emptied()
        return gb_s(store.size, by_spark)

    options = {"topic": TOPIC, "target": str(store.out), "format": "parquet"}
    return Plan(floor, lambda: job(store, export.run, spark, options), "GB/s", ratio_min=2)


def compact_store(bench: Bench) -> Plan:
    """Compact a store, against copying its bytes."""
    spark, store = spark_session(bench), Store(bench)
    from danube.spark.jobs.compact import compact

    def floor() -> float:
        return gb_s(store.size, lambda: shutil.copytree(store.root, store.emptied()))

    options = {"below": "128MiB", "to": "512MiB", "work": str(bench.settings.directory)}
    return Plan(floor, lambda: job(store, compact.run, spark, options), "GB/s")


def replay_topic(bench: Bench) -> Plan:
    """A whole replay, from the plan to the last acknowledgement, against ``danube bench publish``."""
    spark, broker, size = spark_session(bench), bench.broker, bench.settings.size
    count = max(1, bench.settings.scaled(GIB // 2) // size)
    published(broker, size, count, "/default/source")

    def danube() -> dict[str, float]:
        os.sync()  # what was written before is not to be waited for now
        rate, slowest_lane = replayed(bench, spark)
        return {"value": rate, "slowest_lane": slowest_lane}

    details = {"records": count}
    return Plan(lambda: published(broker, size, count), danube, "MB/s", ratio_min=0.6, details=details)


def published(broker: BrokerProcess, size: int, count: int, topic: str = "") -> float:
    """MB of payloads a second of ``danube bench publish`` with a producer a lane; ``topic`` is kept."""
    words = ["--size", size, "--count", count, "--producers", LANES, "--partitions", LANES]
    words += ["-s", broker.address, "-o", "json", *(["-t", topic] if topic else [])]
    command = [sys.executable, "-m", "danube", "bench", "publish", *map(str, words)]
    done = subprocess.run(command, check=True, capture_output=True, timeout=300)
    return float(json.loads(done.stdout)["bytes_per_second"]) / 1e6


def replayed(bench: Bench, spark: Any) -> tuple[float, float]:
    """MB of payloads a second of one replay into a topic that is deleted again: of job and slowest lane."""
    from danube.spark.jobs.replay import replay

    name, broker = uuid.uuid4().hex[:8], bench.broker
    options = {
        "storage": str(broker.data_dir), "topic": "/default/source", "to": broker.address,
        "toTopic": f"/default/target-{name}", "state": str(bench.settings.directory / f"{name}.json"),
    }  # fmt: skip
    report = replay.run(options, spark)
    with sync.connect(broker.address) as client:
        client.admin.delete_topic(options["toTopic"])
    megabytes = report.counts["payload_bytes"] / 1e6
    return megabytes / report.seconds, megabytes / max(lane["seconds"] for lane in report.facts["lanes"])
