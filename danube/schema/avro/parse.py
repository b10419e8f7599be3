"""Parser of Avro schemas: from JSON to types, with every rule that a reader must be able to rely on.

Stricter than most libraries on purpose: what is accepted here can be compared, and payloads can be
checked against it within bounds.  Source: Avro specification 1.12, "Schema Declaration" and "Names".

Avro logical types: what the bytes of a plain type mean.

The specification lets a reader ignore a logical type that it does not know or that does not fit its plain
type; so does this module.  A decimal with impossible numbers is refused, because libraries disagree on it.
Source: Avro specification 1.12, "Logical Types".

Default values of Avro fields: each one must be a value of its field's type, and must end.

Every pair of value and type is looked at once, so a default cannot cost more than its size times the
size of the schema.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final, NoReturn

from danube.errors import SchemaInvalid
from danube.schema.avro.types import (
    NO_DEFAULT,
    PRIMITIVES,
    Array,
    Enum,
    Field,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    endless,
    label,
    nesting,
    reachable,
    shown,
    unqualified,
    weightless,
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


# Which plain type carries it; a number is the size of a fixed.
_CARRIERS: Final[dict[str, tuple[str | int, ...]]] = {
    "big-decimal": ("bytes",),
    "uuid": ("string", 16),
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    "timestamp-millis": ("long",),
    "timestamp-micros": ("long",),
    "timestamp-nanos": ("long",),
    "local-timestamp-millis": ("long",),
    "local-timestamp-micros": ("long",),
    "local-timestamp-nanos": ("long",),
    "duration": (12,),
}
PRECISION_MAX: Final = 10_000


def logical_type(value: dict[str, Any], kind: str, size_bytes: int, path: str) -> str:
    """The logical type of a type object: its name, ``decimal(precision,scale)``, or "" for none.

    ``kind`` is the plain type, ``size_bytes`` the size of a fixed.  Raises SchemaInvalid.
    """
    name = value.get("logicalType")
    if name == "decimal" and kind in ("bytes", "fixed"):
        return _decimal(value, size_bytes, path)
    if not isinstance(name, str):
        return ""
    carrier = size_bytes if kind == "fixed" else kind
    return name if carrier in _CARRIERS.get(name, ()) else ""


def _decimal(value: dict[str, Any], size_bytes: int, path: str) -> str:
    precision, scale = value.get("precision"), value.get("scale", 0)
    if not isinstance(precision, int) or not _counts(precision, 1, PRECISION_MAX):
        raise _refusal(path, f"the precision of a decimal is 1 to {PRECISION_MAX}")
    if not _counts(scale, 0, precision):
        raise _refusal(path, "the scale of a decimal is 0 up to its precision")
    if size_bytes and precision > math.floor(math.log10(2) * (8 * size_bytes - 1)):
        raise _refusal(path, f"{precision} digits do not fit into {size_bytes} bytes")
    return f"decimal({precision},{scale})"


def _counts(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _refusal(path: str, why: str) -> SchemaInvalid:
    return SchemaInvalid("the Avro definition is refused", why=f"{path}: {why}" if path else why, path=path)


TYPES_MAX: Final = 10_000
BRANCHES_MAX: Final = 256
NAME_BYTES_MAX: Final = 512
NESTING_MAX: Final = 64
FIXED_BYTES_MAX: Final = 8 * 1024 * 1024

_COMPLEX: Final = ("record", "error", "enum", "fixed", "array", "map", "union")
# One object for each type, so that work for a type is not repeated for every field.
_PLAIN: Final = {kind: Primitive(kind) for kind in PRIMITIVES}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)
# A library marks its own output with such keys and would then trust the rest unread.
_MARKS: Final = ("__fastavro", "__named_schemas")


def parse(value: Any, *, types_max: int = TYPES_MAX, defaults: bool = True) -> Type:
    """The type that ``value`` (decoded JSON) declares; raises SchemaInvalid (facts: path).

    ``defaults=False`` leaves default values unread, for a schema that will only ever be a writer's.
    """
    root = _Parser(types_max).type_of(value, "", "")
    if (record := endless(root)) is not None:
        _refuse(
            unqualified(record.name),
            "the record contains itself, so no value of it can end",
            "make the inner field a union with null, an array or a map",
        )
    if (levels := nesting(root)) > NESTING_MAX:
        _refuse("", f"records, arrays and maps stand {levels} deep in each other, at most {NESTING_MAX}")
    _refuse_weightless_items(root)
    if defaults:
        Defaults().check(root)
    return root


class _Parser:
    def __init__(self, types_max: int) -> None:
        self._types_left = types_max
        self._types_max = types_max
        self._named: dict[str, Type] = {}

    def type_of(self, value: Any, namespace: str, path: str) -> Type:
        self._types_left -= 1
        if self._types_left < 0:
            _refuse(path, f"the schema has more than {self._types_max} types")
        if isinstance(value, str):
            return _PLAIN.get(value) or self._reference(value, namespace, path)
        if isinstance(value, list):
            return self._union(value, namespace, path)
        if isinstance(value, dict):
            return self._object(value, namespace, path)
        _refuse(path, f"a type is a name, an object or a list, not {shown(value)}")

    def _object(self, value: dict[str, Any], namespace: str, path: str) -> Type:
        for key in value:
            if key.startswith(_MARKS):
                _refuse(path, f"key {key[:40]!r} is the mark of a library", "register the schema as written")
        kind = value.get("type")
        if not isinstance(kind, str):
            _refuse(
                path,
                f"a type object needs the name of its 'type', and this one has {shown(kind)}",
                "put an inner type in the place of this object",
            )
        if kind in PRIMITIVES:
            logical = logical_type(value, kind, 0, path)
            return Primitive(kind, logical) if logical else _PLAIN[kind]
        if kind == "array":
            items = self.type_of(self._need(value, "items", kind, path), namespace, f"{path}[]")
            return Array(items)
        if kind == "map":
            values = self.type_of(self._need(value, "values", kind, path), namespace, path + "{}")
            return Map(values)
        if kind in ("record", "error"):
            return self._record(value, namespace, path)
        if kind == "enum":
            return self._enum(value, namespace, path)
        if kind == "fixed":
            return self._fixed(value, namespace, path)
        return self._reference(kind, namespace, path)

    def _reference(self, name: str, namespace: str, path: str) -> Type:
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        if (known := self._named.get(full)) is None:
            _refuse(
                path,
                f"type {full[:80]!r} is not known",
                "declare a named type where it is used first, in this definition",
            )
        return known

    def _union(self, value: list[Any], namespace: str, path: str) -> Union:
        if not value or len(value) > BRANCHES_MAX:
            _refuse(path, f"a union has 1 to {BRANCHES_MAX} branches, and this one has {len(value)}")
        branches: list[Type] = []
        seen: set[str] = set()
        for one in value:
            branch = self.type_of(one, namespace, path)
            if isinstance(branch, Union):
                _refuse(path, "a union stands directly in a union", "put the branches into one union")
            identity = branch.name if isinstance(branch, Record | Enum | Fixed) else branch.kind
            if identity in seen:
                _refuse(path, f"the union has two branches {identity[:80]!r}")
            seen.add(identity)
            branches.append(branch)
        return Union(tuple(branches))

    def _record(self, value: dict[str, Any], namespace: str, path: str) -> Record:
        name, aliases = self._names(value, namespace, path)
        record = Record(name, aliases=aliases)
        self._named[name] = record
        declared = self._need(value, "fields", "record", path)
        if not isinstance(declared, list):
            _refuse(path, f"'fields' is a list, not {shown(declared)}")
        path = path or unqualified(name)
        fields: dict[str, Field] = {}
        for one in declared:
            field = self._field(one, name.rpartition(".")[0], path)
            if field.name in fields:
                _refuse(path, f"field {field.name!r} is declared twice")
            fields[field.name] = field
        record.fields = tuple(fields.values())
        return record

    def _field(self, value: Any, namespace: str, path: str) -> Field:
        if not isinstance(value, dict):
            _refuse(path, f"a field is an object, not {shown(value)}")
        name = self._need(value, "name", "field", path)
        _check_name(name, "field", path)
        path = f"{path}.{name}"
        kind = self.type_of(self._need(value, "type", "field", path), namespace, path)
        aliases = _strings(value.get("aliases", []), "aliases", path)
        for alias in aliases:
            _check_name(alias, "alias", path)
        return Field(name, kind, value.get("default", NO_DEFAULT), aliases)

    def _enum(self, value: dict[str, Any], namespace: str, path: str) -> Enum:
        name, aliases = self._names(value, namespace, path)
        symbols = _strings(self._need(value, "symbols", "enum", path), "symbols", path)
        for symbol in symbols:
            _check_name(symbol, "symbol", path)
        if not symbols or len(set(symbols)) != len(symbols):
            _refuse(path, "an enum has one symbol or more, each once")
        default = value.get("default", "")
        if "default" in value and default not in symbols:
            _refuse(path, f"default {shown(default)} is not a symbol of the enum")
        self._named[name] = kind = Enum(name, symbols, default, aliases)
        return kind

    def _fixed(self, value: dict[str, Any], namespace: str, path: str) -> Fixed:
        name, aliases = self._names(value, namespace, path)
        size = self._need(value, "size", "fixed", path)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= FIXED_BYTES_MAX:
            _refuse(path, f"the size of a fixed is 1 to {FIXED_BYTES_MAX} bytes, not {shown(size)}")
        self._named[name] = kind = Fixed(name, size, aliases, logical_type(value, "fixed", size, path))
        return kind

    def _names(self, value: dict[str, Any], namespace: str, path: str) -> tuple[str, tuple[str, ...]]:
        """(full name, full aliases) of a named type."""
        name = self._need(value, "name", value["type"], path)
        own = value.get("namespace", namespace)
        if not isinstance(own, str):
            _refuse(path, f"a namespace is a string, not {shown(own)}")
        if own:
            _check_full_name(own, "namespace", path)
        full = _qualified(name, own, "name", path)
        if full in PRIMITIVES or full in _COMPLEX:
            _refuse(path, f"{full!r} is the name of an Avro type")
        if full in self._named:
            _refuse(path, f"type {full[:80]!r} is declared twice")
        around = full.rpartition(".")[0]
        aliases = _strings(value.get("aliases", []), "aliases", path)
        return full, tuple(_qualified(alias, around, "alias", path) for alias in aliases)

    def _need(self, value: dict[str, Any], key: str, what: str, path: str) -> Any:
        if key not in value:
            _refuse(path, f"{what} lacks {key!r}")
        return value[key]


def _refuse_weightless_items(root: Type) -> None:
    """A payload of a few bytes could claim any number of items that take no bytes."""
    empty = weightless(root)
    for kind in reachable(root):
        if isinstance(kind, Array) and id(kind.items) in empty:
            _refuse(
                "",
                f"items of {label(kind)} take no bytes, so an array could claim any number of them",
                "give the item at least one field that is not null",
            )


def _strings(value: Any, what: str, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        _refuse(path, f"{what!r} is a list of strings")
    return tuple(value)


def _qualified(name: Any, namespace: str, what: str, path: str) -> str:
    if not isinstance(name, str):
        _refuse(path, f"a {what} is a string, not {shown(name)}")
    full = name if "." in name or not namespace else f"{namespace}.{name}"
    _check_full_name(full, what, path)
    return full


def _check_full_name(full: str, what: str, path: str) -> None:
    for part in full.split("."):
        _check_name(part, what, path)
    if len(full) > NAME_BYTES_MAX:
        _refuse(path, f"{what} {full[:40]!r}... has {len(full)} characters, at most {NAME_BYTES_MAX}")


def _check_name(name: Any, what: str, path: str) -> None:
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > NAME_BYTES_MAX:
        _refuse(
            path,
            f"{what} {shown(name)} is not an Avro name",
            "a name starts with a letter or underscore and goes on with letters, digits and underscores",
        )


def _refuse(path: str, why: str, hint: str = "") -> NoReturn:
    raise SchemaInvalid(
        "the Avro definition is refused", why=f"{path}: {why}" if path else why, hint=hint, path=path
    )
