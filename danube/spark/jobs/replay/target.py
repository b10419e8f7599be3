"""Target of a replay's records: a topic, here or in another cluster, or files.  One lane at a time.

A *lane* is a range of one source partition, in the order of its offsets.  Into a topic it is published under
its own name (:mod:`danube.spark.sink.publishing`); into files it becomes one file, which appears when it is
whole.  Repeating a finished lane changes nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow
import pyarrow.parquet

from danube.client.blocking.client import Client
from danube.core.dispatch.rate import RecordRate
from danube.errors import ConnectionFailed
from danube.host import files
from danube.spark.history.decode import COLUMNS
from danube.spark.sink.publishing import Publisher, PublishOptions

FORMATS: Final = ("parquet", "arrow")
_SLEEP_MAX_S: Final = 0.5
_TARGET_WAIT_S: Final = 60.0  # as long as a client waits for a connection that it had
_DIAL_PAUSE_S: Final = 0.5
_KEPT: Final = ("payload", "key", "attributes")


class LaneRange(msgspec.Struct, frozen=True):
    """Records ``start .. end`` of a partition; ``number`` is the lane's, from 0."""

    number: int
    topic: str
    topic_id: int
    partition: int
    start: int
    end: int


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Target of a replay, pickled into tasks.  ``publish`` None: to files in ``directory``.

    ``keep_partitions``: every record stays in the partition with its number; else its key decides.
    Rates are for one lane, 0 is none.
    """

    job: str
    publish: PublishOptions | None = None
    directory: str = ""
    file_format: str = "parquet"
    keep_partitions: bool = False
    keep_times: bool = True
    keep_schemas: bool = True
    bytes_per_s: int = 0
    records_per_s: int = 0


class LaneReport(msgspec.Struct):
    """Result of a lane: ``rows`` that were chosen, ``passed_over`` of them stored before."""

    topic: str
    partition: int
    start: int
    end: int
    rows: int = 0
    passed_over: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0


def write_lane(rows: Iterable[pyarrow.RecordBatch], lane: LaneRange, target: Target) -> LaneReport:
    """Publish or file a lane's rows; they are all acknowledged, or in a whole file, when this returns."""
    started_s = time.monotonic()
    report = LaneReport(lane.topic, lane.partition, lane.start, lane.end)
    if target.publish is None:
        _to_file(rows, lane, target, report)
    else:
        _to_topic(rows, lane, target, target.publish, report)
    report.seconds = round(time.monotonic() - started_s, 3)
    return report


def producer_name(job: str, lane: LaneRange) -> str:
    """The name under which a lane is published: the same in every run of the job."""
    return f"replay/{job}/{lane.topic_id:x}-{lane.partition}@{lane.start}"


def _to_topic(
    rows: Iterable[pyarrow.RecordBatch],
    lane: LaneRange,
    target: Target,
    options: PublishOptions,
    report: LaneReport,
) -> None:
    name = producer_name(target.job, lane)
    throttle = Throttle(target.bytes_per_s, target.records_per_s)
    columns = columns_kept(target)
    with _reached(options.connect(name=f"danube {name}")) as client:
        partition = lane.partition if target.keep_partitions else None
        publisher = Publisher(
            client, options, name, spread=lane.partition, partition=partition, ends=False
        )  # the source may have more when it comes again
        progress = publisher.progress
        try:
            for batch in rows:
                sent, octets = progress.rows - progress.passed_over, progress.payload_bytes
                publisher.publish(batch.select(columns))
                throttle.spend(progress.rows - progress.passed_over - sent, progress.payload_bytes - octets)
            publisher.finish()
        finally:
            publisher.close()
    report.rows, report.passed_over = progress.rows, progress.passed_over
    report.payload_bytes = progress.payload_bytes


def _reached(client: Client, wait_s: float = _TARGET_WAIT_S) -> Client:
    """The client, connected.  The driver has met this broker, so it is waited for: it may be restarting."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return client.open()
        except ConnectionFailed:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_DIAL_PAUSE_S)


def columns_kept(target: Target) -> list[str]:
    """The columns that are written: all of them into files, those of a record into a topic."""
    if target.publish is None:
        return list(COLUMNS.names)
    names = list(_KEPT)
    if target.keep_times:
        names.append("publish_time")
    if target.keep_schemas:
        names += ("schema_id", "schema_version")
    return names


class Throttle:
    """Limits a lane to a number of records and payload bytes a second, by waiting."""

    def __init__(
        self,
        bytes_per_s: int = 0,
        records_per_s: int = 0,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rates = [RecordRate(per_second) for per_second in (records_per_s, bytes_per_s)]
        self._now_ns = now_ns
        self._sleep = sleep
        for rate in self._rates:
            rate.allowed(now_ns())
            rate.take(rate.per_second)  # nothing is saved up yet, or many short lanes were too fast

    def spend(self, records: int, octets: int) -> None:
        """Note sent records, and wait until as many are allowed again."""
        for rate, amount in zip(self._rates, (records, octets), strict=True):
            rate.take(amount)
            while rate.allowed(self._now_ns()) < 0:
                moment_ns = rate.next_ns(self._now_ns())
                if moment_ns is None:
                    break
                self._sleep(min(_SLEEP_MAX_S, max(0, moment_ns - self._now_ns()) / 1e9))


# -- files ------------------------------------------------------------------------------------------


def file_name(lane: LaneRange, file_format: str) -> str:
    """``default-orders-0-00000000000000000000-00000000000000001000.parquet``"""
    slug = lane.topic.strip("/").replace("/", "-")
    return f"{slug}-{lane.partition}-{lane.start:020d}-{lane.end:020d}.{file_format}"


def _to_file(
    rows: Iterable[pyarrow.RecordBatch], lane: LaneRange, target: Target, report: LaneReport
) -> None:
    directory = Path(target.directory)
    files.make_directory(directory)
    path = directory / file_name(lane, target.file_format)
    if path.exists():
        report.rows = report.passed_over = _row_count(path, target.file_format)
        return
    throttle = Throttle(target.bytes_per_s, target.records_per_s)
    for left in directory.glob(f".{path.name}.*"):
        files.unlink(left)
    batches = iter(rows)
    first = next(batches, None)
    if first is None:
        return
    unfinished = directory / f".{path.name}.{uuid.uuid4().hex}"
    with _opened(unfinished, target.file_format, first.schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)
            octets = batch.column("payload").nbytes
            report.rows += batch.num_rows
            report.payload_bytes += octets
            throttle.spend(batch.num_rows, octets)
    _sync(unfinished)
    files.rename(unfinished, path)
    files.fsync_directory(directory)


def _opened(path: Path, file_format: str, schema: pyarrow.Schema) -> Any:
    if file_format == "parquet":
        return pyarrow.parquet.ParquetWriter(path, schema, compression="zstd")
    return pyarrow.ipc.new_file(str(path), schema)


def _row_count(path: Path, file_format: str) -> int:
    if file_format == "parquet":
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    with pyarrow.memory_map(str(path)) as source:
        return int(pyarrow.ipc.open_file(source).count_rows())


def _sync(path: Path) -> None:
    fd = files.open_existing(path, writable=True)
    try:
        files.fdatasync(fd)
    finally:
        files.close(fd)
