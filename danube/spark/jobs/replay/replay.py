"""Replay: a topic's history, or a part of it, into another topic, another cluster or files; each record once.

    danube spark replay --storage /var/lib/danube --topic /default/orders \
        --starting-timestamp 2026-11-20T00:00:00Z --where "attributes['country'] = 'AT'" \
        --to danube://other:6660 --to-topic /default/orders-at

Keys, attributes, times and schema numbers go along, and so does the order of each partition.  A run that is
killed and started again with the same options (or the same ``job``) stores every record once: each lane
has a producer name that follows from the job and its range, and its records are numbered
(:mod:`danube.client.machine.numbered`), so the target tells how far it is.

Without ``where`` payloads stay in Python; an expression is evaluated by Spark, row by row.

Progress of a replay in Spark is measured by the growth of the target topic.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from danube.client.blocking.client import Client
from danube.client.blocking.numbered import NumberedProducer
from danube.errors import DanubeError, InvalidArgument, PolicyMismatch, exit_code_of
from danube.spark.failures import error_from_spark
from danube.spark.jobs.findings import Report
from danube.spark.jobs.options import reported
from danube.spark.jobs.replay.options import KEEP, READERS, ReplayOptions, read_replay_options
from danube.spark.jobs.replay.plan import Lane, plan_lanes, read_lane
from danube.spark.jobs.replay.state import FORMAT, ReplayState, check_same_target, load_state, save_state
from danube.spark.jobs.replay.target import LaneReport, Target, columns_kept, write_lane
from danube.spark.jobs.running import (
    Progress,
    Runner,
    command,
    frame_of_rows,
    no_progress,
    runner_for,
)
from danube.spark.sink.publishing import PublishOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


INTERVAL_S: Final = 2.0


@contextmanager
def watched(target: Target, offered: int, progress: Progress) -> Iterator[None]:
    """Tell every two seconds how many records the target has got; others may publish to it as well."""
    options = target.publish
    if options is None or progress is no_progress:
        yield
        return
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(options, offered, progress, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(INTERVAL_S)


def _watch(options: PublishOptions, offered: int, progress: Progress, ended: threading.Event) -> None:
    try:
        with options.connect(name="danube replay") as client:
            first, start_s = _records_in(client, options.topic), time.monotonic()
            while not ended.wait(INTERVAL_S):
                stored = _records_in(client, options.topic) - first
                rate = stored / (time.monotonic() - start_s)
                progress(f"replay: {stored} records stored, of at most {offered}; {rate:.0f} a second")
    except DanubeError:
        return  # the tasks report the error


def _records_in(client: Client, topic: str) -> int:
    return sum(int(part["log_end"]) for part in client.admin.topic_ends(topic))


FRAME_SCHEMA: Final = (
    "topic string, partition int, start long, end long, rows long, passed_over long, "
    "payload_bytes long, seconds double"
)


def replay_lane(task: tuple[Lane, Target]) -> bytes:
    """The work of a task, one whole lane: its report, encoded."""
    lane, target = task
    return msgspec.msgpack.encode(write_lane(read_lane(lane, columns_kept(target)), lane.range, target))


def run(
    options: Mapping[str, str], spark: SparkSession | None = None, progress: Progress = no_progress
) -> Report:
    """Replay what ``options`` name, in ``spark`` or, without one, in processes of this machine.

    Raises InvalidArgument for impossible options, Conflict if the job was begun as other work, and errors of
    the source or the target.  It returns a report only when every record is acknowledged.
    """
    read = read_replay_options(options)
    if read.where and spark is None:
        raise InvalidArgument("an expression in where is evaluated by Spark", hint="leave out --local")
    with reported("replay", read.report) as report:
        try:
            _replay(read, report, spark, progress)
        except Exception as error:
            known = error_from_spark(error)
            if known is None:
                raise
            raise known from error
    return report


def frame_of(spark: SparkSession, report: Report) -> DataFrame:
    """The lanes of a report as a DataFrame."""
    return frame_of_rows(spark, FRAME_SCHEMA, report.facts["lanes"])


def _replay(read: ReplayOptions, report: Report, spark: SparkSession | None, progress: Progress) -> None:
    state = load_state(read.state, read.target.job, read.work)
    lanes = plan_lanes(read.source, *((state.lanes, state.history) if state is not None else ()))
    offered = sum(lane.range.end - lane.range.start for lane in lanes)
    progress(f"replay: job {read.target.job}, {offered} records in {len(lanes)} lanes")
    if read.dry_run:
        done = _counted(lanes, read.where, spark)
        target = read.target
    else:
        target = _settled(read, lanes, state)
        runner = runner_for(spark, read.processes)
        busy = max(1, min(len(lanes), runner.slots))
        task_target = msgspec.structs.replace(
            target,
            bytes_per_s=-(-target.bytes_per_s // busy),
            records_per_s=-(-target.records_per_s // busy),
        )
        with watched(target, offered, progress):
            done = _done(lanes, task_target, read.where, spark, runner)
    _fill(report, read, target, done)
    report.count("offered", offered)


def _settled(read: ReplayOptions, lanes: Sequence[Lane], state: ReplayState | None) -> Target:
    """The target as it is, which the state remembers from the first run on."""
    partitions, keep = _target_partitions(read, len(lanes))
    if state is None:
        ranges = [lane.range for lane in lanes]
        history_id = lanes[0].history if lanes else ""
        job, work = read.target.job, read.work
        save_state(read.state, ReplayState(FORMAT, job, work, ranges, partitions, keep, history_id))
    else:
        check_same_target(state, partitions, keep)
    return msgspec.structs.replace(read.target, keep_partitions=keep)


def _target_partitions(read: ReplayOptions, lanes: int) -> tuple[int, bool]:
    """How many partitions the target topic has (it is made where it is missing), and whether they match."""
    options = read.target.publish
    if options is None:
        return 0, False
    with options.connect() as client:
        producer = NumberedProducer(
            client,
            options.topic,
            f"replay/{read.target.job}",
            reliable=options.reliable,
            durability=options.durability,
            partitions=lanes if lanes > 1 else 0,
        )
        count = producer.open().partition_count
    matching = count == lanes
    if read.partitioning == KEEP and not matching:
        raise PolicyMismatch(
            f"records cannot keep their partitions in {options.topic}",
            why=f"it has {count} and the source has {lanes}",
            hint="use partitioning=key",
        )
    return count, matching and read.partitioning != "key"


def _done(
    lanes: Sequence[Lane], target: Target, where: str, spark: SparkSession | None, runner: Runner
) -> list[LaneReport]:
    """Every lane replayed."""
    if where and spark is not None and lanes:
        from danube.spark.jobs.replay.filter import replay_chosen

        with tempfile.TemporaryDirectory(prefix="danube-replay-") as scratch:
            return replay_chosen(spark, lanes, target, where, Path(scratch))
    tasks = [(lane, target) for lane in lanes]
    return [msgspec.msgpack.decode(data, type=LaneReport) for _, data in runner.run(replay_lane, tasks)]


def _counted(lanes: Sequence[Lane], where: str, spark: SparkSession | None) -> list[LaneReport]:
    """Count records that would be replayed."""
    counts = {lane.range.partition: lane.range.end - lane.range.start for lane in lanes}
    if where and spark is not None and lanes:
        from danube.spark.jobs.replay.filter import count_chosen

        counts = dict.fromkeys(counts, 0) | count_chosen(spark, lanes, where)
    return [
        LaneReport(lane.range.topic, lane.range.partition, lane.range.start, lane.range.end,
                   counts[lane.range.partition])
        for lane in lanes
    ]  # fmt: skip


def _fill(report: Report, read: ReplayOptions, target: Target, done: Iterable[LaneReport]) -> None:
    lanes = sorted(done, key=lambda lane: lane.partition)
    report.count("lanes", len(lanes))
    report.count("records", sum(lane.rows for lane in lanes))
    report.count("passed_over", sum(lane.passed_over for lane in lanes))
    report.count("payload_bytes", sum(lane.payload_bytes for lane in lanes))
    report.facts = {
        "job": target.job,
        "topic": read.topic,
        "where": read.where,
        "dry_run": read.dry_run,
        "target": target.publish.topic if target.publish else target.directory,
        "partitions_kept": target.keep_partitions,
        "lanes": [msgspec.structs.asdict(lane) for lane in lanes],
    }


def _told(report: Report) -> Iterator[str]:
    counts = report.counts
    verb = "would replay" if report.facts["dry_run"] else "replayed"
    yield (
        f"replay: {verb} {counts['records']} of {counts['offered']} records in {counts['lanes']} lanes "
        f"({counts['passed_over']} were there), {counts['payload_bytes']} bytes, {report.seconds} s"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 when every record is stored, else the error's."""
    description = "Store a topic's records again: in another topic, another cluster or files."
    return command("replay", description, READERS, run, _told, argv, exit_code_of)


if __name__ == "__main__":
    sys.exit(main())
