"""Payloads decoded into typed columns: Avro, JSON Schema and Protobuf, versions that differ, and mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
import pyarrow as pa

from danube.core.metadata.commands import (
    Command,
    ConfigureTopicSchema,
    CreateTopic,
    RegisterSchema,
    TopicSchema,
)
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.errors import InvalidArgument, SchemaNotFound
from danube.schema.kinds import examine
from danube.schema.model import SchemaType
from danube.spark.source.value_types import arrow_type
from danube.spark.source.values import Registered, Schemas, ValueDecoder, find_schemas, tombstones_of

AVRO_1 = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "lines", "type": {"type": "array", "items": {
            "type": "record", "name": "Line", "fields": [{"name": "sku", "type": "string"}]}}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "either", "type": ["int", "string"]},
    ],
}  # fmt: skip
AVRO_2 = {
    **AVRO_1,
    "fields": [*AVRO_1["fields"], {"name": "note", "type": ["null", "string"], "default": None}],
}
JSON_SCHEMA = {
    "$defs": {"point": {"type": "object", "properties": {
        "x": {"type": "number"}, "next": {"$ref": "#/$defs/point"}}}},
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": ["string", "null"]},
        "where": {"$ref": "#/$defs/point"},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "more": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "any": {},
    },
}  # fmt: skip
PROTO = b"""syntax = "proto3";
message Order {
  int64 id = 1; string name = 2; repeated Line lines = 3; map<string, int32> tags = 4;
  State state = 5; bytes raw = 6; optional bool paid = 7;
}
message Line { string sku = 1; uint64 count = 2; }
enum State { NEW = 0; PAID = 1; }
"""


def registered(schema_type: str, definition: Any, version: int = 1, schema_id: int = 5) -> Registered:
    text = definition if isinstance(definition, bytes) else json.dumps(definition).encode()
    compiled = examine(SchemaType(schema_type), text).compiled
    return Registered("orders", schema_id, version, schema_type, text, compiled)


def decoded(target: Registered, *rows: tuple[bytes, int | None, int | None], known: Any = ()) -> Any:
    versions = {(one.schema_id, one.version): one for one in [target, *known]}
    decoder = ValueDecoder(Schemas(target, versions))
    columns = zip(*rows, strict=True)
    kinds = (pa.binary(), pa.int64(), pa.int32())
    return decoder.decode(*(pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))


def avro_bytes(definition: Any, value: Any) -> bytes:
    from danube.client.typed.models import codec_of_definition

    return codec_of_definition("avro", json.dumps(definition).encode()).encode(value)


def order(**more: Any) -> dict[str, Any]:
    from datetime import UTC, datetime
    from decimal import Decimal

    return {
        "id": 7, "price": Decimal("3.50"), "at": datetime(2026, 1, 2, 3, tzinfo=UTC), "lines": [{"sku": "a"}],
        "tags": {"x": 1}, "state": "PAID", "either": "text", **more,
    }  # fmt: skip


def test_avro_of_two_versions_is_read_as_the_later_one() -> None:
    first, second = registered("avro", AVRO_1), registered("avro", AVRO_2, 2)
    rows = [
        (avro_bytes(AVRO_1, order()), 5, 1),
        (avro_bytes(AVRO_2, order(id=8, note="n")), 5, 2),
        (avro_bytes(AVRO_2, order(id=9, either=4)), None, None),
    ]
    found = decoded(second, *rows, known=[first])
    assert not found.bad
    values = found.values.to_pylist()
    assert [(value["id"], value["note"], value["either"]) for value in values] == [
        (7, None, "text"), (8, "n", "text"), (9, None, "4")
    ]  # fmt: skip
    expected = order(tags=[("x", 1)], note=None)
    assert values[0] == expected


def test_json_values_get_columns_and_text_where_anything_may_stand() -> None:
    target = registered("json_schema", JSON_SCHEMA)
    value = {
        "id": 1,
        "name": None,
        "where": {"x": 2, "next": {"x": 3}},
        "sizes": [1],
        "more": {"a": True},
        "any": [1],
    }
    found = decoded(target, (json.dumps(value).encode(), 5, 1), (b'{"id": 2, "extra": 1}', 5, None))
    assert not found.bad
    one, two = found.values.to_pylist()
    assert one["where"] == {"x": 2.0, "next": '{"x":3}'}
    assert (one["sizes"], one["more"], one["any"], one["name"]) == ([1], [("a", True)], "[1]", None)
    assert two == {"id": 2, "name": None, "where": None, "sizes": None, "more": None, "any": None}


def test_protobuf_messages_become_columns() -> None:
    from google.protobuf.message_factory import GetMessageClass

    from danube.schema.model import Definition
    from danube.schema.protobuf.descriptors import open_definition

    target = registered("protobuf", PROTO)
    definition = Definition(schema_type=SchemaType.PROTOBUF, text=PROTO, compiled=target.compiled)
    message: Any = GetMessageClass(open_definition(definition).payload)(id=4, name="n", state=1, raw=b"\xff")
    message.lines.add(sku="s", count=2**63)
    message.tags["a"] = 1
    found = decoded(target, (message.SerializeToString(), 5, 1), (b"\x0f", 5, 1))
    assert found.bad == [1] and "not a Order" in found.why
    value = found.values.to_pylist()[0]
    assert value["lines"] == [{"sku": "s", "count": 2**63}]
    assert value["tags"] == [("a", 1)] and value["state"] == "PAID"
    assert (value["raw"], value["paid"]) == (b"\xff", None)


@pytest.mark.parametrize(
    ("payload", "schema_id", "version"),
    [
        (b"not json", 5, 1), (b'{"id": 1.5}', 5, 1), (b'{"id": 9223372036854775808}', 5, 1), (b"[]", 5, 1),
        (b"{}", 99, 1),
    ],
)  # fmt: skip
def test_what_is_no_value_is_null_and_named(payload: bytes, schema_id: int, version: int) -> None:
    target = registered("json_schema", JSON_SCHEMA)
    found = decoded(target, (b'{"id": 1}', 5, 1), (payload, schema_id, version))
    assert found.bad == [1] and found.why
    assert [value and value["id"] for value in found.values.to_pylist()] == [1, None]


@pytest.mark.parametrize("target", [registered("json_schema", JSON_SCHEMA), registered("protobuf", PROTO)])
def test_tombstones_are_null_and_not_bad(target: Registered) -> None:
    payloads, keys = pa.array([b"", b"", b"x"], pa.binary()), pa.array([b"k", None, b"k"], pa.binary())
    tombstones = tombstones_of(payloads, keys)
    assert tombstones.to_pylist() == [True, False, False]
    decoder = ValueDecoder(Schemas(target, {}))
    ids, versions = pa.nulls(3, pa.int64()), pa.nulls(3, pa.int32())
    found, without = (
        decoder.decode(payloads, ids, versions, tombstones), decoder.decode(payloads, ids, versions)
    )  # fmt: skip
    assert found.values[0].as_py() is None and 0 not in found.bad
    assert found.values.slice(1) == without.values.slice(1)
    assert [one for one in without.bad if one] == found.bad


def test_a_type_that_contains_itself_is_text() -> None:
    tree = {"type": "record", "name": "T", "fields": [{"name": "left", "type": ["null", "T"]}]}
    assert arrow_type("avro", json.dumps(tree).encode()) == pa.struct([("left", pa.string())])


def machine(*commands: Command) -> Metadata:
    metadata = Metadata()
    for index, command in enumerate(commands, 1):
        metadata.apply(index, command)
    return metadata


def register(subject: str, text: bytes) -> RegisterSchema:
    found = examine(SchemaType.AVRO, text)
    return RegisterSchema(
        subject=subject, schema_type="avro", definition=found.text, compiled=found.compiled,
        fingerprint=found.fingerprint, description="", created_by="", created_us=1, after_revision=0,
        compatibility="none",
    )  # fmt: skip


def test_the_option_names_a_subject_a_version_or_the_topics_own() -> None:
    text = json.dumps(AVRO_1).encode()
    names = ("/default/a", "/default/b")
    topics = [CreateTopic(topic=name, policy=TopicPolicy(), created_us=1) for name in names]
    metadata = machine(
        *topics,
        register("orders", text),
        ConfigureTopicSchema(topic="/default/a", schema=TopicSchema(subject="orders")),
    )
    for wanted in ("true", "orders", "orders:1", "latest"):
        found = find_schemas(metadata, ["/default/a"], wanted)
        assert (found.target.subject, found.target.version) == ("orders", 1)
    with pytest.raises(InvalidArgument, match="no one schema to decode by"):
        find_schemas(metadata, ["/default/b"], "true")
    with pytest.raises(InvalidArgument, match="names version 'x'"):
        find_schemas(metadata, ["/default/a"], "orders:x")
    for missing in ("others", "orders:2"):
        with pytest.raises(SchemaNotFound):
            find_schemas(metadata, ["/default/a"], missing)
