"""Key compaction: of each key only the latest record is kept, over a run of adjacent sealed segments.

    1.  ``LatestKeys.add`` reads segments, oldest first, and remembers the latest offset of each key.
    2.  ``compact`` writes some or all of them anew, as one segment, without what a later record of
        the same key has replaced.

A record without a key is always kept.  A record with a key and an empty payload is a *tombstone*: it replaces
earlier records of the key.  A tombstone that is old enough may be removed too, but only if the segments begin
at the log's start; otherwise an older value would come back.

Batches of which all records stay are copied byte for byte.  Of others the records that stay are
stored as a selection (Flag.SELECTED) with their offsets; see "Compacted segments" in
docs/formats/segment.md.  Memory: about 150 bytes for each key, and one window.

The first half of a compaction: the latest offset of each key, within bounded memory.  Blocking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from secrets import randbits
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.checksum import keyed_hash
from danube.core.batch.columns import BatchView
from danube.core.batch.format import COMPRESSION_MASK, BatchHeader, Compression, Flag, read_header
from danube.core.batch.selection import compressed, select
from danube.errors import Damage, InvalidArgument, LimitExceeded, ProtocolError
from danube.wal.segments.merge import (
    Merged,
    Original,
    SealedRange,
    SegmentFile,
    check_adjacent,
    opened,
    runs_of,
)
from danube.wal.segments.walk import Run

KEYS_MAX: Final = 2_000_000


class Compacted(NamedTuple):
    """Result of a compaction, with the number of the sources' records that it leaves out."""

    merged: Merged
    removed_count: int
    tombstones_removed: int


class LatestKeys:
    """The latest offset of each key in the segments that were added, oldest first.

    Keys are kept as 128-bit hashes with a seed of this object, so no producer can choose two keys that
    collide.  When ``keys_max`` are known, all records of further keys are kept.
    """

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._latest: dict[bytes, int] = {}
        self._keys_max = keys_max
        self._seed = randbits(64)
        self.end_offset = -1
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, sources: Sequence[SealedRange]) -> None:
        """Read adjacent sealed segments that follow the added ones; raises like merge()."""
        with opened(sources) as originals:
            check_adjacent(originals)
            if 0 <= self.end_offset != originals[0].summary.base_offset:
                raise InvalidArgument("the segments do not follow those that were added before")
            for original in originals:
                for run in runs_of(original):
                    self._add_run(run)
            self.end_offset = originals[-1].summary.end_offset

    def _add_run(self, run: Run) -> None:
        latest = self._latest
        for position in run.batches.positions.tolist():
            header = read_header(run.data, position)
            if not header.flags & Flag.KEYS:
                continue
            view = BatchView(run.data, header, position)
            for key, offset in zip(_keys(view), view.offsets.tolist(), strict=True):
                if key is None:
                    continue
                hashed = keyed_hash(key, self._seed)
                if len(latest) < self._keys_max or hashed in latest:
                    latest[hashed] = offset
                else:
                    self.overflowed = True

    def kept(self, view: BatchView) -> NDArray[np.bool_]:
        """bool[n]: which records no later one of the same key has replaced."""
        get, seed = self._latest.get, self._seed
        stays = [
            key is None or get(keyed_hash(key, seed), offset) <= offset
            for key, offset in zip(_keys(view), view.offsets.tolist(), strict=True)
        ]
        return np.array(stays, np.bool_)


def compact(
    sources: Sequence[SealedRange],
    latest: LatestKeys,
    target: Path,
    *,
    tombstones_before_us: int | None = None,
) -> Compacted:
    """Write ``sources`` as one compacted segment into the new file ``target``.

    ``latest`` knows at least these segments.  Tombstones that were appended before
    ``tombstones_before_us`` are left out; None keeps them, as it must be unless the first source
    begins at the log's start.  The last source must hold a producer snapshot: from the batches
    alone it cannot be made any more.  Raises like merge().
    """
    with opened(sources) as originals:
        check_adjacent(originals)
        if latest.end_offset < originals[-1].summary.end_offset:
            raise InvalidArgument("the keys of the segments to compact were not read")
        if originals[-1].snapshot is None:
            raise InvalidArgument(
                "the last segment to compact holds no producer snapshot",
                hint="compact up to a segment that does",
            )
        header = originals[0].header
        if len(originals) == 1:  # objects are named after offsets and content: make another name certain
            header = header._replace(created_us=header.created_us + 1)
        with SegmentFile(target, header) as result:
            writer = _Writer(result, latest, tombstones_before_us)
            for original in originals:
                writer.take(original)
            merged = result.seal(originals, compacted=True)
            return Compacted(merged, writer.removed_count, writer.tombstones_removed)


