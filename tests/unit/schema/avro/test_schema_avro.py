"""Avro: what a definition may be, its fingerprint, payloads, containers, and what bombs cost."""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import io
import json
import lzma
import tracemalloc
import zlib
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.errors import SchemaInvalid
from danube.schema.avro import container as avro_container
from danube.schema.avro import kind as avro
from danube.schema.avro.container import INFLATED_BYTES_MAX, MAGIC, inflate_snappy
from danube.schema.avro.parse import parse
from danube.schema.limited.door import Request, run
from danube.schema.model import SchemaType
from tests.examples import examples
from tests.processor_time import processor_time_within

ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": ["null", "string"], "default": None},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {
            "name": "items",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Item",
                    "fields": [{"name": "price", "type": "double"}, {"name": "gift", "type": "boolean"}],
                },
            },
        },
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 4}},
    ],
}
NODE = {
    "type": "record",
    "name": "Node",
    "fields": [{"name": "value", "type": "int"}, {"name": "next", "type": ["null", "Node"]}],
}
VALUE = {
    "id": 7,
    "customer": "Ada",
    "state": "PAID",
    "items": [{"price": 1.5, "gift": False}],
    "tags": {"a": 1},
    "hash": b"abcd",
}


def text_of(schema: Any) -> bytes:
    return json.dumps(schema).encode()


