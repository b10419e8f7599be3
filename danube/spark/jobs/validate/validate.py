"""Validate: check that every byte of the history is as it was written.

The job plans from listings, manifests, marks and cursors, reads and checks segments in tasks, and then
compares their results.  It may run beside brokers: files that change meanwhile are checked again, and only
lasting faults are findings.

    danube spark validate --storage s3://bucket/prefix --report findings.json
    danube spark validate --local --storage /var/lib/danube

Options: READERS, and docs/spark-jobs.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from danube.config.sections import parse_boolean
from danube.errors import DanubeError, NotFound, StoreRefused, StoreUnavailable
from danube.limits import GIB
from danube.spark.history.options import Readers, one_of
from danube.spark.history.places import AnyPlace, DataDirectory, StorePlace, open_place
from danube.spark.jobs.findings import Finding, Report, SegmentFacts, Severity, finding, findings_in
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
from danube.spark.jobs.validate.directory import DirectoryPlan
from danube.spark.jobs.validate.order import check_schemas
from danube.spark.jobs.validate.store import StorePlan, check_copies, plan_store
from danube.spark.jobs.validate.task import ValidateTask, decode, validate
from danube.wal.segments.segment import log_id_of_topic
from danube.wal.verify.bytes import Damage, Judged
from danube.wal.verify.state import Identity
from danube.wal.verify.store import partitions_in, verify_other
from danube.wal.verify.tree import ATTEMPTS
from danube.wal.verify.tree import partitions_in as directories_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASK_BYTES_MAX: Final = 2 * GIB
FINDINGS_SCHEMA: Final = "file string, byte long, offset long, kind string, detail string, severity string"

Plan = TypeVar("Plan", DirectoryPlan, StorePlan)


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
        place, other = self._options.place(), self._options.get("store")
        local: dict[Identity, DirectoryPlan] = {}
        self._learn_names(place)
        if isinstance(place, DataDirectory):
            local = self._directory(place)
            place_of_store = open_place(other, self._options.settings) if other else None
        else:
            place_of_store = place
        if place_of_store is not None:
            for identity, stored in self._store(place_of_store).items():
                if identity in local:
                    self._add(check_copies(local[identity], stored))
        self.report.facts |= {"storage": place.name, "by_kind": self.report.by_kind}

    def _add(self, judged: Judged) -> None:
        self.report.findings += findings_in(judged)
        self.report.remarks += judged.remarks

    def _learn_names(self, place: AnyPlace) -> None:
        try:
            for record in place.metadata().topics():
                self._names[record.topic_id] = record.topic
                self._log_ids[record.topic_id] = log_id_of_topic(record)
        except DanubeError as error:
            local = isinstance(place, DataDirectory)
            if not local and isinstance(error, (NotFound, StoreUnavailable, StoreRefused)):
                return  # it has no copy yet, or its listing will fail too
            where = "metadata/metadata.log" if local else "metadata"
            found = finding(Damage.METADATA_DAMAGED, f"{place.name}/{where}", str(error))
            self.report.findings.append(found)

    def _wanted(self, identity: Identity, name: str = "") -> bool:
        if not self._options.get("topic"):
            return True
        return self._options.wants(name or self._names.get(identity[0], ""))

    def _check_wanted(self, some: bool) -> None:
        if not some and self._options.get("topic"):
            raise NotFound(
                f"no topic of {self._options.storage} is meant by {', '.join(self._options.get('topic'))}",
                hint="names begin with their namespace: /default/orders",
            )

    def _directory(self, place: DataDirectory) -> dict[Identity, DirectoryPlan]:
        found = [pair for pair in directories_in(Path(place.path)) if self._wanted(pair[0])]
        self._check_wanted(bool(found))
        return self._settled(place, [DirectoryPlan(*pair, self._log_ids.get(pair[0][0])) for pair in found])

    def _store(self, place: AnyPlace) -> dict[Identity, StorePlan]:
        if not isinstance(place, StorePlace):
            raise NotFound(f"{place.name} is a data directory and no store", hint="name the store's URL")
        store, others = place.store(), Judged()
        listed = partitions_in(store)
        verify_other(store, listed.pop((-1, -1), []), others)
        self._add(others)
        plans = [
            plan
            for identity, objects in listed.items()
            if (plan := plan_store(store, identity, objects, self._log_ids.get(identity[0]), self._wanted))
        ]
        self._check_wanted(bool(plans))
        return self._settled(place, plans)

    def _settled(self, place: AnyPlace, plans: Sequence[Plan]) -> dict[Identity, Plan]:
        """Read and judge all plans; a partition that changes while something is wrong is planned again."""
        kept: dict[Identity, Plan] = {}
        for attempt in range(ATTEMPTS):
            changed: list[Plan] = []
            for plan, segments in zip(plans, self._read(place, plans), strict=True):
                plan.judge(segments)
                if plan.part.findings and attempt < ATTEMPTS - 1 and (again := plan.again()) is not None:
                    changed.append(again)
                    continue
                self._add(plan.part)
                self._count(plan.facts)
                kept[plan.part.identity] = plan
            plans = changed
            if not plans:
                break
        self._check_schemas(place, [plan.facts for plan in kept.values()])
        return kept

    def _read(self, place: AnyPlace, plans: Sequence[Plan]) -> list[list[SegmentFacts]]:
        """Facts of each plan's segments, by base offset; the tasks know nothing of partitions."""
        work = [one for plan in plans for one in plan.work]
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
        following = iter(found)
        parts = [islice(following, len(plan.work)) for plan in plans]
        return [sorted(part, key=lambda facts: facts.base_offset) for part in parts]

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
        self.report.findings += check_schemas(named, metadata)


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
