"""Open producers and consumers of a client, which it closes when it is closed itself."""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

_LOOK_AT: Final = 64


class _Closable(Protocol):
    @property
    def closed(self) -> bool: ...


T = TypeVar("T", bound=_Closable)


class OpenHandles(Generic[T]):
    """Forgets what was closed whenever it has doubled, so that each that is added costs the same."""

    __slots__ = ("_look_at", "_ones")

    def __init__(self) -> None:
        self._ones: list[T] = []
        self._look_at = _LOOK_AT

    def __len__(self) -> int:
        return len(self._ones)

    def add(self, one: T) -> None:
        """Keep it until it is closed."""
        if len(self._ones) >= self._look_at:
            self._ones = [kept for kept in self._ones if not kept.closed]
            self._look_at = max(_LOOK_AT, 2 * len(self._ones))
        self._ones.append(one)

    def take(self) -> list[T]:
        """All that are kept, in their order; nothing is kept any more."""
        taken, self._ones = self._ones, []
        return taken
