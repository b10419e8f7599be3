"""Key filters: globs with ``*`` (any characters, also none) and ``?`` (exactly one).

A pattern is cut at its stars.  The first and the last piece are anchored, each piece between is
searched leftmost after the one before; that is enough because a star takes whatever lies between,
so nothing is ever tried twice and a match costs at most pattern * key steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from danube.errors import InvalidArgument, LimitExceeded
from danube.limits import KEY_FILTER_BYTES_MAX, KEY_FILTER_WILDCARDS_MAX, KEY_FILTERS_MAX


class Glob:
    """One compiled pattern; ``matches(key)`` takes the key's UTF-8 bytes."""

    __slots__ = ("_first", "_last", "_middle", "_shortest", "_single", "pattern")

    def __init__(self, pattern: str) -> None:
        """Raises InvalidArgument for an empty pattern and LimitExceeded for one beyond the limits."""
        size = len(pattern.encode("utf-8", "surrogateescape"))
        wildcards = pattern.count("*") + pattern.count("?")
        if size > KEY_FILTER_BYTES_MAX or wildcards > KEY_FILTER_WILDCARDS_MAX:
            raise LimitExceeded(
                f"key filter {pattern[:40]!r} is too long",
                why=f"limits are {KEY_FILTER_BYTES_MAX} bytes and {KEY_FILTER_WILDCARDS_MAX} wildcards",
            )
        if not pattern:
            raise InvalidArgument("a key filter is empty", hint="use * to match every key")
        self.pattern = pattern
        pieces = [Piece(text) for text in pattern.split("*")]
        self._single = len(pieces) == 1
        self._first, self._last = pieces[0], pieces[-1]
        self._middle = [piece for piece in pieces[1:-1] if piece.length]
        self._shortest = len(pattern) - pattern.count("*")

    def matches(self, key: bytes) -> bool:
        text = key.decode("utf-8", "surrogateescape")
        if len(text) < self._shortest or (self._single and len(text) != self._shortest):
            return False
        if not self._first.stands_at(text, 0):
            return False
        if self._single:
            return True
        start, end = self._first.length, len(text) - self._last.length
        if not self._last.stands_at(text, end):
            return False
        for piece in self._middle:
            found = piece.find(text, start, end)
            if found < 0:
                return False
            start = found + piece.length
        return start <= end


class Piece:
    """A piece of a glob between two stars: literal text, or with ``?`` text with some free characters."""

    __slots__ = ("_literal", "_search", "length")

    def __init__(self, text: str) -> None:
        self.length = len(text)
        self._literal = text
        self._search: re.Pattern[str] | None = None
        if "?" in text:
            parts = (re.escape(part) for part in text.split("?"))
            self._search = re.compile(".".join(parts), re.DOTALL)

    def stands_at(self, text: str, position: int) -> bool:
        if self._search is None:
            return text.startswith(self._literal, position)
        return self._search.match(text, position) is not None

    def find(self, text: str, start: int, end: int) -> int:
        """Leftmost place in ``text[start:end]``, or -1."""
        if self._search is None:
            return text.find(self._literal, start, end)
        found = self._search.search(text, start, end)
        return found.start() if found is not None else -1


class KeyFilter:
    """A consumer's key filters: a key passes if any of them matches, or if there are none."""

    __slots__ = ("_globs",)

    def __init__(self, patterns: Sequence[str]) -> None:
        if len(patterns) > KEY_FILTERS_MAX:
            raise LimitExceeded(
                f"{len(patterns)} key filters are too many", why=f"the limit is {KEY_FILTERS_MAX}"
            )
        self._globs = tuple(Glob(pattern) for pattern in patterns)

    @property
    def everything(self) -> bool:
        """Whether every key passes, so that no key has to be matched."""
        return not self._globs or any(not glob.pattern.strip("*") for glob in self._globs)

    def passes(self, key: bytes) -> bool:
        return self.everything or any(glob.matches(key) for glob in self._globs)
