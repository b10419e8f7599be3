"""Reason why a member cannot serve yet, as its controller tells workers, commands and clients."""

from __future__ import annotations

import msgspec

from danube.errors import Unavailable

HINT = "`danube cluster status` on its host tells more"


class Waiting(msgspec.Struct, frozen=True):
    """``why`` and ``hint`` are sentences; ``missing`` are addresses that do not answer."""

    why: str
    hint: str
    since_us: int  # since 1970
    missing: list[str] = []


def waiting_error(waiting: Waiting | None, now_us: int) -> Unavailable:
    """Return the error for requests to this broker while it waits."""
    if waiting is None:
        return Unavailable("this broker waits for its cluster", why="it has just started", hint=HINT)
    seconds = max(0, now_us - waiting.since_us) // 1_000_000
    return Unavailable(
        "this broker waits for its cluster", why=f"since {seconds} s: {waiting.why}", hint=waiting.hint
    )