def record(*fields: Any, name: str = "R", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def one(kind: Any, **more: Any) -> dict[str, Any]:
    return record({"name": "a", "type": kind, **more})


def written(schema: Any, value: Any) -> bytes:
    file = io.BytesIO()
    fastavro.schemaless_writer(file, schema, value)
    return file.getvalue()


def reason(schema: Any, payload: bytes) -> str | None:
    return avro.validator(avro.examine(text_of(schema)))(payload)


# Definitions


@pytest.mark.parametrize(
    "schema",
    [
        "int",
        ["null", "string"],
        {"type": "string"},
        ORDER,
        NODE,
        record(),
        one(["null", {"type": "array", "items": "R"}]),
        one({"type": "map", "values": "null"}),
        one({"type": "double"}, default=0),
        one("double", default="NaN"),
        one("bytes", default="\u00ff"),
        one(["null", "string"], default="text"),
        one({"type": "fixed", "name": "F", "size": 2}, default="\u0000\u00ff"),
        one(record({"name": "x", "type": "int", "default": 3}, name="I"), default={}),
        one({"type": "array", "items": ["null", "long"]}, default=[None, 5]),
        one({"type": "map", "values": "int"}, default={"k": 1}),
        one({"type": "int", "logicalType": "date"}),
        one({"type": "string", "logicalType": "date"}),
        one({"type": "int", "logicalType": 7}),
        one({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 4}),
        {"type": "error", "name": "E", "fields": []},
        record(
            {"name": "a", "type": {"type": "enum", "name": "x.E", "symbols": ["A"], "default": "A"}},
            {"name": "b", "type": "x.E", "default": "A"},
        ),
    ],
)
def test_a_definition_is_taken(schema: Any) -> None:
    assert avro.examine(text_of(schema)).text == text_of(schema)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (7, "a type is a name"),
        (None, "a type is a name"),
        ("Order", "type 'Order' is not known"),
        ({}, "needs the name of its 'type'"),
        ({"type": "strnig"}, "type 'strnig' is not known"),
        ({"type": "record", "fields": []}, "lacks 'name'"),
        ({"type": "record", "name": "R"}, "lacks 'fields'"),
        ({"type": "record", "name": "R", "fields": {}}, "'fields' is a list"),
        (record(7), "a field is an object"),
        (record({"type": "int"}), "lacks 'name'"),
        (record({"name": "a"}), "R: field lacks 'type'|R.a: field lacks 'type'"),
        (record(name="1R"), "is not an Avro name"),
        (record(name="R-S"), "is not an Avro name"),
        (record(name="Größe"), "is not an Avro name"),
        (record(name="R\n"), "is not an Avro name"),
        (record(name=".R"), "is not an Avro name"),
        (record(name=""), "is not an Avro name"),
        (record(name="int"), "is the name of an Avro type"),
        (record(name="record"), "is the name of an Avro type"),
        (record(name="a" * 600), "is not an Avro name"),
        (record(name=".".join(["a" * 100] * 6)), "characters, at most"),
        (record(name=7), "a name is a string"),
        (record(namespace=7), "a namespace is a string"),
        (record(namespace="a..b"), "is not an Avro name"),
        (record(aliases="S"), "list of strings"),
        (record(aliases=["S-T"]), "is not an Avro name"),
        (one("int", aliases=["b-c"]), "is not an Avro name"),
        (record({"name": "a-b", "type": "int"}), "is not an Avro name"),
        (record({"name": "a", "type": "int"}, {"name": "a", "type": "int"}), "declared twice"),
        (one(record(name="R")), "declared twice"),
        (["int", "int"], "two branches 'int'"),
        ([], "has 0"),
        (["null", ["int"]], "directly in a union"),
        ({"type": {"type": "string"}}, "the name of its 'type', and this one has an object"),
        ({"type": ["int"]}, "the name of its 'type', and this one has a list"),
        ({"type": "array"}, "lacks 'items'"),
        ({"type": "map"}, "lacks 'values'"),
        ({"type": "enum", "name": "E"}, "lacks 'symbols'"),
        ({"type": "enum", "name": "E", "symbols": []}, "one symbol or more"),
        ({"type": "enum", "name": "E", "symbols": ["A", "A"]}, "each once"),
        ({"type": "enum", "name": "E", "symbols": ["A B"]}, "is not an Avro name"),
        ({"type": "enum", "name": "E", "symbols": [1]}, "list of strings"),
        ({"type": "enum", "name": "E", "symbols": ["A"], "default": "B"}, "not a symbol"),
        ({"type": "enum", "name": "E", "symbols": ["A"], "default": ["A"]}, "not a symbol"),
        ({"type": "fixed", "name": "F"}, "lacks 'size'"),
        ({"type": "fixed", "name": "F", "size": 0}, "the size of a fixed"),
        ({"type": "fixed", "name": "F", "size": True}, "the size of a fixed"),
        ({"type": "fixed", "name": "F", "size": 2**40}, "the size of a fixed"),
        (one({"type": "bytes", "logicalType": "decimal"}), "precision of a decimal"),
        (one({"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 3}), "scale of a decimal"),
        (
            one({"type": "fixed", "name": "F", "size": 2, "logicalType": "decimal", "precision": 9}),
            "9 digits do not fit into 2 bytes",
        ),
        (one("int", default="1"), "R.a: the default does not fit int: '1' is not int"),
        (one("int", default=True), "is not int"),
        (one("int", default=2**31), "is not int"),
        (one("long", default=2**63), "is not long"),
        (one("double", default="x"), "is not double"),
        (one("boolean", default=0), "is not boolean"),
        (one("null", default=0), "is not null"),
        (one("string", default=None), "is not string"),
        (one("bytes", default="\u0100"), "is not bytes"),
        (one(["null", "string"], default=1), "is not null"),
        (one({"type": "array", "items": "int"}, default={}), "is not a list"),
        (one({"type": "array", "items": "int"}, default=["x"]), "is not int"),
        (one({"type": "map", "values": "int"}, default=[]), "is not an object"),
        (one({"type": "map", "values": "int"}, default={"k": "x"}), "is not int"),
        (one({"type": "enum", "name": "E", "symbols": ["A"]}, default="B"), "is not a symbol"),
        (one({"type": "fixed", "name": "F", "size": 2}, default="abc"), "is not 2 characters"),
        (one(record({"name": "x", "type": "int"}, name="I"), default={}), "field 'x' is missing"),
        (one(record({"name": "x", "type": "int"}, name="I"), default={"x": "y"}), "x: 'y' is not int"),
        (one(["null", "R"], default={}), "without end"),
        (one("R"), "contains itself, so no value of it can end"),
        (one(["R"]), "contains itself"),
        (one(record({"name": "b", "type": ["R"]}, name="S")), "contains itself"),
        ({"type": "array", "items": "null"}, "take no bytes"),
        ({"type": "array", "items": record()}, "take no bytes"),
        (one({"type": "array", "items": record({"name": "x", "type": "null"}, name="I")}), "take no bytes"),
        ({"type": "int", "__fastavro_parsed": True}, "mark of a library"),
        (record(__named_schemas={}), "mark of a library"),
        ([{"type": "record", "name": f"R{n}", "fields": []} for n in range(300)], "1 to 256 branches"),
    ],
)
def test_a_definition_is_refused_with_a_sentence(schema: Any, why: str) -> None:
    with pytest.raises(SchemaInvalid, match=why) as refused:
        avro.examine(text_of(schema))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "line 1, column 1"),
        (b"int", "line 1, column 1"),
        (b'{"type":\n"record",,}', "line 2, column 10"),
        (b'"\xff"', "not UTF-8"),
        (b'{"type":"int","type":"long"}', "'type' stands twice"),
        (b'{"type":"int","x":NaN}', "NaN is not a JSON value"),
        (b'{"type":"int","x":-Infinity}', "-Infinity is not"),
        (b'{"type":"int","x":1e999}', "beyond the range"),
        (b'{"type":"int","x":' + b"9" * 100_000 + b"}", "100000 digits"),
        (b'{"type":"int","x":"\\ud800"}', "surrogate"),
        (b"[" * 100_000, "nests deeper than 64"),
        (b'{"a":' * 40_000, "nests deeper than 64"),
        (b'{"type":"array","items":' * 65 + b'"int"' + b"}" * 65, "nests deeper than 64"),
        (b" " * 300_000, "at most 262144"),
    ],
)
def test_json_bombs_and_bad_text_are_refused_at_once(text: bytes, why: str) -> None:
    with processor_time_within(1.0), pytest.raises(SchemaInvalid, match=why):
        avro.examine(text)


