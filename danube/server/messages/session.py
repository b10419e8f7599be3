"""The gRPC doors' own client of the broker: one session without a socket for each worker.

Every frame that a gRPC call becomes goes through the router like a native client's, to this worker's
shard or to another one's.  Answers come back by correlation; deliveries and closed handles by handle.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from danube.broker.api import RoutedSession
from danube.broker.routing.router import Router
from danube.core.batch.columns import EncodedBatch
from danube.core.protocol import native as wire
from danube.core.protocol.native import Admin, Frame, FrameDecoder, Kind
from danube.core.security.principals import INTERNAL
from danube.errors import DanubeError, Overloaded

CONNECTION_ID = (1 << 62) + 1
HELD_FRAMES_MAX = 100_000
_CORRELATION_MAX = 0xFFFF_FFFF
_PUBLISHED = int(Kind.PUBLISHED)
_new = tuple.__new__  # makes a named tuple without a call of a Python function

Answer = Callable[[Frame, bytes | memoryview], None]
"""Takes the answering frame and the bytes it lies in; an ERROR frame is an answer too."""


class HandleOwner(Protocol):
    """Opener of a handle: a target of publishes or a consumer."""

    def delivered(self, batches: bytes | memoryview) -> None: ...
    def handle_closed(self, error: DanubeError) -> None: ...


class BrokerSession(RoutedSession):
    """See the module.  All methods run on the worker's loop."""

    def __init__(self, router: Router, schedule_turn: Callable[[], None]) -> None:
        super().__init__(CONNECTION_ID, INTERNAL)
        self._router = router
        self.schedule_turn = schedule_turn
        self._answers: dict[int, Answer] = {}
        self._handles: dict[int, HandleOwner] = {}
        self.held: deque[bytearray] = deque()  # frames that a full ring refused, in order
        self._correlation = 0
        self._handle = 0

    # -- requests ---------------------------------------------------------------------------------

    def request(self, kind: Kind, body: Any, handle: int, answer: Answer) -> None:
        """Send one request frame; ``answer`` gets the reply."""
        correlation = self.expect(answer)
        self.send_frame(bytearray(wire.control_frame(kind, body, correlation, handle)))

    def expect(self, answer: Answer) -> int:
        """Return a new correlation whose answer goes to ``answer``."""
        self._correlation = self._correlation % _CORRELATION_MAX + 1
        while self._correlation in self._answers:
            self._correlation = self._correlation % _CORRELATION_MAX + 1
        self._answers[self._correlation] = answer
        return self._correlation

    def send_frame(self, frame: bytearray) -> None:
        """Route one whole frame, whose memory is this session's until the end of the turn.

        Frames that a full ring refuses are kept and offered again each turn, in order.
        """
        if self.held or not self._route(frame):
            self._hold(frame)
        self.schedule_turn()

    def publish(self, handle: int, correlation: int, batch: EncodedBatch) -> None:
        """Publish a batch that was just encoded.

        Where this worker owns the partition no frame is made: the answer is a PUBLISHED frame without
        its body.
        """
        if not self._router.publish(self, handle, correlation, batch):
            frame = bytearray(wire.frame_header(Kind.PUBLISH, batch.size, correlation, handle))
            frame += batch.head
            frame += batch.body
            self.send_frame(frame)

    def _hold(self, frame: bytearray) -> None:
        if len(self.held) >= HELD_FRAMES_MAX:
            one = next(FrameDecoder().frames(frame, 0, len(frame)))
            self.send_error(Overloaded("the owner of the partition does not keep up"), one.correlation)
            return
        self.held.append(frame)

    def _route(self, frame: bytearray) -> bool:
        buffer = memoryview(frame)
        for one in FrameDecoder().frames(buffer, 0, len(buffer)):
            if not self._router.route(self, one, buffer):
                return False
        return True

    def offer_held(self) -> bool:
        """Offer refused frames to the rings again; return True if some are still refused."""
        while self.held:
            if not self._route(self.held[0]):
                return True
            self.held.popleft()
        return False

    async def call(self, kind: Kind, body: Any, handle: int = 0) -> tuple[Frame, bytes]:
        """Send a request and wait for its answer; raises the DanubeError that came instead."""
        future: asyncio.Future[tuple[Frame, bytes]] = asyncio.get_running_loop().create_future()

        def answer(frame: Frame, data: bytes | memoryview) -> None:
            if future.done():
                return
            body_bytes = bytes(data[frame.start : frame.end])
            if frame.kind == Kind.ERROR:
                future.set_exception(wire.decode_error(body_bytes))
            else:
                future.set_result((frame, body_bytes))

        self.request(kind, body, handle, answer)
        return await future

    async def ask(self, op: str, **args: Any) -> Any:
        """The result of an operation that any worker answers."""
        _, body = await self.call(Kind.ADMIN, Admin(op, "", args))
        return wire.decode_result(body)

    async def ask_partition(self, partition: str, op: str, **args: Any) -> Any:
        """The result of an operation at the owner of a partition, by its physical name."""
        _, body = await self.call(Kind.ADMIN, Admin(op, partition, args))
        return wire.decode_result(body)

    # -- handles ----------------------------------------------------------------------------------

    def open_handle(self, owner: HandleOwner) -> int:
        """A fresh handle; deliveries to it and its end go to ``owner``."""
        self._handle = self._handle % _CORRELATION_MAX + 1
        while self._handle in self._handles:
            self._handle = self._handle % _CORRELATION_MAX + 1
        self._handles[self._handle] = owner
        return self._handle

    def drop_handle(self, handle: int) -> None:
        """Drop a handle; frames that still arrive for it are ignored."""
        self._handles.pop(handle, None)

    def worker_restarted(self, worker: int) -> None:
        """Close the handles of an owner that has ended, and fail its open requests."""
        self._router.worker_restarted(self, worker)

    # -- answers ----------------------------------------------------------------------------------

    def send(self, *parts: bytes | memoryview) -> None:
        head = parts[0]
        if len(parts) > 1:  # a delivery: its head, then batches that never change any more
            owner = self._handles.get(wire.handle_of(head))
            if owner is not None:
                owner.delivered(parts[1] if len(parts) == 2 else b"".join(parts[1:]))
            return
        for frame in FrameDecoder().frames(head, 0, len(head)):
            self._on_frame(frame, head)

    def send_published(
        self,
        correlation: int,
        handle: int,
        base_offset: int,
        epoch: int,
        record_count: int,
        level: int,
        flags: int,
    ) -> None:
        answer = self._answers.pop(correlation, None)
        if answer is not None:
            answer(_new(Frame, (_PUBLISHED, flags, correlation, handle, 0, 0)), b"")

    def _on_frame(self, frame: Frame, data: bytes | memoryview) -> None:
        if frame.correlation:
            answer = self._answers.pop(frame.correlation, None)
            if answer is not None:
                answer(frame, data)
            return
        owner = self._handles.get(frame.handle)
        if owner is None:
            return
        if frame.kind == Kind.DELIVER:
            owner.delivered(memoryview(data)[frame.start + wire.DELIVERY_BYTES : frame.end])
        elif frame.kind == Kind.ERROR:
            del self._handles[frame.handle]
            owner.handle_closed(wire.decode_error(data[frame.start : frame.end]))
