"""Payloads held against a JSON Schema: a reason and a place, never an error, time in line with the size."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.schema.json.kind import examine, validator
from danube.schema.kinds import Validator
from danube.schema.kinds import validator as validator_of_any_type
from tests.processor_time import processor_time_within


def check_of(value: Any) -> Validator:
    return validator(examine(json.dumps(value).encode()))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^(a+)+$"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "a/b": {"properties": {"~": {"type": "integer"}}},
    },
    "required": ["name"],
}

REASONS = [
    (b'{"name": "aaa", "tags": ["x"]}', None),
    (b'{"name": "aab"}', '/name: the value does not match "^(a+)+$"'),
    (b'{"name": "a", "tags": ["x", 1]}', '/tags/1: the value is not of type "string"'),
    (b'{"name": "a", "a/b": {"~": "x"}}', '/a~1b/~0: the value is not of type "integer"'),
    (b"{}", 'the payload: "name" is a required property'),
    (b"[]", 'the payload: the value is not of type "object"'),
    (b"", "the payload is not JSON: line 1, column 1: a value is missing"),
    (b'{"name": "a",}', "the payload is not JSON: line 1, column 14"),
    (b'{"name": "a", "name": "a"}', "the payload is refused: key 'name' stands twice in one object"),
    (b'{"name": NaN}', "the payload is refused: NaN is not a JSON value"),
    (b'{"name": 1e999}', "the payload is refused: the number 1e999 is beyond the range of a double"),
    (rb'{"name": "\ud800"}', "the payload is refused: a string holds half of a surrogate pair"),
    (b'{"name": "\xff"}', "the payload is not UTF-8: byte 10"),
    (b"[" * 100_000, "the payload is refused: line 1 nests deeper than 64 levels"),
    (b"7" * 1_000_000, "the payload is refused: a number has 1000000 digits"),
]


@pytest.mark.parametrize(("payload", "reason"), REASONS)
def test_the_reason_names_the_place(payload: bytes, reason: str | None) -> None:
    found = check_of(PERSON)(payload)
    assert found is None if reason is None else str(found).startswith(reason)


def test_one_validator_keeps_nothing_between_payloads() -> None:
    check = check_of(PERSON)
    answers = [check(payload) for payload, _ in REASONS]
    assert [check(payload) for payload, _ in REASONS] == answers
    assert [check(payload) for payload, _ in reversed(REASONS)] == answers[::-1]


def test_formats_are_annotations() -> None:
    assert check_of({"format": "email"})(b'"nobody"') is None
    assert check_of({"$schema": "http://json-schema.org/draft-07/schema#", "format": "ipv4"})(b'"x"') is None


def test_the_draft_decides() -> None:
    draft_4 = "http://json-schema.org/draft-04/schema#"
    assert check_of({"$schema": draft_4, "type": "integer"})(b"1.0") is not None
    assert check_of({"type": "integer"})(b"1.0") is None
    assert check_of({"prefixItems": [{"type": "string"}]})(b"[1]") is not None
    assert check_of({"$schema": draft_4, "prefixItems": [{"type": "string"}]})(b"[1]") is None


def test_numbers_are_exact() -> None:
    check = check_of({"maximum": 9007199254740992})
    assert check(b"9007199254740992") is None
    assert check(b"9007199254740993") is not None
    assert check_of({"multipleOf": 0.01})(b"19.99") is None


def test_a_long_reason_is_cut() -> None:
    reason = check_of({"enum": ["x" * 5000]})(b"1")
    assert reason is not None and len(reason) < 600


def test_a_definition_without_its_cost_is_measured_again() -> None:
    definition = examine(json.dumps(PERSON).encode())
    bare = msgspec.structs.replace(definition, compiled=b"")
    assert validator(bare)(b'{"name": "b"}') == validator(definition)(b'{"name": "b"}')
    assert validator_of_any_type(definition)(b'{"name": "a"}') is None


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,name0eE.\\u-d8 ', max_size=40).map(str.encode))
def test_any_bytes_get_an_answer(payload: bytes) -> None:
    answer = _PERSON(payload)
    assert answer is None or isinstance(answer, str)


_PERSON = check_of(PERSON)


def test_patterns_run_in_linear_time() -> None:
    check = check_of({"pattern": "^(a+)+$"})
    with processor_time_within(2):
        assert check(b'"' + b"a" * 8_000_000 + b'b"') is not None


def test_eight_mebibytes_are_checked_in_linear_time() -> None:
    check = check_of(
        {"type": "array", "items": {"type": "object", "properties": {"tags": {"uniqueItems": True}}}}
    )
    small = b"[" + b",".join([b'{"name": "x", "tags": [1, 2.5, null]}'] * 20_000) + b"]"
    large = b"[" + b",".join([b'{"name": "x", "tags": [1, 2.5, null]}'] * 200_000) + b"]"
    spent = []
    for payload in (small, large):
        started = time.thread_time()
        with processor_time_within(5.0):
            assert check(payload) is None
        spent.append(time.thread_time() - started)
    assert spent[1] < 40 * spent[0] + 0.5


def test_distinct_items_and_large_enums_are_linear_too() -> None:
    with processor_time_within(3):
        distinct = json.dumps([{"a": one} for one in range(100_000)]).encode()
        assert check_of({"uniqueItems": True})(distinct) is None
        assert check_of({"items": {"enum": [f"s{one}" for one in range(10_000)]}})(
            json.dumps(["s9999"] * 100_000).encode()) is None  # fmt: skip


def test_the_deepest_chain_in_the_deepest_payload_does_not_end_the_stack() -> None:
    links = {f"a{one}": {"allOf": [{"$ref": f"#/$defs/a{one + 1}"}]} for one in range(30)}
    value = {
        "$ref": "#/$defs/a0",
        "$defs": {**links, "a30": {"properties": {"c": {"$ref": "#"}}, "additionalProperties": False}},
    }
    check = check_of(value)
    assert check(b'{"c":' * 63 + b"{}" + b"}" * 63) is None
    reason = check(b'{"c":' * 63 + b'{"z": 1}' + b"}" * 63)
    assert reason is not None and "'z' was unexpected" in reason
