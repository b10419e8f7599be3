"""A sealed segment that lies in the object store: a sparse local file with the blocks fetched so far.

    position      0 ............................... data_end ....... size_bytes
                  | block | block | ... | last block | footer      |

The footer is fetched first and checked against the manifest's entry.  Every read is checked against its
index.  A batch is handed out only if its checksums are right and its offset is the next one.  If the index
names its position, offset and append time must agree too; this detects bytes of another object.  A block that
fails is fetched once more.  If it fails again, that is *damage* of the store: it is reported and never
served.  Damage from before the segment was sealed is known from the entry (fewer records than offsets) and
reads as in a local file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Final, NamedTuple

from danube.core.batch.format import HEADER_BYTES as BATCH_HEADER_BYTES
from danube.core.batch.format import read_header
from danube.errors import Damage, StoreDamaged
from danube.host import files
from danube.limits import BATCH_BYTES_MAX, KIB, MIB
from danube.wal.segments.descriptors import LogFile, descriptors
from danube.wal.segments.index import SparseIndex, index_cache
from danube.wal.segments.reading import Chunk, OffsetRange, cut_run
from danube.wal.segments.segment import HEADER_BYTES as SEGMENT_HEADER_BYTES
from danube.wal.segments.segment import NO_LOG, SUMMARY_BYTES, LogIdentity, read_summary, split_footer
from danube.wal.segments.segment import read_header as read_header_of_segment
from danube.wal.segments.stored_segment import StoredSegment
from danube.wal.segments.walk import Extent, Place, Run, intact_header, read_run, resume
from danube.wal.tier.manifest import EntryFlag, SegmentEntry

BLOCK_BYTES: Final = 1 * MIB
AHEAD_FIRST: Final = 1 * MIB
AHEAD_MAX: Final = 32 * MIB
_PLACES_MAX: Final = 64
_TIME_STEP_BYTES: Final = 128 * KIB
_TIME_POSITION: Final = 16  # of the append time in a batch
_GAP_ENTRIES: Final = 2  # a gap that was sealed in is looked at up to the second index entry behind it


class Missing(NamedTuple):
    """Bytes that must be fetched before the read can go on."""

    start: int
    end: int
    begun: int | None = None  # where the read begins that needs them


class ColdReading(NamedTuple):
    """A chunk, and the bytes ``start .. end`` that a reader needs next if it continues behind the chunk."""

    chunk: Chunk
    start: int
    end: int


class Bad(NamedTuple):
    """Bytes that differ from the uploaded ones, and the offsets that they hold at least."""

    start: int
    end: int
    offset: int
    offset_end: int


class ColdSegment(StoredSegment):
    """``entry`` is the manifest's entry; ``blocks`` holds the numbers of the fetched blocks."""

    __slots__ = ("again", "blocks", "entry", "footer_there", "header_seen", "key", "log_id", "places")

    def __init__(self, path: Path, identity: LogIdentity, entry: SegmentEntry, key: str) -> None:
        super().__init__(path.parent, identity, entry.base_offset, entry.epoch)
        self.file = LogFile(path)
        self.key = key
        self.entry = entry
        self.end_offset = entry.end_offset
        self.data_end = entry.data_end
        self.size_bytes = entry.size_bytes
        self.first_append_us = entry.first_append_us
        self.last_append_us = entry.last_append_us
        self.record_count = entry.record_count
        self.batch_count = entry.batch_count
        self.content_hash = entry.content_hash
        self.sealed = True
        self.compacted = bool(entry.flags & EntryFlag.COMPACTED)
        self.index = None
        self.blocks: set[int] = set()
        self.again: set[int] = set()  # blocks that were fetched a second time; -1: the footer
        self.footer_there = False
        self.log_id = NO_LOG  # whose reader asks, once it is known
        self.header_seen = False
        self.places: OrderedDict[int, tuple[Place, int]] = OrderedDict()  # by offset; how far ahead was asked

    @property
    def _holed(self) -> bool:
        """Records are missing inside, and were when the object was made."""
        return self.entry.record_count < self.entry.end_offset - self.entry.base_offset

    # -- what is there ----------------------------------------------------------------------------

    @property
    def unproven(self) -> bool:
        """Whether the object's log is unknown yet; its header must prove it before a record is served."""
        return not self.header_seen and self.log_id != NO_LOG

    def take(self, start: int, end: int) -> None:
        """Bytes ``start .. end`` were fetched; raises StoreDamaged where the footer is another's."""
        if end > self.data_end:
            self._check_footer()
            self.footer_there = True
        if start < self.data_end:
            if start == 0:
                self._check_header()
                self.header_seen = True
            if end <= SEGMENT_HEADER_BYTES:
                return
            self.blocks.update(range(start // BLOCK_BYTES, -(-min(end, self.data_end) // BLOCK_BYTES)))

    def drop(self, block: int) -> Missing:
        """The block is not there any more; returns its bytes."""
        self.blocks.discard(block)
        return Missing(block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.data_end))

    def absent(self, start: int, end: int) -> list[Missing]:
        """The runs of whole blocks that ``start .. end`` needs and that are not there."""
        runs: list[Missing] = []
        if start >= self.data_end:
            return runs
        for block in range(start // BLOCK_BYTES, -(-min(end, self.data_end) // BLOCK_BYTES)):
            if block in self.blocks:
                continue
            first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.data_end)
            if runs and runs[-1].end == first:
                runs[-1] = Missing(runs[-1].start, last)
            else:
                runs.append(Missing(first, last))
        return runs

    def _present_end(self, position: int, wanted: int) -> int:
        """Where the bytes that are there from ``position`` on end, looked for up to ``wanted``."""
        block = position // BLOCK_BYTES
        while block in self.blocks and block * BLOCK_BYTES < wanted:
            block += 1
        return min(block * BLOCK_BYTES, self.data_end)

    def _check_footer(self) -> None:
        """Compare the footer with the manifest and load its index; StoreDamaged where they differ."""
        index_cache.drop(self.file)
        try:
            self.load_index()
        except Damage as error:
            raise StoreDamaged(
                f"object of offsets {self.base_offset} .. {self.end_offset} is not the one uploaded",
                why=error.what, hint="restore an older version of the object, or delete the range",
                key=self.key, start=self.base_offset, end=self.end_offset,
            ) from error  # fmt: skip

    def _check_header(self) -> None:
        """The object says whose log it is of; StoreDamaged where that is another broker's."""
        try:
            header = read_header_of_segment(files.pread(descriptors.fd(self.file), SEGMENT_HEADER_BYTES, 0))
        except Damage:
            return  # batches are checked one by one; the index tells other objects
        if header.identity != self.identity or header.stranger_to(self.log_id):
            raise StoreDamaged(
                f"object of offsets {self.base_offset} .. {self.end_offset} is another broker's",
                why="its header names another log, whose topic has the same id",
                hint="restore the partition's manifest and objects; `danube verify` names the damage",
                key=self.key, start=self.base_offset, end=self.end_offset,
            )  # fmt: skip

    def load_index(self) -> SparseIndex:
        """The index of the footer, checked; raises Damage, unlike a local segment's."""
        index = index_cache.get(self.file)
        if index is None:
            fd = descriptors.fd(self.file, writing=False)
            tail = files.pread(fd, SUMMARY_BYTES, self.size_bytes - SUMMARY_BYTES)
            summary = read_summary(tail, self.size_bytes)
            entry = self.entry
            if summary is None:
                raise Damage("the object has no footer")
            expected = (self.identity, entry.base_offset, entry.end_offset, entry.data_end)
            found = (summary.identity, summary.base_offset, summary.end_offset, summary.data_end)
            if found != expected or summary.content_hash != entry.content_hash:
                raise Damage("the object is of another segment")
            body = files.pread(fd, summary.footer_size - SUMMARY_BYTES, summary.data_end)
            index = SparseIndex.unpack(split_footer(body, summary)[0])
            index_cache.put(self.file, index)
        return index

    def ready_index(self) -> SparseIndex | Missing:
        """The index, or the bytes to fetch for it."""
        if self.footer_there:
            try:
                return self.load_index()
            except (Damage, OSError):  # the local copy was damaged after it was checked
                self.footer_there = False
        return Missing(self.data_end, self.size_bytes)

    # -- reading ----------------------------------------------------------------------------------

    def read(self, offset: int, end: int, bytes_max: int) -> ColdReading | Missing:
        """Return batches from the one that holds ``offset``, up to ``end``.

        Returns Missing if bytes must be fetched first.  Raises StoreDamaged with the range, and OSError if
        the local disk fails.
        """
        index = self.ready_index()
        if isinstance(index, Missing):
            return index
        place, ahead = self.places.get(offset, (None, 0))
        place = place or self.place_below(offset)
        begun = place.position
        holes: list[OffsetRange] = []
        while place.position < self.data_end and place.offset < end:
            limit = self._present_end(place.position, place.position + bytes_max + BATCH_BYTES_MAX)
            run = self._run(place, limit, bytes_max)
            found = self._judge(run, place, limit, index)
            if isinstance(found, Missing):
                return self._with_batch_end(found, offset, index)._replace(begun=begun)
            if isinstance(found, Bad):
                return self._fetch_again(found)._replace(begun=begun)
            if isinstance(found, Place):
                if found.offset > offset:
                    holes.append(OffsetRange(max(offset, place.offset), min(found.offset, end)))
                    offset = min(found.offset, end)
                place = found
            elif found.offset_end <= offset:
                place = Place(found.position_end, found.offset_end)
            else:
                data, first_offset, place = cut_run(found, offset, end, bytes_max)
                chunk = Chunk(data, first_offset, place.offset, self._told(holes), self.compacted)
                return self._reading(chunk, place, ahead)
        if place.position >= self.data_end and offset < self.end_offset:
            holes.append(OffsetRange(offset, min(self.end_offset, end)))
            offset = min(self.end_offset, end)
        return ColdReading(Chunk(b"", offset, offset, self._told(holes)), self.data_end, self.data_end)

    def _with_batch_end(self, found: Missing, offset: int, index: SparseIndex) -> Missing:
        """With the rest of the batch that holds ``offset``, where the index tells its end: one trip less."""
        number = bisect_right(index.offsets, offset)
        end = index.positions[number] if number < len(index) else self.data_end
        return found._replace(end=end) if found.end < end <= found.start + 2 * BLOCK_BYTES else found

    def _told(self, holes: list[OffsetRange]) -> tuple[OffsetRange, ...]:
        """Holes are damage, unless the records were left out on purpose."""
        return () if self.compacted else tuple(holes)

    def _reading(self, chunk: Chunk, place: Place, ahead: int) -> ColdReading:
        ahead = min(max(2 * ahead, AHEAD_FIRST), AHEAD_MAX)
        self.places[place.offset] = (place, ahead)
        self.places.move_to_end(place.offset)
        if len(self.places) > _PLACES_MAX:
            self.places.popitem(last=False)
        return ColdReading(chunk, place.position, place.position + ahead)

    def _run(self, place: Place, limit: int, bytes_max: int) -> Run | None:
        if limit <= place.position:
            return None
        fd = descriptors.fd(self.file, writing=False)
        return read_run(fd, place.position, limit, place.offset, bytes_max, self.sparse)

    def _judge(
        self, run: Run | None, place: Place, limit: int, index: SparseIndex
    ) -> Run | Missing | Bad | Place:
        """Classify the bytes at ``place``: batches, missing bytes, wrong bytes, or a hole's end."""
        if run is not None:
            return _disagreement(run, index) or run
        position, offset = place
        if limit - position < BATCH_HEADER_BYTES and limit < self.data_end:
            return Missing(limit, limit + BATCH_HEADER_BYTES)
        fd = descriptors.fd(self.file, writing=False)
        header = intact_header(files.pread(fd, BATCH_HEADER_BYTES, position))
        if header is None or header.base_offset < offset or header.size > self.data_end - position:
            return self._gap(Bad(position, position + BATCH_HEADER_BYTES, offset, offset + 1), place, index)
        if position + header.size > limit:
            return Missing(limit, position + header.size)
        if header.base_offset > offset and self._holed and header.end_offset <= self.end_offset:
            return Place(position, header.base_offset)
        wrong = Bad(position, position + header.size, offset, header.end_offset)
        return self._gap(wrong, place, index)

    def _gap(self, wrong: Bad, place: Place, index: SparseIndex) -> Bad | Missing | Place:
        """Where reading goes on behind bytes that were damaged before the segment was sealed."""
        first, last = wrong.start // BLOCK_BYTES, (wrong.end - 1) // BLOCK_BYTES
        fresh = any(block not in self.again for block in range(first, last + 1))
        if fresh or not self._holed or self.compacted:
            return wrong
        number = bisect_right(index.positions, place.position) + _GAP_ENTRIES - 1
        if number < len(index):
            extent_end, offset_end = index.positions[number], index.offsets[number]
        else:
            extent_end, offset_end = self.data_end, self.end_offset
        absent = self.absent(place.position, extent_end)
        if absent:
            return absent[0]
        fd = descriptors.fd(self.file, writing=False)
        boundaries = [(offset, position) for offset, position in index.after(place.position)]
        extent = Extent(fd, extent_end, offset_end, offset_end)
        found = resume(extent, place.position, place.offset, boundaries)
        return found or Place(extent_end, offset_end)

    def _fetch_again(self, bad: Bad) -> Missing:
        """The bytes to fetch once more; StoreDamaged where that was done before."""
        blocks = range(bad.start // BLOCK_BYTES, -(-min(bad.end, self.data_end) // BLOCK_BYTES))
        fresh = [block for block in blocks if block not in self.again]
        if not fresh:
            raise StoreDamaged(
                f"offsets {bad.offset} .. {bad.offset_end} cannot be read from the object store",
                why="the bytes fail their checks, also when they are fetched again",
                hint="restore an older version of the object",
                key=self.key, position=bad.start, start=bad.offset, end=bad.offset_end,
            )  # fmt: skip
        for block in fresh:
            self.again.add(block)
            self.drop(block)
        return Missing(fresh[0] * BLOCK_BYTES, (fresh[-1] + 1) * BLOCK_BYTES)

    def offset_at_time(self, time_us: int) -> int | Missing | None:
        """Base offset of the first batch appended at or after ``time_us``; None when all are older."""
        index = self.ready_index()
        if isinstance(index, Missing):
            return index
        offset = index.offset_before_time(time_us)
        offset = self.base_offset if offset is None else offset
        while offset < self.end_offset:
            found = self.read(offset, self.end_offset, _TIME_STEP_BYTES)
            if isinstance(found, Missing):
                return found
            position, data = 0, found.chunk.data
            while position < len(data):
                header = read_header(data, position)
                if header.append_time_us >= time_us:
                    return header.base_offset
                position += header.size
            offset = found.chunk.next_offset
        return None

    def forget_attempts(self) -> None:
        """Try everything anew: the object may have been restored."""
        for block in self.again - {-1}:
            self.drop(block)
        if -1 in self.again:
            self.footer_there = False
        self.again.clear()


def _disagreement(run: Run, index: SparseIndex) -> Bad | None:
    """Batches that are intact but not those that the footer's index tells of."""
    positions, _, base_offsets, _, _, _ = run.batches
    first = bisect_left(index.positions, run.position)
    last = bisect_left(index.positions, run.position_end, first)
    for number in range(first, last):
        position = index.positions[number] - run.position
        place = int(positions.searchsorted(position))
        there = place < len(positions) and int(positions[place]) == position
        time = run.data[position + _TIME_POSITION : position + _TIME_POSITION + 8]
        if (
            not there
            or int(base_offsets[place]) != index.offsets[number]
            or int.from_bytes(time, "little", signed=True) != index.times[number]
        ):
            start = run.position + position
            offset = index.offsets[number]
            return Bad(start, start + BATCH_HEADER_BYTES, offset, offset + 1)
    return None
