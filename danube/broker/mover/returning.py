"""Return of records that only this host's disk has, to partitions that another broker owns now.

A partition's directory that is not continued lies below ``returning``, named after its partition and the last
epoch in which it was appended to.  Blocking; the mover runs a round now and then:

    seal      recover the log as it is and end its last segment; nothing is appended to it any more
    upload    the segments that lie in holes of this very directory, as objects
    offer     them to the owner, in the store (:mod:`danube.wal.tier.returned`)
    remove    the directory, once a manifest names every record that it holds, or they have expired

Every step is repeated until the last one is done.  Records that the owner does not install stay on this disk.
A mover remembers its progress (:class:`Memory`), so a segment is read once.  If the owner removes an offer
without installing all of it, the offer is repeated, OFFERS_MAX times to one owner, each time with objects
read again.

A directory below ``partitions`` is *stranded* if the store has a manifest of a later ownership than its last
opening: another broker took over, and no record is appended here again.  The directory is set aside and its
records are returned in rounds, unless a worker of this broker has the partition or is about to open it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from danube.broker.mover.copies import Mover
from danube.broker.tiers.inheritance import (
    RETURNING,
    KeptOwner,
    last_log_epoch,
    read_owner,
    set_aside,
)
from danube.core.partition.tier_plan import LocalSegment
from danube.core.placement.recovered import LOG_EPOCHS
from danube.errors import Damage, DanubeError, ObjectMissing, StorageFailed, StoreDamaged
from danube.host import telemetry
from danube.wal.log.log import Log
from danube.wal.segments.holes import Hole
from danube.wal.segments.segment import LogIdentity, file_name
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.hole_changes import Tail, named
from danube.wal.tier.keys import manifest_prefix, parse_partition, returned_key
from danube.wal.tier.manifest import Manifest, SegmentEntry
from danube.wal.tier.returned import put_offer
from danube.wal.tier.sealed_files import LocalListing
from danube.wal.tier.uploader import Ownership, Uploader

OFFERS_MAX: Final = 3
_NAME: Final = re.compile(r"([0-9a-f]{16})-(0|[1-9][0-9]{0,9})-([0-9]{10})(-[0-9]+)?")
_log = telemetry.events("returning")


class Aside(NamedTuple):
    """A directory that was set aside."""

    directory: Path
    identity: LogIdentity
    kept: KeptOwner


class Outcome(NamedTuple):
    """Outcome of one round: offered, waiting for the owner, removed, or left for an operator."""

    word: str
    why: str = ""


_REMOVED: Final = Outcome("removed")


@dataclass(slots=True)
class Memory:
    """Progress of this process with one directory that was set aside."""

    log_end: int = -1  # end of the sealed log; -1 before
    entries: dict[int, SegmentEntry] = field(default_factory=dict)  # uploaded segments, by base offset
    damaged: dict[int, str] = field(default_factory=dict)  # damaged segments by base offset, with reasons
    offered: tuple[int, tuple[int, ...]] | None = None  # the manifest's epoch, and offered base offsets
    offer_count: int = 0
    told: Outcome | None = None


def asides(data_dir: Path) -> list[Aside]:
    """Return all directories that were set aside and have their file ``owner``."""
    try:
        paths = sorted((data_dir / RETURNING).iterdir())
    except FileNotFoundError:
        return []
    found: list[Aside] = []
    for path in paths:
        match, kept = _NAME.fullmatch(path.name), read_owner(path)
        if match is not None and kept is not None:
            found.append(Aside(path, LogIdentity(int(match[1], 16), int(match[2])), kept))
    return found


def give_back(store: ObjectStore, aside: Aside, memory: Memory) -> Outcome:
    """Run one round for one directory; errors of the store and the disk are raised."""
    # Read this before the manifest: an offer is removed when all fitting segments are installed.
    waiting = store.head(_offer_key(aside)) is not None
    manifest = newest_manifest(store, aside.identity)
    if manifest is None:
        return Outcome("staying", "the store has no manifest of the partition")
    try:
        if memory.log_end < 0:
            memory.log_end = _seal(aside)
        segments = _segments(aside)
    except OSError as error:
        raise StorageFailed(f"{aside.directory} cannot be read", why=str(error)) from error
    kept = aside.kept
    first, last = kept.first_epoch * LOG_EPOCHS, last_log_epoch(kept.last_epoch)
    tail = Tail(kept.broker_id, first, last, memory.log_end, [])
    holes = [hole for hole in manifest.all_holes() if tail.owns(hole)]
    missing = [segment for segment in segments if not _kept(manifest, segment)]
    if any(hole.broker_id or _lying_in(hole, missing) for hole in holes):
        wanted = [one for one in segments if _wanted(manifest, tail, one.base_offset)]
        return _offer(store, aside, memory, manifest, tail, wanted, waiting)
    if missing:
        start, end = missing[0].base_offset, missing[-1].end_offset
        return Outcome("staying", f"offsets {start} to {end} are in no manifest, and no hole waits for them")
    shutil.rmtree(aside.directory)
    return Outcome("removed")


def _offer(
    store: ObjectStore, aside: Aside, memory: Memory, manifest: Manifest, tail: Tail,
    wanted: list[LocalSegment], waiting: bool,
) -> Outcome:  # fmt: skip
    """Offer segments in open holes, unless they are offered already, or this owner has refused them."""
    offered = manifest.epoch, tuple(one.base_offset for one in wanted)
    if memory.offered != offered:
        memory.offered, memory.offer_count = offered, 0
    elif waiting:
        return Outcome("offered")
    elif memory.offer_count >= OFFERS_MAX:
        return _refused(memory, wanted)
    else:  # the offer was removed, but not all was installed: an object may differ from the local file
        memory.entries.clear()
    entries = _uploaded(store, aside, manifest, tail, wanted, memory)
    put_offer(store, aside.identity, msgspec.structs.replace(tail, rows=[tuple(one) for one in entries]))
    memory.offer_count += 1
    return Outcome("offered")


def _refused(memory: Memory, wanted: list[LocalSegment]) -> Outcome:
    damage = next(iter(memory.damaged.values()), "")
    start, end = (wanted[0].base_offset, wanted[-1].end_offset) if wanted else (0, 0)
    return Outcome(
        "staying",
        f"the owner cannot use offsets {start} to {end}: {damage or 'its log says why'};"
        " `danube topics accept-loss` lets subscriptions pass them",
    )


def newest_manifest(store: ObjectStore, identity: LogIdentity) -> Manifest | None:
    """Return the manifest in force, found as a reader does; None without one."""
    keys = [found.key for found in store.list(manifest_prefix(identity))]
    return Manifest.decode(store.get(keys[-1])) if keys else None


def _offer_key(aside: Aside) -> str:
    return returned_key(aside.identity, aside.kept.broker_id, last_log_epoch(aside.kept.last_epoch))


def _seal(aside: Aside) -> int:
    """Recover the log and seal its last segment; return the log's end."""
    log = Log.open(aside.directory, aside.identity, last_log_epoch(aside.kept.last_epoch))
    log_end = log.log_end
    log.close()
    return log_end


