"""Exports whose schema gets fields: they reach the table, and what cannot be taken up stops the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
from danube.client.typed.models import codec_of_definition
from danube.core.metadata.commands import ConfigureTopicSchema, RegisterSchema, TopicSchema
from danube.errors import SchemaIncompatible
from danube.schema.kinds import examine
from danube.schema.model import SchemaType
from danube.spark.jobs.export import export
from danube.spark.source.export_shape import grown, loses
from tests.spark.stored_history import metadata_of, write_history
from tests.spark.test_export import CREATE, IDENTITY, TABLE, TOPIC, Lake, _read

pa = pytest.importorskip("pyarrow")
INT, LONG, TEXT = pa.int32(), pa.int64(), pa.string()


def struct(**fields: Any) -> Any:
    return pa.struct(list(fields.items()))


def listed(kind: Any) -> Any:
    return pa.list_(pa.field("element", kind))


GROWN = [
    (struct(a=INT), struct(a=INT, b=TEXT), struct(a=INT, b=TEXT), ["value.b"], []),
    (struct(a=INT, b=TEXT), struct(b=TEXT), struct(a=INT, b=TEXT), [], ["value.a"]),
    (struct(a=struct(x=INT)), struct(a=struct(y=INT)), struct(a=struct(x=INT, y=INT)),
     ["value.a.y"], ["value.a.x"]),
    (struct(a=listed(struct(x=INT))), struct(a=listed(struct(x=INT, y=INT))),
     struct(a=listed(struct(x=INT, y=INT))), ["value.a[].y"], []),
    (pa.map_(TEXT, struct(x=INT)), pa.map_(TEXT, struct(x=INT, y=INT)),
     pa.map_(TEXT, struct(x=INT, y=INT)), ["value{}.y"], []),
    (TEXT, TEXT, TEXT, [], []),
]  # fmt: skip
REFUSED = [
    (struct(a=INT), struct(a=LONG), "value.a is int32 and would be int64"),
    (struct(a=INT), struct(a=struct(x=INT)), "value.a is int32 and would be struct<x: int32>"),
    (listed(INT), listed(TEXT), "value[] is int32 and would be string"),
    (struct(a=listed(INT)), struct(a=pa.map_(TEXT, INT)), "value.a is list<element: int32> and would be map"),
    (struct(a=INT), struct(a=INT, A=INT), "value.A differs from value.a only in case"),
    (struct(a=INT, b=INT), struct(a=TEXT, b=TEXT), "value.b is int32 and would be string"),
]


@pytest.mark.parametrize("table, new, kind, added, absent", GROWN)
def test_fields_are_added_and_none_is_taken_away(
    table: Any, new: Any, kind: Any, added: list[str], absent: list[str]
) -> None:
    assert grown(table, [("s:2", new)], "t") == (kind, added, absent)
    assert grown(kind, [("s:2", new)], "t").added == [], "once"
    assert loses(table, new, kind) == bool(absent)


@pytest.mark.parametrize("table, new, said", REFUSED)
def test_what_cannot_be_taken_up_is_named(table: Any, new: Any, said: str) -> None:
    with pytest.raises(SchemaIncompatible) as caught:
        grown(table, [("s:2", table), ("s:3", new), ("s:4", table)], "default.orders")
    assert caught.value.what == "table default.orders cannot take up s:3"
    assert said in caught.value.why and "--target" in caught.value.hint


def test_fields_of_every_version_between_reach_the_table() -> None:
    versions = [("s:2", struct(a=INT, b=INT)), ("s:3", struct(a=INT, c=INT))]
    assert grown(struct(a=INT), versions, "t") == (
        struct(a=INT, b=INT, c=INT), ["value.b", "value.c"], ["value.b"]
    )  # fmt: skip


class Growing:
    """A topic whose schema gets versions, and its export."""

    def __init__(self, root: Path, kind: str = "avro") -> None:
        self.kind = kind
        self.lake = Lake(root, metadata_of(CREATE))
        self._codecs: list[Any] = []

    def register(self, definition: Any) -> None:
        metadata = self.lake.metadata
        made = examine(SchemaType(self.kind), json.dumps(definition).encode())
        known = metadata.registry.find("orders")
        command = RegisterSchema(
            subject="orders", schema_type=self.kind, definition=made.text, compiled=made.compiled,
            fingerprint=made.fingerprint, created_us=1, compatibility="none",
            after_revision=known.revision if known else 0,
        )  # fmt: skip
        metadata.apply(metadata.version + 1, command)
        metadata.apply(
            metadata.version + 1, ConfigureTopicSchema(topic=TOPIC, schema=TopicSchema(subject="orders"))
        )
        self._codecs.append(codec_of_definition(self.kind, made.text))

    def send(self, value: Any, version: int) -> None:
        """One record, in a segment of its own."""
        more: dict[str, Any] = {
            "payloads": [self._codecs[version - 1].encode(value) if version else value], "keys": None,
            "schema_id": self.lake.metadata.registry.subject("orders").schema_id if version else None,
            "schema_version": version or None,
        }  # fmt: skip
        if not self.lake.data.exists():
            write_history(self.lake.data, IDENTITY, segments=1, batches=1, records=1, **more)
            self.lake.put()
        else:
            self.lake.grow(records=1, **more)

    def values(self, kind: str = "parquet") -> list[Any]:
        rows = _read(self.lake, kind).to_pylist()
        return [row.get("value") for row in sorted(rows, key=lambda row: row["offset"])]


def record(**fields: Any) -> dict[str, Any]:
    made = [
        {"name": name, "type": kind} | ({"default": None} if isinstance(kind, list) else {})
        for name, kind in fields.items()
    ]
    return {"type": "record", "name": "Order", "fields": made}


TEXT_OR_NULL = ["null", "string"]


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
def test_added_fields_reach_the_table_and_older_rows_have_nulls(tmp_path: Path, kind: str) -> None:
    if kind != "parquet":
        pytest.importorskip("deltalake" if kind == "delta" else "pyiceberg")
    topic = Growing(tmp_path)
    options = topic.lake.options(format=kind)
    topic.register(record(id="long", old=TEXT_OR_NULL))
    topic.send({"id": 1, "old": "o"}, 1)
    export.run(options)
    topic.register(record(id="long", note=TEXT_OR_NULL))
    topic.send({"id": 2, "note": "n"}, 2)
    topic.send({"id": 3, "old": "late"}, 1)
    report = export.run(options)
    assert report.counts["unread"] == 0 and report.exit_code == 0
    assert report.remarks == [
        f"{TABLE}: orders:2 added value.note", f"{TABLE}: orders:2 has no value.old: null in its rows"
    ]  # fmt: skip
    assert topic.values(kind) == [
        {"id": 1, "old": "o", "note": None}, {"id": 2, "old": None, "note": "n"},
        {"id": 3, "old": "late", "note": None},
    ]  # fmt: skip
    topic.send({"id": 4, "note": "m"}, 2)
    assert export.run(options).remarks == []
    assert topic.values(kind)[3] == {"id": 4, "old": None, "note": "m"}


def test_the_columns_of_a_folder_of_parquet_are_told(tmp_path: Path) -> None:
    topic = Growing(tmp_path)
    topic.register(record(id="long"))
    topic.send({"id": 1}, 1)
    export.run(topic.lake.options())
    topic.register(record(id="long", note=TEXT_OR_NULL))
    topic.send({"id": 2, "note": "n"}, 2)
    export.run(topic.lake.options())
    told = pa.parquet.read_schema(topic.lake.table / "_common_metadata")
    assert [field.name for field in told.field("value").type] == ["id", "note"]


def test_spark_finds_them(tmp_path: Path, spark: Any) -> None:
    test_the_columns_of_a_folder_of_parquet_are_told(tmp_path)
    rows = spark.read.parquet(str(tmp_path / "lake" / TABLE)).select("value.id", "value.note").collect()
    assert sorted(map(tuple, rows)) == [(1, None), (2, "n")]


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
def test_a_topic_that_gets_a_schema_gets_the_column(tmp_path: Path, kind: str) -> None:
    if kind != "parquet":
        pytest.importorskip("deltalake" if kind == "delta" else "pyiceberg")
    topic = Growing(tmp_path)
    topic.send(b"plain", 0)
    export.run(topic.lake.options(format=kind))
    topic.register(record(id="long"))
    topic.send({"id": 2}, 1)
    export.run(topic.lake.options(format=kind))
    assert topic.values(kind) == [None, {"id": 2}]


def test_a_type_that_changed_stops_the_run_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = Growing(tmp_path)
    topic.register(record(id="int"))
    topic.send({"id": 1}, 1)
    export.run(topic.lake.options())
    files = sorted(topic.lake.target.rglob("*"))
    topic.register(record(id="string"))
    topic.send({"id": "x"}, 2)
    words = ["--local", "--storage", f"file://{topic.lake.store}", "--target", str(topic.lake.target)]
    assert export.main(words) == 2
    said = capsys.readouterr().err
    assert "cannot take up orders:2" in said and "value.id is int32 and would be string" in said
    assert sorted(topic.lake.target.rglob("*")) == files
    topic.register(record(id="int", note=TEXT_OR_NULL))
    with pytest.raises(SchemaIncompatible):
        export.run(topic.lake.options())


def test_json_fields_are_added_at_any_depth(tmp_path: Path) -> None:
    def shape(**inner: Any) -> Any:
        lines = {"type": "array", "items": {"type": "object", "properties": inner}}
        return {"type": "object", "properties": {"lines": lines}}

    topic = Growing(tmp_path, "json_schema")
    topic.register(shape(sku={"type": "string"}))
    topic.send({"lines": [{"sku": "a"}]}, 1)
    export.run(topic.lake.options())
    topic.register(shape(sku={"type": "string"}, count={"type": "integer"}))
    topic.send({"lines": [{"sku": "b", "count": 2}]}, 2)
    export.run(topic.lake.options())
    assert topic.values() == [
        {"lines": [{"sku": "a", "count": None}]}, {"lines": [{"sku": "b", "count": 2}]}
    ]  # fmt: skip
