"""The jobs on sealed history: validate, export and compact, in GB of segment bytes a second.

    python -m perf.bench_spark_jobs [--gigabytes 2] [--payload 1024] [--only validate] [--spark]

Segments of 64 MiB in the page cache; the best of three runs.  ``--spark`` measures the same in local[2].
What is exported is on disk (fsync) when the time ends, by either way; TMPDIR=/dev/shm leaves the disk out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from danube.core.batch.checksum import content_hash
from danube.core.batch.columns import encode
from danube.core.batch.format import stamp
from danube.core.metadata.commands import CreateTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.wal.segments.index import SparseIndex
from danube.wal.segments.segment import (
    NO_HASH,
    SUMMARY_BYTES,
    LogIdentity,
    SegmentHeader,
    Summary,
    pack_footer,
    pack_header,
    read_summary,
)
from danube.wal.tier.keys import manifest_key, metadata_key, segment_key
from danube.wal.tier.manifest import Manifest, entry_of
from tests.broker_process import descendants

TOPIC = "/default/bench"
IDENTITY = LogIdentity(1, 0)
SEGMENT_BYTES = 64 << 20
START_US = 1_700_000_000_000_000


def write_store(root: Path, total_bytes: int, payload: int, records: int) -> tuple[int, int]:
    """A store with one topic; its bytes and records."""
    metadata = Metadata()
    metadata.apply(1, CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=START_US))
    put(root / metadata_key(1), metadata.snapshot())
    put(root / "store.json", b'{"format": 1, "store_id": "bench", "created_us": 1}\n')
    batch = bytearray(
        encode(
            [b"%08d" % n + random.Random(n).randbytes(payload - 8) for n in range(records)],
            keys=[b"k%07d" % n for n in range(records)], publish_time_us=START_US, producer_name="bench",
        ).to_bytes()
    )  # fmt: skip
    manifest, offset, previous, size = Manifest.empty(TOPIC, IDENTITY, 1), 0, NO_HASH, 0
    while size < total_bytes:
        data = write_segment(batch, offset, records, previous, min(SEGMENT_BYTES, total_bytes))
        summary = read_summary(data[-SUMMARY_BYTES:], len(data))
        if summary is None:
            raise SystemExit("the segment has no footer")
        entry = entry_of(summary, len(data), START_US)
        put(root / segment_key(IDENTITY, entry), data)
        manifest = manifest.with_added(entry)
        offset, previous, size = summary.end_offset, summary.content_hash, size + len(data)
    put(root / manifest_key(IDENTITY, 1, manifest.generation), manifest.encode())
    return size, offset


def write_segment(batch: bytearray, base: int, records: int, previous: bytes, segment_bytes: int) -> bytes:
    count = max(1, segment_bytes // len(batch))
    data = bytearray(pack_header(SegmentHeader(IDENTITY, 1, base, START_US + base)))
    index = SparseIndex()
    for number in range(count):
        offset = base + number * records
        index.add(offset, len(data), START_US + offset)
        stamp(batch, offset, 1, START_US + offset)
        data += batch
    end = base + count * records
    summary = Summary(
        IDENTITY, 1, base, end, count * records, count, START_US + base, START_US + end - records, len(data),
        content_hash(bytes(data)), previous, 0, 0, False, 0, 0,
    )  # fmt: skip
    return bytes(data) + pack_footer(summary, index.pack(), None)


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def cpu_seconds() -> float:
    """User and system time of this process, of all below it, and of those that have ended."""
    ticks, total = os.sysconf("SC_CLK_TCK"), 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / ticks


def best(run: Callable[[], Any], runs: int = 3) -> tuple[float, float]:
    """Seconds on the clock and of all processors; each the least of some runs."""
    walls, cpus = [], []
    for _ in range(runs):
        start, cpu = time.perf_counter(), cpu_seconds()
        run()
        walls.append(time.perf_counter() - start)
        cpus.append(cpu_seconds() - cpu)
    return min(walls), min(cpus)


def measure(store: Path, size: int, only: str, spark: Any) -> dict[str, float]:
    """GB/s of each job."""
    from danube.spark.jobs.compact import compact
    from danube.spark.jobs.export import export
    from danube.spark.jobs.validate import validate

    url = f"file://{store}"
    found: dict[str, float] = {}

    def one(name: str, run: Callable[[], Any]) -> None:
        if only in ("", name.partition(" ")[0]):
            wall, cpu = best(run)
            found[name] = round(size / wall / 1e9, 2)
            print(f"{name}: {found[name]} GB/s, {cpu / size * 1e9:.2f} CPU seconds per GB", flush=True)

    def clean() -> None:
        report = validate.run({"storage": url, "processes": "2"}, spark)
        if report.exit_code:
            raise SystemExit(report.findings)

    def write(target: str) -> None:
        shutil.rmtree(store.parent / "out", ignore_errors=True)
        options = {"storage": url, "topic": TOPIC, "target": str(store.parent / "out"), "format": target}
        export.run({**options, "processes": "2"}, spark)

    def frames() -> None:
        shutil.rmtree(store.parent / "frames", ignore_errors=True)
        frame = spark.read.format("danube").options(storage=url, topic=TOPIC).load()
        frame.write.option("compression", "zstd").parquet(str(store.parent / "frames"))
        for path in (store.parent / "frames").iterdir():  # as safe as what export has made
            with path.open("rb") as made:
                os.fsync(made.fileno())

    def merge() -> None:
        options = {"storage": url, "below": "128MiB", "to": "512MiB", "processes": "2"}
        compact.run({**options, "work": str(store.parent)}, spark)

    one("validate", clean)
    one("export parquet", lambda: write("parquet"))
    if spark is not None:
        one("export by df.write.parquet", frames)
    one("compact", merge)
    return found


def main(words: list[str] | None = None, spark: Any = None) -> None:
    """``spark`` is a session that is there already and is left running."""
    parser = argparse.ArgumentParser(prog="perf.bench_spark_jobs", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--payload", type=int, default=1024)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument("--spark", action="store_true")
    asked = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="danube-bench-"))
    own = None
    try:
        store = folder / "store"
        size, records = write_store(store, int(asked.gigabytes * 1e9), asked.payload, asked.records)
        print(f"{size / 1e9:.2f} GB, {records} records of {asked.payload} bytes")
        if asked.spark:
            from danube.spark import session

            own = spark or session("danube bench", "local[2]", spark_ui_enabled=False)
        print(json.dumps(measure(store, size, asked.only, own)))
    finally:
        if own is not None and spark is None:
            own.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
