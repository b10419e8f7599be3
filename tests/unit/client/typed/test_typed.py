"""Values instead of bytes: what each kind of model registers, encodes and decodes, and how it fails."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from io import BytesIO
from typing import Any, Literal
from uuid import UUID

import fastavro
import jsonschema_rs
import pydantic
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import _protoc_compiler as protoc
from hypothesis import given
from hypothesis import strategies as st

import danube
from danube.client.machine.schema_plans import SchemaVersion
from danube.client.typed.models import Codec, codec_of, decoded, encoded, schema_of
from danube.errors import InvalidArgument, NotSupported, PayloadInvalid, SchemaInvalid


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Line:
    article: str
    count: int = 1


@dataclass
class Order:
    number: int
    price: float
    paid: bool
    at: datetime
    day: date
    id: UUID
    amount: Decimal
    colour: Colour
    size: Literal["S", "M"]
    note: str | None = None
    lines: list[Line] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)


@dataclass
class Tree:
    name: str
    branches: list[Tree] = field(default_factory=list)


class Model(pydantic.BaseModel):
    number: int
    note: str = pydantic.Field("none", alias="remark")


AVRO_1: dict[str, Any] = {"type": "record", "name": "Point", "fields": [{"name": "x", "type": "int"}]}
AVRO_2: dict[str, Any] = {
    **AVRO_1,
    "fields": [{"name": "x", "type": "long"}, {"name": "y", "type": "string", "default": "-"}],
}


def order() -> Order:
    return Order(
        number=7, price=1.5, paid=True, at=datetime(2026, 11, 21, 8, 0, tzinfo=UTC), day=date(2026, 11, 21),
        id=UUID(int=5), amount=Decimal("12.30"), colour=Colour.BLUE, size="M", lines=[Line("a", 2)],
        tags={"k": 1},
    )  # fmt: skip


def codec(given_schema: Any) -> Codec:
    found = codec_of(schema_of(given_schema))
    assert found is not None
    return found


def version(schema_type: str, definition: Any) -> SchemaVersion:
    text = definition if isinstance(definition, bytes) else json.dumps(definition).encode()
    return SchemaVersion(subject="s", schema_id=1, version=1, schema_type=schema_type, definition=text)


def round_trip(given_schema: Any, value: Any) -> Any:
    found = codec(given_schema)
    return decoded(found.decoder(None), encoded(found, value))


def message_class(text: str, name: str) -> Any:
    """The class of a message in proto text, as protoc's generated code would have it."""
    files = compiled(text)
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def compiled(text: str) -> list[descriptor_pb2.FileDescriptorProto]:
    import ast
    import os
    import tempfile
    from pathlib import Path

    import grpc_tools

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "it.proto").write_text(text)
        well_known = os.path.join(os.path.dirname(grpc_tools.__file__), "_proto")
        generated = protoc.get_protos(b"it.proto", [folder.encode(), well_known.encode()])
    files = []
    for _, code in generated:
        start = code.index(b"AddSerializedFile(") + len(b"AddSerializedFile(")
        literal = code[start : code.index(b"\n", start)].rstrip().removesuffix(b")")
        files.append(descriptor_pb2.FileDescriptorProto.FromString(ast.literal_eval(literal.decode())))
    return files


# -- JSON ---------------------------------------------------------------------------------------


def test_a_dataclass_is_json_that_keeps_to_its_own_schema() -> None:
    found = codec(Order)
    assert found.schema_type == "json_schema"
    whole = json.loads(found.definition)
    assert set(whole["required"]) == {
        "number", "price", "paid", "at", "day", "id", "amount", "colour", "size"
    }  # fmt: skip
    assert whole["properties"]["day"] == {"type": "string", "format": "date"}
    payload = encoded(found, order())
    assert jsonschema_rs.is_valid(whole, json.loads(payload))
    assert not jsonschema_rs.is_valid(whole, json.loads(payload) | {"size": "XL"})
    assert decoded(found.decoder(None), payload) == order()


