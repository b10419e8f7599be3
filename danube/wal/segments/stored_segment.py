"""A segment of the running log: its place, its content, and how to find an offset in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from danube.core.batch.checksum import ContentHasher, content_hasher
from danube.core.batch.format import BatchHeader
from danube.errors import Damage
from danube.host import files
from danube.wal.segments.descriptors import LogFile, descriptors
from danube.wal.segments.index import ENTRY_EVERY_BYTES, SparseIndex, index_cache
from danube.wal.segments.segment import (
    HEADER_BYTES,
    NO_HASH,
    SUMMARY_BYTES,
    LogIdentity,
    Summary,
    file_name,
    pack_footer,
    read_summary,
    split_footer,
)
from danube.wal.segments.walk import WINDOW_BYTES, Extent, Gap, Place, resume

GAPS_KEPT_MAX: Final = 4_096


class StoredSegment:
    """Offsets ``base_offset .. end_offset`` in bytes ``64 .. data_end`` of one file.

    ``index`` is None for a sealed segment: its entries are read from the footer when needed and
    cached for the process.  ``gaps`` are places already known to hold no readable batch.
    ``compacted``: records are missing on purpose.  ``hasher`` has taken the first ``hashed_bytes`` of a
    file that this process writes; None for any other.
    """

    __slots__ = (
        "base_offset", "batch_count", "compacted", "content_hash", "data_end", "directory", "end_offset",
        "epoch", "file", "first_append_us", "gaps", "has_snapshot", "hashed_bytes", "hasher", "identity",
        "index", "last_append_us", "record_count", "sealed", "sealing", "size_bytes",
    )  # fmt: skip

    def __init__(self, directory: Path, identity: LogIdentity, base_offset: int, epoch: int) -> None:
        self.directory = directory
        self.identity = identity
        self.base_offset = base_offset
        self.epoch = epoch
        self.file = LogFile(directory / file_name(base_offset))
        self.size_bytes = 0
        self.sealed = False
        self.sealing = False
        self.has_snapshot = False
        self.content_hash = NO_HASH
        self.hasher: ContentHasher | None = None
        self.hashed_bytes = 0
        self.forget()

    def forget(self) -> None:
        """As if the file held no batch."""
        self.end_offset = self.base_offset
        self.data_end = HEADER_BYTES
        self.first_append_us = 0
        self.last_append_us = 0
        self.record_count = 0
        self.batch_count = 0
        self.compacted = False
        self.index: SparseIndex | None = SparseIndex()
        self.gaps: dict[int, Gap] = {}

    @classmethod
    def of_summary(cls, directory: Path, summary: Summary, size_bytes: int) -> StoredSegment:
        """A sealed segment, from its footer alone."""
        segment = cls(directory, summary.identity, summary.base_offset, summary.epoch)
        segment.take_summary(summary, size_bytes)
        return segment

    def take_summary(self, summary: Summary, size_bytes: int) -> None:
        self.end_offset = summary.end_offset
        self.data_end = summary.data_end
        self.size_bytes = size_bytes
        self.first_append_us = summary.first_append_us
        self.last_append_us = summary.last_append_us
        self.record_count = summary.record_count
        self.batch_count = summary.batch_count
        self.content_hash = summary.content_hash
        self.has_snapshot = summary.has_snapshot
        self.compacted = summary.compacted
        self.sealed = True
        self.index = None
        self.hasher = None

    @property
    def name(self) -> str:
        return self.file.path.name

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file that hold something; without the space that is reserved ahead."""
        return self.size_bytes if self.sealed else self.data_end

    def count(self, base_offset: int, end_offset: int, position: int, append_time_us: int) -> None:
        """Count one batch that lies at ``position``; the caller moves data_end."""
        if self.index is not None:
            self.index.add(base_offset, position, append_time_us)
        if not self.batch_count:
            self.first_append_us = append_time_us
        self.last_append_us = append_time_us
        self.batch_count += 1
        self.record_count += end_offset - base_offset
        self.end_offset = end_offset

    def load_index(self) -> SparseIndex:
        """The index; an empty one, that is a walk from the first batch, where the footer is damaged."""
        if self.index is not None:
            return self.index
        index = index_cache.get(self.file)
        if index is None:
            try:
                index = SparseIndex.unpack(self._footer()[0])
            except Damage:
                index = SparseIndex()
            index_cache.put(self.file, index)
        return index

    def count_written(self, headers: list[BatchHeader], size: int) -> None:
        """Count batches of ``size`` bytes that continue the log and were written at data_end; move it."""
        first, last = headers[0], headers[-1]
        end = self.data_end + size
        index = self.index
        if index is not None and (not index.positions or end - index.positions[-1] >= ENTRY_EVERY_BYTES):
            index.add_all(headers, self.data_end)
        self.data_end = end
        if not self.batch_count:
            self.first_append_us = first.append_time_us
        self.last_append_us = last.append_time_us
        self.batch_count += len(headers)
        self.end_offset = last.base_offset + last.record_count
        self.record_count += self.end_offset - first.base_offset

    def load_snapshot(self) -> bytes | None:
        """The producer snapshot in the footer; Damage when the footer differs."""
        return self._footer()[1] if self.sealed and self.has_snapshot else None

    def _footer(self) -> tuple[bytes, bytes | None]:
        fd = descriptors.fd(self.file)
        size = files.size_of(fd)
        summary = read_summary(files.pread(fd, SUMMARY_BYTES, max(0, size - SUMMARY_BYTES)), size)
        if summary is None:
            raise Damage("segment footer is missing", file=self.name)
        body = files.pread(fd, summary.footer_size - SUMMARY_BYTES, summary.data_end)
        return split_footer(body, summary)

    @property
    def sparse(self) -> Place | None:
        """The end of a compacted segment; None for any other."""
        return Place(self.data_end, self.end_offset) if self.compacted else None

    def extent(self) -> Extent:
        fd = descriptors.fd(self.file, writing=False)
        return Extent(fd, self.data_end, self.end_offset, self.end_offset, self.sparse)

    def place_below(self, offset: int) -> Place:
        """A place at or before the batch that holds ``offset``."""
        entry = self.load_index().below(offset)
        return Place(HEADER_BYTES, self.base_offset) if entry is None else Place(entry[1], entry[0])

    def gap_at(self, place: Place) -> Gap:
        """The gap that begins at ``place``, where no intact batch lies."""
        gap = self.gaps.get(place.position)
        if gap is None:
            extent = self.extent()
            found = resume(extent, place.position, place.offset, self.load_index().after(place.position))
            after = found or Place(self.data_end, self.end_offset)
            gap = Gap(place.position, after.position, place.offset, after.offset)
            if len(self.gaps) < GAPS_KEPT_MAX:
                self.gaps[place.position] = gap
        return gap

    def summary(self, content_hash: bytes, previous_hash: bytes) -> Summary:
        return Summary(
            self.identity, self.epoch, self.base_offset, self.end_offset, self.record_count, self.batch_count,
            self.first_append_us, self.last_append_us, self.data_end, content_hash, previous_hash,
            0, 0, False, 0, 0,
        )  # fmt: skip


