"""Files and copies in other places, and retention in a race (rows B15, B17 and K5 of docs/reliability.md)."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from danube.core.placement.recovered import OFFSETS_AHEAD
from danube.errors import OffsetOutOfRange
from danube.wal.segments.segment import base_offset_of
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.side_by_side import Bench, beside
from tests.e2e.side_by_side import lanes as lanes
from tests.e2e.test_tiering import cli, copied_floor
from tests.e2e.tiered_site import SETTINGS, TOPIC, WAIT_S, Record, payload, tiered
from tests.s3_server import S3Server

pytestmark = pytest.mark.timeout(240)
FIRST, SECOND = "/default/first", "/default/second"
SIZE = 2_000


# -- B15: files of other places ---------------------------------------------------------------------


def fill(process: BrokerProcess, topic: str, mark: bytes) -> None:
    """Three sealed segments of ten records that name their topic."""
    with sync.connect(process.address) as client:
        with client.producer(topic, name="writer") as producer:
            for number in range(3):
                producer.send_many([mark + b"%04d" % (10 * number + one) for one in range(10)])
                client.admin.seal(topic)


def all_of(process: BrokerProcess, topic: str, count: int) -> list[Record]:
    with sync.connect(process.address) as client:
        with client.consumer(topic, "all", "exclusive", start="earliest") as consumer:
            found = []
            for _ in range(count):
                message = consumer.receive(timeout=30)
                found.append((message.offset, bytes(message.payload)))
                message.ack_nowait()
    return found


def segments(process: BrokerProcess) -> dict[str, list[Path]]:
    """Sealed segments with records by the topic that they hold."""
    found: dict[str, list[Path]] = {}
    for path in sorted(process.data_dir.glob("partitions/*/*.seg")):
        data = path.read_bytes()
        for topic, mark in ((FIRST, b"first-"), (SECOND, b"second-")):
            if mark in data and base_offset_of(path.name) is not None:
                found.setdefault(topic, []).append(path)
    return found


def test_files_moved_between_topics_are_served_by_neither(broker: Any) -> None:
    """Swapped with another topic's of the same offsets, renamed to other offsets, copied beside, missing."""
    process = broker(workers=2)
    fill(process, FIRST, b"first-")
    fill(process, SECOND, b"second-")
    process.kill()
    first, second = segments(process)[FIRST], segments(process)[SECOND]
    swapped = first[0].read_bytes()
    first[0].write_bytes(second[0].read_bytes())  # of another topic, offsets and length fit
    second[0].write_bytes(swapped)
    first[1].rename(first[1].with_name(f"{777:020d}.seg"))  # other offsets, so its own are missing
    shutil.copy(second[1], first[2].with_name(f"{888:020d}.seg"))  # one too many, of another topic
    process.start()
    expected = {FIRST: b"first-", SECOND: b"second-"}
    whole = {FIRST: range(20, 30), SECOND: range(10, 30)}
    for topic, mark in expected.items():
        found = all_of(process, topic, len(whole[topic]))
        assert found == [(number, mark + b"%04d" % number) for number in whole[topic]], (
            "no record of the other"
        )
    with sync.connect(process.address) as client:
        damaged = {topic: client.admin.describe_topic(topic).partitions[0]["damaged"] for topic in expected}
        assert damaged == {FIRST: [[0, 20]], SECOND: [[0, 10]]}, "what is missing is told"
        with client.producer(FIRST) as producer:
            assert producer.send(b"after").offset >= 30
    assert len(list(process.data_dir.glob("partitions/*/*.aside*"))) == 4, "set aside for a person to look at"


# -- K5: backup and restore on another host -----------------------------------------------------------


def copy_of_store(source: Path, target: Path) -> None:
    """A point in time of a store that is in use: manifests first, then the objects that they may name."""
    listed = sorted(path for path in source.rglob("*") if path.is_file())
    late = [path for path in listed if path.suffix == ".seg"]
    for path in [*(one for one in listed if one not in late), *late]:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)


def numbers(records: list[Record]) -> dict[int, bytes]:
    return dict(records)


def test_a_copy_of_the_store_at_a_point_in_time_is_a_broker_on_another_host(
    broker: Any, tmp_path: Path
) -> None:
    store, backup = tmp_path / "store", tmp_path / "backup"
    store.mkdir()
    process = broker(arguments=["--storage", f"file://{store}"], environment=SETTINGS)
    sent: list[Record] = []

    def publish(count: int) -> None:
        with sync.connect(process.address) as client, client.producer(TOPIC, name="writer") as producer:
            for _ in range(count):
                data = payload(len(sent), SIZE)
                sent.append((producer.send(data).offset, data))
        cli("topics", "seal", TOPIC, "-s", process.address, "--wait")

    for _ in range(3):
        publish(100)
    with sync.connect(process.address) as client:
        with client.consumer(TOPIC, "half", "exclusive", start="earliest") as consumer:
            for _ in range(150):
                consumer.receive(timeout=30).ack()
            consumer.flush()
    wait_until(lambda: copied_floor(store, "half") == 150, WAIT_S, "the cursor copied")
    wait_until(lambda: any(store.glob("metadata/*")), WAIT_S, "the metadata copied")
    copy_of_store(store, backup)  # beside the running broker
    publish(100)
    process.kill()
    url = f"file://{backup}"
    cli("verify", url)
    other = tmp_path / "other-host"
    cli("storage", "restore", url, "--data-dir", str(other))
    again = broker(arguments=["--storage", url], environment=SETTINGS, data_dir=other)
    found = all_from(again, 300)
    assert found == sent[:300], "the point in time, each offset with its record"
    with sync.connect(again.address) as client:
        with client.consumer(TOPIC, "half", "exclusive") as consumer:
            assert consumer.receive(timeout=30).offset == 150
        with client.producer(TOPIC, name="writer") as producer:
            assert producer.send(b"on another host").offset > 300 + OFFSETS_AHEAD, (
                "the first host may give 300"
            )
    assert again.stop() == 0
    cli("verify", str(other), url)


