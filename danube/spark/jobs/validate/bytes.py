"""A segment's bytes in pieces of about a megabyte, wherever they lie: little memory, and hot in the cache.

Files are read and not mapped: a broker cuts the file that it writes, and a mapping would end the process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.checksum import content_hasher
from danube.errors import StorageFailed
from danube.limits import BATCH_BYTES_MAX, MIB
from danube.wal.stores.objects import ObjectStore

CHUNK_BYTES: Final = MIB
OBJECT_CHUNK_BYTES: Final = 8 * MIB
_ROOM_BYTES: Final = BATCH_BYTES_MAX + 2 * OBJECT_CHUNK_BYTES

_rooms: list[NDArray[np.uint8]] = []


class Source(Protocol):
    """Bytes of a known size; ``read_into`` gives fewer than asked for only at the end."""

    @property
    def size(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...

    def read_into(self, target: memoryview, position: int) -> int: ...


class FileBytes:
    """A file, as long as it was when it was opened.  FileNotFoundError if there is none."""

    chunk_bytes: Final = CHUNK_BYTES

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read_into(self, target: memoryview, position: int) -> int:
        taken = 0
        wanted = min(len(target), self.size - position)
        try:
            while taken < wanted:
                part = os.preadv(self._fd, [target[taken:wanted]], position + taken)
                if not part:
                    break
                taken += part
        except OSError as error:
            why = error.strerror or str(error)
            raise StorageFailed(f"{self._path} cannot be read", why=why, position=position) from None
        return taken

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> FileBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ObjectBytes:
    """An object of a known size; raises what the store raises."""

    chunk_bytes: Final = OBJECT_CHUNK_BYTES

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store, self._key, self.size = store, key, size

    def read_into(self, target: memoryview, position: int) -> int:
        wanted = max(0, min(len(target), self.size - position))
        if wanted:
            target[:wanted] = self._store.get(self._key, position, position + wanted)
        return wanted


class MemoryBytes:
    """Bytes at hand."""

    def __init__(self, data: bytes, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._data, self.size, self.chunk_bytes = data, len(data), chunk_bytes

    def read_into(self, target: memoryview, position: int) -> int:
        part = self._data[position : position + len(target)]
        target[: len(part)] = part
        return len(part)


def read_range(source: Source, start: int, end: int) -> bytes:
    """Bytes ``start .. end``, fewer only at the source's end."""
    data = bytearray(max(0, min(end, source.size) - start))
    taken = source.read_into(memoryview(data), start)
    return bytes(data[:taken])


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
        wanted = min(self._source.chunk_bytes, self._limit - read_end)
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
