"""Answers of administration: their shape, and lists that come in pages."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from danube.client.machine.reply import Plan
from danube.client.machine.session import Session
from danube.errors import InvalidArgument, ProtocolError
from danube.limits import PAGE_ENTRIES_MAX


class Page(NamedTuple):
    """Entries whose names begin with ``prefix`` and lie behind ``after``; at most ``limit``."""

    after: str = ""
    limit: int | None = None
    prefix: str = ""


WHOLE = Page()
S = TypeVar("S")


def page_of(after: str, limit: int | None, prefix: str) -> Page:
    """A checked part of a list."""
    if limit is not None and limit < 1:
        raise InvalidArgument(f"limit {limit} is not a number from 1 up", hint="None: all of them")
    return Page(after, limit, prefix)


def asked(page: Page, held: int = 0, after: str | None = None) -> dict[str, Any]:
    """Return the arguments of the request for the entries behind ``after``; ``held`` were read before."""
    left = PAGE_ENTRIES_MAX if page.limit is None else page.limit - held
    return {
        "after": page.after if after is None else after,
        "limit": min(left, PAGE_ENTRIES_MAX),
        "prefix": page.prefix,
    }


def whole_list(session: Session, op: str, page: Page, **arguments: Any) -> Plan[list[Any]]:
    """All entries of ``page``, by as many requests as it takes."""
    answer = yield session.admin(op, **asked(page), **arguments)
    return (yield from rest_of(session, op, page, answer, **arguments))


def rest_of(
    session: Session, op: str, page: Page, answer: Any, partition: str = "", **arguments: Any
) -> Plan[list[Any]]:
    """The entries of a first answer and of all that follow it."""
    if isinstance(answer, list):  # from a broker that knows no pages
        return answer
    found = list(answer["entries"])
    while answer["after"] is not None and (page.limit is None or len(found) < page.limit):
        more = asked(page, len(found), answer["after"])
        answer = yield session.admin(op, partition, **more, **arguments)
        found += answer["entries"]
    return found


def answered(answer: Any, shape: type[S], what: str) -> S:
    """The broker's answer as the struct it should be; raises ProtocolError for another shape."""
    try:
        return msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the broker {what} in a way that is not understood", why=str(error)) from None