def test_a_bracket_in_a_string_is_no_nesting() -> None:
    assert avro.examine(text_of(one("string", doc='\\"' + "[" * 500)))


def chain(count: int) -> Any:
    """Records that each contain the one before: flat text, deep values."""
    branches: list[Any] = [record({"name": "x", "type": "int"}, name="R0")]
    branches += [
        record({"name": "a", "type": f"R{number - 1}"}, name=f"R{number}") for number in range(1, count)
    ]
    return branches


def test_types_may_not_nest_deep_through_names_either() -> None:
    assert avro.examine(text_of(chain(60)))
    with pytest.raises(SchemaInvalid, match="stand 100 deep"):
        avro.examine(text_of(chain(100)))


def test_a_definition_has_a_bounded_number_of_types() -> None:
    fields = [{"name": f"f{number}", "type": "int"} for number in range(8_000)]
    with pytest.raises(SchemaInvalid, match="bytes, at most"):
        avro.examine(text_of(record(*fields)))
    with pytest.raises(SchemaInvalid, match="more than 100 types"):
        parse(record(*fields), types_max=100)


@pytest.mark.parametrize(
    "schema",
    [
        # A default that could be tried against 2 ** 50 combinations of branches.
        one(
            [
                record({"name": "a", "type": ["null", "x.S", "y.S"], "default": None}, name="x.S"),
                record({"name": "a", "type": ["null", "x.S", "x.T"], "default": None}, name="y.S"),
            ][0]
        ),
        record(*({"name": f"f{number}", "type": "int", "default": 0} for number in range(4_000))),
        {"type": "enum", "name": "E", "symbols": [f"S{number}" for number in range(20_000)]},
    ],
)
def test_costly_definitions_end_in_the_child(schema: Any) -> None:
    with processor_time_within(10.0):
        with contextlib.suppress(SchemaInvalid):
            run(Request(schema_type=SchemaType.AVRO, text=text_of(schema)))


