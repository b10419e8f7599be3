"""How a difference between two JSON Schemas is put into words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from danube.schema.json.shape import Shape, Together, short
from danube.schema.model import Difference


def difference(
    rule: str, reader: Any, writer: Any, message: str, hint: str = "", *, path: str = ""
) -> Difference:
    """A difference at a path below the schema that is compared now."""
    return Difference(
        path=path, rule=rule, reader=short(reader), writer=short(writer), message=message, hint=hint
    )


def under(path: str, found: Iterable[Difference]) -> list[Difference]:
    """The same differences, seen from a schema further up."""
    return [msgspec.structs.replace(one, path=path + one.path) for one in found]


def limit_rules(
    writer: Together, shape: Shape, suffix: str, word: str, least: Any, most: float
) -> list[Difference]:
    """``minX`` and ``maxX`` of the reader against the least and most that the writer may write."""
    found = []
    unit = "characters" if word == "length" else word
    low, high = shape.get("min" + suffix), shape.get("max" + suffix)
    if low is not None and low > least:
        message = f"the reader needs {low} {unit} at least, the writer may write {least}"
        found.append(difference(f"min_{word}_raised", low, least or None, message, "keep the wider range"))
    if high is not None and high < most:
        written = None if most == float("inf") else most
        more = "more" if written is None else written
        message = f"the reader takes {high} {unit} at most, the writer may write {more}"
        found.append(difference(f"max_{word}_lowered", high, written, message, "keep the wider range"))
    return found
