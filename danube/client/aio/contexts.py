"""``async with`` of clients, producers and consumers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self

from danube.errors import DanubeError


class Context(ABC):
    """Opened by ``async with`` and closed behind it."""

    _close_failed: ClassVar[str]

    @abstractmethod
    async def open(self) -> Self: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except DanubeError as failure:
            if error is None:
                raise
            error.add_note(f"danube: {self._close_failed}: {failure}")
