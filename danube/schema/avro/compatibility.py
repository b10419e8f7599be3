"""Compatibility of Avro schemas: whether a reader can read everything that a writer wrote.

Follows "Schema Resolution" of the Avro specification 1.12, with these decisions where it leaves room or
where following it would lose meaning without a word:

* A branch of the reader's union is chosen by the type alone: the full name, else the unqualified name or
  an alias, else the same plain type, else the first promotion.  What stands inside must then agree; no
  other branch is tried.  So a verdict never depends on data.
* Two different logical types do not read each other, although their bytes would.  One that is added to or
  taken from the same plain type passes.
* A reader's field that the writer has under its name and also under an alias is refused.

Every pair of named types is looked at once, so recursion ends and each difference inside a type that is
used in several places is told once; the number of pairs is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from danube.errors import SchemaInvalid
from danube.schema.avro.types import (
    NO_DEFAULT,
    PROMOTIONS,
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
    unqualified,
)
from danube.schema.model import Difference

PAIRS_MAX: Final = 200_000
DIFFERENCES_MAX: Final = 100
SHOWN_MAX: Final = 8
_UPSTREAM_PROMOTIONS: Final = {
    "int": ("long", "double"),
    "long": ("double",),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
PATH_CHARACTERS_MAX: Final = 2_000

_Pair = tuple[Type, Type, str]  # reader, writer, path
_Found = Difference | _Pair


def differences(reader: Type, writer: Type, *, pairs_max: int = PAIRS_MAX) -> list[Difference]:
    """Every reason why ``reader`` cannot read ``writer``, nearest to the root first, at most 100.

    Raises SchemaInvalid when the two have more than ``pairs_max`` pairs of types to compare.
    """
    root = unqualified(reader.name) if isinstance(reader, Record) else ""
    queue: deque[_Pair] = deque([(reader, writer, root)])
    seen = {(id(reader), id(writer))}
    found: list[Difference] = []
    looked_at = 0
    while queue and len(found) < DIFFERENCES_MAX:
        for one in _compared(*queue.popleft()):
            looked_at += 1
            if isinstance(one, Difference):
                found.append(one)
            elif not _plainly_same(one[0], one[1]) and _new(one[0], one[1], seen):
                queue.append((one[0], one[1], _shortened(one[2])))
        if looked_at > pairs_max:
            raise SchemaInvalid(
                "the Avro definition costs too much to compare",
                why=f"it and the other version have more than {pairs_max} pairs of types",
                hint="use fewer and narrower unions",
            )
    return found[:DIFFERENCES_MAX]


def upstream_differences(reader: Type, writer: Type) -> list[Difference]:
    """As the broker of the official clients decides: names of records, missing fields, some promotions.

    Types of fields that both sides have are not compared, and a union reads everything and is read by
    everything.  Items of arrays and values of maps are compared as the types around them.
    """
    path = unqualified(reader.name) if isinstance(reader, Record) else ""
    while True:
        if isinstance(reader, Array) and isinstance(writer, Array):
            reader, writer, path = reader.items, writer.items, f"{path}[]"
        elif isinstance(reader, Map) and isinstance(writer, Map):
            reader, writer, path = reader.values, writer.values, path + "{}"
        else:
            return _upstream_inner(reader, writer, _shortened(path))


def _upstream_inner(reader: Type, writer: Type, path: str) -> list[Difference]:
    if isinstance(reader, Union) or isinstance(writer, Union) or _upstream_same(reader, writer):
        return []
    if not isinstance(reader, Record) or not isinstance(writer, Record):
        plain = not reader.logical and not writer.logical
        if plain and reader.kind in _UPSTREAM_PROMOTIONS.get(writer.kind, ()):
            return []
        return [_type_changed(reader, writer, path)]
    if reader.name != writer.name:
        return [_name_changed(reader, writer, path)]
    written = {field.name for field in writer.fields}
    return [
        _field_without_default(field, f"{path}.{field.name}")
        for field in reader.fields
        if field.name not in written and not _upstream_optional(field)
    ]


def _upstream_same(reader: Type, writer: Type) -> bool:
    """Whether two types that hold no others are equal; records are looked into instead."""
    if reader.kind != writer.kind or reader.logical != writer.logical:
        return False
    if isinstance(reader, Enum) and isinstance(writer, Enum):
        return (reader.name, reader.symbols) == (writer.name, writer.symbols)
    if isinstance(reader, Fixed) and isinstance(writer, Fixed):
        return (reader.name, reader.size_bytes) == (writer.name, writer.size_bytes)
    return isinstance(reader, Primitive)


def _upstream_optional(field: Field) -> bool:
    """A union counts as optional by its null, whatever its default; any other type by its default."""
    return _nullable(field.type) if isinstance(field.type, Union) else field.default is not NO_DEFAULT


def _plainly_same(reader: Type, writer: Type) -> bool:
    """Most pairs: the same primitive type on both sides, with nothing inside."""
    return isinstance(reader, Primitive) and reader.kind == writer.kind and reader.logical == writer.logical


def _new(reader: Type, writer: Type, seen: set[tuple[int, int]]) -> bool:
    """Return whether the pair is compared for the first time.

    A primitive type is one value wherever it stands, and each of its places has a difference of its own.
    """
    if isinstance(reader, Primitive) or isinstance(writer, Primitive):
        return True
    pair = (id(reader), id(writer))
    known = pair in seen
    seen.add(pair)
    return not known


def _nullable(kind: Type) -> bool:
    return isinstance(kind, Union) and any(branch.kind == "null" for branch in kind.branches)


def _compared(reader: Type, writer: Type, path: str) -> Iterator[_Found]:
    if isinstance(writer, Union):
        yield from _written_union(reader, writer, path)
    elif isinstance(reader, Union):
        branch = _branch_for(reader, writer)
        if branch is None:
            yield _type_changed(reader, writer, path)
        else:
            yield branch, writer, path
    elif reader.kind != writer.kind:
        yield from _promoted(reader, writer, path)
    elif isinstance(reader, Record | Enum | Fixed) and not _same_name(reader, writer):
        yield _name_changed(reader, writer, path)
    else:
        yield from _same_kind(reader, writer, path)


def _written_union(reader: Type, writer: Union, path: str) -> Iterator[_Found]:
    """Check that each branch that may have been written can be read."""
    for branch in writer.branches:
        chosen = _branch_for(reader, branch) if isinstance(reader, Union) else reader
        if chosen is not None and (isinstance(reader, Union) or _fits(chosen, branch)):
            inside = path if branch.kind == "null" else f"{path}<{_branch_name(branch)}>"
            yield chosen, branch, inside
        else:
            yield Difference(
                path=path,
                rule="branch_unread",
                message=f"the writer may write {label(branch)}, which the reader's {label(reader)} has not",
                reader=label(reader),
                writer=label(branch),
                hint=f"keep {_branch_name(branch)} among the branches of the reader",
            )


def _branch_for(reader: Union, writer: Type) -> Type | None:
    """The branch of the reader's union that takes a written type, by the type alone."""
    same = [branch for branch in reader.branches if branch.kind == writer.kind]
    if isinstance(writer, Record | Enum | Fixed):
        named = [branch for branch in same if _same_name(branch, writer)]
        exact = [branch for branch in named if getattr(branch, "name", "") == writer.name]
        return next(iter(exact or named), None)
    promoted = [branch for branch in reader.branches if branch.kind in PROMOTIONS.get(writer.kind, ())]
    return next(iter(same or promoted), None)


