"""One partition's objects: put, read back, name in a manifest, confirm.  Blocking, for the mover's threads.

The order of steps makes every crash safe.  An object is read back before a manifest names it.  The manifest
is read back before it is reported to the owner.  Only then may the owner delete the local file.  A crash
leaves an object without a manifest (swept later) or a manifest that was not reported (found at the next
load).

Manifests of two owners are never both in force.  A manifest's name begins with its owner's epoch, and the
largest name is in force.  Before its first manifest an owner puts a claim, lists, and continues from the
newest manifest in that list.  After each manifest it lists again and stops at a newer owner's claim or
manifest.  So an older owner sees the claim before it reports its manifest, or the newer owner has continued
from that manifest.

One generation is never given to two contents.  An install whose end is unknown is repeated with the same
bytes, and a mover that starts again skips one generation more than the one before it did, because a put of
the old process may still be on its way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from danube.core.batch.checksum import content_hasher
from danube.core.partition.tier_plan import superseded
from danube.errors import Damage, DanubeError, Fenced, ObjectMissing, StorageFailed, StoreDamaged
from danube.host import files, telemetry
from danube.host.clock import wall_us
from danube.wal.segments.holes import Hole
from danube.wal.segments.segment import (
    HEADER_BYTES,
    NO_LOG,
    STRANGER,
    SUMMARY_BYTES,
    LogIdentity,
    Summary,
    base_offset_of,
    read_header,
    read_summary,
)
from danube.wal.stores.objects import AS_USUAL, ObjectStore, Progress, Putting
from danube.wal.tier.keys import (
    KeyKind,
    manifest_key,
    owner_key,
    parse_key,
    partition_prefix,
    segment_key,
)
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry, entry_of
from danube.wal.tier.sealed_files import SealedFile, examine

READ_BACK_BYTES: Final = 8 << 20
COPY_BYTES_MAX: Final = 256 << 20
_NONE: Final = (0, 0)
_REWRITTEN: Final = EntryFlag.MERGED | EntryFlag.COMPACTED

Name = tuple[int, int]  # epoch and generation of a manifest
Change = Callable[[Manifest], Manifest | None]

_log = telemetry.events("mover")


class Ownership(NamedTuple):
    """Owner that may change a partition's manifest: the one with the highest epoch.

    ``log_id``: of danube.wal.segments.segment, if it is known.
    """

    topic: str
    identity: LogIdentity
    epoch: int
    directory: Path
    log_id: bytes = NO_LOG


class _Listed(NamedTuple):
    """Listing of the store: manifests, ascending, and the epochs of the owners that have made a claim."""

    names: list[Name]
    owners: list[int]

    @property
    def newest(self) -> Name:
        return max(self.names, default=_NONE)

    @property
    def owner(self) -> int:
        return max(self.owners, default=0)


class Uploader:
    """The objects of one partition for one owner.

    ``upload`` may run in several threads; everything else is for one thread at a time.  ``manifest`` is the
    newest one that was confirmed (before load(): the local copy of it, or an empty one). ``copy_name``: file
    in the partition's directory with a copy of that manifest, so this owner knows its installed segments even
    if the store is away or its listing lags.  ``rests``: makes a function for each upload, which is called
    after each piece that was read, put or read back, and may pause.
    """

    def __init__(
        self,
        store: ObjectStore,
        owner: Ownership,
        *,
        start_count: int = 0,
        copy_name: str = "manifest",
        rests: Callable[[], Progress] = lambda: lambda _: None,
    ) -> None:
        self.store = store
        self.owner = owner
        self.start_count = start_count
        self._rests = rests
        self._skip = 1 + start_count
        self._copy = owner.directory / copy_name
        self._pending: Manifest | None = None  # put was called; its result is not known
        self._claimed = False  # the manifest that we continue was listed after our claim was there
        self.manifest = self._read_copy() or Manifest.empty(owner.topic, owner.identity, owner.epoch)

    @property
    def identity(self) -> LogIdentity:
        return self.owner.identity

    @property
    def unsettled(self) -> bool:
        """Whether a manifest was put and is not confirmed: the next install() repeats it."""
        return self._pending is not None

    # -- the newest manifest ----------------------------------------------------------------------

    def load(self, log_start: int = 0) -> Manifest:
        """Read the newest manifest; nothing is written.

        Raises Fenced if there is a newer owner's manifest, Damage if the manifest cannot be this partition's.
        """
        listed = self._list()
        newest = listed.newest
        self._check_newest(listed)
        copy = self._own_copy()
        if copy is not None and _name(copy) > newest:
            # The store forgot it or lists it late.  It was confirmed, so it is true; say it again soon.
            _log.warning(
                "the store lists no manifest that was installed", topic=self.owner.topic, key=self._key(copy)
            )
            self.manifest = copy
        elif newest == _NONE:
            owner = self.owner
            if log_start:  # so it was when retention ran without a store; else the store has lost it
                facts = {"topic": owner.topic, "start": 0, "end": log_start}
                _log.warning("no object and no file holds the beginning of a log", **facts)
            self.manifest = Manifest.empty(owner.topic, owner.identity, owner.epoch, log_start)
        else:
            self.manifest = self._get(newest, copy)
            self._refuse_foreign(self.manifest)
        self._claimed = listed.owner == self.owner.epoch
        return self.manifest

    def _own_copy(self) -> Manifest | None:
        """The local copy, unless another broker's was put there."""
        copy = self._read_copy()
        owner = self.owner
        why = why_foreign(copy, owner.directory, self.store, owner.log_id) if copy is not None else ""
        if why:
            _log.error("the copy of a manifest is not used", topic=owner.topic, file=str(self._copy), why=why)
            return None
        return copy

    def _refuse_foreign(self, manifest: Manifest) -> None:
        why = why_foreign(manifest, self.owner.directory, self.store, self.owner.log_id)
        if why:
            key = self._key(manifest)
            raise StoreDamaged(
                f"manifest {key} is another broker's, whose topic has the same name and id", why=why,
                hint="use another prefix, or put the broker's own manifest and objects back", key=key,
            )  # fmt: skip

    def _get(self, name: Name, copy: Manifest | None) -> Manifest:
        key = manifest_key(self.identity, *name)
        try:
            manifest = Manifest.decode(self.store.get(key))
        except Damage as error:
            if copy is None or _name(copy) != name:
                raise StoreDamaged(
                    f"manifest {key} is damaged", why=error.what, hint="see `danube verify`", key=key
                ) from None
            _log.warning("a damaged manifest is replaced by the local copy", key=key, why=error.what)
            self.store.put(key, copy.encode())
            return copy
        found = (manifest.identity, manifest.topic, _name(manifest))
        if found != (self.identity, self.owner.topic, name):
            raise StoreDamaged(
                f"manifest {key} is of {manifest.topic}",
                why=f"this is {self.owner.topic}: the data of another broker, or objects were moved",
                hint="use another prefix, or restore the broker from the store",
                key=key,
            )
        return manifest

    def _list(self) -> _Listed:
        """All manifests and claims of the partition."""
        prefix = partition_prefix(self.identity)
        names: list[Name] = []
        owners: list[int] = []
        # Segments and cursors are before "m" in the order of names.
        for found in self.store.list(prefix, after=prefix + "m"):
            parsed = parse_key(found.key)
            if parsed is not None and parsed.kind is KeyKind.MANIFEST:
                names.append((parsed.epoch, parsed.generation))
            elif parsed is not None and parsed.kind is KeyKind.OWNER:
                owners.append(parsed.epoch)
        return _Listed(names, owners)

    def _check_newest(self, listed: _Listed, installed: Name | None = None) -> None:
        """Fenced when a newer owner is there; ``installed``: when that one is not the newest manifest."""
        epoch, newest = max(listed.owner, listed.newest[0]), listed.newest
        if epoch > self.owner.epoch or (installed is not None and newest > installed):
            raise Fenced(
                f"{self.owner.topic} has a newer owner",
                why=f"the store has epoch {epoch} and manifest {newest}, not {self.owner.epoch}",
                hint="nothing more is uploaded by this one",
                epoch=epoch,
            )

    def _claim(self) -> None:
        """Say that this owner is at work, and go on from the newest manifest that is there after that."""
        self.store.put(owner_key(self.identity, self.owner.epoch), b"")
        known = _name(self.manifest) if self.manifest.generation else _NONE  # generation 0 is in no store
        listed = self._list()
        self._check_newest(listed)
        if listed.newest > known:
            self.load(self.manifest.start_offset)
        self._claimed = True

    def _key(self, manifest: Manifest) -> str:
        return manifest_key(self.identity, manifest.epoch, manifest.generation)

    # -- segments ---------------------------------------------------------------------------------

    def upload(self, path: Path, *, resumed: bool = False, how: Putting = AS_USUAL) -> SegmentEntry | None:
        """Put one sealed segment and read it back; return its entry, or None if the file is gone.

        ``resumed``: the object may exist from an earlier attempt; then it is only read back.  Raises
        StoreDamaged if the object differs from the file, Damage if the local file differs from its footer.
        """
        try:
            rest = self._rests()
            sealed = examine(path, self.identity, rest)
            refuse_stranger(path, self.owner.log_id)
            key = segment_key(self.identity, sealed.summary)
            if not (resumed and self._same(key, sealed, rest)):
                self.store.put_file(key, path, how._replace(progress=rest))
                if not self._same(key, sealed, rest):
                    raise StoreDamaged(
                        f"object {key} is not what was uploaded",
                        why="reading it back gives other bytes",
                        hint="it is uploaded again; the local file stays",
                        key=key,
                    )
        except FileNotFoundError:
            return None
        except StorageFailed:
            if not path.exists():
                return None
            raise
        flags = EntryFlag.COMPACTED * sealed.summary.compacted | EntryFlag.MERGED * sealed.summary.chained
        return entry_of(
            sealed.summary, sealed.size_bytes, wall_us(), flags=int(flags), chain_hash=sealed.chain_hash
        )

    def fetch(self, key: str, size_bytes: int, path: Path) -> None:
        """Put the segment under ``key`` into a new file; Damage where it says that it is of another log."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.store.get_to(key, 0, size_bytes, fd, 0)
        finally:
            os.close(fd)
        refuse_stranger(path, self.owner.log_id)

    def _same(self, key: str, sealed: SealedFile, rest: Progress) -> bool:
        """Whether the object is the file, byte for byte; bounded memory."""
        info = self.store.head(key)
        if info is None or info.size != sealed.size_bytes:
            return False
        hasher = content_hasher()
        for start in range(0, sealed.size_bytes, READ_BACK_BYTES):
            piece = self.store.get(key, start, min(start + READ_BACK_BYTES, sealed.size_bytes))
            hasher.update(piece)
            rest(len(piece))
        return bool(hasher.digest() == sealed.whole_hash)

    # -- manifests --------------------------------------------------------------------------------

    def install(self, change: Change) -> Manifest:
        """Make ``change`` the truth: put, read back, list.  Returns the manifest in force.

        ``change`` gets the manifest in force and returns the next one, or None when there is nothing to do.
        After any error but Fenced the same install may be tried again, with this change or a larger one.
        """
        if self._pending is not None:
            self._settle(self._pending)
        changed = change(self._taken_over)
        if changed is not None and not self._claimed:
            self._claim()
            changed = change(self._taken_over)
        if changed is None:
            return self.manifest
        generation = self.manifest.generation + self._skip
        self._pending = replace(changed, generation=generation)
        return self._settle(self._pending)

    @property
    def _taken_over(self) -> Manifest:
        """The manifest in force as this owner's: no segment in it may be of a later epoch than it is."""
        return replace(self.manifest, epoch=self.owner.epoch)

    def _settle(self, manifest: Manifest) -> Manifest:
        data, key = manifest.encode(), self._key(manifest)
        self.store.put(key, data)
        if self.store.get(key) != data:
            raise StoreDamaged(f"manifest {key} is not what was put", why="reading it back differs", key=key)
        listed = self._list()
        try:
            self._check_newest(listed, _name(manifest))
        except Fenced:
            self._pending = None
            raise
        self.manifest, self._pending, self._skip = manifest, None, 1
        self._write_copy(data)
        self._prune(listed)
        return manifest

    def _prune(self, listed: _Listed) -> None:
        """Delete manifests and claims that are not kept; failures are retried at the next install."""
        keys = superseded([manifest_key(self.identity, *name) for name in listed.names])
        keys += [owner_key(self.identity, epoch) for epoch in listed.owners if epoch < self.owner.epoch]
        try:
            self.store.delete(keys)
        except DanubeError as error:
            _log.debug("old manifests stay", topic=self.owner.topic, why=str(error))

    # -- the local copy ---------------------------------------------------------------------------

    def _read_copy(self) -> Manifest | None:
        """Return the manifest that this host last installed; None without one that can be read."""
        try:
            manifest = Manifest.decode(files.read_bounded(self._copy, COPY_BYTES_MAX))
        except (OSError, Damage):
            return None
        mine = (manifest.identity, manifest.topic) == (self.identity, self.owner.topic)
        return manifest if mine and manifest.epoch <= self.owner.epoch else None

    def _write_copy(self, data: bytes) -> None:
        try:
            files.replace_durably(self._copy, data)
        except OSError as error:  # the store has it; the copy only guards against a listing that lags
            _log.warning("the copy of a manifest cannot be written", file=str(self._copy), why=str(error))

    # -- deleting ---------------------------------------------------------------------------------

    def remove(self, keys: Iterable[str]) -> None:
        """Delete objects that this owner removed from its manifest; named ones stay.

        Raises Fenced if a newer owner may need them, StoreDamaged if their replacement is missing.
        """
        manifest = self.manifest
        self._check_newest(self._list(), _name(manifest))
        doomed = [key for key in keys if key not in self.named()]
        places: set[int] = set()
        for key in doomed:
            parsed = parse_key(key)
            if parsed is not None and parsed.end_offset > manifest.start_offset:
                places |= set(manifest.plan(parsed.base_offset, parsed.end_offset))
        for place in sorted(places):
            entry = manifest.entry(place)
            key = segment_key(self.identity, entry)
            info = self.store.head(key)
            if info is None or info.size != entry.size_bytes:
                raise StoreDamaged(
                    f"object {key} is missing or has another size",
                    why="so the objects that it replaced are kept",
                    hint="see `danube verify`",
                    key=key,
                )
        self.store.delete(doomed)

    def named(self) -> set[str]:
        """Keys of all objects that the manifest in force names, or one that is being installed does."""
        manifests = [self.manifest] if self._pending is None else [self.manifest, self._pending]
        return {
            segment_key(self.identity, one.entry(index)) for one in manifests for index in range(len(one))
        }


