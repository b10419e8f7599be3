"""Rows of tiered storage: against a bare client of the same S3 server, in the same run.

The server is that of tests/s3_server.py and shares the machine; where there is none, the rows are skipped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from danube import sync
from danube.broker.links import FrameReader, encode_frame
from danube.broker.mover.mover import Mover
from danube.broker.processes.contexts import DrainSignal, MoverContext, Pulse, SupervisorSettings
from danube.config.sections import StorageConfig
from danube.limits import GIB, MIB
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.opening import open_store
from danube.wal.tier.manifest import Manifest
from perf.tier_peer import get
from perf.turns import Bench, Plan, Skipped, per_second, seconds, timed
from tests.broker_process import BrokerProcess, wait_until
from tests.child_process import Child
from tests.fakes.s3_proxy import Fault, S3Proxy
from tests.s3_server import NoServer, S3Server, find, new_folder
from tests.spark.segments import TOPIC, Shape, fill_partition, make_directory

GET_BYTES = 4 * MIB  # a range of the bare loop: as much as the broker asks for at once
PING_BYTES = 64
PINGS = 50
FIRST_READS = 16
FIRST_MARGIN_MS = 50
PACED_S = 10.0
COLD_READERS, COLD_CONNECTIONS = 500, 10
COLD_STORE_BYTES_S = 2e6  # of each connection
HOT_S, HOT_INTERVAL_NS, HOT_BATCH = 10.0, 2_500_000, 10
SEGMENTS = 16  # that are uploaded
EPOCH = 1 << 30  # of an owner after all that wrote them
PARALLEL = 4
PART_BYTES = 16 * MIB
FREED_S = 2.0  # without a change of what is free on the disk
WAIT_S = 120.0


class TierBench:
    """What the rows share: the S3 server with a bucket, brokers before it, and a filled topic."""

    def __init__(
        self, bench: Bench, segment_size: str = "64MiB", *, alone: bool = False, fault: Fault | None = None
    ) -> None:
        """``alone``: the server yields, as if it had a machine of its own; ``fault`` is on the way to it."""
        self.bench = bench
        self.settings = bench.settings
        try:
            self.server = S3Server(find(), **({"folder": memory_folder()} if alone else {}))
        except NoServer as reason:
            raise Skipped(str(reason)) from None
        bench.callback(self.server.stop)
        self.server.start()
        if alone:
            yielding(self.server.pid)
        self.bucket = self.server.make_bucket()
        self.endpoint = self.server.endpoint
        if fault is not None:
            proxy = S3Proxy("127.0.0.1", self.server.port).start()
            bench.callback(proxy.stop)
            proxy.add(fault)
            self.endpoint = proxy.endpoint
        self.client = self.server.client(endpoint=self.endpoint)
        self.local = {"DANUBE_WAL__SEGMENT_SIZE": segment_size}
        self.facts = {"server": self.server.kind}

    def broker(self, **more: str) -> BrokerProcess:
        """A running broker that evicts what is uploaded at once."""
        environment = {
            **self.local,
            "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1ms",
            "DANUBE_STORAGE__MERGE_BELOW": "0",
            **self.server.environ(self.bucket, "tiered", endpoint=self.endpoint),
            **more,
        }
        return self.bench.start_broker("tiered", environment)

    def delete(self, options: dict[str, Any]) -> None:
        """Delete a topic, and wait until the disk knows what is free, for which the next turn would wait."""
        self.bench.delete(options)
        free, since_s = -1, time.monotonic()
        while time.monotonic() - since_s < FREED_S:
            found = shutil.disk_usage(self.settings.directory).free
            if abs(found - free) > MIB:
                free, since_s = found, time.monotonic()
            time.sleep(0.05)

    def ask(self, role: str, options: dict[str, Any], *, elsewhere: bool = False) -> dict[str, Any]:
        """One role from set-up to result; ``elsewhere``: as if it had processors of its own."""
        child = Child("perf/tier_peer.py", role, options, leads_session=elsewhere).wait_ready()
        if elsewhere:
            session_niceness(child.pid, -20)
        child.go()
        return child.result()

    def objects(self, prefix: str = "tiered") -> dict[str, int]:
        """Sizes of the segments below a prefix, that of the broker by default, by key."""
        found = self.client.list_objects(self.bucket, prefix=f"{prefix}/partitions/", recursive=True)
        return {one.object_name: one.size for one in found if one.object_name.endswith(".seg")}

    def empty(self) -> None:
        """Delete all objects."""
        for found in self.client.list_objects(self.bucket, recursive=True):
            self.client.remove_object(self.bucket, found.object_name)


def memory_folder() -> Path:
    """A folder that shares no disk with the broker, where there is one."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 4 * GIB
    return new_folder(shared if roomy else None)


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


