"""Two tenants with equal names, side by side under kill -9: neither ever meets a byte of the other.

Each has a topic with partitions, one whose records all fail, one for these, and one without storage.  They
have equal names, and so have subscriptions and producers.  Every payload, key and reason bears its tenant's
mark, which is searched for at the readers, in segments, objects, the cache, logs and metrics.

``DANUBE_TENANT_RECORDS``: records of each tenant (default 40,000).  Memory does not grow with them, but for a
byte each.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from minio.error import S3Error

from danube import sync
from danube.core.partition.policy import FailurePolicy
from danube.errors import NotAllowed, OperationTimeout
from tests.broker_process import free_port, wait_until
from tests.e2e.authority_site import Site, token
from tests.e2e.test_metrics import Scraped
from tests.s3_server import S3Server

RECORDS = int(os.environ.get("DANUBE_TENANT_RECORDS", "40000"))
FAILING = min(RECORDS // 100, 20_000)  # a letter each
LIVE = min(RECORDS // 100, 20_000)
PARTS = min(max(2, RECORDS // 100_000), 20)  # a worker is killed in each
BATCH = 2_000
SIZE = 100
DIGITS = 12
WITHIN_S = 180 + RECORDS / 2_000
CHUNK = 1 << 20
TENANTS = ("north", "south")
STORAGE = {
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1ms",  # what is sealed is in the store alone
    "DANUBE_STORAGE__SEAL_AFTER": "1h",
    "DANUBE_STORAGE__CACHE_SIZE": "64MiB",
    "DANUBE_STORAGE__MERGE_BELOW": "0",
    "DANUBE_WAL__SEGMENT_SIZE": "16MiB",
}

pytestmark = pytest.mark.timeout(WITHIN_S + 300)


def mark(tenant: str) -> bytes:
    """Begin of its payloads and keys; topics and principals are not called so."""
    return f"{tenant}-owns ".encode()


def other(tenant: str) -> str:
    return TENANTS[1 - TENANTS.index(tenant)]


def payloads(tenant: str, numbers: Iterable[int]) -> list[bytes]:
    begin = mark(tenant)
    return [(begin + b"%0*d" % (DIGITS, number)).ljust(SIZE, b".") for number in numbers]


class Seen:
    """Numbers of the records that a reader got; every byte must be its tenant's."""

    def __init__(self, tenant: str, count: int) -> None:
        self.missing = count
        self.total = 0
        self._seen = np.zeros(count, np.bool_)
        self._begin = np.frombuffer(mark(tenant), np.uint8)
        self._keys = {f"{mark(tenant).decode()}{number}" for number in range(8)}

    def add(self, payloads: list[bytes], keys: Iterable[Any] = ()) -> None:
        rows = np.frombuffer(b"".join(payloads), np.uint8).reshape(len(payloads), SIZE)
        start, end = len(self._begin), len(self._begin) + DIGITS
        own = (rows[:, :start] == self._begin).all() and (rows[:, end:] == ord(".")).all()
        assert own and self._keys.issuperset(keys), payloads[:3]
        numbers = (rows[:, start:end] - ord("0")) @ 10 ** np.arange(DIGITS - 1, -1, -1)
        fresh = np.unique(numbers[~self._seen[numbers]])
        self._seen[fresh] = True
        self.missing -= len(fresh)
        self.total += len(payloads)


