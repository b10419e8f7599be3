"""Walking the batches of one segment file, and finding the way again behind damage.

Only intact batches that continue the offsets are handed out.  At other bytes :func:`resume` searches the
position where the log continues.  If the header of the damaged batch is intact, that is behind this batch.
Otherwise it is the next batch from which consecutive batches reach a known boundary (an index entry, the end
of the segment). A payload may contain batches, byte for byte.  They do not lead to the boundary, so they are
never mistaken for the log's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.columns import BatchView, ScanResult, StopReason, scan
from danube.core.batch.format import HEADER_BYTES, MAGIC, BatchHeader, header_intact, read_header
from danube.errors import LimitExceeded, ProtocolError
from danube.host import files
from danube.limits import MIB

WINDOW_BYTES: Final = 1 * MIB
_READ_BYTES_MIN: Final = 4096  # more than a header: shorter pieces cannot be checked
_RESUME_DEPTH_MAX: Final = 16
_ZEROS: Final = bytes(WINDOW_BYTES)


class Run(NamedTuple):
    """Consecutive intact batches: ``data`` as read from file position ``position``.

    In a compacted segment the record counts in ``batches`` are of the offsets that belong to each
    batch; ``stored_counts`` are of the records in it.
    """

    data: bytes
    position: int
    batches: ScanResult
    position_end: int
    offset_end: int
    stored_counts: NDArray[np.int64]


class Gap(NamedTuple):
    """Bytes ``position .. resume`` hold no readable batch; offsets ``start .. end`` are lost."""

    position: int
    resume: int
    start: int
    end: int


class Place(NamedTuple):
    position: int
    offset: int


class Extent(NamedTuple):
    """Part of a file that may hold batches.

    ``limit``: position behind the last one.  ``end_offset``: offset behind the last record, or None
    while unknown.  ``synced_offset``: records below it were certainly on disk once.  ``sparse``: the
    end of a compacted segment, else None.
    """

    fd: int
    limit: int
    end_offset: int | None
    synced_offset: int = 0
    sparse: Place | None = None


def read_run(
    fd: int, position: int, limit: int, expected: int, size: int, sparse: Place | None = None
) -> Run | None:
    """Read about ``size`` bytes at ``position``: the intact batches there from offset ``expected`` on.

    None: there is no such batch.  A batch larger than ``size`` is read whole; no length is believed
    beyond ``limit`` or BATCH_BYTES_MAX.  ``sparse`` is the end of a compacted segment, where offsets
    may be missing between batches: each batch has all offsets up to the next one.
    """
    if position >= limit:
        return None
    data = files.pread(fd, min(max(size, _READ_BYTES_MIN), limit - position), position)
    dense = expected if sparse is None else None
    batches = scan(data, 0, None, dense)
    if not len(batches.positions) and batches.reason is StopReason.CUT:
        header = intact_header(data)
        if header is None or header.size <= len(data) or header.size > limit - position:
            return None
        data = files.pread(fd, header.size, position)
        batches = scan(data, 0, None, dense)
    stored_counts = batches.record_counts
    if sparse is not None:
        batches = _ascending(batches, expected)
    if not len(batches.positions):
        return None
    if sparse is not None:
        stored_counts = batches.record_counts
        batches = _covering(fd, data, position, batches, sparse)
    offset_end = int(batches.base_offsets[-1] + batches.record_counts[-1])
    return Run(data, position, batches, position + batches.stop, offset_end, stored_counts)


def _ascending(batches: ScanResult, expected: int) -> ScanResult:
    """The batches up to the first that does not lie behind the one before it."""
    bases = batches.base_offsets
    ends = np.concatenate((np.array([expected]), (bases + batches.record_counts)[:-1]))
    wrong = np.flatnonzero(bases < ends[: len(bases)])
    if not len(wrong):
        return batches
    kept = int(wrong[0])
    stop = int(batches.positions[kept])
    positions, sizes, bases, counts, _, _ = batches
    return ScanResult(
        positions[:kept], sizes[:kept], bases[:kept], counts[:kept], stop, StopReason.OFFSET_MISMATCH
    )


def _covering(fd: int, data: bytes, position: int, batches: ScanResult, sparse: Place) -> ScanResult:
    """The batches with the numbers of offsets that belong to them, up to the next batch."""
    bases, stop = batches.base_offsets, batches.stop
    last = int(batches.positions[-1])
    if position + stop == sparse.position:
        end = sparse.offset
    else:
        following = data[stop : stop + HEADER_BYTES]
        if len(following) < HEADER_BYTES:
            following = files.pread(fd, HEADER_BYTES, position + stop)
        header = intact_header(following)
        end = int(BatchView(data, position=last).offsets[-1]) + 1
        if header is not None and header.base_offset >= end:
            end = header.base_offset
    return batches._replace(record_counts=np.diff(bases, append=end))


def intact_header(data: bytes | memoryview) -> BatchHeader | None:
    """The header at the start of ``data`` when its shape and checksum are right."""
    try:
        header = read_header(data)
    except (ProtocolError, LimitExceeded):
        return None
    return header if header_intact(data, header) else None


def first_nonzero(fd: int, position: int, limit: int) -> int | None:
    """Position of the window that holds the first byte that is not zero; None when all are."""
    while position < limit:
        # A segment may have been reserved as a whole; its unwritten part is not read.
        written = files.next_data(fd, position)
        if written is None or written >= limit:
            return None
        position = max(position, written)
        data = files.pread(fd, min(WINDOW_BYTES, limit - position), position)
        if not data:
            return None
        if data != _ZEROS[: len(data)]:
            return position
        position += len(data)
    return None


def last_nonzero(fd: int, position: int, limit: int) -> int:
    """Position behind the last byte of ``position .. limit`` that is not zero."""
    while limit > position:
        start = max(position, limit - WINDOW_BYTES)
        kept = len(files.pread(fd, limit - start, start).rstrip(b"\0"))
        if kept:
            return start + kept
        limit = start
    return position


def resume(
    extent: Extent, position: int, expected: int, boundaries: Iterable[tuple[int, int]] = (), depth: int = 0
) -> Place | None:
    """Where intact batches go on behind ``position``, which holds none of offset ``expected``.

    ``boundaries`` are trusted ``(offset, position)`` pairs behind it, ascending.  None: nowhere.
    """
    start = position
    header = intact_header(files.pread(extent.fd, HEADER_BYTES, position))
    if header is not None and header.base_offset == expected and header.size <= extent.limit - position:
        start = position + header.size
        place = _at(extent, start, expected)
        if place is not None:
            return place
    for offset, boundary in boundaries:
        if offset < expected or boundary >= extent.limit:
            continue
        found = _search(extent, start, Place(boundary, offset), expected, depth)
        if found is not None:
            return found
        if _run_at(extent, boundary, offset) is not None:
            return Place(boundary, offset)
        start = boundary
    return _search(extent, start, None, expected, depth)


def _run_at(extent: Extent, position: int, offset: int) -> Run | None:
    return read_run(extent.fd, position, extent.limit, offset, WINDOW_BYTES, extent.sparse)


def _at(extent: Extent, position: int, expected: int) -> Place | None:
    """The batch right behind a damaged one whose size is known; its record count is not."""
    if position == extent.limit and extent.end_offset is not None:
        return Place(position, extent.end_offset)
    header = intact_header(files.pread(extent.fd, HEADER_BYTES, position))
    if header is None or header.base_offset <= expected:
        return None
    if _run_at(extent, position, header.base_offset) is None:
        return None
    return Place(position, header.base_offset)


def _search(extent: Extent, start: int, boundary: Place | None, expected: int, depth: int) -> Place | None:
    """Look for a batch before ``boundary`` (None: the extent's limit) whose followers lead there.

    Not in a compacted segment: where offsets may be missing, a payload's batches could lead there too.
    """
    if extent.sparse is not None:
        return None
    limit = extent.limit if boundary is None else boundary.position
    end_offset = extent.end_offset if boundary is None else boundary.offset
    while True:
        found = _next_magic(extent.fd, start, limit)
        if found is None:
            return None
        start = found + 8
        header = intact_header(files.pread(extent.fd, HEADER_BYTES, found))
        if header is None or header.base_offset < expected or found + header.size > limit:
            continue
        if end_offset is not None and header.end_offset > end_offset:
            continue
        end = _chain_end(extent.fd, found, limit, header.base_offset)
        if end is None:
            continue
        if _believable(extent, end, limit, end_offset, depth):
            return Place(found, header.base_offset)
        start = end.position


def _chain_end(fd: int, position: int, limit: int, offset: int) -> Place | None:
    """Where the intact batches that start at ``position`` end; None when the first is not one."""
    place: Place | None = None
    while position < limit:
        run = read_run(fd, position, limit, offset, WINDOW_BYTES)
        if run is None:
            break
        position, offset = run.position_end, run.offset_end
        place = Place(position, offset)
    return place


def _believable(extent: Extent, end: Place, limit: int, end_offset: int | None, depth: int) -> bool:
    """Whether batches that end at ``end`` are the log's own and not a payload's."""
    if end_offset is not None and end.offset >= end_offset:
        return end.offset == end_offset and not _holds_batch(extent.fd, end.position, limit)
    if end.position >= limit or first_nonzero(extent.fd, end.position, limit) is None:
        return end_offset is None
    header = intact_header(files.pread(extent.fd, HEADER_BYTES, end.position))
    if header is not None and header.base_offset != end.offset:
        return False
    if end.offset <= extent.synced_offset:
        return True
    if depth >= _RESUME_DEPTH_MAX:
        return False
    return resume(extent._replace(limit=limit, end_offset=end_offset), *end, depth=depth + 1) is not None


def _holds_batch(fd: int, position: int, limit: int) -> bool:
    """Whether an intact batch, whatever its offset, lies between ``position`` and ``limit``."""
    while True:
        found = _next_magic(fd, position, limit)
        if found is None:
            return False
        header = intact_header(files.pread(fd, HEADER_BYTES, found))
        if header is not None and read_run(fd, found, limit, header.base_offset, WINDOW_BYTES) is not None:
            return True
        position = found + 8


def _next_magic(fd: int, position: int, limit: int) -> int | None:
    """The next 8-aligned position where a batch may start."""
    while limit - position >= HEADER_BYTES:
        data = files.pread(fd, min(WINDOW_BYTES, limit - position), position)
        found = data.find(MAGIC)
        while found >= 0:
            if (position + found) & 7 == 0:
                return position + found
            found = data.find(MAGIC, found + 1)
        if len(data) < HEADER_BYTES:
            return None
        position += len(data) - len(MAGIC) + 1 if len(data) > len(MAGIC) else len(data)
    return None
