"""Plain types: bytes, string and number.  Their definition is the type itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from danube.schema.model import Checks, Definition, Difference, SchemaType

if TYPE_CHECKING:
    from danube.schema.kinds import Validator

PLAIN: Final = (SchemaType.BYTES, SchemaType.STRING, SchemaType.NUMBER)
_NUMBER_BYTES: Final = (4, 8)


def examine(schema_type: SchemaType) -> Definition:
    """Return the definition of a plain type; the caller's text is not kept."""
    return Definition(schema_type=schema_type, text=b"", fingerprint=schema_type.value)


def compare(reader: Definition, writer: Definition, checks: Checks) -> list[Difference]:
    """Return no difference: a plain type reads itself, and :mod:`danube.schema.kinds` refuses two types."""
    return []


def validator(definition: Definition) -> Validator:
    """Bytes take everything, a string is UTF-8, a number is 4 or 8 bytes."""
    return _VALIDATORS[definition.schema_type]


def _any_bytes(payload: bytes) -> str | None:
    return None


def _utf8(payload: bytes) -> str | None:
    try:
        str(payload, "utf-8")
    except UnicodeDecodeError as error:
        return f"a string must be UTF-8, and byte {error.start} is not: {error.reason}"
    return None


def _number(payload: bytes) -> str | None:
    if len(payload) in _NUMBER_BYTES:
        return None
    return f"a number takes 4 or 8 bytes, and this payload has {len(payload)}"


_VALIDATORS: Final[dict[SchemaType, Validator]] = {
    SchemaType.BYTES: _any_bytes,
    SchemaType.STRING: _utf8,
    SchemaType.NUMBER: _number,
}
