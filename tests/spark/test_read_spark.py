"""``format("danube")`` in a real session: counts, columns, errors, streams, restarts and the live tail."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
from pyspark.sql.pandas.types import to_arrow_schema

import danube.sync
from danube.cluster.log import log_file
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.spark.history.decode import COLUMNS
from danube.spark.jobs.export import export
from danube.spark.source.schema import COLUMNS as SPARK_COLUMNS
from danube.wal.segments.segment import LogIdentity
from tests.broker_process import ROOT, BrokerProcess, wait_until
from tests.spark.drivers import kill_tree, start_driver, wait_for_driver
from tests.spark.history import PARTED, TOPIC, Journal, digest_of_frame, publish
from tests.spark.stored_history import metadata_of, write_history
from tests.spark.stream_reader import started

pytestmark = pytest.mark.e2e


def reading(spark: Any, storage: str, topic: str = TOPIC, **given: Any) -> Any:
    reader = spark.read.format("danube").option("storage", storage).option("topic", topic)
    for name, value in given.items():
        reader = reader.option(name, value)
    return reader


def test_the_columns_are_the_same_ones_for_arrow_and_for_spark() -> None:
    assert to_arrow_schema(SPARK_COLUMNS, timezone="UTC").equals(COLUMNS)


def test_rows_are_what_producers_sent(spark: Any, stored: tuple[str, Journal, Journal]) -> None:
    storage, orders, parted = stored
    frame = reading(spark, storage).load()
    assert frame.count() == len(orders.records)
    assert digest_of_frame(frame) == orders.digest()
    both = reading(spark, storage, "/default/*").load()
    assert both.count() == len(orders.records) + len(parted.records)
    assert digest_of_frame(both.where(f"topic = '{PARTED}'")) == parted.digest()
    named = reading(spark, storage, f"{TOPIC},{PARTED}", minPartitions=7).load()
    assert {row.topic for row in named.select("topic").distinct().collect()} == {TOPIC, PARTED}


def test_no_order_of_queries_changes_a_count(spark: Any, stored: tuple[str, Journal, Journal]) -> None:
    storage, orders, _ = stored
    total, bound = len(orders.records), 500
    frame = reading(spark, storage).load()
    questions: dict[str, tuple[Callable[[], int], int]] = {
        "all": (frame.count, total),
        "above": (lambda: frame.where(f"offset >= {bound}").count(), total - bound),
        "below": (lambda: frame.where(f"offset < {bound}").count(), bound),
        "none": (lambda: frame.where("topic = 'x'").count(), 0),
        "limit": (lambda: len(frame.limit(3).collect()), 3),
        "narrow": (lambda: frame.select("offset").count(), total),
    }
    source = random.Random(5)
    for pushdown, orders in (("false", 1), ("true", 2)):
        spark.conf.set("spark.sql.python.filterPushdown.enabled", pushdown)
        try:
            for _ in range(orders):
                names = source.sample(list(questions), len(questions))
                found = {name: questions[name][0]() for name in names}
                assert found == {name: questions[name][1] for name in names}, (pushdown, names)
        finally:
            spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_only_the_columns_of_the_schema_are_read(spark: Any, stored: tuple[str, Journal, Journal]) -> None:
    storage, orders, _ = stored
    frame = reading(spark, storage).schema("offset long, key binary").load()
    assert frame.columns == ["offset", "key"]
    rows = {row.offset: row.key and bytes(row.key) for row in frame.collect()}
    assert rows == {offset: record[1] for (_, offset), record in orders.records.items()}
    without = reading(spark, storage, includeAttributes="false").load()
    assert "attributes" not in without.columns and without.count() == len(orders.records)


def test_ranges_are_options(spark: Any, stored: tuple[str, Journal, Journal]) -> None:
    storage, orders, parted = stored
    total = len(orders.records)
    bounds = {
        "startingOffsets": json.dumps({TOPIC: {"0": 100}}),
        "endingOffsets": json.dumps({TOPIC: {"0": 333}}),
    }
    rows = reading(spark, storage, **bounds).load().agg({"offset": "min", "*": "count"}).collect()
    assert [tuple(row) for row in rows] in ([(100, 233)], [(233, 100)])
    times = reading(spark, storage).load().selectExpr("min(append_time)", "max(append_time)").first()
    first, last = (int(moment.timestamp() * 1_000) for moment in times)
    assert reading(spark, storage, startingTimestamp=first).load().count() == total
    assert reading(spark, storage, endingTimestamp=first).load().count() == 0
    middle = (first + last) // 2
    before = reading(spark, storage, endingTimestamp=middle).load().count()
    after = reading(spark, storage, startingTimestamp=middle).load().count()
    assert 0 < before < total and before + after == total
    one = reading(spark, storage, PARTED, startingOffsets=json.dumps({PARTED: {"0": -1, "1": -2, "2": -1}}))
    assert one.load().count() == parted.between(1, 0, 10**9)


def test_damage_is_an_error_that_names_it_or_counted(
    spark: Any, stored: tuple[str, Journal, Journal], tmp_path: Path
) -> None:
    shutil.copytree(stored[0], tmp_path / "data")
    total = len(stored[1].records)
    path = max((tmp_path / "data").rglob("*.seg"), key=lambda found: found.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(Exception) as failure:
        reading(spark, str(tmp_path / "data"), f"{TOPIC},{PARTED}").load().count()
    assert re.search(rf"{path.name} is damaged at byte \d+", str(failure.value))
    assert "failOnDataLoss=false skips them" in str(failure.value)
    frame = reading(spark, str(tmp_path / "data"), f"{TOPIC},{PARTED}", failOnDataLoss="false").load()
    both = total + len(stored[2].records)
    left = frame.count()
    assert both - 800 < left < both, "one stored batch is lost"
    assert frame.select("topic", "partition", "offset").distinct().count() == left
    assert frame.where("offset >= 0").count() == left
    words = [str(tmp_path / "data"), "/default/*"]
    told = subprocess.run(
        [sys.executable, "-c", TASKS, *words], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert told.returncode == 0, told.stderr
    line = next(line for line in told.stderr.splitlines() if "records are lost" in line)
    assert path.name in line and "start=" in line and "checksum" in line


# What a worker of Spark does, in a process where nobody listens to events.
TASKS = """
import sys
from danube.spark.history.options import read_options
from danube.spark.source.schema import COLUMNS
from danube.spark.source.source import DanubeReader
given = {"storage": sys.argv[1], "topic": sys.argv[2], "failOnDataLoss": "false"}
reader = DanubeReader(read_options(given, streaming=False), COLUMNS)
for partition in reader.partitions():
    list(reader.read(partition))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"topics": TOPIC}, "option topics is not known: did you mean topic?"),
        ({"startingOffsets": '{"/default/other": {"0": 1}}'}, "which is not read"),
        ({"topic": "/default/ordres"}, "there is no topic /default/ordres"),
    ],
)
def test_mistakes_are_explained(
    spark: Any, stored: tuple[str, Journal, Journal], given: dict[str, str], expected: str
) -> None:
    """Of the options, and of what only places know; test_options has all the others."""
    with pytest.raises(Exception) as failure:
        reading(spark, stored[0], **given).load().count()
    assert expected in str(failure.value)


