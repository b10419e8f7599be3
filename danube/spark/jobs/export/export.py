"""Export: topics as tables of Parquet, Delta or Iceberg; each run adds the records since the last one.

    danube spark export --storage s3://bucket/prefix --topic /default/orders --target /lake
    danube spark export --local --storage /var/lib/danube --topic '/default/*' --target /lake

Tasks write Parquet with Arrow; payloads never become Spark rows.  Options: READERS, and docs/spark-jobs.md.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from danube.config.quantities import parse_size_bytes
from danube.config.sections import parse_boolean
from danube.errors import Conflict, InvalidArgument, OffsetOutOfRange
from danube.limits import MIB
from danube.spark.history.access import ACCESS_READERS
from danube.spark.history.options import Readers, one_of, read_options
from danube.spark.history.plan import Lost, Split, plan_splits, refuse_lost
from danube.spark.history.selecting import Catalogue, Held, Known, held, refuse_gone
from danube.spark.jobs.export.state import ExportState, FilePlan, RoundPlan
from danube.spark.jobs.export.tables import COMMITS, Round
from danube.spark.jobs.export.task import (
    Exported,
    ExportTask,
    decode,
    decode_shape,
    encode_shape,
    export,
    shape_of,
)
from danube.spark.jobs.findings import Report
from danube.spark.jobs.options import JobOptions, parse_local_path, passed_on, read_job_options, reported
from danube.spark.jobs.running import (
    Pace,
    Progress,
    Runner,
    command,
    frame_of_rows,
    no_progress,
    runner_for,
)
from danube.spark.source.export_shape import grown
from danube.spark.source.value_types import VALUE
from danube.spark.source.values import Schemas, find_schemas

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE_BYTES: Final = 256 * MIB
COMPRESSIONS: Final = ("zstd", "snappy", "lz4", "gzip", "none")
FRAME_SCHEMA: Final = (
    "table string, topic string, round int, partition int, start long, end long, file string, rows long, "
    "bytes long, lost long, unread long"
)


READERS: Final[Readers] = {
    "broker": str.strip,
    **ACCESS_READERS,
    "target": parse_local_path,
    "format": one_of(*COMMITS),
    "catalog": str.strip,
    "decode": parse_boolean,
    "keepPayload": parse_boolean,
    "compression": one_of(*COMPRESSIONS),
    "fileBytes": parse_size_bytes,
    "failOnDataLoss": parse_boolean,
}


def run(
    options: Mapping[str, str], spark: SparkSession | None = None, progress: Progress = no_progress
) -> Report:
    """Export new records, in ``spark`` or, without one, in processes of this machine."""
    read = read_job_options(options, READERS)
    with reported("export", read.get("report")) as report, closing(_catalogue(read, options)) as catalogue:
        job = _Job(read, catalogue, runner_for(spark, read.get("processes", 0)), report, progress)
        for topic, topic_id, count in catalogue.topics():
            job.export_topic(topic, topic_id, count)
    return report


def _catalogue(read: JobOptions, given: Mapping[str, str]) -> Catalogue:
    """The places and the broker, by the options of reads."""
    if not read.get("target"):
        raise InvalidArgument("option target is missing", hint="name a directory for the tables")
    passed = {"topic": "/*/*", "storage": read.storage, **passed_on(given, "topic")}
    passed |= {name: text for name in ("broker", *ACCESS_READERS) if (text := read.get(name))}
    return Catalogue(read_options(passed, streaming=False))


def table_name(topic: str) -> str:
    """``namespace.topic``; a dot of either is ``~``, which no name has: a table is of one topic."""
    namespace, _, name = topic[1:].replace(".", "~").partition("/")
    return f"{namespace}.{name}"


class _NewPart(NamedTuple):
    """Records of a partition that were not exported yet, up to ``end``."""

    held: Held
    end: int

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.held.pieces)

    def ranges(self, file_bytes: int) -> Iterator[tuple[int, int]]:
        """The offsets of each file."""
        selection, pieces, _ = self.held
        for split in plan_splits([(selection, pieces)], split_bytes=file_bytes, mixed=False):
            yield split.runs[0].start, split.runs[-1].end
        if selection.end < self.end:
            yield selection.end, self.end


@dataclass
class _Job:
    """One run over all topics."""

    options: JobOptions
    catalogue: Catalogue
    runner: Runner
    report: Report
    progress: Progress

    @property
    def losses_allowed(self) -> bool:
        return not self.options.get("failOnDataLoss", True)

    def export_topic(self, topic: str, topic_id: int, count: int) -> None:
        """Finish the round that was under way, or make a new one of all that is new."""
        name = table_name(topic)
        state = ExportState(Path(self.options.get("target")).absolute() / name)
        state.prepare()
        with _alone(state):
            done = state.checkpoint(topic, topic_id)
            known = {part.key.partition: part for part in self._known(topic)}
            plan = state.plan(done.number + 1)
            history_id = self._history_of(plan or done, known)
            if plan is None:
                plan = self._plan(done, known, history_id)
                if plan is None:
                    self._told(name, done, [])
                    return
                state.begin(plan)
            else:
                self.report.remarks.append(f"{name}: round {plan.number} was begun before and is finished")
            written = self._write(state, plan, known)
            filled, shape = [one for one in written if one.rows], decode_shape(plan.shape)
            made = Round(state, plan, filled, shape, name, self.options.get("catalog", ""))
            COMMITS[self.options.get("format", "parquet")](made)
            state.finish(plan)
            self._told(name, plan, written)

    def _history_of(self, kept: RoundPlan, known: Mapping[int, Known]) -> str:
        """Return the current history; raises if the stored position is of lost records."""
        parts = list(known.values())
        histories = self.catalogue.recorded_histories(parts)
        if not self.losses_allowed:
            ends = {part.key: kept.ends.get(str(number), 0) for number, part in known.items()}
            refuse_gone("the export", ends, kept.history, parts, histories)
        return histories[-1].history_id if histories else ""

    def _known(self, topic: str) -> list[Known]:
        return [part for part in self.catalogue.partitions(unsynced=False) if part.key.topic == topic]

    def _told(self, name: str, plan: RoundPlan, written: Sequence[Exported]) -> None:
        report = self.report
        report.count("tables")
        report.count("files", sum(1 for one in written if one.rows))
        report.count("records", sum(one.rows for one in written))
        report.count("bytes", sum(one.bytes for one in written))
        report.count("lost", sum(one.lost for one in written))
        report.count("unread", sum(one.unread for one in written))
        sizes = {one.file: one for one in written}
        report.facts[name] = {
            "topic": plan.topic,
            "round": plan.number,
            "ends": plan.ends,
            "files": [_fact(one, sizes[one.name]) for one in plan.files if one.name in sizes],
        }

    # -- planning -----------------------------------------------------------------------------------

    def _plan(self, done: RoundPlan, known: Mapping[int, Known], history_id: str) -> RoundPlan | None:
        """The next round; None when nothing is new."""
        files: list[FilePlan] = []
        ends = dict(done.ends)
        parts = self._new_parts(done, known)
        size = self._file_bytes(sum(part.bytes for part in parts))
        for part in parts:
            number = part.held.selection.partition
            ends[str(number)] = part.end
            for first, last in part.ranges(size):
                name = f"p{number:05d}-{first:020d}-{last:020d}.parquet"
                files.append(FilePlan(name, number, first, last))
        if not files:
            return None
        schema, shape = self._shape(done)
        return RoundPlan(
            schema=schema,
            topic=done.topic,
            topic_id=done.topic_id,
            number=done.number + 1,
            shape=encode_shape(shape),
            ends=ends,
            files=files,
            history=history_id,
        )

    def _shape(self, done: RoundPlan) -> tuple[str, pa.Schema]:
        """The newest version of the topic's schema, ``subject:version``, and columns that take its values.

        Both as they were where the topic has no schema now.  SchemaIncompatible if the table cannot take
        it up.
        """
        found = self._schemas(done.topic, "")
        schema = done.schema if found is None else f"{found.target.subject}:{found.target.version}"
        before = decode_shape(done.shape) if done.shape else None
        if found is None or schema == done.schema:
            return schema, shape_of(None) if before is None else before
        if before is None or VALUE not in before.names:
            return schema, shape_of(found.target.value_type)
        name = table_name(done.topic)
        versions = [(f"{one.subject}:{one.version}", one.value_type) for one in found.since(done.schema)]
        growth = grown(before.field(VALUE).type, versions, name)
        if growth.added:
            self.report.remarks.append(f"{name}: {schema} added {', '.join(growth.added)}")
        if growth.absent:
            self.report.remarks.append(
                f"{name}: {schema} has no {', '.join(growth.absent)}: null in its rows"
            )
        return schema, shape_of(growth.type)

    def _new_parts(self, done: RoundPlan, known: Mapping[int, Known]) -> list[_NewPart]:
        """Return the part of each partition that was not exported yet."""
        parts: list[_NewPart] = []
        for number, part in sorted(known.items()):
            start = max(done.ends.get(str(number), part.start), 0)
            if start < part.end:
                parts.append(_NewPart(self._held(part, start, part.end)[0], part.end))
        return parts

    def _file_bytes(self, total: int) -> int:
        """Return the bytes of history in a file, so that all slots end at about the same time.

        They are at least half of the option's value.
        """
        wanted: int = self.options.get("fileBytes", FILE_BYTES)
        slots = self.runner.slots
        rounds = max(1, -(-total // (wanted * slots)))
        return max(wanted // 2, -(-total // (rounds * slots)), 1)

    def _held(self, part: Known, start: int, end: int) -> tuple[Held, list[Lost]]:
        lost: list[Lost] = []
        found = held(part, start, end, lost)
        if not self.losses_allowed:
            refuse_lost(lost)
        return found, lost

    def _schemas(self, topic: str, pinned: str) -> Schemas | None:
        """Return the schemas of a topic's payloads: ``pinned``, else its newest version; None for none."""
        if pinned:
            return find_schemas(self.catalogue.metadata(), [topic], pinned)
        record = self.catalogue.metadata().topic(topic)
        if not self.options.get("decode", True) or record.schema is None or not record.schema.subject:
            return None
        found = find_schemas(self.catalogue.metadata(), [topic], "true")
        return None if found.target.schema_type == "bytes" else found

    # -- writing ------------------------------------------------------------------------------------

    def _write(self, state: ExportState, plan: RoundPlan, known: Mapping[int, Known]) -> list[Exported]:
        schemas = self._schemas(plan.topic, plan.schema) if plan.schema else None
        tasks = [
            ExportTask(
                self._split(known[one.partition], one), tuple(self.catalogue.places), one.name,
                str(state.table), str(state.staged), plan.shape, schemas,
                bool(self.options.get("keepPayload", True)), self.options.get("compression", "zstd"),
                self.losses_allowed, self.options.get("broker", ""),
                self.catalogue.options.access,
            )
            for one in plan.files
            if one.partition in known
        ]  # fmt: skip
        pace = Pace(f"export {plan.topic}", len(tasks), self.progress)
        written: list[Exported] = []
        for _, result in self.runner.run(export, tasks):
            written.append(decode(result))
            pace.step(written[-1].read_bytes)
        return sorted(written, key=lambda one: one.file)

    def _split(self, part: Known, one: FilePlan) -> Split:
        """Return the pieces of one file, from the current content of the places."""
        start = max(one.start, part.stored_end)
        if start < one.end and not part.physical:
            raise OffsetOutOfRange(
                f"records {start} to {one.end} of {part.key.topic} partition {part.key.partition} are in no "
                "segment that is here",
                hint="name the broker, or wait until they are uploaded",
            )
        found, lost = self._held(part, one.start, one.end)
        self.report.count("lost", sum(each.end - each.start for each in lost))
        return found.split


