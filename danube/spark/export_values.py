"""Payloads as typed values, by the schemas of the registry.

The column's type comes from the subject's newest version.  Each record is read by the version that it
names; fields that the newest one has and the record has not are null.  What cannot be read so keeps its
payload, and its value is null; nothing is lost.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from danube.core.metadata import Metadata
from danube.core.registry import SchemaVersion, Subject
from danube.errors import DanubeError
from danube.schema import avro
from danube.schema.model import Definition, SchemaType

Reader = Callable[[bytes], Any]

_JSON: Final[dict[str, pa.DataType]] = {
    "string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_(),
}  # fmt: skip
_AVRO: Final[dict[str, pa.DataType]] = {
    "string": pa.string(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(),
    "double": pa.float64(), "boolean": pa.bool_(), "bytes": pa.binary(),
}  # fmt: skip
_LOGICAL: Final[dict[str, pa.DataType]] = {
    "timestamp-millis": pa.timestamp("us", tz="UTC"),
    "timestamp-micros": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
    "uuid": pa.string(),
}


class TypedValues:
    """Reads the payloads of one subject.  ``type``: of the column."""

    def __init__(self, subject: Subject, kind: pa.DataType) -> None:
        self._subject = subject
        self.type = kind
        self._readers: dict[int, Reader | None] = {}

    def column(self, payloads: pa.Array, ids: pa.Array, versions: pa.Array) -> tuple[pa.Array, list[bool]]:
        """The values, and which of the payloads could not be read."""
        values: list[Any] = []
        failed: list[bool] = []
        own = self._subject.schema_id
        rows = zip(payloads.to_pylist(), ids.to_pylist(), versions.to_pylist(), strict=True)
        for payload, schema_id, version in rows:
            reader = self._reader(version or 0) if schema_id in (None, own) else None
            value = None
            if reader is not None:
                try:
                    value = reader(payload)
                except (ValueError, TypeError, KeyError, EOFError, IndexError, struct.error, DanubeError):
                    value = None
            values.append(value)
            failed.append(value is None)
        return self._array(values, failed), failed

    def _array(self, values: list[Any], failed: list[bool]) -> pa.Array:
        try:
            return pa.array(values, self.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            pass
        for number, value in enumerate(values):  # one of them does not fit the type: find out which
            try:
                pa.scalar(value, self.type)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
                values[number], failed[number] = None, True
        return pa.array(values, self.type)

    def _reader(self, version: int) -> Reader | None:
        if version not in self._readers:
            found = self._subject.find(version) if version else self._subject.latest
            self._readers[version] = reader_of(found) if found is not None else None
        return self._readers[version]


def subject_of(metadata: Metadata, topic: str) -> Subject | None:
    """The subject that a topic is configured with, when its payloads can be columns."""
    record = metadata.find_topic(topic)
    schema = record.schema if record is not None else None
    subject = metadata.registry.find(schema.subject) if schema is not None else None
    latest = subject.latest if subject is not None else None
    return subject if latest is not None and type_of(latest) is not None else None


def type_of(version: SchemaVersion) -> pa.DataType | None:
    """The Arrow type of a version's payloads; None where they stay bytes: a number tells not its kind."""
    if version.schema_type == SchemaType.STRING:
        return pa.string()
    if version.schema_type == SchemaType.JSON_SCHEMA:
        return _json_type(json.loads(version.definition))
    if version.schema_type == SchemaType.AVRO:
        return _avro_type(json.loads(version.definition), {})
    return None


def _json_type(schema: Any) -> pa.DataType:
    """Objects with named properties are structs; what has no one type is JSON text."""
    if not isinstance(schema, dict):
        return pa.string()
    named = schema.get("type")
    if isinstance(named, list):
        kinds = [kind for kind in named if kind != "null"]
        named = kinds[0] if len(kinds) == 1 else None
    if named == "object" and schema.get("properties"):
        return pa.struct([(name, _json_type(inner)) for name, inner in schema["properties"].items()])
    if named == "array":
        return pa.list_(_json_type(schema.get("items")))
    return _JSON.get(named or "", pa.string())


def _avro_type(schema: Any, named: dict[str, pa.DataType]) -> pa.DataType:
    if isinstance(schema, list):
        kinds = [kind for kind in schema if kind != "null"]
        return _avro_type(kinds[0], named) if len(kinds) == 1 else pa.string()
    if isinstance(schema, str):
        return named.get(schema) or _AVRO.get(schema, pa.string())
    kind = schema["type"]
    if schema.get("logicalType") in _LOGICAL:
        return _LOGICAL[schema["logicalType"]]
    if kind == "record":
        made = pa.struct([(field["name"], _avro_type(field["type"], named)) for field in schema["fields"]])
    elif kind == "array":
        return pa.list_(_avro_type(schema["items"], named))
    elif kind == "map":
        return pa.map_(pa.string(), _avro_type(schema["values"], named))
    elif kind == "fixed":
        made = pa.binary(schema["size"])
    elif kind == "enum":
        made = pa.string()
    else:
        return _avro_type(kind, named)
    named[schema["name"]] = made
    return made


def reader_of(version: SchemaVersion) -> Reader | None:
    """Turns a payload of this version into plain values; the reader raises where it cannot."""
    if version.schema_type == SchemaType.STRING:
        return bytes.decode
    if version.schema_type == SchemaType.JSON_SCHEMA:
        kind = type_of(version)
        return None if kind is None else lambda payload: _fitted(json.loads(payload), kind)
    if version.schema_type == SchemaType.AVRO:
        definition = Definition(schema_type=SchemaType.AVRO, text=version.definition)
        kind, read = type_of(version), avro.reader(definition)
        return None if kind is None else lambda payload: _fitted(read(payload), kind)
    return None


def _fitted(value: Any, kind: pa.DataType) -> Any:
    """The value with JSON text where the column is text and the value is none."""
    if value is None:
        return None
    if pa.types.is_struct(kind) and isinstance(value, dict):
        return {field.name: _fitted(value.get(field.name), field.type) for field in kind}
    if pa.types.is_list(kind) and isinstance(value, list):
        return [_fitted(one, kind.value_type) for one in value]
    if pa.types.is_string(kind) and not isinstance(value, str):
        return json.dumps(value, default=str, separators=(",", ":"))
    if pa.types.is_floating(kind) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
