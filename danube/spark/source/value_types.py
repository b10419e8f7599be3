"""Arrow columns of a schema's values, for Avro, JSON Schema, Protobuf and the plain types.

A value that Arrow has no column for (a choice between several types, a value of any shape, a type that
contains itself) becomes text: the value as JSON.  Every field may be null, as older versions lack some.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pyarrow as pa

from danube.errors import SchemaInvalid
from danube.schema.avro.parse import parse
from danube.schema.avro.types import Array, Enum, Fixed, Map, Primitive, Record, Type, Union
from danube.schema.json_text import decode as decode_json

MICROSECONDS: Final = pa.timestamp("us", tz="UTC")
VALUE: Final = "value"  # the column of decoded payloads
JSON_TEXT: Final = pa.string()
_PRECISION_MAX: Final = 38
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")

_AVRO: Final = {
    "null": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_AVRO_LOGICAL: Final = {
    "date": pa.date32(),
    "timestamp-millis": MICROSECONDS,
    "timestamp-micros": MICROSECONDS,
    "uuid": pa.string(),
}
_JSON: Final = {
    "integer": pa.int64(),
    "number": pa.float64(),
    "string": pa.string(),
    "boolean": pa.bool_(),
    "null": pa.string(),
}


def arrow_type(schema_type: str, definition: bytes, compiled: bytes = b"") -> pa.DataType:
    """The column type of a registered version's values; SchemaInvalid if it cannot be read."""
    if schema_type == "avro":
        return _of_avro(parse(decode_json(definition, "the definition"), defaults=False), ())
    if schema_type == "json_schema":
        root = decode_json(definition, "the definition")
        return _of_json(root, root, ())
    if schema_type == "protobuf":
        from danube.spark.source.protobuf_values import message_type

        return message_type(definition, compiled)
    plain = {"string": pa.string(), "bytes": pa.binary(), "number": pa.float64()}
    if schema_type not in plain:
        raise SchemaInvalid(f"values of type {schema_type!r} cannot be decoded")
    return plain[schema_type]


def _of_avro(kind: Type, above: tuple[str, ...]) -> pa.DataType:
    if isinstance(kind, Record):
        if kind.name in above:
            return JSON_TEXT
        inner = (*above, kind.name)
        return pa.struct([pa.field(one.name, _of_avro(one.type, inner)) for one in kind.fields])
    if isinstance(kind, Array):
        return pa.list_(pa.field("element", _of_avro(kind.items, above)))
    if isinstance(kind, Map):
        return pa.map_(pa.string(), _of_avro(kind.values, above))
    if isinstance(kind, Union):
        present = [one for one in kind.branches if one.kind != "null"]
        return _of_avro(present[0], above) if len(present) == 1 else JSON_TEXT
    if isinstance(kind, Enum):
        return pa.string()
    return _of_avro_plain(kind)


def _of_avro_plain(kind: Fixed | Primitive) -> pa.DataType:
    decimal = _DECIMAL.fullmatch(kind.logical)
    if decimal is not None:
        precision, scale = int(decimal[1]), int(decimal[2])
        return pa.decimal128(precision, scale) if precision <= _PRECISION_MAX else pa.string()
    if kind.logical in _AVRO_LOGICAL:
        return _AVRO_LOGICAL[kind.logical]
    return pa.binary() if isinstance(kind, Fixed) else _AVRO[kind.kind]


def _of_json(schema: Any, root: Any, above: tuple[str, ...]) -> pa.DataType:
    """The type of a JSON Schema; text for whatever does not say one type."""
    if not isinstance(schema, dict):
        return JSON_TEXT
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = _referred(root, reference)
        if target is None or reference in above:
            return JSON_TEXT
        return _of_json(target, root, (*above, reference))
    for word in ("anyOf", "oneOf"):
        if word in schema:
            present = [one for one in schema[word] if one != {"type": "null"}]
            return _of_json(present[0], root, above) if len(present) == 1 else JSON_TEXT
    kinds = schema.get("type", [])
    present = [one for one in ([kinds] if isinstance(kinds, str) else kinds) if one != "null"]
    if len(present) != 1:
        choices = schema.get("enum", [])
        return pa.string() if choices and all(isinstance(one, str) for one in choices) else JSON_TEXT
    if present[0] == "array":
        items = schema.get("items")
        inner = _of_json(items, root, above) if isinstance(items, dict) else JSON_TEXT
        return pa.list_(pa.field("element", inner))
    return _of_json_object(schema, root, above) if present[0] == "object" else _JSON[present[0]]


def _of_json_object(schema: dict[str, Any], root: Any, above: tuple[str, ...]) -> pa.DataType:
    properties = schema.get("properties")
    if properties:
        return pa.struct([pa.field(name, _of_json(one, root, above)) for name, one in properties.items()])
    rest = schema.get("additionalProperties")
    return pa.map_(pa.string(), _of_json(rest, root, above)) if isinstance(rest, dict) else JSON_TEXT


def _referred(root: Any, reference: str) -> Any:
    """Return the target of a reference inside the document; None for any other."""
    if not reference.startswith("#"):
        return None
    found = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


def json_text(value: Any) -> str | None:
    """A value as JSON; bytes as Latin-1 text, as Avro's JSON encoding has them."""
    return None if value is None else json.dumps(value, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
