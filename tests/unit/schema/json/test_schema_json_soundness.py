"""What the comparison calls compatible really is: random schemas, their relatives, and values of theirs."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from danube.errors import SchemaInvalid
from danube.schema.json.dialect import draft_of
from danube.schema.json.document import Document
from danube.schema.json.kind import compare, examine, validator
from danube.schema.model import Checks, Definition
from tests.examples import examples
from tests.unit.json_schemas import Maker, written

DRAFTS = [20, 20, 20, 19, 7, 6, 4]
SEEDS = st.integers(min_value=0, max_value=2**32)


def examined(value: Any) -> Definition | None:
    """The definition, or None when it is one of those that are refused."""
    try:
        return examine(json.dumps(value).encode())
    except SchemaInvalid:
        return None


def refused_value(seed: int, tries: int = 30) -> tuple[str, list[str], Any]:
    """Makes two definitions; returns the verdict, its rules, and a value that the writer allows alone."""
    random = Random(seed)
    maker = Maker(random, random.choice(DRAFTS))
    value = maker.document()
    writer = examined(value)
    reader = examined(maker.relative(value) if random.random() < 0.85 else maker.document())
    if writer is None or reader is None:
        return "refused", [], None
    found = compare(reader, writer, Checks.STRICT)
    verdict = "incompatible" if found else "compatible"
    allows, reads, root = validator(writer), validator(reader), Document(value, draft_of(value)).root
    for _ in range(tries):
        one = maker.value(value, value)
        payload = json.dumps(one).encode()
        if allows(payload) is None and written(one, [root]) and reads(payload) is not None:
            return verdict, [difference.rule for difference in found], one
    return verdict, [difference.rule for difference in found], None


@given(SEEDS)
@settings(max_examples=examples(400), deadline=None)
def test_compatible_means_that_no_value_is_refused(seed: int) -> None:
    verdict, _, value = refused_value(seed)
    assert verdict != "compatible" or value is None, value


def test_the_random_schemas_reach_both_verdicts_and_most_rules() -> None:
    seen: dict[str, int] = {}
    rules: set[str] = set()
    confirmed = 0
    for seed in range(400):
        verdict, found, value = refused_value(seed, tries=15)
        seen[verdict] = seen.get(verdict, 0) + 1
        rules.update(found)
        confirmed += verdict == "incompatible" and value is not None
    assert seen["compatible"] > 150
    assert seen["incompatible"] > 60
    assert confirmed > 25
    assert len(rules) >= 15, rules


@given(SEEDS)
@settings(max_examples=examples(150), deadline=None)
def test_every_definition_is_compatible_with_itself(seed: int) -> None:
    random = Random(seed)
    one = examined(Maker(random, random.choice(DRAFTS)).document())
    if one is not None:
        assert compare(one, one, Checks.STRICT) == []


@given(SEEDS)
@settings(max_examples=examples(100), deadline=None)
def test_upstream_checks_take_any_two_definitions(seed: int) -> None:
    random = Random(seed)
    maker = Maker(random, random.choice(DRAFTS))
    one, two = examined(maker.document()), examined(maker.document())
    if one is not None and two is not None:
        rules = {difference.rule for difference in compare(one, two, Checks.UPSTREAM)}
        assert rules <= {"required_removed", "required_added", "type_changed"}
