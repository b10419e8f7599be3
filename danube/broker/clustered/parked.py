"""Requests for partitions without a serving broker: kept until there is one, or until a time limit.

A partition has no owner for a moment after its topic was made, and during each move.  A request that waits
here is answered as soon as the owner is known, so the client need not repeat it.  Requests that another
broker refused wait here, too: during a move brokers learn the new owner at different times.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameDecoder, Kind
from danube.errors import ClosedError, DanubeError, OwnerMoved, Unavailable
from danube.host import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from danube.broker.api import RoutedSession
    from danube.broker.operations.context import Answer
    from danube.core.protocol.native import Frame

WAIT_NS: Final = 1_000_000_000
PARKED_MAX: Final = 10_000
_WAITS: Final = frozenset(map(int, (Kind.OPEN_PRODUCER, Kind.SUBSCRIBE, Kind.ADMIN)))


class _Parked(NamedTuple):
    deadline_ns: int
    session: RoutedSession
    frame: bytes  # with its header
    handle: int  # the handle that the request opens; 0: none


class Parked:
    """Waiting requests of one worker, the oldest first."""

    def __init__(self, route: Callable[[RoutedSession, Frame, memoryview], bool]) -> None:
        self._route = route
        self._waiting: deque[_Parked] = deque()
        self._refused: deque[_Parked] = deque()  # refused by another broker, and not routed again since
        self._deadline_ns = 0  # deadline of the request that is being routed again; 0: none is

    def __len__(self) -> int:
        return len(self._waiting) + len(self._refused)

    def take(self, session: RoutedSession, frame: Frame, buffer: memoryview, error: DanubeError) -> bool:
        """Keep a request that failed with ``error``; False if waiting would not help."""
        if type(error) is not Unavailable or frame.kind not in _WAITS:
            return False
        return self._keep(self._waiting, self._parked(session, frame, buffer))

    def or_park(self, session: RoutedSession, frame: Frame, buffer: memoryview, answer: Answer) -> Answer:
        """Wrap ``answer`` of a request to another broker: a refused request is parked here instead."""
        parked = self._parked(session, frame, buffer)

        def answered(outcome: object) -> None:
            refused = isinstance(outcome, OwnerMoved) and bool(outcome.facts.get("address"))
            if not refused or not self._keep(self._refused, parked):
                answer(outcome)

        return answered

    def _parked(self, session: RoutedSession, frame: Frame, buffer: memoryview) -> _Parked:
        start = frame.start - wire.FRAME_HEADER_BYTES
        end = frame.start + ((frame.end - frame.start + 7) & ~7)
        deadline_ns = self._deadline_ns or clock.monotonic_ns() + WAIT_NS
        return _Parked(deadline_ns, session, bytes(buffer[start:end]), frame.handle)

    def _keep(self, queue: deque[_Parked], parked: _Parked) -> bool:
        """Queue a request; return False if its time is over, or there is no room."""
        if len(self) >= PARKED_MAX or clock.monotonic_ns() >= parked.deadline_ns:
            return False
        queue.append(parked)
        if parked.handle:
            parked.session.opening[parked.handle] = parked
        return True

    def offer(self) -> None:
        """Route all waiting requests again, because an ownership has changed."""
        waiting, self._waiting = self._waiting, deque()
        for one in waiting:
            self._offer(one)
        self._offer_refused()

    def tick(self, now_ns: int) -> None:
        """Answer requests that have waited too long, and repeat refused ones."""
        for _ in range(len(self._waiting)):  # each one once, because a full ring puts it back
            if not self._waiting or self._waiting[0].deadline_ns > now_ns:
                break
            self._offer(self._waiting.popleft())
        self._offer_refused()

    def _offer_refused(self) -> None:
        """Route requests again that another broker refused: it may know the new owner by now.

        That is tried by time, because no metadata change shows it here.
        """
        refused, self._refused = self._refused, deque()
        for one in refused:
            self._offer(one)

    def _offer(self, parked: _Parked) -> None:
        if parked.session.closed:
            return
        opening = parked.session.opening
        given_up = parked.handle and opening.get(parked.handle) is not parked
        if not given_up:
            opening.pop(parked.handle, None)
        buffer = memoryview(bytearray(parked.frame))
        self._deadline_ns = parked.deadline_ns
        try:
            for frame in FrameDecoder().frames(buffer, 0, len(buffer)):
                if given_up:
                    closed = ClosedError("the handle was closed before it was open")
                    parked.session.send_error(closed, frame.correlation)
                elif not self._route(parked.session, frame, buffer):
                    self._waiting.append(parked)  # the ring to its owner is full
                    if parked.handle:
                        opening[parked.handle] = parked
        finally:
            self._deadline_ns = 0