def test_a_default_costs_no_more_than_its_pairs_with_types() -> None:
    """Two records that are alternatives of each other, and a default nested through both 18 times."""
    alternatives = ["x.S", "x.T", "null"]
    first = record({"name": "a", "type": ["null"]}, name="x.S")
    first["fields"] = [
        {
            "name": "a",
            "type": ["x.S", record({"name": "a", "type": alternatives}, name="x.T"), "null"],
        }
    ]
    value: Any = {"a": 5}
    for _ in range(18):
        value = {"a": value}
    with processor_time_within(1.0), pytest.raises(SchemaInvalid, match="does not fit"):
        avro.examine(text_of(record({"name": "f", "type": first, "default": value}, name="Top")))


def test_the_fingerprint_is_of_the_canonical_json() -> None:
    text = b'{ "type": "record",  "name": "R", "doc": "Gr\xc3\xb6\\u00dfe", "fields": [] }'
    canonical = '{"doc":"Größe","fields":[],"name":"R","type":"record"}'.encode()
    definition = avro.examine(text)
    assert definition.fingerprint == "sha256:" + hashlib.sha256(canonical).hexdigest()
    assert avro.examine(canonical).fingerprint == definition.fingerprint
    assert avro.examine(b'{"type":"record","name":"R","fields":[]}').fingerprint != definition.fingerprint


# Payloads: bare datums


def test_a_datum_passes() -> None:
    assert reason(ORDER, written(ORDER, VALUE)) is None


@pytest.mark.parametrize(
    ("schema", "payload", "why"),
    [
        ("int", b"", "the payload ends inside a value"),
        ("int", b"\x80", "the payload ends inside a value"),
        ("int", b"\x02\x02", "1 bytes follow the value"),
        ("int", b"\xff" * 5 + b"\x01", "is not an int of 32 bits"),
        ("long", b"\xff" * 10 + b"\x01", "more than 10 bytes"),
        ("long", b"\xff" * 9 + b"\x7f", "more than 64 bits"),
        ("boolean", b"\x02", "0 or 1, not 2"),
        ("float", b"\0\0\0", "4 bytes are expected and 3 are left"),
        ("double", b"\0" * 7, "8 bytes are expected and 7"),
        ("string", b"\x06ab", "claims 1 bytes more"),
        ("string", b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", "bytes more than there are"),
        ("bytes", b"\x01", "a length is -1"),
        ("string", b"\x04\xff\xfe", "not UTF-8: byte 0"),
        ("string", b"\x80\x01" + b"a" * 63 + b"\xc3", "not UTF-8: byte 63"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, b"\x04", "has 2 symbols.* number 2"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, b"\x01", "number -1"),
        (["null", "int"], b"\x04", "has 2 branches.* number 2"),
        (["null", "int"], b"\x01", "number -1"),
        ({"type": "fixed", "name": "F", "size": 3}, b"ab", "3 bytes are expected"),
        ({"type": "array", "items": "int"}, b"\x02", "claims 1 values, and 0 bytes"),
        ({"type": "array", "items": "int"}, b"\x02\x02", "ends inside a value"),
        (
            {"type": "array", "items": "int"},
            b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00",
            "claims 9223372036854775807 values",
        ),
        (
            {"type": "array", "items": "int"},
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x02\x00",
            "claims 9223372036854775808 values",
        ),
        ({"type": "array", "items": "int"}, b"\x01\x01\x02\x00", "claims -1 bytes"),
        ({"type": "array", "items": "int"}, b"\x01\x20\x02\x00", "claims 16 bytes"),
        ({"type": "array", "items": "int"}, b"\x01\x04\x02\x00", "-1 bytes longer than it claims"),
        ({"type": "map", "values": "int"}, b"\x01\x02\x02a\x02\x00", "bytes longer than it claims"),
        ({"type": "map", "values": "int"}, b"\x02\x02\xff\x02\x00", "not UTF-8"),
        (ORDER, b"\x02\x00\x00\x02" + b"\0" * 8 + b"\x05", "Order.items.gift: a boolean is 0 or 1, not 5"),
        (ORDER, b"", "Order.id: the payload ends"),
        (record(), b"\0", "1 bytes follow"),
    ],
)
def test_what_is_no_datum_gets_a_reason(schema: Any, payload: bytes, why: str) -> None:
    found = reason(schema, payload)
    assert found is not None
    import re

    assert re.search(why, found), found


@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        ("null", b""),
        (record(), b""),
        ("long", b"\xff" * 9 + b"\x01"),
        ("int", b"\xff\xff\xff\xff\x0f"),
        ({"type": "array", "items": "int"}, b"\x01\x02\x02\x00"),
        ({"type": "map", "values": "null"}, b"\x02\x02a\x00"),
        (one(["null", {"type": "array", "items": "R"}]), b"\x02\x02\x00\x00"),
        ("string", b"\x80\x01" + b"a" * 62 + "ß".encode()),
    ],
)
def test_unusual_datums_pass(schema: Any, payload: bytes) -> None:
    assert reason(schema, payload) is None


