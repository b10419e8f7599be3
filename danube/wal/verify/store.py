"""The independent reader of an object store: every manifest, every object, and how they fit a local copy.

Changes nothing and may run beside brokers: a partition whose manifest is replaced while it is read is
read again, and objects that no manifest names are an upload under way until they are a day old.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from danube.core.batch.checksum import content_hasher
from danube.errors import ObjectMissing, StoreDamaged
from danube.wal.stores.objects import ObjectInfo, ObjectStore
from danube.wal.verify.broker import read_offer
from danube.wal.verify.bytes import Finding, FindingKind
from danube.wal.verify.objects import (
    COMPACTED,
    MERGED,
    Entry,
    ManifestFacts,
    Name,
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
from danube.wal.verify.tree import ATTEMPTS, LocalPartition, Progress, Verified, findings_of, read_file
from danube.wal.verify.walk import Segment

ORPHAN_AGE_US: Final = 24 * 3600 * 1_000_000
PARALLEL: Final = 4
_NOT_WHOLE: Final = (FindingKind.CHECKSUM, FindingKind.TRUNCATED, FindingKind.VERSION)

Listed = list[tuple[ObjectInfo, Name]]
WantedTopic = Callable[[Identity, str], bool]


@dataclass
class StoredPartition:
    """One partition in a store: the manifest in force, and digests of segments that are also local.

    ``objects``: keys of all objects listed below its prefix.  ``replaced``: the manifest changed while
    it was read.
    """

    identity: Identity
    manifest: ManifestFacts | None = None
    where: str = ""
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)
    log_ids: dict[str, bytes] = field(default_factory=dict)  # by key, of objects that say whose they are
    cursor_log_ids: dict[str, bytes] = field(default_factory=dict)  # of the copies of cursors
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    objects: int = 0
    records: int = 0
    bytes: int = 0
    missing: bool = False


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


def every_topic(_: Identity, __: str) -> bool:
    return True


def verify_store(
    store: ObjectStore,
    now_us: int,
    verified: Verified,
    local: Iterable[LocalPartition] = (),
    wanted: WantedTopic = every_topic,
    progress: Progress = lambda _: None,
) -> None:
    """Check all that lies in ``store``, and that the partitions in ``local`` agree with it.

    Raises StoreUnavailable and StoreRefused if the store does not answer.
    """
    kept = {partition.identity: partition for partition in local}
    log_ids = _log_ids(store)
    metadata: Listed = []
    for identity, listed in _listed_by_partition(store):
        if identity == (-1, -1):
            metadata += listed
            continue
        stored = _settled(store, identity, listed, now_us, kept.get(identity), wanted)
        if stored is None:
            continue
        progress(f"{identity[0]:016x}-{identity[1]}")
        _verify_log_ids(stored, log_ids.get(identity[0]))
        verified.findings += stored.findings
        verified.remarks += stored.remarks
        verified.partitions += identity not in kept
        verified.objects += stored.objects
        verified.records += stored.records
        verified.bytes += stored.bytes
        if identity in kept:
            _compare(kept.pop(identity), stored, verified)
    for identity, partition in kept.items():
        _compare(partition, StoredPartition(identity), verified)
    _verify_other(store, metadata, verified)


def _log_ids(store: ObjectStore) -> dict[int, bytes]:
    """By topic id, as the newest copy of the metadata tells; nothing if it cannot be read."""
    keys = [info.key for info in store.list("metadata/") if name_of(info.key).kind == "metadata"]
    try:
        return log_ids_of(topics_in(store.get(max(keys)))) if keys else {}
    except (StoreDamaged, ObjectMissing):
        return {}  # told where it is read as one of the objects


def _verify_log_ids(stored: StoredPartition, log_id: bytes | None) -> None:
    """No object is of another log, whose topic has the same id."""
    for key, found in sorted(stored.log_ids.items()):
        log_id = log_id or found
        if found != log_id:
            what = "it is of another broker's log, whose topic has the same id"
            stored.findings.append(Finding(FindingKind.IDENTITY, key, what, 44, *name_of(key).numbers))
    for key, found in sorted(stored.cursor_log_ids.items()):
        log_id = log_id or found
        if found != log_id:
            what = "these cursors are of another broker's log, whose topic has the same id"
            stored.findings.append(Finding(FindingKind.IDENTITY, key, what, 40))


def _listed_by_partition(store: ObjectStore) -> Iterator[tuple[Identity, Listed]]:
    named = ((info, name_of(info.key)) for info in store.list(""))
    for identity, group in groupby(named, key=lambda pair: pair[1].identity):
        yield identity, list(group)


def _settled(
    store: ObjectStore,
    identity: Identity,
    listed: Listed,
    now_us: int,
    local: LocalPartition | None,
    wanted: WantedTopic,
) -> StoredPartition | None:
    """A partition, read again while its manifests change and something is missing; None when not wanted."""
    prefix = f"partitions/{identity[0]:016x}-{identity[1]}/"
    stored: StoredPartition | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            listed = [(info, name_of(info.key)) for info in store.list(prefix)]
        newest = _newest_manifest(listed)
        stored = _verify_partition(store, identity, listed, now_us, local, wanted)
        if stored is None or not stored.missing:
            return stored
        again = _newest_manifest([(info, name_of(info.key)) for info in store.list(prefix)])
        if again == newest:
            return stored
    return stored


def _newest_manifest(listed: Listed) -> str:
    keys = [info.key for info, name in listed if name.kind == "manifest"]
    return max(keys, default="")


def _verify_partition(
    store: ObjectStore,
    identity: Identity,
    listed: Listed,
    now_us: int,
    local: LocalPartition | None,
    wanted: WantedTopic,
) -> StoredPartition | None:
    stored = StoredPartition(identity)
    manifests = _read_manifests(store, listed, stored)
    topic = next((facts.topic for facts in reversed(manifests.values()) if facts.topic), "")
    if not wanted(identity, topic):
        return None
    if manifests:
        stored.where, stored.manifest = list(manifests.items())[-1]
        _verify_entries(store, stored, {info.key: info for info, _ in listed}, local)
        _compare_generations(manifests, stored)
        stored.remarks += [f"{stored.where}: {hole.words}" for hole in stored.manifest.holes]
    _verify_orphans(listed, manifests, now_us, stored)
    _verify_cursors(store, listed, stored)
    _verify_offers(store, listed, stored)
    return stored


def _read_manifests(store: ObjectStore, listed: Listed, stored: StoredPartition) -> dict[str, ManifestFacts]:
    """All of them that are whole, the one in force last."""
    whole: dict[str, ManifestFacts] = {}
    rows = sorted((name.numbers, info) for info, name in listed if name.kind == "manifest")
    for numbers, info in rows:
        newest = info is rows[-1][1]
        try:
            data = store.get(info.key)
        except ObjectMissing:  # an older one may be deleted at any time
            stored.missing |= newest
            continue
        except StoreDamaged as error:
            stored.findings.append(Finding(FindingKind.TRUNCATED, info.key, str(error)))
            continue
        facts = read_manifest(data)
        if facts.identity != stored.identity or (facts.epoch, facts.generation) != numbers:
            what = (
                f"it says partition {facts.identity[0]:x}-{facts.identity[1]}, epoch {facts.epoch}, "
                f"generation {facts.generation}"
            )
            stored.findings.append(Finding(FindingKind.IDENTITY, info.key, what, 12))
        harmless = (FindingKind.GAP,) if not newest else ()
        stored.findings += findings_of(info.key, (one for one in facts.problems if one.kind not in harmless))
        if not any(problem.kind in _NOT_WHOLE for problem in facts.problems):
            whole[info.key] = facts
    return whole


def _verify_entries(
    store: ObjectStore,
    stored: StoredPartition,
    infos: dict[str, ObjectInfo],
    local: LocalPartition | None,
) -> None:
    """Read every object that the manifest in force names, some at once."""
    manifest = stored.manifest
    if manifest is None:
        return
    spans = {}
    if local is not None:
        spans = {segment.base_offset: segment.end_offset for _, segment in local.segments if segment.sealed}

    def check(entry: Entry) -> None:
        key = key_of(stored.identity, entry)
        inside = {base: end for base, end in spans.items() if entry.base_offset <= base < entry.end_offset}
        _verify_object(store, key, entry, infos.get(key), stored, inside)

    with ThreadPoolExecutor(PARALLEL, "danube-verify") as pool:
        for _ in pool.map(check, manifest.entries):
            pass


def _verify_object(
    store: ObjectStore,
    key: str,
    entry: Entry,
    info: ObjectInfo | None,
    stored: StoredPartition,
    spans: dict[int, int],
) -> None:
    size = info.size if info is not None else -1
    digests = SpanDigests(spans.items())
    try:
        if info is None and (found := store.head(key)) is not None:
            size = found.size
        if size < 0:
            raise ObjectMissing(key)
        segment = read_segment(ObjectSource(store, key, size), entry.base_offset, digests)
    except ObjectMissing:
        what = f"{stored.where} names it"
        stored.missing = True
        stored.findings.append(
            Finding(FindingKind.MISSING, key, what, -1, entry.base_offset, entry.end_offset)
        )
        return
    except StoreDamaged as error:
        what = f"it cannot be read whole: {error}"
        stored.findings.append(
            Finding(FindingKind.TRUNCATED, key, what, -1, entry.base_offset, entry.end_offset)
        )
        return
    findings = findings_of(key, segment.problems)
    findings += _against_manifest(key, entry, segment, stored.identity)
    stored.findings += findings
    if any(segment.log_id):
        stored.log_ids[key] = segment.log_id
    stored.objects += 1
    stored.records += segment.record_count
    stored.bytes += size
    if not findings and not entry.flags & COMPACTED:
        stored.digests |= digests.digests


def _against_manifest(key: str, entry: Entry, segment: Segment, identity: Identity) -> list[Finding]:
    """Where an object differs from its entry in the manifest."""
    span = (entry.base_offset, entry.end_offset)
    findings: list[Finding] = []
    if (segment.topic_id, segment.partition) != identity and (segment.has_header or segment.sealed):
        what = f"it is of partition {segment.topic_id:016x}-{segment.partition}"
        findings.append(Finding(FindingKind.IDENTITY, key, what, 12, *span))
    if segment.size != entry.size_bytes:
        what = f"it has {segment.size} bytes, the manifest says {entry.size_bytes}"
        findings.append(Finding(FindingKind.TRUNCATED, key, what, min(segment.size, entry.size_bytes), *span))
    if not segment.sealed:
        findings.append(Finding(FindingKind.TRUNCATED, key, "it has no footer", segment.data_end, *span))
        return findings
    return findings + [
        Finding(FindingKind.DISAGREEMENT, key, what, -1, *span) for what in differences(entry, segment)
    ]


def differences(entry: Entry, segment: Segment) -> list[str]:
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
            stored.findings.append(Finding(FindingKind.GAP, stored.where, what, -1, *span))


def _verify_orphans(
    listed: Listed, manifests: dict[str, ManifestFacts], now_us: int, stored: StoredPartition
) -> None:
    named = {key_of(stored.identity, entry) for facts in manifests.values() for entry in facts.entries}
    young = 0
    for info, name in listed:
        if name.kind == "unknown":
            stored.findings.append(Finding(FindingKind.ORPHAN, info.key, "not one of Danube's names"))
        elif name.kind == "segment" and info.key not in named:
            if now_us - info.modified_us < ORPHAN_AGE_US:
                young += 1
                continue
            what = "no manifest names it, and it is older than a day"
            stored.findings.append(Finding(FindingKind.ORPHAN, info.key, what, -1, *name.numbers))
    if young:
        folder = f"{stored.identity[0]:016x}-{stored.identity[1]}"
        stored.remarks.append(f"partitions/{folder}: {young} objects are not in a manifest yet")


def _verify_cursors(store: ObjectStore, listed: Listed, stored: StoredPartition) -> None:
    rows = sorted((name.numbers, info.key) for info, name in listed if name.kind == "cursors")
    for _, key in rows:
        try:
            cursors = read_cursors(store.get(key))
        except ObjectMissing:
            continue
        stored.findings += findings_of(key, cursors.problems + state_problems(cursors))
        if any(cursors.log_id):
            stored.cursor_log_ids[key] = cursors.log_id
        if cursors.generation and cursors.identity != stored.identity:
            what = f"it is of partition {cursors.identity[0]:016x}-{cursors.identity[1]}"
            stored.findings.append(Finding(FindingKind.IDENTITY, key, what, 12))


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
            stored.findings.append(Finding(flaw[0], info.key, flaw[1], 0))
        for entry in entries:
            key = key_of(stored.identity, entry)
            if key not in keys and store.head(key) is None and store.head(info.key) is not None:
                span = (entry.base_offset, entry.end_offset)
                stored.findings.append(Finding(FindingKind.MISSING, key, f"{info.key} offers it", -1, *span))


def _compare(local: LocalPartition, stored: StoredPartition, verified: Verified) -> None:
    """Local segments that the store claims to hold too must be the same batches; nothing may be between."""
    manifest, copy = stored.manifest, local.manifest
    newest = (manifest.epoch, manifest.generation) if manifest is not None else (0, 0)
    if copy is not None and newest < (copy.epoch, copy.generation) and copy.generation:
        what = f"{local.directory / 'manifest'} was installed, and the store does not have it"
        where = f"partitions/{local.directory.name}/manifest-{copy.epoch:010d}-{copy.generation:010d}"
        span = (copy.start_offset, copy.uploaded_end)
        verified.findings.append(Finding(FindingKind.MISSING, where, what, -1, *span))
    if manifest is None:
        return
    if copy is not None:
        _compare_copy(local, copy, manifest, verified)
    if local.segments and local.start > manifest.uploaded_end:
        what = f"neither the store nor {local.directory} holds these offsets"
        for start, end in local.missing(manifest.uploaded_end, local.start):
            verified.findings.append(Finding(FindingKind.GAP, stored.where, what, -1, start, end))
    _compare_batches(local, stored, manifest, verified)


def _compare_copy(
    local: LocalPartition, copy: ManifestFacts, manifest: ManifestFacts, verified: Verified
) -> None:
    """Check that the copy is an older manifest of the same log: entries in both must be equal."""
    rewritten = COMPACTED | MERGED
    named = {(one.base_offset, one.end_offset): one for one in manifest.entries if not one.flags & rewritten}
    for entry in copy.entries:
        span = (entry.base_offset, entry.end_offset)
        if not entry.flags & rewritten and named.get(span, entry).content_hash != entry.content_hash:
            what = "it names other records than the store's manifest: it is of another log"
            where = str(local.directory / "manifest")
            verified.findings.append(Finding(FindingKind.IDENTITY, where, what, -1, *span))
            return


def _compare_batches(
    local: LocalPartition, stored: StoredPartition, manifest: ManifestFacts, verified: Verified
) -> None:
    spoilt = {finding.where for finding in stored.findings}
    for name, segment in local.segments:
        if manifest.start_offset <= segment.base_offset < manifest.uploaded_end:
            verified.records -= segment.record_count  # counted in the store, too
        span = (segment.base_offset, segment.end_offset)
        held = [
            entry for entry in manifest.entries if entry.base_offset < span[1] and span[0] < entry.end_offset
        ]
        if not segment.sealed or not held or name in local.damaged or segment.compacted:
            continue
        if any(entry.flags & COMPACTED or key_of(stored.identity, entry) in spoilt for entry in held):
            continue
        if span[1] > manifest.uploaded_end or span[0] < manifest.start_offset:
            continue
        digests = SpanDigests([span])
        path = local.directory / name
        if read_file(path, segment.base_offset, digests) is None:
            continue
        if stored.digests.get(span) != digests.digests.get(span):
            what = f"the store holds other batches for these offsets than {name}"
            verified.findings.append(Finding(FindingKind.DISAGREEMENT, str(path), what, -1, *span))


def _verify_other(store: ObjectStore, listed: Listed, verified: Verified) -> None:
    """Check store.json, metadata snapshots, and unknown names."""
    known = False
    for info, name in listed:
        try:
            if name.kind == "store":
                known = True
                if json.loads(store.get(info.key)).get("format") != 1:
                    what = "it has another format than 1"
                    verified.findings.append(Finding(FindingKind.VERSION, info.key, what))
            elif name.kind == "metadata":
                version, problems = read_snapshot(store.get(info.key))
                verified.add(info.key, problems)
                if version not in (None, name.numbers[0]):
                    what = f"it holds version {version}"
                    verified.findings.append(Finding(FindingKind.CHECKSUM, info.key, what))
            else:
                verified.findings.append(Finding(FindingKind.ORPHAN, info.key, "not one of Danube's names"))
        except ObjectMissing:
            continue
        except (ValueError, AttributeError, StoreDamaged) as error:
            verified.findings.append(Finding(FindingKind.CHECKSUM, info.key, f"it cannot be read: {error}"))
    if not known:
        verified.remarks.append(f"{store.name}: there is no store.json")