def status(options: dict[str, Any]) -> dict[str, Any]:
    """What the broker tells of the topic and its store."""
    with sync.connect(options["url"]) as client:
        return dict(client.admin.storage_status(options["topic"])["topics"][0])


def filled_and_evicted(tier: TierBench, broker: BrokerProcess, total_bytes: int) -> dict[str, Any]:
    """A topic whose every record is in the store alone."""
    options = tier.bench.options(broker)
    topic = options["topic"]
    options["record_count"] = tier.bench.fill(options, total_bytes)
    with sync.connect(options["url"]) as client:
        (end,) = client.admin.seal(topic)

        def evicted() -> bool:
            return bool(client.admin.describe_topic(topic).partitions[0]["local_start"] >= end)

        wait_until(evicted, WAIT_S, f"records below {end} evicted")
    return options


def cold(broker: BrokerProcess, options: dict[str, Any]) -> None:
    """Empty the cache: it does not outlive its process.  Waits until the store's manifest is known again."""
    broker.kill()
    broker.start()
    wait_until(lambda: status(options)["objects"] > 0, WAIT_S, "the manifest known")


def upload(bench: Bench) -> Plan:
    """Sealed segments to verified objects in a manifest, against fput_object of the same files."""
    tier, size, numbers = TierBench(bench), bench.settings.size, itertools.count()
    source = bench.settings.directory / "source"
    identity, shape = make_directory(source), Shape(size, bench.settings.batch_records, key_bytes=0)
    segment_bytes = bench.settings.scaled(GIB / SEGMENTS)
    fill_partition(source, identity, shape, segments=SEGMENTS, segment_bytes=segment_bytes)
    files = list((source / "partitions").glob("*/*"))
    mib = sum(path.stat().st_size for path in files) / MIB

    def put(path: Path) -> None:
        # Parts of a file side by side would share the slots that files have here.
        more = {"part_size": PART_BYTES, "num_parallel_uploads": 1}
        tier.client.fput_object(tier.bucket, f"bare/{path.name}", str(path), **more)

    def floor() -> float:
        with ThreadPoolExecutor(PARALLEL) as pool:
            took_s = timed(lambda: list(pool.map(put, files)))
        tier.empty()
        return mib / took_s

    def danube() -> float:
        prefix = f"mover-{next(numbers)}"
        more = {"upload_parallel": PARALLEL, "part_bytes": PART_BYTES}
        settings = tier.server.settings(tier.bucket, prefix, **more)
        storage = StorageConfig(mode="object_store", **asdict(settings))
        data = bench.settings.directory / prefix
        shutil.copytree(source, data, copy_function=os.link)
        took_s = asyncio.run(moved(data, identity, storage))
        if (stored := sum(tier.objects(prefix).values()) / MIB) != mib:
            raise RuntimeError(f"{mib} MiB were to be uploaded, the store has {stored}")
        tier.empty()
        return mib / took_s

    details = {**tier.facts, "segments": SEGMENTS, "mib": round(mib), "parallel": PARALLEL}
    return Plan(floor, danube, "MiB/s", ratio_min=0.6, details=details)


