"""``danube.spark.read``: the rows of ``format("danube")`` by the way that copies them once."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import danube.spark
import danube.sync
from danube.errors import ConfigInvalid, InvalidArgument
from tests.broker_process import BrokerProcess
from tests.spark.history import PARTED, TOPIC, Journal, digest_of_frame, publish

pytestmark = pytest.mark.e2e

Stored = tuple[str, Journal, Journal]


def test_rows_and_types_are_those_of_the_format(spark: Any, stored: Stored) -> None:
    storage, orders, parted = stored
    options = {"storage": storage, "topic": "/default/*", "minPartitions": 7}
    frame, source = danube.spark.read(spark, options), spark.read.format("danube").options(**options).load()
    assert frame.schema == source.schema
    plain, others = frame.drop("attributes"), source.drop("attributes")  # Spark compares no maps
    assert plain.exceptAll(others).count() == others.exceptAll(plain).count() == 0
    assert frame.count() == len(orders.records) + len(parted.records)
    assert digest_of_frame(frame.where(f"topic = '{PARTED}'")) == parted.digest()


def test_only_the_columns_that_are_named_are_read(spark: Any, stored: Stored) -> None:
    storage, orders, _ = stored
    frame = danube.spark.read(spark, {"storage": storage, "topic": TOPIC}, ["offset", "key"])
    assert frame.columns == ["offset", "key"]
    rows = {row.offset: row.key and bytes(row.key) for row in frame.collect()}
    assert rows == {offset: record[1] for (_, offset), record in orders.records.items()}


def test_ranges_and_an_empty_one(spark: Any, stored: Stored) -> None:
    storage, orders, _ = stored
    options = {"storage": storage, "topic": TOPIC, "includeAttributes": False}
    start = json.dumps({TOPIC: {"0": 100}})
    frame = danube.spark.read(spark, {**options, "startingOffsets": start})
    assert "attributes" not in frame.columns
    assert frame.count() == len(orders.records) - 100
    assert danube.spark.read(spark, {**options, "endingTimestamp": 1}).count() == 0


def test_the_live_tail_comes_from_the_broker(spark: Any, process: BrokerProcess) -> None:
    topic, journal = "/default/tail-of-a-frame", Journal()
    with danube.sync.connect(process.address) as client:
        client.admin.create_topic(topic, partitions=2)
    publish(process, journal, random.Random(1), rounds=20, topic=topic)
    options = {"storage": process.data_dir, "broker": process.address, "topic": topic}
    assert digest_of_frame(danube.spark.read(spark, options)) == journal.digest()


def test_damage_is_an_error_that_names_it_or_counted(spark: Any, stored: Stored, tmp_path: Path) -> None:
    data = shutil.copytree(stored[0], tmp_path / "data")
    path = max(data.rglob("*.seg"), key=lambda found: found.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    options = {"storage": data, "topic": "/default/*"}
    with pytest.raises(Exception) as failure:
        danube.spark.read(spark, options).count()
    assert re.search(rf"{path.name} is damaged at byte \d+", str(failure.value))
    total = sum(len(journal.records) for journal in stored[1:])
    assert total - 800 < danube.spark.read(spark, {**options, "failOnDataLoss": False}).count() < total


@pytest.mark.parametrize(
    ("given", "columns", "expected"),
    [
        ({"topics": TOPIC}, None, "option topics is not known: did you mean topic?"),
        ({}, ["offset", "colour"], "there is no column colour"),
        ({}, [], "none is named"),
    ],
)
def test_mistakes_are_explained(
    spark: Any, stored: Stored, given: dict[str, str], columns: list[str] | None, expected: str
) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(expected)):
        danube.spark.read(spark, {"storage": stored[0], "topic": TOPIC, **given}, columns)


def test_a_session_without_pandas_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, spark: Any, stored: Stored
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigInvalid, match="pandas"):
        danube.spark.read(spark, {"storage": stored[0], "topic": TOPIC})
