"""Default values of Avro fields: each one must be a value of its field's type, and must end.

Every pair of value and type is looked at once, so a default cannot cost more than its size times the
size of the schema.
"""

from __future__ import annotations

from typing import Any, Final

from danube.errors import SchemaInvalid
from danube.schema.avro.types import (
    NO_DEFAULT,
    Array,
    Enum,
    Field,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    label,
    reachable,
    shown,
    unqualified,
)

_INT: Final = 2**31
_LONG: Final = 2**63
_FLOAT_WORDS: Final = ("NaN", "Infinity", "-Infinity")
_UNDECIDED: Final = "it would contain itself without end"


class Defaults:
    """Checks the defaults of one schema."""

    def __init__(self) -> None:
        # By ids of value and type: "" when they fit.  The schema's JSON keeps the values alive.
        self._verdicts: dict[tuple[int, int], str] = {}

    def check(self, root: Type) -> None:
        """Raise SchemaInvalid for the first default that its field cannot have."""
        for kind in reachable(root):
            if isinstance(kind, Record):
                for field in kind.fields:
                    self._check_field(kind, field)

    def _check_field(self, record: Record, field: Field) -> None:
        if field.default is NO_DEFAULT:
            return
        if problem := self._problem(field.default, field.type):
            path = f"{unqualified(record.name)}.{field.name}"
            raise SchemaInvalid(
                "the Avro definition is refused",
                why=f"{path}: the default does not fit {label(field.type)}: {problem}",
                hint="give a default that is a value of the field's type",
                path=path,
            )

    def _problem(self, value: Any, kind: Type) -> str:
        pair = (id(value), id(kind))
        if pair not in self._verdicts:
            self._verdicts[pair] = _UNDECIDED
            self._verdicts[pair] = self._compared(value, kind)
        return self._verdicts[pair]

    def _compared(self, value: Any, kind: Type) -> str:
        if isinstance(kind, Primitive):
            return _primitive_problem(value, kind.kind)
        if isinstance(kind, Union):
            problems = [self._problem(value, branch) for branch in kind.branches]
            if "" in problems:
                return ""
            return next((one for one in problems if _UNDECIDED in one), problems[0])
        if isinstance(kind, Enum):
            return "" if value in kind.symbols else f"{shown(value)} is not a symbol"
        if isinstance(kind, Fixed):
            return _fixed_problem(value, kind.size_bytes)
        if isinstance(kind, Array):
            if not isinstance(value, list):
                return f"{shown(value)} is not a list"
            return next(filter(None, (self._problem(one, kind.items) for one in value)), "")
        if not isinstance(value, dict):
            return f"{shown(value)} is not an object"
        if isinstance(kind, Map):
            return next(filter(None, (self._problem(one, kind.values) for one in value.values())), "")
        return self._record_problem(value, kind)

    def _record_problem(self, value: dict[str, Any], kind: Record) -> str:
        for field in kind.fields:
            given = value.get(field.name, field.default)
            if given is NO_DEFAULT:
                return f"field {field.name!r} is missing"
            if problem := self._problem(given, field.type):
                return f"{field.name}: {problem}"[:200]
        return ""


def _primitive_problem(value: Any, kind: str) -> str:
    if kind == "null":
        fits = value is None
    elif kind == "boolean":
        fits = isinstance(value, bool)
    elif kind in ("int", "long"):
        bound = _INT if kind == "int" else _LONG
        fits = isinstance(value, int) and not isinstance(value, bool) and -bound <= value < bound
    elif kind in ("float", "double"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = number or (isinstance(value, str) and value in _FLOAT_WORDS)
    elif kind == "bytes":
        fits = isinstance(value, str) and _latin(value)
    else:
        fits = isinstance(value, str)
    return "" if fits else f"{shown(value)} is not {kind}"


def _fixed_problem(value: Any, size_bytes: int) -> str:
    if isinstance(value, str) and _latin(value) and len(value) == size_bytes:
        return ""
    return f"{shown(value)} is not {size_bytes} characters of U+0000 to U+00FF"


def _latin(text: str) -> bool:
    return all(character <= "\xff" for character in text)
