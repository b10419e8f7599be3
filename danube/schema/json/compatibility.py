"""Compatibility of JSON Schemas: whether everything ``writer`` allows is allowed by ``reader``.

The comparison is sound: when it finds nothing, no value that the writer allows is refused by the reader.
It is not complete, because the question has no affordable answer in general: where the rules cannot prove
it, the difference says ``cannot_decide``.  Two things are understood about writers (docs/schemas.md):
an object schema that lists properties writes these, what its patterns and what an explicit
``additionalProperties`` or ``unevaluatedProperties`` allow, and nothing else; and ``format``, like titles,
descriptions, defaults and examples, promises nothing.

The writer's schemas that hold at once (``$ref``, ``allOf``) are taken together, and each assertion of the
reader must follow from them.  If it does not, the writer's alternatives are tried one by one.  Recursive
schemas are compared by assuming the pair under proof, for values inside the value only.  The work is bounded
by STEPS_MAX comparisons.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from danube.schema.json.array_rules import array_rules
from danube.schema.json.choice_rules import choice_rules
from danube.schema.json.comparison import Comparison, Definitions, Entangled
from danube.schema.json.document import Node
from danube.schema.json.object_rules import object_rules
from danube.schema.json.shape import NUMBERS, Shape, Together, difference, flat, kind_of, limit_rules, short
from danube.schema.json_text import canonical
from danube.schema.model import Difference

_ANY_TEXT: Final = frozenset({"", ".*", "^", "$", "^.*", ".*$"})
"""Patterns that every text matches: a pattern is searched for, not held against the whole."""

FRAMES_MAX: Final = 5_000
"""Calls inside each other: ten for each level of objects and arrays that references lead through."""


def strict_differences(definitions: Definitions) -> list[Difference]:
    """Return every reason why the reader may refuse a value of the writer; at most DIFFERENCES_MAX."""
    comparison = Comparison(definitions, rules)
    frames = sys.getrecursionlimit()
    sys.setrecursionlimit(max(frames, FRAMES_MAX))
    try:
        return comparison.nodes([definitions.writer.root], definitions.reader.root)
    except (Entangled, RecursionError):
        return [
            Difference(
                path="", rule="cannot_decide",
                message="the definitions are too entangled to compare within bounds",
                hint="make them simpler, or compare by hand and set the compatibility of the subject to none",
            )
        ]  # fmt: skip
    finally:
        sys.setrecursionlimit(frames)


def rules(comparison: Comparison, writer: Together, reader: Node) -> list[Difference]:
    """Return why a reader may refuse a value of the writer; paths are relative to the reader's schema."""
    if not writer.kinds or any(shape.node is reader for shape in writer.shapes):
        return []
    if writer.values is not None:
        refused = _refused_values(comparison, writer, reader)
        if not refused:
            return []
        return _why_values(comparison, writer, reader, refused)
    found: list[Difference] = []
    for node in flat(reader):
        if any(shape.node is node for shape in writer.shapes):
            continue
        differing = _one(comparison, writer, node)
        if differing and not any(
            shape.node is not None and comparison.same(shape.node, node) for shape in writer.shapes
        ):
            found += differing
    return found


def _one(comparison: Comparison, writer: Together, node: Node) -> list[Difference]:
    comparison.step(10)
    if node.outside:
        if any(shape.node is not None and shape.node.outside == node.outside for shape in writer.shapes):
            return []
        return [
            difference(
                "cannot_decide", node.outside, None, "the reader holds the value against a meta-schema"
            )
        ]
    shape = Shape(node)
    refused = writer.kinds - shape.kinds
    if refused:
        return [_kinds_differ(writer, shape, node)]
    found = []
    if shape.values is not None:
        word = "const_added" if node.get("const") is not None else "enum_added"
        found.append(
            difference(
                word,
                shape.values,
                None,
                "the reader takes these values only, the writer others too",
                "list every value that is still written",
            )
        )
    if writer.kinds & NUMBERS:
        found += _number_rules(writer, shape)
    if "string" in writer.kinds:
        found += _string_rules(writer, shape)
    if "array" in writer.kinds:
        found += array_rules(comparison, writer, shape)
    if "object" in writer.kinds:
        found += object_rules(comparison, writer, shape)
    return found + choice_rules(comparison, writer, shape)


def _kinds_differ(writer: Together, shape: Shape, node: Node) -> Difference:
    written = _words(writer.kinds)
    if node.schema is False:
        return difference("value_refused", False, written, "the reader takes no value here")
    read = node.get("type")
    narrowed = bool(writer.kinds & shape.kinds)
    return difference(
        "type_narrowed" if narrowed else "type_changed",
        read,
        written,
        f"the reader takes {_listed(_words(shape.kinds))}, the writer may write {_listed(written)}",
        "list every type that is still written",
    )


