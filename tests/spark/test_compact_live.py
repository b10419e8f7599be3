"""Compaction beside a running broker: published, compacted, consumed and verified, through kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from danube import sync
from danube.errors import ConnectionFailed, InvalidArgument, Unavailable
from danube.spark.history.access import ENVIRONMENT
from danube.spark.history.places import StorePlace, open_place
from danube.spark.jobs.compact import compact
from danube.spark.jobs.compact import live as compact_live
from danube.wal.segments.segment import LogIdentity
from danube.wal.tier.manifest import EntryFlag, Manifest
from tests import fork_server
from tests.broker_process import ROOT, BrokerProcess, wait_until
from tests.s3_server import S3Server

pytestmark = pytest.mark.e2e

TOPIC = "/default/moving"
QUIET = {  # the mover itself merges and compacts nothing
    "DANUBE_STORAGE__MERGE_BELOW": "0",
    "DANUBE_STORAGE__COMPACT_MIN_SIZE": "1GiB",
    "DANUBE_STORAGE__COMPACT_AFTER": "0s",
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1ms",
    "DANUBE_STORAGE__CACHE_SIZE": "32MiB",
}
SEALS = 12
PER_SEAL = 50


def cli(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "danube", *words]
    return fork_server.run(command, environment={**os.environ, **environment}, cwd=ROOT)


class Live:
    """A broker with a store, and what its producers were told."""

    def __init__(self, process: BrokerProcess, storage: str, options: dict[str, str]) -> None:
        self.process = process
        self.options = {"storage": storage, "broker": process.address, "processes": "1", **options}
        self.records: list[tuple[int, str, bytes]] = []

    @property
    def address(self) -> str:
        return self.process.address

    def create(self, **policy: Any) -> None:
        with sync.connect(self.address) as client:
            client.admin.create_topic(TOPIC, **policy)

    def fill(self, seals: int = SEALS) -> None:
        """Small sealed segments, all of them in the store."""
        with sync.connect(self.address) as client, client.producer(TOPIC, name="writer") as producer:
            for _ in range(seals):
                self.publish(producer, PER_SEAL)
                (end,) = client.admin.seal(TOPIC)
                assert end == len(self.records)
        wait_until(lambda: self.described()["uploaded_end"] >= len(self.records), 60, "all uploaded")

    def publish(self, producer: Any, count: int) -> None:
        start = len(self.records)
        made = [(number, f"k{number % 7}", b"v%06d" % number) for number in range(start, start + count)]
        for ack in producer.send_many([payload for _, _, payload in made], [key for _, key, _ in made]):
            assert ack.offset == start
            start += ack.record_count
        self.records += made

    def described(self) -> dict[str, Any]:
        with sync.connect(self.address) as client:
            return dict(client.admin.describe_topic(TOPIC).partitions[0])

    def manifest(self) -> Manifest:
        place = open_place(self.options["storage"], self.settings())
        assert isinstance(place, StorePlace)
        with sync.connect(self.address) as client:
            identity = LogIdentity(client.admin.topic(TOPIC).topic_id, 0)
        found = place.manifest(identity)
        assert found is not None
        return found

    def settings(self) -> Any:
        return compact.read_job_options(self.options, compact.READERS).settings

    def objects(self) -> int:
        place = open_place(self.options["storage"], self.settings())
        assert isinstance(place, StorePlace)
        return sum(info.key.endswith(".seg") for info in place.store().list("partitions/"))

    def read(self, name: str, count: int) -> list[tuple[int, str, bytes]]:
        found: list[tuple[int, str, bytes]] = []
        with sync.connect(self.address) as client:
            with client.consumer(TOPIC, subscription=name, start="earliest") as consumer:
                while len(found) < count:
                    message = consumer.receive(timeout=60)
                    found.append((message.offset, message.key or "", bytes(message.payload)))
                    message.ack()
        return found

    def stop_and_verify(self, **environment: str) -> None:
        assert self.process.stop() == 0
        done = cli("verify", str(self.process.data_dir), self.options["storage"], **environment)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def live(broker: Callable[..., BrokerProcess], tmp_path: Path) -> Live:
    """With a directory as the store."""
    store = tmp_path / "store"
    store.mkdir()
    process = broker(
        workers=2, arguments=["--storage", f"file://{store}"], environment=QUIET, data_dir=tmp_path / "data"
    )
    return Live(process, f"file://{store}", {})


@pytest.fixture
def on_s3(broker: Callable[..., BrokerProcess], s3_server: S3Server) -> tuple[Live, dict[str, str]]:
    """On the S3 server, and the environment that says how to reach it."""
    bucket = s3_server.make_bucket()
    environment = s3_server.environ(bucket, "deep/er")
    options = {
        "s3.endpoint": s3_server.endpoint, "s3.region": "us-east-1",
        "s3.accessKey": s3_server.access_key, "s3.secretKey": s3_server.secret_key,
    }  # fmt: skip
    process = broker(workers=2, environment={**QUIET, **environment})
    return Live(process, f"s3://{bucket}/deep/er", options), environment


def test_objects_on_s3_become_few_under_producers_and_consumers(on_s3: tuple[Live, dict[str, str]]) -> None:
    live, environment = on_s3
    live.create()
    live.fill()
    before = live.manifest()
    assert len(before) == SEALS
    stopping = threading.Event()
    failed: list[BaseException] = []

    def publish() -> None:
        try:
            with sync.connect(live.address) as client, client.producer(TOPIC, name="writer") as producer:
                while not stopping.is_set():
                    live.publish(producer, 20)
        except BaseException as error:  # told by the test
            failed.append(error)

    reading: list[list[tuple[int, str, bytes]]] = []
    count = len(live.records)
    threads = [
        threading.Thread(target=publish),
        threading.Thread(target=lambda: reading.append(live.read("beside", count))),
    ]
    for thread in threads:
        thread.start()
    try:
        words = [f"--{name}={value}" for name, value in live.options.items() if name.startswith("s3.")]
        done = cli(
            "spark", "compact", "--local", "--storage", live.options["storage"], "--broker", live.address,
            "--topic", TOPIC, *words,
        )  # fmt: skip
    finally:
        stopping.set()
        for thread in threads:
            thread.join(90)
    assert done.returncode == 0 and not failed, done.stderr
    assert f"{SEALS} objects became 1 (1 installed)" in done.stderr
    after = live.manifest()
    assert after.entry(0).flags & EntryFlag.MERGED and after.entry(0).end_offset == count
    assert (after.epoch, after.generation) > (before.epoch, before.generation)
    assert reading == [live.records[:count]]
    assert live.read("behind", len(live.records)) == live.records
    live.stop_and_verify(**environment)


def test_a_mover_and_workers_that_are_killed_meanwhile(live: Live) -> None:
    live.create()
    live.fill()
    stopping = threading.Event()
    killed: list[str] = []

    def kill() -> None:
        """Each of the first movers as soon as it is there, and a worker once."""
        seen: set[int] = set()
        while len(killed) < 5 and not stopping.wait(0.2):
            found = live.process.processes()
            role = "worker-0" if len(killed) == 2 else "mover"
            pid = found.get(role, 0)
            if pid and pid not in seen:
                seen.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.append(role)

    thread = threading.Thread(target=kill)
    size = live.manifest().entry(0).size_bytes
    thread.start()
    try:
        report = compact.run({**live.options, "below": str(size * 2), "to": str(size * 3)})
    finally:
        stopping.set()
        thread.join(30)
    assert killed, "it was disturbed at least once"
    assert report.counts["installed"] == report.counts["objects"] >= 4, report.remarks
    assert report.exit_code == 0
    assert live.read("all", len(live.records)) == live.records
    assert compact.run({**live.options, "below": str(size * 2), "to": str(size * 3)}).counts["objects"] == 0
    live.stop_and_verify()


def test_the_latest_of_each_key_in_topics_that_want_it(live: Live) -> None:
    live.create(cleanup="compact", tombstone_retention_ms=0)
    live.fill(6)
    with sync.connect(live.address) as client, client.producer(TOPIC, name="writer") as producer:
        producer.send(b"", key="k3")
        client.admin.seal(TOPIC)
        producer.send(b"last", key="k5")
        client.admin.seal(TOPIC)
    count = len(live.records)
    wait_until(lambda: live.described()["uploaded_end"] == count + 2, 60, "all uploaded")
    options = {**live.options, "keys": "true", "compactAfter": "0s", "tombstoneAge": "0s"}
    report = compact.run({**options, "to": str(2 * live.manifest().entry(0).size_bytes)})
    assert report.counts["installed"] == report.counts["objects"] > 1, report.remarks
    latest = {key: (offset, key, payload) for offset, key, payload in live.records if key != "k3"}
    left = [*sorted(latest.values()), (count + 1, "k5", b"last")]
    assert report.counts["removed_records"] == count + 2 - len(left)
    assert live.read("all", len(left)) == left, "and k3 is gone with its tombstone"
    assert all(live.manifest().entry(n).flags & EntryFlag.COMPACTED for n in range(len(live.manifest()) - 1))
    live.stop_and_verify()


def copied(store: Path, target: Path) -> Path:
    """What the store holds by now, while others write to it."""
    for path in store.rglob("*"):
        place = target / path.relative_to(store)
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError, IsADirectoryError):  # a temporary one, a directory
            place.write_bytes(path.read_bytes())
    return target


def test_what_the_broker_would_not_take_is_not_staged(live: Live, tmp_path: Path) -> None:
    live.create()
    live.fill(3)
    before = live.objects()
    report = compact.run({**live.options, "keys": "true"})
    assert report.exit_code == 9 and report.counts["left_alone"] == 1 and report.counts["objects"] == 0
    assert "cleanup" in report.remarks[0] and live.objects() == before
    storage = f"file://{copied(tmp_path / 'store', tmp_path / 'copy')}"  # a deleted topic's objects go
    with sync.connect(live.address) as client:
        client.admin.delete_topic(TOPIC)
        assert "does not have the topic" in compact.run({**live.options, "storage": storage}).remarks[0]
        client.admin.create_topic(TOPIC)
    assert "made again" in compact.run({**live.options, "storage": storage}).remarks[0]


def test_refused_objects_change_nothing(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged after they were staged: the broker reads them itself."""
    live.create()
    live.fill(4)
    before = live.manifest()
    stage = compact.stage
    staged: list[Path] = []

    def damaging(task: Any) -> bytes:
        known = set(Path(live.options["storage"][7:]).rglob("*.seg"))
        made = stage(task)
        for path in set(Path(live.options["storage"][7:]).rglob("*.seg")) - known:
            data = bytearray(path.read_bytes())
            data[300] ^= 1
            path.write_bytes(data)
            staged.append(path)
        return made

    monkeypatch.setattr(compact, "stage", damaging)
    report = compact.run(live.options)
    assert report.counts["refused"] == 1 and report.exit_code == 9
    assert len(staged) == 1 and "cannot be installed" in report.remarks[-1]
    assert live.manifest().entries.tobytes() == before.entries.tobytes()
    assert live.read("all", len(live.records)) == live.records
    live.stop_and_verify()


