"""``decode`` in a session: typed columns of what typed producers sent, and payloads that are no values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pyspark")

import danube
import danube.sync
from tests.broker_process import BrokerProcess
from tests.spark.test_read_spark import reading, streamed

pytestmark = [pytest.mark.e2e, pytest.mark.spark]

TOPIC = "/default/typed"
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
def typed(broker: Callable[..., BrokerProcess]) -> BrokerProcess:
    """Records of two versions of one subject, and one that is no value of it."""
    running = broker()
    with danube.sync.connect(running.address) as client:
        client.admin.create_topic(TOPIC)
        for definition, start in ((FIRST, 0), (SECOND, 20)):
            client.schemas.register("orders", "avro", json.dumps(definition))
            schema: Any = danube.Schema(definition, subject="orders")
            with client.producer(TOPIC, schema=schema) as producer:
                for number in range(start, start + 20):
                    more = {"note": f"n{number}"} if definition is SECOND else {}
                    producer.send(order(number, **more))
    return running


def test_typed_columns_of_all_versions(spark: Any, typed: BrokerProcess, checkpoint: str) -> None:
    storage = str(typed.data_dir)
    frame = reading(spark, storage, TOPIC, decode="orders").load()
    rows = frame.selectExpr("value.id", "value.note", "size(value.lines) AS lines", "value.tags['n'] AS n")
    assert [tuple(row) for row in rows.orderBy("id").collect()] == [
        (number, None if number < 20 else f"n{number}", number % 3, number) for number in range(40)
    ]
    first = reading(spark, storage, TOPIC, decode="orders:1").load()
    assert "note" not in first.select("value.*").columns and first.count() == 40
    narrow = reading(spark, storage, TOPIC, decode="orders").schema(frame.select("value", "offset").schema)
    assert narrow.load().columns == ["value", "offset"] and narrow.load().where("value.id = 39").count() == 1
    streamed_rows, _ = streamed(spark, storage, checkpoint, "typed", TOPIC, decode="orders")
    assert len(streamed_rows) == 40


def test_what_is_no_value_is_an_error_or_null(spark: Any, typed: BrokerProcess) -> None:
    with danube.sync.connect(typed.address) as client, client.producer(TOPIC) as producer:
        producer.send(b"\xff" * 3)
    storage = str(typed.data_dir)
    with pytest.raises(Exception) as failure:
        reading(spark, storage, TOPIC, decode="orders").load().collect()
    assert "record 40 of partition 0 cannot be decoded" in str(failure.value)
    frame = reading(spark, storage, TOPIC, decode="orders", failOnDataLoss="false").load()
    assert [row.offset for row in frame.where("value IS NULL").collect()] == [40]
    assert frame.where("value IS NULL").first().payload == b"\xff" * 3


def test_a_subject_that_is_not_there_is_named(spark: Any, typed: BrokerProcess) -> None:
    for wanted, expected in (
        ("true", "no one schema to decode by"),
        ("ordres", "ordres"),
        ("orders:9", "version 9"),
    ):
        with pytest.raises(Exception) as failure:
            reading(spark, str(typed.data_dir), TOPIC, decode=wanted).load()
        assert expected in str(failure.value)
