"""Requests of this worker to the owners of partitions, for an operation of its own.

They use one session without a socket.  Its ADMIN frames go through the router like a client's, to this
worker's shard or over a ring, and answers are matched by correlation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from danube.broker.api import RoutedSession
from danube.core.protocol import native as wire
from danube.core.protocol.native import Admin, Frame, FrameDecoder, Kind
from danube.core.security.principals import INTERNAL
from danube.errors import Overloaded

CONNECTION_ID: Final = (1 << 62) + 2
QUESTIONS_MAX: Final = 10_000
_CORRELATION_MAX: Final = 0xFFFF_FFFF

Answered = Callable[[Any], None]
Route = Callable[[RoutedSession, Frame, memoryview], bool]


class Questions(RoutedSession):
    """Session of the open requests; all methods run on the worker's loop."""

    def __init__(self, route: Route, schedule_turn: Callable[[], None]) -> None:
        super().__init__(CONNECTION_ID, INTERNAL)
        self._route = route
        self._schedule_turn = schedule_turn
        self._answers: dict[int, Answered] = {}
        self._correlation = 0

    def ask(self, partition: str, op: str, args: dict[str, Any], answer: Answered) -> None:
        """Send a request to a partition's owner; ``answer`` gets the value or error.  Raises Overloaded."""
        if len(self._answers) >= QUESTIONS_MAX:
            raise Overloaded("too many questions to partitions' owners are open", limit=QUESTIONS_MAX)
        correlation = self._correlation = self._correlation % _CORRELATION_MAX + 1
        self._answers[correlation] = answer
        question = wire.control_frame(Kind.ADMIN, Admin(op, partition, args), correlation)
        buffer = memoryview(bytearray(question))
        for frame in FrameDecoder().frames(buffer, 0, len(buffer)):
            if not self._route(self, frame, buffer):
                del self._answers[correlation]
                raise Overloaded("the owner of the partition does not keep up", hint="ask again")
        self._schedule_turn()

    def send(self, *parts: bytes | memoryview) -> None:
        """Take one or more answers of an owner."""
        frames = b"".join(parts)
        for frame in FrameDecoder().frames(frames, 0, len(frames)):
            answer = self._answers.pop(frame.correlation, None)
            if answer is not None:
                body = frames[frame.start : frame.end]
                answer(wire.decode_error(body) if frame.kind == Kind.ERROR else wire.decode_result(body))