class _Writer:
    """Copies the remaining records into a segment file."""

    def __init__(self, result: SegmentFile, latest: LatestKeys, tombstones_before_us: int | None) -> None:
        self._result = result
        self._latest = latest
        self._tombstones_before_us = tombstones_before_us
        self.removed_count = 0
        self.tombstones_removed = 0

    def take(self, original: Original) -> None:
        for run in runs_of(original):
            positions, sizes = run.batches.positions.tolist(), run.batches.sizes.tolist()
            for position, size in zip(positions, sizes, strict=True):
                self._take_batch(memoryview(run.data)[position : position + size])

    def _take_batch(self, batch: memoryview) -> None:
        header = read_header(batch)
        chosen: bytes | memoryview = batch
        count = header.record_count
        if header.flags & Flag.KEYS:
            stays = self._stays(batch, header)
            count = int(stays.sum())
            self.removed_count += header.record_count - count
            if not count:
                return
            if count < header.record_count:
                chosen = _selection(batch, header, np.flatnonzero(stays))
        self._result.add(chosen, header.base_offset, count, header.append_time_us)

    def _stays(self, batch: memoryview, header: BatchHeader) -> NDArray[np.bool_]:
        view = BatchView(batch, header)
        stays = self._latest.kept(view)
        before_us = self._tombstones_before_us
        if before_us is not None and header.append_time_us < before_us:
            keyed = np.array([key is not None for key in _keys(view)], np.bool_)
            gone = stays & keyed & (np.diff(view.payload_offsets) == 0)
            self.tombstones_removed += int(gone.sum())
            stays &= ~gone
        return stays


def _keys(view: BatchView) -> list[bytes | None]:
    try:
        return view.keys()
    except (ProtocolError, LimitExceeded) as error:
        raise Damage(
            "the keys of a stored batch cannot be read",
            why=str(error),
            base_offset=view.header.base_offset,
        ) from error


def _selection(batch: memoryview, header: BatchHeader, indexes: NDArray[np.int64]) -> bytes:
    """The chosen records as a stored batch, compressed as the batch was where that saves something."""
    chosen = select(batch, header, indexes)
    kind = header.flags & COMPRESSION_MASK
    return compressed(chosen, Compression(kind)) if kind else chosen


Source = TypeVar("Source")


class KeysRead(NamedTuple):
    """``stop``: how many of the sources may be compacted with ``latest``.

    ``complete``: every key in them is known, so an old tombstone may go: whatever it replaced goes too.
    """

    latest: LatestKeys
    stop: int
    complete: bool


def read_keys(
    sources: Sequence[Source],
    dirty: int,
    at_hand: Callable[[Source], AbstractContextManager[SealedRange]],
    *,
    from_start: bool,
    keys_max: int,
) -> KeysRead:
    """Read adjacent sealed segments, oldest first; those before ``dirty`` only where that is worth it.

    If there are more keys than ``keys_max``, the round ends before the segment that exceeds the limit.  A
    single dirty segment above the limit is still taken; some of its obsolete records are kept.  ``at_hand``
    gives the bytes of a source for a while.  Raises the errors of LatestKeys.add() and of ``at_hand``.
    """
    latest = LatestKeys(keys_max)
    for number in range(0 if from_start else dirty, len(sources)):
        with at_hand(sources[number]) as one:
            latest.add([one])
        if latest.overflowed and number > dirty:
            return KeysRead(latest, number, from_start)
        if latest.overflowed and from_start:
            return read_keys(sources, dirty, at_hand, from_start=False, keys_max=keys_max)
        if latest.overflowed:
            return KeysRead(latest, number + 1, complete=False)
    return KeysRead(latest, len(sources), from_start)
