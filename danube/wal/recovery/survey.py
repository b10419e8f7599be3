"""Scan of an unsealed segment after a restart: its batches, its end, its damage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from danube.core.batch.format import HEADER_BYTES as BATCH_HEADER_BYTES
from danube.core.batch.format import BatchHeader, read_header
from danube.wal.segments.segment import HEADER_BYTES
from danube.wal.segments.stored_segment import GAPS_KEPT_MAX, StoredSegment
from danube.wal.segments.walk import (
    WINDOW_BYTES,
    Extent,
    Gap,
    Place,
    Run,
    first_nonzero,
    last_nonzero,
    read_run,
    resume,
)

_WORDS = BATCH_HEADER_BYTES // 8


class Headers:
    """Batch headers in log order, kept packed.  Iterating hands each out once and frees it."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []

    def __len__(self) -> int:
        return sum(len(block) for block in self._blocks) // BATCH_HEADER_BYTES

    def __iter__(self) -> Iterator[BatchHeader]:
        while self._blocks:
            block = self._blocks.pop(0)
            for position in range(0, len(block), BATCH_HEADER_BYTES):
                yield read_header(block, position)

    def extend(self, other: Headers) -> None:
        """Take over all headers of ``other``."""
        self._blocks += other._blocks
        other._blocks = []

    def add(self, run: Run, count: int) -> None:
        """Keep the headers of the first ``count`` batches of a run."""
        words = np.frombuffer(run.data, "<u8", len(run.data) // 8)
        first = run.batches.positions[:count, None] // 8
        self._blocks.append(words[first + np.arange(_WORDS)].tobytes())


class Survey(NamedTuple):
    """``segment`` is filled in; ``data_end`` is behind the last intact batch.

    ``tail_end``: position behind the last byte that is not zero; larger than data_end where
    something else than a batch follows.  ``unsynced``: the first batch at or behind the sync
    mark, None when there is none.
    """

    segment: StoredSegment
    tail_end: int
    unsynced: Place | None
    scanned_bytes: int

    @property
    def tail_size(self) -> int:
        return self.tail_end - self.segment.data_end


def survey(
    segment: StoredSegment, fd: int, size: int, synced: Place, headers: Headers, offset_end: int | None
) -> Survey:
    """Walk ``segment``'s file of ``size`` bytes and fill in its content below ``offset_end``.

    Bytes below ``synced.position`` and records below ``synced.offset`` were on disk once.
    """
    segment.size_bytes = size
    extent = Extent(fd, size, None, synced.offset)
    place = Place(HEADER_BYTES, segment.base_offset)
    unsynced: Place | None = None
    tail_end = HEADER_BYTES
    while True:
        end = offset_end is not None and place.offset >= offset_end
        run = None if end else read_run(fd, place.position, size, place.offset, WINDOW_BYTES)
        if run is not None:
            count = _count_run(segment, run, offset_end)
            headers.add(run, count)
            unsynced = unsynced or _first_behind(run, synced.position, count)
            place = _end_of(run, count)
            segment.data_end = tail_end = place.position
            continue
        dirty = first_nonzero(fd, place.position, size)
        if dirty is None:
            break
        found = None if end else resume(extent, place.position, place.offset)
        if found is None or (offset_end is not None and found.offset >= offset_end):
            tail_end = last_nonzero(fd, place.position, size)
            break
        if len(segment.gaps) < GAPS_KEPT_MAX:
            segment.gaps[place.position] = Gap(place.position, found.position, place.offset, found.offset)
        place = found
    return Survey(segment, max(tail_end, segment.data_end), unsynced, max(tail_end, segment.data_end))


def _count_run(segment: StoredSegment, run: Run, offset_end: int | None) -> int:
    """Count the run's batches that start below ``offset_end`` into the segment; return how many."""
    positions, _, base_offsets, record_counts, _, _ = run.batches
    count = len(positions)
    if offset_end is not None and run.offset_end > offset_end:
        count = int(np.searchsorted(base_offsets, offset_end, "left"))
    times = np.frombuffer(run.data, "<i8", len(run.data) // 8)[positions[:count] // 8 + 2]
    rows = zip(
        positions[:count].tolist(),
        base_offsets[:count].tolist(),
        record_counts[:count].tolist(),
        times.tolist(),
        strict=True,
    )
    for position, base_offset, record_count, append_time_us in rows:
        segment.count(base_offset, base_offset + record_count, run.position + position, append_time_us)
    return count


def _first_behind(run: Run, position: int, count: int) -> Place | None:
    number = int(np.searchsorted(run.batches.positions[:count], position - run.position, "left"))
    if number >= count:
        return None
    return Place(run.position + int(run.batches.positions[number]), int(run.batches.base_offsets[number]))


def _end_of(run: Run, count: int) -> Place:
    positions, sizes, base_offsets, record_counts, _, _ = run.batches
    last = count - 1
    return Place(
        run.position + int(positions[last] + sizes[last]), int(base_offsets[last] + record_counts[last])
    )
