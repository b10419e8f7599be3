"""State that a session keeps: requests that wait for an answer, publish credit, timers, and counters.

The shell reads the time of the next timer, and calls the machine at that time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from danube.client.machine.reply import Reply
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import DanubeError, ProtocolError


def nothing(*_: Any) -> None:
    """Stand in for a callback that is not set."""


class Timer:
    """A moment at which ``action`` is called, unless cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Timers:
    """A heap of timers; ``when_timer`` is called when an earlier one than before was added."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.now_ns = now_ns
        self.when_timer: Callable[[], None] = nothing
        self._timers: list[tuple[int, int, Timer]] = []
        self._timer_order = itertools.count()

    @property
    def next_timer_ns(self) -> int | None:
        """Moment on the monotonic clock of the first live timer."""
        timers = self._timers
        while timers and timers[0][2].action is None:
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    def call_at(self, moment_ns: int, action: Callable[[], None]) -> Timer:
        """Call ``action`` from on_time() once ``moment_ns`` has come."""
        timer = Timer(action)
        heapq.heappush(self._timers, (moment_ns, next(self._timer_order), timer))
        if self._timers[0][2] is timer:
            self.when_timer()
        return timer

    def bounded(self, timeout_ns: int, late: Callable[[], DanubeError]) -> Reply:
        """Return a reply that fails with the error of ``late`` if it is not settled in time."""
        reply = Reply()
        timer = self.call_at(self.now_ns() + timeout_ns, lambda: reply.fail(late()))
        reply.when_settled(lambda _: timer.cancel())
        return reply

    def on_time(self) -> None:
        """Run due timers."""
        now_ns = self.now_ns()
        while self._timers and self._timers[0][0] <= now_ns:
            timer = heapq.heappop(self._timers)[2]
            action, timer.action = timer.action, None
            if action is not None:
                action()


class Sender(Protocol):
    """A producer that waits for publish credit."""

    def transmit(self) -> None: ...


class PublishCredit:
    """Rest of WELCOME's ``publish_credit_bytes``, and the senders that wait for some."""

    def __init__(self) -> None:
        self._left = 0
        self._whole = 0
        self._queue: deque[Sender] = deque()
        self._served: Sender | None = None

    def reset(self, size_bytes: int) -> None:
        """Begin a new connection: nothing is in flight, and no sender waits."""
        self._left = self._whole = size_bytes
        self._queue.clear()
        self._served = None

    def take(self, size_bytes: int, sender: Sender) -> bool:
        """Take publish credit, or queue ``sender`` to be called when some came back.

        First come, first served: a large batch is not overtaken for ever by small ones.  A batch
        larger than the whole credit goes out when nothing else is in flight.
        """
        credit = self._left
        first = not self._queue or self._served is sender
        if first and (size_bytes <= credit or credit == self._whole):
            self._left = credit - size_bytes
            return True
        if self._served is sender:
            self._queue.appendleft(sender)
            self._served = None
        elif sender not in self._queue:
            self._queue.append(sender)
        return False

    def give_back(self, size_bytes: int) -> None:
        """A PUBLISH was answered."""
        self._left += size_bytes
        queue = self._queue
        while queue:
            self._served = sender = queue.popleft()
            sender.transmit()
            blocked = self._served is None
            self._served = None
            if blocked:
                return


class Request(Reply):
    """A control frame and its answer, decoded by ``kind``."""

    __slots__ = ("_answer", "body", "correlation", "handle", "kind", "refused", "repeatable", "timer")

    def __init__(self, kind: int, body: Any, handle: int, repeatable: bool, answer: Any) -> None:
        super().__init__()
        self.kind = kind
        self.body = body
        self.handle = handle
        self.repeatable = repeatable
        self.correlation = 0
        self.refused = 0  # connections that ended under it by an error that asking again does not mend
        self.timer: Timer | None = None
        self._answer = answer

    def on_answer(self, kind: int, flags: int, body: memoryview) -> None:
        if self.timer is not None:
            self.timer.cancel()
        try:
            self.resolve(self._decoded(kind, body))
        except DanubeError as error:
            self.fail(error)
            raise

    def _decoded(self, kind: int, body: memoryview) -> Any:
        if kind == Kind.RESULT:
            return wire.decode_result(body)
        if self._answer is not None and kind == self._answer[0]:
            return wire.decode_control(body, self._answer[1])
        raise ProtocolError(f"answer of kind {kind} does not fit the request of kind {self.kind}")

    def on_error(self, error: DanubeError) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.fail(error)


class Undone:
    """Takes the late answer to an open that was given up."""

    __slots__ = ("_close",)

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def on_answer(self, kind: int, flags: int, body: memoryview) -> None:
        self._close()

    def on_error(self, error: DanubeError) -> None:
        """Ignore the error: the broker opened nothing, so there is nothing to undo."""


CLOSED_BY: dict[int, Kind] = {
    Kind.OPEN_PRODUCER: Kind.CLOSE_PRODUCER,
    Kind.SUBSCRIBE: Kind.CLOSE_CONSUMER,
}
ANSWERS: dict[int, tuple[int, type]] = {
    Kind.OPEN_PRODUCER: (Kind.PRODUCER_OPENED, wire.ProducerOpened),
    Kind.SUBSCRIBE: (Kind.SUBSCRIBED, wire.Subscribed),
}


class Statistics(msgspec.Struct):
    """Counters of one client since it was made."""

    batches_delivered: int = 0
    batches_published: int = 0
    bytes_delivered: int = 0
    bytes_published: int = 0
    connections: int = 0
    damaged_batches: int = 0
    duplicates: int = 0
    records_delivered: int = 0
    records_published: int = 0
    send_failures: int = 0
