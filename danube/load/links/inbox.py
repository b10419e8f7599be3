"""Received records of several threads for one that hands them out."""

from __future__ import annotations

import queue
import threading
from typing import Any, Final

LOOK_S: Final = 0.2


class Inbox:
    """Records that wait, and the error that ended a thread's; closed, it lets every thread go.

    Full: ``put`` waits, so the broker's windows close.
    """

    def __init__(self, room: int) -> None:
        self.closed = threading.Event()
        self._waiting: queue.Queue[Any] = queue.Queue(room)

    def put(self, received: Any) -> bool:
        """Wait for room; False, and nothing is kept, once the inbox is closed."""
        while not self.closed.is_set():
            try:
                self._waiting.put(received, timeout=LOOK_S)
            except queue.Full:
                continue
            return True
        return False

    def get(self, timeout_s: float | None = None) -> Any:
        """Return the next record, or None when there was none for so long; raise an error that was put."""
        try:
            received = self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(received, Exception):
            raise received
        return received

    def close(self) -> None:
        self.closed.set()