def _fact(one: FilePlan, exported: Exported) -> dict[str, Any]:
    return {
        "file": one.name if exported.rows else "",
        "partition": one.partition,
        "start": one.start,
        "end": one.end,
        "rows": exported.rows,
        "bytes": exported.bytes,
        "lost": exported.lost,
        "unread": exported.unread,
    }


def frame_of(spark: SparkSession, report: Report) -> DataFrame:
    """One row for each range that this run exported; ``file`` is empty if none was needed."""
    facts = sorted(report.facts.items())
    rows = ({**one, "table": table, **fact} for table, fact in facts for one in fact["files"])
    return frame_of_rows(spark, FRAME_SCHEMA, rows)


@contextmanager
def _alone(state: ExportState) -> Iterator[None]:
    """One export of a table at a time; the lock goes with the process."""
    with (state.folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Conflict(f"{state.table} is being exported by another run", hint="wait for it") from None
        yield


def _done(report: Report) -> Iterator[str]:
    records, made = report.counts.get("records", 0), report.counts.get("files", 0)
    yield f"export: {records} records in {made} new files, {report.seconds} s"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.  Exit codes: 0 done, 2 refused or failed; a run that failed can be started again."""
    return command("export", "Topics as tables.", READERS, run, _done, argv)


if __name__ == "__main__":
    sys.exit(main())
