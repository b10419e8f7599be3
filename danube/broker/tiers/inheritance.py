"""Opening a partition that another host owned before: which records count, and where its log continues.

Blocking; the mover runs it before the partition is opened, because it alone speaks to the store.  Every
step can be repeated, and a crash between two of them loses nothing:

1.  A local directory is *continued* if the reservation was made for it and no hole was named over it since.
    Only this directory has every record.  If another broker owned the partition in between, a manifest
    under the new epoch keeps that broker from naming a hole later.  A directory that may have lost records
    in a crash of the machine is not continued, because consumers may have seen their offsets.  After
    metadata was lost (:mod:`danube.core.placement.recovered`) the reservation has no broker, so no directory
    is continued.
2.  Any other local directory is set aside below ``returning``, for its tail to come back
    (:mod:`danube.broker.mover.returning`).  It is never appended to.
3.  A manifest under the new epoch fences the former owner.  It names a hole for offsets that the former
    owner may have given and the store does not have.  No record is appended before it is in force.
4.  A directory is made from the store's content beside its final path, and then renamed: an empty log that
    continues behind all given offsets, the producers and the cursors.

The file ``owner`` in a partition's directory names its broker and the consecutive epochs in which this broker
has appended.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from danube.broker.tiers.restore import restore_cursors, restore_producers
from danube.core.cluster.commands import Reservation
from danube.core.placement.recovered import LOG_EPOCHS
from danube.errors import Damage, ObjectMissing, StorageFailed, StoreUnavailable
from danube.host import files, telemetry
from danube.wal.recovery.carry import create_empty
from danube.wal.segments.segment import base_offset_of
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.hole_changes import holing
from danube.wal.tier.manifest import Manifest
from danube.wal.tier.uploader import Ownership, Uploader

OWNER_FILE: Final = "owner"
RETURNING: Final = "returning"
INHERITING: Final = "inheriting"
_FILE_BYTES_MAX: Final = 4_096
_log = telemetry.events("inheritance")


class KeptOwner(msgspec.Struct, frozen=True):
    """The file ``owner``: epochs of the ownership, not of the log.

    ``incarnation`` is that of the worker that opened it last; 0 if a former version wrote the file.
    """

    broker_id: int
    first_epoch: int
    last_epoch: int
    incarnation: int = 0


class Heir(NamedTuple):
    """Broker that opens the partition: ``owner`` has the epoch of its log, ``epoch`` is the ownership's.

    ``reservation`` is the metadata's reservation at that epoch.  ``incarnation`` is that of its worker.  The
    last writes of incarnations before ``lost_before`` may have been lost with the machine.
    """

    owner: Ownership
    broker_id: int
    epoch: int
    reservation: Reservation
    incarnation: int = 0
    lost_before: int = 0


class Inherited(NamedTuple):
    """Result of an inheritance: whether the local log is continued, else where the new log begins."""

    continued: bool
    start: int
    hole_end: int  # end of the hole before the new log; 0 without a hole


def last_log_epoch(epoch: int) -> int:
    """Return the highest epoch of a log in this epoch of its ownership."""
    return epoch * LOG_EPOCHS + LOG_EPOCHS - 1


def read_owner(directory: Path) -> KeptOwner | None:
    """Return the owner that the directory names; None without a readable file, so it is not continued."""
    try:
        data = files.read_bounded(directory / OWNER_FILE, _FILE_BYTES_MAX)
        return msgspec.json.decode(data, type=KeptOwner)
    except (OSError, msgspec.DecodeError):
        return None


def write_owner(directory: Path, kept: KeptOwner) -> None:
    files.replace_or_overwrite(directory / OWNER_FILE, msgspec.json.encode(kept) + b"\n")


def holds_log(directory: Path) -> bool:
    """Return whether the directory has a segment file."""
    try:
        return any(base_offset_of(name) is not None for name in os.listdir(directory))
    except FileNotFoundError:
        return False


def continues(kept: KeptOwner | None, holds: bool, heir: Heir, manifest: Manifest) -> bool:
    """Return whether the local directory has every record that was ever given an offset.  Pure."""
    reservation = heir.reservation
    if reservation.end and not reservation.broker_id:  # commands were lost: others may have given more
        return False
    if kept is None:  # it was never opened in a cluster, so it counts only without a reservation
        return not reservation.broker_id and (holds or not manifest.uploaded_end)
    if kept.broker_id != heir.broker_id or (manifest.uploaded_end and not holds):
        return False
    mine = range(kept.first_epoch, kept.last_epoch + 1)
    if reservation.broker_id and (reservation.broker_id != heir.broker_id or reservation.epoch not in mine):
        return False
    if reservation.broker_id and kept.incarnation < heir.lost_before:
        return False
    return not any(
        hole.open and hole.broker_id == heir.broker_id and hole.epoch // LOG_EPOCHS in mine
        for hole in manifest.all_holes()
    )


def inherit(store: ObjectStore, heir: Heir, data_dir: Path, now_us: int) -> Inherited:
    """Prepare the partition's directory from which the log is to be opened.

    Raises Fenced if there is a newer owner, errors of the store, StoreDamaged, StorageFailed.
    """
    try:
        return _inherit(store, heir, data_dir, now_us)
    except OSError as error:
        raise StorageFailed(f"{heir.owner.topic} cannot be taken over", why=str(error)) from error


def _inherit(store: ObjectStore, heir: Heir, data_dir: Path, now_us: int) -> Inherited:
    directory = heir.owner.directory
    kept, holds = read_owner(directory), holds_log(directory)
    uploader = Uploader(store, heir.owner)
    manifest = uploader.load()
    if kept is not None and kept.last_epoch + 1 < heir.epoch and continues(kept, holds, heir, manifest):
        # This stops a late owner in between from naming a hole at offsets that this log will give.
        manifest = uploader.install(lambda known: known)
    if continues(kept, holds, heir, manifest):
        files.make_directory(directory)
        first = kept.first_epoch if kept is not None else heir.epoch
        write_owner(directory, KeptOwner(heir.broker_id, first, heir.epoch, heir.incarnation))
        return Inherited(True, 0, 0)
    set_aside(directory, data_dir)
    made = data_dir / INHERITING / directory.name
    shutil.rmtree(made, ignore_errors=True)
    files.make_directory(made)
    manifest = _name_hole(store, heir, made, now_us)
    _fill(store, heir, manifest, made)
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.rename(made, directory)
    files.fsync_directory(directory.parent)
    last = manifest.all_holes()[-1:]
    hole_end = last[0].end if last and last[0].open and last[0].end == manifest.uploaded_end else 0
    _log.info("partition inherited", topic=heir.owner.topic, start=manifest.uploaded_end, hole_end=hole_end)
    return Inherited(False, manifest.uploaded_end, hole_end)


def set_aside(directory: Path, data_dir: Path) -> None:
    """Keep a partition's directory that is not continued until its tail has come back."""
    if not directory.exists():
        return
    kept = read_owner(directory)
    if kept is None and not holds_log(directory):
        shutil.rmtree(directory)
        return
    # Also without a segment: offsets were reserved for it, and only it shows that none were given.
    epoch = kept.last_epoch if kept is not None else 0
    target = data_dir / RETURNING / f"{directory.name}-{epoch:010d}"
    files.make_directory(target.parent)
    number = 0
    while target.exists():
        number += 1
        target = target.with_name(f"{directory.name}-{epoch:010d}-{number}")
    files.rename(directory, target)
    files.fsync_directory(target.parent)
    files.fsync_directory(directory.parent)


