"""One door to every schema type: parse, compare, validate.

A type is a module with three functions:

``examine(text: bytes) -> Definition``
    parse an untrusted definition; raises SchemaInvalid (what, why with line or path, hint).  Runs in the
    limited child only.
``compare(reader: Definition, writer: Definition, checks: Checks) -> list[Difference]``
    every reason why ``reader`` cannot read records of ``writer``; empty if it can.  Also in the child.
``validator(definition: Definition) -> Validator``
    built in a worker from a definition that passed ``examine``; one for each version, kept.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from danube.schema.model import Checks, Definition, Difference, SchemaType

Validator = Callable[[bytes], str | None]
"""Takes one payload; returns None when it keeps to the schema, else what is wrong and where."""

_MODULES: Final = {
    SchemaType.BYTES: "danube.schema.plain",
    SchemaType.STRING: "danube.schema.plain",
    SchemaType.NUMBER: "danube.schema.plain",
    SchemaType.AVRO: "danube.schema.avro.kind",
    SchemaType.JSON_SCHEMA: "danube.schema.json.kind",
    SchemaType.PROTOBUF: "danube.schema.protobuf.kind",
}


def examine(schema_type: SchemaType, text: bytes) -> Definition:
    """Parse a definition of this type (imports the type's library on first use)."""
    module = _module(schema_type)
    if schema_type in (SchemaType.BYTES, SchemaType.STRING, SchemaType.NUMBER):
        return module.examine(schema_type)  # type: ignore[no-any-return]
    return module.examine(text)  # type: ignore[no-any-return]


def compare(reader: Definition, writer: Definition, checks: Checks) -> list[Difference]:
    """Return why ``reader`` cannot read records of ``writer``."""
    if reader.schema_type is not writer.schema_type:
        return [
            Difference(
                path="", rule="type_changed", reader=reader.schema_type, writer=writer.schema_type,
                message=f"{reader.schema_type} cannot read {writer.schema_type}",
                hint="register the new type under another subject",
            )
        ]  # fmt: skip
    return _module(reader.schema_type).compare(reader, writer, checks)  # type: ignore[no-any-return]


def evolution(newer: Definition, older: Definition, checks: Checks) -> list[Difference]:
    """Return names and numbers that ``newer`` sets free though ``older`` needs them kept."""
    if newer.schema_type is not SchemaType.PROTOBUF or older.schema_type is not SchemaType.PROTOBUF:
        return []
    return _module(newer.schema_type).evolution(newer, older, checks)  # type: ignore[no-any-return]


def validator(definition: Definition) -> Validator:
    """The check of payloads for one version."""
    return _module(definition.schema_type).validator(definition)  # type: ignore[no-any-return]


def _module(schema_type: SchemaType) -> Any:
    return import_module(_MODULES[schema_type])