def _fits(reader: Type, writer: Type) -> bool:
    """Whether a reader that is no union takes the type, not looking inside."""
    if reader.kind != writer.kind:
        return reader.kind in PROMOTIONS.get(writer.kind, ())
    return not isinstance(reader, Record | Enum | Fixed) or _same_name(reader, writer)


def _same_name(reader: Type, writer: Type) -> bool:
    if not isinstance(reader, Record | Enum | Fixed) or not isinstance(writer, Record | Enum | Fixed):
        return False
    return unqualified(reader.name) == unqualified(writer.name) or writer.name in reader.aliases


def _promoted(reader: Type, writer: Type, path: str) -> Iterator[_Found]:
    if reader.kind not in PROMOTIONS.get(writer.kind, ()):
        yield _type_changed(reader, writer, path)
    elif (reader.logical and writer.logical) or "decimal" in reader.logical + writer.logical:
        yield _logical_changed(reader, writer, path)


def _same_kind(reader: Type, writer: Type, path: str) -> Iterator[_Found]:
    if reader.logical and writer.logical and reader.logical != writer.logical:
        yield _logical_changed(reader, writer, path)
    if isinstance(reader, Record) and isinstance(writer, Record):
        yield from _records(reader, writer, path)
    elif isinstance(reader, Enum) and isinstance(writer, Enum):
        yield from _enums(reader, writer, path)
    elif isinstance(reader, Fixed) and isinstance(writer, Fixed):
        if reader.size_bytes != writer.size_bytes:
            yield Difference(
                path=path,
                rule="size_changed",
                message=f"the reader takes {reader.size_bytes} bytes and the writer has {writer.size_bytes}",
                reader=reader.size_bytes,
                writer=writer.size_bytes,
                hint="keep the size, or use bytes in a new field",
            )
    elif isinstance(reader, Array) and isinstance(writer, Array):
        yield reader.items, writer.items, f"{path}[]"
    elif isinstance(reader, Map) and isinstance(writer, Map):
        yield reader.values, writer.values, path + "{}"