# -- whose a manifest or a segment is ---------------------------------------------------------------
#
# A manifest does not name its log, but its segments do: a local segment with the same offsets has the same
# content hash, and the header of an object has the id of its log.


def why_foreign(manifest: Manifest, directory: Path, store: ObjectStore, log_id: bytes) -> str:
    """Return why a manifest is of another log; empty if it is not, or cannot be told.

    Asks the store for one header at most, and only where no file tells.
    """
    if log_id == NO_LOG or not len(manifest):
        return ""
    for path in _segments_in(directory):
        entry = _entry_of(manifest, path)
        summary = _summary_of(path) if entry is not None else None
        if entry is None or summary is None or summary.identity != manifest.identity:
            continue
        if summary.end_offset == entry.end_offset and not summary.compacted:
            same = summary.content_hash == entry.content_hash
            return "" if same else f"it names other records than {path.name} holds"
    return _object_tells(manifest.identity, manifest.entry(len(manifest) - 1), store, log_id)


def refuse_stranger(path: Path, log_id: bytes) -> None:
    """Raise Damage where the segment in a file says that it is of another log."""
    if log_id == NO_LOG:
        return
    data, _ = files.read_start(path, HEADER_BYTES)
    try:
        header = read_header(data)
    except Damage:
        return  # the reader of its batches reports it
    if header.stranger_to(log_id):
        raise Damage(STRANGER, file=path.name)


