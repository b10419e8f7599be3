"""Measures a replay beside ``danube bench publish`` on the same broker in the same run.

    python -m perf.bench_spark_replay [--megabytes 512] [--sizes 1024,100] [--rounds 3] [--directory /dev/shm]

One JSON line for each payload size: payload megabytes a second, best of the rounds.

``publish``: the bench with as many producers and partitions as the replay has lanes.  ``replay``: the whole
job in ``local[2]``, from the plan to the last acknowledgement, the session being warm; ``replay_tasks``: its
slowest lane alone.  ``chosen``: with an SQL expression that is true for every record, so that all rows go
through the JVM.  ``local``: without Spark, processes started anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from danube.client.blocking.client import connect
from danube.limits import MIB
from danube.spark import session
from danube.spark.jobs.replay import replay
from perf import machine
from tests.broker_process import BrokerProcess

LANES = 2
SOURCE = "/default/source"


def publish(broker: BrokerProcess, payload_bytes: int, count: int, topic: str = "") -> float:
    """MB of payloads a second of ``danube bench publish``; ``topic`` is kept."""
    words = ["--size", str(payload_bytes), "--count", str(count), "--producers", str(LANES)]
    words += ["--partitions", str(LANES), "-s", broker.address, "-o", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "danube", "bench", "publish", *words, *(["-t", topic] if topic else [])],
        check=True,
        capture_output=True,
        timeout=300,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return float(result["bytes_per_second"]) / 1e6


def replayed(
    broker: BrokerProcess, source: str, scratch: Path, spark: Any, where: str = ""
) -> tuple[float, float]:
    """MB of payloads a second of one replay into a topic that is deleted again: of the job, of its tasks."""
    os.sync()
    target = f"/default/target-{uuid.uuid4().hex[:8]}"
    report = replay.run(
        {
            "storage": str(broker.data_dir),
            "topic": source,
            "to": broker.address,
            "toTopic": target,
            "state": str(scratch / f"{uuid.uuid4().hex}.json"),
            "where": where,
        },
        spark,
    )
    with connect(broker.address) as client:
        client.admin.delete_topic(target)
    octets = report.counts["payload_bytes"] / 1e6
    return octets / report.seconds, octets / max(lane["seconds"] for lane in report.facts["lanes"])


def measure(
    broker: BrokerProcess, spark: Any, payload_bytes: int, megabytes: int, rounds: int
) -> dict[str, Any]:
    count = megabytes * MIB // payload_bytes
    source = f"{SOURCE}-{payload_bytes}"
    scratch = broker.data_dir.parent
    publish(broker, payload_bytes, count, source)
    found: dict[str, list[float]] = {}

    def note(name: str, spark: Any, where: str = "") -> None:
        job, tasks = replayed(broker, source, scratch, spark, where)
        found.setdefault(name, []).append(job)
        found.setdefault(f"{name}_tasks", []).append(tasks)

    for _ in range(rounds):
        os.sync()  # what was written before is not to be waited for now
        found.setdefault("publish", []).append(publish(broker, payload_bytes, count))
        if spark is not None:
            note("replay", spark)
            note("chosen", spark, "offset >= 0")
        note("local", None)
    figures = {f"{name}_mb_s": round(max(rates), 1) for name, rates in found.items()}
    share = figures.get("replay_mb_s", figures["local_mb_s"]) / figures["publish_mb_s"]
    return {"payload_bytes": payload_bytes, "records": count, **figures, "share": round(share, 3)}


def main(words: list[str] | None = None, spark: Any = None) -> None:
    """``spark`` is a session that is there already and is left running."""
    parser = argparse.ArgumentParser(prog="perf.bench_spark_replay", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--sizes", default="1024,100")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--without-spark", action="store_true")
    parser.add_argument("--directory", help="for the broker's data; /dev/shm leaves the disk out")
    given = parser.parse_args(words)
    own = None
    if spark is None and not given.without_spark:
        own = session("danube bench", "local[2]", spark_ui_enabled=False)
    with tempfile.TemporaryDirectory(prefix="danube-bench-", dir=given.directory) as scratch:
        data = Path(scratch) / "data"
        data.mkdir()
        broker = BrokerProcess(data, workers=given.workers)
        broker.start()
        print(json.dumps({"machine": machine.fingerprint(data)}), flush=True)
        try:
            for text in given.sizes.split(","):
                found = measure(broker, spark or own, int(text), given.megabytes, given.rounds)
                print(json.dumps(found), flush=True)
        finally:
            broker.kill()
    if own is not None:
        own.stop()


if __name__ == "__main__":
    main()
