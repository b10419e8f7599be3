"""The independent reader of an object store: every manifest, every object, and how they fit a local copy.

Changes nothing and may run beside brokers: a partition whose manifest is replaced while it is read is
read again, and objects that no manifest names are an upload under way until they are a day old.

A partition is planned, its objects are read, and then they are judged.  Spark's validation plans and judges
by the same functions, and reads in its tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from danube.core.batch.checksum import content_hasher
from danube.errors import ObjectMissing, StoreDamaged
from danube.wal.stores.objects import ObjectInfo, ObjectStore
from danube.wal.verify.broker import read_offer
from danube.wal.verify.bytes import Damage, FindingKind, Judged
from danube.wal.verify.objects import (
    COMPACTED,
    MERGED,
    Entry,
    ManifestFacts,
    Name,
    NamedHole,
    ObjectSource,
    key_of,
    name_of,
    read_manifest,
)
from danube.wal.verify.segment import Batch, read_segment
from danube.wal.verify.state import (
    Identity,
    log_ids_of,
    read_cursors,
    read_snapshot,
    state_problems,
    topics_in,
)
from danube.wal.verify.tree import ATTEMPTS, LocalPartition, Progress, Verified, judge_log_ids, read_file
from danube.wal.verify.walk import Segment

ORPHAN_AGE_US: Final = 24 * 3600 * 1_000_000
PARALLEL: Final = 4
_NOT_WHOLE: Final = (FindingKind.CHECKSUM, FindingKind.TRUNCATED, FindingKind.VERSION)

_OTHERS: Final = {"store": Damage.STORE_IDENTITY, "metadata": Damage.METADATA_DAMAGED}

Listed = list[tuple[ObjectInfo, Name]]
WantedTopic = Callable[[Identity, str], bool]


@dataclass
class StoredPartition(Judged):
    """One partition in a store: the manifest in force, and digests of segments that are also local.

    ``listed``: keys of all its manifests.  ``entries`` and ``sizes``: by key, of objects that are there;
    ``segments``: of those that were read.  ``missing``: the manifest may have changed while it was read.
    """

    identity: Identity
    topic: str = ""
    manifest: ManifestFacts | None = None
    where: str = ""
    listed: tuple[str, ...] = ()
    entries: dict[str, Entry] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)
    log_ids: dict[str, bytes] = field(default_factory=dict)  # of the copies of cursors
    missing: bool = False

    def hole_at(self, offset: int) -> NamedHole | None:
        holes = self.manifest.holes if self.manifest is not None else []
        return next((hole for hole in holes if hole.start <= offset < hole.end), None)

    def note_missing(self, key: str, entry: Entry) -> None:
        what, span = f"{self.where} names it", (entry.base_offset, entry.end_offset)
        self.note(FindingKind.MISSING, key, what, -1, *span, Damage.OBJECT_MISSING)
        self.missing = True


class SpanDigests:
    """Hashes of the batches of given offset ranges, taken while a segment is read."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._spans = dict(spans)
        self._hasher = content_hasher()
        self._start = self._end = -1
        self.digests: dict[tuple[int, int], bytes] = {}

    def __call__(self, batch: Batch, data: memoryview) -> None:
        if batch.base_offset in self._spans:
            self._start, self._end = batch.base_offset, self._spans[batch.base_offset]
            self._hasher = content_hasher()
        if self._start >= 0:
            self._hasher.update(data)
            if batch.end_offset == self._end:
                self.digests[self._start, self._end] = bytes(self._hasher.digest())
                self._start = -1


