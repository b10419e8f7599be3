"""The independent reader of one segment, file or object: everything in it is read and checked.

Knows ``docs/formats/segment.md`` and ``batch.md`` and nothing else of the product.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.checksum import crc32c
from danube.limits import MIB
from danube.wal.verify.bytes import Damage, FindingKind, Source
from danube.wal.verify.walk import (
    CHAINED,
    COMPACTED,
    HEADER_BYTES,
    PLAIN,
    Examiner,
    Octets,
    OnRows,
    Rows,
    Segment,
    Verdict,
    Walk,
)

SUMMARY_BYTES: Final = 144
_FLAGS_KNOWN: Final = 7
_FOOTER_MAX: Final = 512 * MIB
_HEADER: Final = struct.Struct("<8sHHIQQqI16sI")
_FOOTER_HEAD: Final = struct.Struct("<8sII")
_SUMMARY: Final = struct.Struct("<QIIQQQQqqQ16s16sIIIIIHHII8s")
_NO_ENTRIES: Final = np.zeros((0, 3), np.int64)
_PRODUCERS_MAGIC: Final = b"DND1"
_PRODUCERS_HEAD: Final = struct.Struct("<4sIQqII")
_PRODUCER: Final = struct.Struct("<QQII")
_PRODUCER_BATCH_BYTES: Final = 28


class Batch(NamedTuple):
    """An intact batch; in a compacted segment records may be missing between base and end."""

    position: int
    size: int
    base_offset: int
    end_offset: int
    epoch: int
    append_time_us: int
    selected: bool


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
    entries: NDArray[np.int64]
    snapshot: bytes


OnBatch = Callable[[Batch, memoryview], None]


def read_segment(
    source: Source,
    base_offset: int,
    on_batch: OnBatch | None = None,
    *,
    where: str = "",
    identity: tuple[int, int] | None = None,
) -> Segment:
    """Read all of ``source``, which should be the segment of ``identity`` that begins at ``base_offset``.

    ``on_batch`` gets every intact batch with its bytes, for the call.  Raises what ``source`` raises.
    """
    segment = Segment(base_offset, where=where)
    fill(segment, source, identity=identity, on_rows=None if on_batch is None else _each(on_batch))
    return segment


def _each(on_batch: OnBatch) -> OnRows:
    def on_rows(data: Octets, base: int, rows: Rows) -> None:
        columns = rows.position, rows.size, rows.base_offset, rows.end_offset, rows.epoch, rows.append_time_us
        for place in np.flatnonzero(rows.verdict == Verdict.FINE).tolist():
            position, size, first, end, epoch, time_us = (int(column[place]) for column in columns)
            batch = Batch(base + position, size, first, end, epoch, time_us, bool(rows.selected[place]))
            on_batch(batch, data[position : position + size].data)

    return on_rows


def fill(
    segment: Segment,
    source: Source,
    *,
    identity: tuple[int, int] | None = None,
    synced: int = 0,
    examiner: Examiner = PLAIN,
    on_rows: OnRows | None = None,
) -> None:
    """Read all of ``source`` into ``segment``, of which only the base offset is known.

    ``identity``: the partition that it should be of.  ``synced``, ``examiner``, ``on_rows``: of the walk.
    """
    segment.size, segment.end_offset = source.size, segment.base_offset
    footer = _footer(source, segment)
    segment.data_end = footer.summary.data_end if footer is not None else source.size
    _header(source.read(0, HEADER_BYTES), segment, identity)
    if segment.shows(Damage.SEGMENT_VERSION):
        return  # this reader knows no meaning for its content
    entries = footer.entries if footer is not None else _NO_ENTRIES
    walk = Walk(segment, source, entries, synced=synced, examiner=examiner, on_rows=on_rows)
    walk.run(hashed=footer is not None)
    if footer is not None:
        _compare(segment, footer, walk, identity)
    else:
        segment.data_end = walk.intact_end
        if segment.end_offset < segment.claimed_end:
            _missing_at_end(segment, segment.claimed_end)


def _header(data: bytes, segment: Segment, identity: tuple[int, int] | None) -> None:
    if len(data) < HEADER_BYTES or not data.strip(b"\0"):
        if data:
            what = "the header is cut or was never written"
            segment.note(Damage.SEGMENT_HEADER, what, len(data), kind=FindingKind.TRUNCATED)
        return
    magic, version, _, partition, topic_id, base_offset, created_us, epoch, log_id, crc = _HEADER.unpack(data)
    if magic != b"DANUBSEG" or crc != crc32c(data[:60]):
        segment.note(Damage.SEGMENT_HEADER, "the header is damaged", 0)
        return
    if version != 1:
        segment.note(Damage.SEGMENT_VERSION, f"the header has version {version}", 8)
        return
    segment.has_header = True
    segment.topic_id, segment.partition, segment.created_us = topic_id, partition, created_us
    segment.epoch, segment.first_epoch, segment.log_id = epoch, epoch, log_id
    if identity not in (None, (topic_id, partition)):
        segment.note(Damage.WRONG_PARTITION, f"it is of partition {topic_id:016x}-{partition}", 12)
    if base_offset != segment.base_offset:
        what = f"the file has another segment's name: its header says offset {base_offset}"
        segment.note(Damage.WRONG_NAME, what, 24, base_offset)


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
        _note_footer(segment, "the footer's summary is damaged", data, begin)
        return None
    if summary.version != 1:
        segment.note(Damage.SEGMENT_VERSION, f"the footer has version {summary.version}", begin + 124)
        return None
    count, chained = summary.entry_count, 16 if summary.flags & CHAINED else 0
    size, data_end = summary.footer_size, summary.data_end
    expected = 16 + 24 * count + (summary.snapshot_size + 7 & ~7) + chained + SUMMARY_BYTES
    if size != expected or data_end + size != source.size or size > _FOOTER_MAX or data_end < HEADER_BYTES:
        what = "the footer does not fit its file"
        segment.note(Damage.FOOTER_DAMAGED, what, begin, kind=FindingKind.TRUNCATED)
        return None
    body = source.read(data_end, size - SUMMARY_BYTES)
    head = (b"DANUBFTR", count, summary.snapshot_size)
    if crc32c(body) != summary.footer_crc or _FOOTER_HEAD.unpack_from(body) != head:
        _note_footer(segment, "the footer is damaged", body + data, data_end)
        if summary.flags & (COMPACTED | CHAINED):  # those are made elsewhere, and get their name when whole
            segment.begun_seal = False
        segment.claimed_end = summary.end_offset if segment.begun_seal else 0
        return None
    segment.sealed, segment.flags = True, summary.flags
    segment.index_count, segment.snapshot_size = count, summary.snapshot_size
    segment.content_hash, segment.previous_hash = summary.content_hash, summary.previous_hash
    segment.chain_hash = body[-16:] if chained else segment.content_hash
    snapshot_at = 16 + 24 * count
    entries = np.frombuffer(body, "<i8", 3 * count, 16).reshape(-1, 3).astype(np.int64)
    return _Footer(summary, entries, body[snapshot_at : snapshot_at + summary.snapshot_size])


def _note_footer(segment: Segment, what: str, footer: bytes, position: int) -> None:
    """A footer, or the end of one, differs from its checksum: whole sectors of the file may be missing."""
    segment.note(Damage.FOOTER_DAMAGED, what, position)
    inside = range(position // 512 * 512 + 512, position + len(footer), 512)
    cuts = [0, *(cut - position for cut in inside), len(footer)]
    segment.begun_seal = not any(footer[:16]) or not all(any(footer[a:b]) for a, b in pairwise(cuts))


def _compare(segment: Segment, footer: _Footer, walk: Walk, identity: tuple[int, int] | None) -> None:
    """Compare the footer with what was read; what lies in damage that was named is not told twice."""
    summary, where = footer.summary, segment.data_end
    named = (summary.topic_id, summary.partition)
    if segment.has_header and named != (segment.topic_id, segment.partition):
        segment.note(Damage.WRONG_PARTITION, "header and footer name different partitions", where)
    elif not segment.has_header and identity not in (None, named):
        segment.note(Damage.WRONG_PARTITION, f"it is of partition {named[0]:016x}-{named[1]}", where)
    if segment.has_header and summary.epoch < segment.epoch:
        what = f"the footer is of epoch {summary.epoch}, the header of epoch {segment.epoch}"
        segment.note(Damage.EPOCH_ORDER, what, where)
    segment.topic_id, segment.partition, segment.epoch = *named, summary.epoch
    if summary.base_offset != segment.base_offset:
        what = f"the footer is of another segment, which begins at offset {summary.base_offset}"
        segment.note(Damage.WRONG_NAME, what, where, summary.base_offset)
    if segment.flags & ~_FLAGS_KNOWN:
        segment.note(Damage.FOOTER_DAMAGED, f"the footer has unknown flags {segment.flags:#x}", where)
    if walk.digest != segment.content_hash:
        segment.note(Damage.CONTENT_HASH, "the content differs from its hash")
    if not walk.damaged:
        _compare_counts(segment, summary)
    for offset, position, _ in footer.entries[~walk.matched].tolist():
        if not any(begin <= position < end for begin, end in walk.damaged):
            segment.note(
                Damage.INDEX_ENTRY, f"the index entry for offset {offset} leads astray", where, offset
            )
    if flaw := flaw_of_producers(footer.snapshot, summary.end_offset):
        segment.note(Damage.PRODUCER_SNAPSHOT, flaw[1], where, kind=flaw[0])
    reached, segment.end_offset = segment.end_offset, summary.end_offset
    if reached > summary.end_offset:
        what = f"batches reach to offset {reached}, beyond the footer's end"
        segment.note(Damage.FOOTER_DIFFERS, what, where, summary.end_offset, reached, FindingKind.OVERLAP)
    elif reached < summary.end_offset and not segment.compacted:
        segment.end_offset = reached
        _missing_at_end(segment, summary.end_offset)
    segment.first_append_us, segment.last_append_us = summary.first_append_us, summary.last_append_us


def _compare_counts(segment: Segment, summary: _Summary) -> None:
    said = {
        "records": (summary.record_count, segment.record_count),
        "batches": (summary.batch_count, segment.batch_count),
        "first append time": (summary.first_append_us, segment.first_append_us),
        "last append time": (summary.last_append_us, segment.last_append_us),
    }
    for name, (told, held) in said.items():
        if told != held and not (segment.compacted and "time" in name):
            what = f"{name}: the footer says {told}, the batches {held}"
            segment.note(Damage.FOOTER_DIFFERS, what, segment.data_end)


def _missing_at_end(segment: Segment, end: int) -> None:
    reached, segment.end_offset = segment.end_offset, end
    what = f"offsets {reached} to {end} are missing: no batch holds the last offsets"
    segment.note_missing(reached, end, what, segment.data_end)


def flaw_of_producers(snapshot: bytes, end_offset: int = 1 << 63) -> tuple[FindingKind, str] | None:
    """Return the fault of a snapshot of a partition's producers below ``end_offset``; None without one.

    The log takes any bytes here, covered by the footer's or the checkpoint's checksum.  So bytes that do not
    begin like the broker's own snapshot are not judged.
    """
    if snapshot[:3] != _PRODUCERS_MAGIC[:3]:
        return None
    if snapshot[:4] != _PRODUCERS_MAGIC:
        return FindingKind.VERSION, f"the producer snapshot has the format {snapshot[:4]!r}"
    if len(snapshot) < _PRODUCERS_HEAD.size:
        return FindingKind.TRUNCATED, "the producer snapshot is cut"
    _, crc, known_end, _, _, count = _PRODUCERS_HEAD.unpack_from(snapshot)
    if crc32c(snapshot[8:]) != crc:
        return FindingKind.CHECKSUM, "the producer snapshot is damaged"
    if known_end > end_offset:
        return (
            FindingKind.DISAGREEMENT,
            f"the producer snapshot knows offsets up to {known_end}, behind the end",
        )
    heads_end = _PRODUCERS_HEAD.size + count * _PRODUCER.size
    if heads_end <= len(snapshot):
        heads = _PRODUCER.iter_unpack(snapshot[_PRODUCERS_HEAD.size : heads_end])
        if len(snapshot) == heads_end + _PRODUCER_BATCH_BYTES * sum(batches for _, _, _, batches in heads):
            return None
    return FindingKind.TRUNCATED, f"{count} producers and their batches do not fit the producer snapshot"
