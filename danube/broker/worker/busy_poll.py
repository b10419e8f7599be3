"""Busy polling: a worker polls its sockets instead of sleeping while requests follow each other closely.

Who sleeps has to be woken, and on a virtual host the processor has to be as well: tens of microseconds,
and what runs next finds caches and branch history cold.  A client that waits for an answer and sends again
is back sooner than that.  So a worker whose turn began within the limit after the one before, asked for by
the same connection and no other, looks for that long again (docs/adr/0031).

Others who want this processor must not wait for somebody who only looks: a look that came late, because
somebody else ran, is the last one for a while.  Nor must the worker's own threads wait for the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from danube.host import clock

LATE_NS: Final = 500_000  # a client's short run takes less, a share of somebody busy takes more
REST_NS: Final = 20_000_000


class BusyPoll:
    """One worker's, used on its loop: ``call_soon`` makes it look at its sockets and come back awake."""

    __slots__ = (
        "_busy", "_call_soon", "_ended_ns", "_limit_ns", "_looked_ns", "_looking", "_rests_until_ns",
        "asker",
    )  # fmt: skip

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object], limit_us: int, busy: Callable[[], bool]
    ) -> None:
        """``limit_us`` 0 never looks longer; while a thread of this worker is ``busy`` it does not either."""
        self.asker: object = None  # who alone had a part in the last turn
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
