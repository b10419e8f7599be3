"""The rules for arrays: items by place, items behind the prefix, contains, counts, uniqueness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube.schema.json.document import Node
from danube.schema.json.shape import Inner, Shape, Together, difference, flat, limit_rules, under
from danube.schema.model import Difference

if TYPE_CHECKING:
    from danube.schema.json.comparison import Comparison


def array_rules(comparison: Comparison, writer: Together, shape: Shape) -> list[Difference]:
    """Why the reader may refuse an array that the writer allows."""
    least = max(writer.least("minItems"), _needed(writer))
    found = limit_rules(writer, shape, "Items", "items", least, writer.items_max)
    if shape.get("uniqueItems") and True not in writer.known("uniqueItems") and writer.items_max > 1:
        found.append(
            difference(
                "unique_items_added", True, None, "the reader takes distinct items only", "allow equal items"
            )
        )
    return (
        found
        + _items(comparison, writer, shape)
        + _contains(comparison, writer, shape)
        + _left_over(comparison, writer, shape)
    )


def _items(comparison: Comparison, writer: Together, shape: Shape) -> list[Difference]:
    prefix, rest = shape.prefix(), shape.rest()
    found: list[Difference] = []
    names = [
        pointer.rsplit("/", 2)[1] + f"/{place}" for place, pointer in enumerate(one.pointer for one in prefix)
    ]
    for place, child in enumerate(prefix):
        if place < writer.items_max:
            found += under("/" + names[place], comparison.inside(writer, writer.item(place), child))
    if rest is None:
        return found
    path = "/additionalItems" if rest.pointer.endswith("/additionalItems") else "/items"
    for place in range(len(prefix), max(len(prefix), writer.prefix_count) + 1):
        if place >= writer.items_max:
            break
        inner = under(path, comparison.inside(writer, writer.item(place), rest))
        found += [one for one in inner if one not in found]
    return found


def _contains(comparison: Comparison, writer: Together, shape: Shape) -> list[Difference]:
    wanted = shape.below("contains").get("")
    if wanted is None:
        return []
    least, most = _least(shape), shape.get("maxContains")
    enough = least == 0 or any(
        _least(other) >= least and _within(comparison, writer, theirs, wanted)
        for other, theirs in _contained(writer)
    )
    enough = enough or (writer.least("minItems") >= least and _every(comparison, writer, wanted))
    few = most is None or writer.items_max <= most
    for other, theirs in _contained(writer):
        limit = other.get("maxContains")
        # The writer must have the same count as the reader; this is about any value, listed or not.
        few = few or (limit is not None and limit <= most and _any_within(comparison, wanted, theirs))
    if enough and few:
        return []
    return [
        difference(
            "contains_changed",
            wanted,
            None,
            "the reader counts items, and the writer does not promise as many",
            "leave contains, minContains and maxContains as they are",
            path="/contains",
        )
    ]


def _left_over(comparison: Comparison, writer: Together, shape: Shape) -> list[Difference]:
    """``unevaluatedItems``: items that no other schema of the reader looks at for certain."""
    left = shape.below("unevaluatedItems").get("")
    if left is None or shape.node is None:
        return []
    looked = [Shape(node) for node in flat(shape.node)]
    if any(one.rest() is not None for one in looked):
        return []
    found: list[Difference] = []
    first = max(len(one.prefix()) for one in looked)
    for place in range(first, max(first, writer.prefix_count) + 1):
        if place < writer.items_max:
            inner = under("/unevaluatedItems", comparison.inside(writer, writer.item(place), left))
            found += [one for one in inner if one not in found]
    return found


def _needed(writer: Together) -> int:
    return max((_least(shape) for shape, _ in _contained(writer)), default=0)


def _contained(writer: Together) -> list[tuple[Shape, Node]]:
    return [(shape, node) for shape in writer.shapes for node in shape.below("contains").values()]


def _least(shape: Shape) -> int:
    least = shape.get("minContains")
    return 1 if least is None else int(least)


def _every(comparison: Comparison, writer: Together, wanted: Node) -> bool:
    places = range(writer.prefix_count + 1)
    return all(
        place >= writer.items_max or not comparison.inside(writer, writer.item(place), wanted)
        for place in places
    )


def _within(comparison: Comparison, writer: Together, inner: Node, outer: Node) -> bool:
    # Whatever stands in the array may be listed by the schema of any place.
    places = [writer.item(place) for place in range(writer.prefix_count + 1)]
    possible = [node for place in places for node in (*place.certain, *place.possible)]
    return not comparison.inside(writer, Inner([inner], possible), outer)


def _any_within(comparison: Comparison, inner: Node, outer: Node) -> bool:
    return not comparison.unlisted_inside([inner], outer)
