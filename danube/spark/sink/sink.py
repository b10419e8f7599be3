"""``df.write.format("danube")``: a DataFrame's rows into topics.

A task publishes under the name ``spark/<job>/<partition>``.  Without the option ``jobId`` the job is this one
write: attempts of its tasks store each row once.  With it, every write under the same id (and ``batchId``,
for foreachBatch) is the same work, also by another application after this one was killed.  A task's rows must
then be the same in the same order; other rows are an error (:mod:`danube.spark.sink.passed_over`).  So a
repeatable write needs a source that can be read again, and no shuffle that orders rows by chance.

``df.writeStream.format("danube")``: a query's batches.  Spark repeats a batch that was not committed with the
same number, the same rows and the same split, also when the query is started again from its checkpoint.  So a
task publishes under the query's id and its partition, and the batch's number is the round
(:mod:`danube.client.machine.numbered`): what a killed attempt had stored is passed over, and an attempt of an
earlier batch that comes late is fenced.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from danube.client.blocking.numbered import NumberedProducer
from danube.errors import Conflict, InvalidArgument, NotSupported, WrongState
from danube.spark.failures import hinted
from danube.spark.sink.options import SinkOptions, check_columns, read_sink_options
from danube.spark.sink.passed_over import HINT
from danube.spark.sink.publishing import Publisher, PublishOptions
from danube.spark.travelling import Travelling

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

_logger = logging.getLogger("danube.spark")

# Where Spark tells a task of its query; not part of its public interface.
QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"


@dataclass
class Published(WriterCommitMessage):
    """Result of a task: rows it was given, and those of them that an earlier attempt had stored."""

    rows: int
    passed_over: int
    payload_bytes: int
    topics: tuple[str, ...] = ()


def arrow_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DanubeArrowWriter:
    """The writer of one ``save()``; options and columns are checked here, on the driver."""
    return DanubeArrowWriter(_checked(options, schema, overwrite, '.mode("append")'))


def _checked(options: Mapping[str, str], schema: StructType, overwrite: bool, mode: str) -> SinkOptions:
    if overwrite:
        raise InvalidArgument("a topic is not overwritten", hint=f"use {mode}")
    read = read_sink_options(options)
    check_columns(schema, read.publish.topic)
    return read


class DanubeArrowWriter(Travelling, DataSourceArrowWriter):
    """Publishes each partition of a DataFrame by a task of its own."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._job = options.job or uuid.uuid4().hex

    def write(self, iterator: Iterator[RecordBatch]) -> Published:
        """One task: publish its rows, wait until the broker has acknowledged all of them."""
        task = current_task()
        stem = f"spark/{self._job}/{task.partitionId()}"
        return publish_rows(
            iterator, self._options.publish, stem, self._options.round_number, task.partitionId(),
            repeated=bool(self._options.job) or task.attemptNumber() > 0,
        )  # fmt: skip

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Refuse rows that an earlier attempt had in more tasks; all rows are acknowledged already."""
        told = [each for each in messages if isinstance(each, Published)]
        if self._options.job or any(each.passed_over for each in told):
            topics = {topic for each in told for topic in each.topics}
            refuse_more_tasks(self._options, f"spark/{self._job}/{len(messages)}", sorted(topics))
        _logger.info("job %s published %d rows", self._job, sum(each.rows for each in told))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log the failure: rows of completed tasks stay; a write under the same jobId goes on behind them."""
        _logger.warning("job %s failed; what its tasks had published stays", self._job)


def refuse_more_tasks(options: SinkOptions, name: str, topics: Iterable[str]) -> None:
    """Raise Conflict where an earlier attempt had a task behind the last one: its rows came in others."""
    publish = options.publish
    with hinted(), publish.connect() as client:
        for topic in topics:
            with NumberedProducer(client, topic, name, options.round_number) as producer:
                for index in range(producer.partition_count):
                    if producer.stored(index):
                        raise Conflict(
                            f"an earlier attempt has stored rows of {name} in {topic}",
                            why="it was cut into more tasks, so rows of it may be there twice now",
                            hint=HINT,
                        )


def publish_rows(
    rows: Iterator[RecordBatch], options: PublishOptions, name: str, round_number: int, spread: int,
    *, repeated: bool,
) -> Published:  # fmt: skip
    """Publish a task's rows over a connection of its own; ``repeated``: an earlier attempt may have been."""
    with hinted(), options.connect(name=f"danube-spark {name}") as client:
        publisher = Publisher(client, options, name, round_number, spread, repeated=repeated)
        try:
            for batch in rows:
                publisher.publish(batch)
            done = publisher.finish()
        finally:
            publisher.close()
    return Published(done.rows, done.passed_over, done.payload_bytes, publisher.topics)


def current_task() -> TaskContext:
    """The Spark task that runs this."""
    task = TaskContext.get()
    if task is None:
        raise WrongState("a writer works inside a Spark task")
    return task


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DanubeStreamArrowWriter:
    """The writer of one query; options and columns are checked here, on the driver."""
    read = _checked(options, schema, overwrite, '.outputMode("append") or "update"')
    if read.job or read.round_number:
        raise InvalidArgument(
            "jobId and batchId are for df.write", why="a stream has its query's id for that"
        )
    return DanubeStreamArrowWriter(read)


class DanubeStreamArrowWriter(Travelling, DataSourceStreamArrowWriter):
    """Publishes each partition of each batch by a task of its own."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[RecordBatch]) -> Published:
        """One task: publish its rows of the batch, wait until the broker has acknowledged all of them."""
        task = current_task()
        query, batch = task.getLocalProperty(QUERY_PROPERTY), task.getLocalProperty(BATCH_PROPERTY)
        if not query or batch is None or not batch.isdigit():
            raise NotSupported(
                "this Spark does not tell a task its query and batch",
                why=f"{QUERY_PROPERTY}={query!r}, {BATCH_PROPERTY}={batch!r}",
                hint="use foreachBatch with the options jobId and batchId",
            )
        stem = f"spark/{query}/{task.partitionId()}"
        return publish_rows(
            iterator, self._options.publish, stem, int(batch), task.partitionId(),
            repeated=task.attemptNumber() > 0,
        )  # fmt: skip

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """The batch is published; Spark notes it in the checkpoint next."""
        told = [each for each in messages if isinstance(each, Published)]
        _logger.debug("batch %d: published %d rows", batchId, sum(each.rows for each in told))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Leave published rows in place; the batch comes again and goes on behind them."""
        _logger.warning("batch %d failed; it goes on behind what its tasks had published", batchId)
