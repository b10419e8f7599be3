"""A broker with an object store behind a proxy that fails by a script, and what tests ask of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from danube import sync
from tests import fork_server
from tests.broker_process import ROOT, BrokerProcess, alive, descendants, wait_until
from tests.e2e.side_by_side import Bench
from tests.fakes.s3_proxy import Request, S3Proxy
from tests.s3_server import S3Server

TOPIC = "/default/tiered"
SETTINGS = {
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1ms",
    "DANUBE_STORAGE__SEAL_AFTER": "1h",
    "DANUBE_STORAGE__CACHE_SIZE": "16MiB",
    "DANUBE_STORAGE__MERGE_BELOW": "0",
    "DANUBE_WAL__SEGMENT_SIZE": "16MiB",
}
WAIT_S = 90.0
Record = tuple[int, bytes]


def of_segment(request: Request) -> bool:
    return request.path.endswith(".seg")


def getting(request: Request) -> bool:
    return request.method == "GET" and of_segment(request)


def putting(request: Request) -> bool:
    return request.method in ("PUT", "POST")


def payload(number: int, size: int) -> bytes:
    return b"%08d" % number + b"." * (size - 8)


class Site:
    """One broker on a bucket of its own; ``sent`` is everything that was acknowledged, by offset."""

    def __init__(
        self, make: Callable[..., BrokerProcess], server: S3Server, proxy: S3Proxy, *, bucket: str = "",
        data_dir: Path | None = None, workers: int = 2, **environment: str,
    ) -> None:  # fmt: skip
        self.server = server
        self.proxy = proxy
        self.bucket = bucket or server.make_bucket()
        self.store = server.environ(self.bucket, "p")
        through = server.environ(self.bucket, "p", endpoint=proxy.endpoint)
        self.broker = make(data_dir, workers=workers, environment=SETTINGS | through | environment)
        self.sent: list[Record] = []

    @property
    def address(self) -> str:
        return self.broker.address

    def publish(self, count: int, size: int = 2_000, topic: str = TOPIC) -> None:
        """Acknowledged, or the test has failed."""
        start = len(self.sent)
        with sync.connect(self.address) as client, client.producer(topic, name="writer") as producer:
            payloads = [payload(start + number, size) for number in range(count)]
            (first, *_) = producer.send_many(payloads)
        self.sent += list(enumerate(payloads, first.offset))

    def seal(self, topic: str = TOPIC) -> int:
        with sync.connect(self.address) as client:
            return int(client.admin.seal(topic)[0])

    def partition(self, topic: str = TOPIC) -> dict[str, Any]:
        with sync.connect(self.address) as client:
            return dict(client.admin.describe_topic(topic).partitions[0])

    def status(self) -> dict[str, Any]:
        """What ``danube storage status`` shows."""
        with sync.connect(self.address) as client:
            return dict(msgspec.to_builtins(client.admin.storage_status("")))

    def error(self) -> str:
        """Why nothing moves, of any topic."""
        return next((row["error"] for row in self.status()["topics"] if row["error"]), "")

    def wait_moved(self, end: int) -> None:
        """Until everything below ``end`` is in the store alone, and nothing waits or is wrong."""
        wait_until(
            lambda: self.partition()["local_start"] >= end, WAIT_S, f"records below {end} are off the host"
        )
        wait_until(lambda: not self.status()["errors"], WAIT_S, "no error is told any more")

    def read(
        self, count: int, subscription: str, start: Any = "earliest", timeout_s: float = 60
    ) -> list[Record]:
        found: list[Record] = []
        with sync.connect(self.address) as client:
            with client.consumer(TOPIC, subscription=subscription, start=start) as consumer:
                while len(found) < count:
                    message = consumer.receive(timeout=timeout_s)
                    found.append((message.offset, bytes(message.payload)))
                    message.ack_nowait()
        return found

    def state(self, subscription: str, topic: str = TOPIC) -> str:
        with sync.connect(self.address) as client:
            return str(client.admin.describe_subscription(topic, subscription).partitions[0]["state"])

    def objects(self) -> dict[str, int]:
        """Sizes of the segments in the store."""
        found = self.server.client().list_objects(self.bucket, prefix="p/", recursive=True)
        return {one.object_name: one.size for one in found if one.object_name.endswith(".seg")}

    def mover(self) -> int:
        """Process id of the mover."""
        for pid in descendants(self.broker.pid):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "danube-mover":
                return pid
        raise AssertionError("no mover runs")

    def kill_mover(self) -> None:
        pid = self.mover()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), 10, "the mover is gone")

    def danube(self, *words: str, exit_code: int = 0) -> str:
        """One command with the store's settings, past the proxy."""
        command = [sys.executable, "-m", "danube", *words]
        done = fork_server.run(command, environment={**os.environ, **self.store}, cwd=ROOT)
        assert done.returncode == exit_code, done.stdout[-3_000:] + done.stderr[-2_000:]
        return done.stdout

    def verify(self, *places: str) -> dict[str, Any]:
        """What the reader that shares no code with the writer says; it must be clean."""
        url = self.store["DANUBE_STORAGE__URL"]
        report: dict[str, Any] = json.loads(self.danube("verify", *(places or (url,)), "-o", "json"))
        assert report["clean"]
        return report


@contextmanager
def tiered(bench: Bench, server: S3Server, **options: Any) -> Iterator[Site]:
    """A site of a test that runs beside others, behind a proxy of its own."""
    proxy = S3Proxy("127.0.0.1", server.port, client=server.client(), seed=bench.seed).start()
    try:
        yield Site(bench.broker, server, proxy, **options)
    finally:
        proxy.stop()
