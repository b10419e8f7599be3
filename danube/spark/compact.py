"""Compact: many small objects of a store into large ones, and of each key the latest record only.

    spark-submit -m danube.spark.compact --storage s3://bucket/prefix --below 64MiB --to 512MiB
    python -m danube.spark.compact --local --storage s3://bucket/prefix --topic /default/state --keys

Tasks stage what they make as objects that no manifest names.  Only a partition's owner may change its
manifest, so a run beside live brokers ends there and reports proposals (``install=none``); where no broker
is running, ``install=offline`` puts the next manifest itself.  Objects that were replaced stay until the
owner's mover sweeps them, so readers of the manifest before still find them.

Options: ``storage`` (a store); ``topic``; ``keys``; ``below`` (objects smaller than this are merged); ``to``
(bytes of what is made); ``tombstoneAge`` (older tombstones go; without it all stay); ``keysMax``; ``work`` (a
directory for intermediate files, on each host); ``dryRun``; ``install``; ``processes``; ``report``; ``s3.*``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from danube.clock import wall_us
from danube.config_sections import parse_boolean
from danube.core.tier_plan import TierSettings, merge_next
from danube.errors import DanubeError, Fenced, InvalidArgument
from danube.limits import GIB, MIB
from danube.quantities import parse_duration_ms, parse_size_bytes
from danube.spark.compact_task import CompactTask, Proposal, decode, ends_well, stage
from danube.spark.findings import Report
from danube.spark.job_options import (
    JobOptions,
    Readers,
    parse_arguments,
    parse_count,
    read_job_options,
    write_report,
)
from danube.spark.places import StorePlace
from danube.spark.running import LocalRunner, Pace, Progress, Runner, job_session, no_progress, print_progress
from danube.spark.validate_store import partitions_in
from danube.wal.key_compaction import KEYS_MAX
from danube.wal.manifest import EntryFlag, Manifest, SegmentEntry
from danube.wal.manifest_keys import segment_key
from danube.wal.segment import LogIdentity
from danube.wal.uploader import Ownership, Uploader, in_turn, replacing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BELOW: Final = 64 * MIB
TO: Final = 512 * MIB
TO_MAX: Final = 4 * GIB
EXIT_USAGE: Final = 2
_FOREVER: Final = 1 << 62


def _install(text: str) -> str:
    word = text.strip().lower()
    if word not in ("none", "offline"):
        raise ValueError("use none or offline")
    return word


READERS: Final[Readers] = {
    "keys": parse_boolean,
    "below": parse_size_bytes,
    "to": parse_size_bytes,
    "tombstoneAge": parse_duration_ms,
    "keysMax": parse_count,
    "work": str.strip,
    "dryRun": parse_boolean,
    "install": _install,
}


def run(
    options: Mapping[str, str], spark: SparkSession | None = None, progress: Progress = no_progress
) -> Report:
    """Stage, and install where that was asked for; ``facts`` of the report hold the proposals."""
    read = read_job_options("compact", options, READERS)
    place = read.place()
    if not isinstance(place, StorePlace):
        raise InvalidArgument(
            f"{place.name} is a broker's data directory",
            why="its owner merges and compacts local segments itself",
            hint="name the store's URL",
        )
    start_s = time.monotonic()
    report = Report(job="compact")
    with tempfile.TemporaryDirectory(prefix="danube-compact-", dir=read.get("work")) as work:
        _Job(read, place, _runner(read, spark), report, progress, work).run()
    report.seconds = round(time.monotonic() - start_s, 3)
    if read.get("report"):
        write_report(report, read.get("report"))
    return report


def _runner(read: JobOptions, spark: SparkSession | None) -> Runner:
    if spark is None:
        return LocalRunner(read.get("processes", 0))
    from danube.spark.spark_runner import SparkRunner

    return SparkRunner(spark, read.get("processes", 0))


class _Job:
    """One run."""

    def __init__(
        self,
        options: JobOptions,
        place: StorePlace,
        runner: Runner,
        report: Report,
        progress: Progress,
        work: str,
    ) -> None:
        self._options = options
        self._place = place
        self._runner = runner
        self._report = report
        self._progress = progress
        self._work = work

    def run(self) -> None:
        options, report = self._options, self._report
        manifests = self._manifests()
        tasks = [task for manifest in manifests for task in self._tasks(manifest)]
        sources = [entry for task in tasks for group in task.groups for entry in group]
        report.count("partitions", len(manifests))
        report.count("planned_objects", sum(len(task.groups) for task in tasks))
        report.count("source_objects", len(sources))
        report.count("source_bytes", sum(entry.size_bytes for entry in sources))
        if options.get("dryRun", False):
            return
        pace = Pace("compact", len(tasks), self._progress)
        made: dict[LogIdentity, list[Proposal]] = {}
        for number, result in self._runner.run(stage, tasks):
            proposals = decode(result)
            made.setdefault(tasks[number].identity, []).extend(proposals)
            pace.step(sum(one.source_bytes for one in proposals))
        known = {manifest.identity: manifest for manifest in manifests}
        for identity, proposals in sorted(made.items()):
            self._finish(known[identity], sorted(proposals, key=lambda one: one.entry[0]))

    def _manifests(self) -> list[Manifest]:
        found = [
            self._place.manifest(each) for each in partitions_in(self._place.store()) if each is not None
        ]
        return [one for one in found if one is not None and self._options.wants(one.topic)]

    # -- planning -----------------------------------------------------------------------------------

    def _tasks(self, manifest: Manifest) -> Iterator[CompactTask]:
        """Merges are tasks of their own; latest-per-key needs all of a partition's keys in one place."""
        keys = bool(self._options.get("keys", False))
        if keys:
            groups = self._key_groups(manifest)
            if groups:
                yield self._task(manifest, tuple(groups))
            return
        for group in self._merge_groups(manifest):
            yield self._task(manifest, (group,))

    def _task(self, manifest: Manifest, groups: tuple[tuple[SegmentEntry, ...], ...]) -> CompactTask:
        options = self._options
        age_ms = options.get("tombstoneAge")
        first = groups[0][0]
        at_start = first.base_offset <= manifest.start_offset or first.base_offset == 0
        before_us = wall_us() - age_ms * 1_000 if age_ms is not None and at_start else 0
        return CompactTask(
            self._place, manifest.topic, manifest.identity, manifest.epoch, groups,
            bool(options.get("keys", False)), options.get("keysMax", KEYS_MAX), before_us, self._work,
        )  # fmt: skip

    def _merge_groups(self, manifest: Manifest) -> Iterator[tuple[SegmentEntry, ...]]:
        """Runs of small adjacent objects, by the rule that the mover merges by."""
        settings = TierSettings(
            merge_below=self._options.get("below", BELOW),
            merge_to=min(TO_MAX, self._options.get("to", TO)),
            merge_after_us=0,
        )
        done, entries = 0, manifest.entries
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
        groups: list[tuple[SegmentEntry, ...]] = []
        group: list[SegmentEntry] = []
        size = 0
        for entry in entries:
            group.append(entry)
            size += entry.size_bytes
            full = size >= self._options.get("to", TO)
            if (full or entry is entries[-1]) and ends_well(self._place, manifest.identity, entry):
                groups.append(tuple(group))
                group, size = [], 0
        if group and len(entries):
            self._report.remarks.append(
                f"{manifest.topic}: objects from offset {group[0].base_offset} on hold no producers' state"
            )
        return groups

    # -- installing ---------------------------------------------------------------------------------

    def _finish(self, manifest: Manifest, proposals: Sequence[Proposal]) -> None:
        report = self._report
        report.count("objects", len(proposals))
        report.count("bytes", sum(one.made.size_bytes for one in proposals))
        report.count("removed_records", sum(one.removed for one in proposals))
        report.facts[manifest.identity.directory_name] = {
            "topic": manifest.topic,
            "proposals": [
                {
                    "key": segment_key(manifest.identity, one.made),
                    "base_offset": one.made.base_offset,
                    "end_offset": one.made.end_offset,
                    "sources": [source.hex() for source in one.sources],
                }
                for one in proposals
            ],
        }
        if self._options.get("install", "none") == "none":
            report.remarks.append(f"{manifest.topic}: {len(proposals)} objects are staged and not installed")
            return
        report.count("installed", install(self._place, manifest, proposals))