def verify_store(
    store: ObjectStore,
    now_us: int,
    verified: Verified,
    local: Iterable[LocalPartition] = (),
    wanted: WantedTopic = lambda *_: True,
    progress: Progress = lambda _: None,
) -> None:
    """Check all that lies in ``store``, and that the partitions in ``local`` agree with it.

    Raises StoreUnavailable and StoreRefused if the store does not answer.
    """
    kept = {partition.identity: partition for partition in local}
    log_ids = _log_ids(store)
    partitions = partitions_in(store)
    others = partitions.pop((-1, -1), [])
    for identity, listed in partitions.items():
        stored = _settled(store, identity, listed, now_us, kept.get(identity), wanted)
        if stored is None:
            continue
        progress(f"{identity[0]:016x}-{identity[1]}")
        judge_log_ids(stored.segments, stored.log_ids, log_ids.get(identity[0]), stored)
        verified.findings += stored.findings
        verified.remarks += stored.remarks
        verified.partitions += identity not in kept
        verified.objects += len(stored.segments)
        verified.records += sum(segment.record_count for segment in stored.segments)
        verified.bytes += sum(segment.size for segment in stored.segments)
        if identity in kept:
            _compare(kept.pop(identity), stored, verified)
    for identity, partition in kept.items():
        _compare(partition, StoredPartition(identity), verified)
    verify_other(store, others, verified)


def _log_ids(store: ObjectStore) -> dict[int, bytes]:
    """By topic id, as the newest copy of the metadata tells; nothing if it cannot be read."""
    keys = [info.key for info in store.list("metadata/") if name_of(info.key).kind == "metadata"]
    try:
        return log_ids_of(topics_in(store.get(max(keys)))) if keys else {}
    except (StoreDamaged, ObjectMissing):
        return {}  # told where it is read as one of the objects


def partitions_in(store: ObjectStore) -> dict[Identity, Listed]:
    """All objects by partition; those of none under -1 and -1."""
    found: dict[Identity, Listed] = {}
    for info in store.list(""):
        name = name_of(info.key)
        found.setdefault(name.identity, []).append((info, name))
    return found


def list_partition(store: ObjectStore, identity: Identity) -> Listed:
    prefix = f"partitions/{identity[0]:016x}-{identity[1]}/"
    return [(info, name_of(info.key)) for info in store.list(prefix)]


def manifests_in(listed: Listed) -> tuple[str, ...]:
    """Keys of the manifests, ascending; they change when a mover works on the partition."""
    return tuple(sorted(info.key for info, name in listed if name.kind == "manifest"))


def _settled(
    store: ObjectStore,
    identity: Identity,
    listed: Listed,
    now_us: int,
    local: LocalPartition | None,
    wanted: WantedTopic,
) -> StoredPartition | None:
    """A partition, read again while its manifests change and something is missing; None when not wanted."""
    stored: StoredPartition | None = None
    for _ in range(ATTEMPTS):
        stored = plan_partition(store, identity, listed, now_us, wanted)
        if stored is None:
            return None
        _read_objects(store, stored, local)
        _verify_offers(store, listed, stored)
        if not stored.missing:
            break
        listed = list_partition(store, identity)
        if manifests_in(listed) == stored.listed:
            break
    return stored


def plan_partition(
    store: ObjectStore, identity: Identity, listed: Listed, now_us: int, wanted: WantedTopic
) -> StoredPartition | None:
    """A partition whose objects are to be read, judged by its manifests and names; None when not wanted."""
    stored = StoredPartition(identity, listed=manifests_in(listed))
    manifests = _read_manifests(store, stored)
    stored.topic = next((facts.topic for facts in reversed(manifests.values()) if facts.topic), "")
    if not wanted(identity, stored.topic):
        return None
    if manifests:
        stored.where, stored.manifest = list(manifests.items())[-1]
        _find_objects(store, stored, stored.manifest, {info.key: info.size for info, _ in listed})
        _compare_generations(manifests, stored)
        stored.remarks += [f"{stored.where}: {hole.words}" for hole in stored.manifest.holes]
    _judge_names(listed, manifests, now_us, stored)
    _read_cursors(store, listed, stored)
    return stored


