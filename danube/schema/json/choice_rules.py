"""The rules for alternatives: anyOf, oneOf, not, if; and when two schemas have no value in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube.schema.json.document import Node
from danube.schema.json.shape import NUMBERS, Shape, Together, difference, distinct, under
from danube.schema.model import Difference

if TYPE_CHECKING:
    from danube.schema.json.comparison import Comparison

DISJOINT_DEPTH_MAX = 4
"""How many levels of properties are searched for something that tells two schemas apart."""


def choice_rules(comparison: Comparison, writer: Together, shape: Shape) -> list[Difference]:
    """Why none, or not exactly the right ones, of the reader's alternatives may take the value."""
    found: list[Difference] = []
    branches = list(shape.below("anyOf").values())
    if branches:
        found += _any_of(comparison, writer, branches)
    branches = list(shape.below("oneOf").values())
    if branches and not any(
        _same_branches(comparison, list(one.below("oneOf").values()), branches) for one in writer.shapes
    ):
        found += _one_of(comparison, writer, branches)
    refused = shape.below("not").get("")
    if refused is not None and not _excluded(comparison, writer, refused):
        found.append(
            difference(
                "not_changed",
                refused,
                None,
                "the reader refuses a schema that the writer may keep to",
                "leave `not` as it is, or refuse less",
                path="/not",
            )
        )
    condition = shape.below("if").get("")
    if condition is not None:
        found += _condition(comparison, writer, shape, condition)
    return found


def _any_of(comparison: Comparison, writer: Together, branches: list[Node]) -> list[Difference]:
    comparison.step(10)
    if any(comparison.holds(writer, branch) for branch in branches):
        return []
    groups = writer.groups()
    if len(groups) > 1:
        parts = [writer.plus([comparison.assumed(kinds=group)]) for group in groups]
        found = [one for part in parts for one in _any_of(comparison, part, branches)]
        return distinct(found)
    return _no_branch(comparison, writer, branches, "anyOf", "any_of_narrowed")


def _one_of(comparison: Comparison, writer: Together, branches: list[Node]) -> list[Difference]:
    comparison.step(10)
    taking = [branch for branch in branches if comparison.holds(writer, branch)]
    for branch in taking:
        if all(_excluded(comparison, writer, other) for other in branches if other is not branch):
            return []
    groups = writer.groups()
    if len(groups) > 1:
        parts = [writer.plus([comparison.assumed(kinds=group)]) for group in groups]
        return distinct([one for part in parts for one in _one_of(comparison, part, branches)])
    if taking:
        return [
            difference(
                "one_of_not_exclusive",
                len(branches),
                1,
                "a value may keep to several of the reader's alternatives, and one is asked for",
                "tell the alternatives apart by a const property, or use anyOf",
                path="/oneOf",
            )
        ]
    return _no_branch(comparison, writer, branches, "oneOf", "one_of_narrowed")


def _no_branch(
    comparison: Comparison, writer: Together, branches: list[Node], keyword: str, rule: str
) -> list[Difference]:
    near = [
        (place, branch)
        for place, branch in enumerate(branches)
        if comparison.together([branch]).kinds & writer.kinds and not _excluded(comparison, writer, branch)
    ]
    if len(near) == 1:
        place, branch = near[0]
        return under(f"/{keyword}/{place}", comparison.differences(writer, branch))
    first = next((shape.node for shape in writer.shapes if shape.node is not None), None)
    return [
        difference(
            rule,
            len(branches),
            first,
            "no alternative of the reader takes all that the writer may write",
            "keep every alternative that is still written",
            path=f"/{keyword}",
        )
    ]


def _condition(comparison: Comparison, writer: Together, shape: Shape, condition: Node) -> list[Difference]:
    found: list[Difference] = []
    alike = [
        one for one in writer.shapes for node in one.below("if").values() if comparison.same(node, condition)
    ]
    then, otherwise = shape.below("then").get(""), shape.below("else").get("")
    if then is not None and not _excluded(comparison, writer, condition):
        theirs = [condition, *(node for one in alike for node in one.below("then").values())]
        found += under("/then", comparison.differences(writer.plus(comparison.shapes(theirs)), then))
    if otherwise is not None and not comparison.holds(writer, condition):
        theirs = [node for one in alike for node in one.below("else").values()]
        case = writer.plus([*comparison.shapes(theirs), comparison.assumed(excluded=condition)])
        found += under("/else", comparison.differences(case, otherwise))
    return found


def _excluded(comparison: Comparison, writer: Together, node: Node) -> bool:
    """Whether no value of the writer keeps to a schema, for certain."""
    for shape in writer.shapes:
        known = [*shape.below("not").values(), *([shape.excluded] if shape.excluded is not None else [])]
        if any(comparison.same(node, one) or comparison.unlisted_within([node], one) for one in known):
            return True
    return disjoint(comparison, writer, comparison.together([node], listed=False), DISJOINT_DEPTH_MAX)


def disjoint(comparison: Comparison, one: Together, other: Together, depth: int) -> bool:
    """Whether two sets of schemas certainly have no value in common."""
    comparison.step(10)
    common = one.kinds & other.kinds
    if not common:
        return True
    for given, schemas in ((one, other), (other, one)):
        if given.values is not None and all(
            any(
                not comparison.accepts(shape.node, value)
                for shape in schemas.shapes
                if shape.node is not None
            )
            for value in given.values
        ):
            return True
    if common <= NUMBERS:
        return _apart(one, other) or _apart(other, one)
    if common == {"object"}:
        return _told_apart(comparison, one, other, depth)
    return False


def _apart(low: Together, high: Together) -> bool:
    tops = [bound for bound in (shape.upper() for shape in low.shapes) if bound is not None]
    bottoms = [bound for bound in (shape.lower() for shape in high.shapes) if bound is not None]
    return any(
        top[0] < bottom[0] or (top[0] == bottom[0] and (top[1] or bottom[1]))
        for top in tops
        for bottom in bottoms
    )


def _told_apart(comparison: Comparison, one: Together, other: Together, depth: int) -> bool:
    """A property that one requires and the other never has, or that has no value in common."""
    if any(not one.may_write(name) for name in other.required):
        return True
    if any(not other.may_write(name) for name in one.required):
        return True
    if not depth:
        return False
    for name in sorted(one.required | other.required):
        mine = comparison.inner(one, one.property(name))
        theirs = comparison.inner(other, other.property(name))
        if disjoint(comparison, mine, theirs, depth - 1):
            return True
    return False


def _same_branches(comparison: Comparison, mine: list[Node], theirs: list[Node]) -> bool:
    """Whether two lists of alternatives are the same but for their order."""
    left = list(theirs)
    for branch in mine:
        found = next((one for one in left if comparison.same(branch, one)), None)
        if found is None:
            return False
        left.remove(found)
    return not left
