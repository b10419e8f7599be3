"""``with`` of clients, producers and consumers, which are open as a whole or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, ClassVar, Self

from danube.client.blocking.connection import BlockingConnection
from danube.client.records.handles import Handle
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


def open_whole(handle: Handle[BlockingConnection, Any, Any]) -> None:
    """Open a producer or consumer; close again what was opened if the call is cut short."""
    already = handle._open_box
    if already is None:
        try:
            handle._connection.run(handle._opening())
        except BaseException:  # also a signal's, behind the last answer
            box, handle._open_box = handle._open_box, None
            if box is not None:
                handle._connection.leave(box.close)
            raise
