"""Waiting for sockets of a thread: poll(2), or select where the system has no poll (Windows)."""

from __future__ import annotations

import select
from typing import Any, Final

READABLE: Final = getattr(select, "POLLIN", 1)
WRITABLE: Final = getattr(select, "POLLOUT", 4)


class _Selecting:
    """``select.poll`` by ``select.select``: register and poll."""

    def __init__(self) -> None:
        self._events: dict[int, int] = {}

    def register(self, file: Any, events: int) -> None:
        self._events[file if isinstance(file, int) else file.fileno()] = events

    def poll(self, wait_ms: int) -> list[tuple[int, int]]:
        reading = [file for file, events in self._events.items() if events & READABLE]
        writing = [file for file, events in self._events.items() if events & WRITABLE]
        ready = select.select(reading, writing, reading + writing, wait_ms / 1000)
        return [(file, self._events[file]) for file in dict.fromkeys(ready[0] + ready[1] + ready[2])]


def make_poller() -> Any:
    """Return an object with the methods ``register`` and ``poll`` of ``select.poll()``."""
    return select.poll() if hasattr(select, "poll") else _Selecting()
