"""A whole list out of its pages: the messages of the gRPC services have none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from danube.limits import PAGE_ENTRIES_MAX


async def whole_list(ask: Callable[..., Awaitable[Any]], *asked: str, **args: Any) -> list[Any]:
    """All entries that an operation lists."""
    found: list[Any] = []
    after: str | None = ""
    while after is not None:
        answer = await ask(*asked, after=after, limit=PAGE_ENTRIES_MAX, **args)
        if isinstance(answer, list):  # of a broker that knows no pages
            return answer
        found += answer["entries"]
        after = answer["after"]
    return found
