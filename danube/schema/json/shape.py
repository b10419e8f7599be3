"""Assertions of a schema about a value, the same for every draft; and several schemas that hold at once.

A ``Shape`` is one schema without its ``$ref`` and ``allOf``, which are shapes of their own.  ``Together`` is
a set of shapes that all hold: it answers which facts hold for every value that they allow.

The module also puts a difference between two JSON Schemas into words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple

import msgspec

from danube.schema.json.dialect import DRAFT_4, DRAFT_6, DRAFT_7, DRAFT_2020
from danube.schema.json.document import Node
from danube.schema.json_text import canonical
from danube.schema.model import Difference

# Kinds of values.  1.0 is an integer since draft 6, but not in draft 4: "whole".
NUMBERS: Final = frozenset({"integer", "whole", "fraction"})
KINDS: Final = NUMBERS | {"null", "boolean", "object", "array", "string"}
_GROUPS: Final = (
    frozenset({"null"}), frozenset({"boolean"}), frozenset({"object"}), frozenset({"array"}),
    frozenset({"string"}), frozenset({"integer", "whole"}), frozenset({"fraction"}),
)  # fmt: skip

Matches = Callable[[str, str], bool]


class Shape:
    """The assertions of one schema.  ``node`` is None for a shape that a comparison assumes."""

    __slots__ = ("excluded", "kinds", "node", "required", "values")

    def __init__(
        self, node: Node | None = None, *, kinds: frozenset[str] = KINDS,
        required: frozenset[str] = frozenset(), excluded: Node | None = None,
    ) -> None:  # fmt: skip
        self.node = node
        self.kinds = kinds
        self.required = required
        self.excluded = excluded  # The value does not keep to this schema.
        self.values: list[Any] | None = None
        if node is not None:
            self._read(node)

    def _read(self, node: Node) -> None:
        if node.schema is False:
            self.kinds = frozenset()
        self.kinds = _kinds(node.get("type"), node.document.draft)
        if node.schema is False:
            self.kinds = frozenset()
        if node.get("required") is not None:
            self.required = frozenset(node.get("required"))
        if node.get("enum") is not None:
            self.values = node.get("enum")
        silenced = isinstance(node.schema, dict) and "$ref" in node.schema and node.document.draft <= DRAFT_7
        known = node.document.draft >= DRAFT_6 and not silenced
        if known and isinstance(node.schema, dict) and "const" in node.schema:
            self.values = [node.schema["const"]]

    def get(self, keyword: str) -> Any:
        return None if self.node is None else self.node.get(keyword)

    def below(self, keyword: str) -> Mapping[str, Node]:
        return {} if self.node is None else self.node.below(keyword)

    def lower(self) -> tuple[Any, bool] | None:
        """The least number allowed and whether it is excluded."""
        return _bound(self, "minimum", "exclusiveMinimum", max)

    def upper(self) -> tuple[Any, bool] | None:
        return _bound(self, "maximum", "exclusiveMaximum", min)

    def prefix(self) -> list[Node]:
        """Schemas of the first items of an array, in order."""
        if self.node is None:
            return []
        keyword = "prefixItems" if self.node.document.draft >= DRAFT_2020 else "items"
        found = self.below(keyword)
        return [] if "" in found else list(found.values())

    def rest(self) -> Node | None:
        """The schema of all items behind the prefix; None when nothing is said."""
        one = self.below("items").get("")
        if one is not None or self.node is None or self.node.document.draft >= DRAFT_2020:
            return one
        return self.below("additionalItems").get("") if isinstance(self.get("items"), list) else None

    def dependent_names(self) -> dict[str, list[str]]:
        found = dict(self.get("dependentRequired") or {})
        for name, names in (self.get("dependencies") or {}).items():
            if isinstance(names, list):
                found[name] = [*found.get(name, []), *names]
        return found

    def dependent_schemas(self) -> dict[str, Node]:
        return {**self.below("dependencies"), **self.below("dependentSchemas")}

    def content(self) -> tuple[Any, Any]:
        """Encoding and media type, which drafts 6 and 7 assert."""
        if self.node is None or self.node.document.draft not in (DRAFT_6, DRAFT_7):
            return None, None
        return self.get("contentEncoding"), self.get("contentMediaType")


class Inner(NamedTuple):
    """The schemas of a value inside: those that hold for certain, and those that hold in some branch."""

    certain: list[Node]
    possible: list[Node]


class Together:
    """Shapes that all hold.  ``listed``: names outside the properties that a writer lists are not written.

    An object schema that lists properties is taken to write these, what its patterns allow, and what an
    explicit ``additionalProperties`` or ``unevaluatedProperties`` allows.  One that lists none is a free map.
    ``possible`` are schemas that may hold as well: nothing follows from them, but the names that they list
    may be written.  ``spend`` is told how many schemas are looked at, because many may hold at once.
    """

    def __init__(
        self, shapes: Iterable[Shape], matches: Matches, *, listed: bool, split: frozenset[Any] = frozenset(),
        possible: Iterable[Node] = (), spend: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.shapes = tuple(dict.fromkeys(shapes))
        self.matches = matches
        self.listed = listed
        self.split = split
        self.spend = spend
        self.possible = tuple(dict.fromkeys(possible)) if listed else ()
        self.key = (frozenset(map(id, self.shapes)), listed, split, frozenset(map(id, self.possible)))

    def plus(self, shapes: Iterable[Shape], split: frozenset[Any] = frozenset()) -> Together:
        return Together(
            (*self.shapes, *shapes), self.matches, listed=self.listed, split=self.split | split,
            possible=self.possible, spend=self.spend,
        )  # fmt: skip

    @cached_property
    def values(self) -> list[Any] | None:
        """The only values possible, when they are finitely many and known; not all of them need be."""
        lists = [shape.values for shape in self.shapes if shape.values is not None]
        if lists:
            return min(lists, key=len)
        kinds = frozenset.intersection(KINDS, *(shape.kinds for shape in self.shapes))
        if kinds <= {"null", "boolean"}:
            return [value for value in (None, False, True) if kind_of(value) in kinds]
        return None

    @cached_property
    def kinds(self) -> frozenset[str]:
        kinds = frozenset.intersection(KINDS, *(shape.kinds for shape in self.shapes))
        if self.values is not None:
            kinds &= {kind_of(value) for value in self.values}
        if any(type(step) is int for step in self.known("multipleOf")):
            kinds -= {"fraction"}
        return kinds

    def groups(self) -> list[frozenset[str]]:
        """The kinds, apart where alternatives may tell them apart."""
        return [group & self.kinds for group in _GROUPS if group & self.kinds]

    def known(self, keyword: str) -> list[Any]:
        """Return the values of the shapes under a keyword."""
        return [value for value in (shape.get(keyword) for shape in self.shapes) if value is not None]

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset().union(*(shape.required for shape in self.shapes))

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that some schema applied here lists, whether its branch is taken or not."""
        found = set(self.required)
        for node in self._applied:
            found.update(node.below("properties"))
            found.update(node.get("required") or ())
            for name, others in (node.get("dependentRequired") or {}).items():
                found.update((name, *others))
            for name, others in (node.get("dependencies") or {}).items():
                found.update((name, *(others if isinstance(others, list) else ())))
            found.update(node.below("dependentSchemas"))
        return frozenset(found)

    @cached_property
    def patterns(self) -> frozenset[str]:
        return frozenset(pattern for node in self._applied for pattern in node.below("patternProperties"))

    @cached_property
    def others(self) -> bool:
        """Whether names may be written that are neither listed nor match a pattern."""
        if any(
            node.schema is False for one in self.shapes for node in one.below("additionalProperties").values()
        ):
            return False
        if not self.listed or self._free or any(node.outside for node in self._applied):
            return True
        return any(
            node.get(word) not in (None, False)
            for node in self._applied
            for word in ("additionalProperties", "unevaluatedProperties")
        )

    @property
    def _free(self) -> bool:
        return not self.patterns and not any(node.below("properties") for node in self._applied)

    @cached_property
    def _applied(self) -> list[Node]:
        found: dict[Node, None] = {}
        waiting = [*(shape.node for shape in self.shapes if shape.node is not None), *self.possible]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found[node] = None
                waiting.extend(node.here)
        self.spend(4 * len(found))  # The names, patterns and others are read from them as well.
        return list(found)

    def _inner(self, select: Callable[[Node], list[Node]], *also: str) -> Inner:
        self.spend(len(self._applied))
        certain = [node for shape in self.shapes if shape.node is not None for node in select(shape.node)]
        possible: list[Node] = []
        if self.listed:
            for node in self._applied:
                possible += select(node)
                for keyword in also:
                    possible += node.below(keyword).values()
        known = set(certain)
        return Inner(certain, [node for node in dict.fromkeys(possible) if node not in known])

    def may_write(self, name: str) -> bool:
        return self.others or name in self.names or any(self.matches(one, name) for one in self.patterns)

    def property(self, name: str) -> Inner:
        """The schemas of the property of this name."""

        def select(node: Node) -> list[Node]:
            listed = node.below("properties").get(name)
            own = [] if listed is None else [listed]
            patterns = node.below("patternProperties").items()
            own += [child for pattern, child in patterns if self.matches(pattern, name)]
            return own or list(node.below("additionalProperties").values())

        inner = self._inner(select, "unevaluatedProperties")
        if any(self._looks_at(node, name) for node in self._applied):
            return inner
        left = self._left_over("unevaluatedProperties", "additionalProperties")
        return Inner([*inner.certain, *left], [node for node in inner.possible if node not in left])

    def _looks_at(self, node: Node, name: str) -> bool:
        """Whether a schema lists a property, or has a pattern that it matches."""
        patterns = node.below("patternProperties")
        return name in node.below("properties") or any(self.matches(one, name) for one in patterns)

    def under_pattern(self, pattern: str) -> Inner:
        """The schemas of every property that matches a pattern and is not listed."""

        def select(node: Node) -> list[Node]:
            return [child for one, child in node.below("patternProperties").items() if one == pattern]

        return self._inner(select, "additionalProperties", "unevaluatedProperties", "patternProperties")

    def other_property(self) -> Inner:
        """The schemas of properties that are neither listed nor match a pattern."""

        def select(node: Node) -> list[Node]:
            return list(node.below("additionalProperties").values())

        inner = self._inner(select, "unevaluatedProperties")
        left = self._left_over("unevaluatedProperties", "additionalProperties")
        return Inner([*inner.certain, *left], inner.possible)

    def _left_over(self, keyword: str, *evaluating: str) -> list[Node]:
        """Return the schemas of a property or item that no neighbour evaluates; known in plain cases only."""
        nodes = [node for node in self._applied if node.get(keyword) is not None]
        if len(nodes) != 1 or any(
            node.get(word) is not None for node in self._applied for word in evaluating
        ):
            return []
        return [
            child for one in self.shapes if one.node is nodes[0] for child in nodes[0].below(keyword).values()
        ]

    @cached_property
    def _prefix_applied(self) -> int:
        return max((len(Shape(node).prefix()) for node in self._applied), default=0)

    def _items_left_over(self) -> list[Node]:
        if any(Shape(node).rest() is not None for node in self._applied):
            return []
        return self._left_over("unevaluatedItems", "contains")

    def item(self, place: int) -> Inner:
        """The schemas of the item at a place."""

        def select(node: Node) -> list[Node]:
            shape = Shape(node)
            prefix, rest = shape.prefix(), shape.rest()
            if place < len(prefix):
                return [prefix[place]]
            return [] if rest is None else [rest]

        # Behind the prefix one place stands for all others, also for those that a branch knows apart.
        also = ("prefixItems", "items", "additionalItems") if place >= self.prefix_count else ()
        inner = self._inner(select, "unevaluatedItems", "contains", *also)
        left = self._items_left_over() if place >= self._prefix_applied else []
        return Inner([*inner.certain, *left], inner.possible)

    @cached_property
    def prefix_count(self) -> int:
        return max((len(shape.prefix()) for shape in self.shapes), default=0)

    @cached_property
    def items_max(self) -> float:
        """No array is longer."""
        limits: list[float] = list(self.known("maxItems"))
        for shape in self.shapes:
            rest = shape.rest()
            if rest is not None and rest.schema is False:
                limits.append(len(shape.prefix()))
        if any(node.schema is False for node in self._items_left_over()):
            limits.append(self._prefix_applied)
        return min(limits, default=float("inf"))

    def least(self, keyword: str) -> Any:
        """The greatest of the lower bounds that hold, 0 when there is none."""
        return max(self.known(keyword), default=0)

    def most(self, keyword: str) -> float:
        return min(self.known(keyword), default=float("inf"))


