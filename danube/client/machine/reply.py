"""A reply that has not come yet: the hinge between the protocol machine and its two shells.

The machine settles it once; the asyncio shell hangs a future on it, the blocking shell reads its
socket until it is settled.  A *plan* is a generator that yields replies and is sent their values,
so that one piece of logic serves both shells.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Plan = Generator["Reply", Any, T]


class Reply:
    """One outcome, later.  ``settled`` turns true exactly once; then ``result()`` answers."""

    __slots__ = ("_callbacks", "error", "settled", "value")

    def __init__(self) -> None:
        self.settled = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[Reply], None]] | None = None

    def resolve(self, value: Any) -> None:
        """Settle with a value; a reply that is settled already stays as it is."""
        if not self.settled:
            self.settled = True
            self.value = value
            if self._callbacks is not None:
                self._tell()

    def fail(self, error: BaseException) -> None:
        """Settle with an error; a reply that is settled already stays as it is."""
        if not self.settled:
            self.settled = True
            self.error = error
            if self._callbacks is not None:
                self._tell()

    def result(self) -> Any:
        """The value, or the error raised; only once ``settled``."""
        if self.error is not None:
            raise self.error
        return self.value

    def when_settled(self, callback: Callable[[Reply], None]) -> None:
        """Call ``callback`` when settled; at once if it is."""
        if self.settled:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def forget(self, callback: Callable[[Reply], None]) -> None:
        """Take a callback back, as when the task that waits was cancelled."""
        if self._callbacks is not None and callback in self._callbacks:
            self._callbacks.remove(callback)

    def _tell(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)


def settled_reply(value: Any = None) -> Reply:
    """A reply that has its value from the start."""
    reply = Reply()
    reply.resolve(value)
    return reply


def failed_reply(error: BaseException) -> Reply:
    """A reply that has failed from the start."""
    reply = Reply()
    reply.fail(error)
    return reply


def all_settled(replies: list[Reply]) -> Reply:
    """A reply that settles with None when every one of ``replies`` has; their errors stay with them."""
    pending = [reply for reply in replies if not reply.settled]
    if not pending:
        return settled_reply()
    whole = Reply()
    left = len(pending)

    def count(_: Reply) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            whole.resolve(None)

    for reply in pending:
        reply.when_settled(count)
    return whole
