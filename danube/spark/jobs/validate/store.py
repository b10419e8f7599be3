"""An object store: manifests against objects, and objects that no manifest names.

It may run beside brokers and their movers.  A partition whose manifest changed meanwhile is read again.
Objects that no manifest names count as an upload under way until they are a day old.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from danube.core.metadata.machine import Metadata
from danube.errors import Damage as DamageError
from danube.errors import DanubeError, ObjectMissing, StorageIncompatible, StoreDamaged
from danube.spark.jobs.findings import Expected, Finding, SegmentFacts, finding
from danube.spark.jobs.validate.directory import read_states
from danube.spark.jobs.validate.order import check_order
from danube.spark.jobs.validate.task import SegmentWork
from danube.wal.segments.segment import NO_LOG, LogIdentity
from danube.wal.stores.objects import ObjectInfo, ObjectStore
from danube.wal.tier.keys import KeyKind, StoreKey, parse_key, partition_prefix, segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry
from danube.wal.verify.bytes import Damage
from danube.wal.verify.objects import Entry
from danube.wal.verify.state import read_cursors
from danube.wal.verify.store import differences

ORPHAN_AGE_US: Final = 24 * 3600 * 1_000_000

Listed = list[tuple[ObjectInfo, StoreKey | None]]


@dataclass
class StorePlan:
    """One partition in the store.  ``state``: keys of its manifests; they change when a mover works."""

    identity: LogIdentity
    log_id: bytes = NO_LOG
    manifest: Manifest | None = None
    where: str = ""
    entries: dict[str, SegmentEntry] = field(default_factory=dict)  # by key
    work: list[SegmentWork] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    state: tuple[str, ...] = ()
    topic: str = ""


def partitions_in(store: ObjectStore) -> dict[LogIdentity | None, Listed]:
    """Group all listed objects by partition; None for objects of no partition."""
    found: dict[LogIdentity | None, Listed] = {}
    for info in store.list(""):
        key = parse_key(info.key)
        found.setdefault(key.identity if key is not None else None, []).append((info, key))
    return found


def list_partition(store: ObjectStore, identity: LogIdentity) -> Listed:
    return [(info, parse_key(info.key)) for info in store.list(partition_prefix(identity))]


def manifest_names(listed: Listed) -> tuple[str, ...]:
    """Keys of the manifests in a listing, ascending."""
    return tuple(info.key for info, key in listed if key is not None and key.kind is KeyKind.MANIFEST)


def plan_store(
    store: ObjectStore, identity: LogIdentity, listed: Listed, now_us: int, log_id: bytes = NO_LOG
) -> StorePlan:
    """List the objects to read, with findings from the listing and the manifests."""
    plan = StorePlan(identity, log_id)
    infos = {info.key: info for info, _ in listed}
    plan.state = manifest_names(listed)
    manifests = _read_manifests(store, plan)
    if plan.manifest is not None:
        plan.topic = plan.manifest.topic
        _plan_entries(store, plan, infos)
        for key, older in manifests.items():
            if older.epoch == plan.manifest.epoch and older.uploaded_end > plan.manifest.uploaded_end:
                detail = f"{key} names records up to {older.uploaded_end}, which this later one has lost"
                plan.findings.append(
                    finding(Damage.MANIFEST_REGRESSED, plan.where, detail, -1, plan.manifest.uploaded_end)
                )
    _check_orphans(plan, listed, manifests, now_us)
    _check_cursors(store, plan, listed)
    return plan


def _read_manifests(store: ObjectStore, plan: StorePlan) -> dict[str, Manifest]:
    """Return the whole manifests, ascending; the newest of them becomes the plan's."""
    whole: dict[str, Manifest] = {}
    for name in plan.state:
        try:
            manifest = Manifest.decode(store.get(name))
        except ObjectMissing:
            continue  # an older one, pruned since it was listed; a newer one makes the caller look again
        except (DamageError, StorageIncompatible) as error:
            why = error.why or ""
            plan.findings.append(finding(Damage.MANIFEST_DAMAGED, name, f"{error.what} {why}".strip()))
            continue
        key = parse_key(name)
        said = (manifest.identity, manifest.epoch, manifest.generation)
        if key is not None and said != (plan.identity, key.epoch, key.generation):
            detail = f"it is manifest {said[1]}-{said[2]} of partition {manifest.identity.directory_name}"
            plan.findings.append(finding(Damage.MANIFEST_DAMAGED, name, detail, 12))
            continue
        whole[name] = manifest
        plan.manifest, plan.where = manifest, name
    return whole


def _plan_entries(store: ObjectStore, plan: StorePlan, infos: dict[str, ObjectInfo]) -> None:
    manifest = plan.manifest
    for index in range(len(manifest or ())):
        entry = manifest.entry(index) if manifest is not None else None
        if entry is None:
            break
        key = segment_key(plan.identity, entry)
        info = infos.get(key) or store.head(key)
        if info is None:
            detail = f"{plan.where} names it for offsets {entry.base_offset} to {entry.end_offset}"
            plan.findings.append(finding(Damage.OBJECT_MISSING, key, detail, -1, entry.base_offset))
            continue
        if info.size != entry.size_bytes:
            detail = f"it has {info.size} bytes, the manifest says {entry.size_bytes}"
            byte = min(info.size, entry.size_bytes)
            plan.findings.append(finding(Damage.OBJECT_SIZE, key, detail, byte, entry.base_offset))
        plan.entries[key] = entry
        expected = Expected(key, *plan.identity, entry.base_offset, True, log_id=plan.log_id)
        plan.work.append(SegmentWork(expected, key, info.size))


