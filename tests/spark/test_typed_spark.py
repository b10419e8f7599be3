"""``decode`` in a session: typed columns of what typed producers sent, and payloads that are no values."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("pyspark")

import danube
import danube.sync
from tests.broker_process import BrokerProcess
from tests.spark.test_read_spark import reading, streamed

pytestmark = pytest.mark.e2e

FIRST = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "lines", "type": {"type": "array", "items": "string"}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}
SECOND = {
    **FIRST,
    "fields": [*FIRST["fields"], {"name": "note", "type": ["null", "string"], "default": None}],
}


def order(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "lines": ["a"] * (number % 3),
        "tags": {"n": number},
        "at": number * 1_000_000,
        **more,
    }


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return f"/default/{request.node.name}"


@pytest.fixture
def storage(process: BrokerProcess, topic: str) -> str:
    """Records of two versions of one subject; the subject is the same for all tests."""
    with danube.sync.connect(process.address) as client:
        client.admin.create_topic(topic)
        for definition, start in ((FIRST, 0), (SECOND, 20)):
            client.schemas.register("orders", "avro", json.dumps(definition))
            schema: Any = danube.Schema(definition, subject="orders")
            with client.producer(topic, schema=schema) as producer:
                for number in range(start, start + 20):
                    more = {"note": f"n{number}"} if definition is SECOND else {}
                    producer.send(order(number, **more))
    return str(process.data_dir)


def test_typed_columns_of_all_versions(spark: Any, storage: str, topic: str, checkpoint: str) -> None:
    frame = reading(spark, storage, topic, decode="orders").load()
    rows = frame.selectExpr("value.id", "value.note", "size(value.lines) AS lines", "value.tags['n'] AS n")
    assert [tuple(row) for row in rows.orderBy("id").collect()] == [
        (number, None if number < 20 else f"n{number}", number % 3, number) for number in range(40)
    ]
    first = reading(spark, storage, topic, decode="orders:1").load()
    assert "note" not in first.select("value.*").columns and first.count() == 40
    narrow = reading(spark, storage, topic, decode="orders").schema(frame.select("value", "offset").schema)
    assert narrow.load().columns == ["value", "offset"] and narrow.load().where("value.id = 39").count() == 1
    streamed_rows, _ = streamed(spark, storage, checkpoint, "typed", topic, decode="orders")
    assert len(streamed_rows) == 40


def test_what_is_no_value_is_an_error_or_null(
    spark: Any, process: BrokerProcess, storage: str, topic: str
) -> None:
    with danube.sync.connect(process.address) as client, client.producer(topic) as producer:
        producer.send(b"\xff" * 3)
    with pytest.raises(Exception) as failure:
        reading(spark, storage, topic, decode="orders").load().collect()
    assert "record 40 of partition 0 cannot be decoded" in str(failure.value)
    frame = reading(spark, storage, topic, decode="orders", failOnDataLoss="false").load()
    assert [row.offset for row in frame.where("value IS NULL").collect()] == [40]
    assert frame.where("value IS NULL").first().payload == b"\xff" * 3


def test_tombstones_of_a_compacted_topic_are_null(
    spark: Any, process: BrokerProcess, storage: str, topic: str, checkpoint: str
) -> None:
    with danube.sync.connect(process.address) as client:
        client.admin.update_topic(topic, cleanup="compact")
        with client.producer(topic) as producer:
            producer.send(b"", key="k")
    frame = reading(spark, storage, topic, decode="orders").load()
    assert [row.offset for row in frame.where("value IS NULL").collect()] == [40]
    streamed_rows, _ = streamed(spark, storage, checkpoint, "removed", topic, decode="orders")
    assert len(streamed_rows) == 41


def test_a_subject_that_is_not_there_is_named(spark: Any, storage: str, topic: str) -> None:
    for wanted, expected in (
        ("true", "no one schema to decode by"),
        ("ordres", "ordres"),
        ("orders:9", "version 9"),
    ):
        with pytest.raises(Exception) as failure:
            reading(spark, storage, topic, decode=wanted).load()
        assert expected in str(failure.value)
