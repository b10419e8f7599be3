"""Rows of tiered storage: against a bare client of the same S3 server, in the same run.

The server is that of tests/s3_server.py and shares the machine; where there is none, the rows are skipped.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from danube import sync
from danube.wal.segments.segment import base_offset_of
from perf.turns import GIB, Bench, Plan, Skipped, per_second, seconds
from tests.broker_process import BrokerProcess, wait_until
from tests.child_process import Child
from tests.fakes.s3_proxy import Fault, S3Proxy
from tests.s3_server import NoServer, S3Server, find

MIB = 1 << 20
GET_BYTES = 4 * MIB  # a range of the bare loop: as much as the broker asks for at once
FIRST_READS = 16
FIRST_MARGIN_MS = 50.0
PACED_S = 10.0
COLD_READERS, COLD_CONNECTIONS = 500, 10
COLD_STORE_BYTES_S = 2e6  # of each connection
HOT_S, HOT_INTERVAL_NS, HOT_BATCH = 10.0, 2_500_000, 10
PARALLEL = 4
PART_BYTES = 16 * MIB
SEGMENT_BYTES = {
    "tier-upload": "64MiB", "tier-publish": "64MiB", "tier-read": "64MiB", "tier-first": "16MiB",
    "tier-cold-readers": "16MiB",
}  # fmt: skip
FREED_S = 2.0  # without a change of what is free on the disk
WAIT_S = 120.0

TIERED = {
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1ms",  # evicted as soon as it is in the store
    "DANUBE_STORAGE__MERGE_BELOW": "0",
}


class TierBench:
    """What the rows share: the S3 server with a bucket, a broker before it, and a filled topic."""

    def __init__(self, bench: Bench, workload: str, delay_ms: float = 0.0, slow_bytes_s: float = 0.0) -> None:
        self.bench = bench
        self.settings = bench.settings
        alone = workload in ("tier-publish", "tier-cold-readers")  # as if it had a machine of its own
        try:
            self.server = S3Server(find(), **({"_folder": memory_folder()} if alone else {}))
        except NoServer as reason:
            raise Skipped(str(reason)) from None
        bench.on_close(self.server.stop)
        self.server.start()
        if alone:
            yielding(self.server.pid)
        self.bucket = self.server.make_bucket()
        self.endpoint = self.server.endpoint
        if delay_ms or slow_bytes_s:
            proxy = S3Proxy("127.0.0.1", self.server.port).start()
            bench.on_close(proxy.stop)
            delay = Fault("delay", seconds=delay_ms / 1_000)
            slow = Fault("slow", matches=lambda one: one.method == "GET", bytes_per_s=slow_bytes_s)
            proxy.add(slow if slow_bytes_s else delay)
            self.endpoint = proxy.endpoint
        self._segments = {"DANUBE_WAL__SEGMENT_SIZE": SEGMENT_BYTES[workload]}
        self._names = itertools.count()
        self.facts = {"server": self.server.kind}

    def broker(self, name: str, *, tiered: bool, **more: str) -> BrokerProcess:
        """A running broker; evicts what is uploaded at once when it is tiered."""
        environment = dict(self._segments)
        if tiered:
            environment |= TIERED | more | self.server.environ(self.bucket, name, endpoint=self.endpoint)
        process = BrokerProcess(
            self.settings.directory / name, workers=self.settings.workers, environment=environment
        )
        return self.bench.closing(process).start()

    def options(self, broker: BrokerProcess, **more: Any) -> dict[str, Any]:
        """For loads and roles that publish or consume."""
        name, settings = f"/default/tier-{next(self._names)}", self.settings
        given = {"size": settings.size, "batch": settings.batch_records, "durability": settings.durability}
        return {**given, "url": broker.address, "topic": name, **more}

    def delete(self, broker: BrokerProcess, topic: str) -> None:
        """And wait until the disk knows what is free, for which the next turn would wait otherwise."""
        self.bench.run("delete_topics", {"url": broker.address, "topics": [topic]})
        free, since_s = -1, time.monotonic()
        while time.monotonic() - since_s < FREED_S:
            found = shutil.disk_usage(self.settings.directory).free
            if abs(found - free) > MIB:
                free, since_s = found, time.monotonic()
            time.sleep(0.05)

    def store_options(self, **more: Any) -> dict[str, Any]:
        """For roles that speak to the store."""
        return {
            "endpoint": self.endpoint,
            "access_key": self.server.access_key,
            "secret_key": self.server.secret_key,
            "region": "us-east-1",
            "bucket": self.bucket,
            "parallel": PARALLEL,
            "part_bytes": PART_BYTES,
            **more,
        }

    def ask(self, role: str, options: dict[str, Any], *, elsewhere: bool = False) -> dict[str, Any]:
        """One role from set-up to result; ``elsewhere``: as if it had processors of its own."""
        child = Child("perf/tier_peer.py", role, options, leads_session=elsewhere).wait_ready()
        if elsewhere:
            session_niceness(child.pid, -20)
        child.go()
        return child.result()

    def empty(self, prefix: str) -> None:
        """Delete all objects below a prefix."""
        client = self.server.client()
        for found in client.list_objects(self.bucket, prefix=prefix, recursive=True):
            client.remove_object(self.bucket, found.object_name)

    def objects(self, prefix: str) -> dict[str, int]:
        """Sizes of the segments below a prefix, by key."""
        found = self.server.client().list_objects(self.bucket, prefix=prefix, recursive=True)
        return {one.object_name: one.size for one in found if one.object_name.endswith(".seg")}


def memory_folder() -> Path:
    """A folder that shares no disk with the broker, where there is one; those of killed runs are removed."""
    shared = Path("/dev/shm")
    for old in shared.glob("danube-s3-*-*"):
        pid = old.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 4 * GIB
    return Path(tempfile.mkdtemp(prefix=f"danube-s3-{os.getpid()}-", dir=shared if roomy else None))


def yielding(pid: int) -> None:
    """Let a process have what nobody else wants of the processors; threads that it starts inherit that.

    The process leads its session.
    """
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
    session_niceness(pid, 19)


def session_niceness(pid: int, niceness: int) -> None:
    """Set that of a session, by a process of it, where the kernel shares processors between sessions.

    There that of threads counts within their session only.  EINVAL: it began while that was off and has none;
    EPERM: less than nothing takes root.
    """
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


def partition(options: dict[str, Any]) -> dict[str, Any]:
    with sync.connect(options["url"]) as client:
        return dict(client.admin.describe_topic(options["topic"]).partitions[0])


def seal(options: dict[str, Any]) -> int:
    """End the active segment; returns the end of what is sealed."""
    with sync.connect(options["url"]) as client:
        return int(client.admin.seal(options["topic"])[0])


def filled_and_evicted(tier: TierBench, broker: BrokerProcess, total_bytes: int) -> dict[str, Any]:
    """A topic whose every record is in the store alone."""
    options = tier.options(broker)
    options["record_count"] = tier.bench.fill(options, total_bytes)
    end = seal(options)
    wait_until(lambda: partition(options)["local_start"] >= end, WAIT_S, f"records below {end} evicted")
    return options


def cold(broker: BrokerProcess, options: dict[str, Any]) -> None:
    """Empty the cache: it does not outlive its process.  Waits until the store's manifest is known again."""
    broker.kill()
    broker.start()

    def known() -> bool:
        with sync.connect(options["url"]) as client:
            status = client.admin.storage_status(options["topic"])
        return bool(status["topics"]) and all(one["objects"] for one in status["topics"])

    wait_until(known, WAIT_S, "the manifest known")


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
        floor=floor, danube=danube, unit="MiB/s", ratio_min=0.6, target="ratio >= 0.6",
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

    return Plan(
        floor=lambda: side("floor", local),
        danube=lambda: side("danube", tiered),
        ratio_min=0.8,
        target="ratio >= 0.8 and p99 < 2 x",
        details=details,
        also=p99_held,
    )