def test_recursion_in_a_payload_is_bounded() -> None:
    assert reason(NODE, b"\x02\x02" * 63 + b"\x02\x00") is None
    assert reason(NODE, b"\x02\x02" * 64 + b"\x02\x00") is not None
    assert "nest deeper than 64" in (reason(NODE, b"\x02\x02" * 4_000_000) or "")
    forest = one(["null", {"type": "map", "values": {"type": "array", "items": "R"}}])
    assert "nest deeper than 64" in (reason(forest, b"\x02\x02\x02k\x02" * 100_000) or "")


def test_a_payload_builds_nothing() -> None:
    """Eight bytes a kilobyte of objects in a decoder: fifty null fields for each boolean."""
    nulls = [{"name": f"n{number}", "type": "null"} for number in range(50)]
    schema = {"type": "array", "items": record({"name": "b", "type": "boolean"}, *nulls)}
    validate = avro.validator(avro.examine(text_of(schema)))
    count = 500_000
    payload = written("long", count) + b"\x01" * count + b"\x00"
    tracemalloc.start()
    try:
        assert validate(payload) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


# Payloads: object container files


def container(schema: Any, values: list[Any], codec: str = "null") -> bytes:
    file = io.BytesIO()
    fastavro.writer(file, schema, values, codec=codec)
    return file.getvalue()


def number(value: int) -> bytes:
    return written("long", value)


def built(
    schema: Any, blocks: list[tuple[int, bytes]], codec: bytes = b"null", *, text: bytes = b""
) -> bytes:
    """A container file by hand; its blocks are (count, compressed bytes)."""
    metadata = {"avro.schema": text or text_of(schema), "avro.codec": codec}
    sync = b"0123456789abcdef"
    header = MAGIC + written({"type": "map", "values": "bytes"}, metadata) + sync
    return header + b"".join(number(count) + number(len(block)) + block + sync for count, block in blocks)


def deflated(data: bytes) -> bytes:
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflater.compress(data) + deflater.flush()


def snappy_literals(data: bytes) -> bytes:
    """Snappy data without any copy, as a container's block."""
    size, value = bytearray(), len(data)
    while value > 127:
        size.append(value & 127 | 128)
        value >>= 7
    size.append(value)
    parts = [data[at : at + 60] for at in range(0, len(data), 60)]
    packed = bytes(size) + b"".join(bytes([len(part) - 1 << 2]) + part for part in parts)
    return packed + zlib.crc32(data).to_bytes(4, "big")


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz"])
def test_a_container_file_passes(codec: str) -> None:
    assert reason(ORDER, container(ORDER, [VALUE] * 100, codec)) is None
    assert reason(ORDER, container(ORDER, [], codec)) is None


