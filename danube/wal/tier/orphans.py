"""Removal of orphans from a store: objects in no manifest, deleted topics, old copies.  Blocking.

Every round does a bounded piece of work and says whether there is more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Final

from danube.core.partition.tier_plan import ListedObject, Sweep, TierSettings, superseded, sweep
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.keys import KeyKind, parse_key, partition_prefix
from danube.wal.tier.uploader import Uploader

ROUND_OBJECTS_MAX: Final = 1_000


def sweep_partition(
    uploader: Uploader,
    expected_keys: Collection[str],
    unnamed_since: Mapping[str, int],
    now_us: int,
    settings: TierSettings,
) -> Sweep:
    """Delete the partition's orphans; pass ``unnamed_since`` of the result to the next round.

    ``expected_keys``: objects that may be named at any time.  Objects in an open hole stay, because they may
    be the only copy of a dead owner's records.  Raises Fenced if there is a newer owner, which then does this
    work.
    """
    named = uploader.named() | set(expected_keys)
    listed: list[ListedObject] = []
    for found in uploader.store.list(partition_prefix(uploader.identity)):
        parsed = parse_key(found.key)
        if parsed is None or parsed.kind is not KeyKind.SEGMENT or found.key in named:
            continue
        hole = uploader.manifest.hole_at(parsed.base_offset)
        if hole is None or not hole.open:
            listed.append(ListedObject(found.key, parsed.base_offset, found.modified_us))
    uploaded_end = uploader.manifest.uploaded_end
    found_now = sweep(listed, named, uploaded_end, unnamed_since, now_us, settings, ROUND_OBJECTS_MAX)
    if found_now.doomed:
        uploader.remove(found_now.doomed)
    return found_now


def delete_partition(store: ObjectStore, identity: LogIdentity) -> bool:
    """Delete a piece of a deleted partition's objects; True when there may be more.

    Segments are deleted first and manifests last.  So a crash leaves a manifest whose objects are missing,
    and no object without a manifest.
    """
    keys = [found.key for found in islice(store.list(partition_prefix(identity)), ROUND_OBJECTS_MAX)]
    store.delete(keys)
    return len(keys) == ROUND_OBJECTS_MAX


def prune_copies(store: ObjectStore, prefix: str) -> None:
    """Keep the newest few objects below ``prefix``, whose names ascend with time."""
    store.delete(superseded([found.key for found in store.list(prefix)]))
