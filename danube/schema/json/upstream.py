"""The checks of the broker that the official clients were written for: names at the top level only.

The checks cover ``properties``, ``required`` and the ``type`` of common properties, and nothing else: changes
of ``const``, of a limit or of anything nested pass.  The rules, in words of reader and writer:

* ``required_removed``: the writer requires a property that the reader does not know
  (backward: a required field was removed; forward: a new required field was not a property before);
* ``required_added``: the reader requires a property that is optional for the writer.  That broker
  checks this rule only in the backward direction; forward checks leave it out (see BACKWARD_ONLY);
* ``type_changed``: the ``type`` of a property that both have, and that both give a type, differs.
"""

from __future__ import annotations

from typing import Any, Final

from danube.schema.json.document import escape
from danube.schema.json.shape import short
from danube.schema.model import Difference

BACKWARD_ONLY: Final = frozenset({"required_added"})
"""Rules that count for ``backward`` alone in upstream mode."""


def upstream_differences(reader: Any, writer: Any) -> list[Difference]:
    """Return the objections of that broker; ``reader`` and ``writer`` are definitions as JSON values."""
    reads, writes = _properties(reader), _properties(writer)
    needed, given = _required(reader), _required(writer)
    found = [
        Difference(
            path="/properties/" + escape(name),
            rule="required_removed",
            reader=None,
            writer=short(writes.get(name)),
            message=f"the writer requires {name!r}, which the reader does not know",
            hint="keep the property, as an optional one when it is no longer needed",
        )
        for name in given
        if name not in reads
    ]
    found += [
        Difference(
            path="/properties/" + escape(name),
            rule="required_added",
            reader="required",
            writer="optional",
            message=f"the reader requires {name!r}, which is optional for the writer",
            hint="leave the property optional",
        )
        for name in needed
        if name in writes and name not in given
    ]
    for name, schema in reads.items():
        mine, other = _type(schema), _type(writes.get(name))
        if mine is not None and other is not None and mine != other:
            found.append(
                Difference(
                    path="/properties/" + escape(name),
                    rule="type_changed",
                    reader=mine,
                    writer=other,
                    message=f"the type of {name!r} is {mine} for the reader and {other} for the writer",
                    hint="add a property of another name",
                )
            )
    return found


def _properties(value: Any) -> dict[str, Any]:
    found = value.get("properties") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _required(value: Any) -> list[str]:
    found = value.get("required") if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _type(schema: Any) -> Any:
    return schema.get("type") if isinstance(schema, dict) else None