def _segments_in(directory: Path) -> list[Path]:
    try:
        names = files.list_names(directory)
    except FileNotFoundError:
        return []
    return [directory / name for name in sorted(names) if base_offset_of(name) is not None]


def _entry_of(manifest: Manifest, path: Path) -> SegmentEntry | None:
    """The entry that begins where a file does, unless it was made anew since it was a file."""
    base_offset = base_offset_of(path.name) or 0
    number = manifest.find(base_offset)
    if number >= len(manifest):
        return None
    entry = manifest.entry(number)
    return entry if entry.base_offset == base_offset and not entry.flags & _REWRITTEN else None


def _summary_of(path: Path) -> Summary | None:
    """Return the summary of a sealed file; None if it is not sealed or cannot be read."""
    try:
        fd = files.open_existing(path, writable=False)
        try:
            size = files.size_of(fd)
            return read_summary(files.pread(fd, SUMMARY_BYTES, max(0, size - SUMMARY_BYTES)), size)
        finally:
            files.close(fd)
    except (OSError, Damage):
        return None


def _object_tells(identity: LogIdentity, entry: SegmentEntry, store: ObjectStore, log_id: bytes) -> str:
    try:
        header = read_header(store.get(segment_key(identity, entry), 0, HEADER_BYTES))
    except (ObjectMissing, Damage):
        return ""  # told where it is read
    return STRANGER if header.stranger_to(log_id) else ""


