"""Replays in a real Spark session: chosen by an SQL expression, killed half-way, with tasks that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube.sync
from danube.client.blocking.client import Client
from danube.core.batch.checksum import content_hash
from danube.errors import DanubeError, InvalidArgument, RecordTooLarge
from tests.broker_process import BrokerProcess

pytest.importorskip("pyspark")
from danube.spark.jobs.replay import replay
from tests.spark.drivers import QUICK, kill_tree, start_driver, wait_for_driver

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SOURCE = "/default/two-partitions"
COUNT = 30_000
CHOSEN = "attributes['odd'] = '1' AND cast(cast(payload AS string) AS int) < 24000"


@pytest.fixture(scope="module")
def process(process: BrokerProcess) -> BrokerProcess:
    """With the topic that is replayed."""
    with (
        danube.sync.connect(process.address) as client,
        client.producer(SOURCE, partitions=2, batch_bytes=8192) as producer,
    ):
        producer.send_many(
            [b"%d" % number for number in range(COUNT)],
            [f"k{number % 97}" if number % 5 else None for number in range(COUNT)],
            [{"odd": str(number % 2)} for number in range(COUNT)],
        )
    return process


@pytest.fixture(scope="module")
def client(process: BrokerProcess) -> Iterator[Client]:
    with danube.sync.connect(process.address) as connected:
        yield connected


@pytest.fixture
def given(process: BrokerProcess, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    return {
        "storage": str(process.data_dir),
        "topic": SOURCE,
        "to": process.address,
        "toTopic": f"/default/{request.node.name}",
        "state": str(tmp_path / "state.json"),
    }


def ends(client: Client, topic: str) -> list[int]:
    return [int(part["log_end"]) for part in client.admin.describe_topic(topic).partitions]


def contents(client: Client, topic: str) -> list[list[tuple[Any, ...]]]:
    expected = sum(ends(client, topic))
    found: list[Any] = []
    with client.consumer(topic, f"check-{expected}", "exclusive", start="earliest") as consumer:
        while len(found) < expected:
            found.append(consumer.receive(timeout=10))
    parts: list[list[tuple[Any, ...]]] = [[] for _ in ends(client, topic)]
    for one in sorted(found, key=lambda message: message.offset):
        parts[one.partition].append((one.payload, one.key, one.attributes, one.publish_time_us))
    return parts


def selected(parts: list[list[tuple[Any, ...]]]) -> list[list[tuple[Any, ...]]]:
    """What CHOSEN is true for."""
    return [[one for one in part if int(one[0]) % 2 and int(one[0]) < 24_000] for part in parts]


def digest(parts: list[list[tuple[Any, ...]]]) -> str:
    return content_hash(repr(parts).encode()).hex()


def test_everything(spark: Any, client: Client, given: dict[str, str]) -> None:
    report = replay.run(given, spark)
    assert report.counts["records"] == COUNT
    assert digest(contents(client, given["toTopic"])) == digest(contents(client, SOURCE))
    rows = replay.frame_of(spark, report).orderBy("partition").collect()
    assert [row["rows"] for row in rows] == ends(client, SOURCE)
    assert replay.run(given, spark).counts["passed_over"] == COUNT


def test_what_an_expression_chooses(spark: Any, client: Client, given: dict[str, str]) -> None:
    given["where"] = CHOSEN
    expected = selected(contents(client, SOURCE))
    dry = replay.run({**given, "dryRun": "true"}, spark)
    assert dry.counts["records"] == sum(map(len, expected))
    report = replay.run(given, spark)
    assert report.counts["records"] == sum(map(len, expected)) and report.counts["offered"] == COUNT
    assert digest(contents(client, given["toTopic"])) == digest(expected)
    again = replay.run(given, spark)
    assert again.counts["passed_over"] == again.counts["records"] == report.counts["records"]
    assert digest(contents(client, given["toTopic"])) == digest(expected)


def test_a_driver_that_was_killed(spark: Any, client: Client, given: dict[str, str], tmp_path: Path) -> None:
    topic, expected = given["toTopic"], selected(contents(client, SOURCE))
    total = sum(map(len, expected))
    client.admin.create_topic(topic, partitions=2)
    given["where"] = CHOSEN
    words = words_of({**given, "maxRecordsPerSecond": "2000", "batchBytes": "1KiB"})
    words += ["--master", "local[2]", *(f"--conf={name}={value}" for name, value in QUICK.items())]
    output = tmp_path / "output"
    driver = start_driver("danube.spark.jobs.replay.replay", words, output)
    try:
        wait_for_driver(
            driver, lambda: sum(ends(client, topic)) >= total // 3, "the replay publishes", output
        )
    finally:
        kill_tree(driver)
    assert total // 3 <= sum(ends(client, topic)) < total
    report = replay.run(given, spark)
    assert total // 3 <= report.counts["passed_over"] < total
    assert digest(contents(client, topic)) == digest(expected)


def words_of(given: dict[str, str]) -> list[str]:
    words: list[str] = []
    for name, value in given.items():
        words += ["--" + "".join(f"-{one.lower()}" if one.isupper() else one for one in name), value]
    return words


def test_an_expression_that_is_none(spark: Any, given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="where cannot be evaluated"):
        replay.run({**given, "where": "colour = 'blue'"}, spark)


def test_the_error_of_a_task_reaches_the_caller(spark: Any, client: Client, given: dict[str, str]) -> None:
    client.admin.create_topic(given["toTopic"], max_record_bytes=1024)
    client.admin.create_topic(given["toTopic"] + "-source")
    with client.producer(given["toTopic"] + "-source") as producer:
        producer.send_many([b"small", b"large" * 1000])
    given["topic"] = given["toTopic"] + "-source"
    for where in ("", "offset >= 0"):
        given |= {"where": where, "state": given["state"] + "-2"}
        with pytest.raises(DanubeError) as caught:
            replay.run(given, spark)
        assert isinstance(caught.value, RecordTooLarge)
