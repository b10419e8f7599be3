"""The next segment's file of a log that fills segments quickly, with its space reserved before it is needed.

Reserving space may wait for block bitmaps that are not in memory yet, behind all writeback of the disk.  A
thread that reserves space in the active segment would still block the worker's loop, because a file is
written and grown under one lock.  So the thread reserves space in a separate file, and the next segment only
renames it.

    Spare      what the log has of it; on the loop's thread
    SpareJob   makes the file, in a thread of its own: a log that fills a segment in 0.1 s waits for no seal
    DropJob    deletes it there: giving back so many blocks may wait as well

The file's name holds its owner's epoch, so no other owner makes, renames or deletes it.  A newer owner that
recovers removes it like every unfinished file.  Until the file has a segment's name it is empty, does not
count as part of the log, and is not made durable.  A spare is optional: without one the active segment grows
in steps, like the first one of a log.  Each step may wait, so a segment with a ready spare ends instead of
growing.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from danube.host import files
from danube.limits import MIB
from danube.wal.segments.descriptors import LogFile, descriptors
from danube.wal.segments.index import ENTRY_EVERY_BYTES
from danube.wal.segments.segment import spare_name
from danube.wal.segments.stored_segment import StoredSegment
from danube.wal.segments.writer import LogOptions, footer_room

NEVER: Final = 1 << 62  # a position that no segment reaches
CHUNK_BYTES: Final = 32 * MIB
ROOM_SPARES: Final = 4  # the disk must have room for as many more, because its last space is for records
KEPT_US: Final = 60_000_000
IN_STEPS_MIN: Final = 16 * MIB  # a segment that ends for a spare holds at least so much
_PART: Final = 16  # of a segment, after which it is time for one: bitmaps may take as long as all the rest


class SpareJob:
    """Makes the file ``path`` with ``size`` bytes reserved.  ``made``: it is there, as a whole."""

    __slots__ = ("_created", "_lock", "made", "path", "size", "wanted")

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.made = False
        self.wanted = True
        self._created = False
        self._lock = threading.Lock()

    def run(self, synced: set[object] | None = None) -> None:
        """Leaves no file where one is not wanted any more, the disk is nearly full, or anything fails."""
        fd = self._create()
        if fd < 0:
            return
        try:
            self.made = self._reserve(fd)
        except OSError:
            self.cancel()
            raise
        finally:
            files.close(fd)
        if not self.made:
            self.cancel()

    def _create(self) -> int:
        with self._lock:
            if not self.wanted:
                return -1
            self._created = True
            try:
                return files.open_new(self.path)
            except FileExistsError:  # an earlier one of this owner could not be deleted
                files.unlink(self.path)
                return files.open_new(self.path)

    def _reserve(self, fd: int) -> bool:
        # In chunks: a sync waits for transactions of the file system that are open, so each is to be short.
        for position in range(0, self.size, CHUNK_BYTES):
            if not self.wanted or files.free_bytes(fd) < ROOM_SPARES * self.size:
                return False
            files.fallocate(fd, position, min(CHUNK_BYTES, self.size - position))
        return self.wanted

    def stop(self) -> None:
        """From any thread: no file is created from now on, and one that is being made goes soon."""
        with self._lock:
            self.wanted = False

    def cancel(self) -> None:
        """From any thread, at any time: there is no such file then, and this job makes none any more."""
        with self._lock:
            self.wanted = False
            if self._created:
                with suppress(OSError):  # the next opening removes its remains
                    files.unlink(self.path)


class DropJob:
    """Deletes the file of a SpareJob."""

    __slots__ = ("_spare",)

    def __init__(self, spare: SpareJob) -> None:
        self._spare = spare

    def run(self, synced: set[object] | None = None) -> None:
        self._spare.cancel()


class Spare:
    """One log's spare: none, being made, or ready.

    ``due_position``: from this position of the active segment on it is time for a job; one comparison for
    each write.
    """

    def __init__(self, directory: Path, epoch: int, options: LogOptions) -> None:
        self._path = directory / spare_name(epoch)
        room = footer_room(options.segment_bytes // ENTRY_EVERY_BYTES + 1)
        # A segment ends behind the write that fills it.
        self._size = options.segment_bytes + options.segment_bytes // 16 + room
        self._full = options.segment_bytes
        self.quiet_below = self._full // _PART  # neither is a spare due there, nor does a segment end
        self._early = max(self.quiet_below, IN_STEPS_MIN)
        self._possible = options.preallocate_first > 0
        self._job: SpareJob | None = None
        self._asked_us = 0
        self._in_steps = True  # the active segment grows so
        self.due_position = self._due

    @property
    def _due(self) -> int:
        return self.quiet_below if self._possible else NEVER

    @property
    def held(self) -> bool:
        return self._job is not None

    def ends_segment(self, data_end: int) -> bool:
        """Whether the active segment ends there: it is full, or grew so far in steps and a spare is ready."""
        if data_end >= self._full:
            return True
        return data_end >= self._early and self._in_steps and self._job is not None and self._job.made

    def job(self, active: StoredSegment | None) -> SpareJob | None:
        """Return the work of a thread that makes the spare; None before it is due or if ``active`` is slow.

        The caller reports its end by ``done``.
        """
        if active is None or active.data_end < self.due_position:
            return None
        self.due_position = NEVER
        # At that rate it is needed before it is old.
        quick_us = KEPT_US * active.data_end // self._full
        if self._job is not None or active.last_append_us - active.first_append_us > quick_us:
            return None
        self._asked_us = active.last_append_us
        self._job = SpareJob(self._path, self._size)
        return self._job

    def done(self, job: SpareJob, error: Exception | None) -> None:
        """The job was run.  A full disk is asked again with the next segment, one that cannot do it never."""
        full = isinstance(error, OSError) and error.errno in files.FULL_ERRNOS
        if error is not None and not full:
            self._possible = False
        if job is self._job and not job.made:
            self._job = None

    def create(self, file: LogFile) -> int:
        """Create the next segment's ``file``, from the spare where there is one, and return how many bytes
        of it are reserved.  FileExistsError when another owner made it."""
        spare = self._take()
        if spare is not None:
            try:
                descriptors.create(file, spare.path)
            except OSError:
                spare.cancel()  # this file system cannot do it, or the file was removed
                self._possible = False
            else:
                self._begin(in_steps=False)
                return spare.size
        descriptors.create(file)
        self._begin(in_steps=True)
        return 0

    def _begin(self, *, in_steps: bool) -> None:
        self._in_steps = in_steps
        self.due_position = self._due if self._job is None else NEVER

    def _take(self) -> SpareJob | None:
        """Take the spare file if it is ready; one still in preparation is kept for the following segment."""
        ready = self._job if self._job is not None and self._job.made else None
        if ready is not None:
            self._job = None
        return ready

    def old(self, now_us: int) -> bool:
        """Whether the log has become slower since it asked."""
        return self._job is not None and now_us - self._asked_us > KEPT_US

    def drop(self) -> DropJob | None:
        """Return the work of a thread that removes the spare; None without one."""
        job, self._job = self._job, None
        if job is None:
            return None
        job.stop()
        return DropJob(job)

    def give_up(self) -> bool:
        """Delete it here and now; False if there was none."""
        dropped = self.drop()
        if dropped is not None:
            dropped.run()
        return dropped is not None
