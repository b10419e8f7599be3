"""A segment's bytes in pieces of about a megabyte, wherever they lie: little memory, and hot in the cache."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.checksum import content_hasher
from danube.limits import BATCH_BYTES_MAX
from danube.wal.verify.bytes import Source
from danube.wal.verify.objects import ObjectSource

_ROOM_BYTES: Final = BATCH_BYTES_MAX + 2 * ObjectSource.piece_bytes

_rooms: list[NDArray[np.uint8]] = []


class Window:
    """A source read once from its start.  ``data[start:fill]`` are the bytes at ``position`` and behind.

    What lies below ``hash_end`` is hashed while it is read.  One window of a thread at a time: they share
    their room.
    """

    def __init__(self, source: Source, limit: int, hash_end: int) -> None:
        self._source = source
        self._limit = limit
        self._hash_end = hash_end
        self._hasher = content_hasher()
        self.data = _rooms.pop() if _rooms else np.empty(_ROOM_BYTES, np.uint8)
        self._view: memoryview = self.data.data
        self._base = 0  # of data[0] in the source
        self.start = 0
        self.fill = 0

    @property
    def position(self) -> int:
        return self._base + self.start

    def position_of(self, place: int) -> int:
        """The position in the source of ``data[place]``."""
        return self._base + place

    def more(self) -> bool:
        """Read the next piece behind ``fill``; False at the limit.  Moves what is kept to the front."""
        read_end = self._base + self.fill
        wanted = min(self._source.piece_bytes, self._limit - read_end)
        if wanted <= 0:
            return False
        if self.start:
            kept = self.fill - self.start
            self.data[:kept] = self.data[self.start : self.fill]
            self._base, self.start, self.fill = self._base + self.start, 0, kept
        target = self._view[self.fill : self.fill + wanted]
        taken = self._source.read_into(target, read_end)
        if taken <= 0:
            self._limit = read_end
            return False
        if read_end < self._hash_end:
            self._hasher.update(target[: min(taken, self._hash_end - read_end)])
        self.fill += taken
        return True

    def digest(self) -> bytes:
        """Hash of the bytes below ``hash_end``, which were all read."""
        return bytes(self._hasher.digest())

    def close(self) -> None:
        if not _rooms:
            _rooms.append(self.data)
