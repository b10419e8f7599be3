"""Avro types as values, and facts about them that need no data.

Shapes follow the Avro specification 1.12, "Schema Declaration".  Named types may contain themselves, so
these values form a graph and are compared by identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

PRIMITIVES: Final = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
NO_DEFAULT: Final = object()

# Which written type may be read as which other one ("Schema Resolution").
PROMOTIONS: Final = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


@dataclass(eq=False, slots=True)
class Primitive:
    kind: str
    logical: str = ""  # "" or what the bytes mean, for example "date" or "decimal(9,2)"


@dataclass(eq=False, slots=True)
class Fixed:
    name: str  # with its namespace
    size_bytes: int
    aliases: tuple[str, ...] = ()
    logical: str = ""
    kind: str = "fixed"


@dataclass(eq=False, slots=True)
class Enum:
    name: str
    symbols: tuple[str, ...]
    default: str = ""  # "" when it has none
    aliases: tuple[str, ...] = ()
    logical: str = ""
    kind: str = "enum"


@dataclass(eq=False, slots=True)
class Array:
    items: Type
    logical: str = ""
    kind: str = "array"


@dataclass(eq=False, slots=True)
class Map:
    values: Type
    logical: str = ""
    kind: str = "map"


@dataclass(eq=False, slots=True)
class Union:
    branches: tuple[Type, ...]
    logical: str = ""
    kind: str = "union"


@dataclass(eq=False, slots=True)
class Field:
    name: str
    type: Type
    default: Any = NO_DEFAULT  # as JSON
    aliases: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class Record:
    name: str
    fields: tuple[Field, ...] = field(default=())
    aliases: tuple[str, ...] = ()
    logical: str = ""
    kind: str = "record"


Named = Record | Enum | Fixed
Type = Primitive | Array | Map | Union | Record | Enum | Fixed


def unqualified(name: str) -> str:
    """A name without its namespace."""
    return name.rpartition(".")[2]


def label(kind: Type) -> str:
    """The type in a word or two, for messages and violations."""
    if isinstance(kind, Array):
        return f"array<{_inner_label(kind.items)}>"
    if isinstance(kind, Map):
        return f"map<{_inner_label(kind.values)}>"
    if isinstance(kind, Union):
        shown = ", ".join(_inner_label(branch) for branch in kind.branches[:6])
        return f"union of {shown}" + (", ..." if len(kind.branches) > 6 else "")
    if isinstance(kind, Fixed):
        return f"fixed {_short(kind.name)} of {kind.size_bytes} bytes"
    if isinstance(kind, Primitive):
        return f"{kind.kind} ({kind.logical})" if kind.logical else kind.kind
    return f"{kind.kind} {_short(kind.name)}"


def _inner_label(kind: Type) -> str:
    if isinstance(kind, Record | Enum | Fixed):
        return _short(kind.name)
    return kind.kind


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"...{name[-57:]}"


def shown(value: Any) -> str:
    """A stranger's value in an error, cut."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def children(kind: Type) -> tuple[Type, ...]:
    """Types that stand directly inside this one."""
    if isinstance(kind, Record):
        return tuple(one.type for one in kind.fields)
    if isinstance(kind, Union):
        return kind.branches
    if isinstance(kind, Array):
        return (kind.items,)
    if isinstance(kind, Map):
        return (kind.values,)
    return ()


def reachable(root: Type) -> list[Type]:
    """Every type under ``root``, inner ones before outer ones where they do not contain each other."""
    order: list[Type] = []
    seen: set[int] = set()
    stack: list[tuple[Type, bool]] = [(root, False)]
    while stack:
        kind, left = stack.pop()
        if left:
            order.append(kind)
        elif id(kind) not in seen:
            seen.add(id(kind))
            stack.append((kind, True))
            stack.extend((inner, False) for inner in children(kind) if id(inner) not in seen)
    return order


def endless(root: Type) -> Record | None:
    """A record of which no value can end, because it must contain itself; None when there is none."""
    order = reachable(root)
    ends: set[int] = set()
    grown = True
    while grown:
        before = len(ends)
        for kind in order:
            if isinstance(kind, Record):
                done = all(id(one.type) in ends for one in kind.fields)
            elif isinstance(kind, Union):
                done = any(id(branch) in ends for branch in kind.branches)
            else:
                done = True
            if done:
                ends.add(id(kind))
        grown = len(ends) > before
    return next((kind for kind in order if isinstance(kind, Record) and id(kind) not in ends), None)


def weightless(root: Type) -> set[int]:
    """Ids of the types whose values take no bytes at all: null, and records of nothing else.

    Every record under ``root`` must have values that end.
    """
    found: set[int] = set()
    for kind in reachable(root):
        if (isinstance(kind, Primitive) and kind.kind == "null") or (
            isinstance(kind, Record) and all(id(one.type) in found for one in kind.fields)
        ):
            found.add(id(kind))
    return found


def nesting(root: Type) -> int:
    """How many records, arrays and maps stand inside each other, each record counted once."""
    levels: dict[int, int] = {}
    for kind in reachable(root):
        inner = max((levels.get(id(one), 0) for one in children(kind)), default=0)
        levels[id(kind)] = inner + isinstance(kind, Record | Array | Map)
    return levels[id(root)]


def recursive(root: Type) -> bool:
    """Whether values of ``root`` can contain values of their own type."""
    place = {id(kind): number for number, kind in enumerate(reachable(root))}
    return any(place[id(inner)] >= place[id(kind)] for kind in reachable(root) for inner in children(kind))
