"""A partition's segment files for the mover: listed without touching, examined before an upload.

The owner continues to write, seal and evict meanwhile.  A sealed file never changes, so the result of an
examination is kept as long as a file of that name and inode exists.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from danube.core.batch.checksum import content_hasher
from danube.core.partition.tier_plan import LocalSegment
from danube.errors import Damage, InvalidArgument, StoreDamaged
from danube.host import files
from danube.wal.segments.segment import (
    HEADER_BYTES,
    SUMMARY_BYTES,
    LogIdentity,
    Summary,
    base_offset_of,
    chain_hash_of,
    read_header,
    read_summary,
    split_footer,
)
from danube.wal.stores.objects import Progress, local_failure

READ_BYTES: Final = 4 << 20


class SealedFile(NamedTuple):
    """A sealed segment that was read completely and agrees with its footer."""

    path: Path
    summary: Summary
    size_bytes: int
    whole_hash: bytes  # of the file with its footer: what the object must have, too
    chain_hash: bytes  # what the next segment names as the one before it


class LocalListing:
    """The segments of one directory; each file's footer is read once.  For one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, tuple[int, LocalSegment]] = {}  # sealed ones, with their inode

    def refresh(self) -> list[LocalSegment]:
        """All segments by base offset; none where there is no directory.  Raises StorageFailed or Damage."""
        known: dict[str, tuple[int, LocalSegment]] = {}
        found: list[LocalSegment] = []
        for name, inode in self._names():
            before = self._known.get(name)
            segment = before[1] if before is not None and before[0] == inode else self._read(name)
            if segment is None:
                continue
            found.append(segment)
            if segment.sealed:
                known[name] = (inode, segment)
        self._known = known
        return sorted(found)

    def _names(self) -> list[tuple[str, int]]:
        try:
            with os.scandir(self._directory) as entries:
                return [
                    (entry.name, entry.inode()) for entry in entries if base_offset_of(entry.name) is not None
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise local_failure(self._directory, error) from None

    def _read(self, name: str) -> LocalSegment | None:
        """None: the file has gone."""
        path = self._directory / name
        base_offset = base_offset_of(name) or 0
        try:
            fd = files.open_existing(path, writable=False)
            try:
                size = files.size_of(fd)
                tail = files.pread(fd, SUMMARY_BYTES, max(0, size - SUMMARY_BYTES))
            finally:
                files.close(fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise local_failure(path, error) from None
        try:
            summary = read_summary(tail, size) if size >= HEADER_BYTES + SUMMARY_BYTES else None
        except Damage as error:
            raise Damage(f"segment {path} cannot be uploaded", why=error.what, file=str(path)) from None
        if summary is None:
            return LocalSegment(base_offset, base_offset, size, 0, sealed=False)
        return LocalSegment(base_offset, summary.end_offset, size, summary.first_append_us, sealed=True)


@contextmanager
def emptied(work: Path, failure: str) -> Iterator[None]:
    """Lend the directory ``work`` for objects that are read and made in it; it is removed at the end.

    Raises StoreDamaged, which says ``failure``, if an object is not what it should be, and StorageFailed if
    the local disk refuses.
    """
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, mode=0o700)
        yield
    except StoreDamaged:
        raise
    except (Damage, InvalidArgument) as error:
        raise StoreDamaged(failure, why=str(error), hint="see `danube verify`") from None
    except OSError as error:
        raise local_failure(work, error) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def examine(path: Path, identity: LogIdentity, rest: Progress = lambda _: None) -> SealedFile:
    """Read a sealed file wholly and compare it with its header and footer; ``rest`` as in Uploader.

    Raises Damage if the file does not agree with them, FileNotFoundError if its owner has evicted or deleted
    it, StorageFailed if it cannot be read.
    """
    try:
        fd = files.open_existing(path, writable=False)
        try:
            return _examine(fd, path, identity, rest)
        finally:
            files.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise local_failure(path, error) from None


def _examine(fd: int, path: Path, identity: LogIdentity, rest: Progress) -> SealedFile:
    size = files.size_of(fd)
    summary = read_summary(files.pread(fd, SUMMARY_BYTES, max(0, size - SUMMARY_BYTES)), size)
    header = read_header(files.pread(fd, HEADER_BYTES, 0))
    if summary is None:
        raise Damage(f"segment {path} has lost its footer", file=str(path))
    told = {(part.identity, part.base_offset) for part in (header, summary)}
    if told != {(identity, base_offset_of(path.name))}:
        raise Damage(f"segment {path} belongs elsewhere", why="its header or footer says so", file=str(path))
    data_hash, whole_hash = _hashes(fd, size, summary.data_end, rest)
    if data_hash != summary.content_hash:
        raise Damage(
            f"segment {path} is damaged",
            why="its content has another hash than its footer says",
            hint="`danube verify` tells which records; it stays on the local disk and is not uploaded",
            file=str(path),
        )
    body = files.pread(fd, summary.footer_size - SUMMARY_BYTES, summary.data_end)
    split_footer(body, summary)
    return SealedFile(path, summary, size, whole_hash, chain_hash_of(body, summary))


def _hashes(fd: int, size: int, data_end: int, rest: Progress) -> tuple[bytes, bytes]:
    """Of bytes 0 .. data_end and of all ``size`` bytes, reading once."""
    data, whole = content_hasher(), content_hasher()
    position = 0
    while position < size:
        piece = files.pread(fd, min(READ_BYTES, size - position), position)
        if not piece:
            raise Damage("a sealed segment became shorter", present=position, size=size)
        whole.update(piece)
        if position < data_end:
            data.update(memoryview(piece)[: data_end - position])
        position += len(piece)
        rest(len(piece))
    return bytes(data.digest()), bytes(whole.digest())
