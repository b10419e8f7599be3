"""Arguments of operations: plain values that a client sent, read one by one and checked.

Every operation that lists takes ``after``, ``limit`` and ``prefix``.  With ``limit`` the answer is a map:
``entries``, and ``after`` for the next page, nil where there is none.  A page has at most PAGE_ENTRIES_MAX
entries and ends early where it grows large.  Without ``limit`` the answer is a plain list of all entries, and
an error where they are too many for one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from danube.errors import InvalidArgument, LimitExceeded
from danube.limits import ANSWER_BYTES_MAX, PAGE_BYTES, PAGE_ENTRIES_MAX

Args = dict[str, Any]

_T = TypeVar("_T")
_MISSING: Final = object()
_encoder: Final = msgspec.msgpack.Encoder()


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
        return msgspec.convert(value, cls, builtin_types=(bytes,))  # a text is no bytes
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{what} cannot be read", why=str(error)) from None


def filled(args: Args, cls: type[_T], **known: Any) -> _T:
    """A struct with the arguments of its fields' names; one that is nil counts as missing."""
    given = {name: value for name, value in args.items() if value is not None}
    return struct_of({**given, **known}, cls, "the request")


def listed(
    args: Args,
    rows: Iterable[_T],
    key: Callable[[_T], str],
    entry: Callable[[_T], Any],
    shows: Callable[[str], bool] | None = None,
) -> list[Any] | dict[str, Any]:
    """The entries whose keys begin with ``prefix`` and lie behind ``after``, in the order of their keys.

    ``shows`` tells by its key whether the asking one sees a row; else a page would end at what is hidden.
    """
    chosen: Iterable[_T] = selected(args, rows, key)
    return paged(args, chosen if shows is None else (row for row in chosen if shows(key(row))), key, entry)


def paged(
    args: Args, rows: Iterable[_T], key: Callable[[_T], str], entry: Callable[[_T], Any]
) -> list[Any] | dict[str, Any]:
    """The first entries of rows that are chosen and in order; looks at one row behind the page."""
    limit = min(integer(args, "limit", 0), PAGE_ENTRIES_MAX)
    entries: list[Any] = []
    size, last = 0, ""
    for row in rows:
        one = entry(row)
        size += len(_encoder.encode(one))
        if entries and (len(entries) == limit or size > (PAGE_BYTES if limit else ANSWER_BYTES_MAX)):
            if limit:
                return {"entries": entries, "after": last}
            raise LimitExceeded(
                f"the list has more than {len(entries)} entries, too many for one answer",
                why=f"an answer has at most {ANSWER_BYTES_MAX} bytes",
                hint="ask for pages: limit and after, or a prefix; newer clients do so by themselves",
            )
        entries.append(one)
        last = key(row)
    return {"entries": entries, "after": None} if limit else entries


def selected(args: Args, rows: Iterable[_T], key: Callable[[_T], str]) -> list[_T]:
    """The rows of which a page is taken."""
    prefix, after = text(args, "prefix", ""), text(args, "after", "")
    found = [row for row in rows if key(row) > after and key(row).startswith(prefix)]
    found.sort(key=key)
    return found
