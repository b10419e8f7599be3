"""Merging adjacent sealed segments into one, so that many small ones become a few large ones.

    sources   sealed segment files, or ranges of bytes of larger files, in the order of their offsets
    result    one sealed segment file: header of the first, all batches byte for byte, one footer

Merging needs one window of memory, whatever the sources' size.  Every batch is verified, and a source that
differs from its seal is refused, so damage never gets into a segment that looks whole.  The result gets its
name only when all of it is on disk; a crash leaves at most ``<name>.new``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from danube.core.batch.checksum import content_hasher
from danube.errors import Damage, InvalidArgument
from danube.host import files
from danube.wal.segments.index import SparseIndex
from danube.wal.segments.segment import (
    HEADER_BYTES,
    STRANGER,
    SUMMARY_BYTES,
    SegmentHeader,
    Summary,
    chain_hash_of,
    pack_footer,
    pack_header,
    read_header,
    read_summary,
    split_footer,
)
from danube.wal.segments.walk import WINDOW_BYTES, Place, Run, read_run

TEMPORARY_SUFFIX: Final = ".new"
_TIME_WORD: Final = 2  # of the append time in a batch, in words of 8 bytes


class SealedRange(NamedTuple):
    """A sealed segment: bytes ``start .. end`` of a file; ``end`` None is the file's end."""

    path: Path
    start: int = 0
    end: int | None = None


class Merged(NamedTuple):
    """Merged segment: the footer's summary, the file's bytes, and the hash that the next segment names."""

    summary: Summary
    size_bytes: int
    chain_hash: bytes


class Original(NamedTuple):
    """One opened source; positions in it count from ``start``."""

    fd: int
    start: int
    size: int
    header: SegmentHeader
    summary: Summary
    snapshot: bytes | None
    chain_hash: bytes


def merge(sources: Sequence[SealedRange], target: Path) -> Merged:
    """Merge ``sources`` into the new file ``target``; it is replaced if it is there, and may be a source.

    InvalidArgument if they are not adjacent segments of one partition; Damage where one is not as
    it was sealed; StorageIncompatible for a newer format; OSError if the disk refuses.
    """
    with opened(sources) as originals:
        check_adjacent(originals)
        with SegmentFile(target, originals[0].header) as result:
            for original in originals:
                _copy(original, result)
            return result.seal(originals)


@contextmanager
def opened(sources: Sequence[SealedRange]) -> Iterator[list[Original]]:
    """The sources with their headers and footers, closed at the end."""
    if not sources:
        raise InvalidArgument("there is no segment to merge")
    descriptors: list[int] = []
    try:
        originals: list[Original] = []
        for source in sources:
            descriptors.append(files.open_existing(source.path, writable=False))
            originals.append(_open(descriptors[-1], source))
        yield originals
    finally:
        for fd in descriptors:
            files.close(fd)


def _open(fd: int, source: SealedRange) -> Original:
    end = files.size_of(fd) if source.end is None else source.end
    size = end - source.start
    if source.start & 7 or size < HEADER_BYTES + SUMMARY_BYTES or end > files.size_of(fd):
        raise Damage("segment is too short to be sealed", file=source.path.name, size=size)
    header = read_header(files.pread(fd, HEADER_BYTES, source.start))
    summary = read_summary(files.pread(fd, SUMMARY_BYTES, end - SUMMARY_BYTES), size)
    if summary is None:
        raise InvalidArgument(f"{source.path.name} is not sealed", hint="only sealed segments are merged")
    if (header.identity, header.base_offset) != (summary.identity, summary.base_offset):
        raise Damage("header and footer name different segments", file=source.path.name)
    body = files.pread(fd, summary.footer_size - SUMMARY_BYTES, source.start + summary.data_end)
    snapshot = split_footer(body, summary)[1]
    return Original(fd, source.start, size, header, summary, snapshot, chain_hash_of(body, summary))


def check_adjacent(originals: Sequence[Original]) -> None:
    """InvalidArgument unless each goes on where the one before ends."""
    for before, after in pairwise(originals):
        if before.summary.identity != after.summary.identity:
            raise InvalidArgument("segments of different partitions cannot be merged")
        if after.header.stranger_to(before.header.log_id):
            raise Damage(STRANGER, base_offset=after.summary.base_offset)
        if before.summary.end_offset != after.summary.base_offset:
            raise InvalidArgument(
                f"segments that end at {before.summary.end_offset} and begin at "
                f"{after.summary.base_offset} are not adjacent"
            )
        known = (before.summary.content_hash, before.chain_hash)
        if any(after.summary.previous_hash) and after.summary.previous_hash not in known:
            raise Damage(
                "the segment before is another one than when this one was sealed",
                base_offset=after.summary.base_offset,
            )