async def moved(data: Path, identity: LogIdentity, storage: StorageConfig) -> float:
    """Seconds that the mover takes, as a worker sees it: from ``attach`` until it tells of every segment."""
    address = f"\0danube-bench-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    listener.setblocking(False)
    context = MoverContext(
        listener=listener, drain=DrainSignal(), start_count=0, pulse=Pulse(),
        settings=SupervisorSettings(data_dir=data, mover_drain_timeout_ms=500),
    )  # fmt: skip
    mover = Mover(context, storage, open_store(storage))
    running = asyncio.ensure_future(mover.run())
    reader, writer = await asyncio.open_unix_connection(address)
    frames = FrameReader()

    async def attached(partition: int, directory: Path, count: int) -> None:
        """Attach a partition; wait until the mover tells of ``count`` segments of it."""
        fields = {"topic": TOPIC, "topic_id": identity.topic_id, "epoch": EPOCH, "log_start": 0}
        writer.write(encode_frame("attach", partition=partition, directory=str(directory), **fields))
        while received := await reader.read(MIB):
            for frame in frames.feed(received):
                if frame["kind"] != "state":
                    continue
                if frame["error"]:
                    raise RuntimeError(frame["error"])
                named = len(Manifest.decode(frame["manifest"])) if frame["manifest"] else 0
                if (frame["partition"], named) == (partition, count):
                    return
        raise RuntimeError("the mover closed the connection")

    try:
        async with asyncio.timeout(WAIT_S):
            await attached(1, data / "none", 0)  # answered once the mover has bound the store
            started = time.monotonic()
            await attached(0, data / "partitions" / identity.directory_name, SEGMENTS)
            return time.monotonic() - started
    finally:
        writer.close()
        mover.stop()
        await running


def publish(bench: Bench) -> Plan:
    """A producer at half of full speed while what it sent is uploaded, against no uploads."""
    tier, scale = TierBench(bench, alone=True), bench.settings.scale
    local, tiered = bench.start_broker("local", tier.local), tier.broker()
    full = statistics.median(full_speed(tier, local) for _ in range(3 if bench.settings.rounds else 1))
    batch = max(1, min(bench.settings.batch_records, int(full / 2 / 100)))
    interval_ns = int(1e9 * batch / (full / 2))
    batch_count = max(50, int(PACED_S * scale * 1e9 / interval_ns))
    p99s: dict[str, list[float]] = {"floor": [], "danube": []}

    def side(name: str, broker: BrokerProcess) -> dict[str, Any]:
        options = tier.bench.options(broker, batch=batch, batch_count=batch_count, interval_ns=interval_ns)
        found = tier.ask("paced", options, elsewhere=True)  # or it waits for the processors of uploads
        p99s[name].append(found["p99_us"])
        result = {"value": per_second(found), f"{name}_p99_us": statistics.median(p99s[name][-3:])}
        if name == "danube":
            result["uploaded_mib_s"] = round(status(options)["uploaded_bytes"] / MIB / seconds(found), 1)
        tier.delete(options)
        return result

    details: dict[str, Any] = {
        **tier.facts, "half_of_full": round(full / 2), "batch": batch,
        "seconds": round(batch_count * interval_ns / 1e9, 1),
    }  # fmt: skip

    def p99_held(details: dict[str, Any]) -> bool:
        details["p99_ratio"] = round(details["danube_p99_us"] / details["floor_p99_us"], 2)
        return bool(details["p99_ratio"] < 2.0)

    return Plan(
        lambda: side("floor", local), lambda: side("danube", tiered),
        ratio_min=0.8, also={"p99 < 2 x": p99_held}, details=details,
    )  # fmt: skip


def full_speed(tier: TierBench, broker: BrokerProcess) -> float:
    options = tier.bench.options(broker, **tier.settings.sent(GIB))
    rate = per_second(tier.bench.run("publish", options))
    tier.delete(options)
    return rate


