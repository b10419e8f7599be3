"""One segment's bytes: everything that can be judged from them alone.  Pure: bytes in, findings out.

Header and footer are read by their formats (docs/formats/segment.md); batches in one pass over pieces of a
megabyte, with kernels for checksums and columns, while the content is hashed.  A damaged batch does not
end it: behind a damaged body the header tells where the next one is, behind a damaged header the next
intact one is searched for.
"""

from __future__ import annotations

import numpy as np

from danube.errors import Damage as DamageError
from danube.errors import StorageIncompatible
from danube.spark.jobs.findings import Damage, Expected, SegmentFacts, finding
from danube.spark.jobs.validate.walk import Footer, OnBatch, Walk, check_snapshot
from danube.wal.recovery.inventory import torn
from danube.wal.segments.segment import (
    FOOTER_MAGIC,
    HEADER_BYTES,
    STRANGER,
    SUMMARY_BYTES,
    LogIdentity,
    SegmentHeader,
    chain_hash_of,
    read_header,
    read_summary,
    split_footer,
)
from danube.wal.verify.bytes import Source


def validate_segment(source: Source, expected: Expected, on_batch: OnBatch | None = None) -> SegmentFacts:
    """Read and judge all of ``source``.  Raises only what ``source`` raises."""
    facts = SegmentFacts(expected.where, expected.base_offset, expected.base_offset, source.size)
    header = _read_head(source, expected, facts)
    footer = _read_footer(source, expected, facts)
    if any(one.kind == Damage.SEGMENT_VERSION for one in facts.findings):
        return facts
    facts.data_end = footer.summary.data_end if footer is not None else source.size
    walk = Walk(facts, source, footer, expected, on_batch)
    walk.run()
    if footer is None:
        facts.data_end = walk.intact_end
    else:
        _compare_footer(facts, header, footer, walk)
    facts.sequences = walk.sequences.ranges()
    if facts.left_out:
        detail = f"{facts.left_out} more findings are not listed"
        facts.findings.append(finding(Damage.FINDINGS_LEFT_OUT, facts.where, detail))
    return facts


def _read_head(source: Source, expected: Expected, facts: SegmentFacts) -> SegmentHeader | None:
    data = source.read(0, HEADER_BYTES)
    if not data.strip(b"\0") and not expected.sealed:
        return None  # made, and not written to yet
    try:
        header = read_header(data)
    except StorageIncompatible as error:
        facts.note(Damage.SEGMENT_VERSION, error.what, 8)
        return None
    except DamageError as error:
        facts.note(Damage.SEGMENT_HEADER, error.what, 0)
        return None
    facts.topic_id, facts.partition = header.identity
    facts.epoch = facts.first_epoch = header.epoch
    _check_identity(header.identity, expected, facts, 12)
    if header.stranger_to(expected.log_id):
        facts.note(Damage.WRONG_PARTITION, STRANGER, 44)
    if header.base_offset != expected.base_offset:
        detail = f"the header says that it begins at offset {header.base_offset}"
        facts.note(Damage.WRONG_NAME, detail, 24, header.base_offset)
    return header


def _check_identity(found: LogIdentity, expected: Expected, facts: SegmentFacts, byte: int) -> None:
    if found != (expected.topic_id, expected.partition):
        detail = f"it is of partition {found.directory_name}"
        facts.note(Damage.WRONG_PARTITION, detail, byte)


