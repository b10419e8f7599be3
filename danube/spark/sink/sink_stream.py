"""``df.writeStream.format("danube")``: a query's batches into topics, each row once.

Spark repeats a batch that was not committed with the same number, the same rows and the same split,
also when the query is started again from its checkpoint.  So a task publishes under the query's id and
its partition, and the batch's number is the round (:mod:`danube.client.machine.numbered`): what a killed
attempt had stored is passed over, and an attempt of an earlier batch that comes late is fenced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from danube.errors import InvalidArgument, NotSupported
from danube.spark.sink.options import SinkOptions, check_columns, read_sink_options
from danube.spark.sink.sink import Published, current_task, publish_rows
from danube.spark.travelling import Travelling

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

# Where Spark tells a task of its query; not part of its public interface.
QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"
_logger = logging.getLogger("danube.spark")


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DanubeStreamArrowWriter:
    """The writer of one query; options and columns are checked here, on the driver."""
    if overwrite:
        raise InvalidArgument("a topic is not overwritten", hint='use .outputMode("append") or "update"')
    read = read_sink_options(options)
    check_columns(schema, read.publish.topic)
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
