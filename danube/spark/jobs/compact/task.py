"""Compaction where it runs: objects of one partition are fetched, made into fewer, put and read back.

A new object has its final, content-addressed name, and no manifest names it.  Readers do not see it, and
the owner's mover removes it after a day if it is not installed.  The sources are not touched.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from danube.core import kernels
from danube.errors import Damage, StoreDamaged
from danube.host.clock import wall_us
from danube.spark.history.places import StorePlace
from danube.spark.jobs.validate.task import local_path
from danube.wal.segments.key_compaction import Compacted, LatestKeys, compact
from danube.wal.segments.merge import SealedRange
from danube.wal.segments.segment import NO_LOG, SUMMARY_BYTES, LogIdentity, file_name, read_summary
from danube.wal.stores.objects import local_failure
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import EntryFlag, SegmentEntry, entry_of
from danube.wal.tier.rewriting import merge_objects
from danube.wal.tier.staged import Staged, encode_staged, staged
from danube.wal.tier.uploader import Ownership, Uploader, refuse_stranger


class CompactTask(NamedTuple):
    """``groups``: adjacent entries that become one object each.  ``keys``: keep the latest of each key only.

    ``work``: a directory of this host with room for twice the largest group (with ``keys``: for all).
    ``tombstones_before_us``: 0 keeps all tombstones.
    """

    place: StorePlace
    topic: str
    identity: LogIdentity
    epoch: int
    groups: tuple[tuple[SegmentEntry, ...], ...]
    keys: bool
    keys_max: int
    tombstones_before_us: int
    work: str
    log_id: bytes = NO_LOG  # of danube.wal.segments.segment


def stage(task: CompactTask) -> bytes:
    """Make the task's objects; return them with the objects that they may replace, for decode_staged()."""
    kernels.load()
    work = Path(task.work) / f"{task.identity.directory_name}-{uuid4().hex}"
    work.mkdir(parents=True, mode=0o700)
    try:
        owner = Ownership(task.topic, task.identity, task.epoch, work, task.log_id)
        uploader = Uploader(task.place.store(), owner)
        made = _stage_keys(task, uploader, work) if task.keys else _stage_merges(task, uploader, work)
        return encode_staged(made)
    except OSError as error:
        raise local_failure(work, error) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _stage_merges(task: CompactTask, uploader: Uploader, work: Path) -> list[Staged]:
    return [
        staged(merge_objects(uploader, group, work / str(number)), group)
        for number, group in enumerate(task.groups)
    ]


def _stage_keys(task: CompactTask, uploader: Uploader, work: Path) -> list[Staged]:
    """Stage all groups with the keys of all of them: the newest record of a key may be in the last group.

    A compacted group that would not change needs no new object.
    """
    latest = LatestKeys(task.keys_max)
    ranges = [[_at_hand(task, uploader, entry, work) for entry in group] for group in task.groups]
    try:
        latest.add([one for group in ranges for one in group])
        before_us = 0 if latest.overflowed else task.tombstones_before_us
        made: list[Staged] = []
        after = b""
        for group, sources in zip(task.groups, ranges, strict=True):
            target = work / file_name(group[0].base_offset)
            done = compact(sources, latest, target, tombstones_before_us=before_us or None)
            after_group = group[-1].content_hash
            if done.removed_count or len(group) > 1 or not group[0].flags & EntryFlag.COMPACTED:
                entry = _uploaded(done, group, uploader, target)
                made.append(
                    staged(
                        entry, group, removed=done.removed_count, keys=True, tombstones_before_us=before_us,
                        after=after,
                    )
                )  # fmt: skip
                after_group = entry.content_hash
            target.unlink()
            after = after_group
        return made
    except StoreDamaged:
        raise
    except Damage as error:
        raise StoreDamaged(
            f"objects of {task.topic} cannot be compacted", why=str(error), hint="see `danube spark validate`"
        ) from None


def _uploaded(
    done: Compacted, group: tuple[SegmentEntry, ...], uploader: Uploader, target: Path
) -> SegmentEntry:
    """The entry of a compacted segment whose object was put and read back."""
    result = done.merged
    flags = int(EntryFlag.COMPACTED | EntryFlag.MERGED)
    entry = entry_of(result.summary, result.size_bytes, wall_us(), flags=flags, chain_hash=result.chain_hash)
    told = (group[0].base_offset, group[-1].end_offset, group[-1].chain_hash)
    held = sum(source.record_count for source in group)
    if (entry.base_offset, entry.end_offset, entry.chain_hash) != told or (
        entry.record_count + done.removed_count != held
    ):
        raise Damage("the compacted segment does not fit its sources in the manifest")
    if uploader.upload(target, resumed=True) is None:
        raise local_failure(target, FileNotFoundError(2, "it has gone"))
    return entry


def _at_hand(task: CompactTask, uploader: Uploader, entry: SegmentEntry, work: Path) -> SealedRange:
    """An entry's object as a file: of a directory store it is one already."""
    key = segment_key(task.identity, entry)
    path = local_path(task.place, key)
    if path is None:
        path = work / f"source-{entry.base_offset:020d}"
        uploader.fetch(key, entry.size_bytes, path)
    else:
        refuse_stranger(path, task.log_id)
    return SealedRange(path)


def ends_well(place: StorePlace, identity: LogIdentity, entry: SegmentEntry) -> bool:
    """Whether a compaction may end with this object: the state of the producers is in its footer."""
    data = place.store().get(segment_key(identity, entry), entry.size_bytes - SUMMARY_BYTES, entry.size_bytes)
    summary = read_summary(data, entry.size_bytes)
    return summary is not None and summary.has_snapshot
