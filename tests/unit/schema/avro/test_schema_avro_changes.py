"""Changes of an Avro schema, each with what it breaks in which direction, by which rule and where.

Backward: the new version reads what the old one wrote.  Forward: the old one reads what the new one
writes.  A row names the expected differences as ``(rule, path)``; an empty list means compatible.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from danube.errors import SchemaInvalid
from danube.schema.avro import kind as avro
from danube.schema.avro.compatibility import differences
from danube.schema.avro.parse import parse
from danube.schema.model import Checks, Compatibility, SchemaType
from danube.schema.verdict import Older, Request, judge

Found = list[tuple[str, str]]

STRICT, UPSTREAM = Checks.STRICT, Checks.UPSTREAM
UNION = ["null", "string"]


def record(*fields: Any, name: str = "R", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any, *default: Any, **more: Any) -> dict[str, Any]:
    found = {"name": name, "type": kind, **more}
    if default:
        found["default"] = default[0]
    return found


def one(kind: Any) -> dict[str, Any]:
    """A record with the one field ``a``."""
    return record(field("a", kind))


def enum(*symbols: str, name: str = "E", **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": name, "symbols": list(symbols), **more}


def fixed(size: int, name: str = "F", **more: Any) -> dict[str, Any]:
    return {"type": "fixed", "name": name, "size": size, **more}


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def mapping(values: Any) -> dict[str, Any]:
    return {"type": "map", "values": values}


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def decimal(precision: int, scale: int = 0) -> dict[str, Any]:
    return logical("bytes", "decimal", precision=precision, scale=scale)


def node(value: Any, *more: Any) -> dict[str, Any]:
    """A list that refers to itself."""
    return record(field("value", value), field("next", ["null", "Node"], None), *more, name="Node")


def tree(leaf: Any) -> dict[str, Any]:
    """A record that refers to itself through an array and another record."""
    inner = record(field("leaf", leaf), field("children", array("Tree")), name="Inner")
    return record(field("inner", inner), name="Tree")


# name: (old, new, backward, forward)
CHANGES: dict[str, tuple[Any, Any, Found, Found]] = {
    # Records and fields
    "the same text": (one("int"), one("int"), [], []),
    "documentation": (one("int"), record(field("a", "int", doc="count"), doc="a record"), [], []),
    "order of fields": (
        record(field("a", "int"), field("b", "string")),
        record(field("b", "string"), field("a", "int")),
        [],
        [],
    ),
    "field added without default": (
        one("int"),
        record(field("a", "int"), field("b", "string")),
        [("field_without_default", "R.b")],
        [],
    ),
    "field added with default": (one("int"), record(field("a", "int"), field("b", "string", "")), [], []),
    "nullable field added without default": (
        one("int"),
        record(field("a", "int"), field("b", UNION)),
        [("field_without_default", "R.b")],
        [],
    ),
    "nullable field added with default": (
        one("int"),
        record(field("a", "int"), field("b", UNION, None)),
        [],
        [],
    ),
    "field removed that had no default": (
        record(field("a", "int"), field("b", "string")),
        one("int"),
        [],
        [("field_without_default", "R.b")],
    ),
    "field removed that had a default": (record(field("a", "int"), field("b", "int", 1)), one("int"), [], []),
    "field renamed": (
        one("int"),
        record(field("b", "int")),
        [("field_without_default", "R.b")],
        [("field_without_default", "R.a")],
    ),
    "field renamed with an alias": (
        one("int"),
        record(field("b", "int", aliases=["a"])),
        [],
        [("field_without_default", "R.a")],
    ),
    "alias names a field that is still written": (
        record(field("a", "int"), field("b", "int")),
        record(field("b", "int", aliases=["a"])),
        [("alias_ambiguous", "R.b")],
        [("field_without_default", "R.a")],
    ),
    "two fields added without default": (
        one("int"),
        record(field("a", "int"), field("b", "int"), field("c", "int")),
        [("field_without_default", "R.b"), ("field_without_default", "R.c")],
        [],
    ),
    "default value changed": (record(field("a", "int", 1)), record(field("a", "int", 2)), [], []),
    "default taken away": (record(field("a", "int", 1)), one("int"), [], []),
    "default given": (one("int"), record(field("a", "int", 1)), [], []),
    "sort order changed": (one("int"), record(field("a", "int", order="ignore")), [], []),
    "record renamed": (
        one("int"),
        record(field("a", "int"), name="S"),
        [("name_changed", "S")],
        [("name_changed", "R")],
    ),
    "record renamed with an alias": (
        one("int"),
        record(field("a", "int"), name="S", aliases=["R"]),
        [],
        [("name_changed", "R")],
    ),
    "record moved into a namespace": (one("int"), record(field("a", "int"), namespace="shop"), [], []),
    "alias of another namespace": (
        record(field("a", "int"), namespace="x"),
        record(field("a", "int"), name="y.S", aliases=["x.R"]),
        [],
        [("name_changed", "R")],
    ),
    "record became an enum": (
        one("int"),
        enum("A", name="R"),
        [("type_changed", "")],
        [("type_changed", "R")],
    ),
    "record became a map": (one("int"), mapping("int"), [("type_changed", "")], [("type_changed", "R")]),
    "inner record gains a field": (
        one(record(field("x", "int"), name="I")),
        one(record(field("x", "int"), field("y", "int"), name="I")),
        [("field_without_default", "R.a.y")],
        [],
    ),
    "inner record renamed": (
        one(record(field("x", "int"), name="I")),
        one(record(field("x", "int"), name="J")),
        [("name_changed", "R.a")],
        [("name_changed", "R.a")],
    ),
    "two fields change in the same way": (
        record(field("a", "int"), field("b", "int")),
        record(field("a", "string"), field("b", "string")),
        [("type_changed", "R.a"), ("type_changed", "R.b")],
        [("type_changed", "R.a"), ("type_changed", "R.b")],
    ),
    "two fields become one and the same record": (
        record(field("a", "int"), field("b", "int")),
        record(field("a", record(name="I")), field("b", "I")),
        [("type_changed", "R.a"), ("type_changed", "R.b")],
        [("type_changed", "R.a"), ("type_changed", "R.b")],
    ),
    "inner record written out a second time": (
        record(field("a", record(field("x", "int"), name="I")), field("b", "I")),
        record(field("a", record(field("x", "long"), name="I")), field("b", "I")),
        [],
        [("type_changed", "R.a.x")],
    ),
    # Promotions
    "int to long": (one("int"), one("long"), [], [("type_changed", "R.a")]),
    "int to float": (one("int"), one("float"), [], [("type_changed", "R.a")]),
    "int to double": (one("int"), one("double"), [], [("type_changed", "R.a")]),
    "long to float": (one("long"), one("float"), [], [("type_changed", "R.a")]),
    "long to double": (one("long"), one("double"), [], [("type_changed", "R.a")]),
    "float to double": (one("float"), one("double"), [], [("type_changed", "R.a")]),
    "string to bytes": (one("string"), one("bytes"), [], []),
    "int to string": (one("int"), one("string"), [("type_changed", "R.a")], [("type_changed", "R.a")]),
    "boolean to int": (one("boolean"), one("int"), [("type_changed", "R.a")], [("type_changed", "R.a")]),
    "null to int": (one("null"), one("int"), [("type_changed", "R.a")], [("type_changed", "R.a")]),
    "type written as an object": (one("int"), one({"type": "int"}), [], []),
    "top level int to long": ("int", "long", [], [("type_changed", "")]),
    "top level int to record": ("int", one("int"), [("type_changed", "R")], [("type_changed", "")]),
    # Enums
    "symbol added": (one(enum("A")), one(enum("A", "B")), [], [("symbol_unread", "R.a")]),
    "symbol removed": (one(enum("A", "B")), one(enum("A")), [("symbol_unread", "R.a")], []),
    "symbol removed with a default": (one(enum("A", "B")), one(enum("A", default="A")), [], []),
    "symbol added where the old one has a default": (
        one(enum("A", default="A")),
        one(enum("A", "B", default="A")),
        [],
        [],
    ),
    "symbols in another order": (one(enum("A", "B")), one(enum("B", "A")), [], []),
    "symbol renamed": (
        one(enum("A", "B")),
        one(enum("A", "C")),
        [("symbol_unread", "R.a")],
        [("symbol_unread", "R.a")],
    ),
    "default of the field is no default of the enum": (
        record(field("a", enum("A", "B"))),
        record(field("a", enum("A"), "A")),
        [("symbol_unread", "R.a")],
        [],
    ),
    "enum renamed": (
        one(enum("A")),
        one(enum("A", name="G")),
        [("name_changed", "R.a")],
        [("name_changed", "R.a")],
    ),
    "enum to string": (one(enum("A")), one("string"), [("type_changed", "R.a")], [("type_changed", "R.a")]),
    # Fixed
    "fixed grows": (one(fixed(4)), one(fixed(8)), [("size_changed", "R.a")], [("size_changed", "R.a")]),
    "fixed renamed": (
        one(fixed(4)),
        one(fixed(4, "G")),
        [("name_changed", "R.a")],
        [("name_changed", "R.a")],
    ),
    "fixed renamed with an alias": (
        one(fixed(4)),
        one(fixed(4, "G", aliases=["F"])),
        [],
        [("name_changed", "R.a")],
    ),
    "fixed to bytes": (one(fixed(4)), one("bytes"), [("type_changed", "R.a")], [("type_changed", "R.a")]),
    # Arrays and maps
    "items widened": (one(array("int")), one(array("long")), [], [("type_changed", "R.a[]")]),
    "items changed": (
        one(array("int")),
        one(array("string")),
        [("type_changed", "R.a[]")],
        [("type_changed", "R.a[]")],
    ),
    "values widened": (one(mapping("float")), one(mapping("double")), [], [("type_changed", "R.a{}")]),
    "values changed": (
        one(mapping("int")),
        one(mapping("boolean")),
        [("type_changed", "R.a{}")],
        [("type_changed", "R.a{}")],
    ),
    "array to map": (
        one(array("int")),
        one(mapping("int")),
        [("type_changed", "R.a")],
        [("type_changed", "R.a")],
    ),
    "one value to an array of them": (
        one("int"),
        one(array("int")),
        [("type_changed", "R.a")],
        [("type_changed", "R.a")],
    ),
    "field added to the record in an array": (
        record(field("items", array(record(field("n", "int"), name="Item"))), name="Order"),
        record(
            field("items", array(record(field("n", "int"), field("price", "double"), name="Item"))),
            name="Order",
        ),
        [("field_without_default", "Order.items[].price")],
        [],
    ),
    "deep inside arrays and maps": (
        one(array(mapping(array(one("int") | {"name": "D"})))),
        one(array(mapping(array(one("string") | {"name": "D"})))),
        [("type_changed", "R.a[]{}[].a")],
        [("type_changed", "R.a[]{}[].a")],
    ),
    # Unions
    "made nullable": (one("string"), one(UNION), [], [("branch_unread", "R.a")]),
    "no longer nullable": (one(UNION), one("string"), [("branch_unread", "R.a")], []),
    "branch added": (one(UNION), one(["null", "string", "int"]), [], [("branch_unread", "R.a")]),
    "branch removed": (one(["null", "string", "int"]), one(UNION), [("branch_unread", "R.a")], []),
    "branches in another order": (one(["null", "string"]), one(["string", "null"]), [], []),
    "branch widened": (one(["null", "int"]), one(["null", "long"]), [], [("branch_unread", "R.a")]),
    "branch replaced": (
        one(["null", "int"]),
        one(["null", "boolean"]),
        [("branch_unread", "R.a")],
        [("branch_unread", "R.a")],
    ),
    "union of one to the type": (one(["int"]), one("int"), [], []),
    "union of numbers to double": (
        one(["int", "long", "float"]),
        one("double"),
        [],
        [("type_changed", "R.a")],
    ),
    "type moves into a union that widens it": (
        one("int"),
        one(["null", "double"]),
        [],
        [("branch_unread", "R.a"), ("branch_unread", "R.a")],
    ),
    "type moves into a union without it": (
        one("boolean"),
        one(UNION),
        [("type_changed", "R.a")],
        [("branch_unread", "R.a"), ("branch_unread", "R.a")],
    ),
    "record in a union gains a field": (
        one(["null", record(field("x", "int"), name="I")]),
        one(["null", record(field("x", "int"), field("y", "int"), name="I")]),
        [("field_without_default", "R.a<I>.y")],
        [],
    ),
    "record in a union renamed": (
        one(["null", record(field("x", "int"), name="I")]),
        one(["null", record(field("x", "int"), name="J")]),
        [("branch_unread", "R.a")],
        [("branch_unread", "R.a")],
    ),
    "second record in a union": (
        [one("int")],
        [one("int"), record(field("b", "int"), name="S")],
        [],
        [("branch_unread", "")],
    ),
    "a branch is chosen by its full name": (
        one([record(field("x", "int"), name="p.I"), record(field("x", "string"), name="q.I")]),
        one([record(field("x", "string"), name="q.I"), record(field("x", "int"), name="p.I")]),
        [],
        [],
    ),
    "array in a union changes its items": (
        one(["null", array("int")]),
        one(["null", array("string")]),
        [("type_changed", "R.a<array>[]")],
        [("type_changed", "R.a<array>[]")],
    ),
    "enum in a union loses a symbol": (
        one(["null", enum("A", "B")]),
        one(["null", enum("A")]),
        [("symbol_unread", "R.a<E>")],
        [],
    ),
    # Logical types
    "precision of a decimal": (
        one(decimal(9, 2)),
        one(decimal(10, 2)),
        [("decimal_changed", "R.a")],
        [("decimal_changed", "R.a")],
    ),
    "scale of a decimal": (
        one(decimal(9, 2)),
        one(decimal(9, 3)),
        [("decimal_changed", "R.a")],
        [("decimal_changed", "R.a")],
    ),
    "scale of a decimal in a fixed": (
        one(fixed(8, logicalType="decimal", precision=9, scale=2)),
        one(fixed(8, logicalType="decimal", precision=9, scale=4)),
        [("decimal_changed", "R.a")],
        [("decimal_changed", "R.a")],
    ),
    "same decimal": (one(decimal(9, 0)), one(logical("bytes", "decimal", precision=9)), [], []),
    "bytes become a decimal": (one("bytes"), one(decimal(9, 2)), [], []),
    "decimal to string": (
        one(decimal(9, 2)),
        one("string"),
        [("logical_type_changed", "R.a")],
        [("logical_type_changed", "R.a")],
    ),
    "milliseconds become microseconds": (
        one(logical("long", "timestamp-millis")),
        one(logical("long", "timestamp-micros")),
        [("logical_type_changed", "R.a")],
        [("logical_type_changed", "R.a")],
    ),
    "instant becomes local time": (
        one(logical("long", "timestamp-millis")),
        one(logical("long", "local-timestamp-millis")),
        [("logical_type_changed", "R.a")],
        [("logical_type_changed", "R.a")],
    ),
    "a long is said to be a timestamp": (one("long"), one(logical("long", "timestamp-millis")), [], []),
    "date to long": (one(logical("int", "date")), one("long"), [], [("type_changed", "R.a")]),
    "date to timestamp": (
        one(logical("int", "date")),
        one(logical("long", "timestamp-millis")),
        [("logical_type_changed", "R.a")],
        [("type_changed", "R.a")],
    ),
    "a string is said to be a uuid": (one("string"), one(logical("string", "uuid")), [], []),
    "an unknown logical type": (one(logical("int", "colour")), one(logical("int", "taste")), [], []),
    "a logical type that does not fit": (one(logical("string", "date")), one("string"), [], []),
    "timestamps in a nullable field": (
        one(["null", logical("long", "timestamp-millis")]),
        one(["null", logical("long", "timestamp-micros")]),
        [("logical_type_changed", "R.a<long>")],
        [("logical_type_changed", "R.a<long>")],
    ),
    # Recursion
    "recursive record unchanged": (node("int"), node("int"), [], []),
    "recursive record widened": (node("int"), node("long"), [], [("type_changed", "Node.value")]),
    "recursive record gains a field": (
        node("int"),
        node("int", field("extra", "int")),
        [("field_without_default", "Node.extra")],
        [],
    ),
    "recursion through other records": (
        tree("int"),
        tree("string"),
        [("type_changed", "Tree.inner.leaf")],
        [("type_changed", "Tree.inner.leaf")],
    ),
    "recursion taken apart": (
        node("int"),
        record(
            field("value", "int"),
            field("next", ["null", record(field("value", "int"), name="x.Node")], None),
            name="Node",
        ),
        [],
        [],
    ),
}


def definition(schema: Any) -> Any:
    return avro.examine(json.dumps(schema).encode())


def found(reader: Any, writer: Any, checks: Checks = STRICT) -> Found:
    every = avro.compare(definition(reader), definition(writer), checks)
    for difference in every:
        assert "the reader" in difference.message and "the writer" in difference.message
        assert difference.hint
        json.dumps([difference.reader, difference.writer])
    return [(difference.rule, difference.path) for difference in every]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_breaks_what_the_table_says(name: str) -> None:
    old, new, backward, forward = CHANGES[name]
    assert found(new, old) == backward, "backward"
    assert found(old, new) == forward, "forward"


def test_the_table_is_long_enough() -> None:
    assert len(CHANGES) >= 60


# name: (old, new, backward, forward), as the broker of the official clients decides
UPSTREAM_CHANGES: dict[str, tuple[Any, Any, Found, Found]] = {
    "record renamed": (
        one("int"),
        record(field("a", "int"), name="S"),
        [("name_changed", "S")],
        [("name_changed", "R")],
    ),
    "alias does not help": (
        one("int"),
        record(field("a", "int"), name="S", aliases=["R"]),
        [("name_changed", "S")],
        [("name_changed", "R")],
    ),
    "namespace is part of the name": (
        one("int"),
        record(field("a", "int"), namespace="x"),
        [("name_changed", "R")],
        [("name_changed", "R")],
    ),
    "field added without default": (
        one("int"),
        record(field("a", "int"), field("b", "int")),
        [("field_without_default", "R.b")],
        [],
    ),
    "field added with default": (one("int"), record(field("a", "int"), field("b", "int", 1)), [], []),
    "nullable field added without default": (
        one("int"),
        record(field("a", "int"), field("b", UNION)),
        [],
        [],
    ),
    "type of a common field is not compared": (one("int"), one("string"), [], []),
    "nested records are not compared": (
        one(record(field("x", "int"), name="I")),
        one(record(field("y", "int"), name="J")),
        [],
        [],
    ),
    "symbol removed": (enum("A", "B"), enum("A"), [("type_changed", "")], [("type_changed", "")]),
    "nothing changed in an enum": (enum("A", "B"), enum("A", "B"), [], []),
    "size of a fixed": (
        {"type": "fixed", "name": "F", "size": 4},
        {"type": "fixed", "name": "F", "size": 8},
        [("type_changed", "")],
        [("type_changed", "")],
    ),
    "items of an array": (array("int"), array("string"), [("type_changed", "[]")], [("type_changed", "[]")]),
    "items of an array are promoted": (array("int"), array("long"), [], [("type_changed", "[]")]),
    "records in an array": (
        array(one("int")),
        array(record(field("a", "int"), field("b", "int"))),
        [("field_without_default", "[].b")],
        [],
    ),
    "values of a map": (
        {"type": "map", "values": "int"},
        {"type": "map", "values": "boolean"},
        [("type_changed", "{}")],
        [("type_changed", "{}")],
    ),
    "int to float": ("int", "float", [("type_changed", "")], [("type_changed", "")]),
    "int to double": ("int", "double", [], [("type_changed", "")]),
    "a logical type was given": (
        "long",
        {"type": "long", "logicalType": "timestamp-millis"},
        [("type_changed", "")],
        [("type_changed", "")],
    ),
    "a union without null does not become optional by its default": (
        one("int"),
        record(field("a", "int"), field("b", ["int", "string"], 1)),
        [("field_without_default", "R.b")],
        [],
    ),
    "unions read everything": (["null", "int"], "string", [], []),
    "int to long": ("int", "long", [], [("type_changed", "")]),
    "string to bytes": ("string", "bytes", [], []),
    "int to string": ("int", "string", [("type_changed", "")], [("type_changed", "")]),
}


@pytest.mark.parametrize("name", UPSTREAM_CHANGES)
def test_upstream_checks_are_as_shallow_as_the_table_says(name: str) -> None:
    old, new, backward, forward = UPSTREAM_CHANGES[name]
    assert found(new, old, UPSTREAM) == backward, "backward"
    assert found(old, new, UPSTREAM) == forward, "forward"


def test_a_violation_speaks_of_old_and_new_in_both_directions() -> None:
    def violations(compatibility: Compatibility) -> list[Any]:
        text = json.dumps(one("string")).encode()
        against = [Older(version=3, definition=definition(one("int")))]
        return judge(
            Request(schema_type=SchemaType.AVRO, text=text, against=against, compatibility=compatibility)
        ).violations

    backward, forward = violations(Compatibility.FULL)
    assert [backward] == violations(Compatibility.BACKWARD) == violations(Compatibility.BACKWARD_TRANSITIVE)
    assert [forward] == violations(Compatibility.FORWARD) == violations(Compatibility.FORWARD_TRANSITIVE)
    assert violations(Compatibility.NONE) == []
    for violation, direction in ((backward, "backward"), (forward, "forward")):
        assert (violation.direction, violation.version) == (direction, 3)
        assert (violation.old, violation.new) == ("int", "string")
        assert (violation.path, violation.rule) == ("R.a", "type_changed")
    assert backward.message == "the new version expects string where version 3 has int"
    assert forward.message == "version 3 expects int where the new version has string"


def test_a_recursive_pair_of_many_phases_ends() -> None:
    """Rings of 15 and 14 records meet in every combination, and each difference is told once."""

    def ring(count: int, leaf: str) -> Any:
        schema: Any = "x0.R"
        for number in reversed(range(count)):
            leaves = (field("leaf", leaf),) if number == 0 else ()
            schema = record(field("a", array(schema)), *leaves, name=f"x{number}.R")
        return schema

    assert found(ring(15, "int"), ring(15, "int")) == []
    missing = found(ring(15, "int"), ring(14, "int"))
    assert {rule for rule, _ in missing} == {"field_without_default"}
    assert len(missing) == 13  # the reader's first record meets each of the writer's 14, and one has the leaf


def test_many_differences_are_cut() -> None:
    old = record(*(field(f"f{number}", "int") for number in range(300)))
    new = record(*(field(f"f{number}", "string") for number in range(300)))
    assert len(found(new, old)) == 100


def test_a_comparison_that_costs_too_much_is_refused() -> None:
    wide = parse(record(*(field(f"f{number}", array("int")) for number in range(300))))
    with pytest.raises(SchemaInvalid, match="costs too much to compare"):
        differences(wide, wide, pairs_max=100)
