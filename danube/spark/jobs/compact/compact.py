"""Compact: many small objects of a store into large ones, and of each key the latest record only.

    danube spark compact --storage s3://bucket/prefix --below 64MiB --to 512MiB
    danube spark compact --local --storage s3://bucket/prefix --topic /default/state --keys

Tasks stage new objects that no manifest names.  Only a partition's owner may change its manifest.  With
``broker`` the objects are offered to the owner, which examines each and installs it or gives the reason for
its refusal (``install=live``).  If no broker runs, ``install=offline`` puts the next manifest itself;
``install=none`` only reports.  Replaced and refused objects stay until the owner's mover sweeps them, so
readers of an older manifest still find them.

Options: READERS, and docs/spark-jobs.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from danube.config.quantities import parse_duration_ms, parse_size_bytes
from danube.config.sections import parse_boolean
from danube.core.partition.tier_plan import TierSettings, merge_next
from danube.errors import Damage, Fenced, InvalidArgument, NotFound
from danube.host.clock import wall_us
from danube.limits import GIB, MIB
from danube.spark.history.access import ACCESS_READERS, access_of
from danube.spark.history.options import Readers, one_of, parse_count
from danube.spark.history.places import StorePlace
from danube.spark.jobs.compact.live import INSTALLED, REFUSED, UNANSWERED, LiveBroker, Outcome
from danube.spark.jobs.compact.task import CompactTask, ends_well, stage
from danube.spark.jobs.findings import Report
from danube.spark.jobs.options import JobOptions, parse_local_path, read_job_options, reported
from danube.spark.jobs.running import (
    Pace,
    Progress,
    Runner,
    command,
    frame_of_rows,
    no_progress,
    runner_for,
)
from danube.wal.segments.key_compaction import KEYS_MAX
from danube.wal.segments.segment import NO_LOG, LogIdentity, log_id_of_topic
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import EntryFlag, Manifest, SegmentEntry
from danube.wal.tier.rewriting import last_compacted, replacing_in_order
from danube.wal.tier.staged import Staged, decode_staged
from danube.wal.tier.uploader import Change, Ownership, Uploader, in_turn, replacing
from danube.wal.verify.store import partitions_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BELOW: Final = 64 * MIB
TO: Final = 512 * MIB
TO_MAX: Final = 4 * GIB
COMPACT_AFTER_MS: Final = 60_000
WAIT_MS: Final = 300_000
FRAME_SCHEMA: Final = (
    "topic string, partition int, start long, end long, key string, sources int, source_bytes long, "
    "bytes long, removed long, outcome string, why string"
)
STAGED: Final = "staged"  # the outcome where nothing is installed
_FOREVER: Final = 1 << 62


READERS: Final[Readers] = {
    "keys": parse_boolean,
    "below": parse_size_bytes,
    "to": parse_size_bytes,
    "tombstoneAge": parse_duration_ms,
    "compactAfter": parse_duration_ms,
    "keysMax": parse_count,
    "work": parse_local_path,
    "dryRun": parse_boolean,
    "broker": str.strip,
    **ACCESS_READERS,
    "install": one_of("none", "offline", "live"),
    "wait": parse_duration_ms,
}


def run(
    options: Mapping[str, str], spark: SparkSession | None = None, progress: Progress = no_progress
) -> Report:
    """Stage, and install if requested; the report's ``facts`` have the outcome of each object."""
    read = read_job_options(options, READERS)
    live = _live(read)
    place = read.place()
    if not isinstance(place, StorePlace):
        raise InvalidArgument(
            f"{place.name} is a broker's data directory",
            why="its owner merges and compacts local segments itself",
            hint="name the store's URL",
        )
    runner = runner_for(spark, read.get("processes", 0))
    with (
        reported("compact", read.get("report")) as report,
        live or nullcontext(),
        tempfile.TemporaryDirectory(prefix="danube-compact-", dir=read.get("work")) as work,
    ):
        _Job(read, place, runner, report, progress, work, live).run()
    return report


def _live(read: JobOptions) -> LiveBroker | None:
    """The broker to offer objects to, not connected yet; None if none is named."""
    broker, install = read.get("broker", ""), read.get("install", "")
    access = access_of(broker, {name: read.get(name) for name in ACCESS_READERS})
    if not broker:
        if install == "live":
            raise InvalidArgument("install=live needs a broker", hint="name it: broker=danube://host:6660")
        return None
    if install not in ("", "live"):
        raise InvalidArgument(
            f"broker and install={install} exclude each other",
            why="the manifests of a running broker are written by it alone",
            hint="leave install away",
        )
    return LiveBroker(broker, access, read.get("wait", WAIT_MS) / 1000)


def frame_of(spark: SparkSession, report: Report) -> DataFrame:
    """Return one row for each new object: its sources, size and outcome."""
    rows = ({**one, **fact} for fact in report.facts.values() for one in fact["objects"])
    return frame_of_rows(spark, FRAME_SCHEMA, rows)