def test_a_dataclass_that_holds_itself_is_told_by_a_reference() -> None:
    whole = json.loads(codec(Tree).definition)
    assert whole["properties"]["branches"]["items"] == {"$ref": "#/$defs/Tree"}
    value = Tree("a", [Tree("b")])
    assert jsonschema_rs.is_valid(whole, json.loads(encoded(codec(Tree), value)))
    assert round_trip(Tree, value) == value


def test_a_pydantic_model_uses_its_own_schema_and_aliases() -> None:
    found = codec(Model)
    assert set(json.loads(found.definition)["properties"]) == {"number", "remark"}
    assert encoded(found, Model(number=1, remark="x")) == b'{"number":1,"remark":"x"}'
    assert decoded(found.decoder(None), b'{"number":1}') == Model(number=1)


@pytest.mark.parametrize(("model", "payload"), [(Model, b'{"number":"x"}'), (Line, b'{"count":1}')])
def test_json_that_is_not_the_model_is_payload_invalid_and_says_why(model: Any, payload: bytes) -> None:
    with pytest.raises(PayloadInvalid, match="does not follow its schema") as caught:
        decoded(codec(model).decoder(None), payload, offset=12)
    assert caught.value.facts["offset"] == 12
    assert "number" in caught.value.why or "article" in caught.value.why


@pytest.mark.parametrize("model", [Model, Line])
def test_a_value_of_another_class_is_not_encoded(model: Any) -> None:
    with pytest.raises(PayloadInvalid, match="not dict"):
        encoded(codec(model), {"number": 1})


def test_types_that_no_json_schema_can_tell_are_schema_invalid() -> None:
    @dataclass
    class Strange:
        done: complex

    with pytest.raises(SchemaInvalid, match="Strange"):
        codec(Strange)


def test_a_definition_without_a_model_takes_plain_json() -> None:
    given_schema = danube.Schema(definition={"type": "object"}, schema_type="JSON_SCHEMA")
    assert round_trip(given_schema, {"a": [1, None]}) == {"a": [1, None]}


# -- Avro ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("definition", [AVRO_2, json.dumps(AVRO_2)])
def test_avro_is_a_bare_datum(definition: Any) -> None:
    found = codec(definition)
    payload = encoded(found, {"x": 3, "y": "up"})
    assert payload == b"\x06\x04up"
    assert fastavro.schemaless_reader(BytesIO(payload), AVRO_2, None) == {"x": 3, "y": "up"}
    assert decoded(found.decoder(None), payload) == {"x": 3, "y": "up"}


@given(st.integers(-(2**63), 2**63 - 1), st.text())
def test_any_avro_record_comes_back(x: int, y: str) -> None:
    assert round_trip(AVRO_2, {"x": x, "y": y}) == {"x": x, "y": y}


def test_avro_written_with_an_older_version_is_resolved_to_the_readers() -> None:
    older = encoded(codec(AVRO_1), {"x": 3})
    assert decoded(codec(AVRO_2).decoder(version("avro", AVRO_1)), older) == {"x": 3, "y": "-"}


@pytest.mark.parametrize("value", [{"x": "3"}, {}, {"x": 3, "z": 1}, {"x": 2**70}])
def test_a_value_that_is_no_such_record_is_payload_invalid(value: Any) -> None:
    with pytest.raises(PayloadInvalid, match="cannot be encoded as avro"):
        encoded(codec(AVRO_1), value)