def test_a_container_of_an_older_schema_must_resolve() -> None:
    older = {**ORDER, "fields": [one for one in ORDER["fields"] if one["name"] != "customer"]}  # type: ignore[union-attr,attr-defined]
    value = {name: given for name, given in VALUE.items() if name != "customer"}
    assert reason(ORDER, container(older, [value])) is None
    found = reason(older, container({**ORDER, "name": "Bill"}, [VALUE]))
    assert found is not None and "does not resolve to the topic's: Order" in found
    found = reason(ORDER, container("int", [1]))
    assert found is not None and "does not resolve" in found


@pytest.mark.parametrize("codec", [b"null", b"deflate", b"snappy", b"bzip2", b"xz"])
def test_a_bad_value_in_a_container_is_found(codec: bytes) -> None:
    pack = {
        b"null": bytes,
        b"deflate": deflated,
        b"snappy": snappy_literals,
        b"bzip2": bz2.compress,
        b"xz": lzma.compress,
    }[codec]
    good, bad = b"\x02\x00\x01", b"\x02\x00\x05"
    schema = record(
        {"name": "i", "type": "long"}, {"name": "j", "type": "int"}, {"name": "b", "type": "boolean"}
    )
    assert reason(schema, built(schema, [(2, pack(good * 2))], codec)) is None
    found = reason(schema, built(schema, [(2, pack(good * 2)), (2, pack(good + bad))], codec))
    assert found == "Avro container: value 1.b: a boolean is 0 or 1, not 5"


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (MAGIC, "ends inside"),
        (MAGIC + b"\x00", "its header is cut"),
        (MAGIC + b"\x00" * 17, "schema of the container is not JSON"),
        (MAGIC + b"\x02\x01", "a length in its header claims -1 bytes"),
        (MAGIC + number(2**60), "more than 64 entries"),
        (MAGIC + number(-(2**60)) + number(1), "more than 64 entries"),
        (built("int", [], text=b"["), "not JSON"),
        (built("int", [], text=b"[" * 60_000), "nests deeper"),
        (built("int", [], text=b" " * 70_000), "its schema has 70000 bytes"),
        (built("int", [], text=b'"nothing"'), "is not known"),
        (
            built("int", [], text=text_of(record(*({"name": f"f{n}", "type": "int"} for n in range(1_500))))),
            "more than 1000 types",
        ),
        (built("int", [], b"lz77"), "codec b'lz77' is not read here"),
        (built("int", [(1, b"\x02")])[:-1], "does not end with the file's marker"),
        (built("int", [(1, b"\x02")])[:-1] + b"?", "does not end with the file's marker"),
        (built("int", [])[:-1], "its header is cut"),
        (built("int", [(-1, b"\x02")]), "does not end"),
        (built("int", [(2**60, b"\x02")]), "claims 1152921504606846976 values in 1 bytes"),
        (built("int", [(1, b"\x02\x02")]), "1 bytes follow the last value"),
        (built("int", [(2, b"\x02\x80")]), "value 1: the payload ends inside a value"),
        (built("int", [(1, b"garbage")], b"deflate"), "cannot be inflated"),
        (built("int", [(1, deflated(b"\x02" * 1000)[:-3])], b"deflate"), "is cut"),
        (built("int", [(1, b"garbage")], b"bzip2"), "cannot be inflated"),
        (built("int", [(1, b"garbage")], b"xz"), "cannot be inflated"),
        (built("int", [(1, b"garbage")], b"snappy"), "cannot be inflated"),
        (built("int", [(1, snappy_literals(b"\x02")[:-1] + b"?")], b"snappy"), "length or checksum"),
    ],
)
def test_what_is_no_container_gets_a_reason(payload: bytes, why: str) -> None:
    found = reason("int", payload)
    assert found is not None
    import re

    assert re.search(why, found), found


