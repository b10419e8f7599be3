"""Copies in the store of what a restore needs beside segments: metadata snapshots and subscriptions' cursors.

Blocking; the mover's threads run it.  A copy is read back before an older one may go.
"""

from __future__ import annotations

from typing import Final

from danube.errors import StoreDamaged
from danube.wal.log.cursors import HEADER_BYTES
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.keys import METADATA_PREFIX, cursors_key, cursors_prefix, metadata_key, parse_key
from danube.wal.tier.orphans import prune_copies
from danube.wal.tier.uploader import Uploader

METADATA_INTERVAL_S: Final = 2.0  # at most one snapshot in this time


def put_metadata(store: ObjectStore, version: int, blob: bytes) -> None:
    """Store the snapshot of metadata ``version`` and drop all but the newest few."""
    _put(store, metadata_key(version), blob)
    prune_copies(store, METADATA_PREFIX)


def put_cursors(uploader: Uploader, blob: bytes, generation: int) -> int:
    """Store a copy of a partition's cursors; returns its generation, to be handed in with the next one.

    ``generation`` 0: not known yet.  The copy of an owner with a higher epoch is the newer one.  Where no
    subscription is, and none was copied before, nothing is stored and 0 is returned.
    """
    prefix, epoch = cursors_prefix(uploader.identity), uploader.owner.epoch
    if not generation:
        found = [parse_key(one.key) for one in uploader.store.list(prefix)]
        if not found and len(blob) == HEADER_BYTES:
            return 0
        # One more than the last: a put of an earlier mover of this owner may still be on its way.
        generation = 1 + max((one.generation for one in found if one and one.epoch == epoch), default=0)
        generation += uploader.start_count
    else:
        generation += 1
    _put(uploader.store, cursors_key(uploader.identity, epoch, generation), blob)
    prune_copies(uploader.store, prefix)
    return generation


def _put(store: ObjectStore, key: str, blob: bytes) -> None:
    store.put(key, blob)
    if store.get(key) != blob:
        raise StoreDamaged(f"object {key} is not what was put", why="reading it back differs", key=key)
