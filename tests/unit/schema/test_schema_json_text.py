"""Strict JSON: what strangers send is read once, in linear time, or refused with a reason."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.errors import PayloadInvalid, SchemaInvalid
from danube.schema.json_text import (
    DEPTH_MAX,
    NUMBER_DIGITS_MAX,
    canonical,
    decode,
    depth,
    fingerprint,
    misread,
)
from tests.processor_time import processor_time_within


def parse(text: bytes) -> Any:
    return decode(text, "definition")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(inner) for inner in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(inner) for inner in value), default=0)
    return 0


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_json_is_read_as_the_standard_library_reads_it(value: Any, ascii: bool, indent: int | None) -> None:
    try:
        text = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    except UnicodeEncodeError:
        return
    assert depth(text) == depth_of(value)
    assert canonical(decode(text, "definition")) == canonical(value)


@given(st.binary(max_size=60) | st.text(alphabet='[]{}",:0eE.\\u-', max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(text: bytes) -> None:
    try:
        decode(text, "definition")
    except SchemaInvalid as error:
        assert error.why


BOMBS = {
    "arrays in arrays": (b"[" * 100_000 + b"]" * 100_000, "nests deeper than 64 levels"),
    "arrays never closed": (b"[" * 200_000, "nests deeper than 64 levels"),
    "objects in objects": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nests deeper than 64 levels"),
    "just too deep": (b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1), "nests deeper than 64 levels"),
    "a million digits": (b"1" * 1_000_000, "digits"),
    "a negative of many digits": (b'{"a": -' + b"9" * (NUMBER_DIGITS_MAX + 1) + b"}", "digits"),
    "a fraction of many digits": (b"1" * (NUMBER_DIGITS_MAX + 100) + b".5", "double"),
    "NaN": (b'{"minimum": NaN}', "NaN"),
    "Infinity": (b"[-Infinity]", "Infinity"),
    "beyond a double": (b'{"maximum": 1e400}', "double"),
    "a name twice": (b'{"type": "string", "type": "null"}', "key 'type' stands twice"),
    "a name twice below": (b'[{"a": {"b": 1, "\\u0062": 2}}]', "key 'b' stands twice"),
    "half a surrogate pair": (rb'{"a": "\ud800"}', "surrogate"),
    "half a surrogate pair in a name": (rb'{"\uDC00": 1}', "surrogate"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "a byte order mark (BOM) stands before the value"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "byte 0"),
    "not UTF-8": (b'{"a": "\xff"}', "byte 7"),
    "empty": (b"", "line 1, column 1"),
    "two values": (b"{} {}", "line 1, column 4"),
    "a trailing comma": (b'{"a": 1,\n}', "line 2, column 1"),
    "quotes without an end": (b'"' + rb"\"" * 500_000, "line 1"),
    "brackets behind an open quote": (b'"' + b"[" * 1_000_000, "line 1"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once_with_a_reason(name: str) -> None:
    text, why = BOMBS[name]
    with processor_time_within(0.5), pytest.raises(SchemaInvalid, match="the definition is") as caught:
        decode(text, "definition")
    assert why in caught.value.why


# Texts, what is told of each, and what the json module of 3.13 says where older ones say something else.
MISREAD: list[tuple[str, str, tuple[str, int] | None]] = [
    ("[1,", "line 1, column 4: a value is missing", None),
    ('{"a": 1,', "line 1, column 9: a name in double quotes is missing", None),
    ("{'a': 1}", "line 1, column 2: a name in double quotes is missing", None),
    ('{"a" 1}', "line 1, column 6: a colon is missing", None),
    ('{"a": 1\n"b": 2}', "line 2, column 1: a comma is missing, or the end of an array or object", None),
    ("[1 2]", "line 1, column 4: a comma is missing, or the end of an array or object", None),
    ('["a]', "line 1, column 2: a string begins here that does not end", None),
    ('"a\tb"', "line 1, column 3: a string holds a control character", None),
    (r'"\u12g4"', r"line 1, column 3: four hexadecimal digits are missing behind \u", None),
    (r'"\q"', "line 1, column 2: a string holds a backslash before a character that needs none", None),
    ("{}\n\n []", "line 3, column 2: the value has ended, and more follows", None),
    (
        '{"a": 1 ,\n }',
        "line 2, column 2: a comma stands before the end of an array or object",
        ("Illegal trailing comma before end of object", 8),
    ),
    (
        "[1, ]",
        "line 1, column 5: a comma stands before the end of an array or object",
        ("Illegal trailing comma before end of array", 2),
    ),
    ("[1,}", "line 1, column 4: a value is missing", None),
    ('{"a": [1],]', "line 1, column 11: a name in double quotes is missing", None),
]


@pytest.mark.parametrize(("text", "told", "theirs"), MISREAD)
def test_what_is_wrong_is_told_alike_by_every_python(
    text: str, told: str, theirs: tuple[str, int] | None
) -> None:
    if theirs is not None:
        assert misread(json.JSONDecodeError(theirs[0], text, theirs[1]))[1] == told
    with pytest.raises(SchemaInvalid, match="the definition is not JSON") as caught:
        parse(text.encode())
    assert caught.value.why == told
    assert caught.value.facts["line"] == int(told.split()[1].rstrip(","))


def test_a_message_that_no_python_has_yet_is_not_passed_on() -> None:
    wrong = json.JSONDecodeError("Words of a later json module", '{\n"a"}', 5)
    assert misread(wrong) == (2, "line 2, column 4: it cannot be read")


def test_what_is_just_within_the_bounds_is_read() -> None:
    assert depth_of(parse(b"[" * DEPTH_MAX + b"]" * DEPTH_MAX)) == DEPTH_MAX
    assert parse(b"9" * NUMBER_DIGITS_MAX) == int("9" * NUMBER_DIGITS_MAX)
    assert parse(rb'"\ud83d\ude00"') == "😀"
    assert parse(b"[1e300, 1e-400, " + b"1" * 308 + b".0]")[1] == 0.0
    assert parse(b'{"' + b"1" * 5000 + b'": "1e999"}') == {"1" * 5000: "1e999"}
    assert parse(b'{"[[[[": "' + b"[" * 1000 + b'"}')


def test_brackets_inside_strings_do_not_count() -> None:
    assert depth(rb'{"a\"[[": ["]]\\", {}]}') == 3


def test_eight_mebibytes_are_read_in_linear_time() -> None:
    text = b'[{"name": "x", "tags": [1, 2.5, null]},' * 200_000 + b"{}" + b"]" * 200_000
    with processor_time_within(5), pytest.raises(PayloadInvalid, match="the payload"):
        decode(text, "payload", error=PayloadInvalid)
    text = b"[" + b'{"name": "x", "tags": [1, 2.5, null]},' * 200_000 + b"{}]"
    with processor_time_within(5):
        assert len(decode(text, "definition")) == 200_001


def test_the_fingerprint_does_not_see_spelling() -> None:
    one = parse(b'{"b": 1, "a": ["\\u00e9"]}')
    assert canonical(one) == '{"a":["é"],"b":1}'.encode()
    assert fingerprint(one) == fingerprint(parse('{ "a":["é"],\n"b":1 }'.encode()))
    assert fingerprint(one) == "sha256:" + hashlib.sha256(canonical(one)).hexdigest()


def test_the_line_of_what_is_too_deep_is_named() -> None:
    with pytest.raises(SchemaInvalid, match="line 3 nests deeper than 2 levels") as caught:
        decode(b'{\n"[[[": [\n1, {"a": 1}]}', "schema", depth_max=2)
    assert caught.value.facts["line"] == 3
