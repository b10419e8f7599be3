"""Whether two schemas assert the same, word for word, with references followed."""

from __future__ import annotations

from typing import Final

from danube.schema.json_dialect import DRAFT_6, DRAFT_7
from danube.schema.json_document import Node
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


def same(one: Node, other: Node) -> tuple[bool, int]:
    """Whether two schemas allow the same because they are written the same, and how many pairs it took.

    Titles and the like do not count.  Recursive schemas are the same when no difference is found on the way
    round.
    """
    seen: set[tuple[Node, Node]] = set()
    waiting = [(one, other)]
    while waiting:
        pair = waiting.pop()
        if pair in seen or pair[0] is pair[1]:
            continue
        seen.add(pair)
        inner = _pairs(*pair) if _alike(*pair) else None
        if inner is None:
            return False, len(seen)
        waiting += inner
    return True, len(seen)


def _alike(one: Node, other: Node) -> bool:
    if isinstance(one.schema, bool) or isinstance(other.schema, bool):
        return one.schema is other.schema and one.outside == other.outside
    if one.document.draft != other.document.draft:
        return False
    words = _PLAIN + _CONTENT if one.document.draft in (DRAFT_6, DRAFT_7) else _PLAIN
    if any(canonical(one.get(word)) != canonical(other.get(word)) for word in words):
        return False
    # A const of null is something else than none, and so is a list among the dependencies.
    if one.document.draft >= DRAFT_6 and _constant(one) != _constant(other):
        return False
    return _lists(one) == _lists(other)


def _constant(node: Node) -> bytes:
    if isinstance(node.schema, bool) or "const" not in node.schema or _silenced(node):
        return b""
    return canonical(node.schema["const"])


def _silenced(node: Node) -> bool:
    return isinstance(node.schema, dict) and "$ref" in node.schema and node.document.draft <= DRAFT_7


def _lists(node: Node) -> dict[str, bytes]:
    found = node.get("dependencies") or {}
    return {name: canonical(names) for name, names in found.items() if isinstance(names, list)}


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