def test_a_column_that_is_not_there_is_named(spark: Any, stored: tuple[str, Journal, Journal]) -> None:
    with pytest.raises(Exception) as failure:
        reading(spark, stored[0]).schema("offset long, colour string").load().count()
    assert "there is no column colour" in str(failure.value)


def streamed(spark: Any, storage: str, checkpoint: str, name: str, topic: str = TOPIC, **given: Any) -> Any:
    """Rows that one run with AvailableNow adds, as a DataFrame, and the query."""
    reader = spark.readStream.format("danube").option("storage", storage).option("topic", topic)
    for key, value in {"startingOffsets": "earliest", **given}.items():
        reader = reader.option(key, value)
    found: list[Any] = []

    def take(batch: Any, number: int) -> None:
        found.extend(batch.select("partition", "offset", "payload", "key", "attributes").collect())

    writer = reader.load().writeStream.queryName(name).foreachBatch(take)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    return found, query


def test_a_stream_reads_in_steps_and_goes_on_where_it_was(
    spark: Any, broker: Callable[..., BrokerProcess], checkpoint: str
) -> None:
    running = broker()
    journal = Journal()
    with danube.sync.connect(running.address) as client:
        client.admin.create_topic(PARTED, partitions=2)
    storage = str(running.data_dir)
    publish(running, journal, random.Random(1), rounds=60, topic=PARTED)
    running.stop()
    rows, query = streamed(spark, storage, checkpoint, "first", PARTED, maxRecordsPerTrigger=50)
    assert len(rows) == len(journal.records) == len({row[:2] for row in rows})
    steps = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    assert len(steps) >= len(rows) // 50 and max(steps) <= 51
    again, _ = streamed(spark, storage, checkpoint, "second", PARTED)
    assert again == []
    running.start()
    publish(running, journal, random.Random(2), rounds=10, topic=PARTED)
    running.stop()
    rest, _ = streamed(spark, storage, checkpoint, "third", PARTED)
    found = {row[:2]: row for row in [*rows, *rest]}
    assert len(found) == len(rows) + len(rest)
    from tests.spark.history import digest

    assert digest([*rows, *rest]) == journal.digest()


