"""Requests for partitions that nobody serves at the moment: kept until somebody does, or for a while.

A partition has no owner for a moment when its topic was just made and whenever it moves.  A request that
waits here is answered as soon as the owner is known, without the client asking again and again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from danube import clock
from danube.core import wire
from danube.core.wire import FrameDecoder, Kind
from danube.errors import DanubeError, Unavailable

if TYPE_CHECKING:
    from danube.broker.router import RoutedSession, Router
    from danube.core.wire import Frame

WAIT_NS: Final = 1_000_000_000
PARKED_MAX: Final = 10_000
_WAITS: Final = frozenset(map(int, (Kind.OPEN_PRODUCER, Kind.SUBSCRIBE, Kind.ADMIN)))


class _Parked(NamedTuple):
    deadline_ns: int
    session: RoutedSession
    frame: bytes  # whole


class Parked:
    """What waits on one worker; the oldest first."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._waiting: deque[_Parked] = deque()
        self._deadline_ns = 0  # of what is offered again; 0: none is

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, session: RoutedSession, frame: Frame, buffer: memoryview, error: DanubeError) -> bool:
        """Keep a request that failed with ``error``; False where waiting would not help."""
        if type(error) is not Unavailable or frame.kind not in _WAITS or len(self._waiting) >= PARKED_MAX:
            return False
        now_ns = clock.monotonic_ns()
        deadline_ns = self._deadline_ns or now_ns + WAIT_NS
        if now_ns >= deadline_ns:
            return False
        start = frame.start - wire.FRAME_HEADER_BYTES
        end = frame.start + ((frame.end - frame.start + 7) & ~7)
        self._waiting.append(_Parked(deadline_ns, session, bytes(buffer[start:end])))
        return True

    def offer(self) -> None:
        """Ownership changed: look again at all."""
        waiting, self._waiting = self._waiting, deque()
        for one in waiting:
            self._offer(one)

    def tick(self, now_ns: int) -> None:
        """Answer what has waited long enough."""
        for _ in range(len(self._waiting)):  # each once: one may be put back, as its owner's ring is full
            if not self._waiting or self._waiting[0].deadline_ns > now_ns:
                break
            self._offer(self._waiting.popleft())

    def _offer(self, parked: _Parked) -> None:
        if parked.session.closed:
            return
        buffer = memoryview(bytearray(parked.frame))
        self._deadline_ns = parked.deadline_ns
        try:
            for frame in FrameDecoder().frames(buffer, 0, len(buffer)):
                if not self._router.route(parked.session, frame, buffer):
                    self._waiting.append(parked)  # the ring to its owner is full
        finally:
            self._deadline_ns = 0
