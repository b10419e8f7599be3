"""A little of the disk that is kept for what makes room on it.

Evicting a partition's only segment needs a file first: the snapshot of its producers, which must be on disk
before the segment goes.  On a full disk there is no room for that, and without it none is made.  So each
worker keeps a file of some blocks in the data directory, and on a full disk that file, with its blocks,
becomes the snapshot: it is overwritten, synced and renamed.  It is made again once there is room.

    data directory / reserve-<worker>      zeros; of no use to anybody after a crash, made anew at the start

One per process, for the thread that evicts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from danube import files
from danube.limits import KIB

RESERVE_BYTES: Final = 256 * KIB  # what a snapshot leaves of it is room for an empty segment


class Reserve:
    """Nothing is kept before ``keep``."""

    __slots__ = ("_path", "_there")

    def __init__(self) -> None:
        self._path: Path | None = None
        self._there = False

    def keep(self, path: Path) -> None:
        """Keep it in the file ``path`` from now on, on the file system of the logs."""
        self._path, self._there = path, False
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

    def replace(self, path: Path, data: bytes) -> bool:
        """Give ``path`` the content ``data`` as files.replace_durably does, without asking the disk for room.

        False, and nothing was changed, where nothing is kept or ``data`` is too large.  Raises OSError.
        """
        source = self._path
        if source is None or not self._there or len(data) > RESERVE_BYTES:
            return False
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
        return True


reserve: Final = Reserve()
