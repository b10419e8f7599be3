"""Memory shared with a broker on this host, so that large batches need not go through the socket.

A slot holds one whole PUBLISH frame, whose batch is made there if its payloads are copied into it anyway,
past the caches where that is faster (:mod:`copying`).  It stands for as long as the broker may read it, and
is free again when the answer has come.  Where a frame may never be answered (its handle or the connection is
gone) nobody knows when the broker is done with it: all of this memory is given up then, and new is made.

A memfd has no name to guess and goes with the last process that maps it.  Its size is sealed, so that no
mapping of it can raise SIGBUS.  Its descriptor stays open as long as batches are put there: another worker
that owns a partition maps it when the first of them is for it.  Pages are there for slots that were used,
and the slot that became free last is used first: it is in the processor's caches.

Whether bytes for another processor are stored as usual, or past the caches (kernels/streaming.py).

Both are right, on one host and minutes apart.  Where reader and writer share caches, what is stored as usual
is read from there, and what went past them has to be fetched from memory.  Where they share none, each line
waits for the other processor to let go of it, five times as long as the whole copy takes past the caches; a
virtual host is moved from one to the other.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.client.machine.requests import Request
from danube.core import kernels
from danube.core.batch.format import BODY_CRC_START
from danube.core.batch.payloads import Place
from danube.core.kernels.objects import CONTENT
from danube.core.protocol import native as wire
from danube.errors import DanubeError
from danube.host import clock
from danube.limits import SHARED_BODY_BYTES_MIN, SHARED_SLOT_BYTES, SHARED_SLOTS

if TYPE_CHECKING:
    from danube.client.machine.outgoing import Outgoing


TRIED: Final = 4  # how many copies past the caches tell what one costs
STREAMED: Final = 128  # after how many of them usual ones are tried again
TIMES: Final = 2.25  # as long as the best of them: what a usual one may take
SLOW_IN_A_ROW: Final = 2  # that took longer; one alone was held up by somebody else


class CopyChoice:
    """Chooses for copies of one kind, by how long they took."""

    __slots__ = ("_best_ns", "_left", "_slow")

    def __init__(self) -> None:
        self._best_ns = float("inf")  # a byte, past the caches
        self._left = TRIED
        self._slow = 0  # usual ones in a row

    def streams(self) -> bool:
        """Whether the next one goes past the caches."""
        return self._left > 0 and kernels.available

    def took(self, streamed: bool, size: int, duration_ns: int) -> None:
        """How long a copy of ``size`` bytes took, and how it was done."""
        cost_ns = duration_ns / size
        if streamed:
            self._left -= 1
            self._best_ns = min(self._best_ns, cost_ns)
            return
        self._slow = self._slow + 1 if cost_ns > TIMES * self._best_ns else 0
        if self._slow == SLOW_IN_A_ROW:
            self._slow, self._left, self._best_ns = 0, STREAMED, float("inf")


_FIRST_SLOT: Final = 4096  # behind the token, and aligned
_BYTES: Final = _FIRST_SLOT + SHARED_SLOTS * SHARED_SLOT_BYTES
_START_BYTES: Final = wire.FRAME_HEADER_BYTES + BODY_CRC_START  # what a PUBLISH frame has in front of a body
_SHIFT: Final = 64


class SharedMemory:
    """One memfd of this process, and what lies in its slots.  Raises OSError where there is no memory."""

    def __init__(self) -> None:
        self._descriptor = _sealed(_BYTES)
        self._view = memoryview(mmap.mmap(self._descriptor, _BYTES))
        token = os.urandom(wire.SHARED_TOKEN_BYTES)
        self._view[: len(token)] = token
        self.offer = wire.ShareMemory(os.getpid(), self._descriptor, _BYTES, token)
        self.made = CopyChoice()  # batches of lists
        self._copied = CopyChoice()  # others
        self._octets = np.frombuffer(self._view, np.uint8)
        self._near: NDArray[np.uint8] | None = None  # where small payloads meet before they are streamed
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

    def place(self, correlation: int, start: bytes, body: bytes | memoryview) -> bytes | None:
        """Copy a frame into a slot; return the one that stands for it, or None where it has no room."""
        size = len(start) + len(body)
        if not self._free or size > SHARED_SLOT_BYTES - _SHIFT:
            return None
        slot = self._free.pop()
        position = slot + _shift(body, slot + len(start))
        self._taken[correlation] = slot
        view, place = self._view, position + len(start)
        view[position:place] = start
        streamed, began_ns = self._copied.streams(), clock.monotonic_ns()
        if streamed:
            kernels.streaming_kernels().stream(self._octets, place, np.frombuffer(body, np.uint8))
        else:
            view[place : position + size] = body
        self._copied.took(streamed, size, clock.monotonic_ns() - began_ns)
        return wire.shared_frame(position, size)

    def near(self) -> NDArray[np.uint8]:
        """Memory of this process alone, in its caches, for what goes past them."""
        if self._near is None:
            self._near = np.empty(kernels.list_kernels().NEAR_BYTES, np.uint8)
        return self._near

    def reserve(self, body_size: int) -> Slot | None:
        """A slot where a body of so many bytes is made; None where there is no room."""
        if not self._free or _START_BYTES + body_size > SHARED_SLOT_BYTES:
            return None
        position = self._free.pop()
        place = position + _START_BYTES
        return Slot(self, position, self._view[place : place + body_size])

    def complete(self, correlation: int, start: bytes, slot: Slot) -> bytes:
        """Write what a frame has in front of the body that was made in ``slot``; return the one for it."""
        position = self._taken[correlation] = slot.position
        self._view[position : position + _START_BYTES] = start
        return wire.shared_frame(position, _START_BYTES + len(slot.body))

    def release(self, slot: Slot) -> None:
        """Nothing was sent from there."""
        if self._descriptor >= 0:
            self._free.append(slot.position)

    def holds(self, correlation: int) -> bool:
        """Whether a frame with this correlation has a slot, and no answer yet."""
        return correlation in self._taken

    def answered(self, correlation: int) -> None:
        """The broker is done with the frame, if it was one of these."""
        position = self._taken.pop(correlation, None)
        if position is not None:
            self._free.append(position)


class Slot(NamedTuple):
    """Memory for one frame, and the part of it that is for the batch's body."""

    memory: SharedMemory
    position: int
    body: memoryview

    def release(self) -> None:
        """It is not needed after all."""
        self.memory.release(self)