def _name_hole(store: ObjectStore, heir: Heir, made: Path, now_us: int) -> Manifest:
    """Put a manifest of the new epoch, behind whose end the log begins; it stops all lower epochs.

    Also without a hole, because a former owner could still fill another hole, or merge, unnoticed.
    """
    reservation = heir.reservation
    uploader = Uploader(store, heir.owner._replace(directory=made))
    uploader.load()
    held_epoch = min(last_log_epoch(reservation.epoch), heir.owner.epoch)
    hole = holing(reservation.end, reservation.broker_id, held_epoch, now_us)
    return uploader.install(lambda manifest: hole(manifest) or manifest)


def _fill(store: ObjectStore, heir: Heir, manifest: Manifest, made: Path) -> None:
    """Fill the directory with the start of a log, its producers and its subscriptions."""
    owner, end = heir.owner, manifest.uploaded_end
    created_us = manifest.entry(len(manifest) - 1).last_append_us if len(manifest) else 0
    create_empty(made, owner.identity, owner.epoch, end, created_us, owner.log_id)
    try:
        restore_producers(store, owner, manifest, made)
    except (Damage, ObjectMissing) as error:  # one bad object must not keep the partition closed
        _log.warning("producers are not what they were", topic=owner.topic, why=str(error))
    try:
        restore_cursors(store, owner, manifest, made)
    except Damage as error:
        _log.warning("cursors are not what they were", topic=owner.topic, why=str(error))
    except ObjectMissing as error:  # a newer copy has replaced it since the listing
        raise StoreUnavailable(f"cursors of {owner.topic} cannot be read now", why=str(error)) from error
    write_owner(made, KeptOwner(heir.broker_id, heir.epoch, heir.epoch, heir.incarnation))
    files.fsync_directory(made)
