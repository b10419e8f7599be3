"""Hundreds of readers of cold history and a slow store: producer and consumer go on beside them (row E10)."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from danube import limits, sync
from danube.wal.cold.cache import FETCH_BYTES_MAX
from tests.broker_process import BrokerProcess, wait_until
from tests.child_process import Child
from tests.fakes.s3_proxy import Fault, Request, S3Proxy
from tests.s3_server import S3Server

pytestmark = pytest.mark.slow

TOPIC = "/default/flooded"
READERS = 250  # scripts/bench has 500
CONNECTIONS = 10
HISTORY_MIB = 32
RECORD_BYTES = 1_024
FURTHER = 1_280  # records: a fourth more than a window of prefetch_bytes holds, so each reader went on
CACHE_BYTES = 16 * limits.MIB  # the least that can be set
STORE_BYTES_S = 1.5e6  # of each connection
HOT = {
    "topic": TOPIC, "durability": "written", "size": 100, "batch": 10, "interval_ns": 2_500_000,
    "batch_count": 2_000,
}  # fmt: skip
STALLED_S = 30
STARVED_S = 180  # the readers' process has what nobody else wants of the processors
TIMES_MAX = 2.0
WINDOWS_MAX = 3  # what the readers do to the hot path is there in each; a busy machine is not
# Below these nothing is a failure, whatever it was without readers: the machine is shared.  Without a share
# for them 500 readers made it 170 ms and 620 ms.
NOISE_US = {"p50_us": 50_000, "p99_us": 400_000}
GROWTH_MAX = 256 * limits.MIB  # of a worker: CONNECTIONS x what a socket may hold, and what reading needs
MOVER_GROWTH_MAX = 128 * limits.MIB


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    made = S3Proxy("127.0.0.1", s3_server.port).start()
    yield made
    made.stop()


def of_segment(request: Request) -> bool:
    return request.method == "GET" and request.path.endswith(".seg")


def fetched_bytes(proxy: S3Proxy) -> int:
    """What the broker asked for of objects."""
    spans = [
        re.match(r"bytes=(\d+)-(\d+)", one.headers.get("range", ""))
        for one in proxy.requests
        if of_segment(one)
    ]
    return sum(int(span[2]) - int(span[1]) + 1 for span in spans if span)


def partition(process: BrokerProcess) -> dict[str, Any]:
    with sync.connect(process.address) as client:
        return dict(client.admin.describe_topic(TOPIC).partitions[0])


def fill(process: BrokerProcess) -> None:
    """History that is in the store alone."""
    payloads = [b"x" * RECORD_BYTES] * 1_024
    with sync.connect(process.address) as client:
        with client.producer(TOPIC, name="history") as producer:
            for _ in range(HISTORY_MIB):
                producer.send_many(payloads)
        (end,) = client.admin.seal(TOPIC)
    wait_until(lambda: partition(process)["local_start"] >= end, 60, "the history is in the store alone")


class Watch:
    """The most memory of each process of the broker, and the most bytes of its cache on disk."""

    def __init__(self, process: BrokerProcess) -> None:
        self._cache = process.data_dir / "cache"
        self._pids = {pid: name_of(pid) for pid in process.pids}
        self.before = {pid: resident(pid) for pid in self._pids}
        self.most = dict(self.before)
        self.cache_most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            for pid in self._pids:
                self.most[pid] = max(self.most[pid], resident(pid))
            self.cache_most = max(self.cache_most, on_disk(self._cache))

    def growth(self, name: str) -> int:
        return max(self.most[pid] - self.before[pid] for pid, one in self._pids.items() if name in one)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def resident(pid: int) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1_024
    return 0


def on_disk(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


def hot(process: BrokerProcess, name: str) -> dict[str, Any]:
    """Percentiles of the hot path; everything came, once and in order."""
    child = Child("perf/tier_peer.py", "paced", {**HOT, "url": process.address, "subscription": name})
    child.wait_ready().go()
    return child.result(60)


def slower(flooded: dict[str, Any], quiet: dict[str, Any]) -> list[str]:
    """The percentiles that the readers made worse than they may."""
    sides = ((flooded, quiet, "sent"), (flooded["delivery"], quiet["delivery"], "delivered"))
    return [
        f"{what} {name}: {beside[name]} for {alone[name]}"
        for beside, alone, what in sides
        for name, noise_us in NOISE_US.items()
        if beside[name] >= max(TIMES_MAX * alone[name], noise_us)
    ]


@pytest.mark.timeout(480)
def test_cold_readers_leave_the_hot_path_alone_and_all_of_them_go_on(
    broker: Any, s3_server: S3Server, proxy: S3Proxy, request: pytest.FixtureRequest
) -> None:
    environment = s3_server.environ(s3_server.make_bucket(), endpoint=proxy.endpoint) | {
        "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1ms",
        "DANUBE_STORAGE__CACHE_SIZE": "16MiB",
        "DANUBE_STORAGE__MERGE_BELOW": "0",
        "DANUBE_WAL__SEGMENT_SIZE": "16MiB",
    }
    process = broker(workers=1, environment=environment)  # the hot path shares its loop with all the readers
    fill(process)
    quiet = hot(process, "quiet")
    proxy.requests.clear()
    slow = proxy.add(Fault("slow", matches=of_segment, bytes_per_s=STORE_BYTES_S))
    watch = Watch(process)
    options = {
        "url": process.address, "topic": TOPIC, "subscription": "cold", "readers": READERS,
        "connections": CONNECTIONS, "prefetch_bytes": limits.MIB,
    }  # fmt: skip
    readers = Child("perf/tier_peer.py", "cold", options)
    request.addfinalizer(readers.stop)
    readers.wait_ready()

    def records() -> list[int]:
        readers.go()
        return list(json.loads(readers.line(STARVED_S)))

    with watch.watching():
        records()
        for window in range(WINDOWS_MAX):
            flooded = hot(process, f"flooded-{window}")
            if not (worse := slower(flooded, quiet)):
                break
        states = told(process)
        early = records()  # who has nothing now had nothing when the states were told
        assert slow.met, "the store was slow"
        proxy.clear()
        with suppress(PermissionError):  # without root the readers keep the least of the processors
            os.setpriority(os.PRIO_PROCESS, readers.pid, 0)
        had, deadline = sum(early), time.monotonic() + STALLED_S
        while min(late := records()) < FURTHER:
            if sum(late) > had:
                had, deadline = sum(late), time.monotonic() + STALLED_S
            assert time.monotonic() < deadline, (
                f"nothing comes, and the slowest reader has {min(late)} records"
            )
            time.sleep(0.2)
    print(
        f"p99 {quiet['p99_us']} us, with {READERS} readers {flooded['p99_us']} us;"
        f" {watch.growth('worker') >> 20} MiB more in the worker"
    )
    assert not worse, f"in each of {WINDOWS_MAX} windows"
    waiting = [number for number, count in enumerate(early) if not count]
    others = {states[f"cold-{number}"] for number in waiting} - {"no_credit", "caught_up", "ready"}
    assert all(state.startswith("waiting_for_store") for state in others), "or it is on its way to them"
    assert watch.growth("worker") < GROWTH_MAX
    assert watch.growth("mover") < MOVER_GROWTH_MAX
    assert watch.cache_most <= CACHE_BYTES + FETCH_BYTES_MAX, "files are looked at one after the other"
    assert fetched_bytes(proxy) < sum(late) * RECORD_BYTES, "they share what is fetched"


def told(process: BrokerProcess) -> dict[str, str]:
    """Why each subscription is where it is."""
    with sync.connect(process.address) as client:
        found = client.admin.list_subscriptions(TOPIC)
        return {one.subscription: str(one.partitions[0]["state"]) for one in found}
