"""Reading stored batches out of one segment: whole, verified, from the one that holds an offset."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from danube.core.batch.format import read_header
from danube.limits import KIB
from danube.wal.segments.holes import HoleKind
from danube.wal.segments.stored_segment import StoredSegment
from danube.wal.segments.walk import Gap, Place, Run, read_run

_TIME_STEP_BYTES: Final = 128 * KIB


class OffsetRange(NamedTuple):
    """Half-open."""

    start: int
    end: int


class Chunk(NamedTuple):
    """Whole stored batches, or none when ``data`` is empty.

    ``first_offset`` is the first record in ``data`` (it may lie below the offset asked for, whose
    batch it starts); reading goes on at ``next_offset``.  ``damage`` holds the ranges between the
    offset asked for and ``next_offset`` that cannot be read any more.  Of a compacted segment there may
    be offsets that no batch holds: before ``first_offset``, between batches and inside them; then
    ``sparse`` is true.  ``hole``: the offsets before ``next_offset`` are in a hole of this kind.
    """

    data: bytes
    first_offset: int
    next_offset: int
    damage: tuple[OffsetRange, ...] = ()
    sparse: bool = False
    hole: HoleKind | None = None


class SegmentReading(NamedTuple):
    """A chunk, the place where the next read of this segment starts, and the gaps that were met."""

    chunk: Chunk
    next_place: Place
    gaps: tuple[Gap, ...]


def read_segment(
    segment: StoredSegment, offset: int, end: int, bytes_max: int, start: Place | None = None
) -> SegmentReading:
    """Batches that hold offsets ``offset .. end`` of ``segment``, about ``bytes_max`` bytes of them.

    ``start`` is a known place at or below ``offset``.  ``offset`` lies inside the segment.  Raises
    OSError if the disk does not answer.
    """
    extent = segment.extent()
    place = start or segment.place_below(offset)
    gaps: list[Gap] = []
    damage: list[OffsetRange] = []
    while place.position < extent.limit and place.offset < end:
        known = segment.gaps.get(place.position)
        run = None
        if not known:
            run = read_run(extent.fd, place.position, extent.limit, place.offset, bytes_max, extent.sparse)
        if run is None:
            gap = segment.gap_at(place)
            if gap.end > offset:
                gaps.append(gap)
                damage.append(OffsetRange(max(offset, gap.start), min(gap.end, end)))
                offset = min(gap.end, end)
            place = Place(gap.resume, gap.end)
        elif run.offset_end <= offset:
            place = Place(run.position_end, run.offset_end)
        else:
            data, first_offset, place = cut_run(run, offset, end, bytes_max)
            chunk = Chunk(data, first_offset, place.offset, tuple(damage), segment.compacted)
            return SegmentReading(chunk, place, tuple(gaps))
    if segment.compacted and place.position >= extent.limit:  # nothing is left behind ``offset``
        place, offset = Place(extent.limit, segment.end_offset), segment.end_offset
    return SegmentReading(Chunk(b"", offset, offset, tuple(damage)), place, tuple(gaps))


def cut_run(run: Run, offset: int, end: int, bytes_max: int) -> tuple[bytes, int, Place]:
    """The batches of ``run`` from the one that holds ``offset`` up to the last that starts below ``end``."""
    positions, sizes, base_offsets, record_counts, stop, _ = run.batches
    if int(base_offsets[0]) >= end:  # a compacted segment holds nothing below ``end`` any more
        return b"", end, Place(run.position, end)
    first, last, start = 0, len(positions), 0
    if int(base_offsets[0]) + int(record_counts[0]) <= offset:
        first = int(np.searchsorted(base_offsets + record_counts, offset, "right"))
        start = int(positions[first])
    if int(base_offsets[-1]) >= end:
        last = int(np.searchsorted(base_offsets, end, "left"))
        stop = int(positions[last - 1] + sizes[last - 1])
    if stop - start > bytes_max and last - first > 1:
        last = max(
            first + 1, int(np.searchsorted(positions[:last] + sizes[:last], start + bytes_max, "right"))
        )
        stop = int(positions[last - 1] + sizes[last - 1])
    data = run.data if start == 0 and stop == len(run.data) else run.data[start:stop]
    next_offset = int(base_offsets[last - 1] + record_counts[last - 1])
    return data, int(base_offsets[first]), Place(run.position + stop, next_offset)


def offset_at_time(segment: StoredSegment, time_us: int) -> int | None:
    """Base offset of the first batch appended at or after ``time_us``; None when all are older."""
    offset = segment.load_index().offset_before_time(time_us)
    offset = segment.base_offset if offset is None else offset
    place: Place | None = None
    while offset < segment.end_offset:
        reading = read_segment(segment, offset, segment.end_offset, _TIME_STEP_BYTES, place)
        position, data = 0, reading.chunk.data
        while position < len(data):
            header = read_header(data, position)
            if header.append_time_us >= time_us:
                return header.base_offset
            position += header.size
        offset, place = reading.chunk.next_offset, reading.next_place
    return None
