"""The tail: the last bytes that a worker wrote to its logs, for hot reads by the other workers.

Writer:  one, the owner.  append() copies whole batches behind each other, over the oldest ones.
Reader:  any.  read() copies bytes out and then looks whether they were overwritten meanwhile.
Order:   the writer moves ``start`` past what it is about to overwrite, overwrites, then moves ``end``;
         the reader copies, then loads ``start``.  So a copy that ``start`` has not reached is whole.
Full:    never; the oldest bytes go.  None from read() means: read the segment file.
Crash:   a new writer goes on at the stored ``end``; what the dead one had half written lies after it.

    word  field
       0  start  first position that is whole
       8  end    position after the last whole byte

Positions are byte counts modulo 2**64; the size is a power of two and bytes wrap at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from danube.errors import LimitExceeded
from danube.ipc import atomics
from danube.ipc.atomics import WORD_MASK, Words

START: Final = 0
END: Final = 8

_HALF: Final = 1 << 63


class TailWriter:
    """The owner's end."""

    __slots__ = ("_bytes", "_capacity", "_end", "_mask", "_start", "_words")

    def __init__(self, words: Words, memory: memoryview) -> None:
        self._words = words
        self._bytes = memory
        self._capacity = len(memory)
        self._mask = self._capacity - 1
        self._start = words.load(START)
        self._end = words.load(END)

    def append(self, parts: Sequence[bytes | bytearray | memoryview]) -> int:
        """Copy the concatenation of ``parts``; returns the position of its first byte.

        Raises LimitExceeded for more than the tail holds.
        """
        size = 0
        for part in parts:
            size += len(part)
        if size > self._capacity:
            raise LimitExceeded(f"{size} bytes do not fit the tail", why=f"limit is {self._capacity}")
        position = self._end
        end = (position + size) & WORD_MASK
        if (end - self._start) & WORD_MASK > self._capacity:
            self._start = (end - self._capacity) & WORD_MASK
            self._words.store(START, self._start)
            # A large copy may use stores that the processor does not keep in order with this one.
            atomics.fence()
        memory, mask, capacity, at = self._bytes, self._mask, self._capacity, position
        for part in parts:
            length = len(part)
            place = at & mask
            if place + length <= capacity:
                memory[place : place + length] = part
            else:
                first = capacity - place
                view = memoryview(part)
                memory[place:] = view[:first]
                memory[: length - first] = view[first:]
            at += length
        self._end = end
        self._words.store(END, end)
        return position

    @property
    def start(self) -> int:
        """First position still whole."""
        return self._start

    @property
    def end(self) -> int:
        """Position of the next append."""
        return self._end


class TailReader:
    """A reader's end; holds no state, so one serves any number of consumers."""

    __slots__ = ("_bytes", "_capacity", "_load", "_mask")

    def __init__(self, words: Words, memory: memoryview) -> None:
        self._load = words.load
        self._bytes = memory
        self._capacity = len(memory)
        self._mask = self._capacity - 1

    def read(self, position: int, size: int) -> bytes | None:
        """A copy of ``size`` bytes from ``position``, or None if they are not, or no longer, whole."""
        load, memory = self._load, self._bytes
        # In this order: ``end`` loaded after ``start`` is never before it.
        start = load(START)
        end = load(END)
        if ((position - start) & WORD_MASK) + size > (end - start) & WORD_MASK:
            return None
        place = position & self._mask
        stop = place + size
        if stop <= self._capacity:
            copied = bytes(memory[place:stop])
        else:
            copied = bytes(memory[place:]) + bytes(memory[: stop - self._capacity])
        atomics.read_fence()
        # ``start`` only moves forward: beyond ``position`` means that the writer has been here.
        overwritten = (load(START) - position - 1) & WORD_MASK < _HALF
        return None if overwritten else copied
