"""Avro against others: fastavro reads and resolves what is allowed here, and another checker agrees."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube.schema.avro import kind as avro
from danube.schema.avro.compatibility import differences
from danube.schema.avro.container import MAGIC
from danube.schema.avro.parse import parse
from tests.examples import examples
from tests.unit.schema.avro.test_schema_avro import (
    NODE,
    ORDER,
    VALUE,
    built,
    container,
    one,
    reason,
    text_of,
    written,
)

VALIDATORS = [
    avro.validator(avro.examine(text_of(schema)))
    for schema in (
        ORDER,
        NODE,
        "string",
        ["null", "int", "string", {"type": "array", "items": "double"}],
        {"type": "map", "values": {"type": "map", "values": "bytes"}},
        one(["null", {"type": "map", "values": {"type": "array", "items": "R"}}]),
    )
]
HEADER = built(NODE, [])


@given(st.sampled_from(VALIDATORS), st.binary(max_size=300), st.sampled_from([b"", MAGIC, HEADER]))
@settings(max_examples=examples(1500), deadline=500)
def test_random_payloads_get_a_verdict_and_never_an_exception(
    validate: Any, payload: bytes, before: bytes
) -> None:
    found = validate(before + payload)
    assert found is None or (isinstance(found, str) and 0 < len(found) < 300)


@given(st.binary(max_size=100), st.integers(0, 400), st.integers(0, 10))
@settings(max_examples=examples(500), deadline=500)
def test_a_damaged_container_gets_a_verdict(noise: bytes, at: int, cut: int) -> None:
    payload = container(ORDER, [VALUE] * 3, "deflate")
    at %= len(payload)
    found = VALIDATORS[0](payload[:at] + noise + payload[at + cut :])
    assert found is None or isinstance(found, str)


names = st.sampled_from(["a", "b", "c"])
primitives = st.sampled_from(["null", "boolean", "int", "long", "float", "double", "bytes", "string"])


@st.composite
def schemas(draw: st.DrawFn, depth: int = 3, prefix: str = "T") -> Any:
    """A schema whose named types are numbered by their place, so that two of them meet in a pair."""
    kinds = ["primitive"] * 3 + (["record", "array", "map", "union", "enum", "fixed"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    inner = schemas(depth=depth - 1, prefix=prefix + "x")
    if kind == "primitive":
        return draw(primitives)
    if kind == "array":
        return {"type": "array", "items": draw(inner.filter(lambda one: not _weightless(one)))}
    if kind == "map":
        return {"type": "map", "values": draw(inner)}
    if kind == "enum":
        symbols = draw(st.lists(st.sampled_from("ABCD"), min_size=1, unique=True))
        more = {"default": symbols[0]} if draw(st.booleans()) else {}
        return {"type": "enum", "name": prefix + "E", "symbols": symbols, **more}
    if kind == "fixed":
        return {"type": "fixed", "name": prefix + "F", "size": draw(st.integers(1, 2))}
    if kind == "union":
        found: dict[str, Any] = {}
        for number_of_branch in range(draw(st.integers(1, 3))):
            branch = draw(schemas(depth=depth - 1, prefix=f"{prefix}u{number_of_branch}"))
            if not isinstance(branch, list):
                found[_identity(branch)] = branch
        return list(found.values()) or ["null"]
    fields = []
    for name in draw(st.lists(names, unique=True)):
        field = {"name": name, "type": draw(schemas(depth=depth - 1, prefix=f"{prefix}{name}"))}
        if isinstance(field["type"], str) and field["type"] in _DEFAULTS_BY_TYPE and draw(st.booleans()):
            field["default"] = _DEFAULTS_BY_TYPE[field["type"]]
        fields.append(field)
    return {"type": "record", "name": prefix + "R", "fields": fields}


_DEFAULTS_BY_TYPE = {"null": None, "int": 1, "long": 2, "string": "s", "boolean": True, "double": 1.5}


def _identity(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    return str(schema.get("name", schema["type"]))


def _weightless(schema: Any) -> bool:
    if schema == "null":
        return True
    if isinstance(schema, dict) and schema["type"] == "record":
        return all(_weightless(field["type"]) for field in schema["fields"])
    return False


def value_of(draw: st.DrawFn, schema: Any) -> Any:
    if isinstance(schema, list):
        branch = draw(st.sampled_from(schema))
        value = value_of(draw, branch)
        return (_identity(branch), value) if not isinstance(branch, str) else value
    kind = schema if isinstance(schema, str) else schema["type"]
    if kind == "record":
        return {field["name"]: value_of(draw, field["type"]) for field in schema["fields"]}
    if kind == "array":
        return [value_of(draw, schema["items"]) for _ in range(draw(st.integers(0, 2)))]
    if kind == "map":
        return {key: value_of(draw, schema["values"]) for key in draw(st.sets(names, max_size=2))}
    if kind == "enum":
        return draw(st.sampled_from(schema["symbols"]))
    if kind == "fixed":
        return b"x" * schema["size"]
    return draw(
        {
            "null": st.none(),
            "boolean": st.booleans(),
            "int": st.integers(-(2**31), 2**31 - 1),
            "long": st.integers(-(2**63), 2**63 - 1),
            "float": st.floats(width=32, allow_nan=False),
            "double": st.floats(allow_nan=False),
            "bytes": st.text(max_size=5).map(str.encode),  # a reader may want a string
            "string": st.text(max_size=5),
        }[kind]
    )


@given(schemas(), st.data())
@settings(max_examples=examples(400), deadline=None)
def test_what_fastavro_writes_passes(schema: Any, data: st.DataObject) -> None:
    value = data.draw(st.composite(lambda draw: value_of(draw, schema))())
    payload = written(fastavro.parse_schema(schema), value)
    assert reason(schema, payload) is None
    assert reason(schema, payload + b"\0") is not None or payload.startswith(MAGIC)


@given(schemas(), st.binary(max_size=30))
@settings(max_examples=examples(600), deadline=None)
def test_what_passes_is_read_by_fastavro(schema: Any, payload: bytes) -> None:
    if reason(schema, payload) is None:
        fastavro.schemaless_reader(io.BytesIO(payload), fastavro.parse_schema(schema), None)


WIDER = {"int": ["long", "float", "double"], "long": ["double"], "float": ["double"], "string": ["bytes"]}


@st.composite
def evolved(draw: st.DrawFn, schema: Any) -> Any:
    """The schema after some changes, of which most keep it readable."""
    if isinstance(schema, list):
        branches = [one if isinstance(one, list) else draw(evolved(one)) for one in schema]
        kept = {_identity(one): one for one in branches if not isinstance(one, list)}
        return list(kept.values()) or schema
    change = draw(st.integers(0, 9))
    if isinstance(schema, str):
        if change == 0:
            return draw(primitives)
        if change < 3:
            return draw(st.sampled_from([*WIDER.get(schema, []), schema]))
        return ["null", schema] if change == 3 and schema != "null" else schema
    if change == 0:
        return ["null", schema]
    if schema["type"] == "array":
        items = draw(evolved(schema["items"]))
        return {**schema, "items": schema["items"] if _weightless(items) else items}
    if schema["type"] == "map":
        return {**schema, "values": draw(evolved(schema["values"]))}
    if schema["type"] == "enum" and change < 6:
        return {**schema, "symbols": sorted({*schema["symbols"], draw(st.sampled_from("ABCD"))})}
    if schema["type"] == "fixed" and change == 1:
        return {**schema, "size": schema["size"] + 1}
    return _evolved_record(draw, schema) if schema["type"] == "record" else schema


def _evolved_record(draw: st.DrawFn, schema: Any) -> Any:
    fields = []
    for field in schema["fields"]:
        if not draw(st.integers(0, 5)):
            continue
        kind = draw(evolved(field["type"]))
        more = {} if kind != field["type"] else {key: field[key] for key in field if key == "default"}
        fields.append({"name": field["name"], "type": kind, **more})
    if draw(st.booleans()):
        more = {"default": 1} if draw(st.integers(0, 3)) else {}
        fields.insert(draw(st.integers(0, len(fields))), {"name": "d", "type": "int", **more})
    return {**schema, "fields": fields}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """(reader, writer); either may be the changed one."""
    schema = draw(schemas())
    pair = [schema, draw(evolved(schema))]
    return tuple(reversed(pair)) if draw(st.booleans()) else tuple(pair)  # type: ignore[return-value]


def _readable(reader: Any, writer: Any) -> bool:
    return not differences(parse(reader), parse(writer))


@given(pairs(), st.data())
@settings(max_examples=examples(800), deadline=None)
def test_what_the_checker_allows_fastavro_resolves(pair: tuple[Any, Any], data: st.DataObject) -> None:
    reader, writer = pair
    if not _readable(reader, writer):
        return
    value = data.draw(st.composite(lambda draw: value_of(draw, writer))())
    payload = written(fastavro.parse_schema(writer), value)
    fastavro.schemaless_reader(
        io.BytesIO(payload), fastavro.parse_schema(writer), fastavro.parse_schema(reader)
    )


@given(pairs())
@settings(max_examples=examples(800), deadline=None)
def test_another_checker_agrees(pair: tuple[Any, Any]) -> None:
    parse_other = pytest.importorskip("avro.schema").parse
    other = pytest.importorskip("avro.compatibility")
    reader, writer = pair
    found = other.ReaderWriterCompatibilityChecker().get_compatibility(
        parse_other(json.dumps(reader)), parse_other(json.dumps(writer))
    )
    theirs = found.compatibility is other.SchemaCompatibilityType.compatible
    assert _readable(reader, writer) == theirs, (reader, writer, found.messages)


def test_enough_of_the_pairs_are_readable_and_changed() -> None:
    counts = {True: 0, False: 0}

    @given(pairs().filter(lambda pair: pair[0] != pair[1]))
    @settings(max_examples=300, deadline=None, database=None, derandomize=True)  # it counts them
    def count(pair: tuple[Any, Any]) -> None:
        counts[_readable(*pair)] += 1

    count()
    assert min(counts.values()) > 50, counts
