"""Validate: check that every byte of the history is as it was written.

The job plans from listings, manifests, marks and cursors, reads and checks segments in tasks, and then
compares their results.  It may run beside brokers: files that change meanwhile are checked again, and only
lasting faults are findings.

    danube spark validate --storage s3://bucket/prefix --report findings.json
    danube spark validate --local --storage /var/lib/danube

Options: ``storage``; ``topic`` (names and patterns, with commas); ``store`` (URL of the objects that belong
to a data directory: copies are compared); ``payloads`` (inflate compressed columns, and compare payloads
with their schemas); ``failOn`` (warning or error); ``processes``; ``report``; ``s3.*``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from danube.config.sections import parse_boolean
from danube.errors import DanubeError, NotFound
from danube.host import clock
from danube.limits import GIB
from danube.spark.history.options import Readers, one_of
from danube.spark.history.places import AnyPlace, DataDirectory, StorePlace, open_place
from danube.spark.jobs.findings import Finding, Report, SegmentFacts, Severity, finding
from danube.spark.jobs.options import JobOptions, read_job_options, reported
from danube.spark.jobs.running import (
    Pace,
    Progress,
    Runner,
    command,
    frame_of_rows,
    no_progress,
    packed,
    runner_for,
)
from danube.spark.jobs.validate.directory import (
    ATTEMPTS,
    DirectoryPlan,
    directories,
    directory_state,
    judge_directory,
    plan_directory,
    remarks_of,
)
from danube.spark.jobs.validate.order import check_schemas
from danube.spark.jobs.validate.store import (
    Listed,
    StorePlan,
    check_copies,
    check_other,
    judge_store,
    list_partition,
    manifest_names,
    partitions_in,
    plan_store,
)
from danube.spark.jobs.validate.task import SegmentWork, ValidateTask, decode, validate
from danube.wal.segments.segment import NO_LOG, LogIdentity, log_id_of_topic
from danube.wal.stores.objects import ObjectStore
from danube.wal.verify.bytes import Damage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASK_BYTES_MAX: Final = 2 * GIB
FINDINGS_SCHEMA: Final = "file string, byte long, offset long, kind string, detail string, severity string"

Plan = DirectoryPlan | StorePlan


READERS: Final[Readers] = {
    "store": str.strip,
    "payloads": parse_boolean,
    "failOn": one_of(*map(str, reversed(Severity))),
}


def run(
    options: Mapping[str, str], spark: SparkSession | None = None, progress: Progress = no_progress
) -> Report:
    """Validate what ``options`` name, in ``spark`` or, without one, in processes of this machine.

    Raises InvalidArgument and NotFound for impossible options, and the errors of an unreachable store.
    Findings are in the report, never raised.
    """
    read = read_job_options(options, READERS)
    with reported("validate", read.get("report")) as report:
        report.fail_on = read.get("failOn", report.fail_on)
        _Job(read, runner_for(spark, read.get("processes", 0)), report, progress).run()
    return report


def frame_of(spark: SparkSession, findings: Iterable[Finding]) -> DataFrame:
    """Findings as a DataFrame with the columns file, byte, offset, kind, detail, severity."""
    return frame_of_rows(spark, FINDINGS_SCHEMA, map(msgspec.structs.asdict, findings))


class _Job:
    """One run."""

    def __init__(self, options: JobOptions, runner: Runner, report: Report, progress: Progress) -> None:
        self._options = options
        self._runner = runner
        self._progress = progress
        self._payloads = bool(options.get("payloads", False))
        self.report = report
        self._names: dict[int, str] = {}
        self._log_ids: dict[int, bytes] = {}  # both by topic id

    def run(self) -> None:
        place = self._options.place()
        local: dict[LogIdentity, list[SegmentFacts]] = {}
        stored: dict[LogIdentity, tuple[StorePlan, list[SegmentFacts]]] = {}
        if isinstance(place, DataDirectory):
            self._learn_names(place)
            local = self._directory(place)
            if self._options.get("store"):
                stored = self._store(open_place(self._options.get("store"), self._options.settings))
        else:
            stored = self._store(place)
        for identity, (plan, objects) in stored.items():
            self._add(check_copies(plan, local.get(identity, []), objects))
        self.report.facts |= {"storage": place.name, "by_kind": self.report.by_kind}

    def _add(self, findings: Iterable[Finding]) -> None:
        self.report.findings += findings

    def _learn_names(self, place: AnyPlace) -> None:
        try:
            for record in place.metadata().topics():
                self._names[record.topic_id] = record.topic
                log_id = log_id_of_topic(record)
                self._log_ids[record.topic_id] = log_id
        except (NotFound, DanubeError) as error:
            if isinstance(place, DataDirectory):
                self._add(
                    [finding(Damage.METADATA_DAMAGED, f"{place.name}/metadata/metadata.log", str(error))]
                )

    def _log_id(self, identity: LogIdentity) -> bytes:
        return self._log_ids.get(identity.topic_id, NO_LOG)

    def _plan_store(
        self, store: ObjectStore, identity: LogIdentity, listed: Listed, now_us: int
    ) -> StorePlan:
        return plan_store(store, identity, listed, now_us, self._log_id(identity))

    def _wanted(self, identity: LogIdentity, name: str = "") -> bool:
        if not self._options.get("topic"):
            return True
        return self._options.wants(name or self._names.get(identity.topic_id, ""))

    # -- a data directory --------------------------------------------------------------------------

    def _directory(self, place: DataDirectory) -> dict[LogIdentity, list[SegmentFacts]]:
        waiting = [pair for pair in directories(place) if self._wanted(pair[0])]
        self._check_wanted(bool(waiting))
        kept: dict[LogIdentity, list[SegmentFacts]] = {}
        for attempt in range(ATTEMPTS):
            plans = [
                plan_directory(identity, directory, self._log_id(identity)) for identity, directory in waiting
            ]
            again: list[tuple[LogIdentity, Any]] = []
            for plan, segments in zip(plans, self._read(place, plans), strict=True):
                there = [facts for facts in segments if not facts.gone]
                found = judge_directory(plan, there)
                changed = len(there) < len(segments) or directory_state(plan.directory) != plan.state
                if found and changed and attempt < ATTEMPTS - 1:
                    again.append((plan.identity, plan.directory))
                    continue
                self._add(found)
                self.report.remarks += plan.remarks + remarks_of(there)
                self._count(there)
                kept[plan.identity] = there
            waiting = again
            if not waiting:
                break
        self._check_schemas(place, kept.values())
        return kept

    def _check_wanted(self, some: bool) -> None:
        if not some and self._options.get("topic"):
            raise NotFound(
                f"no topic of {self._options.storage} is meant by {', '.join(self._options.get('topic'))}",
                hint="names begin with their namespace: /default/orders",
            )

    # -- a store ------------------------------------------------------------------------------------

    def _store(self, place: AnyPlace) -> dict[LogIdentity, tuple[StorePlan, list[SegmentFacts]]]:
        if not isinstance(place, StorePlace):
            raise NotFound(f"{place.name} is a data directory and no store", hint="name the store's URL")
        store = place.store()
        listed = partitions_in(store)
        self._add(check_other(store, listed.pop(None, [])))
        waiting = dict(listed)
        kept: dict[LogIdentity, tuple[StorePlan, list[SegmentFacts]]] = {}
        for attempt in range(ATTEMPTS):
            now_us = clock.wall_us()
            plans = [
                plan
                for identity, objects in waiting.items()
                if identity is not None
                and self._wanted(identity, (plan := self._plan_store(store, identity, objects, now_us)).topic)
            ]
            if not attempt:
                self._check_wanted(bool(plans))
            waiting = {}
            for plan, segments in zip(plans, self._read(place, plans), strict=True):
                found = judge_store(plan, segments)
                if found and attempt < ATTEMPTS - 1:
                    objects = list_partition(store, plan.identity)
                    if manifest_names(objects) != plan.state:
                        waiting[plan.identity] = objects
                        continue
                self._add(found)
                self.report.remarks += plan.remarks
                self._count([facts for facts in segments if not facts.gone])
                kept[plan.identity] = (plan, segments)
            if not waiting:
                break
        self._check_schemas(place, (segments for _, segments in kept.values()))
        return kept

    # -- both ---------------------------------------------------------------------------------------

    def _read(self, place: AnyPlace, plans: Sequence[Plan]) -> list[list[SegmentFacts]]:
        """Facts of each plan's segments, by base offset; the tasks know nothing of partitions."""
        work: list[SegmentWork] = [one for plan in plans for one in plan.work]
        sizes = [one.size for one in work]
        runs = packed(sizes, self._runner.slots, TASK_BYTES_MAX)
        tasks = [ValidateTask(place, tuple(work[number] for number in run), self._payloads) for run in runs]
        pace = Pace("validate", len(tasks), self._progress)
        found: list[SegmentFacts] = [SegmentFacts(0, where="")] * len(work)
        wrong = len(self.report.findings)
        for number, result in self._runner.run(validate, tasks):
            for index, facts in zip(runs[number], decode(result), strict=True):
                found[index] = facts
                wrong += len(facts.findings)
            pace.step(sum(sizes[index] for index in runs[number]), f"{wrong} findings")
        parts: list[list[SegmentFacts]] = []
        start = 0
        for plan in plans:
            segments = found[start : start + len(plan.work)]
            parts.append(sorted(segments, key=lambda facts: facts.base_offset))
            start += len(plan.work)
        return parts

    def _count(self, segments: Sequence[SegmentFacts]) -> None:
        report = self.report
        report.count("partitions")
        report.count("segments", len(segments))
        report.count("batches", sum(one.batch_count for one in segments))
        report.count("records", sum(one.record_count for one in segments))
        report.count("bytes", sum(one.size for one in segments))

    def _check_schemas(self, place: AnyPlace, partitions: Iterable[Sequence[SegmentFacts]]) -> None:
        named = [facts for segments in partitions for facts in segments if facts.schemas]
        if not named:
            return
        try:
            metadata = place.metadata()
        except DanubeError:
            self.report.remarks.append(f"{place.name} holds no metadata, so schema ids were not checked")
            return
        self._add(check_schemas(named, metadata))


def _told(report: Report) -> Iterator[str]:
    for one in report.findings[:100]:
        yield f"{one.severity} {one.kind} {one.file} byte {one.byte} offset {one.offset}: {one.detail}"
    records, segments = report.counts.get("records", 0), report.counts.get("segments", 0)
    found = f"{len(report.findings)} findings, {report.seconds} s"
    yield f"validate: {records} records in {segments} segments, {found}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.  Exit codes: 0 clean, 10 findings, 11 something could not be read, 2 usage."""
    return command("validate", "Check every byte of stored history.", READERS, run, _told, argv)


if __name__ == "__main__":
    sys.exit(main())
