"""Checks of one segment by its bytes alone.  Pure: bytes in, findings out.

The walk and the footer are those of ``danube verify`` (danube.wal.verify.segment).  Here the columns of
batches are judged too, and what must hold from one batch to the next: times, epochs, sequences of idempotent
producers, and the schemas that they name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from danube.core.batch.format import Flag
from danube.spark.jobs.findings import Expected, SegmentFacts
from danube.spark.jobs.validate.rows import EXAMINER
from danube.wal.verify.bytes import Damage, Source
from danube.wal.verify.segment import SUMMARY_BYTES, fill
from danube.wal.verify.walk import HEADER_BYTES, Octets, Rows, Verdict

_SCHEMA_ID: Final = int(Flag.SCHEMA_ID)

Range = tuple[int, int, int, int, int]  # producer id, epoch, first sequence, next sequence, first offset
OnBatch = Callable[[Octets, int, int, int], None]
"""Called for sound batches: bytes, place and size in them, position in the segment."""


def validate_segment(source: Source, expected: Expected, on_batch: OnBatch | None = None) -> SegmentFacts:
    """Read and check all of ``source``. Raises only errors of ``source``."""
    facts = SegmentFacts(expected.base_offset, where=expected.where)
    checks = _Checks(facts, on_batch)
    identity = (expected.topic_id, expected.partition)
    fill(
        facts, source, identity=identity, synced=expected.synced, examiner=EXAMINER, on_rows=checks.take
    )  # fmt: skip
    if not source.read(0, HEADER_BYTES).strip(b"\0"):  # made, and not written to yet
        facts.problems = [one for one in facts.problems if one.fault != Damage.SEGMENT_HEADER]
        if expected.sealed:
            facts.note(Damage.SEGMENT_HEADER, "the header is missing", 0)
    if (
        expected.sealed
        and not facts.sealed
        and not facts.shows(Damage.FOOTER_DAMAGED, Damage.SEGMENT_VERSION)
    ):
        begin = max(0, source.size - SUMMARY_BYTES)
        facts.note(Damage.FOOTER_MISSING, "the segment must be sealed, and has no footer", begin)
    facts.sequences = checks.sequences.ranges()
    return facts


class _Checks:
    """Comparison of batches with those before them; takes them in the order of a walk."""

    def __init__(self, facts: SegmentFacts, on_batch: OnBatch | None) -> None:
        self.sequences = Sequences()
        self._facts = facts
        self._on_batch = on_batch
        self._schemas: set[tuple[int, int]] = set()
        self._time_us = -(2**63)
        self._epoch = -1

    def take(self, data: Octets, base: int, rows: Rows) -> None:
        facts = self._facts
        times = np.concatenate(([self._time_us], rows.append_time_us))
        for place in np.flatnonzero(times[1:] < times[:-1]).tolist():
            detail = f"appended at {times[place + 1]} us, before the batch in front of it ({times[place]} us)"
            self._note(Damage.TIME_ORDER, detail, base, rows, place)
        epochs = np.concatenate(([self._epoch], rows.epoch))
        for place in np.flatnonzero(epochs[1:] < epochs[:-1]).tolist():
            detail = f"epoch {epochs[place + 1]} follows epoch {epochs[place]}"
            self._note(Damage.EPOCH_ORDER, detail, base, rows, place)
        self._time_us, self._epoch = int(rows.append_time_us.max()), int(rows.epoch.max())
        for place, detail in self.sequences.add(rows):
            self._note(Damage.SEQUENCE_REPEATED, detail, base, rows, place)
        for place, named in self._newly_named(rows):
            facts.schemas.append((*named, base + int(rows.position[place]), int(rows.base_offset[place])))
        if self._on_batch is not None:
            for place in np.flatnonzero(rows.verdict == Verdict.FINE).tolist():
                position = int(rows.position[place])
                self._on_batch(data, position, int(rows.size[place]), base + position)

    def _note(self, kind: Damage, detail: str, base: int, rows: Rows, place: int) -> None:
        self._facts.note(kind, detail, base + int(rows.position[place]), int(rows.base_offset[place]))

    def _newly_named(self, rows: Rows) -> Iterable[tuple[int, tuple[int, int]]]:
        """Schemas and versions that no batch has named before, with the places of those that do."""
        named = np.flatnonzero((rows.flags & _SCHEMA_ID) != 0)
        if not len(named):
            return
        pairs = np.stack((rows.schema_id[named], rows.schema_version[named]))
        found, first = np.unique(pairs, axis=1, return_index=True)
        for (schema_id, version), place in zip(found.T.tolist(), named[first].tolist(), strict=True):
            if (schema_id, version) not in self._schemas:
                self._schemas.add((schema_id, version))
                yield place, (schema_id, version)


class Sequences:
    """Sequences that the producers of one segment gave, in the order of offsets."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[int]] = {}  # first, next, first offset

    def add(self, rows: Rows) -> list[tuple[int, str]]:
        """Take more batches; the places of those that repeat a sequence, and what they repeat."""
        numbered = np.flatnonzero(rows.producer_id)
        if not len(numbered):
            return []
        ids, epochs = rows.producer_id[numbered], rows.producer_epoch[numbered]
        firsts = rows.base_sequence[numbered]
        nexts = firsts + (rows.end_offset - rows.base_offset)[numbered]
        order = np.lexsort((np.arange(len(ids)), epochs, ids))
        changes = np.flatnonzero(np.diff(ids[order]) | np.diff(epochs[order])) + 1
        repeats: list[tuple[int, str]] = []
        for group in np.split(order, changes):
            key = int(ids[group[0]]), int(epochs[group[0]])
            offset = int(rows.base_offset[numbered[group[0]]])
            known = self._known.setdefault(key, [int(firsts[group[0]]), int(firsts[group[0]]), offset])
            reached = np.maximum.accumulate(np.concatenate(([known[1]], nexts[group])))
            for place in np.flatnonzero(firsts[group] < reached[:-1]).tolist():
                detail = _repeated(*key, int(firsts[group[place]]), int(reached[place]))
                repeats.append((int(numbered[group[place]]), detail))
            known[1] = int(reached[-1])
        return sorted(repeats)

    def ranges(self) -> list[Range]:
        return [(*key, known[0], known[1], known[2]) for key, known in self._known.items()]


def _repeated(producer_id: int, epoch: int, first: int, reached: int) -> str:
    return (
        f"producer {producer_id:x} (epoch {epoch}) stored sequence {first} again, "
        f"after it had come to {reached}"
    )


def repeats_between(segments: Iterable[tuple[str, list[Range]]]) -> list[tuple[str, int, str]]:
    """File, offset and detail where a segment repeats what earlier ones, in the order of offsets, hold."""
    reached: dict[tuple[int, int], int] = {}
    found: list[tuple[str, int, str]] = []
    for where, ranges in segments:
        for producer_id, epoch, first, following, offset in ranges:
            before = reached.get((producer_id, epoch), first)
            if first < before:
                found.append((where, offset, _repeated(producer_id, epoch, first, before)))
            reached[producer_id, epoch] = max(before, following)
    return found
