#!/usr/bin/env python3
"""Measure tiered storage against a bare client of the same S3 server, in the same run.

    perf/tiers.py --compare tier-upload            the mover against fput_object of the same files
    perf/tiers.py --compare tier-publish           half of full speed with uploads against without
    perf/tiers.py --compare tier-read              history through a consumer against ranged GETs
    perf/tiers.py --compare tier-first --count 20  first record of a cold read; 20 ms more for each request
    perf/tiers.py --compare tier-plan              planning over 100,000 segments
    perf/tiers.py --compare tier-cold-readers      p99 beside 500 (--count) readers of history against none
    perf/tiers.py --list

Both sides take turns as in perf/floor.py, and the line has the same form.  The server is that of
tests/s3_server.py and shares the machine; where there is none, one line says SKIPPED and the exit code is 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from danube import sync  # noqa: E402
from danube.wal.segments.segment import base_offset_of  # noqa: E402
from perf import manifest  # noqa: E402
from perf.floor import common_arguments, conclude, listing  # noqa: E402
from perf.tier_bench import (  # noqa: E402
    MIB,
    PARALLEL,
    WAIT_S,
    TierBench,
    cold,
    filled_and_evicted,
    seal,
    yielding,
)
from perf.turns import GIB, Bench, Plan, Settings, compare, per_second  # noqa: E402
from tests.broker_process import BrokerProcess, wait_until  # noqa: E402
from tests.child_process import Child  # noqa: E402
from tests.s3_server import NoServer  # noqa: E402

GET_BYTES = 4 * MIB  # a range of the bare loop: as much as the broker asks for at once
FIRST_READS = 16
FIRST_MARGIN_MS = 50.0
PACED_S = 10.0
BATCHES_S_MAX = 1_500  # a timer of asyncio is not finer than a millisecond
COLD_READERS, COLD_CONNECTIONS = 500, 10
COLD_STORE_BYTES_S = 2e6  # of each connection
HOT_S, HOT_INTERVAL_NS, HOT_BATCH = 10.0, 2_500_000, 10
PLAN_ENTRIES = 100_000
PLAN_MS_MAX, PLAN_MIB_MAX = 1_000.0, 200.0


@dataclass(kw_only=True)
class TierPlan(Plan):
    """A plan with conditions beyond ratio and value; ``also`` is asked after the last turn."""

    also: Callable[[], bool] = field(default=lambda: True)
    within: float = 0.0  # of the floor, in the unit of both

    def met(self, ratio: float, danube: float) -> bool:
        close = not self.within or danube <= danube / ratio + self.within
        return super().met(ratio, danube) and close and self.also()


def seconds(found: dict[str, Any]) -> float:
    return max(1e-9, (found["ended_ns"] - found["started_ns"]) / 1e9)


def upload(bench: Bench) -> Plan:
    """Sealed segments to verified objects in a manifest, against fput_object of the same files."""
    tier = TierBench(bench, "tier-upload")
    broker = tier.broker("local", tiered=False)
    options = tier.options(broker)
    bench.fill(options, GIB)
    seal(options)
    wait_until(lambda: len(sealed(broker)) == len(segment_files(broker)), WAIT_S, "all segments sealed")
    broker.stop()
    source = sealed(broker)
    size = sum(path.stat().st_size for path in source)
    names = itertools.count()

    def floor() -> float:
        prefix = f"bare-{next(names)}"
        # Parts of a file side by side would share the slots that files have here.
        more = {"files": list(map(str, source)), "prefix": prefix, "part_parallel": 1}
        found = tier.ask("put", tier.store_options(**more))
        tier.empty(prefix)
        return size / MIB / seconds(found)

    def danube() -> float:
        prefix = f"mover-{next(names)}"
        data_dir = bench.settings.directory / prefix
        directory = data_dir / "partitions" / source[0].parent.name
        directory.mkdir(parents=True)
        for path in source:
            os.link(path, directory / path.name)
        identity = int(directory.name.partition("-")[0], 16)
        more = {"files": list(map(str, source)), "prefix": prefix, "data_dir": str(data_dir)}
        more |= {"directory": str(directory), "topic": options["topic"], "topic_id": identity}
        found = tier.ask("mover", tier.store_options(**more))
        stored = tier.objects(prefix)
        if sum(stored.values()) != size:
            raise RuntimeError(f"{size} bytes were to be uploaded, the store has {sum(stored.values())}")
        tier.empty(prefix)
        return size / MIB / seconds(found)

    return Plan(
        floor=floor, danube=danube, unit="MiB/s", ratio_min=0.7, target="ratio >= 0.7",
        details={**tier.facts, "segments": len(source), "mib": round(size / MIB), "parallel": PARALLEL},
    )  # fmt: skip


def segment_files(broker: BrokerProcess) -> list[Path]:
    """All segments of the one topic that holds records, by base offset."""
    found = (broker.data_dir / "partitions").glob("*/*")
    return sorted(path for path in found if base_offset_of(path.name) is not None)


def sealed(broker: BrokerProcess) -> list[Path]:
    from danube.wal.tier.sealed_files import LocalListing

    files = segment_files(broker)
    listed = {
        (directory, one.base_offset): one.sealed
        for directory in {path.parent for path in files}
        for one in LocalListing(directory).refresh()
    }
    return [path for path in files if listed[path.parent, base_offset_of(path.name) or 0]]


def publish(bench: Bench) -> Plan:
    """A producer at half of full speed while what it sent is uploaded, against no uploads."""
    tier = TierBench(bench, "tier-publish")
    local, tiered = tier.broker("local", tiered=False), tier.broker("tiered", tiered=True)
    full = statistics.median(full_speed(tier, local) for _ in range(3 if bench.settings.rounds else 1))
    batch = max(1, min(bench.settings.batch_records, int(full / 2 / 100)))
    interval_ns = int(1e9 * batch / (full / 2))
    batch_count = max(50, int(PACED_S * bench.settings.scale * 1e9 / interval_ns))
    p99s: dict[str, list[float]] = {"floor": [], "danube": []}

    def side(name: str, broker: BrokerProcess) -> dict[str, Any]:
        options = tier.options(broker, batch=batch, batch_count=batch_count, interval_ns=interval_ns)
        found = tier.ask("paced", options, elsewhere=True)  # or it waits for the processors of uploads
        p99s[name].append(found["p99_us"])
        result = {"value": per_second(found), f"{name}_p99_us": statistics.median(p99s[name][-3:])}
        if name == "danube":
            result["uploaded_mib_s"] = round(uploaded_bytes(options) / MIB / seconds(found), 1)
        tier.delete(broker, options["topic"])
        return result

    details: dict[str, Any] = {
        **tier.facts, "half_of_full": round(full / 2), "batch": batch,
        "seconds": round(batch_count * interval_ns / 1e9, 1),
    }  # fmt: skip

    def p99_held() -> bool:
        details["p99_ratio"] = round(details["danube_p99_us"] / details["floor_p99_us"], 2)
        return bool(details["p99_ratio"] < 2.0)

    return TierPlan(
        floor=lambda: side("floor", local),
        danube=lambda: side("danube", tiered),
        ratio_min=0.8,
        target="ratio >= 0.8 and p99 < 2 x",
        details=details,
        also=p99_held,
    )


def full_speed(tier: TierBench, broker: BrokerProcess) -> float:
    options = tier.options(broker, batch_count=tier.settings.batches(GIB))
    rate = per_second(tier.bench.run("publish", options))
    tier.delete(broker, options["topic"])
    return rate


def uploaded_bytes(options: dict[str, Any]) -> int:
    with sync.connect(options["url"]) as client:
        return sum(one["uploaded_bytes"] for one in client.admin.storage_status(options["topic"])["topics"])


def read(bench: Bench) -> Plan:
    """Evicted history through batches() with a cold cache, against ranged GETs of the same objects."""
    tier = TierBench(bench, "tier-read")
    broker = tier.broker("tiered", tiered=True)
    options = filled_and_evicted(tier, broker, GIB)
    objects = tier.objects("tiered/partitions/")
    size, numbers = sum(objects.values()), itertools.count()
    details: dict[str, Any] = {**tier.facts, "objects": len(objects), "mib": round(size / MIB)}

    def floor() -> dict[str, Any]:
        more = {"objects": objects, "step": GET_BYTES}
        beside = tier.ask("get", tier.store_options(**more, parallel=PARALLEL))
        found = tier.ask("get", tier.store_options(**more | {"parallel": 1}))
        if found["bytes"] != size:
            raise RuntimeError(f"{found['bytes']} of {size} bytes were read")
        return {"value": size / MIB / seconds(found), "four_loops": round(size / MIB / seconds(beside), 1)}

    def danube() -> dict[str, Any]:
        cold(broker, options)
        found = tier.ask("read", {**options, "subscription": f"cold-{next(numbers)}"})
        return {"value": size / MIB / seconds(found), "records_s": round(per_second(found))}

    return Plan(
        floor=floor, danube=danube, unit="MiB/s", ratio_min=0.6, target="ratio >= 0.6", details=details
    )


def first(bench: Bench) -> Plan:
    """First record of a cold read against two small GETs; ``--count`` milliseconds more for each request."""
    tier = TierBench(bench, "tier-first", bench.settings.count)
    broker = tier.broker("tiered", tiered=True)
    options = filled_and_evicted(tier, broker, GIB // 2)
    objects = tier.objects("tiered/partitions/")
    reads = [cold_offset(key) for key in sorted(objects)][:FIRST_READS]
    numbers = itertools.count()
    details: dict[str, Any] = {
        "added_ms": bench.settings.count,
        "reads": len(reads),
        "server": tier.server.kind,
    }

    def floor() -> float:
        found = tier.ask("ping", tier.store_options(objects=objects, count=50))
        return 2 * float(found["median_ms"])

    def danube() -> dict[str, Any]:
        cold(broker, options)
        found = tier.ask("first", {**options, "offsets": reads, "subscription": f"first-{next(numbers)}"})
        after_start, *times = found["times_ms"]  # the first one also pays for what a process does once
        more = {"max_ms": round(max(times), 1), "after_start_ms": round(after_start, 1)}
        return {"value": statistics.median(times), **more}

    return TierPlan(
        floor=floor,
        danube=danube,
        unit="ms",
        target="within two round trips + 50 ms",
        details=details,
        within=FIRST_MARGIN_MS,
    )


def cold_offset(key: str) -> int:
    """An offset in the middle of an object, from its name."""
    base, end, _ = key.rsplit("/", 1)[1].split("-")
    return (int(base) + int(end)) // 2


def plan_reads(bench: Bench) -> Plan:
    """Decoding a manifest of 100,000 segments and planning a read, in ms; the floor copies its bytes."""
    entries = max(100, int(PLAN_ENTRIES * bench.settings.scale))
    data = manifest.made(entries).encode()
    details: dict[str, Any] = {"entries": entries, "bytes": len(data)}

    def floor() -> float:
        started = datetime.now(UTC)
        bytearray(data)
        return max(0.001, (datetime.now(UTC) - started).total_seconds() * 1e3)

    def danube() -> dict[str, Any]:
        found = manifest.measure(entries)
        return {"value": found["decode_ms"] + found["plan_ms"], "memory_mib": found["memory_mib"]}

    return TierPlan(
        floor=floor,
        danube=danube,
        unit="ms",
        danube_max=PLAN_MS_MAX,
        target="< 1 s and < 200 MB",
        details=details,
        also=lambda: details["memory_mib"] <= PLAN_MIB_MAX,
    )


def cold_readers(bench: Bench) -> Plan:
    """p99 of an acknowledgement beside 500 readers of history from a slow store, against none."""
    tier = TierBench(bench, "tier-cold-readers", slow_bytes_s=COLD_STORE_BYTES_S)
    broker = tier.broker("tiered", tiered=True, DANUBE_STORAGE__CACHE_SIZE="16MiB")
    options = filled_and_evicted(tier, broker, GIB // 8)
    readers, numbers = bench.settings.count or COLD_READERS, itertools.count()
    details: dict[str, Any] = {**tier.facts, "readers": readers}

    def hot() -> dict[str, Any]:
        load = {"batch": HOT_BATCH, "interval_ns": HOT_INTERVAL_NS, "subscription": f"hot-{next(numbers)}"}
        return tier.ask("hot", {**options, **load, "seconds": max(0.5, HOT_S * bench.settings.scale)})

    def danube() -> dict[str, Any]:
        name = f"cold-{next(numbers)}"
        more = {
            "readers": readers,
            "connections": COLD_CONNECTIONS,
            "prefetch_bytes": MIB,
            "subscription": name,
        }
        child = Child("perf/tier_peer.py", "cold", {**options, **more}, leads_session=True)
        bench.on_close(child.close)
        child.wait_ready()
        yielding(child.pid)  # readers of history sit on other machines
        child.go()
        child.line()
        found = hot()
        child.go()
        records = json.loads(child.line())
        child.stop()
        with sync.connect(options["url"]) as client:
            for number in range(readers):
                client.admin.delete_subscription(options["topic"], f"{name}-{number}")
        mib_s = sum(records) * options["size"] / MIB / seconds(found)
        return {"value": found["p99_us"], "cold_mib_s": round(mib_s), "cold_min_records": min(records)}

    return Plan(
        floor=lambda: float(hot()["p99_us"]), danube=danube, unit="us", ratio_max=2.0, target="p99 < 2 x",
        details=details,
    )  # fmt: skip


WORKLOADS: dict[str, Callable[[Bench], Plan]] = {
    "tier-upload": upload,
    "tier-publish": publish,
    "tier-read": read,
    "tier-first": first,
    "tier-plan": plan_reads,
    "tier-cold-readers": cold_readers,
}


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perf/tiers.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=1_024, help="payload bytes of a record (1024)")
    parser.add_argument("--durability", choices=["written", "fsync"], default="written")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--count", type=int, default=0, help="milliseconds added to each request, or readers (see above)"
    )
    common_arguments(parser, WORKLOADS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.list or not options.compare:
        print(listing(WORKLOADS))
        return 0
    with tempfile.TemporaryDirectory(prefix="danube-tiers-", dir=options.directory) as directory:
        settings = Settings(
            directory=Path(directory),
            size=options.size,
            durability=options.durability,
            workers=options.workers,
            rounds=options.rounds,
            scale=options.scale,
            count=options.count,
        )
        try:
            measured = compare(options.compare, settings, WORKLOADS)
        except NoServer as reason:
            print(f"SKIPPED {options.compare}: {reason}", flush=True)
            return 0
        conclude(measured, Path(directory), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
