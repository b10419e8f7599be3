"""``df.write`` and ``df.writeStream`` into a real broker: every row once, through failures and kills."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube.sync
from tests.broker_process import BrokerProcess

pytest.importorskip("pyspark")
from pyspark.errors import AnalysisException, PySparkException

from tests.spark import stream_driver
from tests.spark.drivers import kill_tree, start_driver, wait_for_driver
from tests.spark.sink_source import Failing

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(process: BrokerProcess) -> Iterator[danube.sync.Client]:
    with danube.sync.connect(process.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def session(spark: Any) -> Any:
    spark.dataSource.register(Failing)
    return spark


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return f"/default/{request.node.name.replace('[', '-').replace(']', '')}"


def writing(frame: Any, process: BrokerProcess, topic: str, **options: str) -> Any:
    return frame.write.format("danube").mode("append").options(broker=process.address, topic=topic, **options)


def ends(client: danube.sync.Client, topic: str) -> int:
    return sum(part["log_end"] for part in client.admin.describe_topic(topic).partitions)


def payloads(client: danube.sync.Client, topic: str) -> Counter[str]:
    expected, found = ends(client, topic), Counter[str]()
    with client.consumer(topic, f"check-{expected}", "exclusive", start="earliest") as consumer:
        for batch in consumer.batches():
            found.update(bytes(payload).decode() for payload in batch.payloads)
            batch.ack()
            if found.total() >= expected:
                return found
    return found


def once(count: int, partitions: int = 1) -> Counter[str]:
    return Counter(f"{part}-{number}" for part in range(partitions) for number in range(count))


def test_a_frame_is_published(session: Any, process: BrokerProcess, client: Any, topic: str) -> None:
    frame = session.range(0, 30_000, 1, 4).selectExpr(
        "concat('0-', id) AS payload",
        "cast(id % 100 AS string) AS key",
        "map('id', cast(id AS string)) AS attributes",
        "timestamp_micros(id) AS publish_time",
        f"'{topic}' AS topic",
    )
    writing(frame, process, "", partitions="3").save()
    assert payloads(client, topic) == once(30_000)
    with client.consumer(topic, "look", "exclusive", start="earliest") as consumer:
        for _ in range(100):
            message = consumer.receive(timeout=10)
            number = int(message.payload[2:])
            assert message.key == str(number % 100)
            assert message.attributes == {"id": str(number)}
            assert message.publish_time_us == number
            assert message.producer_name.startswith("spark/")


def test_a_job_that_is_done_again_stores_nothing(
    session: Any, process: BrokerProcess, client: Any, topic: str
) -> None:
    frame = session.range(0, 5000, 1, 3).selectExpr("concat('0-', id) AS payload")
    for _ in range(2):
        writing(frame, process, topic, jobId="load-1").save()
    assert payloads(client, topic) == once(5000)
    for batch in ("1", "2", "2"):
        writing(frame, process, topic, jobId="load-1", batchId=batch).save()
    assert ends(client, topic) == 15_000
    for _ in range(2):
        writing(frame, process, topic).save()
    assert ends(client, topic) == 25_000


@pytest.mark.parametrize("tasks", [1, 2, 6])
def test_a_job_that_is_cut_into_other_tasks_is_an_error(
    session: Any, process: BrokerProcess, client: Any, topic: str, tasks: int
) -> None:
    name = f"cut-{tasks}"
    writing(
        session.range(0, 1000, 1, 4).selectExpr("string(id) AS payload"), process, topic, jobId=name
    ).save()
    other = session.range(0, 1000, 1, tasks).selectExpr("string(id) AS payload")
    with pytest.raises(Exception, match=r"rows|stored"):
        writing(other, process, topic, jobId=name).save()
    if tasks < 4:  # of more tasks those behind the last one know of nothing
        assert ends(client, topic) == 1_000


@pytest.mark.parametrize("fate", ["raise", "kill"])
def test_a_task_that_failed_goes_on(
    session: Any, process: BrokerProcess, client: Any, topic: str, fate: str
) -> None:
    shape = {"partitions": "3", "rows": "6000", "until": "4000", "fate": fate}
    frame = session.read.format("failing").options(**shape).load()
    writing(frame, process, topic, partitions="2", batchBytes="1KiB", maxInFlightBytes="1KiB").save()
    assert payloads(client, topic) == once(6000, 3)


def test_a_stream_publishes_each_batch(
    session: Any, process: BrokerProcess, client: Any, topic: str, tmp_path: Path
) -> None:
    source = lines_in(tmp_path / "lines", files=3, lines=400)
    for _ in range(2):
        query = (
            session.readStream.option("maxFilesPerTrigger", 1)
            .text(str(source))
            .selectExpr("value AS payload")
            .writeStream.format("danube")
            .options(broker=process.address, topic=topic)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert query.exception() is None
    assert payloads(client, topic) == once(400, 3)


def test_a_stream_whose_driver_was_killed(
    session: Any, process: BrokerProcess, client: Any, topic: str, tmp_path: Path
) -> None:
    source = lines_in(tmp_path / "lines", files=4, lines=4000)
    words = [str(source), str(tmp_path / "checkpoint"), process.address, topic]
    client.admin.create_topic(topic, partitions=2)
    output = tmp_path / "output"
    driver = start_driver("tests.spark.stream_driver", [*words, str(tmp_path / "warehouse")], output)
    try:
        wait_for_driver(driver, lambda: ends(client, topic) >= 5000, "the stream publishes", output)
    finally:
        kill_tree(driver)
    assert 4000 < ends(client, topic) < 16_000, "within the second batch or later"
    query = stream_driver.started(session, *words)
    query.awaitTermination()
    assert query.exception() is None
    assert payloads(client, topic) == once(4000, 4)


def lines_in(directory: Path, files: int, lines: int) -> Path:
    directory.mkdir()
    for number in range(files):
        path = directory / f"{number}.txt"
        path.write_text("".join(f"{number}-{line}\n" for line in range(lines)))
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return directory


@pytest.mark.parametrize(
    ("options", "columns", "what"),
    [
        ({"topc": "/default/x"}, "'a' AS payload", "did you mean topic"),
        ({"topic": "/default/x", "durability": "most"}, "'a' AS payload", "most"),
        ({"topic": "/default/x"}, "'a' AS value", "column 'value' is none of a record"),
        ({"topic": "/default/x"}, "1 AS payload", "column 'payload' is int"),
        ({"topic": "/default/x"}, "'a' AS key", "no column payload"),
        ({}, "'a' AS payload", "where to publish is not known"),
        ({"topic": "/default/x", "batchId": "3"}, "'a' AS payload", "batchId needs a jobId"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_task_runs(
    session: Any, options: dict[str, str], columns: str, what: str
) -> None:
    frame = session.range(1).selectExpr(columns)
    writer = frame.write.format("danube").mode("append").options(broker="danube://127.0.0.1:1", **options)
    with pytest.raises(AnalysisException, match=what):
        writer.save()


def test_there_is_no_overwriting(session: Any, process: BrokerProcess) -> None:
    frame = session.range(1).selectExpr("'a' AS payload")
    with pytest.raises(PySparkException, match="not overwritten"):
        writing(frame, process, "/default/x").mode("overwrite").save()


def test_a_broker_that_is_not_there(session: Any) -> None:
    frame = session.range(1).selectExpr("'a' AS payload")
    writer = frame.write.format("danube").mode("append")
    with pytest.raises(PySparkException, match="ConnectionFailed"):
        writer.options(broker="danube://127.0.0.1:1", topic="/default/x").save()
