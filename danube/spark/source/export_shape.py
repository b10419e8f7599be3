"""Growth of a table's type with its schema: fields are added, and nothing else changes.

Earlier rows have nulls in a later column, and rows of a version without a field have nulls in its column.  A
column cannot change its type, and two names cannot differ only in case: tables of Parquet, Delta and Iceberg,
and their readers, keep one type for a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pyarrow as pa

from danube.errors import SchemaIncompatible
from danube.spark.source.value_types import VALUE


class Growth(NamedTuple):
    """``added`` and ``absent`` are paths of fields, from the column's name on.

    ``absent``: of the table, and the newest version has them no more.
    """

    type: pa.DataType
    added: list[str]
    absent: list[str]


def grown(table: pa.DataType, versions: Iterable[tuple[str, pa.DataType]], name: str) -> Growth:
    """Return the type that also takes values of the ``versions``, given with their names, in order.

    SchemaIncompatible names every field of the table ``name`` that contradicts a version.
    """
    found = Growth(table, [], [])
    for version, kind in versions:
        walk = _Walk()
        kept = walk.joined(found.type, kind, VALUE)
        if walk.refused:
            raise SchemaIncompatible(
                f"table {name} cannot take up {version}",
                why="; ".join(walk.refused),
                hint="export to a new --target, or register a version that adds fields only",
                table=name,
            )
        found = Growth(kept, [*found.added, *walk.added], walk.absent)
    return found


class _Walk:
    """Joins two types and notes differences."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.absent: list[str] = []
        self.refused: list[str] = []

    def joined(self, table: pa.DataType, new: pa.DataType, path: str) -> pa.DataType:
        kind = _nesting(table)
        if kind is None or kind != _nesting(new):
            if table != new:
                self.refused.append(f"{path} is {table} and would be {new}")
            return table
        if kind is pa.types.is_struct:
            return self._joined_structs(table, new, path)
        if kind is pa.types.is_map:
            return pa.map_(table.key_type, self.joined(table.item_type, new.item_type, f"{path}{{}}"))
        field = table.value_field
        return pa.list_(field.with_type(self.joined(table.value_type, new.value_type, f"{path}[]")))

    def _joined_structs(self, table: pa.DataType, new: pa.DataType, path: str) -> pa.DataType:
        known = {field.name: field for field in table}
        fresh = {field.name: field for field in new}
        folded = {name.lower(): name for name in known}
        self.absent += [f"{path}.{name}" for name in known if name not in fresh]
        fields = [
            field.with_type(self.joined(field.type, fresh[name].type, f"{path}.{name}"))
            if name in fresh
            else field
            for name, field in known.items()
        ]
        for name, field in fresh.items():
            if name in known:
                continue
            same = folded.get(name.lower())
            if same is not None:
                self.refused.append(f"{path}.{name} differs from {path}.{same} only in case")
                continue
            self.added.append(f"{path}.{name}")
            fields.append(field)
        return pa.struct(fields)


def loses(writer: pa.DataType, reader: pa.DataType, table: pa.DataType) -> bool:
    """Whether a field that writer and table have would be lost in a reader between them."""
    kind = _nesting(writer)
    if kind is None or kind != _nesting(reader) or kind != _nesting(table):
        return False
    if kind is pa.types.is_map:
        return loses(writer.item_type, reader.item_type, table.item_type)
    if kind is not pa.types.is_struct:
        return loses(writer.value_type, reader.value_type, table.value_type)
    read, kept = ({field.name: field.type for field in one} for one in (reader, table))
    return any(
        one.name not in read or loses(one.type, read[one.name], kept[one.name])
        for one in writer
        if one.name in kept
    )


def _nesting(kind: pa.DataType) -> Callable[[pa.DataType], bool] | None:
    """How a type holds others; None if it holds none."""
    tests: tuple[Callable[[pa.DataType], bool], ...] = (
        pa.types.is_struct, pa.types.is_map, pa.types.is_list,
    )  # fmt: skip
    return next((test for test in tests if test(kind)), None)
