"""JSON from clients: strict, and bounded before anything is built.

Texts that RFC 8259 leaves open are refused, so that every reader of the same bytes sees the same value: a
name that stands twice in one object, NaN and infinities, half of a surrogate pair, a byte order mark, bytes
that are not UTF-8.  Texts that cost more than their size are refused too: nesting beyond ``depth_max``,
integers longer than NUMBER_DIGITS_MAX digits, numbers beyond the range of a double.  Time is linear in
the size; eight MiB of small objects take about half a second, nearly all of it to build the value.
"""

from __future__ import annotations

import hashlib
import json
import re
from itertools import accumulate
from typing import Any, Final, NoReturn

from danube.errors import DanubeError, SchemaInvalid

DEPTH_MAX: Final = 64
"""Objects and arrays inside each other; ``[]`` has depth 1."""

NUMBER_DIGITS_MAX: Final = 300
"""Digits of an integer: with so many it is still within the range of a double."""

# A string, or the rest of the text when it is not closed; possessive, so that no byte is read twice.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_LARGE_EXPONENT: Final = re.compile(rb"[0-9][eE]\+?[0-9]{3}")
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEP_BY_BYTE: Final = tuple((byte in b"[{") - (byte in b"]}") for byte in range(256))
_DIGITS_ALIKE: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER: Final = b"0" * (NUMBER_DIGITS_MAX + 1)


def decode(
    text: bytes, what: str, *, depth_max: int = DEPTH_MAX, error: type[DanubeError] = SchemaInvalid
) -> Any:
    """The value of a JSON text; ``what`` names the text in errors.  Raises ``error`` (facts: line)."""
    try:
        return _decode(text, depth_max)
    except json.JSONDecodeError as wrong:
        line, why = misread(wrong)
        raise error(
            f"the {what} is not JSON", why=why, hint="check it with a JSON linter", line=line
        ) from None
    except UnicodeDecodeError as wrong:
        line = text.count(b"\n", 0, wrong.start) + 1
        raise error(
            f"the {what} is not UTF-8", why=f"byte {wrong.start}: {wrong.reason}", line=line
        ) from None
    except UnicodeEncodeError:
        raise error(f"the {what} is refused", why="a string holds half of a surrogate pair") from None
    except RecursionError:
        raise _too_deep(what, text, depth_max, error) from None
    except ValueError as wrong:
        if wrong.args == (_TOO_DEEP,):
            raise _too_deep(what, text, depth_max, error) from None
        raise error(f"the {what} is refused", why=str(wrong)) from None


def misread(wrong: json.JSONDecodeError) -> tuple[int, str]:
    """The line in which a text stops being JSON, and where and why in words; alike for every Python.

    Python 3.13 names a comma before the end, at the comma; older ones miss what should follow, behind it.
    """
    place, message = wrong.pos, wrong.msg
    why = next((ours for theirs, ours in _REASONS.items() if message.startswith(theirs)), "it cannot be read")
    if message.startswith(_COMMA):
        place = _SPACE.match(wrong.doc, place + 1).end()  # type: ignore[union-attr]
    elif _missing(message, wrong.doc[place : place + 1]) and wrong.doc[:place].rstrip(" \t\n\r").endswith(
        ","
    ):
        why = _REASONS[_COMMA]
    line = wrong.doc.count("\n", 0, place) + 1
    column = place - wrong.doc.rfind("\n", 0, place)
    return line, f"line {line}, column {column}: {why}"


def depth(text: bytes) -> int:
    """How deep objects and arrays of a JSON text are nested."""
    # NumPy is no faster here, and to load it would double the start of the limited child.
    brackets = _STRING.sub(b"", text).translate(None, _NOT_BRACKETS)
    return max(0, max(accumulate(map(_STEP_BY_BYTE.__getitem__, brackets)), default=0))


def canonical(value: Any) -> bytes:
    """One spelling of a JSON value: names sorted, no spaces, UTF-8."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode("utf-8")


def fingerprint(value: Any) -> str:
    """``sha256:`` and the hexadecimal digest of the canonical spelling."""
    return "sha256:" + hashlib.sha256(canonical(value)).hexdigest()


_TOO_DEEP: Final = "too deep"
_COMMA: Final = "Illegal trailing comma"
_REASONS: Final = {  # how messages of the json module begin, and what is said instead
    _COMMA: "a comma stands before the end of an array or object",
    "Expecting value": "a value is missing",
    "Expecting property name": "a name in double quotes is missing",
    "Expecting ':'": "a colon is missing",
    "Expecting ','": "a comma is missing, or the end of an array or object",
    "Unterminated string": "a string begins here that does not end",
    "Invalid control character": "a string holds a control character",
    "Invalid \\u": "four hexadecimal digits are missing behind \\u",
    "Invalid \\": "a string holds a backslash before a character that needs none",
    "Extra data": "the value has ended, and more follows",
    "Unexpected UTF-8 BOM": "a byte order mark (BOM) stands before the value",
}
_SPACE: Final = re.compile(r"[ \t\n\r]*")


def _missing(message: str, follows: str) -> bool:
    """Whether an array's or object's end follows where another of its members should."""
    return message.startswith({"]": "Expecting value", "}": "Expecting property name"}.get(follows, _COMMA))


def _decode(text: bytes, depth_max: int) -> Any:
    if text.count(b"[") + text.count(b"{") > depth_max and depth(text) > depth_max:
        raise ValueError(_TOO_DEEP)
    hooks: dict[str, Any] = {}
    if _LONG_NUMBER in text.translate(_DIGITS_ALIKE):
        hooks = {"parse_int": _integer, "parse_float": _float}
    elif _LARGE_EXPONENT.search(text):
        hooks = {"parse_float": _float}
    value = json.loads(text.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant, **hooks)
    if _SURROGATE.search(text):
        # A whole pair became one character; what is left of a half cannot be encoded.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _too_deep(what: str, text: bytes, depth_max: int, error: type[DanubeError]) -> DanubeError:
    # Blanks instead of strings keep the places of the brackets, and so the line.
    bare = _STRING.sub(lambda found: b" " * len(found[0]), text)
    levels = enumerate(accumulate(map(_STEP_BY_BYTE.__getitem__, bare)))
    beyond = next((place for place, level in levels if level > depth_max), 0)
    line = text.count(b"\n", 0, beyond) + 1
    return error(
        f"the {what} is refused",
        why=f"line {line} nests deeper than {depth_max} levels",
        hint="name inner types once and refer to them",
        line=line,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"key {name[:60]!r} stands twice in one object")
            seen.add(name)
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON value")


def _integer(digits: str) -> int:
    if len(digits) > NUMBER_DIGITS_MAX + digits.startswith("-"):
        raise ValueError(f"a number has {len(digits)} digits, at most {NUMBER_DIGITS_MAX} are read")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if value - value != 0.0:
        raise ValueError(f"the number {digits[:20]} is beyond the range of a double")
    return value
