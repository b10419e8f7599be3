"""Facts of a plan about a segment and a partition, from names, headers, footers and manifests alone."""

from __future__ import annotations

from typing import NamedTuple

from danube.wal.segments.holes import Hole
from danube.wal.segments.segment import NO_LOG, LogIdentity


class SegmentRef(NamedTuple):
    """One segment of a partition: offsets ``start .. end`` of it count, its batches end at ``data_end``.

    ``key``: the file's name or the object's key.  ``base_offset`` and ``end_offset``: as the segment says;
    ``start`` is more where records have expired, ``end`` less where the next segment takes over.
    ``log_id``: of danube.wal.segments.segment, of the log that this is to be of; zeros if it is not known.
    ``size_bytes``: with the footer.  ``hole_before``: records in front of it are lost.  Times are append
    times in microseconds, 0 if they are not known.  ``data_end`` of an unsealed segment is a bound.
    """

    key: str
    base_offset: int
    end_offset: int
    start: int
    end: int
    size_bytes: int
    data_end: int
    record_count: int
    first_append_us: int
    last_append_us: int
    epoch: int
    sealed: bool
    compacted: bool
    hole_before: bool
    log_id: bytes = NO_LOG


class PartitionHistory(NamedTuple):
    """Records of a partition in one place: from ``start_offset`` on, in ``segments`` by offset.

    ``holes``: the known holes among these offsets, by offset.
    """

    identity: LogIdentity
    start_offset: int
    segments: list[SegmentRef]
    holes: tuple[Hole, ...] = ()

    def of_log(self, log_id: bytes) -> PartitionHistory:
        """Return this history for the log ``log_id``; a reader refuses segments of any other log."""
        return self._replace(segments=[one._replace(log_id=log_id) for one in self.segments])

    @property
    def end_offset(self) -> int:
        """Behind the last record and the last hole."""
        ends = [*(one.end for one in self.segments[-1:]), *(one.end for one in self.holes[-1:])]
        return max(ends, default=self.start_offset)