@pytest.mark.parametrize("payload", [b"", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x06\x00"])
def test_bytes_that_are_no_datum_are_payload_invalid(payload: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        decoded(codec(AVRO_1).decoder(None), payload)


def test_a_writer_that_is_not_avro_is_payload_invalid() -> None:
    with pytest.raises(PayloadInvalid, match="is json_schema, not avro"):
        codec(AVRO_1).decoder(version("json_schema", {}))


@pytest.mark.parametrize("definition", ['{"type": "recor', {"type": "object"}, {"type": "record"}])
def test_what_is_no_avro_schema_is_schema_invalid(definition: Any) -> None:
    with pytest.raises(SchemaInvalid, match="Avro"):
        codec(definition)


# -- Protobuf -----------------------------------------------------------------------------------

PROTO3 = """
syntax = "proto3";
package shop.v1;
import "google/protobuf/timestamp.proto";
message Other { int32 a = 1; }
enum Kind { option allow_alias = true; NONE = 0; NIL = 0; BIG = 5; reserved 2, 7 to 9; reserved "OLD"; }
message Order {
  message Line { string article = 1; repeated Line parts = 2; }
  enum State { OPEN = 0; DONE = 1; }
  reserved 3, 20 to 30; reserved "gone", "lost";
  int64 number = 1;
  optional string note = 2;
  repeated sint32 deltas = 4 [packed = false];
  oneof payment { string card = 5; Other cash = 6; }
  map<string, Line> lines = 7;
  map<int32, double> weights = 8;
  State state = 9;
  Kind kind = 10 [deprecated = true];
  google.protobuf.Timestamp at = 11;
  bytes raw = 12; fixed64 f = 13; bool ok = 14;
}
"""
PROTO2 = """
syntax = "proto2";
message Old {
  required int32 id = 1;
  optional string name = 2 [default = "a \\"b\\""];
  optional bytes raw = 3 [default = "\\001x"];
  repeated int32 n = 4 [packed = true];
  optional double d = 5 [default = inf];
  optional Kind kind = 6 [default = B];
  extensions 100 to max;
}
enum Kind { A = 1; B = 2; }
"""


def shape(file: descriptor_pb2.FileDescriptorProto, first: str) -> descriptor_pb2.FileDescriptorProto:
    """A descriptor without what the order and the name of the file make of it."""
    found = descriptor_pb2.FileDescriptorProto()
    found.CopyFrom(file)
    found.name = ""
    ordered = sorted(found.message_type, key=lambda one: one.name != first)
    del found.message_type[:]
    found.message_type.extend(ordered)
    return found


@pytest.mark.parametrize(
    ("text", "name"), [(PROTO3, "shop.v1.Order"), (PROTO3, "shop.v1.Other"), (PROTO2, "Old")]
)
def test_a_message_class_gives_the_text_that_makes_the_same_descriptor(text: str, name: str) -> None:
    model = message_class(text, name)
    first = name.rpartition(".")[2]
    written = codec(model).definition.decode()
    assert written.index(f"message {first} ") == written.index("message ")
    assert shape(compiled(written)[-1], first) == shape(compiled(text)[-1], first)


def test_a_message_comes_back() -> None:
    model = message_class(PROTO3, "shop.v1.Order")
    value = model(number=5, deltas=[1, -1], card="x")
    assert round_trip(model, value) == value
    with pytest.raises(PayloadInvalid, match="does not follow"):
        decoded(codec(model).decoder(None), b"\x0a\xff")
    with pytest.raises(PayloadInvalid, match="not dict"):
        encoded(codec(model), {"number": 5})


def test_a_required_field_that_is_missing_is_payload_invalid() -> None:
    model = message_class(PROTO2, "Old")
    with pytest.raises(PayloadInvalid, match="id"):
        encoded(codec(model), model(name="x"))


def test_a_message_inside_another_is_refused() -> None:
    model = message_class(PROTO3, "shop.v1.Order.Line")
    with pytest.raises(SchemaInvalid, match="stands inside another message"):
        codec(model)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda file: file.dependency.append("other.proto"), "imports other.proto"),
        (lambda file: setattr(file, "syntax", "editions"), "edition"),
        (lambda file: file.extension.add(name="x"), "extensions"),
        (lambda file: file.message_type[0].field.add(name="g", number=1, type=10, label=1), "group"),
    ],
)
def test_files_that_one_text_cannot_tell_are_refused(change: Any, why: str) -> None:
    from danube.client.typed.proto_text import file_text

    file = descriptor_pb2.FileDescriptorProto(name="x.proto", syntax="proto2")
    file.message_type.add(name="M")
    change(file)
    with pytest.raises(SchemaInvalid) as caught:
        file_text(file, "M")
    assert why in str(caught.value)


