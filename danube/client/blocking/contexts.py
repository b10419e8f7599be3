"""``with`` of clients, producers and consumers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self

from danube.errors import DanubeError


class Context(ABC):
    """Opened by ``with`` and closed behind it."""

    _close_failed: ClassVar[str]

    @abstractmethod
    def open(self) -> Self: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DanubeError as failure:
            if error is None:
                raise
            error.add_note(f"danube: {self._close_failed}: {failure}")
