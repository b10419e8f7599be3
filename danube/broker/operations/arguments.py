"""Arguments of operations, checked as their rows say, and lists in pages.

Every operation that lists takes ``after``, ``limit`` and ``prefix``.  With ``limit`` the answer is a map:
``entries``, and ``after`` for the next page, nil where there is none.  A page has at most PAGE_ENTRIES_MAX
entries and ends early where it grows large.  Without ``limit`` the answer is a plain list of all entries, and
an error where they are too many for one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from danube.core.metadata.policies import NamespacePolicy
from danube.core.partition.policy import TopicPolicy
from danube.core.security.operations import row_of
from danube.errors import InvalidArgument, LimitExceeded
from danube.limits import ANSWER_BYTES_MAX, PAGE_BYTES, PAGE_ENTRIES_MAX

if TYPE_CHECKING:
    from danube.core.protocol.native import Admin
    from danube.core.security.arguments import Page

_T = TypeVar("_T")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Policy = TypeVar("_Policy", TopicPolicy, NamespacePolicy)
_encoder: Final = msgspec.msgpack.Encoder()


def arguments_of(request: Admin) -> Any:
    """The struct of a request's arguments, as its row has it; raises InvalidArgument."""
    row = row_of(request.op)
    kept = _unset(row.args)
    given = {name: value for name, value in request.args.items() if value is not None or name in kept}
    return _struct_of(given, row.args, f"{request.op}: the arguments")


@cache
def _unset(cls: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields where nil is another thing than nothing."""
    return frozenset(one.name for one in msgspec.structs.fields(cls) if one.default is msgspec.UNSET)


def _struct_of(value: dict[str, Any], cls: type[_Struct], what: str) -> _Struct:
    """A map as a struct; raises InvalidArgument if its fields do not fit."""
    try:
        return msgspec.convert(value, cls, builtin_types=(bytes,))  # a text is no bytes
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{what} cannot be read", why=str(error), hint=_taken(cls)) from None


def _taken(cls: type[msgspec.Struct]) -> str:
    return f"it takes {', '.join(cls.__struct_fields__)}"


def changed(present: _Policy, asked: dict[str, Any]) -> _Policy:
    """The present policy with the asked fields; unknown fields and impossible values are refused."""
    cls = type(present)
    if unknown := set(asked) - set(cls.__struct_fields__):
        raise InvalidArgument(f"policy has unknown fields: {', '.join(sorted(unknown))}", hint=_taken(cls))
    given = {name: value for name, value in asked.items() if value is not None}
    policy = _struct_of(msgspec.to_builtins(present) | given, cls, "policy")
    policy.check()
    return policy


def listed(
    args: Page,
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
    args: Page, rows: Iterable[_T], key: Callable[[_T], str], entry: Callable[[_T], Any]
) -> list[Any] | dict[str, Any]:
    """The first entries of rows that are chosen and in order; looks at one row behind the page."""
    limit = min(args.limit, PAGE_ENTRIES_MAX)
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


def selected(args: Page, rows: Iterable[_T], key: Callable[[_T], str]) -> list[_T]:
    """The rows of which a page is taken."""
    found = [row for row in rows if key(row) > args.after and key(row).startswith(args.prefix)]
    found.sort(key=key)
    return found