def test_protobuf_without_a_class_takes_and_keeps_bytes() -> None:
    found = codec(danube.Schema(definition=PROTO3, schema_type="protobuf"))
    assert encoded(found, b"\x08\x01") == b"\x08\x01"
    with pytest.raises(PayloadInvalid):
        encoded(found, {"number": 1})
    with pytest.raises(NotSupported, match="message class"):
        decoded(found.decoder(None), b"\x08\x01")


# -- plain --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "value", "payload"),
    [
        (str, "é", b"\xc3\xa9"),
        (bytes, b"\xff", b"\xff"),
        (bytes, bytearray(b"\xff"), b"\xff"),
        (int, -2, b"\xff" * 7 + b"\xfe"),
        (float, 1.0, b"\x3f\xf0" + bytes(6)),
    ],
)
def test_plain_types(model: Any, value: Any, payload: bytes) -> None:
    assert encoded(codec(model), value) == payload
    assert round_trip(model, value) == value


def test_four_bytes_are_a_number_too() -> None:
    assert decoded(codec(int).decoder(None), b"\xff\xff\xff\xfe") == -2
    assert decoded(codec(float).decoder(None), b"\x3f\x80\x00\x00") == 1.0


@pytest.mark.parametrize(
    ("model", "value"), [(int, 2**63), (int, "1"), (float, "x"), (str, 1), (bytes, "text")]
)
def test_plain_values_of_another_type_are_payload_invalid(model: Any, value: Any) -> None:
    with pytest.raises(PayloadInvalid, match="cannot be encoded"):
        encoded(codec(model), value)


@pytest.mark.parametrize(("model", "payload"), [(int, b"123"), (float, b""), (str, b"\xff")])
def test_plain_payloads_that_are_something_else(model: Any, payload: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        decoded(codec(model).decoder(None), payload)


def test_a_number_without_a_model_is_written_by_its_type_and_not_guessed_when_read() -> None:
    found = codec(danube.Schema(definition=b"", schema_type="number"))
    assert encoded(found, 1) == bytes(7) + b"\x01"
    assert encoded(found, 1.0)[:2] == b"\x3f\xf0"
    with pytest.raises(NotSupported, match="whether a number is an integer"):
        decoded(found.decoder(None), bytes(8))


def test_text_without_a_model() -> None:
    assert round_trip(danube.Schema(definition="", schema_type="string"), "a") == "a"


@pytest.mark.parametrize("schema", [Model, Line, AVRO_1, int, str])
def test_bytes_are_sent_as_they_are(schema: Any) -> None:
    assert encoded(codec(schema), b"\x00\xff") == b"\x00\xff"


# -- what may be a schema -----------------------------------------------------------------------


@pytest.mark.parametrize("given_schema", [object, 7, [1], bool])
def test_what_is_no_model_is_told_what_is(given_schema: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot be a schema"):
        codec(given_schema)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "a model, a definition or a subject"),
        ({"model": int, "definition": "x", "schema_type": "avro"}, "not both"),
        ({"definition": "x"}, "belong together"),
        ({"schema_type": "avro", "subject": "s"}, "belong together"),
        ({"subject": "s", "version": -1}, "at least 1"),
    ],
)
def test_a_schema_says_what_it_lacks(keywords: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        danube.Schema(**keywords)


def test_an_unknown_type_and_a_definition_that_is_no_text() -> None:
    with pytest.raises(InvalidArgument, match="'xml' is not known"):
        codec(danube.Schema(definition="x", schema_type="xml"))
    with pytest.raises(InvalidArgument, match="no JSON"):
        codec(danube.Schema(definition={"a": {1, 2}}, schema_type="avro"))  # type: ignore[dict-item]


def test_a_schema_shows_itself() -> None:
    assert repr(danube.Schema(Line, subject="s")) == "<Schema Line subject='s' version=0>"