class Allocator:
    """Asked by an encoder for memory of the size that a body turns out to have."""

    __slots__ = ("_began_ns", "_memory", "_slot", "_streamed")

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._slot: Slot | None = None

    def __call__(self, size: int) -> Place | None:
        if size < SHARED_BODY_BYTES_MIN:
            return None
        memory = self._memory
        self._slot = slot = memory.reserve(size)
        if slot is None:
            return None
        self._streamed = memory.made.streams()
        self._began_ns = clock.monotonic_ns()
        return Place(slot.body, memory.near() if self._streamed else None)

    def take(self) -> Slot | None:
        """The slot with the body that was made; None where the encoder has it elsewhere."""
        slot = self._slot
        if slot is not None:
            self._memory.made.took(self._streamed, len(slot.body), clock.monotonic_ns() - self._began_ns)
        return slot

    def release(self) -> None:
        """The batch could not be made."""
        if self._slot is not None:
            self._slot.release()


def _shift(body: bytes | memoryview, place: int) -> int:
    """How much further a slot's frame begins, so that ``body`` is copied to ``place`` at full speed.

    Some processors take ten times as long where the last 12 bits of the target's address are up to 15 more
    than those of the source's.
    """
    return _SHIFT if type(body) is bytes and 0 < (place - id(body) - CONTENT) & 4095 < _SHIFT else 0


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

    def allocator(self) -> Allocator | None:
        """For the memory of a batch that is for this connection, as far as anybody knows yet."""
        return None if self._memory is None else Allocator(self._memory)

    def place(self, correlation: int, start: bytes, outgoing: Outgoing) -> bytes | None:
        """Have a batch in shared memory; return the frame that stands for it, or None where that cannot be.

        ``start`` is what its PUBLISH frame has in front of the body.
        """
        slot, memory = outgoing.slot, self._memory
        if slot is not None:
            if slot.memory is memory:
                outgoing.slot = None  # from now on it is the correlation's
                return memory.complete(correlation, start, slot)
            outgoing.take_back(bytes(outgoing.body))  # it was made for another connection
        if not self._near or len(outgoing.body) < SHARED_BODY_BYTES_MIN:
            return None
        if memory is None:
            memory = self._offer()
        return None if memory is None else memory.place(correlation, start, outgoing.body)

    def _offer(self) -> SharedMemory | None:
        try:
            memory = SharedMemory()
        except OSError:  # no memory or no descriptor: it works without
            self._near = False
            return None
        try:
            request = self._ask(memory.offer)
        except DanubeError:  # too many wait
            memory.decide(False)
            return None
        self._memory = memory
        request.when_settled(lambda _: memory.decide(request.error is None))
        return memory

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
