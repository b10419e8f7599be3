"""Avro: one door to the type, and the only one to fastavro on the broker's side.

A definition is read by :mod:`danube.schema.avro.parse`, which knows every bound, and then once more by
fastavro, so that whatever is registered can be used by a client with that library.  Payloads are bare
datums or object container files.
"""

from __future__ import annotations

from functools import lru_cache

from danube.errors import SchemaInvalid
from danube.limits import SCHEMA_DEFINITION_BYTES_MAX
from danube.schema.avro.compatibility import differences, upstream_differences
from danube.schema.avro.container import MAGIC, Container
from danube.schema.avro.parse import parse
from danube.schema.avro.payload import step_for, walk_to_end
from danube.schema.avro.types import Record, Type, unqualified
from danube.schema.json_text import decode, fingerprint
from danube.schema.kinds import Validator
from danube.schema.model import Checks, Definition, Difference, SchemaType

_WHAT = "Avro definition"


def examine(text: bytes) -> Definition:
    """Parse a stranger's schema; raises SchemaInvalid (facts: line or path)."""
    if len(text) > SCHEMA_DEFINITION_BYTES_MAX:
        raise SchemaInvalid(
            f"the Avro definition has {len(text)} bytes, at most {SCHEMA_DEFINITION_BYTES_MAX}"
        )
    value = decode(text, _WHAT)
    parse(value)
    _parse_with_fastavro(text)
    return Definition(schema_type=SchemaType.AVRO, text=text, fingerprint=fingerprint(value))


def compare(reader: Definition, writer: Definition, checks: Checks) -> list[Difference]:
    """Return why ``reader`` cannot read records of ``writer``: :mod:`danube.schema.avro.compatibility`."""
    if checks is Checks.UPSTREAM:
        return upstream_differences(_type_of(reader.text), _type_of(writer.text))
    return differences(_type_of(reader.text), _type_of(writer.text))


def validator(definition: Definition) -> Validator:
    """Takes a bare datum that fills the payload, or an object container file."""
    kind = _type_of(definition.text)
    step = step_for(kind)
    name = unqualified(kind.name) if isinstance(kind, Record) else ""
    container = Container(kind, definition.text, step)

    def validate(payload: bytes) -> str | None:
        if payload[: len(MAGIC)] != MAGIC:
            return walk_to_end(step, payload, name)
        reason = container.check(payload)
        # A bare datum may begin with the same four bytes.
        return reason if reason is not None and walk_to_end(step, payload, name) is not None else None

    return validate


# One new version is compared with many older ones, in both directions.
@lru_cache(maxsize=4)
def _type_of(text: bytes) -> Type:
    return parse(decode(text, _WHAT), defaults=False)


def _parse_with_fastavro(text: bytes) -> None:
    import json

    import fastavro

    try:
        # Defaults were checked already; fastavro refuses an int as the default of a double.
        fastavro.parse_schema(json.loads(text), _ignore_default_error=True)
    except Exception as error:
        raise SchemaInvalid(
            "the Avro definition is refused", why=f"fastavro: {type(error).__name__}: {str(error)[:200]}"
        ) from None
