"""Each row of the table of Protobuf changes gets its verdict, its path, and a sentence that helps."""

from __future__ import annotations

import pytest

from danube.schema import kinds
from danube.schema.model import Checks, Definition, Difference, SchemaType
from danube.schema.protobuf import kind as protobuf
from tests.unit.schema_protobuf_changes import CHANGES, Broken, Change


def definition(body: str) -> Definition:
    head = "" if body.startswith(("syntax", "edition")) else 'syntax = "proto3"; '
    return kinds.examine(SchemaType.PROTOBUF, (head + body).encode())


def places(found: list[Difference]) -> Broken:
    return [(one.path, one.rule) for one in found]


def test_the_table_is_long_and_names_every_row_once() -> None:
    names = [change.name for change in CHANGES]
    assert len(names) == len(set(names)) >= 90


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_change(change: Change) -> None:
    old, new = definition(change.old), definition(change.new)
    backward = kinds.compare(new, old, Checks.STRICT)
    forward = kinds.compare(old, new, Checks.STRICT)
    freed = protobuf.evolution(new, old, Checks.STRICT)
    assert places(backward) == change.backward
    assert places(forward) == change.forward
    assert [one for one in places(freed) if one not in change.freed] == []
    assert places(freed) == change.freed
    for difference in backward + forward + freed:
        assert difference.message and difference.hint
        assert "Any" not in difference.message
        assert difference.reader is not None or difference.writer is not None


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_upstream_checks_take_every_change(change: Change) -> None:
    old, new = definition(change.old), definition(change.new)
    assert kinds.compare(new, old, Checks.UPSTREAM) == []
    assert protobuf.evolution(new, old, Checks.UPSTREAM) == []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_definition_reads_itself(change: Change) -> None:
    for body in (change.old, change.new):
        one = definition(body)
        assert kinds.compare(one, one, Checks.STRICT) == []
        assert protobuf.evolution(one, one, Checks.STRICT) == []


def test_values_of_both_sides_are_shown() -> None:
    old = definition("message M { map<string, int32> a = 1; repeated int32 b = 2; int32 c = 3; }")
    new = definition("message M { string a = 1; int32 b = 2; string d = 3; }")
    found = {one.path: one for one in kinds.compare(new, old, Checks.STRICT)}
    assert (found["M.a"].reader, found["M.a"].writer) == ("string", "map<string, int32>")
    assert (found["M.b"].reader, found["M.b"].writer) == ("int32", "repeated int32")
    assert (found["M.d"].reader, found["M.d"].writer) == ("string d", "int32 c")
