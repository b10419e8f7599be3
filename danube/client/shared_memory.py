"""Memory shared with a broker on this host, so that large batches need not go through the socket.

A slot holds one whole PUBLISH frame.  It is written once, stands for as long as the broker may read it, and
is free again when the answer has come.  Where a frame may never be answered (its handle or the connection is
gone) nobody knows when the broker is done with it: all of this memory is given up then, and new is made.

A memfd has no name to guess and goes with the last process that maps it.  Its size is sealed, so that no
mapping of it can raise SIGBUS.  Its descriptor stays open as long as batches are put there: another worker
that owns a partition maps it when the first of them is for it.  Pages are there for slots that were used,
and the slot that became free last is used first: it is in the processor's caches.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from typing import Final

from danube.client.requests import Request
from danube.core import wire
from danube.errors import DanubeError
from danube.limits import SHARED_BODY_BYTES_MIN, SHARED_SLOT_BYTES, SHARED_SLOTS

_FIRST_SLOT: Final = 4096  # behind the token, and aligned
_BYTES: Final = _FIRST_SLOT + SHARED_SLOTS * SHARED_SLOT_BYTES


class SharedMemory:
    """One memfd of this process, and what lies in its slots.  Raises OSError where there is no memory."""

    def __init__(self) -> None:
        self._descriptor = _sealed(_BYTES)
        self._view = memoryview(mmap.mmap(self._descriptor, _BYTES))
        token = os.urandom(wire.SHARED_TOKEN_BYTES)
        self._view[: len(token)] = token
        self.offer = wire.ShareMemory(os.getpid(), self._descriptor, _BYTES, token)
        self._free: list[int] = []  # positions; none until the broker reads them
        self._taken: dict[int, int] = {}  # correlation -> position

    def decide(self, accepted: bool) -> None:
        """The broker has mapped this memory, or will not."""
        if not accepted:
            self.give_up()
        elif self._descriptor >= 0:
            self._free = list(range(_FIRST_SLOT, _BYTES, SHARED_SLOT_BYTES))

    def give_up(self) -> None:
        """Put nothing here any more; what is here stays as it is for whoever has mapped it."""
        descriptor, self._descriptor = self._descriptor, -1
        self._free = []
        if descriptor >= 0:
            os.close(descriptor)

    def place(self, correlation: int, header: bytes, head: bytes, body: bytes) -> bytes | None:
        """Write a frame into a slot; return the one that stands for it, or None where it has no room."""
        size = len(header) + len(head) + len(body)
        if not self._free or size > SHARED_SLOT_BYTES:
            return None
        position = self._taken[correlation] = self._free.pop()
        view, start = self._view, position + len(header) + len(head)
        view[position:start] = header + head
        view[start : position + size] = body
        return wire.shared_frame(position, size)

    def holds(self, correlation: int) -> bool:
        """Whether a frame with this correlation has a slot, and no answer yet."""
        return correlation in self._taken

    def answered(self, correlation: int) -> None:
        """The broker is done with the frame, if it was one of these."""
        position = self._taken.pop(correlation, None)
        if position is not None:
            self._free.append(position)


def _sealed(size: int) -> int:
    import fcntl  # not on every system that clients run on

    descriptor = os.memfd_create(wire.SHARED_MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Sharing:
    """What a session shares with the broker of its connection, if that is on this host.

    ``ask`` sends the offer, which comes with the first large frame; until it is accepted, and where it is
    not, frames go through the socket.
    """

    def __init__(self, ask: Callable[[wire.ShareMemory], Request]) -> None:
        self._ask = ask
        self._near = False
        self._memory: SharedMemory | None = None

    def connected(self, near: bool) -> None:
        """There is a connection; ``near``: to this host."""
        self._near = near and sys.platform == "linux"

    def disconnected(self) -> None:
        """The broker may still read what it was sent."""
        self._near = False
        self._give_up()

    def place(self, correlation: int, header: bytes, head: bytes, body: bytes) -> bytes | None:
        """Write a frame into shared memory; return the one that stands for it, None where that cannot be."""
        if not self._near or len(body) < SHARED_BODY_BYTES_MIN:
            return None
        if self._memory is None:
            self._offer()
        return None if self._memory is None else self._memory.place(correlation, header, head, body)

    def _offer(self) -> None:
        try:
            memory = SharedMemory()
        except OSError:  # no memory or no descriptor: it works without
            self._near = False
            return
        try:
            request = self._ask(memory.offer)
        except DanubeError:  # too many wait
            memory.decide(False)
            return
        self._memory = memory
        request.when_settled(lambda _: memory.decide(request.error is None))

    def answered(self, correlation: int) -> None:
        """An answer came to what had this correlation."""
        if self._memory is not None:
            self._memory.answered(correlation)

    def forgotten(self, correlation: int) -> None:
        """Nobody may hear when the broker is done with what had this correlation."""
        if self._memory is not None and self._memory.holds(correlation):
            self._give_up()

    def _give_up(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.give_up()
