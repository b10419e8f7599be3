"""Reading a log as one ordered stream over its segments; damage is skipped and reported once."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import Final

from danube.errors import StorageFailed
from danube.wal.recovery.damage import DamagedRange, DamageRegister
from danube.wal.segments.local_holes import LocalHoles
from danube.wal.segments.reading import Chunk, OffsetRange, offset_at_time, read_segment
from danube.wal.segments.stored_segment import StoredSegment
from danube.wal.segments.walk import Gap, Place

_PLACES_MAX: Final = 256


class LogReader:
    """Shares ``segments`` and their ``bases`` with the log that owns them.

    Remembers where recent reads ended, so that reading on needs no search and no second scan.
    """

    def __init__(
        self, segments: list[StoredSegment], bases: list[int], damage: DamageRegister, holes: LocalHoles
    ) -> None:
        self._segments = segments
        self._bases = bases
        self._damage = damage
        self._holes = holes
        self._places: OrderedDict[int, tuple[StoredSegment, Place]] = OrderedDict()

    def forget_places(self) -> None:
        """Segments were deleted."""
        self._places.clear()

    def read(
        self, offset: int, end: int, bytes_max: int, active: StoredSegment | None, *, fenced: bool
    ) -> Chunk:
        """A chunk from ``offset``, which lies in the log below ``end``; StorageFailed as in Log.read."""
        segment, place = self._places.pop(offset, (None, None))
        if segment is None or offset >= segment.end_offset:
            place = None
            segment = self._segments[bisect_right(self._bases, offset) - 1]
        if offset >= segment.end_offset:
            _check_owned(fenced)
            return self._hole(segment, offset, end)
        try:
            reading = read_segment(segment, offset, end, bytes_max, place)
        except OSError as error:
            raise StorageFailed("read failed", why=str(error), file=segment.name) from error
        if reading.gaps:
            _check_owned(fenced)
            self._note(segment, reading.gaps)
        chunk = reading.chunk
        if chunk.next_offset < segment.end_offset or segment is active:
            self._places[chunk.next_offset] = (segment, reading.next_place)
            if len(self._places) > _PLACES_MAX:
                self._places.popitem(last=False)
        return chunk

    def _hole(self, segment: StoredSegment, offset: int, end: int) -> Chunk:
        """Offsets that no segment holds: reading goes on at the next one."""
        number = bisect_right(self._bases, segment.base_offset)
        hole_end = self._bases[number] if number < len(self._bases) else end
        start, position = segment.end_offset, segment.data_end
        hole_end = next((named.start for named in self._holes if offset < named.start < hole_end), hole_end)
        if self._damage.note(DamagedRange(segment.name, position, start, hole_end, "batches are missing")):
            self._damage.store()
        following = min(hole_end, end)
        return Chunk(b"", offset, following, (OffsetRange(offset, following),))

    def _note(self, segment: StoredSegment, gaps: tuple[Gap, ...]) -> None:
        new = False
        for position, _, start, end in gaps:
            new |= self._damage.note(DamagedRange(segment.name, position, start, end, "batches are damaged"))
        if new:
            self._damage.store()

    def offset_at_time(self, time_us: int) -> int | None:
        """First offset appended at or after ``time_us``; None when all are older."""
        for segment in self._segments:
            if segment.last_append_us < time_us:
                continue
            try:
                offset = offset_at_time(segment, time_us)
            except OSError as error:
                raise StorageFailed("read failed", why=str(error), file=segment.name) from error
            if offset is not None:
                return offset
        return None


def _check_owned(fenced: bool) -> None:
    """Refuse a read of a fenced log: the newer owner's recovery moves its batches, which is no damage."""
    if fenced:
        raise StorageFailed("the log is being opened anew", hint="read again later")
