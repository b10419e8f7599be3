"""The segments of a partition's directory, found beside a running broker from headers and footers alone.

The last 144 bytes of a sealed segment describe it.  An unsealed segment ends where the next one begins.  The
last one ends at the sync mark, or, if unsynced records count too, behind the last intact batch after the
mark.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Final, TypeVar

from danube.core.batch.format import HEADER_BYTES as BATCH_HEADER_BYTES
from danube.errors import Damage, StorageFailed, StorageIncompatible
from danube.host import files
from danube.spark.history.segments import SegmentRef
from danube.wal.recovery.mark import Mark, read_mark
from danube.wal.segments.segment import (
    HEADER_BYTES,
    SUMMARY_BYTES,
    LogIdentity,
    SegmentHeader,
    Summary,
    base_offset_of,
    file_name,
    read_header,
    read_summary,
)
from danube.wal.segments.walk import WINDOW_BYTES, Place, intact_header, read_run

_Part = TypeVar("_Part", SegmentHeader, Summary)
_ATTEMPTS: Final = 3
_SEALED_MAX: Final = 200_000

_sealed_files: dict[tuple[str, int, int], SegmentRef] = {}  # by directory, base offset and inode


class LocalSegments:
    """The segments of one directory."""

    def __init__(self, directory: Path, identity: LogIdentity) -> None:
        self._directory = directory
        self._identity = identity

    def found(self, *, unsynced: bool) -> list[SegmentRef]:
        """All segments that hold records, by offset; none where there is no directory.

        Raises StorageFailed if the disk does not answer, StorageIncompatible for a newer version.  A
        file that is deleted or replaced while it is looked at is looked for again.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return self._found(unsynced)
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1:
                    break
            except OSError as error:
                raise StorageFailed(f"{self._directory} cannot be read", why=str(error)) from None
        raise StorageFailed(f"{self._directory} changes while it is read", hint="try again")

    def _found(self, unsynced: bool) -> list[SegmentRef]:
        try:
            with os.scandir(self._directory) as entries:
                inodes = {base_offset_of(entry.name): entry.inode() for entry in entries}
        except FileNotFoundError:
            return []
        bases = sorted(base for base in inodes if base is not None)
        found: list[SegmentRef] = []
        for base, following in zip_longest(bases, bases[1:]):
            if found and base < found[-1].end:
                continue  # it repeats offsets of a sealed segment
            segment = self._known(base, inodes[base], following, unsynced)
            if segment is not None and segment.end > segment.start:
                hole = bool(found) and segment.start > found[-1].end
                found.append(segment._replace(hole_before=hole))
        return found

    def _known(self, base: int, inode: int, following: int | None, unsynced: bool) -> SegmentRef | None:
        """A sealed file never changes, so its footer is read once by each process."""
        key = (str(self._directory), base, inode)
        segment = _sealed_files.get(key)
        if segment is None:
            segment = self._examine(base, following, unsynced)
            if segment is not None and segment.sealed:
                if len(_sealed_files) >= _SEALED_MAX:
                    _sealed_files.clear()
                _sealed_files[key] = segment._replace(end=segment.end_offset)
        elif following is not None and following < segment.end_offset:
            segment = segment._replace(end=following)
        return segment

    def _examine(self, base: int, following: int | None, unsynced: bool) -> SegmentRef | None:
        path = self._directory / file_name(base)
        fd = files.open_existing(path, writable=False)
        try:
            size = files.size_of(fd)
            header = self._ours(lambda: read_header(files.pread(fd, HEADER_BYTES, 0)))
            footer_start = max(0, size - SUMMARY_BYTES)
            summary = self._ours(lambda: read_summary(files.pread(fd, SUMMARY_BYTES, footer_start), size))
            if summary is not None and summary.base_offset == base:
                return _sealed(path.name, summary, size, following)
            if header is None or header.base_offset != base:
                return None
            if following is not None:
                return _unsealed(path.name, header, size, Place(size, following))
            return _unsealed(path.name, header, size, self._end(fd, size, base, unsynced))
        finally:
            files.close(fd)

    def _ours(self, read: Callable[[], _Part | None]) -> _Part | None:
        """The header, or the footer's summary; None if it is missing, damaged or of another partition."""
        try:
            found = read()
        except StorageIncompatible:
            raise
        except Damage:
            return None
        return found if found is not None and found.identity == self._identity else None

    def _end(self, fd: int, size: int, base: int, unsynced: bool) -> Place:
        """Return the end of the records of the last segment."""
        mark = read_mark(self._directory, self._identity).mark
        place = Place(HEADER_BYTES, base)
        if mark is not None and mark.base_offset == base and _believable(fd, size, mark):
            place = Place(mark.position, mark.synced_end)
        elif mark is not None and mark.synced_end > base:
            unsynced = True  # the segment was recovered or replaced; its intact batches count
        if not unsynced:
            return place
        while (run := read_run(fd, place.position, size, place.offset, WINDOW_BYTES)) is not None:
            place = Place(run.position_end, run.offset_end)
        return place


def _believable(fd: int, size: int, mark: Mark) -> bool:
    """Whether the bytes at the mark are the next batch, or unwritten."""
    if not HEADER_BYTES <= mark.position <= size:
        return False
    head = files.pread(fd, BATCH_HEADER_BYTES, mark.position)
    header = intact_header(head)
    return header is None or header.base_offset == mark.synced_end


def _sealed(name: str, summary: Summary, size: int, following: int | None) -> SegmentRef:
    end = summary.end_offset if following is None else min(summary.end_offset, following)
    return SegmentRef(
        name, summary.base_offset, summary.end_offset, summary.base_offset, end, size, summary.data_end,
        summary.record_count, summary.first_append_us, summary.last_append_us, summary.epoch, True,
        summary.compacted, False,
    )  # fmt: skip


def _unsealed(name: str, header: SegmentHeader, size: int, end: Place) -> SegmentRef:
    base = header.base_offset
    return SegmentRef(
        name, base, end.offset, base, end.offset, size, end.position, end.offset - base, header.created_us,
        0, header.epoch, False, False, False,
    )  # fmt: skip
