"""Sequences of idempotent producers in stored batches: none may be stored twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from danube.core.partition.dedup import ProducerTable
from danube.errors import Damage, StorageIncompatible
from danube.spark.jobs.validate.rows import Rows

_SNAPSHOT_MAGIC: Final = b"DND"

Range = tuple[int, int, int, int, int]  # producer id, epoch, first sequence, next sequence, first offset


class Sequences:
    """What the producers of one segment numbered, in the order of offsets."""

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


def check_snapshot(snapshot: bytes, end_offset: int) -> str:
    """What is wrong with a footer's producer snapshot; empty when nothing is, or it is of no known kind."""
    if not snapshot.startswith(_SNAPSHOT_MAGIC):
        return ""
    try:
        known_end, _ = ProducerTable().restore(snapshot)
    except (Damage, StorageIncompatible) as error:
        return error.what
    except Exception as error:  # counts that lie, although the checksum holds
        return f"producer snapshot is malformed: {error}"
    if known_end > end_offset:
        return f"the producer snapshot knows offsets up to {known_end}, behind the segment's end"
    return ""
