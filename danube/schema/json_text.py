"""JSON from a stranger: strict, and bounded before anything is built.

Refused: text that is not UTF-8, nesting beyond a limit, NaN and infinities, numbers with too many digits,
a key that stands twice in one object, half of a surrogate pair.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

from danube.errors import SchemaInvalid

DEPTH_MAX: Final = 64
NUMBER_DIGITS_MAX: Final = 64

_STRING_OR_BRACKET: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)


def decode(text: bytes, what: str, *, depth_max: int = DEPTH_MAX) -> Any:
    """The value of a JSON text; ``what`` names the text in errors.  Raises SchemaInvalid (facts: line)."""
    _bound_depth(text, what, depth_max)
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except json.JSONDecodeError as error:
        raise SchemaInvalid(
            f"the {what} is not JSON",
            why=f"line {error.lineno}, column {error.colno}: {error.msg}",
            hint="check it with a JSON linter",
            line=error.lineno,
        ) from None
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise SchemaInvalid(
            f"the {what} is not UTF-8", why=f"byte {error.start}: {error.reason}", line=line
        ) from None
    except _Refusal as error:
        raise SchemaInvalid(f"the {what} is refused", why=str(error)) from None
    try:
        canonical(value)
    except UnicodeEncodeError:
        raise SchemaInvalid(f"the {what} is refused", why="a string holds half of a surrogate pair") from None
    return value


def canonical(value: Any) -> bytes:
    """One spelling of a JSON value: keys sorted, no spaces, UTF-8."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode("utf-8")


class _Refusal(ValueError):
    """Why a value is not taken; a sentence."""


def _bound_depth(text: bytes, what: str, depth_max: int) -> None:
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        first = text[found.start()]
        if first in b"[{":
            depth += 1
            if depth > depth_max:
                line = text.count(b"\n", 0, found.start()) + 1
                raise SchemaInvalid(
                    f"the {what} is refused",
                    why=f"line {line} nests deeper than {depth_max} levels",
                    hint="name inner types once and refer to them",
                    line=line,
                )
        elif first in b"]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refusal(f"key {twice[:60]!r} stands twice in one object")
    return value


def _integer(digits: str) -> int:
    if len(digits) > NUMBER_DIGITS_MAX:
        raise _Refusal(f"a number has {len(digits)} digits")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > NUMBER_DIGITS_MAX:
        raise _Refusal(f"a number has {len(digits)} digits")
    value = float(digits)
    if not math.isfinite(value):
        raise _Refusal(f"number {digits} is too large")
    return value


def _no_constant(word: str) -> NoReturn:
    raise _Refusal(f"{word} is not a JSON value")
