"""Order of the segments of one partition, and the schemas that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from danube.core.metadata.machine import Metadata
from danube.spark.jobs.findings import Finding, SegmentFacts, finding
from danube.spark.jobs.validate.segment import repeats_between
from danube.wal.verify.bytes import Damage


def check_order(
    segments: Sequence[SegmentFacts], hole_known: Callable[[SegmentFacts], bool] = lambda _: False
) -> list[Finding]:
    """Findings about neighbours; ``segments`` by base offset.

    ``hole_known``: the records before it are lost, and that is stated.  Then another host, with another
    clock, may have gone on.
    """
    found: list[Finding] = []
    for before, after in pairwise(segments):
        found += _check_offsets(before, after, hole_known(after))
        hashes = (before.content_hash, before.chain_hash)
        known = before.sealed and after.sealed and any(after.previous_hash) and not hole_known(after)
        if known and after.previous_hash not in hashes:
            detail = f"its previous hash is not the content hash of {before.where}"
            found.append(finding(Damage.CHAIN, after.where, detail, after.data_end, after.base_offset))
        if 0 <= after.first_epoch < before.epoch:
            detail = f"it is of epoch {after.first_epoch}, the segment before it of epoch {before.epoch}"
            found.append(finding(Damage.EPOCH_ORDER, after.where, detail, 40, after.base_offset))
        counted = before.batch_count and after.batch_count and after.base_offset >= before.end_offset
        if counted and after.first_append_us < before.last_append_us and not hole_known(after):
            detail = f"appended at {after.first_append_us} us, before the end of the segment in front of it"
            found.append(finding(Damage.TIME_ORDER, after.where, detail, 64, after.base_offset))
    copied = {before.where for before, after in pairwise(segments) if _taken_over(before, after)}
    repeats = repeats_between((one.where, one.sequences) for one in segments if one.where not in copied)
    found += [
        finding(Damage.SEQUENCE_REPEATED, where, detail, -1, offset) for where, offset, detail in repeats
    ]
    return found


def without_leftovers(segments: Sequence[SegmentFacts]) -> tuple[list[SegmentFacts], list[SegmentFacts]]:
    """Segments by base offset, and apart from them those that a compacted one before them speaks for.

    A crash, or a moment, lies between the naming of a compacted segment and the removal of its sources.
    """
    kept: list[SegmentFacts] = []
    leftovers: list[SegmentFacts] = []
    for facts in segments:
        before = kept[-1] if kept else None
        inside = before is not None and before.compacted and facts.end_offset <= before.end_offset
        (leftovers if inside and before is not None and before.sealed else kept).append(facts)
    return kept, leftovers


def _check_offsets(before: SegmentFacts, after: SegmentFacts, hole_known: bool) -> Iterable[Finding]:
    if after.base_offset > before.end_offset and not hole_known and not _named(before):
        detail = f"offsets {before.end_offset} to {after.base_offset} are in no segment"
        yield finding(Damage.OFFSETS_MISSING, after.where, detail, -1, before.end_offset)
    elif after.base_offset < before.end_offset and not _taken_over(before, after) and after.batch_count:
        detail = f"offsets {after.base_offset} to {before.end_offset} are also in {before.where}"
        yield finding(Damage.OFFSETS_REPEATED, after.where, detail, -1, after.base_offset)


def _taken_over(before: SegmentFacts, after: SegmentFacts) -> bool:
    """Whether the end of an unsealed segment was copied into the next one: recoveries do, and then cut."""
    return not before.sealed and after.base_offset < before.end_offset


def _named(facts: SegmentFacts) -> bool:
    """Whether it is known of the segment that records at its end cannot be read."""
    return facts.tail is None and not facts.sealed and bool(facts.findings)


def check_schemas(segments: Sequence[SegmentFacts], metadata: Metadata) -> list[Finding]:
    """Schemas that were never registered; deleted ones are no fault.

    ``metadata`` is younger than the segments.
    """
    registry = metadata.registry
    found: list[Finding] = []
    for facts in segments:
        for schema_id, version, position, offset in facts.schemas:
            subject = registry.with_id(schema_id)
            if schema_id >= registry.next_schema_id or schema_id < 0:
                detail = f"schema id {schema_id} was never given"
            elif subject is not None and version > subject.last_version:
                detail = f"subject {subject.subject!r} never had version {version}"
            else:
                continue
            found.append(finding(Damage.SCHEMA_UNKNOWN, facts.where, detail, position, offset))
    return found
