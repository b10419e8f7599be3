"""An object store: manifests against objects, and objects that no manifest names.

It may run beside brokers and their movers.  A partition whose manifest changed meanwhile is read again.
Objects that no manifest names count as an upload under way until they are a day old.
"""

from __future__ import annotations

from collections.abc import Sequence

from danube.host import clock
from danube.spark.jobs.findings import Expected, SegmentFacts, Severity
from danube.spark.jobs.validate.directory import DirectoryPlan
from danube.spark.jobs.validate.order import check_order
from danube.wal.stores.objects import ObjectStore
from danube.wal.verify.bytes import Damage, FindingKind, Judged
from danube.wal.verify.objects import HOLE_BEFORE
from danube.wal.verify.state import Identity
from danube.wal.verify.store import (
    Listed,
    StoredPartition,
    WantedTopic,
    judge_gap,
    judge_object,
    list_partition,
    manifests_in,
    plan_partition,
)
from danube.wal.verify.tree import judge_log_ids


class StorePlan:
    """One partition in the store, and what is wrong with it; ``log_id`` as of a DirectoryPlan."""

    def __init__(self, store: ObjectStore, part: StoredPartition, log_id: bytes | None) -> None:
        self.part = part
        # Gaps are found between the objects, and those that the manifest states are no fault.
        part.findings = [one for one in part.findings if one.fault != Damage.OFFSETS_MISSING]
        self.work = [
            Expected(key, *part.identity, entry.base_offset, True, size=part.sizes[key])
            for key, entry in part.entries.items()
        ]
        self.facts: list[SegmentFacts] = []  # of the objects that were there, by base offset
        self._store = store
        self._log_id = log_id

    def judge(self, segments: Sequence[SegmentFacts]) -> None:
        """Note all that is wrong with the partition."""
        part = self.part
        for facts in segments:
            if facts.gone:
                part.note_missing(facts.where, part.entries[facts.where])
                continue
            self.facts.append(facts)
            part.add(facts.where, facts.faults)
            if not any(one.severity == Severity.ERROR for one in facts.findings):
                judge_object(part, facts)
        judge_log_ids(self.facts, part.log_ids, self._log_id, part)
        holes = {key for key, entry in part.entries.items() if entry.flags & HOLE_BEFORE}
        part.remarks += [
            f"{key}: records before it are lost, as the manifest states"
            for key in sorted(holes)
            if part.hole_at(part.entries[key].base_offset - 1) is None
        ]
        part.findings += check_order(self.facts, lambda facts: facts.where in holes)

    def again(self) -> StorePlan | None:
        """A new plan if the manifests have changed meanwhile."""
        part = self.part
        listed = list_partition(self._store, part.identity)
        if manifests_in(listed) == part.listed:
            return None
        return plan_store(self._store, part.identity, listed, self._log_id)


def plan_store(
    store: ObjectStore,
    identity: Identity,
    listed: Listed,
    log_id: bytes | None,
    wanted: WantedTopic = lambda *_: True,
) -> StorePlan | None:
    """The objects of a partition that are to be read; None when it is not wanted."""
    part = plan_partition(store, identity, listed, clock.wall_us(), wanted)
    return StorePlan(store, part, log_id) if part is not None else None


def check_copies(local: DirectoryPlan, stored: StorePlan) -> Judged:
    """Local files and objects of one partition: the same content where both hold the same offsets."""
    found = Judged()
    if stored.part.manifest is None or not local.facts:
        return found
    judge_gap(local.part, stored.part, found)
    spans = {(one.base_offset, one.end_offset): one for one in stored.facts if not one.compacted}
    for facts in local.facts:
        span = (facts.base_offset, facts.end_offset)
        same = spans.get(span)
        if (
            same is not None
            and facts.sealed
            and facts.content_hash != same.content_hash
            and not facts.compacted
        ):
            what = f"{same.where} holds other bytes for these offsets"
            found.note(FindingKind.DISAGREEMENT, facts.where, what, -1, *span, Damage.COPIES_DIFFER)
    return found