def test_a_broker_that_does_not_answer_is_told(live: Live) -> None:
    live.create()
    live.fill(3)
    port = live.process.port
    live.process.stop()
    with pytest.raises(ConnectionFailed):
        compact.run(live.options)
    local = BrokerProcess(live.process.data_dir.parent / "other")
    local.port = port
    try:
        local.start()  # another broker, without a store and without the topic
        report = compact.run(live.options)
        assert report.exit_code == 9 and "does not have the topic" in report.remarks[0]
        with sync.connect(local.address) as client:
            client.admin.create_topic("/default/more")
            client.admin.create_topic(TOPIC)
        assert "made again" in compact.run(live.options).remarks[0]
    finally:
        local.kill()


def test_contradictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="needs a broker"):
        compact.run({"storage": f"file://{tmp_path}", "install": "live"})
    with pytest.raises(InvalidArgument, match="exclude each other"):
        compact.run({"storage": f"file://{tmp_path}", "install": "offline", "broker": "danube://x:1"})
    with pytest.raises(InvalidArgument, match="one of none, offline, live"):
        compact.run({"storage": f"file://{tmp_path}", "install": "now"})


class Questions:
    """What a broker answers, question after question; an error is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []

    def __call__(self, partition: str, topic_id: int, offered: Any) -> Any:
        self.asked.append(len(offered))
        answer = self.answers.pop(0) if self.answers else [("waiting", "busy")] * len(offered)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_rest_counts_as_unanswered_when_nothing_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from danube.wal.tier.manifest import SegmentEntry
    from danube.wal.tier.staged import staged

    def one(number: int) -> Any:
        entry = SegmentEntry(number, number + 1, 1, 1, 300, 200, 1, 1, 1, 1, 2, *[b"%016d" % number] * 3)
        return staged(entry, [entry])

    broker = compact_live.LiveBroker("danube://127.0.0.1:1", ENVIRONMENT, 0.5)
    topic = SimpleNamespace(partitions=["/default/moving"])
    broker._client = SimpleNamespace(admin=SimpleNamespace(topic=lambda name: topic))  # type: ignore[assignment]
    questions = Questions(
        Unavailable("restarting"),
        [("installed", ""), ("waiting", ""), ("refused", "why")],
        [("waiting", "busy")],
    )
    monkeypatch.setattr(broker, "_ask", questions)
    monkeypatch.setattr(compact_live, "OFFERED_MAX", 3)
    manifest = Manifest.empty(TOPIC, LogIdentity(1, 0), 1)
    outcomes = broker.install(manifest, [one(number) for number in range(3)])
    assert [outcome.word for outcome in outcomes] == ["installed", "unanswered", "refused"]
    assert outcomes[1].why == "busy" and questions.asked[:3] == [3, 3, 1]
    monkeypatch.setattr(broker, "_ask", Questions(InvalidArgument("no such list")))
    assert [one.word for one in broker.install(manifest, [one(1)])] == ["refused"]
    monkeypatch.setattr(compact_live, "OFFERED_BYTES_MAX", 1)
    assert len(compact_live._first_of([one(1), one(2)])) == 1