def _read_manifests(store: ObjectStore, stored: StoredPartition) -> dict[str, ManifestFacts]:
    """All of them that are whole, the one in force last."""
    whole: dict[str, ManifestFacts] = {}
    for key in stored.listed:
        newest, fault = key == stored.listed[-1], Damage.MANIFEST_DAMAGED
        try:
            facts = read_manifest(store.get(key))
        except ObjectMissing:  # an older one may be deleted at any time
            stored.missing |= newest
            continue
        except StoreDamaged as error:
            stored.note(FindingKind.TRUNCATED, key, str(error), fault=fault)
            continue
        harmless = (FindingKind.GAP,) if not newest else ()
        stored.add(key, (one for one in facts.problems if one.kind not in harmless), fault)
        if any(problem.kind in _NOT_WHOLE for problem in facts.problems):
            continue
        if facts.identity != stored.identity or (facts.epoch, facts.generation) != name_of(key).numbers:
            what = (
                f"it says partition {facts.identity[0]:x}-{facts.identity[1]}, epoch {facts.epoch}, "
                f"generation {facts.generation}"
            )
            stored.note(FindingKind.IDENTITY, key, what, 12, fault=fault)
            continue
        whole[key] = facts
    return whole


def _find_objects(
    store: ObjectStore, stored: StoredPartition, manifest: ManifestFacts, sizes: dict[str, int]
) -> None:
    """Find every object that the manifest in force names."""
    for entry in manifest.entries:
        key, span = key_of(stored.identity, entry), (entry.base_offset, entry.end_offset)
        size = sizes.get(key, -1)
        if size < 0 and (found := store.head(key)) is not None:
            size = found.size
        if size < 0:
            stored.note_missing(key, entry)
            continue
        stored.entries[key], stored.sizes[key] = entry, size
        if size != entry.size_bytes:
            what = f"it has {size} bytes, the manifest says {entry.size_bytes}"
            position = min(size, entry.size_bytes)
            stored.note(FindingKind.TRUNCATED, key, what, position, *span, Damage.OBJECT_SIZE)


def _read_objects(store: ObjectStore, stored: StoredPartition, local: LocalPartition | None) -> None:
    """Read the objects that were found, some at once, and judge them."""
    spans = {}
    if local is not None:
        spans = {segment.base_offset: segment.end_offset for segment in local.segments if segment.sealed}

    def read(key: str) -> Segment | StoreDamaged | None:
        entry = stored.entries[key]
        inside = {base: end for base, end in spans.items() if entry.base_offset <= base < entry.end_offset}
        digests, source = SpanDigests(inside.items()), ObjectSource(store, key, stored.sizes[key])
        try:
            segment = read_segment(source, entry.base_offset, digests, where=key, identity=stored.identity)
        except ObjectMissing:
            return None
        except StoreDamaged as error:
            return error
        stored.digests |= digests.digests
        return segment

    with ThreadPoolExecutor(PARALLEL, "danube-verify") as pool:
        for (key, entry), found in zip(stored.entries.items(), pool.map(read, stored.entries), strict=True):
            if found is None:
                stored.note_missing(key, entry)
            elif isinstance(found, StoreDamaged):
                what, span = f"it cannot be read whole: {found}", (entry.base_offset, entry.end_offset)
                stored.note(FindingKind.TRUNCATED, key, what, -1, *span)
            else:
                stored.segments.append(found)
                stored.add(key, found.faults)
                judge_object(stored, found)


def judge_object(stored: StoredPartition, segment: Segment) -> None:
    """Note where an object differs from its entry in the manifest."""
    entry, key = stored.entries[segment.where], segment.where
    span = (entry.base_offset, entry.end_offset)
    if not segment.sealed:
        stored.note(
            FindingKind.TRUNCATED, key, "it has no footer", segment.data_end, *span, Damage.FOOTER_MISSING
        )
        return
    for what in _differences(entry, segment):
        stored.note(FindingKind.DISAGREEMENT, key, what, -1, *span, Damage.MANIFEST_DIFFERS)