@dataclass
class _Job:
    """One run."""

    options: JobOptions
    place: StorePlace
    runner: Runner
    report: Report
    progress: Progress
    work: str
    live: LiveBroker | None
    log_ids: dict[int, bytes] = field(default_factory=dict)  # by topic id

    @property
    def keys(self) -> bool:
        return bool(self.options.get("keys", False))

    def run(self) -> None:
        options, report = self.options, self.report
        manifests = self._manifests()
        self._learn_logs()
        tasks = [task for manifest in manifests for task in self._tasks(manifest)]
        sources = [entry for task in tasks for group in task.groups for entry in group]
        report.count("partitions", len(manifests))
        report.count("planned_objects", sum(len(task.groups) for task in tasks))
        report.count("source_objects", len(sources))
        report.count("source_bytes", sum(entry.size_bytes for entry in sources))
        if options.get("dryRun", False):
            return
        report.count("objects", 0)
        pace = Pace("compact", len(tasks), self.progress)
        made: dict[LogIdentity, list[Staged]] = {}
        for number, result in self.runner.run(stage, tasks):
            objects = decode_staged(result)
            made.setdefault(tasks[number].identity, []).extend(objects)
            pace.step(sum(one.source_bytes for one in objects))
        known = {manifest.identity: manifest for manifest in manifests}
        for identity, objects in sorted(made.items()):
            self._finish(known[identity], sorted(objects, key=lambda one: one.made.base_offset))

    def _learn_logs(self) -> None:
        """Whose the objects must be; a store without a copy of the metadata cannot say."""
        with suppress(NotFound, Damage):
            topics = self.place.metadata().topics()
            self.log_ids = {record.topic_id: log_id_of_topic(record) for record in topics}

    def _manifests(self) -> list[Manifest]:
        partitions = [LogIdentity(*each) for each in partitions_in(self.place.store()) if each[0] >= 0]
        found = [self.place.manifest(each) for each in partitions]
        wanted = [one for one in found if one is not None and self.options.wants(one.topic)]
        return [one for one in wanted if not self._left_alone(one)]

    def _left_alone(self, manifest: Manifest) -> bool:
        """Whether the broker would not take anything of a partition; said before anything is staged."""
        why = self.live.unwilling(manifest, keys=self.keys) if self.live is not None else ""
        if why:
            self.report.remarks.append(
                f"{manifest.topic} partition {manifest.partition} is left alone: {why}"
            )
            self.report.count("left_alone")
            self.report.partial = True
        return bool(why)

    # -- planning -----------------------------------------------------------------------------------

    def _tasks(self, manifest: Manifest) -> Iterator[CompactTask]:
        """Merges are tasks of their own; latest-per-key needs all of a partition's keys in one place."""
        if self.keys:
            groups = self._key_groups(manifest)
            if groups:
                yield self._task(manifest, tuple(groups))
            return
        for group in self._merge_groups(manifest):
            yield self._task(manifest, (group,))

    def _task(self, manifest: Manifest, groups: tuple[tuple[SegmentEntry, ...], ...]) -> CompactTask:
        options = self.options
        age_ms = options.get("tombstoneAge")
        first = groups[0][0]
        at_start = first.base_offset <= manifest.start_offset or first.base_offset == 0
        before_us = wall_us() - age_ms * 1_000 if age_ms is not None and at_start else 0
        return CompactTask(
            self.place, manifest.topic, manifest.identity, manifest.epoch, groups,
            self.keys, options.get("keysMax", KEYS_MAX), before_us, self.work,
            self.log_ids.get(manifest.topic_id, NO_LOG),
        )  # fmt: skip

    def _merge_groups(self, manifest: Manifest) -> Iterator[tuple[SegmentEntry, ...]]:
        """Return runs of small adjacent objects, by the mover's rule for merging.

        Only a key compaction joins compacted objects with others.
        """
        settings = TierSettings(
            merge_below=self.options.get("below", BELOW),
            merge_to=min(TO_MAX, self.options.get("to", TO)),
            merge_after_us=0,
        )
        done, entries = last_compacted(manifest) + 1, manifest.entries
        while (found := merge_next(_ended(entries[done:]), _FOREVER, settings)) is not None:
            first, last = done + found[0], done + found[1]
            yield tuple(manifest.entry(index) for index in range(first, last + 1))
            done = last + 1

    def _key_groups(self, manifest: Manifest) -> list[tuple[SegmentEntry, ...]]:
        """All objects behind the last hole, in groups of about ``to`` bytes that may end where they end."""
        entries = [manifest.entry(index) for index in range(len(manifest))]
        holes = [
            index for index, entry in enumerate(entries) if entry.flags & EntryFlag.HOLE_BEFORE and index
        ]
        entries = entries[holes[-1] if holes else 0 :]
        if self.live is not None:
            entries = self._old_enough(entries)
        groups: list[tuple[SegmentEntry, ...]] = []
        group: list[SegmentEntry] = []
        size = 0
        for entry in entries:
            group.append(entry)
            size += entry.size_bytes
            full = size >= self.options.get("to", TO)
            if (full or entry is entries[-1]) and ends_well(self.place, manifest.identity, entry):
                groups.append(tuple(group))
                group, size = [], 0
        if group and len(entries):
            self.report.remarks.append(
                f"{manifest.topic}: objects from offset {group[0].base_offset} on hold no producers' state"
            )
        return groups

    def _old_enough(self, entries: list[SegmentEntry]) -> list[SegmentEntry]:
        """Return the objects that a running broker would compact: not the newest, nor recent ones."""
        before_us = wall_us() - self.options.get("compactAfter", COMPACT_AFTER_MS) * 1_000
        young = [index for index, entry in enumerate(entries) if entry.last_append_us > before_us]
        return entries[: young[0] if young else -1]

    # -- installing ---------------------------------------------------------------------------------

    def _finish(self, manifest: Manifest, objects: Sequence[Staged]) -> None:
        report = self.report
        outcomes = self._install(manifest, objects)
        report.count("objects", len(objects))
        report.count("bytes", sum(one.made.size_bytes for one in objects))
        report.count("removed_records", sum(one.removed for one in objects))
        for outcome in outcomes:
            if outcome.word != STAGED:
                report.count(outcome.word)
            if outcome.word in (REFUSED, UNANSWERED):
                report.partial = True
        report.facts[manifest.identity.directory_name] = {
            "topic": manifest.topic,
            "partition": manifest.partition,
            "objects": [
                _fact(manifest.identity, one, outcome) for one, outcome in zip(objects, outcomes, strict=True)
            ],
        }
        whys = {outcome.why for outcome in outcomes if outcome.why}
        report.remarks += [f"{manifest.topic} partition {manifest.partition}: {why}" for why in sorted(whys)]

    def _install(self, manifest: Manifest, objects: Sequence[Staged]) -> list[Outcome]:
        if self.live is not None:
            return self.live.install(manifest, objects)
        if self.options.get("install", "none") == "offline":
            return install(self.place, manifest, objects)
        return [Outcome(STAGED, "objects are staged and not installed")] * len(objects)


