"""Disk of a member's journal: one file in a directory of its own.

``raft.log``   the journal; only ever replaced as a whole, by a rename.  Most of the next one may be staged
               beforehand by another thread, while this one is written.
``raft.new``   the next one while it is written; a leftover is removed.
``raft.id``    says that there was a journal here: a member without its journal has forgotten its votes.
``raft.lock``  empty; held by the one process that uses the directory.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from danube.errors import Damage, StorageFailed
from danube.host import files


class Disk(Protocol):
    """One file that survives a crash as far as it was synced; every method may raise OSError."""

    path: str

    def load(self) -> bytes | None:
        """The whole content; None if there never was any.  Raises Damage where it is gone."""

    def stage(self, pieces: Iterable[bytes]) -> None:
        """Begin the next content beside the present one, durably; in any thread, one at a time."""

    def unstage(self) -> None:
        """Drop the staged file, if any."""

    def complete(self, head: bytes, pieces: Iterable[bytes], identity: bytes) -> None:
        """Replace the content durably: put ``head`` at the start of the staged file and append ``pieces``.

        After a crash the content is the new or the old one.
        """

    def write(self, content: bytes, position: int) -> None: ...

    def sync(self) -> None: ...

    def truncate(self, size: int) -> None: ...

    def read(self, size: int, position: int) -> bytes: ...

    def close(self) -> None: ...


class DirectoryDisk:
    """The Disk of a member; ``synced`` False only where losing everything does not matter."""

    def __init__(self, directory: Path, *, synced: bool = True) -> None:
        self.path = str(directory / "raft.log")
        self._directory = directory
        self._log, self._new = directory / "raft.log", directory / "raft.new"
        self._identity = directory / "raft.id"
        self._synced = synced
        self._fd = self._staged_fd = -1
        self._staged_bytes = 0
        files.make_directory(directory)
        self._lock_fd = _locked(directory / "raft.lock")

    def load(self) -> bytes | None:
        _unlink(self._new)
        try:
            self._fd = files.open_existing(self._log, writable=True)
        except FileNotFoundError:
            if self._identity.exists():
                raise Damage(
                    "the member's journal is gone",
                    why=f"{self._identity} says that there was one, and with it the member's votes",
                    hint="remove this member and let a new one join, with an empty directory and a new id",
                    file=self.path,
                ) from None
            return None
        return self.read(files.size_of(self._fd), 0)

    def stage(self, pieces: Iterable[bytes]) -> None:
        self.unstage()
        _unlink(self._new)
        fd = files.open_new(self._new)
        try:
            position = _write_pieces(fd, pieces, 0)
            self._sync(fd)
        except BaseException:
            files.close(fd)
            raise
        self._staged_fd, self._staged_bytes = fd, position

    def unstage(self) -> None:
        if self._staged_fd >= 0:
            self._close_staged()
            _unlink(self._new)

    def complete(self, head: bytes, pieces: Iterable[bytes], identity: bytes) -> None:
        fd, self._staged_fd = self._staged_fd, -1
        try:
            _write_pieces(fd, pieces, self._staged_bytes)
            files.write_all(fd, head, 0)
            self._sync(fd)
            files.rename(self._new, self._log)
            files.fsync_directory(self._directory)
        except BaseException:
            files.close(fd)
            raise
        self._close_log()
        self._fd = fd
        if not self._identity.exists():
            files.replace_durably(self._identity, identity)

    def write(self, content: bytes, position: int) -> None:
        files.write_all(self._fd, content, position)

    def sync(self) -> None:
        self._sync(self._fd)

    def truncate(self, size: int) -> None:
        files.ftruncate(self._fd, size)

    def read(self, size: int, position: int) -> bytes:
        parts = []
        while size and (part := files.pread(self._fd, size, position)):
            parts.append(part)
            position += len(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._close_staged()
        self._close_log()
        if self._lock_fd >= 0:
            files.close(self._lock_fd)
            self._lock_fd = -1

    def _close_staged(self) -> None:
        if self._staged_fd >= 0:
            files.close(self._staged_fd)
            self._staged_fd = -1

    def _close_log(self) -> None:
        if self._fd >= 0:
            files.close(self._fd)
            self._fd = -1

    def _sync(self, fd: int) -> None:
        if self._synced:
            files.fdatasync(fd)
            files.check_there(fd)


def _write_pieces(fd: int, pieces: Iterable[bytes], position: int) -> int:
    """Write them one behind the other; where they end."""
    for piece in pieces:
        files.write_all(fd, piece, position)
        position += len(piece)
    return position


def _locked(path: Path) -> int:
    try:
        fd = files.open_existing(path, writable=True)
    except FileNotFoundError:
        fd = files.open_new(path)
    try:
        files.lock(fd)
    except BlockingIOError as error:
        files.close(fd)
        raise StorageFailed(
            "this directory is a running member's",
            why="another process holds its lock",
            hint="stop that one",
            file=str(path),
        ) from error
    return fd


def _unlink(path: Path) -> None:
    try:
        files.unlink(path)
    except FileNotFoundError:
        pass
