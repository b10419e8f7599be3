"""Waiting of a task for a reply: the task resumes as soon as the bytes that settled it are taken.

A future has its task go on in the loop's next iteration, before which the loop looks at all its sockets once
more.  A task that waits here is resumed by the link that read the bytes, when it has taken all of them
(docs/adr/0039).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any, NoReturn

from danube.client.machine.reply import Reply


class Wakeups:
    """The tasks of one loop that go on once the bytes at hand are taken."""

    __slots__ = ("due", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.due: list[Waiting] | None = None  # whose replies are settled; a list while bytes are taken

    def run(self) -> None:
        """Resume the tasks whose replies are settled, now that all bytes are taken."""
        due, self.due = self.due, None
        for waiting in due or ():
            try:
                waiting.go_on()
            except RuntimeError:  # a task cannot run inside of another, nor where its context is entered
                self.loop.call_soon(waiting.go_on)
            except (KeyboardInterrupt, SystemExit) as error:  # it has to end the loop, not the connection
                self.loop.call_soon(_raise, error)


class Waiting:
    """To be awaited once, by one task; asyncio takes it for a future because of the first attribute."""

    __slots__ = (
        "_asyncio_future_blocking",
        "_callback",
        "_cancelled",
        "_context",
        "_loop",
        "_reply",
        "_wakeups",
    )

    _callback: Callable[[Waiting], object]
    _context: Context

    def __init__(self, reply: Reply, wakeups: Wakeups) -> None:
        self._asyncio_future_blocking = False
        self._cancelled: asyncio.CancelledError | None = None
        self._loop = wakeups.loop
        self._reply = reply
        self._wakeups = wakeups

    def __await__(self) -> Generator[Waiting, None, None]:
        """Wait until the reply is settled, with a value or an error."""
        self._asyncio_future_blocking = True
        yield self

    # -- what a task asks of a future -------------------------------------------------------------

    def add_done_callback(self, callback: Callable[[Waiting], object], *, context: Context) -> None:
        self._callback, self._context = callback, context
        self._reply.when_settled(self._settled)

    def cancel(self, msg: Any = None) -> bool:
        """Let the task go on with CancelledError; False when it is about to go on anyway."""
        if self._reply.settled or self._cancelled is not None:
            return False
        self._reply.forget(self._settled)
        self._cancelled = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        self._loop.call_soon(self.go_on)
        return True

    def result(self) -> None:
        if self._cancelled is not None:
            raise self._cancelled

    # -- inside -----------------------------------------------------------------------------------

    def _settled(self, _: Reply) -> None:
        due = self._wakeups.due
        if due is None:
            self._loop.call_soon(self.go_on)
        else:
            due.append(self)

    def go_on(self) -> None:
        """Run the task up to its next wait."""
        self._context.run(self._callback, self)


def _raise(error: BaseException) -> NoReturn:
    raise error