def _records(reader: Record, writer: Record, path: str) -> Iterator[_Found]:
    written = {field.name: field for field in writer.fields}
    for field in reader.fields:
        inside = f"{path}.{field.name}"
        names = [name for name in dict.fromkeys((field.name, *field.aliases)) if name in written]
        if not names:
            if field.default is NO_DEFAULT:
                yield _field_without_default(field, inside)
            continue
        if len(names) > 1:
            yield Difference(
                path=inside,
                rule="alias_ambiguous",
                message=f"the writer has {names[0]!r} and {names[1]!r}, which the reader takes for one field",
                reader=names[:SHOWN_MAX],
                writer=names[:SHOWN_MAX],
                hint=f"take alias {names[1]!r} away",
            )
        yield field.type, written[names[0]].type, inside


def _enums(reader: Enum, writer: Enum, path: str) -> Iterator[_Found]:
    known = set(reader.symbols)
    unknown = [symbol for symbol in writer.symbols if symbol not in known]
    if unknown and not reader.default:
        yield Difference(
            path=path,
            rule="symbol_unread",
            message=f"the writer may write {_few(unknown)}, which the reader's enum has not",
            reader=list(reader.symbols[:SHOWN_MAX]),
            writer=unknown[:SHOWN_MAX],
            hint="keep the symbols, or give the reader's enum a default symbol",
        )


def _shortened(path: str) -> str:
    """A path that recursion cannot make long."""
    return path if len(path) <= PATH_CHARACTERS_MAX else f"...{path[-PATH_CHARACTERS_MAX // 2 :]}"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(name[:60] for name in names[:SHOWN_MAX]) + more


def _branch_name(kind: Type) -> str:
    return unqualified(kind.name)[:60] if isinstance(kind, Record | Enum | Fixed) else kind.kind


def _type_changed(reader: Type, writer: Type, path: str) -> Difference:
    return Difference(
        path=path,
        rule="type_changed",
        message=f"the reader expects {label(reader)} where the writer has {label(writer)}",
        reader=label(reader),
        writer=label(writer),
        hint="keep the type, widen it to a union with the old one, or add a field under a new name",
    )


def _logical_changed(reader: Type, writer: Type, path: str) -> Difference:
    decimals = reader.logical.startswith("decimal(") and writer.logical.startswith("decimal(")
    return Difference(
        path=path,
        rule="decimal_changed" if decimals else "logical_type_changed",
        message=f"the reader takes for {reader.logical or reader.kind} what the writer means as "
        f"{writer.logical or writer.kind}",
        reader=reader.logical or reader.kind,
        writer=writer.logical or writer.kind,
        hint="keep the logical type, or add a field under a new name",
    )


def _name_changed(reader: Record | Enum | Fixed, writer: Type, path: str) -> Difference:
    old = writer.name if isinstance(writer, Record | Enum | Fixed) else label(writer)
    return Difference(
        path=path,
        rule="name_changed",
        message=f"the reader's {reader.kind} is named {reader.name[-120:]} and the writer's {old[-120:]}",
        reader=reader.name[-120:],
        writer=old[-120:],
        hint=f"keep the name, or give the reader the alias {old[-120:]}",
    )


def _field_without_default(field: Field, path: str) -> Difference:
    return Difference(
        path=path,
        rule="field_without_default",
        message=f"the writer has no field {field.name[:60]!r}, and the reader has no default for it",
        reader=label(field.type),
        hint=f"give {field.name[:60]!r} a default; null if it may be missing",
    )
