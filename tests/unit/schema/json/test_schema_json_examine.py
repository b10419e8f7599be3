"""Definitions in JSON Schema: what is taken, what is refused and why, and how long a bomb may burn."""

from __future__ import annotations

import hashlib
import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.errors import SchemaInvalid
from danube.schema.json.cost import BUDGET, RECURSION_DEPTH_MIN, WORK_MAX, Cost
from danube.schema.json.kind import examine, validator
from danube.schema.limited import door as limited
from danube.schema.limited.child import CPU_SECONDS
from danube.schema.limited.door import Request
from danube.schema.model import SchemaType
from tests.processor_time import processor_time_within

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_6 = "http://json-schema.org/draft-06/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"


def text(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def cost(value: Any) -> Cost:
    import msgspec

    return msgspec.json.decode(examine(text(value)).compiled, type=Cost)


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """The first use builds the meta-schemas; it is not what the limits of time below are about."""
    for draft in (DRAFT_4, DRAFT_6, DRAFT_7, DRAFT_2019, DRAFT_2020):
        examine(text({"$schema": draft, "pattern": "a"}))


TAKEN: dict[str, Any] = {
    "true": True,
    "false": False,
    "empty": {},
    "draft 4": {"$schema": DRAFT_4, "minimum": 1, "exclusiveMinimum": True},
    "draft 6": {"$schema": DRAFT_6, "const": 1},
    "draft 7": {"$schema": DRAFT_7, "if": {"type": "string"}, "then": {"minLength": 1}},
    "draft 2019-09": {"$schema": DRAFT_2019, "$recursiveAnchor": True, "items": {"$recursiveRef": "#"}},
    "draft 2020-12": {"$schema": DRAFT_2020, "$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}},
    "https for http": {"$schema": "https://json-schema.org/draft-07/schema"},
    "a pointer": {"$ref": "#/$defs/a%20b~1c", "$defs": {"a b/c": {"type": "string"}}},
    "a pointer of draft 7 into $defs": {"$schema": DRAFT_7, "$defs": {"a": {}}, "$ref": "#/$defs/a"},
    "an anchor": {"$ref": "#here", "$defs": {"a": {"$anchor": "here"}}},
    "an anchor of draft 7": {
        "$schema": DRAFT_7,
        "items": {"$ref": "#a"},
        "definitions": {"x": {"$id": "#a"}},
    },
    "an inner $id": {"$id": "urn:a:b", "items": {"$ref": "urn:c"}, "$defs": {"q": {"$id": "urn:c"}}},
    "a relative $id": {"$id": "http://h/a/b", "items": {"$ref": "d"}, "$defs": {"q": {"$id": "d"}}},
    "a place of one's own": {"$ref": "#/components/x", "components": {"x": {"type": "string"}}},
    "a meta-schema": {"$ref": DRAFT_2020},
    "the meta-schema of draft 7": {"$schema": DRAFT_7, "items": {"$ref": DRAFT_7}},
    "a tree": {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}},
    "64 levels": b'{"items":' * 63 + b"{}" + b"}" * 63,
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    definition = examine(text(TAKEN[name]))
    assert definition.schema_type is SchemaType.JSON_SCHEMA
    assert definition.text == text(TAKEN[name])
    assert definition.fingerprint.startswith("sha256:")
    validator(definition)(b'{"left": {}}')


REFUSED: dict[str, tuple[Any, str]] = {
    "not JSON": (b'{"type": "string"', "line 1"),
    "a name twice": (b'{"type": "string", "type": "null"}', "'type' stands twice"),
    "a list": ([], "neither an object nor true or false"),
    "a number": (b"1", "neither an object nor true or false"),
    "an unknown draft": ({"$schema": "http://example.com/mine"}, "/$schema names 'http://example.com/mine'"),
    "a draft that is no text": ({"$schema": 7}, "/$schema names '7'"),
    "against the meta-schema": ({"properties": {"a": {"type": "text"}}}, '/properties/a/type: "text" is not'),
    "a boolean in draft 4": ({"$schema": DRAFT_4, "properties": {"a": True}}, "/properties/a: true is not"),
    "two drafts": ({"$defs": {"a": {"$schema": DRAFT_4}}}, "/$defs/a/$schema differs"),
    "a remote reference": ({"$ref": "http://example.com/x.json"}, "nothing is ever fetched"),
    "a file": ({"items": {"$ref": "file:///etc/passwd"}}, "/items/$ref leads to 'file:///etc/passwd'"),
    "a relative file": ({"$ref": "other.json"}, "nothing is ever fetched"),
    "relative to $id": ({"$id": "http://h/a", "items": {"$ref": "b#/c"}}, "leads to 'http://h/b'"),
    "a dangling pointer": ({"$ref": "#/$defs/x"}, "/$ref is '#/$defs/x'"),
    "a pointer through a list": ({"enum": [{}], "$ref": "#/enum/1"}, "/$ref is '#/enum/1'"),
    "a pointer to a number": ({"x": 3, "$ref": "#/x"}, "/$ref is '#/x'"),
    "a dangling anchor": ({"$ref": "#x"}, "/$ref is '#x'"),
    "a target that is no schema": ({"$ref": "#/x", "x": {"type": "text"}}, '/x/type: "text" is not'),
    "a target with a name": ({"$ref": "#/x", "x": {"$id": "urn:x"}}, "/x has an identity of its own"),
    "the same $id twice": ({"$defs": {"a": {"$id": "urn:x"}, "b": {"$id": "urn:x"}}}, "are both 'urn:x'"),
    "a dynamic reference among resources": (
        {"$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}, "$defs": {"a": {"$id": "urn:x"}}},
        "/items/$dynamicRef stands in a document of several resources",
    ),
    "a dynamic anchor and a meta-schema": (
        {"$dynamicAnchor": "n", "$ref": DRAFT_2020},
        "leads to a meta-schema",
    ),
    "look-ahead": ({"pattern": "(?=a)b"}, "cannot run in linear time"),
    "look-behind of a name": ({"items": {"patternProperties": {"(?<!a)b": {}}}}, "/items/patternProperties"),
    "a back reference": ({"items": {"pattern": r"(a)\1"}}, "/items/pattern"),
    "a broken pattern": ({"pattern": "("}, "/pattern"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str) -> None:
    value, why = REFUSED[name]
    with pytest.raises(SchemaInvalid) as caught:
        examine(text(value))
    assert why in str(caught.value)


def doubling(count: int) -> dict[str, Any]:
    defs = {f"a{one}": {"allOf": [{"$ref": f"#/$defs/a{one + 1}"}] * 2} for one in range(count)}
    return {"$defs": {**defs, f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def alternatives(count: int) -> dict[str, Any]:
    return {
        "anyOf": [{"properties": {"kind": {"const": one}, "next": {"$ref": "#"}}} for one in range(count)]
    }


BOMBS: dict[str, tuple[Any, str]] = {
    "a reference to itself": ({"$ref": "#"}, "without end"),
    "allOf itself": ({"allOf": [{"$ref": "#"}]}, "without end"),
    "not itself": ({"not": {"$ref": "#"}}, "without end"),
    "itself as a dependency": ({"dependentSchemas": {"a": {"$ref": "#"}}}, "without end"),
    "a circle of two": (
        {
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"if": {"$ref": "#/$defs/a"}}},
            "$ref": "#/$defs/a",
        },
        "without end",
    ),
    "references that double 2^30 times": (doubling(30), "more than 65,536 schemas"),
    "references that double 2^60 times": (doubling(60), "65,536 schemas"),
    "a chain of references": (
        {
            "$defs": {f"a{one}": {"$ref": f"#/$defs/a{one + 1}"} for one in range(99)} | {"a99": {}},
            "$ref": "#/$defs/a0",
        },
        "more than 64 schemas in a chain",
    ),
    "alternatives that all recurse": (alternatives(20), "multiplies beyond bounds"),
    "a hundred thousand levels": (b'{"items":' * 100_000, "nests deeper than 64 levels"),
    "65 levels": (b'{"items":' * 64 + b"{}" + b"}" * 64, "nests deeper than 64 levels"),
    "a million digits": (b'{"maximum": ' + b"9" * 1_000_000 + b"}", "digits"),
    "NaN": (b'{"maximum": NaN}', "NaN"),
    "eleven thousand schemas": ({"properties": {f"a{one}": {} for one in range(11_000)}}, "more than 10,000"),
    "an automaton of a million states": ({"pattern": "(a{1000}){1000}"}, "little memory"),
    # A class alone is counted without an automaton by newer validators; this group needs one.
    "a counted group of classes": ({"pattern": r"^(\p{L}\p{N}|\p{N}x){1,1000}$"}, "little memory"),
    "a long pattern": ({"pattern": "a" * 5000}, "longer than 4096 bytes"),
    "many patterns": (
        {"properties": {f"a{one}": {"pattern": f"{one}"} for one in range(300)}},
        "300 patterns",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(name: str) -> None:
    value, why = BOMBS[name]
    definition = text(value)
    with (
        processor_time_within(CPU_SECONDS / (1 if "thousand" in name else 5)),
        pytest.raises(SchemaInvalid) as caught,
    ):
        examine(definition)
    assert why in str(caught.value)


HEAVY: dict[str, Any] = {
    "ten thousand schemas": {"properties": {f"a{one}": {} for one in range(9_900)}},
    "a large enum": {"enum": list(range(38_000))},
    "many required names": {"required": [f"a{one}" for one in range(20_000)]},
    "250 counted patterns": {
        "properties": {f"a{one}": {"pattern": f"^[a-z]{{1,400}}{one}$"} for one in range(250)}
    },
    "a web of references": {
        "$ref": "#/$defs/a0",
        "$defs": {
            f"a{one}": {
                "properties": {f"p{two}": {"$ref": f"#/$defs/a{(one * 7 + two) % 500}"} for two in range(8)}
            }
            for one in range(500)
        },
    },
    "work that grows level by level": {
        "$ref": "#/$defs/z",
        "$defs": {
            **{
                f"a{one}": {"allOf": [{"properties": {"p": {"$ref": f"#/$defs/a{(one + 1) % 2400}"}}}]}
                for one in range(2400)
            },
            "z": {
                "anyOf": [
                    {"properties": {"p": {"$ref": "#/$defs/z"}}},
                    {"properties": {"p": {"$ref": "#/$defs/a0"}}},
                ]
            },
        },
    },
}


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_definitions_are_taken_within_the_limit(name: str) -> None:
    """Asked of the limited child: there a limit of processor time holds, and no other test's heap counts."""
    definition = text(HEAVY[name])
    outcome = limited.run(Request(schema_type=SchemaType.JSON_SCHEMA, text=definition))
    assert outcome.definition.text == definition


@pytest.mark.parametrize("keyword", ["$ref", "$schema", "$id", "$dynamicRef"])
def test_no_address_in_a_definition_is_ever_connected_to(keyword: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        try:
            definition = examine(text({keyword: address, "items": {"$ref": "#"}}))
            assert validator(definition)(b"[]") is None
        except SchemaInvalid as error:
            assert address in str(error)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_recursion_from_a_value_to_its_parts_is_free() -> None:
    assert cost({"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}) == Cost(64, 2)
    assert cost({"type": "array", "items": {"$ref": "#"}}).depth_max == 64


def test_recursion_along_several_ways_bounds_the_depth_of_payloads() -> None:
    assert 12 <= cost(alternatives(2)).depth_max <= 16
    assert RECURSION_DEPTH_MIN <= cost(alternatives(5)).depth_max < 8
    assert cost(alternatives(5)).work <= WORK_MAX
    check = validator(examine(text(alternatives(2))))
    deep = cost(alternatives(2)).depth_max
    assert check(b'{"next":' * (deep - 1) + b"{}" + b"}" * (deep - 1)) is None
    assert "nests deeper" in str(check(b'{"next":' * deep + b"{}" + b"}" * deep))


def test_patterns_of_different_beginnings_do_not_meet() -> None:
    apart = {"patternProperties": {"^x-": {"$ref": "#"}, "^y-": {"$ref": "#"}, "^ab?": {"$ref": "#"}}}
    assert cost(apart).depth_max == 64
    meeting = {"patternProperties": {"^x": {"$ref": "#"}, "^xy": {"$ref": "#"}, "z$": {"$ref": "#"}}}
    assert cost(meeting).depth_max < 64
    assert cost({"patternProperties": {"^ab?$": {"$ref": "#"}, "^ac": {"$ref": "#"}}}).depth_max < 64


def test_neighbours_looked_at_twice_cost_twice() -> None:
    inner = {"anyOf": [{"properties": {"a": {"$ref": "#"}}}]}
    assert cost(inner).depth_max == 64
    assert cost({**inner, "unevaluatedProperties": False}).depth_max < 20


def test_the_fingerprint_sees_the_value_and_not_its_spelling() -> None:
    one = examine(b'{"type": "object", "required": ["a"]}')
    assert one.fingerprint == examine(b'{"required":["a"],\n"type":"object"}').fingerprint
    assert one.fingerprint != examine(b'{"required":["b"],"type":"object"}').fingerprint
    assert one.fingerprint == "sha256:" + hashlib.sha256(
        b'{"required":["a"],"type":"object"}').hexdigest()  # fmt: skip


def test_a_costly_schema_checks_smaller_payloads() -> None:
    value = {"allOf": [{"pattern": f"^[a-z]{{1,100}}{one}"} for one in range(200)]}
    units = cost(value)
    assert units.payload_bytes_max == BUDGET // units.work < 100_000
    check = validator(examine(text(value)))
    assert "checks" in str(check(b'"' + b"a" * 200_000 + b'"'))
    assert "does not match" in str(check(b'"a"'))


WORDS = st.sampled_from(
    ["type", "$ref", "$defs", "properties", "items", "allOf", "anyOf", "not", "enum", "const", "pattern"]
) | st.sampled_from(
    ["$id", "$anchor", "required", "dependencies", "definitions", "$schema", "additionalProperties", "id"]
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=3),
    st.sampled_from(["string", "#", "#/$defs/a", "#/items", "a", "urn:a", DRAFT_7, DRAFT_4, "(?=a)"]),
)  # fmt: skip
NONSENSE = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=15,
)


@given(NONSENSE)
def test_any_json_is_taken_or_refused(value: Any) -> None:
    try:
        definition = examine(text(value))
    except SchemaInvalid as error:
        assert error.why
        return
    check = validator(definition)
    for payload in (b"1", b'"a"', b'{"a": [1, {"a": null}]}', b"[[], {}]"):
        assert check(payload) is None or isinstance(check(payload), str)


@given(st.binary(max_size=40))
def test_any_bytes_are_taken_or_refused(definition: bytes) -> None:
    try:
        examine(definition)
    except SchemaInvalid as error:
        assert error.why
