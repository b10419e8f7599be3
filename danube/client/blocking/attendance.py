"""A thread that answers the broker while a program that uses the blocking client is busy with something else.

A blocking client reads its sockets only within its calls.  The broker sends a PING to a silent session, and
ends the session if no answer comes, because a hanging process must not keep records from others.  A handler
that takes minutes is not a hanging process.  So this thread polls the sockets four times within that time.  A
process that is stopped, or that never lets another thread run, sends no answer, which is correct.
"""

from __future__ import annotations

import threading
import weakref
from typing import Final, Protocol

from danube.client.machine.session import Session

LOOKS: Final = 4  # within the time that the broker allows
UNASKED_S: Final = 60.0  # with a broker that does not ask; the next one may


class Attended(Protocol):
    """A connection that its program may not use for a long time."""

    session: Session

    def attend(self) -> None: ...


class Attendance:
    """The thread of one connection; a child of a fork has none, and needs none."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def start(self, connection: Attended) -> None:
        """Answer for ``connection`` until stop(), or until it is garbage-collected."""
        threading.Thread(
            target=_attend, args=(weakref.ref(connection), self._stopped), name="danube-client", daemon=True
        ).start()

    def stop(self) -> None:
        self._stopped.set()


def _attend(held: weakref.ref[Attended], stopped: threading.Event) -> None:
    while (pause_s := _pause_s(held())) and not stopped.wait(pause_s):
        connection = held()
        if connection is not None:
            connection.attend()
        del connection


def _pause_s(connection: Attended | None) -> float:
    """Return the pause before the next attendance; 0 without a connection."""
    if connection is None:
        return 0.0
    timeout_ms = connection.session.welcome.session_timeout_ms
    return timeout_ms / 1000 / LOOKS if timeout_ms else UNASKED_S