def _ended(entries: Any) -> Any:
    """The entries with a large one behind them: no small run waits for more."""
    if not len(entries):
        return entries
    end = np.zeros(1, entries.dtype)
    end["base_offset"], end["size_bytes"] = entries["end_offset"][-1], np.uint64(1 << 60)
    return np.concatenate([entries, end])


def install(place: StorePlace, planned: Manifest, proposals: Sequence[Proposal]) -> int:
    """Put the next manifest of a partition that no broker owns now; how many proposals it has.

    Proposals whose sources are not named any more are left out.  Fenced when a newer manifest comes in
    between, as from a broker that is running after all: then its manifest is in force and stays so.
    """
    with tempfile.TemporaryDirectory(prefix="danube-install-") as folder:
        owner = Ownership(planned.topic, planned.identity, planned.epoch, Path(folder))
        uploader = Uploader(place.store(), owner)
        before = uploader.load()
        if (before.epoch, before.generation) < (planned.epoch, planned.generation):
            raise Fenced(f"{planned.topic} has an older manifest than when this was planned")
        changes = [replacing(one.made, _sources(before, one)) for one in proposals]
        after = uploader.install(in_turn(*changes))
    hashes = {bytes(one) for one in after.entries["content_hash"]}
    return sum(1 for one in proposals if one.made.content_hash in hashes)


def _sources(manifest: Manifest, proposal: Proposal) -> list[SegmentEntry]:
    """Stand-ins for the entries that a proposal replaces: only their hashes are compared."""
    return [proposal.made._replace(content_hash=one) for one in proposal.sources]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.  Exit codes: 0 done, 2 refused or failed."""
    given, local = parse_arguments(
        "compact", "Fewer and larger objects.", READERS, sys.argv[1:] if argv is None else argv
    )
    try:
        with job_session("compact", local) as spark:
            report = run(given, spark, print_progress)
    except DanubeError as error:
        print_progress(f"{error}" + (f"\n{error.hint}" if error.hint else ""))
        return EXIT_USAGE
    for remark in report.remarks:
        print_progress(remark)
    counts = report.counts
    sources, objects = counts.get("source_objects", 0), counts.get("objects", 0)
    print_progress(f"compact: {sources} objects became {objects}, {report.seconds} s")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
