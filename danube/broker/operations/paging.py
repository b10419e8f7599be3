"""Lists in pages.  Every operation that lists takes ``after``, ``limit`` and ``prefix``.

With ``limit`` the answer is a map: ``entries``, and ``after`` for the next page, nil where there is none.  A
page ends early where it grows large.  Without ``limit`` the answer is a plain list of all entries, and an
error where they are too many for one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from danube.broker.operations.arguments import Args, integer, text
from danube.errors import LimitExceeded
from danube.limits import ANSWER_BYTES_MAX, PAGE_BYTES, PAGE_ENTRIES_MAX

_Row = TypeVar("_Row")
_encoder: Final = msgspec.msgpack.Encoder()


def listed(
    args: Args, rows: Iterable[_Row], key: Callable[[_Row], str], entry: Callable[[_Row], Any]
) -> list[Any] | dict[str, Any]:
    """The entries whose keys begin with ``prefix`` and lie behind ``after``, in the order of their keys."""
    chosen = selected(args, rows, key)
    limit = integer(args, "limit", 0)
    entries: list[Any] = []
    size = 0
    for row in chosen[: min(limit, PAGE_ENTRIES_MAX) or None]:
        one = entry(row)
        size += len(_encoder.encode(one))
        if size > (PAGE_BYTES if limit else ANSWER_BYTES_MAX) and entries:
            if not limit:
                raise LimitExceeded(
                    f"the list has {len(chosen)} entries, too many for one answer",
                    why=f"an answer has at most {ANSWER_BYTES_MAX} bytes",
                    hint="ask for pages: limit and after, or a prefix; newer clients do so by themselves",
                )
            break
        entries.append(one)
    if not limit:
        return entries
    return {"entries": entries, "after": page_end(chosen, len(entries), key)}


def selected(args: Args, rows: Iterable[_Row], key: Callable[[_Row], str]) -> list[_Row]:
    """The rows of which a page is taken."""
    prefix, after = text(args, "prefix", ""), text(args, "after", "")
    found = [row for row in rows if key(row) > after and key(row).startswith(prefix)]
    found.sort(key=key)
    return found


def page_end(chosen: list[_Row], count: int, key: Callable[[_Row], str]) -> str | None:
    """Return the key behind which the next page begins, after ``count`` of ``chosen``; None at the end."""
    return key(chosen[count - 1]) if 0 < count < len(chosen) else None
