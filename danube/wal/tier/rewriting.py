"""Merges and key compaction of objects: fetched, written anew, uploaded and read back.  Blocking.

No manifest names the results yet, and the sources are not changed.  A crash leaves orphans in the store and
files in the working directory, which is emptied before each use.  At any time the working directory holds the
sources of one result and that result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from danube.core.partition.compaction_plan import CompactionSettings, Piece, next_round
from danube.errors import Damage
from danube.host.clock import wall_us
from danube.wal.segments.key_compaction import KeysRead, compact, read_keys
from danube.wal.segments.merge import Merged, SealedRange, merge, opened
from danube.wal.segments.segment import file_name
from danube.wal.stores.objects import local_failure
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry, entry_of
from danube.wal.tier.sealed_files import emptied
from danube.wal.tier.uploader import Change, Uploader, replacing

Replacement = tuple[SegmentEntry, list[SegmentEntry]]  # the new entry and its sources


class CompactionPlan(NamedTuple):
    """Adjacent objects, those before ``dirty`` compacted before; see danube.core.partition.compaction_plan.

    Tombstones that were appended before ``tombstones_before_us`` may go.
    """

    sources: list[SegmentEntry]
    dirty: int
    from_start: bool
    tombstones_before_us: int


def last_compacted(manifest: Manifest) -> int:
    """Index of the last compacted entry; -1 where there is none."""
    found = np.flatnonzero(manifest.entries["flags"] & np.uint32(EntryFlag.COMPACTED))
    return int(found[-1]) if len(found) else -1


def compaction_plan(
    manifest: Manifest, now_us: int, tombstone_retention_ms: int, settings: CompactionSettings
) -> CompactionPlan | None:
    """Return the objects of a partition to compact now; None if there are none.

    Objects behind an open hole are not compacted: a record that comes back in the hole could be one that a
    removed tombstone had deleted.
    """
    names = ("base_offset", "end_offset", "size_bytes", "record_count", "last_append_us", "flags")
    pieces = [
        Piece(base, end, size, count, last_us, compacted, compacted or count == end - base)
        for base, end, size, count, last_us, flags in zip(
            *(manifest.entries[: manifest.find(manifest.open_start)][name].tolist() for name in names),
            strict=True,
        )
        for compacted in [bool(flags & EntryFlag.COMPACTED)]
    ]
    found = next_round(pieces, now_us, settings)
    if found is None:
        return None
    sources = [manifest.entry(index) for index in range(found.first, found.stop)]
    before_us = now_us - tombstone_retention_ms * 1000
    return CompactionPlan(sources, found.dirty - found.first, found.from_start, before_us)


def compact_objects(
    uploader: Uploader, plan: CompactionPlan, settings: CompactionSettings, work: Path
) -> list[Replacement]:
    """Return the entries of new objects with the entries that they replace, in offset order; may be none.

    ``work``: a directory of this call alone; it needs room for twice ``target_bytes``.  Raises like
    merge_objects().
    """
    with emptied(work, f"objects of {uploader.owner.topic} cannot be compacted"):
        return _Compaction(uploader, plan, settings, work).run()


class _Compaction:
    """One call of compact_objects()."""

    def __init__(
        self, uploader: Uploader, plan: CompactionPlan, settings: CompactionSettings, work: Path
    ) -> None:
        self._uploader = uploader
        self._plan = plan
        self._settings = settings
        self._work = work

    def run(self) -> list[Replacement]:
        plan, keys_max = self._plan, self._settings.keys_max
        keys = read_keys(
            plan.sources, plan.dirty, self._fetched, from_start=plan.from_start, keys_max=keys_max
        )
        sources, start = plan.sources[: keys.stop], 0
        replaced: list[Replacement] = []
        while start < len(sources):
            count, made = self._group(sources[start:], keys)
            if not count:  # no later one holds the state of the producers
                break
            if made is not None:
                replaced.append((made, sources[start : start + count]))
            start += count
        return replaced

    @contextmanager
    def _fetched(self, entry: SegmentEntry) -> Iterator[SealedRange]:
        source = self._fetch(entry)
        yield source
        source.path.unlink()

    def _fetch(self, entry: SegmentEntry) -> SealedRange:
        return _fetched(self._uploader, entry, self._work / f"source-{entry.base_offset}")

    def _group(self, sources: Sequence[SegmentEntry], keys: KeysRead) -> tuple[int, SegmentEntry | None]:
        """Compact the first of ``sources``; how many those are, and the entry where something changed."""
        ranges: list[SealedRange] = []
        count = total = 0
        for entry in sources:
            total += entry.size_bytes
            if count and total > self._settings.target_bytes:
                break
            ranges.append(self._fetch(entry))
            with opened(ranges[-1:]) as [original]:
                if original.snapshot is not None:
                    count = len(ranges)
        made = self._compact(sources[:count], ranges[:count], keys) if count else None
        for one in ranges:
            one.path.unlink()
        return count, made

    def _compact(
        self, sources: Sequence[SegmentEntry], ranges: list[SealedRange], keys: KeysRead
    ) -> SegmentEntry | None:
        target = self._work / file_name(sources[0].base_offset)
        before_us = self._plan.tombstones_before_us if keys.complete else None
        result = compact(ranges, keys.latest, target, tombstones_before_us=before_us)
        if not result.removed_count and len(sources) == 1 and sources[0].flags & EntryFlag.COMPACTED:
            target.unlink()
            return None
        entry = _uploaded(self._uploader, target, result.merged, sources, result.removed_count)
        target.unlink()
        return entry


def replacing_in_order(replaced: Sequence[Replacement]) -> Change:
    """Return the change that replaces sources by their results, up to the first result whose sources changed.

    Later results may lack tombstones of older records that those changed sources still hold.
    """
    changes = [replacing(made, sources) for made, sources in replaced]

    def change(manifest: Manifest) -> Manifest | None:
        result: Manifest | None = None
        for one in changes:
            after = one(result or manifest)
            if after is None:
                break
            result = after
        return result

    return change


def merge_objects(uploader: Uploader, sources: Sequence[SegmentEntry], work: Path) -> SegmentEntry:
    """Return the entry of one new object that holds all of ``sources``, which are adjacent.

    ``work``: a directory of this call alone; it needs room for twice the sources.  Raises StoreDamaged if a
    source differs from the manifest, StorageFailed if the local disk refuses, and errors of the store.
    """
    with emptied(work, f"objects of {uploader.owner.topic} cannot be merged"):
        ranges = [_fetched(uploader, entry, work / f"source-{n}") for n, entry in enumerate(sources)]
        target = work / file_name(sources[0].base_offset)
        return _uploaded(uploader, target, merge(ranges, target), sources)


def _fetched(uploader: Uploader, entry: SegmentEntry, path: Path) -> SealedRange:
    uploader.fetch(segment_key(uploader.identity, entry), entry.size_bytes, path)
    return SealedRange(path)


def _uploaded(
    uploader: Uploader, target: Path, merged: Merged, sources: Sequence[SegmentEntry], removed: int = 0
) -> SegmentEntry:
    """Upload what was made of ``sources``, in sum as the manifest states them; return its entry."""
    first, last = sources[0], sources[-1]
    flags = EntryFlag.MERGED | (EntryFlag.COMPACTED if merged.summary.compacted else 0)
    entry = entry_of(
        merged.summary, merged.size_bytes, wall_us(), flags=int(flags), chain_hash=merged.chain_hash
    )
    told = (first.base_offset, last.end_offset, sum(one.record_count for one in sources), last.chain_hash)
    if (entry.base_offset, entry.end_offset, entry.record_count + removed, entry.chain_hash) != told:
        raise Damage("the new segment does not hold what the manifest says of its sources")
    if uploader.upload(target, resumed=True) is None:
        raise local_failure(target, FileNotFoundError(2, "it has gone"))
    return entry
