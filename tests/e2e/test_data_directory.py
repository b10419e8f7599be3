"""A start on a data directory that others touched: it serves, or says what is wrong and how to mend it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from tests.broker_process import Brokers, wait_until


def send_one(process: Any, topic: str = "/default/t") -> None:
    with sync.connect(process.address) as client, client.producer(topic) as producer:
        producer.send(b"one")


def test_strangers_in_a_fresh_directory_are_named_and_left_alone(broker: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for place in ("partitions", "metadata", "cache", "."):
        (data / place / "lost+found").mkdir(parents=True)
        (data / place / ".DS_Store").write_bytes(bytes(100))
    process = broker(data_dir=data)
    send_one(process)
    told = process.output_tail()
    assert str(data / "partitions" / "lost+found") in told and "left alone" in told
    assert process.stop() == 0
    process.start()
    send_one(process)
    assert (data / "partitions" / "lost+found").is_dir() and (data / "partitions" / ".DS_Store").exists()


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


HARMED: dict[str, Callable[[Path], object]] = {
    "metadata.log flipped": lambda data: flip(data / "metadata" / "metadata.log", 50),
    "metadata.log cut": lambda data: os.truncate(data / "metadata" / "metadata.log", 30),
    "metadata.log missing": lambda data: (data / "metadata" / "metadata.log").unlink(),
    "incarnation garbage": lambda data: (data / "incarnation").write_bytes(b"x"),
    "incarnation missing": lambda data: (data / "incarnation").unlink(),
    "format garbage": lambda data: (data / "format").write_bytes(b"\0"),
}


@pytest.mark.parametrize("harm", HARMED)
def test_a_file_that_the_broker_needs_is_named_with_place_and_remedy(
    broker: Any, used: Path, tmp_path: Path, harm: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(used, data)
    HARMED[harm](data)
    process = broker(data_dir=data, start=False)
    process.launch()
    wait_until(lambda: not process.running, 60, "the broker refuses")
    told = process.output_tail()
    name = str(data / ("metadata/" * harm.startswith("metadata") + harm.split()[0]))
    assert process.exit_code == 12, told
    assert f"error: {name}" in told or f"error: metadata log {name}" in told
    assert "Traceback" not in told and "why: " in told and "try: " in told


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a broker that took a record and was stopped."""
    place = tmp_path_factory.mktemp("used")
    brokers = Brokers(place)
    process = brokers.make(place / "data")
    try:
        send_one(process)
        assert process.stop() == 0
        yield place / "data"
    finally:
        brokers.kill()


def test_what_vanished_is_named_and_a_subscription_begins_at_the_earliest(
    broker: Any, tmp_path: Path
) -> None:
    data, topic = tmp_path / "data", "/default/t"
    process = broker(data_dir=data)
    with sync.connect(process.address) as client:
        with client.producer(topic) as producer:
            last = [producer.send(b"%d" % number) for number in range(10)][-1].offset
        for name in ("returns", "dropped"):
            with client.consumer(topic, subscription=name, start="latest"):
                pass
    assert process.stop() == 0
    (directory,) = (data / "partitions").iterdir()
    shutil.rmtree(directory)
    process.start()
    with sync.connect(process.address) as client:
        (described,) = client.admin.describe_topic(topic).partitions
        assert described["damaged"] == [[0, 10]] and described["lost_subscriptions"] == ["dropped", "returns"]
        told = process.output_tail()
        assert "the log's directory is gone" in told and "the cursor of a subscription is gone" in told
        with client.consumer(topic, subscription="another", start="latest"):
            pass  # its cursor makes the files anew
        with client.producer(topic) as producer:
            assert producer.send(b"new").offset > last + 1_000_000
    process.restart()
    with sync.connect(process.address) as client:
        with client.consumer(topic, subscription="returns", start="latest") as consumer:
            assert consumer.receive(timeout=10).payload == b"new"
        client.admin.delete_subscription(topic, "dropped")
        (described,) = client.admin.describe_topic(topic).partitions
        assert described["lost_subscriptions"] == []
    assert process.stop() == 0
    process.start()
    with sync.connect(process.address) as client:
        assert client.admin.describe_topic(topic).partitions[0]["lost_subscriptions"] == []
        client.admin.delete_topic(topic)
    wait_until(lambda: not list((data / "witnesses").iterdir()), 10, "the witness is gone")