def _read_footer(source: Source, expected: Expected, facts: SegmentFacts) -> Footer | None:
    begin = max(0, source.size - SUMMARY_BYTES)
    end = source.read(begin, SUMMARY_BYTES)
    footer, footer_begin = end, begin
    try:
        summary = read_summary(end, source.size)
        if summary is None:
            if expected.sealed:
                facts.note(Damage.FOOTER_MISSING, "the segment must be sealed, and has no footer", begin)
            return None
        if summary.data_end < HEADER_BYTES:
            raise DamageError("segment footer says that there is no header")
        body = source.read(summary.data_end, begin - summary.data_end)
        footer, footer_begin = body + end, summary.data_end
        entries, snapshot = split_footer(body, summary)
        if body[:8] != FOOTER_MAGIC:
            raise DamageError("segment footer does not begin where it says")
    except StorageIncompatible as error:
        facts.note(Damage.SEGMENT_VERSION, error.what, begin + 124)
        return None
    except DamageError as error:
        facts.note(Damage.FOOTER_DAMAGED, error.what, begin)
        facts.begun_seal = torn(footer, footer_begin)
        return None
    facts.sealed, facts.compacted, facts.chained = True, summary.compacted, summary.chained
    facts.content_hash, facts.previous_hash = summary.content_hash, summary.previous_hash
    facts.chain_hash = chain_hash_of(body, summary)
    return Footer(summary, np.frombuffer(entries, "<i8").reshape(-1, 3).astype(np.int64), snapshot)


def _compare_footer(facts: SegmentFacts, header: SegmentHeader | None, footer: Footer, walk: Walk) -> None:
    """Compare the footer with what was read; damage that was named is not told twice."""
    summary, where = footer.summary, footer.summary.data_end
    if header is not None and header.identity != summary.identity:
        detail = f"the footer is of partition {summary.identity.directory_name}"
        facts.note(Damage.WRONG_PARTITION, detail, where)
    facts.topic_id, facts.partition = summary.identity
    if summary.base_offset != facts.base_offset:
        detail = f"the footer says that it begins at offset {summary.base_offset}"
        facts.note(Damage.WRONG_NAME, detail, where, summary.base_offset)
    if walk.digest != summary.content_hash:
        facts.note(Damage.CONTENT_HASH, "the content differs from the footer's hash of it")
    if not walk.damaged:
        _compare_counts(facts, footer, walk)
    for place in np.flatnonzero(~footer.matched).tolist():
        offset, position = int(footer.entries[place, 0]), int(footer.entries[place, 1])
        if not any(begin <= position < end for begin, end in walk.damaged):
            facts.note(Damage.INDEX_ENTRY, f"the index entry for byte {position} leads to no batch",
                       where, offset)  # fmt: skip
    if header is not None and summary.epoch < header.epoch:
        detail = f"the footer is of epoch {summary.epoch}, the header of epoch {header.epoch}"
        facts.note(Damage.EPOCH_ORDER, detail, where)
    if footer.snapshot is not None:
        flaw = check_snapshot(footer.snapshot, summary.end_offset)
        if flaw:
            facts.note(Damage.PRODUCER_SNAPSHOT, flaw, where)
    facts.epoch, facts.end_offset = summary.epoch, summary.end_offset
    facts.first_append_us, facts.last_append_us = summary.first_append_us, summary.last_append_us


def _compare_counts(facts: SegmentFacts, footer: Footer, walk: Walk) -> None:
    summary, where = footer.summary, footer.summary.data_end
    if facts.end_offset < summary.end_offset and not facts.compacted:
        detail = f"offsets {facts.end_offset} to {summary.end_offset} are missing at the end"
        facts.note(Damage.OFFSETS_MISSING, detail, where, facts.end_offset)
    elif facts.end_offset > summary.end_offset:
        detail = f"batches reach to offset {facts.end_offset}, the footer says {summary.end_offset}"
        facts.note(Damage.FOOTER_DIFFERS, detail, where, summary.end_offset)
    said = {
        "records": (summary.record_count, facts.record_count),
        "batches": (summary.batch_count, facts.batch_count),
        "first append time": (summary.first_append_us, facts.first_append_us),
        "last append time": (summary.last_append_us, facts.last_append_us),
    }
    for name, (told, held) in said.items():
        if told != held and not (facts.compacted and "time" in name):
            facts.note(Damage.FOOTER_DIFFERS, f"{name}: the footer says {told}, the batches {held}", where)