def read(bench: Bench) -> Plan:
    """Evicted history through batches() with a cold cache, against ranged GETs of the same objects."""
    tier = TierBench(bench)
    broker = tier.broker()
    options = filled_and_evicted(tier, broker, GIB)
    objects = tier.objects()
    size, numbers = sum(objects.values()), itertools.count()

    def floor() -> float:
        host = tier.endpoint.removeprefix("http://")
        wanted = {"endpoint": host, "bucket": tier.bucket, "objects": objects, "step": GET_BYTES}
        found = tier.ask("get", wanted)
        if found["bytes"] != size:
            raise RuntimeError(f"{found['bytes']} of {size} bytes were read")
        return size / MIB / seconds(found)

    def danube() -> dict[str, Any]:
        cold(broker, options)
        found = bench.run("replay", {**options, "subscription": f"cold-{next(numbers)}"})
        return {"value": size / MIB / seconds(found), "records_s": round(per_second(found))}

    details = {**tier.facts, "objects": len(objects), "mib": round(size / MIB)}
    return Plan(floor, danube, "MiB/s", ratio_min=0.6, details=details)


def first(bench: Bench) -> Plan:
    """First record of a cold read against two small GETs; ``--count`` milliseconds more for each request."""
    added_ms = bench.settings.count
    tier = TierBench(bench, "16MiB", fault=Fault("delay", seconds=added_ms / 1_000) if added_ms else None)
    broker = tier.broker()
    options = filled_and_evicted(tier, broker, GIB // 2)
    keys = sorted(tier.objects())
    reads, numbers = [cold_offset(key) for key in keys][:FIRST_READS], itertools.count()

    def ping() -> None:
        get(tier.client, tier.bucket, keys[0], 0, PING_BYTES)

    def floor() -> float:
        ping()  # makes the connection that is kept
        times_s = [timed(ping) for _ in range(PINGS)]
        return 2 * 1_000 * statistics.median(times_s)

    def danube() -> dict[str, Any]:
        cold(broker, options)
        found = tier.ask("first", {**options, "offsets": reads, "subscription": f"first-{next(numbers)}"})
        after_start, *times = found["times_ms"]  # the first one also pays for what a process does once
        more = {"max_ms": round(max(times), 1), "after_start_ms": round(after_start, 1)}
        return {"value": statistics.median(times), **more}

    details = {**tier.facts, "added_ms": added_ms, "reads": len(reads)}
    return Plan(floor, danube, "ms", within=FIRST_MARGIN_MS, details=details)


def cold_offset(key: str) -> int:
    """An offset in the middle of an object, from its name."""
    base, end, _ = key.rsplit("/", 1)[1].split("-")
    return (int(base) + int(end)) // 2


def cold_readers(bench: Bench) -> Plan:
    """p99 of an acknowledgement beside 500 readers of history from a slow store, against none."""
    slow = Fault("slow", matches=lambda one: one.method == "GET", bytes_per_s=COLD_STORE_BYTES_S)
    tier = TierBench(bench, "16MiB", alone=True, fault=slow)
    options = filled_and_evicted(tier, tier.broker(DANUBE_STORAGE__CACHE_SIZE="16MiB"), GIB // 8)
    readers, numbers = bench.settings.count or COLD_READERS, itertools.count()

    def hot() -> dict[str, Any]:
        load = {"batch": HOT_BATCH, "interval_ns": HOT_INTERVAL_NS, "subscription": f"hot-{next(numbers)}"}
        length_s = max(0.5, HOT_S * bench.settings.scale)
        return tier.ask("paced", {**options, **load, "batch_count": int(length_s * 1e9) // HOT_INTERVAL_NS})

    def danube() -> dict[str, Any]:
        name = f"cold-{next(numbers)}"
        load = {**options, "subscription": name, "readers": readers, "connections": COLD_CONNECTIONS}
        child = Child("perf/tier_peer.py", "cold", {**load, "prefetch_bytes": MIB}, leads_session=True)
        bench.callback(child.close)
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

    details = {**tier.facts, "readers": readers}
    return Plan(lambda: hot()["p99_us"], danube, "us", ratio_max=2, details=details)
