"""Open files of the log, within a bound: least recently used ones are closed and opened again on demand.

A file is *pinned* while it has unsynced bytes or a job in another thread uses its descriptor; a pinned file
is never closed, because an error that the kernel could not write back must be reported to the descriptor that
wrote it.  A file opened for appending holds an exclusive ``flock``. If a stale owner still lives, it keeps
the lock and the new owner is refused, so two owners never write.  Within one process a newer owner takes the
lock, and the older owner's next use fails.

:class:`Unsynced` holds the files of a log with unsynced bytes; they stay pinned until they are synced.

A sync job uses the descriptors of the files that were unsynced when it was made.  These stay pinned until the
log has the job's result, also if the log was abandoned meanwhile.
"""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from danube.errors import AlreadyRunning, StorageFailed
from danube.host import files

DESCRIPTORS_MIN: Final = 256
DESCRIPTORS_DEFAULT: Final = 2_048
DESCRIPTORS_MAX: Final = 65_536
_KEPT_FREE: Final = 1_024
_KEPT_FREE_SHARE: Final = 8
_KEPT_FOR_OTHERS: Final = 128  # rings, listeners, links, and connections that are told that there is no room
_UNBOUNDED: Final = 1 << 30
CONNECTIONS_MIN: Final = 16


def descriptors_allowed(connections: int = 0) -> int:
    """How many of the files that this process may open the log may have, beside so many connections.

    Some are kept free for connections that come before this is asked again; half are the log's in any case.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DESCRIPTORS_MAX
    free = max(_KEPT_FREE, soft // _KEPT_FREE_SHARE)
    return min(max(soft - free - connections, soft // 2, DESCRIPTORS_MIN), DESCRIPTORS_MAX)


def connections_allowed() -> int:
    """Return how many connections this process may hold beside descriptors that are reserved."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _UNBOUNDED
    return max(soft - max(soft // 2, DESCRIPTORS_MIN) - _KEPT_FOR_OTHERS, CONNECTIONS_MIN)


class LogFile:
    """One file on disk.  ``failed``: a sync failed, it is never synced again; ``lost``: taken over."""

    __slots__ = ("failed", "fd", "locked", "lost", "path", "pins", "retired", "writable")

    def __init__(self, path: Path, *, writable: bool = False, locked: bool = False) -> None:
        self.path = path
        self.writable = writable or locked
        self.locked = locked
        self.fd = -1
        self.pins = 0
        self.failed = False
        self.lost = False
        self.retired = False

    def __repr__(self) -> str:
        return f"LogFile({self.path.name}, fd={self.fd}, pins={self.pins})"


class Descriptors:
    """All LogFiles of the process that are open, least recently used first.  Safe for threads."""

    def __init__(self, descriptors_max: int = DESCRIPTORS_DEFAULT) -> None:
        self.descriptors_max = descriptors_max
        self._open: set[LogFile] = set()
        self._idle: dict[LogFile, None] = {}  # open and not pinned, least recently used first
        self._locked: dict[Path, LogFile] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._open)

    def resize(self, descriptors_max: int) -> None:
        """Keep at most so many open from now on; pinned ones stay."""
        with self._lock:
            self.descriptors_max = descriptors_max
            self._evict(descriptors_max)

    def fd(self, file: LogFile, *, writing: bool = True) -> int:
        """Descriptor of ``file``, opened when needed; valid until the next call unless pinned.

        StorageFailed for writing to a file that a newer owner has taken over; it is still read.
        """
        with self._lock:
            if file.lost and writing:
                raise StorageFailed("the file was taken over by a newer owner", file=file.path.name)
            if file.fd >= 0:
                if not file.pins:
                    self._idle[file] = self._idle.pop(file)
                return file.fd
            opened = self._retry_when_full(lambda: files.open_existing(file.path, writable=file.writable))
            return self._opened(file, opened)  # takes the lock unless it is lost

    def create(self, file: LogFile, spare: Path | None = None) -> int:
        """Create the file (FileExistsError when it is there) and open it for writing.

        With ``spare`` that file gets the name.  No other owner makes a file with the name of the spare, so
        the opened file is the named one, whatever a newer owner does meanwhile.
        """
        with self._lock:
            return self._opened(file, self._retry_when_full(lambda: _created(file.path, spare)))

    def pin(self, file: LogFile) -> int:
        with self._lock:
            fd = self.fd(file)
            file.pins += 1
            self._idle.pop(file, None)
            return fd

    def unpin(self, file: LogFile) -> None:
        with self._lock:
            file.pins -= 1
            if file.pins or file.fd < 0:
                return
            if file.retired:
                self._close(file)
            else:
                self._idle[file] = None
                self._evict(self.descriptors_max)

    def close(self, file: LogFile) -> None:
        """Give up the lock now, and the descriptor as soon as no job uses it."""
        with self._lock:
            self._release_lock(file)
            file.retired = True
            if not file.pins:
                self._close(file)

    def _retry_when_full(self, opened: Callable[[], int]) -> int:
        """Where the process has no descriptor left: once more without the idle files that it has."""
        try:
            return opened()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._evict(0)
            return opened()

    def _opened(self, file: LogFile, fd: int) -> int:
        if file.locked and not file.lost:
            try:
                self._take_lock(file, fd)
            except BaseException:
                files.close(fd)
                raise
        file.fd = fd
        file.retired = False
        self._open.add(file)
        if not file.pins:
            self._idle[file] = None
        self._evict(self.descriptors_max, newest=file)
        return fd

    def _take_lock(self, file: LogFile, fd: int) -> None:
        older = self._locked.get(file.path)
        if older is not None and older is not file:
            self._release_lock(older)
            older.lost = True
        try:
            files.lock(fd)
        except BlockingIOError as error:
            raise AlreadyRunning(
                f"{file.path.name} is still being written by another process",
                why="its owner has not ended",
                hint="end the older worker first",
                file=str(file.path),
            ) from error
        self._locked[file.path] = file

    def _release_lock(self, file: LogFile) -> None:
        if self._locked.get(file.path) is file:
            del self._locked[file.path]
            if file.fd >= 0:
                files.unlock(file.fd)

    def _evict(self, keep: int, newest: LogFile | None = None) -> None:
        """Close idle files, the least recently used first, until ``keep`` are open; never ``newest``."""
        while len(self._open) > keep and self._idle:
            file = next(iter(self._idle))
            if file is newest:
                return
            self._close(file)

    def _close(self, file: LogFile) -> None:
        if file.fd >= 0:
            self._open.discard(file)
            self._idle.pop(file, None)
            fd, file.fd = file.fd, -1
            files.close(fd)


def _created(path: Path, spare: Path | None) -> int:
    return files.open_new(path) if spare is None else _named(spare, path)


def _named(spare: Path, path: Path) -> int:
    fd = files.open_existing(spare, writable=True)
    try:
        files.rename_new(spare, path)
    except BaseException:
        files.close(fd)
        raise
    return fd


descriptors = Descriptors()


class Unsynced:
    """One log's; all methods run on the thread that owns it."""

    __slots__ = ("_abandoned", "_jobs", "ends")

    def __init__(self) -> None:
        self.ends: dict[LogFile, int] = {}  # the offset up to which each is written
        self._jobs = 0  # that run
        self._abandoned = False

    def wrote(self, file: LogFile, end: int) -> None:
        """The file is written up to the offset ``end``."""
        if file not in self.ends:
            descriptors.pin(file)
        self.ends[file] = end

    def files(self) -> list[LogFile]:
        """All of them, the oldest first."""
        return list(self.ends)

    def start_job(self) -> list[LogFile]:
        """All files, the oldest first, for a job that syncs them; end_job() must follow."""
        self._jobs += 1
        return self.files()

    def end_job(self, synced_end: int = -1) -> None:
        """Note that a job has ended: bytes up to ``synced_end`` are synced."""
        self._jobs -= 1
        ends = self.ends
        for file in [file for file, end in ends.items() if end <= synced_end]:
            del ends[file]
            descriptors.unpin(file)
        if self._abandoned:
            self.abandon()

    def abandon(self) -> None:
        """Give all files back as soon as no job uses them; none of them is synced any more."""
        self._abandoned = True
        if not self._jobs:
            for file in self.ends:
                descriptors.unpin(file)
            self.ends.clear()