def all_from(process: BrokerProcess, count: int) -> list[Record]:
    with sync.connect(process.address) as client:
        with client.consumer(TOPIC, "audit", "exclusive", start="earliest") as consumer:
            found = []
            for _ in range(count):
                message = consumer.receive(timeout=30)
                found.append((message.offset, bytes(message.payload)))
                message.ack_nowait()
    return found


def test_an_old_host_that_comes_back_after_a_restore_changes_nothing_in_the_store(
    broker: Any, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    url = f"file://{store}"
    old = broker(arguments=["--storage", url], environment=SETTINGS)

    def publish(process: BrokerProcess, data: bytes) -> list[Record]:
        with sync.connect(process.address) as client, client.producer(TOPIC, name="writer") as producer:
            sent = [(producer.send(data).offset, data) for _ in range(50)]
            client.admin.seal(TOPIC)
        return sent

    sent = publish(old, b"before")
    cli("topics", "seal", TOPIC, "-s", old.address, "--wait")
    wait_until(lambda: any(store.rglob("metadata/*")), WAIT_S, "metadata copied")
    old.kill()  # nobody can reach it: it is taken for dead
    other = tmp_path / "other-host"
    cli("storage", "restore", url, "--data-dir", str(other))
    new = broker(arguments=["--storage", url], environment=SETTINGS, data_dir=other)
    sent += publish(new, b"on the new host")
    cli("topics", "seal", TOPIC, "-s", new.address, "--wait")
    assert new.stop() == 0
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    old.start()  # and draws the epochs that the new one had
    publish(old, b"on the old host")
    wait_until(lambda: "another host has taken over" in told_by(old), WAIT_S, "the old host is told")
    assert old.stop() == 0
    assert before == {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    new.start()
    assert all_from(new, 100) == sent
    assert new.stop() == 0
    cli("verify", str(other), url)


def told_by(process: BrokerProcess) -> str:
    """Why nothing of the topic moves."""
    with sync.connect(process.address) as client:
        return str(client.admin.storage_status(TOPIC)["topics"])


def test_a_copy_of_the_data_directory_is_a_broker_on_another_host(broker: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    arguments = ["--storage", f"file://{store}"]
    process = broker(arguments=arguments, environment=SETTINGS)
    sent: list[Record] = []
    with sync.connect(process.address) as client:
        with client.producer(TOPIC, name="writer") as producer:
            for number in range(3):
                for _ in range(100):
                    data = payload(len(sent), SIZE)
                    sent.append((producer.send(data).offset, data))
                if number < 2:
                    cli("topics", "seal", TOPIC, "-s", process.address, "--wait")
    assert process.stop() == 0
    other = tmp_path / "other-host"
    shutil.copytree(process.data_dir, other)
    cli("verify", str(other), f"file://{store}")
    again = broker(arguments=arguments, environment=SETTINGS, data_dir=other)
    assert all_from(again, 300) == sent
    with sync.connect(again.address) as client, client.producer(TOPIC, name="writer") as producer:
        assert producer.send(b"on another host").offset > 300 + OFFSETS_AHEAD, "the first may give 300"
    assert again.stop() == 0
    cli("verify", str(other), f"file://{store}")


# -- B17: retention, uploads that are paused, readers that are slow ----------------------------------


@beside  # retention is looked at every ten seconds
def test_retention_in_a_race_removes_nothing_but_what_expired_and_tells_the_new_start(
    bench: Bench, s3_server: S3Server
) -> None:
    with tiered(bench, s3_server, workers=1, DANUBE_STORAGE__LOCAL_RETENTION_TIME="1s") as site:
        kept, short = TOPIC, "/default/short"
        with sync.connect(site.address) as client:
            client.admin.create_topic(short, retention_ms=1_000)
            slow = client.consumer(short, "slow", "exclusive", start="earliest")
            with slow, client.producer(short, name="writer") as producer:
                producer.send_many([payload(number, SIZE) for number in range(10)])
                assert slow.receive(timeout=30).offset == 0  # and no ack
        site.publish(100)
        site.seal(kept)
        site.wait_moved(100)
        site.proxy.refuse()  # the uploader is paused
        site.publish(100)
        site.seal(kept)
        time.sleep(1.1)  # whoever looks when the other topic may expire finds these beyond local retention
        with sync.connect(site.address) as client, client.producer(short, name="writer") as producer:
            client.admin.seal(short)
            (first, *_) = producer.send_many([payload(10 + number, SIZE) for number in range(10)])
            assert first.offset == 10
        wait_until(lambda: site.partition(short)["start"] >= 10, WAIT_S, "what expired goes, uploaded or not")
        # The same look at all partitions of the one worker has met the older records of the other topic.
        assert site.partition(kept)["local_start"] == 100, "what is not verified in the store stays"
        with sync.connect(site.address) as client:
            with pytest.raises(OffsetOutOfRange) as caught:
                client.consumer(short, "exact", "exclusive", start=0).__enter__()
            assert caught.value.facts["start"] == 10, "the new start, not silence"
            (told,) = client.admin.describe_subscription(short, "slow").partitions
            assert told["expired"] == 10
            with client.consumer(short, "slow", "exclusive") as consumer:
                assert consumer.receive(timeout=30).offset == 10, "moved on, and counted"
        site.proxy.resume()
        site.wait_moved(200)
        assert site.read(200, "all") == site.sent
