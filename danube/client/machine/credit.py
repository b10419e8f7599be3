"""Publish credit of a connection: the un-answered bytes that the broker takes, first come, first served."""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Sender(Protocol):
    """A producer that waits for publish credit."""

    def transmit(self) -> None: ...


class PublishCredit:
    """What is left of WELCOME's ``publish_credit_bytes``, and who waits for it."""

    def __init__(self) -> None:
        self._left = 0
        self._whole = 0
        self._queue: deque[Sender] = deque()
        self._served: Sender | None = None

    def reset(self, size_bytes: int) -> None:
        """A new connection: nothing is in flight and nobody waits."""
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
