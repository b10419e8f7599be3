"""Offers: records of a returned disk that another owner installs in its manifest.

The broker whose disk came back puts its segments as objects, and one more that lists them: the *offer*. Only
the owner writes manifests; it lists offers as long as its manifest has open holes.  The owner reads every
object, installs those that fit, and removes the offer when all are done.  The two brokers exchange no other
message.  An offer may be put twice, found twice and half done; the manifest shows which part is done.

    put_offer()      the disk's broker; its objects are there
    take_returned()  the owner: examines about JOB_BYTES_MAX, installs them, True when there is more
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from danube.errors import Damage, InvalidArgument, ObjectMissing, StoreDamaged
from danube.host import telemetry
from danube.limits import GIB
from danube.wal.segments.merge import SealedRange, opened, runs_of
from danube.wal.segments.segment import LogIdentity
from danube.wal.segments.stored_segment import hash_of
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.hole_changes import Tail, decode_tail, encode_tail, filling, named, objection_to
from danube.wal.tier.keys import returned_key, returned_prefix, segment_key
from danube.wal.tier.manifest import EntryFlag, SegmentEntry, entry_of
from danube.wal.tier.sealed_files import emptied
from danube.wal.tier.staged import fetched
from danube.wal.tier.uploader import Uploader

JOB_BYTES_MAX: Final = 1 * GIB  # examined in one go, unless the first alone is larger
_log = telemetry.events("mover")


def put_offer(store: ObjectStore, identity: LogIdentity, tail: Tail) -> None:
    """Its objects must be there."""
    key, data = returned_key(identity, tail.broker_id, tail.last_epoch), encode_tail(tail)
    store.put(key, data)
    if store.get(key) != data:
        raise StoreDamaged(f"object {key} is not what was put", why="reading it back differs", key=key)


def offers(store: ObjectStore, identity: LogIdentity) -> Iterator[tuple[str, Tail]]:
    """Keys and contents; one that cannot be read is left alone and told."""
    for found in list(store.list(returned_prefix(identity))):
        try:
            yield found.key, decode_tail(store.get(found.key))
        except ObjectMissing:
            continue  # taken by a newer owner
        except InvalidArgument as error:
            _log.limited("an offer of returned records cannot be read", source=found.key, why=str(error))


def take_returned(uploader: Uploader, work: Path, now_us: int) -> bool:
    """Install offered objects that fit, about JOB_BYTES_MAX of them; return True if there is more to do.

    ``work``: a directory of this call alone.  Raises Fenced, errors of the store, StorageFailed.
    """
    more = False
    for key, tail in offers(uploader.store, uploader.identity):
        waiting = _fitting(tail, uploader)
        ready: list[SegmentEntry] = []
        size = 0
        while waiting and (not size or size + waiting[0].size_bytes <= JOB_BYTES_MAX):
            entry = waiting.pop(0)
            size += entry.size_bytes
            try:
                examine_returned(uploader, entry, work)
            except (Damage, ObjectMissing) as error:
                _log.limited("returned records cannot be used", source=key, why=str(error))
            else:
                ready.append(entry)
        uploader.install(filling(tail, ready, now_us))
        if waiting:
            more = True
        else:
            uploader.store.delete([key])
    return more


def _fitting(tail: Tail, uploader: Uploader) -> list[SegmentEntry]:
    manifest = uploader.manifest
    found: list[SegmentEntry] = []
    for entry in sorted(tail.entries):
        why = "" if named(manifest, entry) else objection_to(tail, entry, manifest)
        if why:
            _log.limited("returned records do not fit", source=uploader.owner.topic, why=why)
        elif not named(manifest, entry):
            found.append(entry)
    return found


def examine_returned(uploader: Uploader, entry: SegmentEntry, work: Path) -> None:
    """Read the object of ``entry`` and check that header, footer, hash and batches agree with the entry.

    Raises ObjectMissing or Damage if it cannot be installed, StorageFailed, and errors of the store.
    """
    key = segment_key(uploader.identity, entry)
    with emptied(work, f"object {key} cannot be named"):
        _examine(uploader, entry, fetched(uploader, entry, key, work))


def _examine(uploader: Uploader, entry: SegmentEntry, path: Path) -> None:
    with opened([SealedRange(path)]) as [original]:
        summary = original.summary
        flags = EntryFlag.COMPACTED * summary.compacted | EntryFlag.MERGED * summary.chained
        shown = entry_of(
            summary, original.size, entry.uploaded_us, flags=int(flags), chain_hash=original.chain_hash
        )
        if shown != entry._replace(flags=entry.flags & ~EntryFlag.HOLE_BEFORE):
            raise Damage(f"the footer of {path.name} says other things than its entry")
        if summary.identity != uploader.identity:
            raise Damage(f"{path.name} is of another partition")
        if hash_of(original.fd, entry.data_end) != entry.content_hash:
            raise Damage(f"{path.name} has other bytes than its footer says")
        if entry.record_count == entry.end_offset - entry.base_offset:  # else it was damaged on that disk
            for _ in runs_of(original):
                pass
