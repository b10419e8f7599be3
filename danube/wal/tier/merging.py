"""Many small objects into one: fetched, merged, uploaded and read back.  Blocking.

Nothing names the result yet, and nothing of the sources is touched: a crash leaves an orphan and files in
the working directory, which is emptied before each use.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from danube.errors import Damage, StoreDamaged
from danube.host.clock import wall_us
from danube.wal.segments.merge import SealedRange, merge
from danube.wal.segments.segment import file_name
from danube.wal.stores.objects import local_failure
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import EntryFlag, SegmentEntry, entry_of
from danube.wal.tier.uploader import Uploader


def merge_objects(uploader: Uploader, sources: Sequence[SegmentEntry], work: Path) -> SegmentEntry:
    """The entry of one new object that holds all of ``sources``, which are adjacent.

    ``work``: a directory of this call alone; it needs room for twice the sources.  Raises StoreDamaged when a
    source is not what the manifest says, StorageFailed when the local disk refuses, or what the store raises.
    """
    target = work / file_name(sources[0].base_offset)
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, mode=0o700)
        ranges = [_fetched(uploader, entry, work / f"source-{n}") for n, entry in enumerate(sources)]
        merged = merge(ranges, target)
        flags = EntryFlag.MERGED | (EntryFlag.COMPACTED if merged.summary.compacted else 0)
        entry = entry_of(
            merged.summary, merged.size_bytes, wall_us(), flags=int(flags), chain_hash=merged.chain_hash
        )
        _check(entry, sources)
        if uploader.upload(target, resumed=True) is None:
            raise local_failure(target, FileNotFoundError(2, "it has gone"))
        return entry
    except StoreDamaged:
        raise
    except Damage as error:
        raise StoreDamaged(
            f"objects of {uploader.owner.topic} cannot be merged", why=str(error), hint="see `danube verify`"
        ) from None
    except OSError as error:
        raise local_failure(work, error) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetched(uploader: Uploader, entry: SegmentEntry, path: Path) -> SealedRange:
    uploader.fetch(segment_key(uploader.identity, entry), entry.size_bytes, path)
    return SealedRange(path)


def _check(merged: SegmentEntry, sources: Sequence[SegmentEntry]) -> None:
    """What was fetched must be what the manifest said, record by record in sum."""
    first, last = sources[0], sources[-1]
    told = (first.base_offset, last.end_offset, sum(one.record_count for one in sources), last.chain_hash)
    if (merged.base_offset, merged.end_offset, merged.record_count, merged.chain_hash) != told:
        raise Damage("the merged segment does not hold what the manifest says of its sources")
