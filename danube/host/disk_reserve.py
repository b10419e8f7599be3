"""A small reserve of disk space for operations that free space.

Before a partition's only segment can be evicted, the snapshot of its producers must be on disk.  Before a
starting mover uploads anything, it must store that the store is its own.  A full disk has no room for these
files, and without them no space is freed.  So each worker and the mover keep a file of some blocks in the
data directory.  On a full disk this file becomes the needed one: it is overwritten, synced and renamed.  It
is made again when there is room.

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

RESERVE_BYTES: Final = 256 * KIB  # the part that a snapshot does not need has room for an empty segment


class Reserve:
    """Disk space kept back for work that makes room on a full disk; none before ``keep``."""

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
        """Like files.replace_durably; on a full disk it uses the reserve, if ``data`` fits into it."""
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
    """Whether an earlier process left a complete file; after a crash it may be shorter."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == RESERVE_BYTES <= found.st_blocks * 512


reserve: Final = Reserve()
