"""Writing one worker's chain of audit lines: a line is in its file before ``append`` returns.

So kill -9 loses no line that was acknowledged; a power cut loses those since the last ``sync``, which the
caller runs off the loop.  A writer never goes on in a file of an earlier one: it begins a new file, whose
first line names the last place of the chain and the bytes of a line that was not whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from danube.broker.audit.lines import BEGIN, LOST, REMOVED, START, Entry, encode
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
        """``keep_us``: files that were last written longer ago are removed; 0 keeps them all."""
        self._directory = directory
        self._worker = worker
        self._now_us = now_us
        self._file_bytes_max = file_bytes_max
        self._keep_us = keep_us
        self._fd = -1
        self._head_fd = -1
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
            raise _failed(self._directory, error) from None

    def _begin(self) -> None:
        try:
            files.make_directory(self._directory)
            before = [one for one in list_files(self._directory) if one.worker == self._worker]
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
        head = read_head(self._directory, self._worker) or START
        end = line.place if line is not None else START
        self.place = end if end.number >= head.number else head
        return torn

    def _open_head(self) -> None:
        path = self._directory / head_name(self._worker)
        if not path.exists():
            files.replace_durably(path, encode_head(self.place))
        self._head_fd = files.open_existing(path, writable=True)

    def _open_file(self) -> None:
        self._fd = files.open_new(self._directory / name_of(self._worker, self._number))
        self._size = 0
        files.fsync_directory(self._directory)

    @property
    def path(self) -> Path:
        return self._directory / name_of(self._worker, self._number)

    def append(self, entry: Entry) -> None:
        """Write a line; raises StorageFailed or StorageFull, and then no part of it stays."""
        try:
            if self._fd < 0 or self._sync_failed:
                self._let_go()
                self._begin()
            elif self._size >= self._file_bytes_max:
                self._roll()
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
        try:
            files.fdatasync(self._fd)
            old = self._fd
            self._number += 1
            self._open_file()
            files.close(old)
        except OSError:
            self._let_go()
            raise
        self._retain()

    def sync(self) -> None:
        """Put what was written on disk; may run in a thread of its own.  Raises OSError."""
        if not self.dirty:
            return
        self.dirty = False
        fd = os.dup(self._fd)  # the writer may roll or close while this waits
        try:
            files.fdatasync(fd)
        except OSError:
            self._sync_failed = True  # a second sync would say that all is well
            raise
        finally:
            files.close(fd)

    def _retain(self) -> None:
        """Remove files that are too old; what fails is tried again with the next file."""
        try:
            if self._keep_us:
                self._remove(self._expired())
        except (OSError, StorageFailed):
            pass

    def _expired(self) -> list[AuditFile]:
        """The oldest files, as long as they are too old; the current one is never among them."""
        oldest = self._now_us() - self._keep_us
        old: list[AuditFile] = []
        for one in list_files(self._directory):
            if one.worker != self._worker or one.number >= self._number or len(old) >= _REMOVED_AT_ONCE:
                continue
            if one.path.stat().st_mtime_ns // 1000 >= oldest:
                break
            old.append(one)
        return old

    def _remove(self, old: list[AuditFile]) -> None:
        """Remove files, oldest first, behind a line that names the ends of their chain."""
        places = [line.place for one in old if (line := read_end(one.path)[0]) is not None]
        if not old:
            return
        self._write(
            Entry(
                self._now_us(), REMOVED, "allowed",
                details={"files": [one.path.name for one in old], "places": [[*place] for place in places]},
            )
        )  # fmt: skip
        files.fdatasync(self._fd)
        for one in old:
            files.unlink(one.path)
        files.fsync_directory(self._directory)

    def close(self) -> None:
        """Sync and close; nothing is raised, since nobody waits for an answer."""
        try:
            self.sync()
        except OSError:
            pass
        self._let_go()

    def _let_go(self) -> None:
        for fd in (self._fd, self._head_fd):
            try:
                if fd >= 0:
                    files.close(fd)
            except OSError:
                pass  # the descriptor is free all the same (close(2))
        self._fd = self._head_fd = -1
        self.dirty = self._sync_failed = False


def _failed(path: Path, error: OSError) -> StorageFailed | StorageFull:
    why = error.strerror or str(error)
    if error.errno in files.FULL_ERRNOS:
        return StorageFull(f"{path} takes no more audit lines", why=why, hint="make room on its file system")
    return StorageFailed(f"{path} cannot be written", why=why, hint="look at its file system and its owner")
