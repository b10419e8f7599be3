"""State of a comparison of two JSON Schemas: proven pairs, assumed pairs, and the remaining budget.

The rules for a pair of schemas come from :mod:`danube.schema.json.compatibility`. Two schemas with the same
assertions, word for word and with references followed, need no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from danube.schema.json.dialect import DRAFT_6, DRAFT_7
from danube.schema.json.document import Document, Node
from danube.schema.json.shape import Inner, Matches, Shape, Together, distinct, flat
from danube.schema.json_text import canonical
from danube.schema.model import Difference

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


STEPS_MAX: Final = 300_000
"""Schemas looked at; each takes a microsecond or two."""

DIFFERENCES_MAX: Final = 100
SPLITS_MAX: Final = 4

Accepts = Callable[[Node, Any], bool]
Rules = Callable[["Comparison", Together, Node], list[Difference]]


class Definitions(msgspec.Struct, frozen=True):
    """Two documents, and the validator's own word about a single value or name."""

    reader: Document
    writer: Document
    accepts: Accepts
    matches: Matches


class Entangled(Exception):
    """The comparison took more steps than are given to it."""


class Comparison:
    """One comparison of two documents: proven pairs, assumed pairs, remaining budget."""

    def __init__(self, definitions: Definitions, rules: Rules) -> None:
        self.accepts = definitions.accepts
        self.matches = definitions.matches
        self._rules = rules
        self._shapes: dict[Node, Shape] = {}
        self._assumed_shapes: dict[Any, Shape] = {}
        self._known: dict[Any, list[Difference]] = {}
        self._open: dict[Any, int] = {}  # claim being proven -> how deep inside the value it was begun
        self._proven: list[Any] = []  # claims proven, oldest first; some lean on claims still open
        self._same: dict[tuple[Node, Node], bool] = {}
        self._depth = 0
        self._steps = 0

    # What the rules ask for.

    def nodes(self, writers: Iterable[Node], reader: Node) -> list[Difference]:
        """Differences between writers that all hold and a reader, for the same value."""
        return self.differences(self.together(writers), reader)

    def inside(self, parent: Together, inner: Inner, reader: Node) -> list[Difference]:
        """Return the differences for a value inside the value that ``parent`` describes."""
        return self.inner_differences(self.inner(parent, inner), reader)

    def inner(self, parent: Together, inner: Inner) -> Together:
        """Return the known facts about a value inside."""
        return Together(
            self.shapes(inner.certain),
            self.matches,
            listed=parent.listed,
            possible=inner.possible,
            spend=self.step,
        )

    def inner_differences(self, writer: Together, reader: Node) -> list[Difference]:
        """Return the differences for an inner writer that is put together already, as for object names."""
        self._depth += 1
        try:
            return self.differences(writer, reader)
        finally:
            self._depth -= 1

    def unlisted_within(self, writers: Iterable[Node], reader: Node) -> bool:
        """Whether every value of some schemas, names that they do not list included, keeps to another."""
        return self.holds(self.together(writers, listed=False), reader)

    def unlisted_inside(self, writers: Iterable[Node], reader: Node) -> list[Difference]:
        """The differences for a value inside, names that are not listed included."""
        return self.inner_differences(self.together(writers, listed=False), reader)

    def together(self, writers: Iterable[Node], *, listed: bool = True) -> Together:
        return Together(self.shapes(writers), self.matches, listed=listed, spend=self.step)

    def shapes(self, nodes: Iterable[Node]) -> list[Shape]:
        return [self._shape(one) for node in nodes for one in flat(node)]

    def assumed(
        self, *, kinds: frozenset[str] | None = None, required: str = "", excluded: Node | None = None
    ) -> Shape:
        """A shape for what is known in one case of a proof."""
        key = (kinds, required, excluded)
        if key not in self._assumed_shapes:
            if kinds is not None:
                shape = Shape(kinds=kinds)
            else:
                shape = Shape(required=frozenset({required} if required else ()), excluded=excluded)
            self._assumed_shapes[key] = shape
        return self._assumed_shapes[key]

    def holds(self, writer: Together, reader: Node) -> bool:
        """Whether the reader takes all that the writer allows."""
        return not self.differences(writer, reader)

    def same(self, one: Node, other: Node) -> bool:
        """Whether two schemas are written the same."""
        if (one, other) not in self._same:
            alike, count = same(one, other, self._same)
            self._same[one, other] = alike
            self.step(4 * count)
        return self._same[one, other]

    def step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > STEPS_MAX:
            raise Entangled

    # One claim.

    def differences(self, writer: Together, reader: Node) -> list[Difference]:
        """Paths are relative to the reader's schema."""
        key = (writer.key, reader)
        if key in self._known:
            return self._known[key]
        if key in self._open:
            if self._open[key] < self._depth:
                return []  # The same claim about a smaller value.
            return [
                Difference(
                    path="", rule="cannot_decide", message="the schemas refer to each other in a circle"
                )
            ]
        self.step(10 + len(writer.shapes))
        mark = len(self._proven)
        self._open[key] = self._depth
        try:
            found = self._examine(writer, reader)[:DIFFERENCES_MAX]
        finally:
            del self._open[key]
        self._known[key] = found
        if found:
            # Proofs on the way may have used this claim, which is wrong.
            for claim in self._proven[mark:]:
                self._known.pop(claim, None)
            del self._proven[mark:]
        else:
            self._proven.append(key)
        return found

    def _examine(self, writer: Together, reader: Node) -> list[Difference]:
        found = self._rules(self, writer, reader)
        if not found or writer.values is not None or len(writer.split) >= SPLITS_MAX:
            return found
        for part in self._parts(writer):
            inner = [one for case in part for one in self.differences(case, reader)]
            if not inner:
                return []
            return distinct(inner)
        return found

    def _parts(self, writer: Together) -> Iterable[list[Together]]:
        """The cases of the writer's first alternatives that were not told apart yet."""
        for shape in writer.shapes:
            for keyword in ("anyOf", "oneOf"):
                branches = list(shape.below(keyword).values())
                if branches and (shape, keyword) not in writer.split:
                    mark = frozenset({(shape, keyword)})
                    yield [
                        writer.plus(
                            [
                                *self.shapes([branch]),
                                *(self._others(branches, branch) if keyword == "oneOf" else ()),
                            ],
                            mark,
                        )
                        for branch in branches
                    ]
            condition = shape.below("if").get("")
            if condition is not None and (shape, "if") not in writer.split:
                then, otherwise = shape.below("then").values(), shape.below("else").values()
                mark = frozenset({(shape, "if")})
                yield [
                    writer.plus(self.shapes([condition, *then]), mark),
                    writer.plus([*self.shapes(otherwise), self.assumed(excluded=condition)], mark),
                ]

    def _others(self, branches: list[Node], taken: Node) -> list[Shape]:
        return [self.assumed(excluded=branch) for branch in branches if branch is not taken]

    def _shape(self, node: Node) -> Shape:
        if node not in self._shapes:
            self._shapes[node] = Shape(node)
        return self._shapes[node]
