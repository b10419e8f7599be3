"""Busy polling: a worker polls its sockets instead of sleeping while requests follow each other closely.

Waking a sleeping worker, and on a virtual host its processor, takes tens of microseconds and leaves caches
and branch history cold.  A client that waits for an answer and sends again is back sooner.  So after a turn
that one connection alone requested, within the limit after its last one, the worker polls for as long as the
limit (docs/adr/0031).

Polling must not starve other processes: after one poll that was late by 0.5 ms (another process was
scheduled) it pauses for 20 ms.  Nor must the worker's own threads wait for the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from danube.host import clock

LATE_NS: Final = 500_000  # a client's short run takes less, a busy process's share takes more
REST_NS: Final = 20_000_000


class BusyPoll:
    """Busy polling of one worker, on its loop: ``call_soon`` polls the sockets without sleeping."""

    __slots__ = (
        "_busy", "_call_soon", "_ended_ns", "_limit_ns", "_looked_ns", "_looking", "_rests_until_ns",
        "asker",
    )  # fmt: skip

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object], limit_us: int, busy: Callable[[], bool]
    ) -> None:
        """Poll for ``limit_us`` (0: never), but not while a thread of this worker is ``busy``."""
        self.asker: object = None  # the only connection that took part in the last turn
        self._busy = busy
        self._call_soon = call_soon
        self._limit_ns = limit_us * 1_000
        self._ended_ns = 0  # the last turn
        self._looked_ns = 0
        self._rests_until_ns = 0
        self._looking = False

    def turn_ended(self, began_ns: int, asker: object) -> None:
        """Note the end of a turn; ``asker`` is the only connection that took part, else None."""
        near = began_ns - self._ended_ns < self._limit_ns
        again = asker is not None and asker is self.asker
        self._ended_ns = now_ns = clock.monotonic_ns()
        self.asker = asker
        if not (near and again) or self._looking or now_ns < self._rests_until_ns or self._busy():
            return
        self._looking = True
        self._looked_ns = now_ns
        self._call_soon(self._look)

    def _look(self) -> None:
        now_ns = clock.monotonic_ns()
        late = now_ns - max(self._looked_ns, self._ended_ns) > LATE_NS
        if late:
            self._rests_until_ns = now_ns + REST_NS
        if late or now_ns - self._ended_ns >= self._limit_ns or self._busy():
            self._looking = False
            return
        self._looked_ns = now_ns
        self._call_soon(self._look)
