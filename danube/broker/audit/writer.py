"""Writing one worker's chain of audit lines: a line is in its file before ``append`` returns.

So kill -9 loses no line that was acknowledged; a power cut loses those since the last ``sync``, which the
caller runs off the loop.  A writer never goes on in a file of an earlier one: it begins a new file, whose
first line names the last place of the chain and the bytes of a line that was not whole.

``append`` waits for no disk, but for the first line after a start or a failure.  What waits is done by
``sync``: it makes the next file before the current one is full, syncs and closes the one before, and removes
files that are too old once the line that says so is on the disk.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from danube.broker.audit.lines import BEGIN, LOST, REMOVED, START, Entry, Place, encode
from danube.broker.audit.trail import (
    AuditFile,
    encode_head,
    head_name,
    list_files,
    name_of,
    read_end,
    read_head,
)
from danube.errors import StorageFailed, StorageFull
from danube.host import files

FILE_BYTES_DEFAULT: Final = 64 << 20
_DAY_US: Final = 86_400_000_000
_REMOVED_AT_ONCE: Final = 32


class AuditWriter:
    """Appends to ``directory``; used by one thread, but for ``sync``."""

    def __init__(
        self,
        directory: Path,
        worker: int,
        now_us: Callable[[], int],
        *,
        file_bytes_max: int = FILE_BYTES_DEFAULT,
        keep_us: int = 0,
    ) -> None:
        """``file_bytes_max``: from this size on the next file is made, and used as soon as it is there.

        ``keep_us``: files that were last written longer ago are removed; 0 keeps them all.
        """
        self.directory = directory
        self._worker = worker
        self._now_us = now_us
        self._file_bytes_max = file_bytes_max
        self._keep_us = keep_us
        self._fd = -1
        self._head_fd = -1
        self._next_fd = -1  # of the next file, while it is not used
        self._full: deque[int] = deque()  # descriptors of files that nothing is written to any more
        self._making = threading.Lock()  # held while the next file is made or let go
        self._retain_due = False
        self._expired: tuple[list[AuditFile], list[Place]] | None = None  # until a line says so
        self._removing: list[AuditFile] = []  # until that line is on the disk
        self._size = 0
        self._number = 0
        self.dirty = False  # lines were written since the last sync
        self._sync_failed = False
        self.lost = 0  # lines that could not be written, until one could
        self.place = START

    def open(self) -> None:
        """Begin a new file behind what is there; raises StorageFailed or StorageFull."""
        try:
            self._begin()
        except OSError as error:
            raise _failed(self.directory, error) from None

    def _begin(self) -> None:
        try:
            files.make_directory(self.directory)
            before = [one for one in list_files(self.directory) if one.worker == self._worker]
            if before and not before[-1].path.stat().st_size:  # of a beginning that failed
                files.unlink(before.pop().path)
            self._number = before[-1].number + 1 if before else 1
            last = next((one for one in reversed(before) if one.path.stat().st_size), None)
            torn = self._find_place(last)
            self._open_head()
            self._open_file()
            details = {"pid": os.getpid(), "after": last.path.name if last else "", "torn_bytes": torn}
            self._write(Entry(self._now_us(), BEGIN, "allowed", details=details))
            self._retain()
        except (OSError, StorageFailed):
            self._let_go()
            raise

    def _find_place(self, last: AuditFile | None) -> int:
        """Find the last place of the chain; return the bytes of a line that was not whole.

        The head is ahead of the files if their end was cut.  The chain then goes on behind the head, so that
        verification finds the gap.
        """
        line, torn = read_end(last.path) if last is not None else (None, 0)
        head = read_head(self.directory, self._worker) or START
        end = line.place if line is not None else START
        self.place = end if end.number >= head.number else head
        return torn

    def _open_head(self) -> None:
        path = self.directory / head_name(self._worker)
        if not path.exists():
            files.replace_durably(path, encode_head(self.place))
        self._head_fd = files.open_existing(path, writable=True)

    def _open_file(self) -> None:
        self._fd = files.open_new(self.directory / name_of(self._worker, self._number))
        self._size = 0
        files.fsync_directory(self.directory)

    @property
    def path(self) -> Path:
        return self.directory / name_of(self._worker, self._number)

    def append(self, entry: Entry) -> None:
        """Write a line; raises StorageFailed or StorageFull, and then no part of it stays."""
        try:
            if self._fd < 0 or self._sync_failed:
                self._let_go()
                self._begin()
            elif self._size >= self._file_bytes_max:
                self._roll()
            self._tell_expired()
            if self.lost:
                self._write(Entry(self._now_us(), LOST, "failed", details={"lines": self.lost}))
                self.lost = 0
            self._write(entry)
        except OSError as error:
            self.lost += 1
            raise _failed(self.path, error) from None
        except StorageFailed:
            self.lost += 1
            raise

    def _write(self, entry: Entry) -> None:
        raw, place = encode(entry, self.place)
        try:
            files.write_all(self._fd, raw, self._size)
            files.write_all(self._head_fd, encode_head(place), 0)
        except OSError:
            self._take_back()
            raise
        self._size += len(raw)
        self.place = place
        self.dirty = True

    def _take_back(self) -> None:
        """Remove a part of a line, which would look like a change; else the next line begins a new file."""
        try:
            files.ftruncate(self._fd, self._size)
            files.write_all(self._head_fd, encode_head(self.place), 0)
        except OSError:
            self._let_go()

    def _roll(self) -> None:
        """Go on in the next file if `sync` has made it, else in this one."""
        if self._next_fd < 0:
            return
        self._full.append(self._fd)
        self._fd, self._next_fd = self._next_fd, -1
        self._number += 1
        self._size = 0
        self._retain_due = bool(self._keep_us)

    def sync(self) -> None:
        """Put what was written on disk; may run in a thread of its own.  Raises OSError."""
        if not self.dirty:
            return
        self.dirty = False
        removing = self._removing
        try:
            self._sync_files(os.dup(self._fd))  # the writer may roll or close while this waits
        except OSError:
            self._sync_failed = True  # a second sync would say that all is well
            raise
        if removing:
            self._removing = []
            self._remove(removing)
        self._look_for_expired()
        if self._size >= self._file_bytes_max:
            with suppress(OSError):  # the next sync tries again
                self._make_next()

    def _sync_files(self, fd: int) -> None:
        """Sync what was filled, oldest first, and close it; then the current file.

        A power cut in between takes the end of the chain, and no piece out of its middle.
        """
        descriptors = [fd]
        try:
            while self._full:
                descriptors.append(self._full.popleft())
                files.fdatasync(descriptors[-1])
            files.fdatasync(fd)
        finally:
            for one in descriptors:
                files.close(one)

    def _make_next(self) -> None:
        with self._making:
            if self._fd < 0 or self._next_fd >= 0:
                return
            path = self.directory / name_of(self._worker, self._number + 1)
            fd = files.open_new(path)
            try:
                files.fsync_directory(self.directory)
            except OSError:
                files.close(fd)
                files.unlink(path)
                raise
            self._next_fd = fd

    def _retain(self) -> None:
        """Remove files that are too old, at a start; what fails is tried again with the next file."""
        self._retain_due = bool(self._keep_us)
        self._look_for_expired()
        with suppress(OSError, StorageFailed):
            self._tell_expired()
            removing, self._removing = self._removing, []
            if removing:
                files.fdatasync(self._fd)
                self._remove(removing)

    def _look_for_expired(self) -> None:
        """Find the oldest files, as long as they are too old, and the ends of their chain."""
        if not self._retain_due:
            return
        self._retain_due = False
        with suppress(OSError, StorageFailed):
            old = self._too_old()
            places = [line.place for one in old if (line := read_end(one.path)[0]) is not None]
            self._expired = (old, places) if old else None

    def _too_old(self) -> list[AuditFile]:
        """The oldest files, as long as they are too old; the current one is never among them."""
        oldest = self._now_us() - self._keep_us
        old: list[AuditFile] = []
        for one in list_files(self.directory):
            if one.worker != self._worker or one.number >= self._number or len(old) >= _REMOVED_AT_ONCE:
                continue
            if one.path.stat().st_mtime_ns // 1000 >= oldest:
                break
            old.append(one)
        return old

    def _tell_expired(self) -> None:
        """Write the line that names the ends of what will be removed once it is on the disk."""
        if self._expired is None or self._removing:
            return
        old, places = self._expired
        self._expired = None
        self._write(
            Entry(
                self._now_us(), REMOVED, "allowed",
                details={"files": [one.path.name for one in old], "places": [[*place] for place in places]},
            )
        )  # fmt: skip
        self._removing = old

    def _remove(self, old: list[AuditFile]) -> None:
        """Remove files, oldest first; what stays is found and told again with the next file."""
        with suppress(OSError):
            for one in old:
                files.unlink(one.path)
            files.fsync_directory(self.directory)

    def close(self) -> None:
        """Sync and close; nothing is raised, since nobody waits for an answer."""
        try:
            self.sync()
        except OSError:
            pass
        self._let_go()

    def _let_go(self) -> None:
        with self._making:  # the next file stays, empty, and the next writer removes it
            descriptors = [self._fd, self._head_fd, self._next_fd]
            while self._full:
                descriptors.append(self._full.popleft())
            for fd in descriptors:
                with suppress(OSError):  # the descriptor is free all the same (close(2))
                    if fd >= 0:
                        files.close(fd)
            self._fd = self._head_fd = self._next_fd = -1
            self._removing, self._expired = [], None
        self.dirty = self._sync_failed = False


def _failed(path: Path, error: OSError) -> StorageFailed | StorageFull:
    why = error.strerror or str(error)
    if error.errno in files.FULL_ERRNOS:
        return StorageFull(f"{path} takes no more audit lines", why=why, hint="make room on its file system")
    return StorageFailed(f"{path} cannot be written", why=why, hint="look at its file system and its owner")
