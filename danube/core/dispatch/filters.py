"""Key filters: globs with ``*`` (any characters, also none) and ``?`` (exactly one).

A glob becomes a regular expression.  Each piece between two stars is taken leftmost after the one before
and never tried again, because a star takes whatever lies between.  So a match costs at most pattern * key
steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from danube.errors import InvalidArgument, LimitExceeded
from danube.limits import KEY_FILTER_BYTES_MAX, KEY_FILTER_WILDCARDS_MAX, KEY_FILTERS_MAX


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile one glob; raise InvalidArgument for an empty one and LimitExceeded beyond the limits."""
    size = len(pattern.encode("utf-8", "surrogateescape"))
    wildcards = pattern.count("*") + pattern.count("?")
    if size > KEY_FILTER_BYTES_MAX or wildcards > KEY_FILTER_WILDCARDS_MAX:
        raise LimitExceeded(
            f"key filter {pattern[:40]!r} is too long",
            why=f"limits are {KEY_FILTER_BYTES_MAX} bytes and {KEY_FILTER_WILDCARDS_MAX} wildcards",
        )
    if not pattern:
        raise InvalidArgument("a key filter is empty", hint="use * to match every key")
    first, *rest = [".".join(map(re.escape, piece.split("?"))) for piece in pattern.split("*")]
    if rest:
        first += "".join(f"(?>.*?{piece})" for piece in rest[:-1] if piece) + ".*" + rest[-1]
    return re.compile(first, re.DOTALL)


class KeyFilter:
    """A consumer's key filters: a key passes if any of them matches, or if there are none."""

    __slots__ = ("_globs", "everything")

    def __init__(self, patterns: Sequence[str]) -> None:
        if len(patterns) > KEY_FILTERS_MAX:
            raise LimitExceeded(
                f"{len(patterns)} key filters are too many", why=f"the limit is {KEY_FILTERS_MAX}"
            )
        self._globs = [_compiled(pattern) for pattern in patterns]
        # Whether every key passes, so that no key has to be matched.
        self.everything = not patterns or any(not pattern.strip("*") for pattern in patterns)

    def passes(self, key: bytes) -> bool:
        text = key.decode("utf-8", "surrogateescape")
        return self.everything or any(glob.fullmatch(text) for glob in self._globs)