def runs_of(original: Original) -> Iterator[Run]:
    """Yield all batches of a source, verified; raises Damage if they differ from its footer."""
    summary = original.summary
    hasher = content_hasher()
    hasher.update(files.pread(original.fd, HEADER_BYTES, original.start))
    position, limit = original.start + HEADER_BYTES, original.start + summary.data_end
    offset = summary.base_offset
    sparse = Place(limit, summary.end_offset) if summary.compacted else None
    while position < limit:
        run = read_run(original.fd, position, limit, offset, WINDOW_BYTES, sparse)
        if run is None:
            raise Damage(
                "a sealed segment holds damaged batches",
                base_offset=summary.base_offset,
                position=position - original.start,
            )
        hasher.update(memoryview(run.data)[: run.batches.stop])
        position, offset = run.position_end, run.offset_end
        yield run
    if hasher.digest() != summary.content_hash:
        raise Damage("a sealed segment differs from its hash", base_offset=summary.base_offset)
    if not summary.compacted and offset != summary.end_offset:
        raise Damage("a sealed segment misses its last batches", base_offset=summary.base_offset)


def _copy(original: Original, result: SegmentFile) -> None:
    for run in runs_of(original):
        result.add_run(run)


class SegmentFile:
    """A sealed segment in the making, under a temporary name; leaving without seal() removes it."""

    def __init__(self, target: Path, header: SegmentHeader) -> None:
        self._target = target
        self._temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
        self._header = header
        self._index = SparseIndex()
        self._hasher = content_hasher()
        self._fd = -1
        self._position = 0
        self.record_count = 0
        self.batch_count = 0

    def __enter__(self) -> SegmentFile:
        with suppress(FileNotFoundError):
            files.unlink(self._temporary)
        self._fd = files.open_new(self._temporary)
        try:
            self._append(pack_header(self._header))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        files.close(self._fd)
        with suppress(OSError):  # gone when it was sealed; else the next attempt removes it first
            files.unlink(self._temporary)

    def _append(self, data: bytes | memoryview) -> None:
        files.write_all(self._fd, data, self._position)
        self._hasher.update(data)
        self._position += len(data)

    def add_run(self, run: Run) -> None:
        """All batches of a run, as they are."""
        positions, _, base_offsets, _, stop, _ = run.batches
        words = np.frombuffer(run.data, "<i8", len(run.data) // 8)
        times = words[positions // 8 + _TIME_WORD]
        for place, offset, time_us in zip(
            positions.tolist(), base_offsets.tolist(), times.tolist(), strict=True
        ):
            self._index.add(offset, self._position + place, time_us)
        self.batch_count += len(positions)
        self.record_count += int(run.stored_counts.sum())
        self._append(memoryview(run.data)[:stop])

    def add(self, batch: bytes | memoryview, base_offset: int, record_count: int, time_us: int) -> None:
        """One stored batch."""
        self._index.add(base_offset, self._position, time_us)
        self.batch_count += 1
        self.record_count += record_count
        self._append(batch)

    def seal(self, originals: Sequence[Original], *, compacted: bool = False) -> Merged:
        """Write the footer, sync, and give the file its name, durably."""
        first, last = originals[0].summary, originals[-1].summary
        held = [one.summary for one in originals if one.summary.batch_count] or [first]
        summary = Summary(
            first.identity, last.epoch, first.base_offset, last.end_offset, self.record_count,
            self.batch_count, held[0].first_append_us, held[-1].last_append_us, self._position,
            self._hasher.digest(), first.previous_hash, 0, 0, False, 0, 0,
            compacted or any(one.summary.compacted for one in originals),
        )  # fmt: skip
        chain_hash = originals[-1].chain_hash
        files.fdatasync(self._fd)  # a footer proves the data in front of it
        footer = pack_footer(summary, self._index.pack(), originals[-1].snapshot, chain_hash)
        files.write_all(self._fd, footer, self._position)
        files.fdatasync(self._fd)
        size = self._position + len(footer)
        stored = read_summary(footer[-SUMMARY_BYTES:], size)
        if stored is None:
            raise Damage("segment footer cannot be read back", file=self._target.name)
        files.rename(self._temporary, self._target)
        files.fsync_directory(self._target.parent)
        return Merged(stored, size, chain_hash)
