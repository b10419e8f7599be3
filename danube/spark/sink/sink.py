"""``df.write.format("danube")``: a DataFrame's rows into topics.

A task publishes under the name ``spark/<job>/<partition>``.  Without the option ``jobId`` the job is this
one write: attempts of its tasks store each row once.  With it, every write under the same id (and
``batchId``, for foreachBatch) is the same work, also by another application after this one was killed.
That holds while a task's rows are the same in the same order, and is an error where other rows come
(:mod:`danube.spark.sink.passed_over`); so a write that is to be repeated comes
from a source that can be read again, and without a shuffle that orders rows by chance.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from danube.client.blocking.client import connect
from danube.client.blocking.numbered import NumberedProducer
from danube.errors import Conflict, InvalidArgument, WrongState
from danube.spark.failures import hinted
from danube.spark.sink.options import SinkOptions, check_columns, read_sink_options
from danube.spark.sink.passed_over import HINT
from danube.spark.sink.publishing import Publisher, PublishOptions
from danube.spark.travelling import Travelling

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

_logger = logging.getLogger("danube.spark")


@dataclass
class Published(WriterCommitMessage):
    """Result of a task: rows it was given, and those of them that an earlier attempt had stored."""

    rows: int
    passed_over: int
    payload_bytes: int
    topics: tuple[str, ...] = ()


def arrow_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DanubeArrowWriter:
    """The writer of one ``save()``; options and columns are checked here, on the driver."""
    if overwrite:
        raise InvalidArgument("a topic is not overwritten", hint='use .mode("append")')
    read = read_sink_options(options)
    check_columns(schema, read.publish.topic)
    return DanubeArrowWriter(read)


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
        """All tasks are done, and what they published was acknowledged before."""
        told = [each for each in messages if isinstance(each, Published)]
        if self._options.job or any(each.passed_over for each in told):
            topics = {topic for each in told for topic in each.topics}
            refuse_more_tasks(self._options, f"spark/{self._job}/{len(messages)}", sorted(topics))
        _logger.info("job %s published %d rows", self._job, sum(each.rows for each in told))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """A log keeps what it has: rows of tasks that were done stay, and a write under the same jobId
        goes on behind them."""
        _logger.warning("job %s failed; what its tasks had published stays", self._job)


def refuse_more_tasks(options: SinkOptions, name: str, topics: Iterable[str]) -> None:
    """Raise Conflict where an earlier attempt had a task behind the last one: its rows came in others."""
    publish = options.publish
    with hinted(), connect(publish.broker, token=publish.token, timeout=publish.timeout_s) as client:
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
    connection = connect(
        options.broker, token=options.token, name=f"danube-spark {name}", timeout=options.timeout_s
    )
    with hinted(), connection as client:
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
