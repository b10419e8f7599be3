"""The port to an object store, for S3, a directory, memory, Google and Azure.

All calls block and may be made from many threads.  They raise DanubeErrors only, and four of them
tell the caller what to do: ObjectMissing (not there), StoreUnavailable (try later), StoreRefused (an
operator must act; trying again is cheap and seldom) and StoreDamaged (the bytes are not those that
were asked for).  StorageFailed means that the *local* file of an upload or download failed.

Promises of every store, which one suite of contract tests checks:

* An object is there whole or not at all; a later put of a key replaces it.  Putting the same bytes
  twice equals putting them once, so a caller that does not know whether a put arrived repeats it.
* ``get`` and ``get_to`` deliver exactly the bytes asked for or fail; a short body is never passed on.
* ``list`` is ascending by key and holds all objects that existed when it began.  Objects that are put or
  deleted while it runs may be seen or not.
* No store promises that the bytes are *right*.  The caller reads back and compares hashes before it deletes
  anything local.

Keys are ours, never a user's text: ASCII letters, digits, ``.``, ``_`` and ``-`` in parts between slashes.
No key may be a folder of another (``a`` beside ``a/b``): a directory cannot hold both, nor can MinIO.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from danube import limits
from danube.errors import InvalidArgument, StorageFailed

PART_BYTES: Final = 16 * limits.MIB
PARALLEL: Final = 4
COPY_BYTES: Final = 1 * limits.MIB  # of one read or write of a file
KEY_LENGTH_MAX: Final = 900  # S3 takes 1024 with the prefix

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,254})*\Z")

# Called with a count of bytes that were read or stored since the last call, by one thread at a time; it may
# take its time.
Progress = Callable[[int], None]


class Putting(NamedTuple):
    """How a file is stored: in parts, several at once, which together are the most memory that it takes."""

    part_bytes: int = PART_BYTES
    parallel: int = PARALLEL
    progress: Progress = lambda _: None


AS_USUAL: Final = Putting()


class ObjectInfo(NamedTuple):
    """One object; ``etag`` is opaque and changes with the content, ``modified_us`` is the store's clock."""

    key: str
    size: int
    etag: str
    modified_us: int


class ObjectStore(Protocol):
    """A place for immutable objects; ``name`` is for people and holds no secret."""

    @property
    def name(self) -> str: ...

    def put(self, key: str, data: bytes) -> None:
        """Store ``data``; durable when this returns."""

    def put_file(self, key: str, path: Path, how: Putting = AS_USUAL) -> None:
        """Store a file that does not change."""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes ``start`` to ``end`` (exclusive; None is the object's end)."""
        ...

    def get_to(self, key: str, start: int, end: int, fd: int, position: int) -> None:
        """Copy ``start`` to ``end`` into the open file ``fd`` at ``position``; it is not synced."""

    def head(self, key: str) -> ObjectInfo | None: ...

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key begins with ``prefix`` and is greater than ``after``, ascending."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete all of them; one that is not there is no error."""

    def clean_uploads(self, older_than_us: int) -> int:
        """Drop unfinished uploads that began more than ``older_than_us`` ago; returns how many."""
        ...


def check_key(key: str) -> str:
    """The key; InvalidArgument when it is not one of ours."""
    if len(key) > KEY_LENGTH_MAX or not _KEY.match(key):
        raise InvalidArgument(f"{key[:80]!r} is not an object key")
    return key


def check_range(start: int, end: int | None) -> None:
    if start < 0 or (end is not None and end < start):
        raise InvalidArgument(f"{start} to {end} is not a range of bytes")


def read_exactly(fd: int, size: int, position: int, path: Path) -> bytes:
    """``size`` bytes of a file that does not change; StorageFailed when they are not there."""
    try:
        data = os.pread(fd, size, position)
        while len(data) < size:
            more = os.pread(fd, size - len(data), position + len(data))
            if not more:
                raise StorageFailed(
                    f"{path} ended at {position + len(data)}",
                    why=f"bytes up to {position + size} were there when its upload began",
                    file=str(path),
                )
            data += more
    except OSError as error:
        raise local_failure(path, error) from None
    return data


def open_source(path: Path) -> tuple[int, int]:
    """Descriptor and size of a local file that is to be uploaded."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise local_failure(path, error) from None
    return fd, os.fstat(fd).st_size


def write_exactly(fd: int, data: bytes | memoryview, position: int) -> None:
    """Write all of ``data`` into the local file of a download."""
    view = memoryview(data)
    try:
        while view:
            taken = os.pwrite(fd, view, position)
            position += taken
            view = view[taken:]
    except OSError as error:
        raise local_failure(None, error) from None


def local_failure(path: Path | None, error: OSError) -> StorageFailed:
    """The local side of a transfer failed; ``facts["errno"]`` says how."""
    which = str(path) if path is not None else "the local copy"
    return StorageFailed(f"{which} failed", why=error.strerror or str(error), errno=error.errno, file=which)