def _fact(identity: LogIdentity, one: Staged, outcome: Outcome) -> dict[str, Any]:
    return {
        "key": segment_key(identity, one.made),
        "start": one.made.base_offset,
        "end": one.made.end_offset,
        "sources": len(one.sources),
        "source_bytes": one.source_bytes,
        "bytes": one.made.size_bytes,
        "removed": one.removed,
        "outcome": outcome.word,
        "why": outcome.why,
    }


def _ended(entries: Any) -> Any:
    """The entries with a large one behind them: no small run waits for more."""
    if not len(entries):
        return entries
    end = np.zeros(1, entries.dtype)
    end["base_offset"], end["size_bytes"] = entries["end_offset"][-1], np.uint64(1 << 60)
    return np.concatenate([entries, end])


def install(place: StorePlace, planned: Manifest, objects: Sequence[Staged]) -> list[Outcome]:
    """Put the next manifest of a partition that no broker owns now; return the outcome of each object.

    Objects whose sources are no longer in the manifest are left out.  Raises Fenced if a newer manifest
    appears meanwhile, as from a running broker; that manifest stays in force.
    """
    with tempfile.TemporaryDirectory(prefix="danube-install-") as folder:
        owner = Ownership(planned.topic, planned.identity, planned.epoch, Path(folder))
        uploader = Uploader(place.store(), owner)
        before = uploader.load()
        if (before.epoch, before.generation) < (planned.epoch, planned.generation):
            raise Fenced(f"{planned.topic} has an older manifest than when this was planned")
        after = uploader.install(_replacing(objects))
    hashes = {bytes(one) for one in after.entries["content_hash"]}
    left_out = Outcome(REFUSED, "sources are not what the manifest names any more")
    return [Outcome(INSTALLED, "") if one.made.content_hash in hashes else left_out for one in objects]


def _replacing(objects: Sequence[Staged]) -> Change:
    """Merges for themselves; of a key compaction none behind one that is left out.

    The sources are stand-ins: only their hashes are compared.
    """
    replaced = [
        (one.made, [one.made._replace(content_hash=source) for source in one.sources]) for one in objects
    ]
    if any(one.keys for one in objects):
        return replacing_in_order(replaced)
    return in_turn(*(replacing(made, sources) for made, sources in replaced))


def _told(report: Report) -> Iterator[str]:
    yield from report.remarks
    counts = report.counts
    sources, objects = counts.get("source_objects", 0), counts.get("objects", 0)
    words = [f"{counts[word]} {word}" for word in (INSTALLED, REFUSED, UNANSWERED) if word in counts]
    made = f"{sources} objects became {objects}" + (f" ({', '.join(words)})" if words else "")
    yield f"compact: {made}, {report.seconds} s"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.  Exit codes: 0 done, 9 some objects were not installed, 2 refused or failed."""
    return command("compact", "Fewer and larger objects.", READERS, run, _told, argv)


if __name__ == "__main__":
    sys.exit(main())