def test_partitions_without_a_segment_are_empty_for_reads_streams_and_exports(
    spark: Any, tmp_path: Path, checkpoint: str
) -> None:
    """As after `topics create -p 4` and a few sends: of two partitions not even a directory is there."""
    data, topic = tmp_path / "data", "/default/sparse"
    created = CreateTopic(topic=topic, partitions=4, policy=TopicPolicy(), created_us=1)
    (data / "metadata").mkdir(parents=True)
    snapshot = metadata_of(created).snapshot()
    (data / "metadata" / "metadata.log").write_bytes(log_file.new_file(1, snapshot))
    count = write_history(data, LogIdentity(1, 1), segments=1)
    (data / "partitions" / LogIdentity(1, 2).directory_name).mkdir()
    where = [(1, offset) for offset in range(count)]
    read = reading(spark, str(data), topic).load().select("partition", "offset").collect()
    assert sorted((row.partition, row.offset) for row in read) == where
    rows, _ = streamed(spark, str(data), checkpoint, "sparse", topic)
    assert sorted((row.partition, row.offset) for row in rows) == where
    for name, session in (("here", None), ("there", spark)):
        given = {"storage": str(data), "topic": topic, "target": str(tmp_path / name), "processes": "1"}
        report = export.run(given, session)
        assert report.counts["records"] == count
        table = spark.read.parquet(str(tmp_path / name / "default.sparse"))
        assert sorted((row.partition, row.offset) for row in table.collect()) == where


def test_a_topic_made_again_is_not_taken_for_the_old_one(
    spark: Any, process: BrokerProcess, checkpoint: str
) -> None:
    storage, topic = str(process.data_dir), "/default/made-again"
    with danube.sync.connect(process.address) as client:
        client.admin.create_topic(topic)
        publish(process, Journal(), random.Random(1), rounds=3, topic=topic)
        wait_until(lambda: synced(client, topic), 10, "the log is on disk")
        rows, _ = streamed(spark, storage, checkpoint, "before", topic)
        client.admin.delete_topic(topic)
        client.admin.create_topic(topic)
        journal = Journal()
        publish(process, journal, random.Random(2), rounds=4, topic=topic)
        wait_until(lambda: synced(client, topic), 10, "the log is on disk")
        more, _ = streamed(spark, storage, checkpoint, "after", topic)
    assert rows and len(more) == len(journal.records)


def synced(client: Any, topic: str) -> bool:
    return all(
        facts["synced_end"] == facts["log_end"] for facts in client.admin.describe_topic(topic).partitions
    )


def test_the_live_tail_comes_from_the_broker(spark: Any, process: BrokerProcess, checkpoint: str) -> None:
    address, storage, topic = process.address, str(process.data_dir), "/default/live-tail"
    journal = Journal()
    with danube.sync.connect(address) as client:
        client.admin.create_topic(topic, partitions=2)
        publish(process, journal, random.Random(1), rounds=20, topic=topic)
        alone = spark.read.format("danube").option("broker", address).option("topic", topic).load()
        assert digest_of_frame(alone) == journal.digest()
        both = reading(spark, storage, topic, broker=address).load()
        assert digest_of_frame(both) == journal.digest()
        rows, _ = streamed(spark, storage, checkpoint, "one", topic, broker=address)
        publish(process, journal, random.Random(2), rounds=10, topic=topic)
        more, _ = streamed(spark, storage, checkpoint, "two", topic, broker=address)
        assert {row[:2] for row in rows}.isdisjoint(row[:2] for row in more)
        assert len(rows) + len(more) == len(journal.records)
        assert client.admin.list_subscriptions(topic) == []


@pytest.mark.slow
def test_a_stream_whose_driver_is_killed_loses_and_repeats_nothing(
    spark: Any, broker: Callable[..., BrokerProcess], tmp_path: Path, checkpoint: str
) -> None:
    running = broker()
    journal = Journal()
    with danube.sync.connect(running.address) as client:
        client.admin.create_topic(TOPIC)
    out = tmp_path / "out"
    words = [str(running.data_dir), TOPIC, checkpoint, str(out)]
    sender = threading.Thread(
        target=publish, args=(running, journal, random.Random(9)), kwargs={"rounds": 40}
    )
    sender.start()
    output = tmp_path / "driver.log"
    driver = start_driver("tests.spark.stream_reader", words, output)
    try:
        wait_for_driver(driver, lambda: begun(checkpoint) >= 2, "a second micro-batch", output)
    finally:
        kill_tree(driver)
    taken = rows_in(spark, out)
    sender.join(90)
    assert not sender.is_alive()
    running.stop()
    query = started(spark, *words, once=True)
    query.awaitTermination()
    assert 0 < taken < len(journal.records)
    assert digest_of_frame(spark.read.parquet(str(out))) == journal.digest()


def begun(checkpoint: str) -> int:
    """Micro-batches whose offsets are chosen; all but the last one are committed."""
    folder = Path(checkpoint) / "offsets"
    return sum(name.name.isdigit() for name in folder.iterdir()) if folder.is_dir() else 0


def rows_in(spark: Any, out: Path) -> int:
    """Rows of all committed micro-batches."""
    if not (out / "_spark_metadata").is_dir():
        return 0
    return int(spark.read.parquet(str(out)).count())
