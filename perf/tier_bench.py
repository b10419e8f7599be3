"""What measurements of tiered storage share: an S3 server, a broker before it and a filled topic."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from danube import sync
from perf.turns import GIB, Bench
from tests.broker_process import BrokerProcess, wait_until
from tests.child_process import Child
from tests.fakes.s3_proxy import Fault, S3Proxy
from tests.s3_server import S3Server, find

MIB = 1 << 20
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
    """What the workloads share: the S3 server with a bucket, a broker before it, and a filled topic."""

    def __init__(self, bench: Bench, workload: str, delay_ms: float = 0.0, slow_bytes_s: float = 0.0) -> None:
        self.bench = bench
        self.settings = bench.settings
        alone = workload in ("tier-publish", "tier-cold-readers")  # as if it had a machine of its own
        self.server = S3Server(find(), **({"_folder": memory_folder()} if alone else {}))
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
        name = f"/default/tier-{next(self._names)}"
        return {**self.bench.options(keep=True), "url": broker.address, "topic": name, **more}

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