def snappy_bomb(size: int) -> bytes:
    """One literal byte, then copies of 64 bytes at distance 1."""
    packed, value = bytearray(), size
    while value > 127:
        packed.append(value & 127 | 128)
        value >>= 7
    packed.append(value)
    packed += b"\x00\x02" + b"\xfe\x01\x00" * ((size - 1) // 64)
    rest = (size - 1) % 64
    if rest:
        packed += bytes([(rest - 1) << 2 | 2, 1, 0])
    return bytes(packed) + zlib.crc32(b"\x02" * size).to_bytes(4, "big")


def test_snappy_copies_are_read() -> None:
    for size in (1, 64, 65, 1000, 70_000):
        assert inflate_snappy(snappy_bomb(size), size) == b"\x02" * size
    overlapping = (
        bytes([10, 2 << 2]) + b"abc" + bytes([3 << 2 | 1, 3]) + zlib.crc32(b"abcabcabca").to_bytes(4, "big")
    )
    assert inflate_snappy(overlapping, 10) == b"abcabcabca"
    long_literal = bytes([100, 60 << 2, 99]) + b"x" * 100 + zlib.crc32(b"x" * 100).to_bytes(4, "big")
    assert inflate_snappy(long_literal, 100) == b"x" * 100


@given(st.binary(max_size=200))
@settings(max_examples=examples(300), deadline=None)
def test_random_snappy_data_is_inflated_or_refused(data: bytes) -> None:
    try:
        assert len(inflate_snappy(data, 1000)) <= 1000
    except (ValueError, IndexError):
        pass


@pytest.mark.parametrize(
    ("codec", "pack"),
    [
        (b"deflate", lambda size: deflated(b"\x02" * size)),
        (b"bzip2", lambda size: bz2.compress(b"\x02" * size)),
        (b"xz", lambda size: lzma.compress(b"\x02" * size, preset=1)),
        (b"snappy", snappy_bomb),
    ],
)
def test_a_block_inflates_to_a_bound(codec: bytes, pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avro_container, "INFLATED_BYTES_MAX", 100_000)
    assert reason({"type": "array", "items": "int"}, b"\x00") is None
    fits = built("int", [(60_000, pack(60_000))], codec)
    assert reason("int", fits) is None
    for blocks in ([(4_000_000, pack(4_000_000))], [(60_000, pack(60_000))] * 2):
        payload = built("int", blocks, codec)
        found = reason("int", payload)
        assert found is not None and ("inflates to more" in found or "are left to it" in found), found


def test_the_bound_of_inflating_holds_memory() -> None:
    payload = built("int", [(1 << 28, deflated(b"\x02" * (1 << 28)))], b"deflate")
    validate = avro.validator(avro.examine(b'"int"'))
    tracemalloc.start()
    try:
        assert "inflates to more" in (validate(payload) or "")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * INFLATED_BYTES_MAX


def test_values_without_bytes_are_not_counted_one_by_one() -> None:
    with processor_time_within(1.0):
        assert reason(record(), built(record(), [(2**62, b"")])) is None
        assert "has some" in (reason(record(), built(record(), [(1, b"x")])) or "")


def test_a_datum_may_begin_like_a_container() -> None:
    schema = record(*({"name": name, "type": "int"} for name in "abcd"))
    assert reason(schema, MAGIC) is None


def test_the_schema_of_a_container_is_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[bytes] = []

    def decode(text: bytes, what: str) -> Any:
        examined.append(text)
        return json.loads(text)

    validate = avro.validator(avro.examine(text_of(ORDER)))
    payload = container({**ORDER, "doc": "another text"}, [VALUE])
    monkeypatch.setattr(avro_container, "decode", decode)
    for _ in range(3):
        assert validate(payload) is None
    assert len(examined) == 1
    for other in range(avro_container.REMEMBERED_MAX + 1):
        assert validate(container({**ORDER, "doc": str(other)}, [VALUE])) is None
    assert validate(payload) is None
    assert len(examined) == avro_container.REMEMBERED_MAX + 3