def _segments(aside: Aside) -> list[LocalSegment]:
    """Return the sealed segments with records."""
    found = LocalListing(aside.directory).refresh()
    return [one for one in found if one.sealed and one.end_offset > one.base_offset]


def _wanted(manifest: Manifest, tail: Tail, offset: int) -> bool:
    """Return whether the offset lies in a hole that this directory may fill."""
    hole = manifest.hole_at(offset)
    return hole is not None and tail.owns(hole)


def _uploaded(
    store: ObjectStore, aside: Aside, manifest: Manifest, tail: Tail, wanted: list[LocalSegment],
    memory: Memory,
) -> list[SegmentEntry]:  # fmt: skip
    """Return the entries of these segments, now objects; report a damaged one once and leave it out."""
    owner = Ownership(manifest.topic, aside.identity, tail.last_epoch, aside.directory)
    uploader = Uploader(store, owner)
    for base_offset in [one.base_offset for one in wanted]:
        if base_offset in memory.entries or base_offset in memory.damaged:
            continue
        path = aside.directory / file_name(base_offset)
        try:
            entry = uploader.upload(path, resumed=True)
        except StoreDamaged as error:  # the object is damaged, not the file: the next offer puts it again
            _log.limited("an object is not what was put", source=str(path), why=str(error))
        except Damage as error:  # only this segment is damaged: the others can be returned
            memory.damaged[base_offset] = str(error)
            hint = "put an intact copy of the file in its place and start the broker again, or give it up"
            _log.limited("a segment cannot come back", source=str(path), why=str(error), hint=hint)
        else:
            if entry is not None:
                memory.entries[base_offset] = entry
    return [memory.entries[one.base_offset] for one in wanted if one.base_offset in memory.entries]


