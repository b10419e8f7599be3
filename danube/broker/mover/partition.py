"""One partition at the mover: its local segments, its objects, and the next step.

All methods are called on the mover's loop, except jobs.  A job is the part of a step that runs in a thread.
It gets its inputs when it is made, and ``took`` returns its result.  At most one step of a partition is under
way; uploads run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from danube.broker.links import Frame
from danube.broker.mover.copies import put_cursors
from danube.broker.mover.staged import Answer, Examined, StagedObjects
from danube.core.partition.pending import NOTHING, Pending, together
from danube.core.partition.tier_plan import (
    SECOND_US,
    Backlog,
    LocalSegment,
    TierSettings,
    Waiting,
    backlog,
    due,
    installable,
    merge_next,
    retry_delay_us,
)
from danube.errors import Damage, DanubeError, Fenced, OwnerMoved
from danube.wal.segments.holes import Hole
from danube.wal.segments.local_holes import holes_in
from danube.wal.segments.segment import file_name
from danube.wal.stores.objects import Putting
from danube.wal.tier.hole_changes import giving_up
from danube.wal.tier.manifest import Manifest, SegmentEntry
from danube.wal.tier.orphans import ROUND_OBJECTS_MAX, sweep_partition
from danube.wal.tier.returned import take_returned
from danube.wal.tier.rewriting import (
    Replacement,
    compact_objects,
    compaction_plan,
    last_compacted,
    merge_objects,
    replacing_in_order,
)
from danube.wal.tier.sealed_files import LocalListing
from danube.wal.tier.staged import Rules, Staged, decode_staged
from danube.wal.tier.uploader import (
    Ownership,
    Uploader,
    adding,
    dropped_keys,
    entries_end,
    in_turn,
    trimming,
)

INSTALL_INTERVAL_US: Final = SECOND_US
MERGE_INTERVAL_US: Final = 30 * SECOND_US
MERGE_PAUSE_US: Final = 600 * SECOND_US
COMPACTION_INTERVAL_US: Final = 5 * SECOND_US  # between plans
SWEEP_INTERVAL_US: Final = 3_600 * SECOND_US
CURSORS_INTERVAL_US: Final = 10 * SECOND_US
RETURN_INTERVAL_US: Final = 5 * SECOND_US  # between searches for offers of records that fill a hole
FINISHED_MAX: Final = 64  # uploaded segments that wait for an earlier one
DROPPED_MAX: Final = 100_000  # keys to remove; the sweep finds any others
NEVER_US: Final = 1 << 62
RETURNED_NAME: Final = "returned"  # directory below the data directory, for offered objects

Job = Callable[[], Any]


class Step(StrEnum):
    LOAD = "load"
    SCAN = "scan"
    INSTALL = "install"
    REMOVE = "remove"
    CURSORS = "cursors"
    SWEEP = "sweep"
    RETURN = "return"


class Urgency(IntEnum):
    """Order in which partitions get the next free thread."""

    LEAVING = 0  # another broker waits for the partition
    BACKLOG = 1  # records are only on this host
    AWAITED = 2  # readers wait for its manifest, or a subscription was changed
    QUIET = 3


class MovedPartition:
    """A partition between the attach of one owner and its end."""

    def __init__(self, owner: Ownership, uploader: Uploader, settings: TierSettings, log_start: int) -> None:
        self.owner = owner
        self.uploader = uploader
        self.settings = settings
        self.manifest = uploader.manifest
        self.log_start = log_start
        self.backlog = Backlog([], "")
        self.pending = NOTHING  # the partition's part of the backlog
        self.error = ""
        self.loaded = False
        self.dirty = True  # the directory must be listed again
        self._told = False  # the owner has reported a sealed segment since the last listing
        self._scan_tried = False
        self._oldest_us = NEVER_US  # time of the oldest sealed record that is known only here
        self.fenced = False
        self.retired = False  # replaced, detached or deleted: running work ends, and none begins
        self.predecessor: MovedPartition | None = None  # its running work must end first
        self.busy: Step | None = None
        self.running: set[int] = set()  # base offsets of the uploads under way
        self.finished: dict[int, SegmentEntry] = {}  # uploaded and read back, not in a manifest yet
        self.trim_offset = 0
        self.given_up_end = 0  # open holes that begin below this offset are given up
        self._return_us = 0
        self.cursors: bytes | None = None
        self._cursors_soon = False  # a subscription was created, deleted or moved by request
        self._leave_id = 0  # not 0: another broker gets the partition, so no step is delayed
        self._leave_end = 0  # end of the log that must be in the store before that
        self._listing = LocalListing(owner.directory)
        self._local: list[LocalSegment] = []
        self._doubtful: set[int] | None = None  # segments that an earlier mover may have put; None: all
        self._dropped: dict[str, int] = {}
        self._unnamed_since: dict[str, int] = {}
        self._failures = 0
        self._retry_us = 0
        self._installed_us = 0
        self._cursors_us = 0
        self._cursors_generation = 0
        self._merge_us = 0
        self._merged: list[Replacement] = []  # merged objects for the next manifest
        self._tombstone_retention_ms: int | None = None  # None: the topic is not compacted
        self.merging = False
        self._merge_failed = False
        self._staged = StagedObjects()
        self._sweep_us = 0
        self._encoded: tuple[Manifest, bytes] | None = None

    # -- the next step ----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Return whether no work for the partition is under way."""
        return self.busy is None and not self.running and not self.merging

    def next_step(self, now_us: int, stopping: bool) -> tuple[Step | None, int]:
        """Return the due step, else None and the time of the next check.

        Steps that the owner waits for come first.
        """
        if self.busy is not None or self.fenced or self.retired:
            return None, NEVER_US
        if now_us < self._retry_us:
            return None, self._retry_us
        # A scan shows how urgent the partition is, without the store; a failing one does not stop LOAD.
        if self.dirty and (self.loaded or not self._scan_tried):
            return Step.SCAN, now_us
        if not self.loaded:
            return Step.LOAD, now_us
        hurried = stopping or self._leave_id != 0
        cursors_us = self._cursors_due(hurried or self._cursors_soon)
        times = [(self._install_due(hurried), Step.INSTALL), (cursors_us, Step.CURSORS)]
        if not stopping:
            # A sweep must not see an object of a merge or a job that no manifest names yet.
            merging = self.merging or bool(self._merged) or self._staged.examined
            times += [
                (self._remove_due(), Step.REMOVE),
                (NEVER_US if merging else self._sweep_us, Step.SWEEP),
                (self._return_us if self._waits_for_return else NEVER_US, Step.RETURN),
            ]
        for due_us, step in times:
            if due_us <= now_us:
                return step, now_us
        return None, min(times)[0]

    @property
    def urgency(self) -> tuple[int, int]:
        """Return the sort key, lower is more urgent: Urgency, then the age of records not uploaded."""
        if self._leave_id:
            return Urgency.LEAVING, 0
        if self._told or self._oldest_us != NEVER_US:
            return Urgency.BACKLOG, 0 if self._told else self._oldest_us
        awaited = self._cursors_soon or (self.log_start > 0 and not self.loaded)
        return Urgency.AWAITED if awaited else Urgency.QUIET, 0

    def _install_due(self, stopping: bool) -> int:
        ready = installable([segment.base_offset for segment in self.backlog.segments], self.finished)
        wanted = ready or self._merged or self.trim_offset > self.manifest.start_offset
        wanted = wanted or self.uploader.unsettled or self._staged.examined
        wanted = wanted or self.manifest.open_start < self.given_up_end
        if wanted:
            return 0 if stopping else self._installed_us + INSTALL_INTERVAL_US
        # No segment is missing, so the rest is a hole at the log's end that only this host knows.
        holed = self._leave_id and not self.backlog.segments and self.manifest.uploaded_end < self._leave_end
        return self._installed_us + INSTALL_INTERVAL_US if holed else NEVER_US

    @property
    def _waits_for_return(self) -> bool:
        return any(hole.open for hole in self.manifest.all_holes())

    def _cursors_due(self, stopping: bool) -> int:
        if self.cursors is None:
            return NEVER_US
        return 0 if stopping else self._cursors_us + CURSORS_INTERVAL_US

    def _remove_due(self) -> int:
        return min(self._dropped.values()) + self.settings.reader_grace_us if self._dropped else NEVER_US

    def _next_upload(self) -> LocalSegment | None:
        if not self.loaded or self.fenced or self.retired or len(self.finished) >= FINISHED_MAX:
            return None
        for segment in self.backlog.segments:
            if segment.base_offset not in self.running and segment.base_offset not in self.finished:
                return segment
        return None

    def waiting(self, now_us: int) -> Waiting | None:
        """Claim of the partition to an upload slot; None if it has nothing to upload now."""
        segment = self._next_upload() if now_us >= self._retry_us else None
        return Waiting(self, segment.first_append_us, len(self.running)) if segment is not None else None

    def take(self, frame: Frame) -> None:
        """Handle one frame from the partition's owner."""
        match frame["kind"]:
            case "sealed":
                self.dirty = self._told = True
            case "trim":
                self.trim_offset = max(self.trim_offset, frame["start_offset"])
            case "give_up":
                self.given_up_end = max(self.given_up_end, frame["end_offset"])
            case "cursors":
                self.cursors = frame["blob"]
                self._cursors_soon |= bool(frame.get("soon"))
            case "leave":  # another broker gets it: upload all sealed segments and these cursors at once
                self._leave_id, self.cursors, self.dirty = frame["id"], frame["blob"], True
                self._leave_end = frame["end_offset"]
            case "detach":  # it was given away with all records in the store; the next owner continues
                self.retired = bool(frame.get("gone"))
            case "policy":
                self.compact(frame["tombstone_retention_ms"] if frame["compacts"] else None)

    # -- uploads ----------------------------------------------------------------------------------

    def upload_job(self, part_bytes: int, parallel: int) -> tuple[int, Job] | None:
        """Return the base offset and job of the next upload, which counts as running from now on."""
        segment = self._next_upload()
        if segment is None:
            return None
        base_offset = segment.base_offset
        self.running.add(base_offset)
        path = self.owner.directory / file_name(base_offset)
        resumed = self._doubtful is None or base_offset in self._doubtful
        return base_offset, lambda: self.uploader.upload(
            path, resumed=resumed, how=Putting(part_bytes, parallel)
        )

    def uploaded(self, base_offset: int, entry: SegmentEntry | None) -> None:
        self.running.discard(base_offset)
        if entry is None:
            self.dirty = True  # the segment was evicted, expired or deleted meanwhile
            return
        self.finished[base_offset] = entry
        self._succeeded()

    def upload_failed(self, base_offset: int, error: DanubeError, now_us: int, chance: float) -> None:
        self.running.discard(base_offset)
        if self._doubtful is not None:
            self._doubtful.add(base_offset)
        self._failed(error, now_us, chance)

    # -- merging ----------------------------------------------------------------------------------

    def merge_job(self, now_us: int, work: Path) -> Job | None:
        """Return the next merge or compaction, which counts as under way from now on, or None.

        A backlog comes first: records on one disk are at risk, while small objects are only slow.
        """
        if not self.loaded or self.retired or self.fenced or self.merging or self._merged:
            return None
        if now_us < self._retry_us or self.busy is Step.SWEEP:
            return None
        examine = self._staged.job(self.uploader, self.manifest, self._rules(now_us), work)
        if examine is not None:
            self.merging = True
            return examine
        if now_us < self._merge_us or self.backlog.segments:
            return None
        if self._tombstone_retention_ms is not None:
            return self._compaction_job(self._tombstone_retention_ms, now_us, work)
        manifest = self.manifest
        # Only compaction joins compacted segments with others.
        skipped = last_compacted(manifest) + 1
        found = merge_next(manifest.entries[skipped:], now_us, self.settings)
        if found is None:
            self._merge_later(self._next_merge_us(now_us))
            return None
        self.merging = True
        sources = [manifest.entry(skipped + index) for index in range(found[0], found[1] + 1)]
        return lambda: [(merge_objects(self.uploader, sources, work), sources)]

    def compact(self, tombstone_retention_ms: int | None) -> None:
        """Set how long tombstones of a compacted topic stay; None: the topic is not compacted."""
        self._tombstone_retention_ms = tombstone_retention_ms
        self._merge_us = 0

    def _compaction_job(self, tombstone_retention_ms: int, now_us: int, work: Path) -> Job | None:
        settings = self.settings.compaction
        plan = compaction_plan(self.manifest, now_us, tombstone_retention_ms, settings)
        if plan is None:
            self._merge_later(now_us + COMPACTION_INTERVAL_US)
            return None
        self.merging = True
        return lambda: compact_objects(self.uploader, plan, settings, work)

    def _merge_later(self, merge_us: int) -> None:
        """Postpone the merge: there is nothing to merge, so a former error of merging is over."""
        self._merge_us = merge_us
        if self._merge_failed:
            self._succeeded()

    def merged(self, result: list[Replacement] | Examined, now_us: int) -> None:
        """Take the result of a merge; an empty one postpones the next attempt."""
        self.merging = False
        if isinstance(result, Examined):
            self._staged.took(result, now_us)
            self._succeeded()
            return
        self._merged = result
        self._succeeded()
        if not result:
            self._merge_us = now_us + MERGE_PAUSE_US

    def merge_failed(self, error: DanubeError, now_us: int, chance: float) -> None:
        self.merging = False
        self._merge_failed = True
        self._merge_us = now_us + MERGE_INTERVAL_US
        self._failed(error, now_us, chance)

    def offered(self, objects: Sequence[Staged], now_us: int) -> list[Answer]:
        """Return the state of each staged object that a job offers; new ones are examined in their turn."""
        if not self.loaded:
            return [("waiting", self.error or "the manifest is not read yet")] * len(objects)
        return self._staged.ask(objects, self.manifest, self._rules(now_us), self.error)

    def _rules(self, now_us: int) -> Rules:
        lag_us = self.settings.compaction.lag_us
        return Rules(now_us, self.trim_offset, self._tombstone_retention_ms, lag_us)

    @property
    def _merge_interval_us(self) -> int:
        return MERGE_INTERVAL_US if self._tombstone_retention_ms is None else COMPACTION_INTERVAL_US

    def _next_merge_us(self, now_us: int) -> int:
        """Return when a merge may become possible without another upload; none is possible now."""
        young = self.manifest.entries["uploaded_us"] > now_us - self.settings.merge_after_us
        return now_us + MERGE_INTERVAL_US if young.any() else NEVER_US

    # -- steps ------------------------------------------------------------------------------------

    def job(self, step: Step, now_us: int) -> Job:
        """Return the work of a thread for ``step``; the caller reports its end by took() or failed()."""
        self.busy = step
        match step:
            case Step.LOAD:
                return lambda: self.uploader.load(self.log_start)
            case Step.SCAN:
                self.dirty, self._scan_tried = False, True
                return self._listing.refresh
            case Step.INSTALL:
                return self._install_job(now_us)
            case Step.REMOVE:
                keys = due(self._dropped, now_us, self.settings, ROUND_OBJECTS_MAX)
                return lambda: self._remove(keys)
            case Step.CURSORS:
                blob = self.cursors or b""
                return lambda: (put_cursors(self.uploader, blob, self._cursors_generation), blob)
            case Step.SWEEP:
                since, offered = self._unnamed_since, self._staged.keys(self.owner.identity)
                return lambda: sweep_partition(self.uploader, offered, since, now_us, self.settings)
            case Step.RETURN:
                work = self.owner.directory.parents[1] / RETURNED_NAME / self.owner.directory.name
                return lambda: take_returned(self.uploader, work, now_us)

    def _install_job(self, now_us: int) -> Job:
        count = installable([segment.base_offset for segment in self.backlog.segments], self.finished)
        entries = [self.finished[segment.base_offset] for segment in self.backlog.segments[:count]]
        changes = [
            adding(entries), replacing_in_order(self._merged), trimming(self.trim_offset),
            giving_up(self.given_up_end, now_us),
        ]  # fmt: skip
        if self._staged.examined:
            changes.insert(2, self._staged.change(self._rules(now_us)))

        def install() -> tuple[Manifest, list[str]]:
            changes[0] = adding(entries, self._local_holes(), self._leave_end)
            before = self.uploader.manifest
            after = self.uploader.install(in_turn(*changes))
            return after, dropped_keys(before, after)

        return install

    def _local_holes(self) -> tuple[Hole, ...]:
        """Return the holes in the owner's file; if it cannot be read, their records count as lost."""
        try:
            return holes_in(self.owner.directory)
        except (Damage, OSError):
            return ()

    def _remove(self, keys: list[str]) -> list[str]:
        self.uploader.remove(keys)
        return keys

    def took(self, step: Step, result: Any, now_us: int) -> bool:
        """Note that the step ended well; return whether the owner is to be told."""
        self.busy = None
        manifest_before, error_before = self.manifest, self.error
        match step:
            case Step.LOAD:
                self.loaded, self.manifest = True, result
                self._sweep_us = now_us + self._sweep_interval_us
            case Step.SCAN:
                self._told = self.dirty  # the owner reported another segment meanwhile
                self._local = result
                if self._doubtful is None:
                    self._doubtful = {segment.base_offset for segment in result}
            case Step.INSTALL:
                self._installed_us = now_us
                self.manifest, dropped = result
                self._dropped |= dict.fromkeys(dropped[: DROPPED_MAX - len(self._dropped)], now_us)
                self._merge_us = min(self._merge_us, now_us + self._merge_interval_us)
                self._merged = []
                self._staged.installed(self.manifest, now_us)
            case Step.REMOVE:
                for key in result:
                    self._dropped.pop(key, None)
            case Step.CURSORS:
                self._cursors_us = now_us
                self._cursors_generation, stored = result
                if self.cursors is stored:  # otherwise newer cursors came meanwhile
                    self.cursors, self._cursors_soon = None, False
            case Step.SWEEP:
                self._unnamed_since = result.unnamed_since
                full = len(result.doomed) >= ROUND_OBJECTS_MAX
                self._sweep_us = now_us + (0 if full else self._sweep_interval_us)
            case Step.RETURN:
                self.manifest = self.uploader.manifest
                self._return_us = now_us + (0 if result else RETURN_INTERVAL_US)
        self._succeeded()
        self._plan()
        news = manifest_before is not self.manifest or error_before != self.error
        seen = step is Step.LOAD or (step is Step.SCAN and self.loaded)
        return news or seen or (step is Step.CURSORS and self._leave_id != 0)

    @property
    def _sweep_interval_us(self) -> int:
        return min(SWEEP_INTERVAL_US, self.settings.orphan_age_us)

    def failed(self, step: Step, error: DanubeError, now_us: int, chance: float) -> None:
        """Note that the step failed; it is due again after a delay, with all its inputs."""
        self.busy = None
        if step is Step.SCAN:
            self.dirty = True
        elif step is Step.RETURN:
            self.manifest = self.uploader.manifest  # some holes may have been filled before the error
        self._failed(error, now_us, chance)

    def wait_no_longer(self) -> None:
        """Allow failed work to be tried now; a further failure waits as long as it would have."""
        self._retry_us = 0

    def _failed(self, error: DanubeError, now_us: int, chance: float) -> None:
        self._failures += 1
        self.fenced |= isinstance(error, Fenced)
        self.error = str(error)
        self._retry_us = now_us + retry_delay_us(self._failures, chance)

    def _succeeded(self) -> None:
        self._failures = 0
        self._retry_us = 0
        self._merge_failed = False
        self.error = self.backlog.flaw

    def _plan(self) -> None:
        """Compute the backlog from the last listing of the directory and the store."""
        end = max(entries_end(self.manifest), 0)
        start = max(self.manifest.start_offset, self.trim_offset)
        local = [one for one in self._local if not one.sealed or one.end_offset > start]
        only_here = (one.first_append_us for one in local if one.sealed and one.end_offset > end)
        self._oldest_us = min(only_here, default=NEVER_US)
        if not self.loaded:
            return
        self.backlog = backlog(local, end)
        self.error = self.backlog.flaw
        self.pending = together(Pending(one.size_bytes, one.first_append_us) for one in self.backlog.segments)
        bases = {segment.base_offset for segment in self.backlog.segments}
        self.finished = {base: entry for base, entry in self.finished.items() if base in bases}

    # -- the report to the owner ------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the fields of a ``state`` frame."""
        if self._encoded is None or self._encoded[0] is not self.manifest:
            self._encoded = (self.manifest, self.manifest.encode())
        return {
            "topic_id": self.owner.identity.topic_id,
            "partition": self.owner.identity.partition,
            "epoch": self.owner.epoch,
            "manifest": self._encoded[1],
            "loaded": self.loaded,
            "error": self.error,
            "left_id": self._leave_id if self.cursors is None else 0,
        }


def judged(question: Frame, partition: MovedPartition | None, now_us: int) -> dict[str, Any]:
    """Return the answer to a ``staged`` frame; ``partition``: None if the sender does not own it."""
    try:
        if partition is None or partition.owner.epoch != question["epoch"]:
            raise OwnerMoved("the partition has another owner", why=f"not with epoch {question['epoch']}")
        if partition.fenced:
            raise OwnerMoved("a newer owner of the partition is at work", why=partition.error)
        answers = partition.offered(decode_staged(question["objects"]), now_us)
    except DanubeError as error:
        return {"id": question["id"], "answers": b"", "error": str(error), "code": error.code}
    return {"id": question["id"], "answers": msgspec.msgpack.encode(answers), "error": ""}