def _number_rules(writer: Together, shape: Shape) -> list[Difference]:
    found = []
    whole = not writer.kinds & {"fraction"}
    for word, mine, others in (
        ("minimum", shape.lower(), [one.lower() for one in writer.shapes]),
        ("maximum", shape.upper(), [one.upper() for one in writer.shapes]),
    ):
        if mine is None:
            continue
        sign = 1 if word == "minimum" else -1
        known = [_edge(one, sign, whole) for one in others if one is not None]
        if not known or max(known) < _edge(mine, sign, whole):
            rule = "minimum_raised" if word == "minimum" else "maximum_lowered"
            limits = [one[0] for one in others if one is not None]
            best = (max(limits) if sign > 0 else min(limits)) if limits else None
            found.append(
                difference(
                    rule,
                    mine[0],
                    best,
                    f"the reader's {word} is {_bound(mine)}, the writer's is "
                    f"{'not set' if best is None else best}",
                    "keep the wider range",
                )
            )
    step = shape.get("multipleOf")
    if step is not None and not _divides(writer, step, whole):
        steps = writer.known("multipleOf")
        found.append(
            difference(
                "multiple_of_changed",
                step,
                steps[0] if steps else None,
                f"the reader takes multiples of {step} only",
            )
        )
    return found


def _edge(bound: tuple[Any, bool], sign: int, whole: bool) -> tuple[Any, bool]:
    """A bound as a place on a line where greater means tighter."""
    limit, strict = bound
    if whole and strict and isinstance(limit, int):
        return sign * (limit + sign), False
    return sign * limit, strict


def _bound(bound: tuple[Any, bool]) -> str:
    return f"{bound[0]} (excluded)" if bound[1] else str(bound[0])


def _divides(writer: Together, step: Any, whole: bool) -> bool:
    for other in writer.known("multipleOf"):
        if other == step or (type(other) is int and type(step) is int and other % step == 0):
            return True
    return step == 1 and whole


def _string_rules(writer: Together, shape: Shape) -> list[Difference]:
    found = limit_rules(
        writer, shape, "Length", "length", writer.least("minLength"), writer.most("maxLength")
    )
    pattern = shape.get("pattern")
    if pattern is not None and pattern not in _ANY_TEXT and pattern not in writer.known("pattern"):
        known = writer.known("pattern")
        found.append(
            difference(
                "pattern_changed" if known else "pattern_added",
                pattern,
                known[0] if known else None,
                "the reader's pattern is not the writer's, and patterns are not compared further",
                "keep the pattern, or check it where the value is used",
            )
        )
    content = shape.content()
    if content != (None, None) and all(one.content() != content for one in writer.shapes):
        found.append(
            difference(
                "content_changed", [*content], None, "the reader asserts another encoding or media type"
            )
        )
    return found


def _refused_values(comparison: Comparison, writer: Together, reader: Node) -> list[Any]:
    """Of the writer's known values, those that it allows and the reader refuses."""
    schemas = [shape.node for shape in writer.shapes if shape.node is not None and not shape.node.outside]
    excluded = [shape.excluded for shape in writer.shapes if shape.excluded is not None]
    refused = []
    for value in writer.values or []:
        comparison.step(10)
        if kind_of(value) not in writer.kinds or any(comparison.accepts(node, value) for node in excluded):
            continue
        if all(comparison.accepts(node, value) for node in schemas) and not comparison.accepts(reader, value):
            refused.append(value)
    return refused


def _why_values(
    comparison: Comparison, writer: Together, reader: Node, refused: list[Any]
) -> list[Difference]:
    shown = canonical(short(refused[0])).decode()
    found: list[Difference] = []
    for node in flat(reader):
        shape = Shape(node)
        if not (writer.kinds & shape.kinds) and not node.outside:
            found.append(_kinds_differ(writer, shape, node))
        elif shape.values is not None:
            single = len(shape.values) == 1 and len(writer.values or []) == 1
            found.append(
                difference(
                    "const_changed" if single else "enum_narrowed",
                    short(shape.values),
                    short(writer.values),
                    f"the reader does not take {shown}",
                    "list every value that is still written",
                )
            )
        for keyword in ("anyOf", "oneOf"):
            branches = node.below(keyword)
            if branches and not any(comparison.accepts(one, refused[0]) for one in branches.values()):
                rule = "any_of_narrowed" if keyword == "anyOf" else "one_of_narrowed"
                message = f"no alternative of the reader takes {shown}"
                hint = "keep every alternative that is still written"
                found.append(difference(rule, len(branches), refused[0], message, hint, path=f"/{keyword}"))
    return found or [
        difference(
            "value_refused",
            reader,
            refused[0],
            f"the reader does not take {shown}",
            "widen the reader's limits",
        )
    ]


def _words(kinds: frozenset[str]) -> list[str]:
    words = set(kinds)
    if words & NUMBERS:
        fraction = "fraction" in words or words & NUMBERS == {"whole"}
        words = (words - NUMBERS) | {"number" if fraction else "integer"}
    return sorted(words)


def _listed(words: list[str]) -> str:
    return " or ".join(words)
