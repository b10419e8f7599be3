"""Retention of a log: which segments it deletes, how, and what must outlive them.

Files are deleted in two halves: the name at once, the blocks in a thread.

A file system that reports freed blocks to its disk waits for the disk: 15 to 90 ms for a segment, in which a
worker's loop could answer no request.  Blocks are freed when a file has neither a name nor a descriptor, so
one descriptor is kept over the deletion and closed in the thread.  Nothing depends on when that happens.

A compacted segment takes the place of the local files that it was made from.

    1.  it lies beside them, complete and synced, under a name that recovery removes
    2.  it is renamed to the name of the first of them: from here on it speaks for all their offsets
    3.  that name is made durable
    4.  the others are removed

A crash before 3 leaves the old files or, with it, files that lie wholly inside a compacted segment;
recovery removes these (see danube.wal.recovery.inventory).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from danube.errors import broken
from danube.host import files
from danube.wal.recovery.producers import Checkpoint, write_checkpoint
from danube.wal.segments.descriptors import descriptors
from danube.wal.segments.index import index_cache
from danube.wal.segments.merge import Merged
from danube.wal.segments.reading import OffsetRange
from danube.wal.segments.segment import file_name
from danube.wal.segments.stored_segment import StoredSegment

UNNAMED_SUFFIX: Final = ".compacted.new"
WAITING_MAX: Final = 32  # descriptors; faster deletions wait for the disk


class Freeing:
    """One for the process; safe for threads."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[int] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def delete(self, path: Path) -> None:
        """Take the file's name; raises as unlink() does.  Its blocks are free soon after."""
        fd = self._held(path)
        try:
            files.unlink(path)
        finally:
            if fd >= 0:
                self._waiting.put(fd)
                self._start()

    def _held(self, path: Path) -> int:
        """A descriptor of the file; -1 where none is to be had, and its blocks are freed at once."""
        if self._waiting.qsize() >= WAITING_MAX:
            return -1
        try:
            return files.open_existing(path, writable=False)
        except OSError:
            return -1

    def _start(self) -> None:
        thread = self._thread
        if thread is None or not thread.is_alive():  # none yet, or this process was forked since
            self._thread = threading.Thread(target=self._work, name="danube-freeing", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            os.close(self._waiting.get())


freeing: Final = Freeing()


def expired(
    candidates: Iterable[StoredSegment], cutoff_us: int | None, excess_bytes: int
) -> list[StoredSegment]:
    """Segments from the front that are wholly older than ``cutoff_us``, or within ``excess_bytes``.

    The first that must stay ends the list.
    """
    doomed: list[StoredSegment] = []
    for segment in candidates:
        too_old = cutoff_us is not None and segment.last_append_us < cutoff_us
        if not too_old and excess_bytes < segment.stored_bytes:
            break
        excess_bytes -= segment.stored_bytes
        doomed.append(segment)
    return doomed


def below(candidates: Iterable[StoredSegment], end_offset: int, *, sealed: bool) -> list[StoredSegment]:
    """Segments from the front that end at or below ``end_offset``; with ``sealed`` only sealed ones."""
    chosen: list[StoredSegment] = []
    for segment in candidates:
        if segment.end_offset > end_offset or (sealed and not segment.sealed):
            break
        chosen.append(segment)
    return chosen


def remove(doomed: list[StoredSegment], segments: list[StoredSegment], bases: list[int]) -> list[OffsetRange]:
    """Delete the files of ``doomed``, the first of ``segments``; one at least is left.

    Takes them out of both lists one by one, so that an error leaves the lists as the files are.
    """
    deleted: list[OffsetRange] = []
    for segment in doomed:
        descriptors.close(segment.file)
        index_cache.drop(segment.file)
        freeing.delete(segment.file.path)
        del segments[0], bases[0]
        deleted.append(OffsetRange(segment.base_offset, bases[0]))
    return deleted


def deletable(
    doomed: list[StoredSegment], segments: list[StoredSegment], unsealed: Checkpoint | None
) -> list[StoredSegment]:
    """``doomed``, the front of ``segments``, when its producer snapshot is kept; on a full disk so much of
    its front as needs no room: deleting that makes room to delete the rest."""
    while True:
        try:
            keep_snapshot(doomed, segments[len(doomed) :], unsealed)
            return doomed
        except OSError as error:
            if error.errno not in files.FULL_ERRNOS or len(doomed) == 1:
                raise
            doomed = doomed[:-1]


def keep_snapshot(
    doomed: list[StoredSegment], kept: list[StoredSegment], unsealed: Checkpoint | None
) -> None:
    """Store the newest producer snapshot of ``doomed`` beside the log when no kept segment has one.

    ``unsealed`` is that of a segment whose footer could not be written.
    """
    if any(segment.has_snapshot for segment in kept):
        return
    first = doomed[0]
    checkpoint = unsealed
    for segment in reversed(doomed):
        snapshot = segment.load_snapshot()
        if snapshot is not None:
            if checkpoint is None or checkpoint.end_offset < segment.end_offset:
                checkpoint = Checkpoint(segment.end_offset, snapshot)
            break
    if checkpoint is not None:
        write_checkpoint(first.directory, first.identity, checkpoint, urgent=True)


def unnamed_path(directory: Path, base_offset: int) -> Path:
    """Return the path at which a compacted segment is made."""
    return directory / (file_name(base_offset) + UNNAMED_SUFFIX)


def replace(
    sources: list[StoredSegment], made: Merged, path: Path, segments: list[StoredSegment], bases: list[int]
) -> None:
    """Steps 2 to 4 for the file ``path``; ``sources`` are adjacent ones of ``segments``.

    An OSError before step 2 leaves all as it was; after it the lists are as the log is now read, and
    files may be left that the next opening removes.
    """
    first = segments.index(sources[0])
    if segments[first : first + len(sources)] != sources:
        broken("what a compacted segment replaces is not in the log", base_offset=sources[0].base_offset)
    directory = sources[0].directory
    files.rename(path, directory / file_name(sources[0].base_offset))
    compacted = StoredSegment.of_summary(directory, made.summary, made.size_bytes)
    segments[first : first + len(sources)] = [compacted]
    bases[first : first + len(sources)] = [compacted.base_offset]
    for source in sources:
        descriptors.close(source.file)
        index_cache.drop(source.file)
    files.fsync_directory(directory)
    for source in sources[1:]:
        freeing.delete(source.file.path)
    files.fsync_directory(directory)