class Tenant:
    """What one tenant has open, before any worker is killed: a first connection is tried once."""

    def __init__(self, site: Site, name: str, stack: ExitStack) -> None:
        self._site, self.name, self._stack = site, name, stack
        site.namespace(name)
        site.bind(name, "namespace-admin", "namespace", name)
        self.admin = self.connect().admin
        self.admin.create_topic(self.topic("orders"), partitions=2, durability="written")
        self.admin.create_topic(self.topic("failing"), durability="written")
        self.admin.create_topic(self.topic("letters"), durability="written")
        self.admin.create_topic(self.topic("live"), reliable=False, durability="memory")
        self.producers = {
            one: stack.enter_context(self.connect().producer(self.topic(one), name="p"))
            for one in ("orders", "failing", "live")
        }
        failure = FailurePolicy(
            max_redelivery_count=0, base_redelivery_delay_ms=0, poison="dead_letter",
            dead_letter_topic=self.topic("letters"),
        )  # fmt: skip
        self.orders = self.reader("orders")
        self.failing = self.reader("failing", failure=failure)
        self.letters = self.reader("letters")
        self.live = self.reader("live", start="latest")

    def connect(self) -> sync.Client:
        """A client that waits out a worker's replacement on a slow host."""
        made = sync.connect(
            self._site.process.address, token=token(self.name), timeout=WITHIN_S, connect_timeout=60,
            reconnect_timeout=None,  # one that is not used meanwhile does not connect again
        )  # fmt: skip
        return self._stack.enter_context(made)

    def topic(self, name: str) -> str:
        return f"/{self.name}/{name}"

    def reader(self, topic: str, subscription: str = "reader", **options: Any) -> Any:
        made = self.connect().consumer(self.topic(topic), subscription, **{"start": "earliest"} | options)
        return self._stack.enter_context(made)

    def publish(self, topic: str, numbers: range) -> None:
        """Have records acknowledged."""
        for start in range(numbers.start, numbers.stop, BATCH):
            part = range(start, min(start + BATCH, numbers.stop))
            keys = [mark(self.name) + b"%d" % (number % 8) for number in part]
            self.producers[topic].send_many(payloads(self.name, part), keys=keys)

    def read(self, consumer: Any) -> None:
        """Acknowledge the orders until none is missing."""
        seen = Seen(self.name, RECORDS)
        for batch in consumer.batches():
            seen.add(batch.payloads, batch.keys)
            batch.ack()
            if not seen.missing:
                break
        consumer.flush()

    def refuse(self) -> None:
        """Give back what is to fail, until a letter of each has come."""
        self.publish("failing", range(FAILING))
        seen, letters = Seen(self.name, FAILING), Seen(self.name, FAILING)
        while seen.missing or letters.missing:
            for message in received(self.failing):
                seen.add([message.payload], [message.key])
                message.nack(reason=f"{mark(self.name).decode()}reason")
            for message in received(self.letters):
                letters.add([message.payload], [message.key])
                assert message.attributes["x-original-topic"] == self.topic("failing")
                assert other(self.name) not in repr(message.attributes)
                message.ack()

    def watch(self, over: threading.Event) -> None:
        """Publish what is kept nowhere beside the kills, and behind them until enough has come."""
        seen, number = Seen(self.name, 1 << 20), 0
        while not over.is_set() or seen.total < LIVE:
            self.publish("live", range(number, number + 50))
            number = (number + 50) % (1 << 19)
            for message in received(self.live):
                seen.add([message.payload], [message.key])
                message.ack()

    def ends(self, topic: str, end: str) -> list[int]:
        return [int(one[end]) for one in self.admin.describe_topic(self.topic(topic)).partitions]

    def move(self, topic: str) -> None:
        """Have a topic's records in the store alone."""
        sealed = self.admin.seal(self.topic(topic))

        def moved() -> bool:
            return all(map(operator.ge, self.ends(topic, "local_start"), sealed))

        wait_until(moved, WITHIN_S, f"{self.topic(topic)} is in the store alone")

    def view(self) -> str:
        """All that this tenant may see of the broker."""
        told = [self.admin.list_topics(), self.admin.namespaces()]
        for topic in map(self.topic, ("orders", "failing", "letters", "live")):
            told += [self.admin.describe_topic(topic), self.admin.storage_status(topic)]
        told.append(self.admin.describe_subscription(self.topic("failing"), "reader"))
        for refused in (
            self.admin.quotas,
            self.admin.storage_status,
            lambda: self.admin.describe_topic(f"/{other(self.name)}/orders"),
            lambda: self.admin.storage_status(f"/{other(self.name)}/orders"),
        ):
            with pytest.raises(NotAllowed) as caught:
                refused()
            told.append(str(caught.value).replace(f"/{other(self.name)}/orders", "what was asked for"))
        return repr(told)


def received(consumer: Any) -> Iterator[Any]:
    """What has come, until nothing has for a moment."""
    with suppress(OperationTimeout):
        while True:
            yield consumer.receive(timeout=0.2)


def parts_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            yield part


def owners(parts: Iterable[bytes]) -> dict[str, int]:
    """How many payloads of each tenant some bytes hold; tenants of whom they hold nothing are left out."""
    found, kept, least = dict.fromkeys(TENANTS, 0), b"", len(mark(TENANTS[0]))
    any_byte = dict.fromkeys(TENANTS, False)
    for part in parts:
        text = kept + part
        for tenant in TENANTS:
            any_byte[tenant] |= mark(tenant) in text
            found[tenant] += text.count(mark(tenant) + b"0")
        kept = text[-least:]
    return {tenant: found[tenant] for tenant in TENANTS if any_byte[tenant]}


def files_of(folder: Path) -> dict[str, int]:
    """How many files hold bytes of each tenant; no file holds some of both."""
    count = dict.fromkeys(TENANTS, 0)
    for path in folder.rglob("*"):
        found: dict[str, int] = {}
        with suppress(FileNotFoundError):  # it was replaced meanwhile
            found = owners(parts_of(path)) if path.is_file() else {}
        assert len(found) < 2, f"{path} holds bytes of both"
        for tenant in found:
            count[tenant] += 1
    return count


