"""Order of the segments of one partition, and the schemas that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from danube.core.metadata.machine import Metadata
from danube.spark.jobs.findings import Finding, SegmentFacts, finding
from danube.spark.jobs.validate.segment import repeats_between
from danube.wal.verify.bytes import Damage, FindingKind
from danube.wal.verify.bytes import Finding as Found
from danube.wal.verify.tree import neighbours


def check_order(
    segments: Sequence[SegmentFacts], hole_known: Callable[[SegmentFacts], bool] = lambda _: False
) -> Iterator[Found]:
    """Findings about neighbours; ``segments`` by base offset.

    ``hole_known``: the records before it are lost, and that is stated.  Then another host, with another
    clock, may have gone on.
    """
    for before, after in pairwise(segments):
        excused = {Damage.OFFSETS_MISSING, Damage.CHAIN, Damage.TIME_ORDER} if hole_known(after) else set()
        if _named(before):
            excused.add(Damage.OFFSETS_MISSING)
        if _taken_over(before, after):
            excused.add(Damage.OFFSETS_REPEATED)
        yield from (one for one in _neighbours(before, after) if one.fault not in excused)
    copied = {before.where for before, after in pairwise(segments) if _taken_over(before, after)}
    repeats = repeats_between((one.where, one.sequences) for one in segments if one.where not in copied)
    for where, offset, detail in repeats:
        span = (offset, offset + 1)
        yield Found(FindingKind.OVERLAP, where, detail, -1, *span, Damage.SEQUENCE_REPEATED)


def _neighbours(before: SegmentFacts, after: SegmentFacts) -> Iterator[Found]:
    yield from neighbours(before, after)
    counted = before.batch_count and after.batch_count and after.base_offset >= before.end_offset
    if counted and after.first_append_us < before.last_append_us:
        detail = f"appended at {after.first_append_us} us, before the end of the segment in front of it"
        span = (after.base_offset, after.end_offset)
        yield Found(FindingKind.DISAGREEMENT, after.where, detail, 64, *span, Damage.TIME_ORDER)


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
