"""A little of the disk that is kept for what makes room on it.

Evicting a partition's only segment needs a file first: the snapshot of its producers, which must be on disk
before the segment goes.  A mover that starts needs one too, the word that the store is its own, before it
uploads anything.  On a full disk there is no room for that, and without it none is made.  So each worker and
the mover keep a file of some blocks in the data directory, and on a full disk that file, with its blocks,
becomes the one that is needed: it is overwritten, synced and renamed.  It is made again once there is room.

    data directory / reserve-<worker>      zeros, RESERVE_BYTES; one that a crash left is kept for the next,
    data directory / reserve-mover         which may start on a full disk

One per process, for one thread at a time.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

from danube.host import files
from danube.limits import KIB

RESERVE_BYTES: Final = 256 * KIB  # what a snapshot leaves of it is room for an empty segment


class Reserve:
    """Disk space kept back for work that makes room on a full disk; none before ``keep``."""

    __slots__ = ("_path", "_there")

    def __init__(self) -> None:
        self._path: Path | None = None
        self._there = False

    def keep(self, path: Path) -> None:
        """Keep it in the file ``path`` from now on, on the file system of the logs."""
        self._path, self._there = path, _whole(path)
        self.fill()

    def fill(self) -> None:
        """Make the file where it is missing; a disk without room for it is asked again at the next call."""
        if self._path is None or self._there:
            return
        try:
            self._path.unlink(missing_ok=True)
            fd = files.open_new(self._path)
            try:
                files.fallocate(fd, 0, RESERVE_BYTES)
            finally:
                files.close(fd)
        except OSError:
            self._path.unlink(missing_ok=True)
        else:
            self._there = True

    def replace_durably(self, path: Path, data: bytes) -> None:
        """As files.replace_durably; on a full disk with what is kept, where ``data`` fits into it."""
        try:
            files.replace_durably(path, data)
        except OSError as error:
            kept = self._path if self._there else None
            if error.errno not in files.FULL_ERRNOS or kept is None or len(data) > RESERVE_BYTES:
                raise
            self._become(kept, path, data)

    def _become(self, source: Path, path: Path, data: bytes) -> None:
        self._there = False
        fd = files.open_existing(source, writable=True)
        try:
            files.write_all(fd, data, 0)
            files.ftruncate(fd, len(data))
            files.fdatasync(fd)
        finally:
            files.close(fd)
        files.rename(source, path)
        files.fsync_directory(path.parent)


def _whole(path: Path) -> bool:
    """Whether an earlier process kept it, with its blocks: what a crash cut short is shorter."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == RESERVE_BYTES <= found.st_blocks * 512


reserve: Final = Reserve()
