"""Whether two schemas assert the same, word for word, with references followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from danube.schema.json.dialect import DRAFT_6, DRAFT_7
from danube.schema.json.document import Node
from danube.schema.json_text import canonical

_PLAIN: Final = (
    "type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "pattern", "minItems", "maxItems", "uniqueItems", "minContains", "maxContains", "required",
    "minProperties", "maxProperties", "dependentRequired",
)  # fmt: skip
_CONTENT: Final = ("contentEncoding", "contentMediaType")
_BELOW: Final = (
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "properties", "patternProperties",
    "additionalProperties", "propertyNames", "dependentSchemas", "dependencies", "items", "prefixItems",
    "additionalItems", "contains", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


def same(one: Node, other: Node, known: Mapping[tuple[Node, Node], bool]) -> tuple[bool, int]:
    """Whether two schemas allow the same because they are written the same, and how many pairs it took.

    Titles and the like do not count.  Recursive schemas are the same when no difference is found on the way
    round.  ``known`` are earlier answers.
    """
    seen: set[tuple[Node, Node]] = set()
    waiting = [(one, other)]
    while waiting:
        pair = waiting.pop()
        if pair in seen or pair[0] is pair[1] or known.get(pair):
            continue
        seen.add(pair)
        inner = _pairs(*pair) if pair not in known and _signature(pair[0]) == _signature(pair[1]) else None
        if inner is None:
            return False, len(seen)
        waiting += inner
    return True, len(seen)


def _signature(node: Node) -> bytes:
    """All that a schema asserts by itself, as one text; made once for each schema."""
    if not node.signature:
        node.signature = canonical(_asserted(node))
    return node.signature


def _asserted(node: Node) -> Any:
    if isinstance(node.schema, bool):
        return [node.schema, node.outside]
    draft = node.document.draft
    words = _PLAIN + _CONTENT if draft in (DRAFT_6, DRAFT_7) else _PLAIN
    found = {word: node.get(word) for word in words if node.get(word) is not None}
    # A const of null is something else than none, and so is a list among the dependencies.
    silenced = "$ref" in node.schema and draft <= DRAFT_7
    if draft >= DRAFT_6 and "const" in node.schema and not silenced:
        found["const"] = node.schema["const"]
    lists = {name: one for name, one in (node.get("dependencies") or {}).items() if isinstance(one, list)}
    return [draft, found, lists]


def _pairs(one: Node, other: Node) -> list[tuple[Node, Node]] | None:
    """The sub-schemas that must be the same too; None when they do not stand in the same places."""
    if len(one.references) != len(other.references):
        return None
    found = list(zip(one.references, other.references, strict=True))
    for keyword in _BELOW:
        mine, theirs = one.below(keyword), other.below(keyword)
        if mine.keys() != theirs.keys():
            return None
        found += [(node, theirs[name]) for name, node in mine.items()]
    return found