def _name(manifest: Manifest) -> Name:
    return manifest.epoch, manifest.generation


def entries_end(manifest: Manifest) -> int:
    """Offset behind the last entry or hole; 0 if there is none (uploaded_end knows the start)."""
    return manifest.named_end


def adding(entries: Iterable[SegmentEntry], holes: Iterable[Hole] = (), left_end: int = 0) -> Change:
    """Return the change that adds segments at the end, without those that the manifest has already.

    ``holes`` are ranges that their host knows to be in no segment.  A hole is added with the segment behind
    it.  A log that is leaving its host may end with a hole, at ``left_end``; that hole is added when all
    offsets below it are.
    """

    def change(manifest: Manifest) -> Manifest | None:
        end = entries_end(manifest)
        held_end = int(manifest.entries["end_offset"][-1]) if len(manifest) else 0
        added: list[SegmentEntry] = []
        for entry in sorted(entries):
            if entry.end_offset <= max(end, manifest.start_offset):
                continue
            if entry.base_offset < end:
                raise Damage(
                    f"offsets {entry.base_offset} to {entry.end_offset} of {manifest.topic} overlap it",
                    why=f"the store holds records up to {end} in other segments",
                    hint="see `danube verify`; nothing was changed",
                )
            begin = max(held_end, manifest.start_offset)
            flag = EntryFlag.HOLE_BEFORE if entry.base_offset > begin else 0
            added.append(entry._replace(flags=entry.flags & ~EntryFlag.HOLE_BEFORE | flag))
            end = held_end = entry.end_offset
        known_end = max(entries_end(manifest), manifest.start_offset)
        last_base, log_end = (
            (added[-1].base_offset, added[-1].end_offset) if added else (known_end, known_end)
        )
        for hole in holes:  # those that nothing lies behind, so far
            log_end = hole.end if hole.start <= log_end < hole.end else log_end
        passed = [
            hole._replace(start=max(hole.start, known_end))
            for hole in holes
            if known_end < hole.end and (hole.end <= last_base or log_end == left_end)
        ]
        if not added and not passed:
            return None
        if not passed:
            return manifest.with_added(*added)
        return manifest.with_holes([*manifest.all_holes(), *passed], added)

    return change