def flat(node: Node) -> list[Node]:
    """A schema and all that ``$ref`` and ``allOf`` apply to the same value."""
    found: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found[one] = None
            waiting.extend(one.references)
            waiting.extend(one.below("allOf").values())
    return list(found)


def kind_of(value: Any) -> str:
    """The kind of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "whole" if value.is_integer() else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def short(value: Any) -> Any:
    """A JSON value as it is when short, else the beginning of its text."""
    if isinstance(value, Node):
        value = value.schema
    text = canonical(value).decode()
    return value if len(text) <= 200 else text[:200] + "…"


def _kinds(word: Any, draft: int) -> frozenset[str]:
    if word is None:
        return KINDS
    found: set[str] = set()
    for one in [word] if isinstance(word, str) else word:
        if one == "number":
            found |= NUMBERS
        elif one == "integer":
            found |= {"integer"} if draft == DRAFT_4 else {"integer", "whole"}
        else:
            found.add(one)
    return frozenset(found)


def _bound(
    shape: Shape, inclusive: str, exclusive: str, tightest: Callable[..., Any]
) -> tuple[Any, bool] | None:
    limit, strict = shape.get(inclusive), shape.get(exclusive)
    if isinstance(strict, bool):
        return None if limit is None else (limit, strict)
    if limit is None or strict is None:
        return (
            (limit, False)
            if strict is None and limit is not None
            else None
            if strict is None
            else (strict, True)
        )
    both = tightest(limit, strict)
    return both, both == strict


def difference(
    rule: str, reader: Any, writer: Any, message: str, hint: str = "", *, path: str = ""
) -> Difference:
    """A difference at a path below the schema that is compared now."""
    return Difference(
        path=path, rule=rule, reader=short(reader), writer=short(writer), message=message, hint=hint
    )


def distinct(found: list[Difference]) -> list[Difference]:
    """The first difference of each path and rule."""
    return list({(one.path, one.rule): one for one in reversed(found)}.values())[::-1]


def under(path: str, found: Iterable[Difference]) -> list[Difference]:
    """Return the differences with paths as a schema further up sees them."""
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
