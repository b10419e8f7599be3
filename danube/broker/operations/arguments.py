"""Arguments of operations: plain values that a client sent, read one by one and checked."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from danube.errors import InvalidArgument

Args = dict[str, Any]

_T = TypeVar("_T")
_MISSING: Final = object()


def text(args: Args, name: str, default: str | None = None) -> str:
    """A text; raises InvalidArgument if it is another value, or missing without a default."""
    return _typed(args, name, str, "a text", default)


def octets(args: Args, name: str, default: bytes | None = None) -> bytes:
    return _typed(args, name, bytes, "bytes", default)


def flag(args: Args, name: str, default: bool) -> bool:
    return _typed(args, name, bool, "true or false", default)


def integer(args: Args, name: str, default: int | None = None) -> int:
    """A whole number that is not negative."""
    value = _typed(args, name, int, "a number", default)
    if value < 0 or isinstance(value, bool):
        raise InvalidArgument(f"{name} is not a number from 0 up", why=f"{name}={value!r:.80}")
    return value


def texts(args: Args, name: str) -> tuple[str, ...]:
    """A list of texts; empty if it is missing."""
    found: list[Any] = _typed(args, name, list, "a list of texts", [])
    if not all(isinstance(one, str) for one in found):
        raise InvalidArgument(f"{name} is not a list of texts")
    return tuple(found)


def _typed(args: Args, name: str, cls: type[_T], wanted: str, default: _T | None) -> _T:
    value = args.get(name, _MISSING)
    if value is _MISSING or value is None:
        if default is None:
            raise InvalidArgument(f"the request has no {name}")
        return default
    if not isinstance(value, cls):
        raise InvalidArgument(f"{name} is not {wanted}", why=f"{name}={value!r:.80}")
    return value


def struct_of(value: Any, cls: type[_T], what: str) -> _T:
    """A map as a struct; raises InvalidArgument if its fields do not fit."""
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{what} cannot be read", why=str(error)) from None


def filled(args: Args, cls: type[_T], **known: Any) -> _T:
    """A struct with the arguments of its fields' names; one that is nil counts as missing."""
    given = {name: value for name, value in args.items() if value is not None}
    return struct_of({**given, **known}, cls, "the request")
