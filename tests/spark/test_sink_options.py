"""Options and columns of the sink, and what its writers refuse; without a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danube.config.quantities import parse_duration_ms, parse_size_bytes
from danube.errors import DanubeError, InvalidArgument, InvalidName, NotSupported, WrongState

pytest.importorskip("pyspark")
from pyspark.sql.types import StructType

from danube.spark.history.access import ACCESS_READERS
from danube.spark.sink import sink
from danube.spark.sink.options import _FIELDS, _OWN, COLUMNS, check_columns, read_sink_options
from danube.spark.sink.publishing import PublishOptions

BROKER = {"broker": "danube://127.0.0.1:1"}
TOPIC = {**BROKER, "topic": "/default/x"}


def schema(text: str) -> StructType:
    from pyspark.sql.types import BinaryType, IntegerType, LongType, MapType, StringType, TimestampType

    kinds: dict[str, Any] = {
        "binary": BinaryType(),
        "string": StringType(),
        "int": IntegerType(),
        "long": LongType(),
        "timestamp": TimestampType(),
        "map": MapType(StringType(), StringType()),
    }
    made = StructType()
    for column in text.split(","):
        name, kind = column.split()
        made.add(name, kinds[kind])
    return made


def rows_of(table: str) -> dict[str, str]:
    """The first two cells of each row."""
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    return {name.strip(" `"): second.strip(" `").replace(", ", ",") for name, second in rows}


def test_every_option_and_column_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    section = text[text.index("## Writing") : text.index("## Decoded values")]
    options, columns = map(rows_of, section.split("| column |"))
    assert sorted(options) == sorted((*_FIELDS, *ACCESS_READERS, *_OWN))
    assert {name: tuple(sorted(kinds.split(" or "))) for name, kinds in columns.items()} == {
        name: tuple(sorted(kinds)) for name, kinds in COLUMNS.items()
    }
    defaults = PublishOptions(broker="x")
    assert parse_size_bytes(options["batchBytes"]) == defaults.batch_bytes
    assert parse_size_bytes(options["maxInFlightBytes"]) == defaults.in_flight_bytes
    assert parse_duration_ms(options["timeout"]) == defaults.timeout_s * 1000
    assert options["compression"].strip("`") == defaults.compression


def test_every_option_is_read() -> None:
    read = read_sink_options(
        {
            **TOPIC,
            "TOKEN": "secret",
            "reliable": "True",
            "durability": "fsync",
            "partitions": "4",
            "compression": "zstd",
            "batchbytes": "64KiB",
            "maxInFlightBytes": "1MiB",
            "timeout": "5s",
            "jobId": "load",
            "batchId": "17",
            "checkpointLocation": "/tmp/x",
        }
    )
    publish = read.publish
    assert (publish.broker, publish.topic) == ("danube://127.0.0.1:1", "/default/x")
    assert publish.access.token == "secret" and "secret" not in repr(read)
    assert (publish.reliable, publish.durability, publish.partitions) == (True, "fsync", 4)
    assert (publish.compression, publish.batch_bytes) == ("zstd", 65_536)
    assert (publish.in_flight_bytes, publish.timeout_s) == (1_048_576, 5.0)
    assert (read.job, read.round_number) == ("load", 17)


@pytest.mark.parametrize(
    ("options", "kind", "what"),
    [
        ({}, InvalidArgument, "no broker"),
        ({**BROKER, "topic": "orders"}, InvalidName, "orders"),
        ({**TOPIC, "reliable": "perhaps"}, InvalidArgument, "reliable is not true or false"),
        ({**TOPIC, "partitions": "many"}, InvalidArgument, "partitions is not a whole number"),
        ({**TOPIC, "compression": "zip"}, InvalidArgument, "zip"),
        ({**TOPIC, "batchBytes": "3"}, InvalidArgument, "1 KiB to 8 MiB"),
        ({**TOPIC, "maxInFlightBytes": "2KiB"}, InvalidArgument, "at least batchBytes"),
        ({**TOPIC, "timeout": "5"}, InvalidArgument, "timeout is not a duration"),
        ({**TOPIC, "jobId": "x", "batchId": "-1"}, InvalidArgument, "batchId must be 0 or more"),
        ({**TOPIC, "jobId": "\x00"}, InvalidName, "job name"),
        ({**TOPIC, "duribility": "fsync"}, InvalidArgument, "did you mean durability"),
        ({**TOPIC, "s3.region": "x"}, InvalidArgument, "no options of a store"),
        ({**TOPIC, "zzz": "1"}, InvalidArgument, "zzz is not known"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, str], kind: type[DanubeError], what: str) -> None:
    with pytest.raises(kind, match=what):
        read_sink_options(options)


def test_columns_of_a_record() -> None:
    full = "payload binary,key string,attributes map,topic string,partition int,publish_time timestamp"
    check_columns(schema(full + ",schema_id long,schema_version int"), "")
    check_columns(schema("payload string"), "/default/x")


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ("key string", "no column payload"),
        ("payload binary,keys string", "did you mean key"),
        ("payload binary,zzz int", "a record has payload"),
        ("payload binary,attributes string", "it is to be map<string,string>"),
        ("payload binary", "where to publish is not known"),
    ],
)
def test_columns_of_no_record(columns: str, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        check_columns(schema(columns), "")


def test_a_topic_is_not_overwritten() -> None:
    for make in (sink.arrow_writer, sink.stream_writer):
        with pytest.raises(InvalidArgument, match="not overwritten"):
            make(TOPIC, schema("payload binary"), True)


def test_a_stream_has_its_own_name() -> None:
    with pytest.raises(InvalidArgument, match="are for df"):
        sink.stream_writer({**TOPIC, "jobId": "x"}, schema("payload binary"), False)


def test_a_writer_works_in_a_task() -> None:
    with pytest.raises(WrongState, match="inside a Spark task"):
        sink.arrow_writer(TOPIC, schema("payload binary"), False).write(iter(()))


@pytest.mark.parametrize("told", [{}, {"sql.streaming.queryId": "q"}, {"streaming.sql.batchId": "1"}])
def test_a_spark_that_does_not_tell_the_batch(monkeypatch: pytest.MonkeyPatch, told: dict[str, str]) -> None:
    class Task:
        def getLocalProperty(self, name: str) -> str | None:  # noqa: N802
            return told.get(name)

    monkeypatch.setattr(sink, "current_task", Task)
    writer = sink.stream_writer(TOPIC, schema("payload binary"), False)
    with pytest.raises(NotSupported, match="does not tell"):
        writer.write(iter(()))


def test_the_end_of_a_write_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "refuse_more_tasks", lambda *_: None)  # asks a broker
    done = sink.Published(3, 0, 30)
    writer = sink.arrow_writer({**TOPIC, "jobId": "load"}, schema("payload binary"), False)
    stream = sink.stream_writer(TOPIC, schema("payload binary"), False)
    with caplog.at_level("DEBUG", "danube.spark"):
        writer.commit([done, None, done])
        writer.abort([None])
        stream.commit([done], 4)
        stream.abort([None], 5)
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "job load published 6 rows" and "stays" in told[1]
    assert told[2] == "batch 4: published 3 rows" and told[3].startswith("batch 5 failed")