def full_speed(tier: TierBench, broker: BrokerProcess) -> float:
    options = tier.options(broker, **tier.settings.sent(tier.settings.batches(GIB)))
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

    def floor() -> float:
        found = tier.ask("get", tier.store_options(objects=objects, step=GET_BYTES))
        if found["bytes"] != size:
            raise RuntimeError(f"{found['bytes']} of {size} bytes were read")
        return size / MIB / seconds(found)

    def danube() -> dict[str, Any]:
        cold(broker, options)
        found = bench.run("replay", {**options, "subscription": f"cold-{next(numbers)}"})
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

    return Plan(
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


def cold_readers(bench: Bench) -> Plan:
    """p99 of an acknowledgement beside 500 readers of history from a slow store, against none."""
    tier = TierBench(bench, "tier-cold-readers", slow_bytes_s=COLD_STORE_BYTES_S)
    broker = tier.broker("tiered", tiered=True, DANUBE_STORAGE__CACHE_SIZE="16MiB")
    options = filled_and_evicted(tier, broker, GIB // 8)
    readers, numbers = bench.settings.count or COLD_READERS, itertools.count()
    details: dict[str, Any] = {**tier.facts, "readers": readers}

    def hot() -> dict[str, Any]:
        load = {"batch": HOT_BATCH, "interval_ns": HOT_INTERVAL_NS, "subscription": f"hot-{next(numbers)}"}
        length_s = max(0.5, HOT_S * bench.settings.scale)
        return tier.ask("paced", {**options, **load, "batch_count": int(length_s * 1e9) // HOT_INTERVAL_NS})

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
