"""The rules for objects: required names, properties listed, matched and left over, names, counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube.schema.json.cost import disjoint_patterns
from danube.schema.json.document import Node, escape
from danube.schema.json.shape import Inner, Shape, Together, difference, distinct, flat, limit_rules, under
from danube.schema.model import Difference

if TYPE_CHECKING:
    from danube.schema.json.comparison import Comparison


def object_rules(comparison: Comparison, writer: Together, shape: Shape) -> list[Difference]:
    """Why the reader may refuse an object that the writer allows."""
    found = [
        difference(
            "required_added",
            "required",
            "optional" if name in writer.names else None,
            f"the reader requires {name!r}, which the writer need not write",
            "leave the property optional, or give it in every older version first",
            path="/properties/" + escape(name),
        )
        for name in sorted(shape.required - writer.required)
    ]
    closed = not writer.others and not writer.patterns
    most = min(writer.most("maxProperties"), len(writer.names) if closed else float("inf"))
    least = max(writer.least("minProperties"), len(writer.required))
    found += limit_rules(writer, shape, "Properties", "properties", least, most)
    found += _listed(comparison, writer, shape)
    found += _matched(comparison, writer, shape)
    found += _left_over(comparison, writer, shape, "additionalProperties", [shape])
    if shape.get("unevaluatedProperties") is not None and shape.node is not None:
        looked = [Shape(node) for node in flat(shape.node)]
        if not any(one.get("additionalProperties") is not None for one in looked):
            found += _left_over(comparison, writer, shape, "unevaluatedProperties", looked)
    return found + _names(comparison, writer, shape) + _dependent(comparison, writer, shape)


def _listed(comparison: Comparison, writer: Together, shape: Shape) -> list[Difference]:
    found: list[Difference] = []
    for name, child in shape.below("properties").items():
        if writer.may_write(name):
            found += under(
                "/properties/" + escape(name), comparison.inside(writer, writer.property(name), child)
            )
    return found


def _matched(comparison: Comparison, writer: Together, shape: Shape) -> list[Difference]:
    found: list[Difference] = []
    for pattern, child in shape.below("patternProperties").items():
        inner: list[Difference] = []
        known = writer.under_pattern(pattern)
        for name in sorted(writer.names):
            if comparison.matches(pattern, name):
                inner += comparison.inside(writer, writer.property(name), child)
        for other in sorted(writer.patterns):
            if not disjoint_patterns(pattern, other):
                # Such a name matches both patterns.
                theirs = writer.under_pattern(other)
                both = Inner([*theirs.certain, *known.certain], theirs.possible)
                inner += comparison.inside(writer, both, child)
        if writer.others and not known.certain:
            inner += comparison.inside(writer, writer.other_property(), child)
        path = "/patternProperties/" + escape(pattern)
        found += distinct(under(path, inner))
    return found


def _left_over(
    comparison: Comparison, writer: Together, shape: Shape, keyword: str, looked: list[Shape]
) -> list[Difference]:
    """Compare a reader's schema for all other properties with the properties that the writer writes."""
    left = shape.below(keyword).get("")
    if left is None:
        return []
    names = {name for one in looked for name in one.below("properties")}
    patterns = {pattern for one in looked for pattern in one.below("patternProperties")}
    found: list[Difference] = []
    for name in sorted(writer.names - names):
        if any(comparison.matches(pattern, name) for pattern in patterns):
            continue
        inner = comparison.inside(writer, writer.property(name), left)
        if inner and left.schema is False:
            found.append(
                difference(
                    "property_removed",
                    None,
                    _first(writer.property(name).certain),
                    f"the reader takes no property {name!r}, which the writer may write",
                    "keep the property, or let the reader take other properties",
                    path="/properties/" + escape(name),
                )
            )
        else:
            found += under("/properties/" + escape(name), inner)
    for pattern in sorted(writer.patterns - patterns):
        inner = comparison.inside(writer, writer.under_pattern(pattern), left)
        if inner and left.schema is False:
            inner = [
                difference(
                    "pattern_removed",
                    None,
                    pattern,
                    "the reader takes no such properties",
                    "keep the pattern, or let the reader take other properties",
                )
            ]
        found += under("/patternProperties/" + escape(pattern), inner)
    if writer.others:
        inner = comparison.inside(writer, writer.other_property(), left)
        if inner and left.schema is False:
            inner = [
                difference(
                    "properties_closed",
                    False,
                    _first(writer.other_property().certain),
                    "the reader takes listed properties only, the writer may write others",
                    f"leave {keyword} away",
                )
            ]
        found += under("/" + keyword, inner)
    return found


def _names(comparison: Comparison, writer: Together, shape: Shape) -> list[Difference]:
    wanted = shape.below("propertyNames").get("")
    if wanted is None:
        return []
    refused = [name for name in sorted(writer.names) if not comparison.accepts(wanted, name)]
    known = [node for one in writer.shapes for node in one.below("propertyNames").values()]
    if writer.others or writer.patterns:
        text = comparison.assumed(kinds=frozenset({"string"}))
        names = comparison.together(known).plus([text])
        if comparison.inner_differences(names, wanted):
            refused.append("any other name")
    refused = [name for name in refused if not _impossible(comparison, known, name)]
    if not refused:
        return []
    return [
        difference(
            "property_names_changed",
            wanted,
            _first(known),
            f"the reader does not take the name {refused[0]!r}",
            "widen propertyNames",
            path="/propertyNames",
        )
    ]


def _impossible(comparison: Comparison, known: list[Node], name: str) -> bool:
    return any(not comparison.accepts(node, name) for node in known) if name != "any other name" else False


def _dependent(comparison: Comparison, writer: Together, shape: Shape) -> list[Difference]:
    found: list[Difference] = []
    for name, needed in sorted(shape.dependent_names().items()):
        given = set(writer.required)
        for one in writer.shapes:
            given.update(one.dependent_names().get(name, ()))
        missing = sorted(set(needed) - given - {name})
        if missing and writer.may_write(name):
            found.append(
                difference(
                    "dependent_required_added",
                    needed,
                    None,
                    f"the reader requires {missing[0]!r} beside {name!r}, the writer does not",
                    "leave the property optional",
                    path="/dependentRequired/" + escape(name),
                )
            )
    for name, child in sorted(shape.dependent_schemas().items()):
        if not writer.may_write(name):
            continue
        theirs = [
            node for one in writer.shapes for other, node in one.dependent_schemas().items() if other == name
        ]
        case = writer.plus([comparison.assumed(required=name), *comparison.shapes(theirs)])
        found += under("/dependentSchemas/" + escape(name), comparison.differences(case, child))
    return found


def _first(nodes: list[Node]) -> Node | None:
    return nodes[0] if nodes else None