def _lying_in(hole: Hole, segments: list[LocalSegment]) -> bool:
    """Return whether a segment can fill the hole; if it has no owner, no disk without one can close it."""
    return any(hole.start <= segment.base_offset < hole.end for segment in segments)


def _kept(manifest: Manifest, segment: LocalSegment) -> bool:
    return segment.end_offset <= manifest.start_offset or named(manifest, segment)


def round_of(store: ObjectStore, data_dir: Path, memories: dict[str, Memory]) -> dict[str, Outcome]:
    """Run one round for all directories, by name; a failure is reported once and tried again later.

    ``memories``: by name, for the rounds of one process; for one round at a time.
    """
    outcomes: dict[str, Outcome] = {}
    for aside in asides(data_dir):
        name = aside.directory.name
        memory = memories.setdefault(name, Memory())
        try:
            outcome = give_back(store, aside, memory)
        except (DanubeError, OSError) as error:
            outcome = Outcome("failed", str(error))
        outcomes[name] = outcome
        if outcome.word in ("staying", "failed") and outcome != memory.told:
            _log.limited("records stay on this disk", source=name, why=outcome.why)
        memory.told = outcome
    for name in [name for name in memories if outcomes.get(name, _REMOVED) == _REMOVED]:
        del memories[name]
    return outcomes


ROUND_S: Final = 15.0


class Returns:
    """Runs the rounds of one mover.

    ``held`` returns whether a worker has a partition, or its directory is being prepared for one.
    """

    def __init__(self, mover: Mover, data_dir: Path, held: Callable[[LogIdentity], bool]) -> None:
        self._mover = mover
        self._data_dir = data_dir
        self._held = held
        self._memories: dict[str, Memory] = {}

    def begin(self) -> None:
        """Start the rounds; called once the store is known to be this broker's."""
        self._mover.block(partial(stranded, self._mover.store, self._data_dir), self._found)

    def _found(self, directories: Any, error: DanubeError | None) -> None:
        # The check and the rename run on the mover's loop, so no partition becomes held in between.
        for identity, directory, kept in directories or ():
            if not self._held(identity) and read_owner(directory) == kept:
                try:
                    set_aside(directory, self._data_dir)
                except OSError as failure:
                    _log.limited("a directory is not set aside", source=str(directory), why=str(failure))
        if error is not None:
            _log.limited("stranded records are not looked for", source="round", why=str(error))
        self._mover.block(partial(round_of, self._mover.store, self._data_dir, self._memories), self._ended)

    def _ended(self, outcomes: Any, error: DanubeError | None) -> None:
        for name, outcome in (outcomes or {}).items():
            if outcome.word == "removed":
                _log.info("a partition's directory is not needed any more", directory=name)
        if error is not None:
            _log.limited("nothing is given back", source="round", why=str(error))
        self._mover.call_later(ROUND_S, self.begin)


def stranded(store: ObjectStore, data_dir: Path) -> list[tuple[LogIdentity, Path, KeptOwner]]:
    """Return directories whose partitions another owner has continued; called in a thread."""
    root = data_dir / "partitions"
    found: list[tuple[LogIdentity, Path, KeptOwner]] = []
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise StorageFailed(f"{root} cannot be read", why=str(error)) from None
    for name in names:
        identity = parse_partition(name)
        kept = read_owner(root / name) if identity is not None else None
        if identity is None or kept is None:
            continue
        try:
            manifest = newest_manifest(store, identity)
        except (Damage, ObjectMissing) as error:  # replaced meanwhile, or damaged, which others report
            _log.limited("a manifest cannot be read", source=name, why=str(error))
            continue
        if manifest is not None and manifest.epoch // LOG_EPOCHS > kept.last_epoch:
            found.append((identity, root / name, kept))
    return found
