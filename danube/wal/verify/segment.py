"""The independent reader of one segment, file or object: everything in it is read and checked.

Knows ``docs/formats/segment.md`` and ``batch.md`` and nothing else of the product.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from danube.core.batch.checksum import crc32c
from danube.limits import MIB
from danube.wal.verify.bytes import CHUNK_BYTES, FindingKind, Source, Stream
from danube.wal.verify.producers import flaw_of_producers

HEADER_BYTES: Final = 64
SUMMARY_BYTES: Final = 144
COMPACTED: Final = 2  # flag in the footer
CHAINED: Final = 4  # flag in the footer
_BATCH_HEADER: Final = 104
_BATCH_MAX: Final = 12 * MIB
_RECORDS_MAX: Final = 65_536
_SELECTED: Final = 1 << 8
_FLAGS_KNOWN: Final = 7
_FOOTER_MAX: Final = 512 * MIB
_MAGIC: Final = b"DNB1"
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_FOOTER_HEAD: Final = struct.Struct("<8sII")
_SUMMARY: Final = struct.Struct("<QIIQQQQqqQ16s16sIIIIIHHII8s")
_BATCH: Final = struct.Struct("<4sIQqIII")  # up to header_crc, without flags


class Batch(NamedTuple):
    """An intact batch; in a compacted segment records may be missing between base and end."""

    position: int
    size: int
    base_offset: int
    end_offset: int
    epoch: int
    append_time_us: int
    selected: bool


class Problem(NamedTuple):
    """``position`` is a byte in the segment; ``start .. end`` are offsets, equal where none are meant."""

    kind: FindingKind
    what: str
    position: int
    start: int = 0
    end: int = 0


class Owned:
    """Whose a segment says it is; ``log_id``: zeros if it does not say which log it is of.

    ``begun_seal``: the problem of a footer of which whole sectors are missing.  It is no problem where a
    power cut can have left it: in a data directory, when no later segment is sealed.
    """

    __slots__ = ("begun_seal", "claimed_end", "log_id")

    begun_seal: Problem | None
    claimed_end: int  # which the whole summary of such a footer names
    log_id: bytes


@dataclass
class Segment(Owned):
    """Content of one file or object.  ``tail``: bytes behind the last batch of an unsealed one."""

    base_offset: int
    size: int
    end_offset: int = 0
    sealed: bool = False
    has_header: bool = False
    topic_id: int = 0
    partition: int = 0
    epoch: int = 0
    created_us: int = 0
    data_end: int = 0
    record_count: int = 0
    batch_count: int = 0
    first_append_us: int = 0
    last_append_us: int = 0
    flags: int = 0
    index_count: int = 0
    snapshot_size: int = 0
    content_hash: bytes = bytes(16)
    previous_hash: bytes = bytes(16)
    chain_hash: bytes = bytes(16)
    tail: tuple[int, int] | None = None
    gaps: list[tuple[int, int]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log_id = bytes(16)
        self.begun_seal = None
        self.claimed_end = 0

    @property
    def compacted(self) -> bool:
        return bool(self.flags & COMPACTED)

    @property
    def chained(self) -> bool:
        """Made from several segments, so that its chain hash is another than its content hash."""
        return bool(self.flags & CHAINED)

    def note(self, kind: FindingKind, what: str, position: int, start: int = 0, end: int = 0) -> None:
        self.problems.append(Problem(kind, what, position, start, end))

    def note_footer(self, what: str, footer: bytes, position: int) -> None:
        """A footer, or the end of one, that differs from its checksum."""
        self.note(FindingKind.CHECKSUM, what, position)
        if _sector_missing(footer, position):
            self.begun_seal = self.problems[-1]


def _sector_missing(footer: bytes, position: int) -> bool:
    """Whether the head, or all that lies in one of the file's sectors of 512 bytes, is zeros."""
    inside = range(position // 512 * 512 + 512, position + len(footer), 512)
    cuts = [0, *(cut - position for cut in inside), len(footer)]
    return not any(footer[:16]) or not all(any(footer[a:b]) for a, b in pairwise(cuts))


class _Summary(NamedTuple):
    topic_id: int
    partition: int
    epoch: int
    base_offset: int
    end_offset: int
    record_count: int
    batch_count: int
    first_append_us: int
    last_append_us: int
    data_end: int
    content_hash: bytes
    previous_hash: bytes
    entry_count: int
    snapshot_size: int
    flags: int
    footer_crc: int
    footer_size: int
    version: int
    zero: int
    summary_crc: int
    reserved: int
    magic: bytes


class _Footer(NamedTuple):
    summary: _Summary
    entries: dict[int, tuple[int, int]]  # position -> base offset, append time


OnBatch = Callable[[Batch, memoryview], None]


def read_segment(source: Source, base_offset: int, on_batch: OnBatch | None = None) -> Segment:
    """Read all of ``source``, which should be the segment that begins at ``base_offset``.

    ``on_batch`` gets every intact batch with its bytes.  Raises what ``source`` raises.
    """
    segment = Segment(base_offset, source.size, base_offset)
    footer = _footer(source, segment)
    segment.data_end = footer.summary.data_end if footer is not None else source.size
    stream = Stream(source, segment.data_end if footer is not None else 0)
    _header(bytes(stream.ahead(HEADER_BYTES)[:HEADER_BYTES]), segment)
    if any(problem.kind is FindingKind.VERSION for problem in segment.problems):
        return segment  # nothing in it means what this reader knows
    stream.skip(min(HEADER_BYTES, source.size))
    walk = _Walk(segment, stream, footer, on_batch)
    walk.run()
    if footer is None:
        segment.data_end = walk.intact_end
        if segment.end_offset < segment.claimed_end:
            _missing_at_end(segment, segment.claimed_end)
        return segment
    _compare(segment, footer.summary, walk.unmatched.values())
    if stream.digest() != segment.content_hash:
        segment.note(FindingKind.CHECKSUM, "the content differs from its hash", -1)
    return segment


def _header(data: bytes, segment: Segment) -> None:
    if len(data) < HEADER_BYTES or not data.strip(b"\0"):
        if data:
            segment.note(FindingKind.TRUNCATED, "the header is cut or was never written", len(data))
        return
    if data[:8] != b"DANUBSEG" or _U32.unpack_from(data, 60)[0] != crc32c(data[:60]):
        segment.note(FindingKind.CHECKSUM, "the header is damaged", 0)
        return
    if _U16.unpack_from(data, 8)[0] != 1:
        segment.note(FindingKind.VERSION, f"the header has version {_U16.unpack_from(data, 8)[0]}", 8)
        return
    segment.has_header = True
    segment.partition = _U32.unpack_from(data, 12)[0]
    segment.topic_id = _U64.unpack_from(data, 16)[0]
    segment.created_us = struct.unpack_from("<q", data, 32)[0]
    segment.epoch = _U32.unpack_from(data, 40)[0]
    segment.log_id = data[44:60]
    base_offset = _U64.unpack_from(data, 24)[0]
    if base_offset != segment.base_offset:
        segment.note(
            FindingKind.IDENTITY,
            f"the file has another segment's name: its header says offset {base_offset}",
            24,
        )


def _footer(source: Source, segment: Segment) -> _Footer | None:
    """The summary and the index, or None for a segment that is not sealed or has a damaged footer."""
    if source.size < HEADER_BYTES + SUMMARY_BYTES:
        return None
    begin = source.size - SUMMARY_BYTES
    data = source.read(begin, SUMMARY_BYTES)
    if len(data) < SUMMARY_BYTES:
        return None
    summary = _Summary._make(_SUMMARY.unpack(data))
    sound = summary.summary_crc == crc32c(data[:128])
    if not sound and summary.magic != b"DANUBEND":
        return None
    if not sound or summary.reserved or summary.magic != b"DANUBEND":
        segment.note_footer("the footer's summary is damaged", data, begin)
        return None
    if summary.version != 1:
        segment.note(FindingKind.VERSION, f"the footer has version {summary.version}", begin + 124)
        return None
    count, chained = summary.entry_count, 16 if summary.flags & CHAINED else 0
    size, data_end = summary.footer_size, summary.data_end
    expected = 16 + 24 * count + (summary.snapshot_size + 7 & ~7) + chained + SUMMARY_BYTES
    if size != expected or data_end + size != source.size or size > _FOOTER_MAX or data_end < HEADER_BYTES:
        segment.note(FindingKind.TRUNCATED, "the footer does not fit its file", begin)
        return None
    body = source.read(data_end, size - SUMMARY_BYTES)
    head = (b"DANUBFTR", count, summary.snapshot_size)
    if crc32c(body) != summary.footer_crc or _FOOTER_HEAD.unpack_from(body) != head:
        segment.note_footer("the footer is damaged", body + data, data_end)
        if summary.flags & (COMPACTED | CHAINED):  # those are made elsewhere, and get their name when whole
            segment.begun_seal = None
        segment.claimed_end = summary.end_offset if segment.begun_seal is not None else 0
        return None
    segment.sealed, segment.flags = True, summary.flags
    segment.index_count, segment.snapshot_size = count, summary.snapshot_size
    segment.content_hash, segment.previous_hash = summary.content_hash, summary.previous_hash
    segment.chain_hash = body[-16:] if chained else segment.content_hash
    snapshot_at = 16 + 24 * count
    if flaw := flaw_of_producers(body[snapshot_at : snapshot_at + summary.snapshot_size]):
        segment.note(*flaw, data_end + snapshot_at)
    entries = struct.iter_unpack("<QQq", body[16:snapshot_at])
    return _Footer(summary, {position: (offset, time_us) for offset, position, time_us in entries})


def _compare(segment: Segment, summary: _Summary, unmatched: Iterable[tuple[int, int]]) -> None:
    """Compare the footer with what was read."""
    where = segment.data_end
    named = (summary.topic_id, summary.partition)
    if segment.has_header and named != (segment.topic_id, segment.partition):
        segment.note(FindingKind.IDENTITY, "header and footer name different partitions", where)
    segment.topic_id, segment.partition, segment.epoch = *named, summary.epoch
    if summary.base_offset != segment.base_offset:
        what = f"the footer is of another segment, which begins at offset {summary.base_offset}"
        segment.note(FindingKind.IDENTITY, what, where)
    if segment.flags & ~_FLAGS_KNOWN:
        segment.note(FindingKind.CHECKSUM, f"the footer has unknown flags {segment.flags:#x}", where)
    counted = (segment.record_count, segment.batch_count)
    times = (segment.first_append_us, segment.last_append_us)
    if counted != (summary.record_count, summary.batch_count):
        what = (
            f"the footer counts {summary.record_count} records in {summary.batch_count} batches, "
            f"the file holds {counted[0]} in {counted[1]}"
        )
        segment.note(FindingKind.DISAGREEMENT, what, where)
    elif counted[1] and not segment.compacted and times != (summary.first_append_us, summary.last_append_us):
        segment.note(FindingKind.DISAGREEMENT, "the footer tells other append times than the batches", where)
    for offset, _ in unmatched:
        what = f"the index entry for offset {offset} leads astray"
        segment.note(FindingKind.DISAGREEMENT, what, where, offset, offset)
    _compare_ends(segment, summary.end_offset)
    segment.first_append_us, segment.last_append_us = summary.first_append_us, summary.last_append_us


def _compare_ends(segment: Segment, end: int) -> None:
    reached, segment.end_offset = segment.end_offset, end
    if reached > end:
        segment.note(
            FindingKind.OVERLAP, "batches reach beyond the footer's end", segment.data_end, end, reached
        )
    elif reached < end and not segment.compacted:
        segment.end_offset = reached
        _missing_at_end(segment, end)


def _missing_at_end(segment: Segment, end: int) -> None:
    reached, segment.end_offset = segment.end_offset, end
    segment.gaps.append((reached, end))
    segment.note(FindingKind.GAP, "no batch holds the last offsets", segment.data_end, reached, end)


class _Walk:
    """All batches of a segment, one after the other."""

    def __init__(
        self, segment: Segment, stream: Stream, footer: _Footer | None, on_batch: OnBatch | None
    ) -> None:
        self.segment = segment
        self.stream = stream
        self.unmatched = footer.entries if footer is not None else {}
        self.intact_end = min(HEADER_BYTES, segment.size)
        self._on_batch = on_batch

    def run(self) -> None:
        stream, segment = self.stream, self.segment
        while stream.position < segment.data_end:
            batch = self._batch()
            if batch is not None and batch.base_offset >= segment.end_offset:
                self._take(batch)
            elif batch is not None and batch.end_offset <= segment.end_offset:
                what = "a batch repeats offsets"
                segment.note(FindingKind.OVERLAP, what, batch.position, batch.base_offset, batch.end_offset)
                stream.skip(batch.size)
            elif not self._search():
                return

    def _take(self, batch: Batch) -> None:
        segment = self.segment
        if batch.base_offset > segment.end_offset and not segment.compacted:
            segment.gaps.append((segment.end_offset, batch.base_offset))
            segment.note(
                FindingKind.GAP,
                "offsets are missing before this batch",
                batch.position,
                *segment.gaps[-1],
            )
        if batch.selected and not segment.compacted:
            segment.note(
                FindingKind.CHECKSUM,
                "a selection is stored in a segment that is not compacted",
                batch.position,
                batch.base_offset,
                batch.end_offset,
            )
        if not segment.batch_count:
            segment.first_append_us = batch.append_time_us
        segment.last_append_us = batch.append_time_us
        segment.batch_count += 1
        segment.record_count += batch.end_offset - batch.base_offset
        segment.end_offset = batch.end_offset
        if self.unmatched.get(batch.position) == (batch.base_offset, batch.append_time_us):
            del self.unmatched[batch.position]
        if self._on_batch is not None:
            self._on_batch(batch, self.stream.ahead(batch.size)[: batch.size])
        self.stream.skip(batch.size)
        self.intact_end = self.stream.position

    def _batch(self, skipped: int = 0) -> Batch | None:
        """The intact batch ``skipped`` bytes behind the stream's position."""
        stream, position = self.stream, self.stream.position + skipped
        left = self.segment.data_end - position
        data = stream.ahead(skipped + min(_BATCH_HEADER, left))[skipped:]
        if left < _BATCH_HEADER or len(data) < _BATCH_HEADER or bytes(data[:4]) != _MAGIC:
            return None
        _, size, base_offset, time_us, epoch, body_crc, header_crc = _BATCH.unpack_from(data)
        flags, count = _U16.unpack_from(data, 36)[0], _U32.unpack_from(data, 40)[0]
        if size & 7 or not _BATCH_HEADER <= size <= min(_BATCH_MAX, left) or base_offset >> 63:
            return None
        if not 0 < count <= _RECORDS_MAX or crc32c(bytes(data[:32])) != header_crc:
            return None
        data = stream.ahead(skipped + size)[skipped:]
        if len(data) < size or crc32c(bytes(data[36:size])) != body_crc:
            return None
        selected = bool(flags & _SELECTED)
        return Batch(position, size, base_offset, base_offset + count, epoch, time_us, selected)

    def _search(self) -> bool:
        """Go to the next intact batch behind the position; False when there is none."""
        segment, stream = self.segment, self.stream
        begin = dirty = stream.position
        while stream.position < segment.data_end:
            left = segment.data_end - stream.position
            window = bytes(stream.ahead(min(CHUNK_BYTES, left))[: min(CHUNK_BYTES, left)])
            if not window:
                break
            if window.strip(b"\0"):
                dirty = stream.position + len(window.rstrip(b"\0"))
            found = window.find(_MAGIC, 8 if stream.position == begin else 0)
            while found >= 0:
                batch = None if found & 7 else self._batch(found)
                if batch is not None and batch.base_offset >= segment.end_offset:
                    stream.skip(found)
                    self._damaged(begin, stream.position)
                    return True
                found = window.find(_MAGIC, found + 1)
            stream.skip(len(window))  # windows are multiples of 8, so no magic lies across two
        self._ended(begin, dirty)
        return False

    def _damaged(self, begin: int, end: int) -> None:
        self.segment.note(FindingKind.CHECKSUM, f"no batch can be read from position {begin} to {end}", begin)

    def _ended(self, begin: int, dirty: int) -> None:
        if self.segment.sealed:
            self._damaged(begin, self.segment.data_end)
        elif dirty > begin:
            self.segment.tail = (begin, dirty)
