"""A number that tells whoever reads files without their lock whether the lock was held since.

It is the first eight bytes of the lock file, mapped by all, in the host's order: odd while somebody holds the
lock, another even number afterwards.  A holder that dies leaves an odd one, with which everybody looks for
themselves until the next holder is done.  It is written by system calls, so that a full disk is an error and
no signal.
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from typing import Final

_BYTES: Final = 8
_END: Final = 1 << 64


class LockCount:
    """The number in the lock file at ``descriptor``, which belongs to the caller; raises OSError."""

    __slots__ = ("_descriptor", "_memory", "_words")

    def __init__(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size < _BYTES:
            os.ftruncate(descriptor, _BYTES)  # whoever else does so at the same time changes nothing
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        self._words = memoryview(self._memory).cast("Q")

    def close(self) -> None:
        """Unmap it."""
        self._words.release()
        self._memory.close()

    @property
    def number(self) -> int:
        """What was read under an even number holds for as long as that number stays."""
        return self._words[0]

    def held_since(self, number: int) -> bool:
        """Whether the lock was held, or is, since ``number`` was read."""
        now = self._words[0]
        return now != number or now & 1 != 0

    def begin(self) -> None:
        """The caller holds the lock and has changed nothing yet."""
        number = self._words[0]
        self._write(number + 2 if number & 1 else number + 1)

    def end(self) -> None:
        """The caller has changed what it wanted, and holds the lock still."""
        with suppress(OSError):  # it stays odd
            self._write(self._words[0] + 1)

    def _write(self, number: int) -> None:
        os.pwrite(self._descriptor, (number % _END).to_bytes(_BYTES, sys.byteorder), 0)
