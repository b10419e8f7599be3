"""Changes of JSON Schemas and what each of them breaks, read backward and forward."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from danube.schema.json.kind import compare, examine
from danube.schema.json.upstream import BACKWARD_ONLY
from danube.schema.model import Checks, Definition, Difference
from tests.processor_time import processor_time_within


def o(properties: dict[str, Any], /, *required: str, **more: Any) -> dict[str, Any]:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **needed, **more}


TEXT = {"type": "string"}
INT = {"type": "integer"}
NUM = {"type": "number"}
LIST = {"type": "array"}


def kind(word: str, **p: Any) -> dict[str, Any]:
    return o({"kind": {"const": word}, **p}, "kind")


D4 = "http://json-schema.org/draft-04/schema#"
D7 = "http://json-schema.org/draft-07/schema#"
D19 = "https://json-schema.org/draft/2019-09/schema"


def tree(value: Any, extra: Any = None) -> dict[str, Any]:
    return {
        "$ref": "#/$defs/node",
        "$defs": {"node": o({"value": value, "next": {"$ref": "#/$defs/node"}, **(extra or {})})},
    }


# name, older definition, newer definition, what breaks when the newer one reads what the older one wrote
# (backward), and what breaks when the older one reads what the newer one wrote (forward): rule and path.
CHANGES: list[tuple[str, Any, Any, list[str], list[str]]] = [
    ("nothing changed", o({"a": TEXT}), o({"a": TEXT}), [], []),
    (
        "titles, defaults, examples and formats",
        o({"a": TEXT}),
        o(
            {
                "a": {
                    "type": "string",
                    "title": "A",
                    "default": "x",
                    "examples": ["y"],
                    "format": "email",
                    "description": "d",
                }
            },
            title="T",
        ),
        [],
        [],
    ),
    (
        "order of names",
        o({"a": TEXT, "b": INT}, "a", "b"),
        {"required": ["b", "a"], "properties": {"b": INT, "a": TEXT}, "type": "object"},
        [],
        [],
    ),
    ("optional property added", o({"a": TEXT}), o({"a": TEXT, "b": INT}), [], []),
    (
        "required property added",
        o({"a": TEXT}),
        o({"a": TEXT, "b": INT}, "b"),
        ["required_added /properties/b"],
        [],
    ),
    (
        "required property removed",
        o({"a": TEXT, "b": INT}, "b"),
        o({"a": TEXT}),
        [],
        ["required_added /properties/b"],
    ),
    ("optional property removed", o({"a": TEXT, "b": INT}), o({"a": TEXT}), [], []),
    ("property becomes required", o({"a": TEXT}), o({"a": TEXT}, "a"), ["required_added /properties/a"], []),
    (
        "type changed",
        o({"a": TEXT}),
        o({"a": INT}),
        ["type_changed /properties/a"],
        ["type_changed /properties/a"],
    ),
    ("integer becomes number", o({"a": INT}), o({"a": NUM}), [], ["type_narrowed /properties/a"]),
    (
        "type may also be null",
        o({"a": TEXT}),
        o({"a": {"type": ["string", "null"]}}),
        [],
        ["type_narrowed /properties/a"],
    ),
    (
        "type list in another order",
        o({"a": {"type": ["null", "string"]}}),
        o({"a": {"type": ["string", "null"]}}),
        [],
        [],
    ),
    ("type left away", o({"a": TEXT}), o({"a": {}}), [], ["type_narrowed /properties/a"]),
    ("any value becomes none", o({"a": True}), o({"a": False}), ["value_refused /properties/a"], []),
    (
        "nested type changed",
        o({"a": o({"b": o({"c": TEXT})})}),
        o({"a": o({"b": o({"c": INT})})}),
        ["type_changed /properties/a/properties/b/properties/c"],
        ["type_changed /properties/a/properties/b/properties/c"],
    ),
    (
        "name with slash and tilde",
        o({"a/b~c": TEXT}),
        o({"a/b~c": INT}),
        ["type_changed /properties/a~1b~0c"],
        ["type_changed /properties/a~1b~0c"],
    ),
    ("object closed, same properties", o({"a": TEXT}), o({"a": TEXT}, additionalProperties=False), [], []),
    (
        "property added to a closed object",
        o({"a": TEXT}, additionalProperties=False),
        o({"a": TEXT, "b": INT}, additionalProperties=False),
        [],
        ["property_removed /properties/b"],
    ),
    (
        "property added to an object that is open on purpose",
        o({"a": TEXT}, additionalProperties=True),
        o({"a": TEXT, "b": INT}, additionalProperties=True),
        ["type_narrowed /properties/b"],
        [],
    ),
    (
        "property added where others were strings",
        o({"a": TEXT}, additionalProperties=TEXT),
        o({"a": TEXT, "b": INT}, additionalProperties=TEXT),
        ["type_changed /properties/b"],
        ["type_changed /properties/b"],
    ),
    ("free map gets a property", {"type": "object"}, o({"a": INT}), ["type_narrowed /properties/a"], []),
    (
        "free map closed",
        {"type": "object"},
        {"type": "object", "additionalProperties": False},
        ["properties_closed /additionalProperties"],
        [],
    ),
    (
        "values of a map changed",
        {"type": "object", "additionalProperties": TEXT},
        {"type": "object", "additionalProperties": INT},
        ["type_changed /additionalProperties"],
        ["type_changed /additionalProperties"],
    ),
    (
        "open on purpose becomes closed",
        o({"a": TEXT}, additionalProperties=True),
        o({"a": TEXT}, additionalProperties=False),
        ["properties_closed /additionalProperties"],
        [],
    ),
    (
        "pattern of names removed from a closed object",
        {"patternProperties": {"^x": TEXT}, "additionalProperties": False},
        {"patternProperties": {"^y": TEXT}, "additionalProperties": False},
        ["pattern_removed /patternProperties/^x"],
        ["pattern_removed /patternProperties/^y"],
    ),
    (
        "type below a pattern changed",
        {"patternProperties": {"^x": TEXT}},
        {"patternProperties": {"^x": INT}},
        ["type_changed /patternProperties/^x"],
        ["type_changed /patternProperties/^x"],
    ),
    (
        "property falls under a new pattern",
        o({"x1": TEXT}),
        o({"x1": TEXT}, patternProperties={"^x": {"maxLength": 3}}),
        ["max_length_lowered /patternProperties/^x"],
        [],
    ),
    (
        "unevaluated properties closed",
        o({"a": TEXT}, allOf=[o({"b": INT})]),
        o({"a": TEXT}, allOf=[o({"b": INT})], unevaluatedProperties=False),
        [],
        [],
    ),
    (
        "unevaluated properties closed, one left over",
        o({"a": TEXT}, allOf=[o({"b": INT})]),
        o({"a": TEXT}, allOf=[o({"c": INT})], unevaluatedProperties=False),
        ["property_removed /properties/b"],
        [],
    ),
    (
        "a property is listed that unevaluated properties had",
        o({"a": TEXT}, unevaluatedProperties=INT),
        o({"a": TEXT, "b": INT}, unevaluatedProperties=INT),
        [],
        [],
    ),
    (
        "a property is listed with another type than unevaluated properties had",
        o({"a": TEXT}, unevaluatedProperties=INT),
        o({"a": TEXT, "b": TEXT}, unevaluatedProperties=INT),
        ["type_changed /properties/b"],
        ["type_changed /properties/b"],
    ),
    (
        "a property of unevaluated properties is listed below allOf",
        o({"a": TEXT}, unevaluatedProperties=INT),
        o({"a": TEXT}, allOf=[o({"b": INT})], unevaluatedProperties=INT),
        [],
        [],
    ),
    (
        "a property that a branch lists is none of the unevaluated ones",
        o({"a": TEXT}, anyOf=[o({"b": TEXT}), o({"c": INT})], unevaluatedProperties=INT),
        o({"a": TEXT, "b": INT}),
        ["type_changed /properties/b", "type_narrowed /properties/b"],
        [],
    ),
    (
        "a pattern is added for what unevaluated properties had",
        o({"a": TEXT}, unevaluatedProperties=INT),
        o({"a": TEXT}, patternProperties={"^x": INT}, unevaluatedProperties=INT),
        [],
        [],
    ),
    (
        "an item is listed that unevaluated items had",
        {"type": "array", "prefixItems": [INT], "unevaluatedItems": TEXT},
        {"type": "array", "prefixItems": [INT, TEXT], "unevaluatedItems": TEXT},
        [],
        [],
    ),
    (
        "minimum raised",
        {"type": "integer", "minimum": 1},
        {"type": "integer", "minimum": 2},
        ["minimum_raised "],
        [],
    ),
    ("maximum added", NUM, {"type": "number", "maximum": 9.5}, ["maximum_lowered "], []),
    (
        "minimum of an integer written as exclusive",
        {"type": "integer", "minimum": 1},
        {"type": "integer", "exclusiveMinimum": 0},
        [],
        [],
    ),
    (
        "minimum of a number written as exclusive",
        {"type": "number", "minimum": 1},
        {"type": "number", "exclusiveMinimum": 1},
        ["minimum_raised "],
        [],
    ),
    (
        "draft 4 exclusive flag",
        {"$schema": D4, "type": "number", "minimum": 1},
        {"$schema": D4, "type": "number", "minimum": 1, "exclusiveMinimum": True},
        ["minimum_raised "],
        [],
    ),
    (
        "draft 4 to 2020-12, exclusive",
        {"$schema": D4, "type": "number", "minimum": 1, "exclusiveMinimum": True},
        {"type": "number", "exclusiveMinimum": 1},
        [],
        [],
    ),
    (
        "draft 4 integer is no 1.0",
        {"$schema": D4, "type": "integer"},
        {"type": "integer"},
        [],
        ["type_narrowed "],
    ),
    (
        "multiples refined",
        {"type": "integer", "multipleOf": 2},
        {"type": "integer", "multipleOf": 4},
        ["multiple_of_changed "],
        [],
    ),
    (
        "multiples of one half",
        {"type": "number", "multipleOf": 0.5},
        {"type": "number", "multipleOf": 0.25},
        ["multiple_of_changed "],
        ["multiple_of_changed "],
    ),
    ("number with multipleOf 1 becomes integer", {"type": "number", "multipleOf": 1}, INT, [], []),
    (
        "maxLength lowered",
        {"type": "string", "maxLength": 10},
        {"type": "string", "maxLength": 5},
        ["max_length_lowered "],
        [],
    ),
    ("minLength added", TEXT, {"type": "string", "minLength": 1}, ["min_length_raised "], []),
    ("a limit of another type", INT, {"type": "integer", "maxLength": 3}, [], []),
    ("pattern added", TEXT, {"type": "string", "pattern": "^a"}, ["pattern_added "], []),
    (
        "pattern changed",
        {"type": "string", "pattern": "^a"},
        {"type": "string", "pattern": "^ab?"},
        ["pattern_changed "],
        ["pattern_changed "],
    ),
    ("pattern that matches everything", TEXT, {"type": "string", "pattern": ".*"}, [], []),
    (
        "const changed",
        o({"v": {"const": 1}}),
        o({"v": {"const": 2}}),
        ["const_changed /properties/v"],
        ["const_changed /properties/v"],
    ),
    ("const becomes enum", {"const": "a"}, {"enum": ["a", "b"]}, [], ["enum_narrowed "]),
    ("enum grows", {"enum": ["a", "b"]}, {"enum": ["a", "b", "c"]}, [], ["enum_narrowed "]),
    ("enum given to a string", TEXT, {"enum": ["a", "b"]}, ["enum_added "], []),
    ("boolean written as enum", {"type": "boolean"}, {"enum": [True, False]}, [], []),
    (
        "enum fits the new limits",
        {"enum": ["a", "bb"]},
        {"type": "string", "maxLength": 2},
        [],
        ["enum_added "],
    ),
    (
        "enum breaks the new limits",
        {"enum": ["a", "bbb"]},
        {"type": "string", "maxLength": 2},
        ["value_refused "],
        ["enum_added "],
    ),
    (
        "items changed",
        {"type": "array", "items": INT},
        {"type": "array", "items": TEXT},
        ["type_changed /items"],
        ["type_changed /items"],
    ),
    ("items given", LIST, {"type": "array", "items": TEXT}, ["type_narrowed /items"], []),
    (
        "tuple longer",
        {"type": "array", "prefixItems": [INT, TEXT], "items": False},
        {"type": "array", "prefixItems": [INT, TEXT, TEXT], "items": False},
        [],
        ["value_refused /items"],
    ),
    (
        "tuple place changed",
        {"type": "array", "prefixItems": [INT, TEXT]},
        {"type": "array", "prefixItems": [INT, INT]},
        ["type_changed /prefixItems/1"],
        ["type_changed /prefixItems/1"],
    ),
    (
        "draft 7 tuple as 2020-12 tuple",
        {"$schema": D7, "type": "array", "items": [INT, TEXT], "additionalItems": False},
        {"type": "array", "prefixItems": [INT, TEXT], "items": False},
        [],
        [],
    ),
    (
        "maxItems lowered",
        {"type": "array", "maxItems": 5},
        {"type": "array", "maxItems": 3},
        ["max_items_lowered "],
        [],
    ),
    ("items distinct", LIST, {"type": "array", "uniqueItems": True}, ["unique_items_added "], []),
    ("contains added", LIST, {"type": "array", "contains": INT}, ["contains_changed /contains"], []),
    (
        "contains follows from items",
        {"type": "array", "items": INT, "minItems": 1},
        {"type": "array", "items": INT, "contains": NUM},
        [],
        [],
    ),
    (
        "minContains raised",
        {"type": "array", "contains": INT},
        {"type": "array", "contains": INT, "minContains": 2},
        ["contains_changed /contains"],
        [],
    ),
    (
        "unevaluated items closed",
        {"type": "array", "prefixItems": [INT]},
        {"type": "array", "prefixItems": [INT], "unevaluatedItems": False},
        ["value_refused /unevaluatedItems"],
        [],
    ),
    (
        "names limited",
        {"type": "object"},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        ["property_names_changed /propertyNames"],
        [],
    ),
    (
        "listed names keep to the limit",
        o({"a": TEXT, "b": INT}),
        o({"a": TEXT, "b": INT}, propertyNames={"maxLength": 1}),
        [],
        [],
    ),
    (
        "minProperties follows from required",
        o({"a": TEXT}, "a"),
        o({"a": TEXT}, "a", minProperties=1),
        [],
        [],
    ),
    (
        "maxProperties lowered",
        {"type": "object", "maxProperties": 4},
        {"type": "object", "maxProperties": 2},
        ["max_properties_lowered "],
        [],
    ),
    (
        "dependent names added",
        o({"a": TEXT, "b": TEXT}),
        o({"a": TEXT, "b": TEXT}, dependentRequired={"a": ["b"]}),
        ["dependent_required_added /dependentRequired/a"],
        [],
    ),
    (
        "dependencies become dependentRequired",
        {"$schema": D7, "dependencies": {"a": ["b"]}, **o({"a": TEXT, "b": TEXT})},
        o({"a": TEXT, "b": TEXT}, dependentRequired={"a": ["b"]}),
        [],
        [],
    ),
    (
        "dependent schema added",
        o({"a": TEXT, "b": TEXT}),
        o({"a": TEXT, "b": TEXT}, dependentSchemas={"a": o({"b": {"minLength": 2}})}),
        ["min_length_raised /dependentSchemas/a/properties/b"],
        [],
    ),
    (
        "constraint moves into allOf",
        {"type": "string", "minLength": 2},
        {"allOf": [TEXT, {"minLength": 2}]},
        [],
        [],
    ),
    ("allOf grows", {"allOf": [TEXT]}, {"allOf": [TEXT, {"maxLength": 4}]}, ["max_length_lowered "], []),
    (
        "definition moves behind a reference",
        o({"a": o({"b": TEXT})}),
        o({"a": {"$ref": "#/$defs/inner"}}, **{"$defs": {"inner": o({"b": TEXT})}}),
        [],
        [],
    ),
    (
        "definition renamed",
        {"$ref": "#/$defs/a", "$defs": {"a": TEXT}},
        {"$ref": "#/$defs/b", "$defs": {"b": TEXT}},
        [],
        [],
    ),
    (
        "what stands beside $ref counts since 2019-09",
        {"$schema": D7, "$ref": "#/definitions/a", "maxLength": 1, "definitions": {"a": TEXT}},
        {"$schema": D19, "$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": TEXT}},
        ["max_length_lowered "],
        [],
    ),
    ("recursive, same", tree(INT), tree(INT), [], []),
    ("recursive, property added", tree(INT), tree(INT, {"name": TEXT}), [], []),
    (
        "recursive, type widened",
        tree(INT),
        tree(NUM),
        [],
        ["type_narrowed /properties/value", "type_narrowed /properties/next/properties/value"],
    ),
    (
        "nullable by anyOf becomes a type list",
        {"anyOf": [TEXT, {"type": "null"}]},
        {"type": ["string", "null"]},
        [],
        [],
    ),
    (
        "alternative added",
        {"anyOf": [TEXT, INT]},
        {"anyOf": [TEXT, INT, {"type": "null"}]},
        [],
        ["any_of_narrowed /anyOf"],
    ),
    ("alternatives in another order", {"anyOf": [TEXT, INT]}, {"anyOf": [INT, TEXT]}, [], []),
    (
        "change inside an alternative",
        {"anyOf": [o({"a": TEXT}), {"type": "null"}]},
        {"anyOf": [o({"a": INT}), {"type": "null"}]},
        ["type_changed /anyOf/0/properties/a"],
        ["type_changed /anyOf/0/properties/a"],
    ),
    (
        "tagged alternative added",
        {"oneOf": [kind("a"), kind("b")]},
        {"oneOf": [kind("a"), kind("b"), kind("c")]},
        [],
        ["one_of_narrowed /oneOf"],
    ),
    (
        "tagged alternative changed",
        {"oneOf": [kind("a", x=TEXT), kind("b")]},
        {"oneOf": [kind("a", x=INT), kind("b")]},
        ["type_changed /oneOf/0/properties/x"],
        ["type_changed /oneOf/0/properties/x"],
    ),
    ("oneOf becomes anyOf", {"oneOf": [TEXT, INT]}, {"anyOf": [TEXT, INT]}, [], []),
    (
        "oneOf of overlapping alternatives",
        {"anyOf": [{"maxLength": 3}, {"minLength": 2}]},
        {"oneOf": [{"maxLength": 3}, {"minLength": 2}]},
        ["one_of_not_exclusive /oneOf"],
        [],
    ),
    (
        "oneOf in another order",
        {"oneOf": [{"maxLength": 3}, {"minLength": 2}]},
        {"oneOf": [{"minLength": 2}, {"maxLength": 3}]},
        [],
        [],
    ),
    (
        "not added",
        {"type": ["string", "integer"]},
        {"type": ["string", "integer"], "not": TEXT},
        ["not_changed /not"],
        [],
    ),
    (
        "not refuses less",
        {"type": "string", "not": {"enum": ["a", "b"]}},
        {"type": "string", "not": {"enum": ["a"]}},
        [],
        ["not_changed /not"],
    ),
    (
        "if and then added",
        o({"a": TEXT, "b": TEXT}),
        o({"a": TEXT, "b": TEXT}, **{"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
        ["required_added /then/properties/b"],
        [],
    ),
    (
        "then tightened",
        {
            "if": o({"a": {"const": 1}}, "a"),
            "then": {"required": ["b"]},
            **o({"a": INT, "b": TEXT, "c": TEXT}),
        },
        {
            "if": o({"a": {"const": 1}}, "a"),
            "then": {"required": ["b", "c"]},
            **o({"a": INT, "b": TEXT, "c": TEXT}),
        },
        ["required_added /then/properties/c"],
        [],
    ),
    ("impossible writer", {"allOf": [TEXT, INT]}, {"type": "null"}, [], ["type_changed "]),
    ("definition becomes true", TEXT, True, [], ["type_narrowed "]),
    (
        "draft 7 media type asserted",
        {"$schema": D7, "type": "string"},
        {"$schema": D7, "type": "string", "contentMediaType": "application/json"},
        ["content_changed "],
        [],
    ),
    (
        "meta-schema kept",
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        [],
        [],
    ),
    (
        "held against a meta-schema",
        {"type": "object"},
        {"type": "object", "$ref": "https://json-schema.org/draft/2020-12/schema"},
        ["cannot_decide "],
        [],
    ),
]

# The broker that the official clients were written for sees the top level only.
UPSTREAM: list[tuple[str, Any, Any, list[str], list[str]]] = [
    ("nothing changed", o({"a": TEXT}), o({"a": TEXT}), [], []),
    ("only const changed", o({"v": {"const": 1}}), o({"v": {"const": 2}}), [], []),
    (
        "required property removed",
        o({"a": TEXT, "b": INT}, "b"),
        o({"a": TEXT}),
        ["required_removed /properties/b"],
        [],
    ),
    ("optional property removed", o({"a": TEXT, "b": INT}), o({"a": TEXT}), [], []),
    (
        "optional property becomes required",
        o({"a": TEXT}),
        o({"a": TEXT}, "a"),
        ["required_added /properties/a"],
        [],
    ),
    ("required property becomes optional", o({"a": TEXT}, "a"), o({"a": TEXT}), [], []),
    (
        "required property added",
        o({"a": TEXT}),
        o({"a": TEXT, "b": INT}, "b"),
        [],
        ["required_removed /properties/b"],
    ),
    ("optional property added", o({"a": TEXT}), o({"a": TEXT, "b": INT}), [], []),
    (
        "type changed",
        o({"a": INT}),
        o({"a": NUM}),
        ["type_changed /properties/a"],
        ["type_changed /properties/a"],
    ),
    (
        "type given",
        o({"a": {}}),
        o({"a": NUM}),
        [],
        [],
    ),
    ("type changed below", o({"a": o({"b": TEXT})}), o({"a": o({"b": INT})}), [], []),
    ("closed", o({"a": TEXT}), o({}, additionalProperties=False), [], []),
    ("true and false", True, False, [], []),
]


def definition(value: Any) -> Definition:
    return examine(json.dumps(value).encode())


def words(found: list[Difference]) -> list[str]:
    return list(dict.fromkeys(f"{one.rule} {one.path}" for one in found))


@pytest.mark.parametrize("change", CHANGES, ids=[change[0] for change in CHANGES])
def test_strict_checks_name_the_rule_and_the_path(change: tuple[str, Any, Any, list[str], list[str]]) -> None:
    _, old, new, backward, forward = change
    one_way = compare(definition(new), definition(old), Checks.STRICT)
    other_way = compare(definition(old), definition(new), Checks.STRICT)
    assert (words(one_way), words(other_way)) == (backward, forward)
    for one in one_way + other_way:
        assert one.message[0].islower() or one.message[0] == "`"
        assert one.path == "" or one.path.startswith("/")
        json.dumps([one.reader, one.writer], allow_nan=False)


@pytest.mark.parametrize("change", CHANGES, ids=[change[0] for change in CHANGES])
def test_every_definition_reads_what_it_wrote(change: tuple[str, Any, Any, list[str], list[str]]) -> None:
    for value in change[1:3]:
        assert compare(definition(value), definition(value), Checks.STRICT) == []


@pytest.mark.parametrize("change", UPSTREAM, ids=[change[0] for change in UPSTREAM])
def test_upstream_checks_see_the_top_level_only(change: tuple[str, Any, Any, list[str], list[str]]) -> None:
    _, old, new, backward, forward = change
    assert words(compare(definition(new), definition(old), Checks.UPSTREAM)) == backward
    found = compare(definition(old), definition(new), Checks.UPSTREAM)
    assert words([one for one in found if one.rule not in BACKWARD_ONLY]) == forward


def test_a_difference_says_what_stands_on_each_side() -> None:
    old, new = o({"age": {"type": "integer", "minimum": 0}}), o({"age": {"type": "integer", "minimum": 18}})
    (found,) = compare(definition(new), definition(old), Checks.STRICT)
    assert (found.path, found.rule, found.reader, found.writer) == (
        "/properties/age",
        "minimum_raised",
        18,
        0,
    )
    assert found.message == "the reader's minimum is 18, the writer's is 0"
    assert found.hint == "keep the wider range"


def test_large_values_are_shortened() -> None:
    old, new = {"enum": ["x" * 300]}, {"enum": ["y" * 300]}
    (found,) = compare(definition(new), definition(old), Checks.STRICT)
    assert found.rule == "const_changed"
    assert len(found.writer) == 201
    assert len(found.message) < 300


def linked(count: int, leaf: Any) -> dict[str, Any]:
    """A chain of objects, each behind a reference of its own."""
    inner = {f"d{one}": o({"next": {"$ref": f"#/$defs/d{one + 1}"}}) for one in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**inner, f"d{count}": leaf}}


def tangled(word: str, count: int) -> dict[str, Any]:
    """Alternatives in one place that could be combined in too many ways."""
    choices = [{"anyOf": [o({f"p{one}": {word: two}}) for two in range(4)]} for one in range(count)]
    return {"allOf": choices}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (linked(40, TEXT), linked(40, INT)),
        (linked(400, TEXT), linked(400, INT)),
        (tangled("minimum", 30), tangled("maximum", 30)),
        (tangled("minimum", 300), tangled("maximum", 300)),
        (o({f"a{one}": TEXT for one in range(2000)}), o({f"a{one}": INT for one in range(2000)})),
        ({"enum": list(range(5000))}, {"enum": list(range(1, 5000))}),
        (o({"a": {"oneOf": [kind(f"k{one}", v=TEXT) for one in range(40)]}}),
         o({"a": {"oneOf": [kind(f"k{one}", v=INT) for one in range(40)]}})),
    ],
)  # fmt: skip
def test_the_work_of_a_comparison_is_bounded(old: Any, new: Any) -> None:
    one, two = definition(old), definition(new)
    with processor_time_within(2):
        found = compare(two, one, Checks.STRICT)
    assert 1 <= len(found) <= 100


@pytest.mark.parametrize(
    ("old", "new"),
    [(linked(1500, INT), linked(1500, TEXT)), (tangled("minimum", 300), tangled("maximum", 300))],
    ids=["too long a chain", "too many combinations"],
)
def test_what_takes_too_many_steps_is_not_called_compatible(old: Any, new: Any) -> None:
    frames = sys.getrecursionlimit()
    (found,) = compare(definition(new), definition(old), Checks.STRICT)
    assert found.rule == "cannot_decide"
    assert found.hint
    assert sys.getrecursionlimit() == frames
