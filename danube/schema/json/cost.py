"""Cost of validation: a bound that is known before the first payload comes.

Unit: one schema checked at one place of a payload, some tens of nanoseconds.  A definition is refused when

* schemas that apply to the same value form a cycle (``$ref``, ``allOf``, ``anyOf``, ``oneOf``, ``not``,
  ``if``/``then``/``else``, ``dependentSchemas``): validation would never end;
* they form a chain longer than CHAIN_MAX: the validator's stack grows with chain times nesting;
* more than WORK_MAX units may be spent at one place, as when references double each other 2^30 times;
* it holds more than PATTERNS_MAX patterns.

Recursion from a value to the values inside it is free (trees, lists).  When a value is reached along
several ways at once, as in ``anyOf`` alternatives that each recurse, the work multiplies with every level
of nesting; then payloads may nest only as deep as WORK_MAX allows, and if that is less than
RECURSION_DEPTH_MIN levels the definition is refused.  Payloads are refused beyond BUDGET units,
the work at one place times the bytes of the payload: with 256 units still 8 MiB.

For a schema S, with ``here`` the schemas applied to the same value and ``group`` any set of its schemas
that can meet at one inner value, and d levels of nesting left:

    at(S)        = own(S) + sum(at(T) for T in here)             units at the value itself
    below(S, d)  = max(sum(work(T, d - 1) for T in group) for group) + sum(below(T, d) for T in here)
    work(S, d)   = max(at(S), below(S, d))                       units for each value of the payload

``unevaluatedProperties`` and ``unevaluatedItems`` read their neighbours again: ``here`` counts twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from danube.errors import SchemaInvalid
from danube.schema.json.document import Document, Node
from danube.schema.json_text import DEPTH_MAX

WORK_MAX: Final = 1 << 16
CHAIN_MAX: Final = 64
PATTERNS_MAX: Final = 256
PATTERN_BYTES_MAX: Final = 4096
RECURSION_DEPTH_MIN: Final = 4
BUDGET: Final = 1 << 31

_PLAIN_PATTERN_UNITS: Final = 16
_COUNTED_PATTERN_UNITS: Final = 128  # 256 KiB of automaton at its worst: 2.7 us for each byte
_OUTSIDE_UNITS: Final = 64
_LITERAL: Final = re.compile(r"\^([A-Za-z0-9_ :/@-]*)(.?)", re.DOTALL)

Matches = Callable[[str, str], bool]
"""Whether a pattern (first) is found in a text, as the validator sees it."""


class Cost(msgspec.Struct, frozen=True):
    """How deep a payload may nest, and how many units one of its values may take."""

    depth_max: int
    work: int

    @property
    def payload_bytes_max(self) -> int:
        return BUDGET // self.work


def cost_of(document: Document, matches: Matches) -> Cost:
    """The bound of a definition.  Raises SchemaInvalid when there is none within the limits."""
    order = _ordered(document.root)
    _check_patterns(order)
    place_by_node = {node: place for place, node in enumerate(order)}
    rows = [_Row(node, place_by_node, matches) for node in order]
    for row in rows:  # Schemas that apply to the same value come first.
        row.at = min(WORK_MAX + 1, row.own + row.repeat * sum(rows[place].at for place in row.here))
        row.chain = 1 + max((rows[place].chain for place in row.here), default=0)
        if row.chain > CHAIN_MAX:
            raise _too_costly(row.node, f"more than {CHAIN_MAX} schemas in a chain apply to the same value")
        if row.at > WORK_MAX:
            raise _too_costly(row.node, f"a value would be checked against more than {WORK_MAX:,} schemas")
    return _over_depth(rows, place_by_node[document.root])


class _Row:
    """Cost facts of one schema; other schemas are named by their place in the order."""

    __slots__ = ("at", "below", "chain", "groups", "here", "keys", "node", "own", "repeat", "work")

    def __init__(self, node: Node, place_by_node: dict[Node, int], matches: Matches) -> None:
        self.node = node
        self.here = [place_by_node[one] for one in node.here]
        groups = {tuple(place_by_node[one] for one in group) for group in _groups(node, matches)}
        self.groups = sorted(groups)
        self.keys = sum(_pattern_units(one) for one in node.below("patternProperties"))
        self.own = _own_units(node)
        self.repeat = 1 + any(
            node.get(word) is not None for word in ("unevaluatedProperties", "unevaluatedItems")
        )
        self.at = self.chain = self.work = 0
        self.below = self.keys


def _over_depth(rows: list[_Row], root: int) -> Cost:
    works = [row.at for row in rows]
    for depth in range(1, DEPTH_MAX + 1):
        later = []
        for row in rows:
            below = 0
            for group in row.groups:
                units = works[group[0]] if len(group) == 1 else sum([works[place] for place in group])
                below = max(below, units)
            below += row.keys
            if row.here:
                below += row.repeat * sum([rows[place].below for place in row.here])
            row.below = min(below, WORK_MAX + 1)
            later.append(max(row.at, row.below))
        if later[root] > WORK_MAX:
            if depth - 1 < RECURSION_DEPTH_MIN:
                raise _too_costly(
                    rows[root].node, f"the work multiplies beyond bounds in {depth} levels of nesting"
                )
            return Cost(depth - 1, works[root])
        if later == works:
            break
        works = later
    return Cost(DEPTH_MAX, works[root])


def _groups(node: Node, matches: Matches) -> list[list[Node]]:
    """Sets of schemas that a schema may apply to one and the same inner value."""
    patterns = node.below("patternProperties")
    rest = list(node.below("unevaluatedProperties").values())
    groups = [
        [child, *rest, *(other for pattern, other in patterns.items() if matches(pattern, name))]
        for name, child in node.below("properties").items()
    ]
    groups += [
        [*rest, *(other for text, other in patterns.items() if not disjoint_patterns(text, pattern))]
        for pattern in patterns
    ]
    groups.append([*rest, *node.below("additionalProperties").values()])
    groups.append(list(node.below("propertyNames").values()))
    every = [*node.below("contains").values(), *node.below("unevaluatedItems").values()]
    items = [*node.below("prefixItems").values(), *node.below("items").values()]
    items += node.below("additionalItems").values()
    groups += [[child, *every] for child in items] or [every]
    return [group for group in groups if group]


def disjoint_patterns(one: str, other: str) -> bool:
    """Whether two patterns begin with texts so different that no name has both."""
    first, second = _beginning(one), _beginning(other)
    return not (first.startswith(second) or second.startswith(first))


def _beginning(pattern: str) -> str:
    found = _LITERAL.match(pattern)
    if found is None or "|" in pattern:
        return ""
    text, behind = found[1], found[2]
    return text[:-1] if behind in "?*+{" and behind else text


def _own_units(node: Node) -> int:
    if node.outside:
        return _OUTSIDE_UNITS
    pattern = node.get("pattern")
    lists: list[Any] = [node.get("required"), *(node.get("dependentRequired") or {}).values()]
    units = 1 + sum(len(names) for names in lists if isinstance(names, list)) // 16
    return units + (_pattern_units(pattern) if isinstance(pattern, str) else 0)


def _pattern_units(pattern: str) -> int:
    counted = "{" in pattern or r"\p" in pattern or r"\P" in pattern or len(pattern) > 64
    return _COUNTED_PATTERN_UNITS if counted else _PLAIN_PATTERN_UNITS


def _check_patterns(nodes: list[Node]) -> None:
    count = 0
    for node in nodes:
        for pattern in [node.get("pattern"), *node.below("patternProperties")]:
            if isinstance(pattern, str):
                count += 1
                if len(pattern.encode()) > PATTERN_BYTES_MAX:
                    raise _too_costly(node, f"a pattern is longer than {PATTERN_BYTES_MAX} bytes")
    if count > PATTERNS_MAX:
        raise _too_costly(nodes[-1], f"it holds {count} patterns, at most {PATTERNS_MAX} are taken")


def _ordered(root: Node) -> list[Node]:
    """Order every schema that validation can reach; those applied to the same value come first."""
    reached: dict[Node, None] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached[node] = None
            waiting.extend(node.references)
            waiting.extend(child for _, _, child in node.children)
    order: list[Node] = []
    state: dict[Node, bool] = {}  # False: on the way down; True: done
    for start in reached:
        path = [(start, iter(start.here))] if start not in state else []
        while path:
            node, others = path[-1]
            state.setdefault(node, False)
            other = next(others, None)
            if other is None:
                state[node] = True
                order.append(node)
                path.pop()
            elif state.get(other) is False:
                raise _too_costly(
                    node, f"it applies itself to the same value without end through {_place(other)}"
                )
            elif other not in state:
                path.append((other, iter(other.here)))
    return order


def _too_costly(node: Node, why: str) -> SchemaInvalid:
    return SchemaInvalid(
        "the definition costs too much to validate with",
        why=f"{_place(node)}: {why}",
        hint="let a schema refer to itself only below properties or items, once for each of them",
    )


def _place(node: Node) -> str:
    return node.pointer or "the root"