def trimming(start_offset: int) -> Change:
    """Return the change that drops expired records, below ``start_offset``."""

    def change(manifest: Manifest) -> Manifest | None:
        return manifest.trimmed(start_offset) if start_offset > manifest.start_offset else None

    return change


def replacing(merged: SegmentEntry, sources: Iterable[SegmentEntry]) -> Change:
    """The change that names ``merged`` instead of ``sources``; nothing when these are not all named now."""
    hashes = [source.content_hash for source in sources]

    def change(manifest: Manifest) -> Manifest | None:
        first = manifest.find(merged.base_offset)
        named = manifest.entries["content_hash"][first : first + len(hashes)]
        if [bytes(one) for one in named] != hashes:
            return None
        return manifest.with_replaced(first, first + len(hashes) - 1, merged)

    return change


def in_turn(*changes: Change) -> Change:
    """Several changes in one manifest."""

    def change(manifest: Manifest) -> Manifest | None:
        result: Manifest | None = None
        for one in changes:
            result = one(result or manifest) or result
        return result

    return change


def dropped_keys(before: Manifest, after: Manifest) -> list[str]:
    """Keys that ``before`` names and ``after`` does not."""
    kept = set(after.entries["content_hash"].tolist())
    gone = [index for index, one in enumerate(before.entries["content_hash"].tolist()) if one not in kept]
    return [segment_key(before.identity, before.entry(index)) for index in gone]