def _hash_of(fd: int, segment: StoredSegment) -> bytes:
    """The hash of the segment's bytes; of a file that was written elsewhere they are read for it."""
    if segment.hasher is not None and segment.hashed_bytes == segment.data_end:
        return bytes(segment.hasher.digest())
    return hash_of(fd, segment.data_end)


def hash_of(fd: int, size: int) -> bytes:
    """XXH3-128 of the first ``size`` bytes of a file."""
    hasher = content_hasher()
    position = 0
    while position < size:
        data = files.pread(fd, min(WINDOW_BYTES, size - position), position)
        if not data:
            raise Damage("segment is shorter than its batches", size=size, present=position)
        hasher.update(data)
        position += len(data)
    return bytes(hasher.digest())


def write_footer(
    fd: int,
    segment: StoredSegment,
    previous_hash: bytes,
    snapshot: bytes | None,
    sync: Callable[[int], None],
) -> tuple[Summary, int]:
    """Seal the file behind ``fd``: data synced, footer written, reserve cut, footer synced.

    Returns the summary as stored and the size of the file.  The data is synced before the footer
    exists, so a footer proves it.  After an error the segment is as unsealed as before: recovery
    and the next attempt cut a partial footer away.
    """
    sync(fd)
    content_hash = _hash_of(fd, segment)
    entries = (segment.index or SparseIndex()).pack()
    footer = pack_footer(segment.summary(content_hash, previous_hash), entries, snapshot)
    size = segment.data_end + len(footer)
    try:
        files.write_all(fd, footer, segment.data_end)
    except OSError:
        files.ftruncate(fd, segment.data_end)
        raise
    files.ftruncate(fd, size)
    sync(fd)
    stored = read_summary(footer[-SUMMARY_BYTES:], size)
    if stored is None:
        raise Damage("segment footer cannot be read back", file=segment.name)
    return stored, size