def _differences(entry: Entry, segment: Segment) -> list[str]:
    """Return where an object differs from its entry in the manifest, in words."""
    told, held = entry._asdict(), {name: getattr(segment, name, None) for name in Entry._fields}
    told |= {"compacted": bool(entry.flags & COMPACTED), "merged": bool(entry.flags & MERGED)}
    held |= {"compacted": segment.compacted, "merged": segment.chained}
    return [
        f"its {name.replace('_', ' ')} is {_shown(held[name])}, the manifest says {_shown(said)}"
        for name, said in told.items()
        if name not in ("size_bytes", "uploaded_us", "flags") and said != held[name]
    ]


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def _compare_generations(manifests: dict[str, ManifestFacts], stored: StoredPartition) -> None:
    """Check that every offset of an older manifest of the epoch is still held, or has expired."""
    newest = stored.manifest
    for key, older in manifests.items():
        if newest is not None and older.epoch == newest.epoch and older.uploaded_end > newest.uploaded_end:
            what = f"{key} holds offsets up to {older.uploaded_end}, which a later manifest has lost"
            span = (newest.uploaded_end, older.uploaded_end)
            stored.note(FindingKind.GAP, stored.where, what, -1, *span, Damage.MANIFEST_REGRESSED)


def _judge_names(
    listed: Listed, manifests: dict[str, ManifestFacts], now_us: int, stored: StoredPartition
) -> None:
    named = {key_of(stored.identity, entry) for facts in manifests.values() for entry in facts.entries}
    young = 0
    for info, name in listed:
        if name.kind == "unknown":
            _note_unknown(info.key, stored)
        elif name.kind == "segment" and info.key not in named:
            if now_us - info.modified_us < ORPHAN_AGE_US:
                young += 1
                continue
            what = "no manifest names it, and it is older than a day"
            stored.note(FindingKind.ORPHAN, info.key, what, -1, *name.numbers, Damage.OBJECT_ORPHAN)
    if young:
        folder = f"{stored.identity[0]:016x}-{stored.identity[1]}"
        stored.remarks.append(f"partitions/{folder}: {young} objects are not in a manifest yet")


def _note_unknown(key: str, judged: Judged) -> None:
    judged.note(FindingKind.ORPHAN, key, "not one of Danube's names", fault=Damage.OBJECT_UNKNOWN)


def _read_cursors(store: ObjectStore, listed: Listed, stored: StoredPartition) -> None:
    rows = sorted((name.numbers, info.key) for info, name in listed if name.kind == "cursors")
    for _, key in rows:
        try:
            cursors = read_cursors(store.get(key))
        except ObjectMissing:
            continue
        stored.add(key, cursors.problems + state_problems(cursors), Damage.CURSOR_DAMAGED)
        if any(cursors.log_id):
            stored.log_ids[key] = cursors.log_id
        if cursors.generation and cursors.identity != stored.identity:
            what = f"it is of partition {cursors.identity[0]:016x}-{cursors.identity[1]}"
            stored.note(FindingKind.IDENTITY, key, what, 12, fault=Damage.WRONG_PARTITION)


def _verify_offers(store: ObjectStore, listed: Listed, stored: StoredPartition) -> None:
    """Check the offers of disks that came back: each names objects, which must be there."""
    keys = {info.key for info, _ in listed}
    for info, name in listed:
        if name.kind != "returned":
            continue
        try:
            entries, flaw = read_offer(store.get(info.key), name.numbers)
        except ObjectMissing:
            continue  # taken by the owner
        except StoreDamaged as error:
            entries, flaw = [], (FindingKind.TRUNCATED, f"it cannot be read: {error}")
        if flaw is not None:
            stored.note(flaw[0], info.key, flaw[1], 0)
        for entry in entries:
            key = key_of(stored.identity, entry)
            if key not in keys and store.head(key) is None and store.head(info.key) is not None:
                span = (entry.base_offset, entry.end_offset)
                stored.note(FindingKind.MISSING, key, f"{info.key} offers it", -1, *span)