def objects_of(server: S3Server, bucket: str) -> dict[str, int]:
    """How many records of each tenant objects hold; no object holds bytes of both."""
    count, client = dict.fromkeys(TENANTS, 0), server.client()
    for one in client.list_objects(bucket, recursive=True):
        try:
            answer = client.get_object(bucket, one.object_name)
        except S3Error as error:
            assert error.code == "NoSuchKey", error
            continue  # a newer one of its kind has taken its place since it was listed
        try:
            found = owners(answer.stream(CHUNK))
        finally:
            answer.close()
            answer.release_conn()
        assert len(found) < 2, f"{one.object_name} holds bytes of both"
        for tenant, records in found.items():
            count[tenant] += records
    return count


def publish_beside_kills(site: Site, tenants: list[Tenant], pool: ThreadPoolExecutor) -> None:
    for part in range(PARTS):
        numbers = range(part * RECORDS // PARTS, (part + 1) * RECORDS // PARTS)
        running = [pool.submit(one.publish, "orders", numbers) for one in tenants]
        site.process.running_workers(60)
        site.process.kill_worker(part % 2)
        for one in running:
            one.result(WITHIN_S)
    site.process.running_workers(60)


def check_places(site: Site, metrics_port: int) -> None:
    """What is told, and what lies outside of logs and the cache, holds nothing of anybody's records."""
    for path in site.process.data_dir.iterdir():
        if path.name not in ("partitions", "cache"):
            assert files_of(path) == dict.fromkeys(TENANTS, 0), path
            assert not path.is_file() or owners(parts_of(path)) == {}, path
    text = site.process.output_path.read_bytes()
    assert b" DEBUG " in text and owners([text]) == {}, "the log holds records"
    scraped = Scraped(metrics_port).text
    assert all(f"/{tenant}/orders" in scraped for tenant in TENANTS), "an operator sees both"
    assert owners([scraped.encode()]) == {}


def test_neither_of_two_tenants_meets_a_byte_of_the_other(broker: Any, s3_server: S3Server) -> None:
    bucket, port, over = s3_server.make_bucket(), free_port(), threading.Event()

    def make(workers: int, environment: dict[str, str]) -> Any:
        store = s3_server.environ(bucket, "p")
        arguments = ["--log-level", "debug", "--metrics-port", str(port)]
        return broker(workers=workers, arguments=arguments, environment=environment | STORAGE | store)

    site = Site(make, workers=2)
    with ThreadPoolExecutor(10) as pool, ExitStack() as stack:
        stack.callback(over.set)
        stack.callback(site.close)
        tenants = [Tenant(site, name, stack) for name in TENANTS]
        beside = [pool.submit(one.read, one.orders) for one in tenants]
        beside += [pool.submit(one.refuse) for one in tenants]
        watching = [pool.submit(one.watch, over) for one in tenants]
        publish_beside_kills(site, tenants, pool)
        over.set()
        for running in beside + watching:
            running.result(WITHIN_S)
        assert min(files_of(site.process.data_dir / "partitions").values()) >= 2, "of each partition its own"
        for one in tenants:
            assert sum(one.ends("orders", "high_watermark")) == RECORDS
            for topic in ("orders", "failing", "letters"):
                one.move(topic)
        cold = [pool.submit(one.read, one.reader("orders", "again")) for one in tenants]
        for running in cold:
            running.result(WITHIN_S)
        assert min(files_of(site.process.data_dir / "cache").values()) >= 2
        assert min(objects_of(s3_server, bucket).values()) >= RECORDS + 2 * FAILING
        check_places(site, port)
        for one in tenants:
            assert f"/{one.name}/letters" in (view := one.view()) and other(one.name) not in view


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    north, south = payloads("north", range(7)), payloads("south", range(1))
    text = b"".join(north)
    assert owners(text[start : start + 13] for start in range(0, len(text), 13)) == {"north": 7}
    assert owners([text, south[0]]) == {"north": 7, "south": 1}
    assert owners([text, mark("south")]) == {"north": 7, "south": 0}, "a key, say"
    (tmp_path / "both").write_bytes(text + south[0])
    with pytest.raises(AssertionError, match="holds bytes of both"):
        files_of(tmp_path)
    seen = Seen("north", 7)
    seen.add(north[:5], ["north-owns 3"])
    assert (seen.missing, seen.total) == (2, 5)
    for payload, key in ((south[0], "north-owns 3"), (north[0], "south-owns 3")):
        with pytest.raises(AssertionError):
            seen.add([payload], [key])
