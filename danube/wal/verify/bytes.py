"""Bytes to be verified: a file or an object, read in order with little memory, and what is found in them.

Part of the independent reader: knows the layouts in ``docs/formats`` and shares no code with what
writes logs, manifests and objects.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from danube.core.batch.checksum import content_hasher
from danube.errors import StorageFailed
from danube.limits import MIB

CHUNK_BYTES: Final = 4 * MIB
_ZEROS_KEPT: Final = 8 * MIB  # more than any entry that ends in zeros


class FindingKind(StrEnum):
    """Kind of a fault, in one word."""

    GAP = "gap"  # offsets that no intact batch holds
    OVERLAP = "overlap"  # offsets that are held twice
    CHECKSUM = "checksum"  # bytes differ from their checksum or hash, or from the format
    TRUNCATED = "truncated"  # shorter than it says
    IDENTITY = "identity"  # of another partition, under another name, or of another epoch
    CHAIN = "chain"  # the hash of the segment before differs
    MISSING = "missing"  # named and not there
    ORPHAN = "orphan"  # there and not named
    DISAGREEMENT = "disagreement"  # two copies, or a copy and what is said of it, differ
    VERSION = "version"  # of a newer Danube: not judged


class Finding(NamedTuple):
    """One thing that is wrong: ``where`` is a file or key, ``position`` a byte in it (-1: all of it).

    ``start .. end`` are the offsets that it is about; equal where it is about none.
    """

    kind: FindingKind
    where: str
    what: str
    position: int = -1
    start: int = 0
    end: int = 0


class Source(Protocol):
    """Something with bytes; a read gives fewer than asked for only at the end.

    ``piece_bytes`` is a good size of one read for a reader of everything.
    """

    @property
    def size(self) -> int: ...
    @property
    def piece_bytes(self) -> int: ...

    def read(self, position: int, size: int) -> bytes: ...
    def read_into(self, target: memoryview, position: int) -> int: ...


class BytesSource:
    """Bytes at hand."""

    def __init__(self, data: bytes, piece_bytes: int = MIB) -> None:
        self._data = data
        self.size, self.piece_bytes = len(data), piece_bytes

    def read(self, position: int, size: int) -> bytes:
        return self._data[position : position + size]

    def read_into(self, target: memoryview, position: int) -> int:
        part = self.read(position, len(target))
        target[: len(part)] = part
        return len(part)


class FileSource:
    """A file as long as it was when it was opened; close it.  FileNotFoundError if there is none.

    It is read and not mapped: a broker cuts the file that it writes, and a mapping would end the process.
    """

    piece_bytes: Final = MIB

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read(self, position: int, size: int) -> bytes:
        parts: list[bytes] = []
        size = min(size, self.size - position)
        try:
            while size > 0:
                part = os.pread(self._fd, size, position)
                if not part:
                    break
                parts.append(part)
                position += len(part)
                size -= len(part)
        except OSError as error:
            raise self._unread(error, position) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, target: memoryview, position: int) -> int:
        taken, wanted = 0, min(len(target), self.size - position)
        try:
            while taken < wanted:
                part = os.preadv(self._fd, [target[taken:wanted]], position + taken)
                if not part:
                    break
                taken += part
        except OSError as error:
            raise self._unread(error, position) from error
        return taken

    def _unread(self, error: OSError, position: int) -> StorageFailed:
        why = error.strerror or str(error)
        return StorageFailed(f"{self._path} cannot be read", why=why, position=position)

    def read_front(self, size_max: int) -> bytes:
        """At most ``size_max`` bytes; of the zeros at the end only _ZEROS_KEPT, which need no memory so."""
        data = bytearray()
        position, size = 0, min(self.size, size_max)
        while position < size:
            window = self.read(position, min(_ZEROS_KEPT, size - position))
            if not window:
                break
            if window.count(0) != len(window):
                data += bytes(position - len(data)) + window
            position += len(window)
        return bytes(data) + bytes(min(max(position - len(data), 0), _ZEROS_KEPT))

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """A source read once from its start; the bytes below ``hash_end`` are hashed on the way.

    Keeps what lies from ``position`` on: one chunk, or as much as ``ahead`` was asked for.
    """

    def __init__(self, source: Source, hash_end: int) -> None:
        self._source = source
        self._hasher = content_hasher()
        self._hash_end = hash_end
        self._data = b""
        self._start = 0  # position of the first byte of _data
        self._end = 0  # position behind the last byte that was read
        self.position = 0

    def ahead(self, size: int) -> memoryview:
        """At least ``size`` bytes from the position on, fewer only at the end."""
        while self._end - self.position < size and self._end < self._source.size:
            data = self._source.read(self._end, max(CHUNK_BYTES, size - (self._end - self.position)))
            if not data:
                break
            self._hasher.update(memoryview(data)[: max(0, self._hash_end - self._end)])
            kept = self._data[self.position - self._start :]
            self._data = kept + data if kept else data
            self._start = self.position
            self._end += len(data)
        return memoryview(self._data)[self.position - self._start :]

    def skip(self, size: int) -> None:
        """Go on behind bytes that were looked at."""
        self.position += size

    def digest(self) -> bytes:
        """Hash of the bytes below ``hash_end``, once all of them were read."""
        while self._end < self._hash_end and len(self.ahead(self._end - self.position + 1)):
            if self._end >= self._source.size:
                break
            self.skip(self._end - self.position)
        return bytes(self._hasher.digest())
