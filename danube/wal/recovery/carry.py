"""New segment files that recovery and retention make durable at once: copies and empty ones."""

from __future__ import annotations

from pathlib import Path

from danube.errors import Damage
from danube.host import files
from danube.host.disk_reserve import reserve
from danube.wal.recovery.survey import Headers, survey
from danube.wal.segments.descriptors import LogFile
from danube.wal.segments.segment import (
    HEADER_BYTES,
    NO_LOG,
    LogIdentity,
    SegmentHeader,
    file_name,
    pack_header,
)
from danube.wal.segments.stored_segment import StoredSegment
from danube.wal.segments.walk import WINDOW_BYTES, Place, read_run

TEMPORARY_SUFFIX = ".new"


def create_empty(
    directory: Path, identity: LogIdentity, epoch: int, base_offset: int, created_us: int,
    log_id: bytes = NO_LOG,
) -> StoredSegment:  # fmt: skip
    """A segment file without batches, durable: it keeps the numbering of an empty log."""
    segment = StoredSegment(directory, identity, base_offset, epoch)
    header = pack_header(SegmentHeader(identity, epoch, base_offset, created_us, log_id))
    reserve.replace_durably(segment.file.path, header)
    segment.file = LogFile(segment.file.path, locked=True)
    segment.size_bytes = HEADER_BYTES
    return segment


def carry_over(
    source: StoredSegment, fd: int, start: Place, epoch: int, log_id: bytes = NO_LOG
) -> StoredSegment:
    """Copy ``source`` from ``start`` to its end into a file of ``epoch``; durable when this returns.

    Each batch is verified again while it is copied.  ``source`` itself is not changed, unless the
    copy takes its name because it begins with its first batch.
    """
    directory, identity = source.directory, source.identity
    copy = StoredSegment(directory, identity, start.offset, epoch)
    header = SegmentHeader(identity, epoch, start.offset, source.first_append_us, log_id)
    path = directory / file_name(start.offset)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    target = files.open_new(temporary)
    try:
        files.write_all(target, pack_header(header), 0)
        _copy(source, fd, start, target)
        files.fdatasync(target)
        size = files.size_of(target)
        survey(copy, target, size, Place(size, source.end_offset), Headers(), None)
        copy.data_end = size
    finally:
        files.close(target)
    if copy.end_offset != source.end_offset:
        raise Damage(
            "a copied segment differs", file=path.name, end=copy.end_offset, expected=source.end_offset
        )
    files.rename(temporary, path)
    files.fsync_directory(directory)
    copy.file = LogFile(path, locked=True)
    return copy


def drop_copy(source: StoredSegment, start: Place) -> None:
    """Remove the remains of a copy that found no room."""
    name = file_name(start.offset) + TEMPORARY_SUFFIX
    source.directory.joinpath(name).unlink(missing_ok=True)


def write_again(fd: int, start: int, end: int) -> None:
    """Write bytes ``start .. end`` of a file once more where they lie, and sync them: needs no room.

    A sync that failed before may have left pages that count as clean and are not on disk.
    """
    while start < end:
        data = files.pread(fd, min(WINDOW_BYTES, end - start), start)
        if not data:
            break
        files.write_all(fd, data, start)
        start += len(data)
    files.fdatasync(fd)


def _copy(source: StoredSegment, fd: int, start: Place, target: int) -> None:
    shift = start.position - HEADER_BYTES
    place = start
    while place.position < source.data_end:
        gap = source.gaps.get(place.position)
        if gap is not None:
            _copy_bytes(fd, place.position, gap.resume, target, shift)
            place = Place(gap.resume, gap.end)
            continue
        run = read_run(fd, place.position, source.data_end, place.offset, WINDOW_BYTES)
        if run is None and place.offset >= source.end_offset:
            _copy_bytes(fd, place.position, source.data_end, target, shift)
            return
        if run is None:
            raise Damage("a batch changed while it was copied", file=source.name, position=place.position)
        files.write_all(target, memoryview(run.data)[: run.batches.stop], place.position - shift)
        place = Place(run.position_end, run.offset_end)


def _copy_bytes(fd: int, position: int, end: int, target: int, shift: int) -> None:
    while position < end:
        data = files.pread(fd, min(WINDOW_BYTES, end - position), position)
        data = data or bytes(min(WINDOW_BYTES, end - position))
        files.write_all(target, data, position - shift)
        position += len(data)