def _compare(local: LocalPartition, stored: StoredPartition, verified: Verified) -> None:
    """Local segments that the store claims to hold too must be the same batches; nothing may be between."""
    manifest, copy = stored.manifest, local.manifest
    newest = (manifest.epoch, manifest.generation) if manifest is not None else (0, 0)
    if copy is not None and newest < (copy.epoch, copy.generation) and copy.generation:
        what = f"{local.directory / 'manifest'} was installed, and the store does not have it"
        where = f"partitions/{local.directory.name}/manifest-{copy.epoch:010d}-{copy.generation:010d}"
        verified.note(FindingKind.MISSING, where, what, -1, copy.start_offset, copy.uploaded_end)
    if manifest is None:
        return
    if copy is not None:
        _compare_copy(local, copy, manifest, verified)
    judge_gap(local, stored, verified)
    _compare_batches(local, stored, manifest, verified)


def judge_gap(local: LocalPartition, stored: StoredPartition, judged: Judged) -> None:
    """No offsets lie between the end of the store and the start of a local log."""
    manifest = stored.manifest
    if manifest is not None and local.segments and local.start > manifest.uploaded_end:
        what = f"neither the store nor {local.directory} holds these offsets"
        for gap in local.missing(manifest.uploaded_end, local.start):
            judged.note(FindingKind.GAP, stored.where, what, -1, *gap, Damage.OFFSETS_MISSING)


def _compare_copy(
    local: LocalPartition, copy: ManifestFacts, manifest: ManifestFacts, verified: Verified
) -> None:
    """Check that the copy is an older manifest of the same log: entries in both must be equal."""
    named = manifest.originals
    for span, content_hash in copy.originals.items():
        if named.get(span, content_hash) != content_hash:
            what = "it names other records than the store's manifest: it is of another log"
            verified.note(FindingKind.IDENTITY, local.directory / "manifest", what, -1, *span)
            return


def _compare_batches(
    local: LocalPartition, stored: StoredPartition, manifest: ManifestFacts, verified: Verified
) -> None:
    spoilt = {finding.where for finding in stored.findings}
    for segment in local.segments:
        if manifest.start_offset <= segment.base_offset < manifest.uploaded_end:
            verified.records -= segment.record_count  # counted in the store, too
        span = (segment.base_offset, segment.end_offset)
        held = [
            entry for entry in manifest.entries if entry.base_offset < span[1] and span[0] < entry.end_offset
        ]
        if not segment.sealed or not held or segment.where in local.damaged or segment.compacted:
            continue
        if any(entry.flags & COMPACTED or key_of(stored.identity, entry) in spoilt for entry in held):
            continue
        if span[1] > manifest.uploaded_end or span[0] < manifest.start_offset:
            continue
        digests, path = SpanDigests([span]), Path(segment.where)
        if read_file(path, segment.base_offset, on_batch=digests) is None:
            continue
        if stored.digests.get(span) != digests.digests.get(span):
            what = f"the store holds other batches for these offsets than {path.name}"
            verified.note(FindingKind.DISAGREEMENT, path, what, -1, *span)


def verify_other(store: ObjectStore, listed: Listed, judged: Judged) -> None:
    """Check store.json, metadata snapshots, and unknown names."""
    known = False
    for info, name in listed:
        if name.kind not in _OTHERS:
            _note_unknown(info.key, judged)
            continue
        fault = _OTHERS[name.kind]
        known |= name.kind == "store"
        try:
            data = store.get(info.key)
            if name.kind == "store":
                if json.loads(data).get("format") != 1:
                    judged.note(FindingKind.VERSION, info.key, "it has another format than 1", fault=fault)
                continue
            version, problems = read_snapshot(data)
            judged.add(info.key, problems, fault)
            if version not in (None, name.numbers[0]):
                judged.note(FindingKind.CHECKSUM, info.key, f"it holds version {version}", fault=fault)
        except ObjectMissing:
            continue
        except (ValueError, AttributeError, StoreDamaged) as error:
            judged.note(FindingKind.CHECKSUM, info.key, f"it cannot be read: {error}", fault=fault)
    if not known:
        judged.remarks.append(f"{store.name}: there is no store.json")