def _check_orphans(plan: StorePlan, listed: Listed, manifests: dict[str, Manifest], now_us: int) -> None:
    named = {
        segment_key(plan.identity, manifest.entry(index))
        for manifest in manifests.values()
        for index in range(len(manifest))
    }
    young = 0
    for info, key in listed:
        if key is None:
            plan.findings.append(finding(Damage.OBJECT_UNKNOWN, info.key, "not one of Danube's names"))
        elif key.kind is KeyKind.SEGMENT and info.key not in named:
            if now_us - info.modified_us < ORPHAN_AGE_US:
                young += 1
                continue
            detail = "no manifest names it, and it is older than a day"
            plan.findings.append(finding(Damage.OBJECT_ORPHAN, info.key, detail, -1, key.base_offset))
    if young:
        plan.remarks.append(f"{partition_prefix(plan.identity)}: {young} objects are in no manifest yet")


def _check_cursors(store: ObjectStore, plan: StorePlan, listed: Listed) -> None:
    names = [info.key for info, key in listed if key is not None and key.kind is KeyKind.CURSORS]
    for name in names[-1:]:
        try:
            cursors = read_cursors(store.get(name))
        except ObjectMissing:
            continue
        plan.findings += [
            finding(Damage.CURSOR_DAMAGED, name, problem.what, problem.position)
            for problem in cursors.problems
        ]
        plan.findings += read_states(name, cursors, plan.identity, {})


def judge_store(plan: StorePlan, segments: Sequence[SegmentFacts]) -> list[Finding]:
    """Everything about the partition that is wrong; ``segments`` are the objects that were read."""
    found = list(plan.findings)
    for facts in segments:
        found += facts.findings
        entry = plan.entries.get(facts.where)
        if entry is not None and not any(one.severity == "error" for one in facts.findings):
            found += _against_entry(facts, entry)
    holes = {key for key, entry in plan.entries.items() if entry.flags & EntryFlag.HOLE_BEFORE}
    named = plan.manifest.all_holes() if plan.manifest is not None else []
    plan.remarks += [
        f"{plan.where}: offsets {hole.start} to {hole.end} are a hole: {hole.kind.words}" for hole in named
    ]
    plan.remarks += [
        f"{key}: records before it are lost, as the manifest states"
        for key in sorted(holes)
        if plan.manifest is not None and plan.manifest.hole_at(plan.entries[key].base_offset - 1) is None
    ]
    found += check_order(segments, lambda facts: facts.where in holes)
    return found


def _against_entry(facts: SegmentFacts, entry: SegmentEntry) -> Iterator[Finding]:
    if facts.gone:
        detail = f"it is named for offsets {entry.base_offset} to {entry.end_offset}"
        yield finding(Damage.OBJECT_MISSING, facts.where, detail, -1, entry.base_offset)
        return
    for detail in differences(Entry._make(entry), facts):
        yield finding(Damage.MANIFEST_DIFFERS, facts.where, detail, -1, entry.base_offset)


def check_other(store: ObjectStore, listed: Listed) -> list[Finding]:
    """Check objects of no partition: store.json, metadata snapshots, unknown names."""
    found: list[Finding] = []
    for info, key in listed:
        if key is None:
            found.append(finding(Damage.OBJECT_UNKNOWN, info.key, "not one of Danube's names"))
            continue
        kind = Damage.STORE_IDENTITY if key.kind is KeyKind.STORE else Damage.METADATA_DAMAGED
        try:
            flaw = _flaw(store.get(info.key), key)
        except ObjectMissing:
            continue
        except StoreDamaged as error:
            flaw = error.what
        if flaw:
            found.append(finding(kind, info.key, flaw))
    return found


def _flaw(data: bytes, key: StoreKey) -> str:
    try:
        if key.kind is KeyKind.STORE:
            return "" if json.loads(data)["format"] == 1 else "it has another format than 1"
        version = Metadata.restore(data).version
        return "" if version == key.version else f"it holds version {version} of the metadata"
    except (ValueError, KeyError, TypeError) as error:
        return f"it cannot be read: {error}"
    except DanubeError as error:
        return error.what


def check_copies(
    plan: StorePlan, local: Sequence[SegmentFacts], objects: Sequence[SegmentFacts]
) -> list[Finding]:
    """Local files and objects of one partition: the same content where both hold the same offsets."""
    manifest = plan.manifest
    if manifest is None or not local:
        return []
    found: list[Finding] = []
    if local[0].base_offset > manifest.uploaded_end:
        detail = (
            f"offsets {manifest.uploaded_end} to {local[0].base_offset} are neither here nor in the store"
        )
        found.append(finding(Damage.OFFSETS_MISSING, local[0].where, detail, -1, manifest.uploaded_end))
    spans = {(one.base_offset, one.end_offset): one for one in objects if not one.compacted}
    for facts in local:
        same = spans.get((facts.base_offset, facts.end_offset))
        if (
            same is not None
            and facts.sealed
            and facts.content_hash != same.content_hash
            and not facts.compacted
        ):
            detail = f"{same.where} holds other bytes for these offsets"
            found.append(finding(Damage.COPIES_DIFFER, facts.where, detail, -1, facts.base_offset))
    return found
