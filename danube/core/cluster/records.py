"""Records by key, which the parts of the metadata machine for clusters are; and the refusal of one more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Self, TypeVar

from danube.errors import LimitExceeded

_Key = TypeVar("_Key", int, str, tuple[int, int])
_Record = TypeVar("_Record")


def no_room(what: str, limit: int, *, of: str = "", hint: str = "") -> LimitExceeded:
    """The refusal of one more of ``what``, of which there are ``limit``, counted in ``of``."""
    why = f"the limit is {limit} {of}".rstrip()
    return LimitExceeded(f"there is no room for more {what}", why=why, hint=hint, limit=limit)


class Records(Generic[_Key, _Record]):
    """Records are shared between copies, as they never change."""

    key_of: Callable[[Any], Any]  # a record's key

    def __init__(self) -> None:
        self._by_key: dict[_Key, _Record] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: _Key) -> _Record | None:
        return self._by_key.get(key)

    def records(self) -> list[_Record]:
        """All records in the order of their keys."""
        return [self._by_key[key] for key in sorted(self._by_key)]

    def changes_since(self, earlier: Self) -> tuple[list[_Record], list[_Record]]:
        """Records that are gone, as they were, and those that are new or not what they were."""
        before, now = earlier._by_key, self._by_key
        gone = [record for record in earlier.records() if self.key_of(record) not in now]
        return gone, [record for record in self.records() if before.get(self.key_of(record)) != record]

    def _put(self, record: _Record) -> _Record:
        self._by_key[self.key_of(record)] = record
        return record

    def copy(self) -> Self:
        """Records that change on their own from here."""
        other = type(self)()
        other._by_key = dict(self._by_key)
        return other

    def load(self, records: Iterable[_Record]) -> None:
        """Take in what a snapshot kept."""
        self._by_key = {self.key_of(record): record for record in records}
