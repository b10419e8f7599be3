"""Publishing Arrow batches to topics, every row once; for the sink and the replay.

A task publishes under one producer name and round to all topics and partitions that its rows name.  In each
partition its rows are numbered from 0 in their order.  Rows that the partition holds from an earlier attempt
are skipped; they are compared with the stored ones before a row is sent behind them
(:mod:`danube.spark.sink.passed_over`). So the same rows in the same order give the same log, whatever was
killed meanwhile.  A row's partition must therefore follow from the row and its position alone: the key's
hash, or, without a key, blocks of ROWS_TOGETHER rows in rotation.

Payloads are copied only into the batch that is sent.  This module does not need Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from danube.client.blocking.client import Client
from danube.client.blocking.numbered import NumberedProducer
from danube.client.records.outbox import BATCH_BYTES, IN_FLIGHT_BYTES
from danube.core.batch.columns import key_partitions
from danube.core.batch.payloads import RECORD_OVERHEAD
from danube.core.batch.row_mark import RowMark
from danube.errors import InvalidArgument
from danube.limits import BATCH_RECORDS_MAX
from danube.spark.history.access import ENVIRONMENT, BrokerAccess
from danube.spark.sink.passed_over import StoredRows, check_all_came, check_more, check_passed, stored_rows
from danube.spark.sink.row_digest import RowDigest

ROWS_TOGETHER: Final = 4096
_ATTRIBUTE_OVERHEAD: Final = 6


class PublishOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Options of publishing; an empty ``topic`` takes each row's own."""

    broker: str
    topic: str = ""
    access: BrokerAccess = ENVIRONMENT
    reliable: bool | None = None
    durability: str | None = None
    partitions: int = 0
    compression: str = "none"
    batch_bytes: int = BATCH_BYTES
    in_flight_bytes: int = IN_FLIGHT_BYTES
    timeout_s: float = 60.0

    def connect(self, name: str = "") -> Client:
        """A client of the broker, not open yet."""
        return self.access.connect(self.broker, name=name, timeout=self.timeout_s)


class Progress(msgspec.Struct):
    """Progress of one task: rows it was given, those of them that were stored before, and bytes sent."""

    rows: int = 0
    passed_over: int = 0
    payload_bytes: int = 0
    batches: int = 0


class Publisher:
    """Publishes the rows of one task.

    ``spread`` (the task's number) selects the first partition of rows without a key.  ``partition`` takes all
    rows, whatever partition they name.  ``ends``: a repetition under the name has the same rows and no
    others.  ``repeated``: this may be a repetition, so partitions without a row of it are checked, too.
    """

    def __init__(
        self,
        client: Client,
        options: PublishOptions,
        name: str,
        round_number: int = 0,
        spread: int = 0,
        partition: int | None = None,
        *,
        ends: bool = True,
        repeated: bool = False,
    ) -> None:
        self.progress = Progress()
        self._client = client
        self._options = options
        self._name = name
        self._round = round_number
        self._spread = spread
        self._partition = partition
        self._ends = ends
        self._repeated = repeated
        self._topics: dict[str, _Topic] = {}

    def publish(self, batch: pyarrow.RecordBatch) -> None:
        """Send a batch's rows; waits for room, not for answers."""
        if batch.num_rows == 0:
            return
        payload = _column(batch, "payload")
        if payload is None or payload.null_count:
            _refuse_null(batch, "payload", self.progress.rows)
        for topic, rows in self._by_topic(batch):
            self._topic(topic).publish(rows, self.progress)
        self.progress.rows += batch.num_rows

    def finish(self) -> Progress:
        """Wait until all is acknowledged; raise the first failure."""
        for topic in self._topics.values():
            if self._repeated or self.progress.passed_over:
                topic.check_all_came()
        for topic in self._topics.values():
            topic.end()
            topic.producer.flush()
        return self.progress

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that rows went to."""
        return tuple(self._topics)

    def close(self) -> None:
        for topic in self._topics.values():
            topic.producer.close()

    def _by_topic(self, batch: pyarrow.RecordBatch) -> Iterator[tuple[str, pyarrow.RecordBatch]]:
        if self._options.topic:
            yield self._options.topic, batch
            return
        names = _column(batch, "topic")
        if names is None or names.null_count:
            _refuse_null(batch, "topic", self.progress.rows)
        encoded = names.dictionary_encode()
        if len(encoded.dictionary) == 1:
            yield encoded.dictionary[0].as_py(), batch
            return
        codes = np.asarray(encoded.indices)
        for code, name in enumerate(encoded.dictionary.to_pylist()):
            yield name, batch.take(pyarrow.array(np.flatnonzero(codes == code)))

    def _topic(self, name: str) -> _Topic:
        found = self._topics.get(name)
        if found is None:
            options = self._options
            producer = NumberedProducer(
                self._client,
                name,
                self._name,
                self._round,
                reliable=options.reliable,
                durability=options.durability,
                partitions=options.partitions,
                compression=options.compression,
                max_in_flight_bytes=options.in_flight_bytes,
                timeout=options.timeout_s,
            )
            found = self._topics[name] = _Topic(
                producer.open(), options.batch_bytes, self._spread, self._partition, self._ends
            )
        return found


class _Waiting(NamedTuple):
    """A batch that is sent once it is known whether it is the last one."""

    send: Callable[..., None]
    digest: str


class _Topic:
    """The rows that went to one topic."""

    def __init__(
        self, producer: NumberedProducer, batch_bytes: int, spread: int, partition: int | None, ends: bool
    ) -> None:
        self.producer = producer
        self._ends = ends
        self._batch_bytes = batch_bytes
        self._spread = spread
        self._partition = partition
        self._rows = 0
        self._next = [0] * producer.partition_count  # number of the next row of each partition
        self._digests: dict[int, RowDigest] = {}  # of the rows of each partition that came
        self._known: dict[int, StoredRows | None] = {}  # what is compared with the rows that are passed over
        self._waiting: dict[int, _Waiting] = {}  # the last batch of each partition

    def publish(self, batch: pyarrow.RecordBatch, progress: Progress) -> None:
        for index, rows in self._by_partition(batch):
            stored = self.producer.stored(index)
            first = self._next[index]
            self._next[index] += rows.num_rows
            passed = min(max(0, stored - first), rows.num_rows)
            if passed:
                self._pass_over(index, first, rows.slice(0, passed))
            progress.passed_over += passed
            if passed < rows.num_rows:
                self._check_more(index)
                self._send(index, first + passed, rows.slice(passed), progress)
        self._rows += batch.num_rows

    def _pass_over(self, index: int, first: int, rows: pyarrow.RecordBatch) -> None:
        """Check that rows passed over equal the stored ones; a topic that keeps no log cannot tell."""
        producer = self.producer
        if not producer.reliable:
            return
        digest = self._digests.setdefault(index, RowDigest())
        partition, batches = producer.stored_batches(index)
        if index not in self._known:
            self._known[index] = stored_rows(producer.client, partition, batches)
        known = self._known[index]
        before = 0 if known is None else min(max(0, known.end - first), rows.num_rows)
        digest.add(rows.slice(0, before))
        if known is not None and before and known.end == first + before:
            check_passed(known, digest.hex(), producer.name, partition)
        digest.add(rows.slice(before))

    def _check_more(self, index: int) -> None:
        """Refuse rows behind the stored ones if an earlier attempt had completed."""
        known = self._known.pop(index, None)
        if known is not None and self._ends:
            check_more(known, self.producer.name, self.producer.stored_batches(index)[0])

    def check_all_came(self) -> None:
        """No partition holds more rows of this task than came; asked where some were passed over."""
        for index, came in enumerate(self._next):
            check_all_came(
                self.producer.stored(index), came, self.producer.name, self.producer.stored_batches(index)[0]
            )

    def _by_partition(self, batch: pyarrow.RecordBatch) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
        if self._partition is not None:
            yield self._partition, batch
            return
        if len(self._next) == 1 and _column(batch, "partition") is None:
            yield 0, batch
            return
        places = self._places(batch)
        first = int(places[0])
        if (places == first).all():
            yield first, batch
            return
        order = np.argsort(places, kind="stable")
        bounds = np.flatnonzero(np.diff(places[order])) + 1
        for indexes in np.split(order, bounds):
            yield int(places[indexes[0]]), batch.take(pyarrow.array(indexes))

    def _places(self, batch: pyarrow.RecordBatch) -> NDArray[np.int64]:
        """int64[n]: the partition of each row."""
        count, partitions = batch.num_rows, len(self._next)
        places = (self._spread + (self._rows + np.arange(count)) // ROWS_TOGETHER) % partitions
        keys = _column(batch, "key")
        if keys is not None and keys.null_count < count:
            keyed = np.asarray(keys.is_valid())
            present = keys.drop_null() if keys.null_count else keys
            places[keyed] = key_partitions(_octets(present), partitions)
        chosen = _column(batch, "partition")
        if chosen is not None and chosen.null_count < count:
            given = np.asarray(chosen.is_valid())
            places[given] = np.asarray(chosen.drop_null())
        return places

    def _send(self, index: int, number: int, batch: pyarrow.RecordBatch, progress: Progress) -> None:
        payload = batch.column("payload")
        keys, attributes, times = (_column(batch, name) for name in ("key", "attributes", "publish_time"))
        micros = None if times is None else _micros(times, batch)
        one_time = micros is not None and bool((micros == micros[0]).all())
        for start, stop in self._cuts(batch):
            schema_id, version = _schema_at(batch, start)
            chunk = slice(start, stop)
            send = partial(
                self.producer.send,
                index,
                number + start,
                payload[chunk],
                None if keys is None or keys.null_count == len(keys) else _octets(keys[chunk]),
                None if attributes is None else _mappings(attributes[chunk]),
                publish_times=None if micros is None or one_time else micros[chunk],
                publish_time_us=int(micros[0]) if micros is not None and one_time else None,
                schema_id=schema_id,
                schema_version=version,
            )
            self._send_next(index, send, self._digest_of(index, batch.slice(start, stop - start)))
            progress.batches += 1
        progress.payload_bytes += int(_lengths(payload).sum())

    def _digest_of(self, index: int, rows: pyarrow.RecordBatch) -> str:
        """The digest of a partition's rows up to these; empty if no log keeps it."""
        if not self.producer.reliable:
            return ""
        digest = self._digests.setdefault(index, RowDigest())
        digest.add(rows)
        return digest.hex()

    def _send_next(self, index: int, send: Callable[..., None], digest: str) -> None:
        """Send a partition's batch when it is known whether there is one behind it."""
        self._send_waiting(index, last=False)
        self._waiting[index] = _Waiting(send, digest)
        if not self._ends:
            self._send_waiting(index, last=False)

    def _send_waiting(self, index: int, *, last: bool) -> None:
        waiting = self._waiting.pop(index, None)
        if waiting is not None:
            waiting.send(mark=RowMark(waiting.digest, last) if waiting.digest else None)

    def end(self) -> None:
        """There are no more rows."""
        for index in list(self._waiting):
            self._send_waiting(index, last=True)

    def _cuts(self, batch: pyarrow.RecordBatch) -> Iterator[tuple[int, int]]:
        """Row ranges of one wire batch each: of about ``batch_bytes``, and of one schema version."""
        ends = _record_sizes(batch).cumsum()
        changes = _schema_changes(batch)
        start, before, count = 0, 0, batch.num_rows
        while start < count:
            stop = int(np.searchsorted(ends, before + self._batch_bytes, "right"))
            stop = min(max(stop, start + 1), start + BATCH_RECORDS_MAX, count)
            place = int(np.searchsorted(changes, start, "right"))
            if place < len(changes):
                stop = min(stop, int(changes[place]))
            yield start, stop
            start, before = stop, int(ends[stop - 1])


def _column(batch: pyarrow.RecordBatch, name: str) -> pyarrow.Array | None:
    place = batch.schema.get_field_index(name)
    return None if place < 0 else batch.column(place)


def _octets(values: pyarrow.Array) -> list[Any]:
    """Keys as bytes or None."""
    if not pyarrow.types.is_binary(values.type):
        values = values.cast(pyarrow.binary())
    octets: list[Any] = values.to_pylist()
    return octets


def _mappings(values: pyarrow.Array) -> list[dict[str, str] | None] | None:
    if values.null_count == len(values):
        return None
    return [dict(each) if each else None for each in values.to_pylist()]


def _micros(times: pyarrow.Array, batch: pyarrow.RecordBatch) -> NDArray[np.int64] | None:
    """int64[n] microseconds since 1970 UTC; None if every row leaves the time to the producer."""
    if times.null_count == len(times):
        return None
    if times.null_count:
        raise InvalidArgument(
            "publish_time is null in some rows and set in others",
            why=f"{times.null_count} of {batch.num_rows} rows of a batch have none",
            hint="fill it, for example with coalesce(publish_time, current_timestamp())",
        )
    if not pyarrow.types.is_int64(times.type):
        times = times.cast(pyarrow.timestamp("us", times.type.tz)).view(pyarrow.int64())
    return np.asarray(times)


def _lengths(values: pyarrow.Array) -> NDArray[np.int64]:
    return np.asarray(pyarrow.compute.binary_length(values).fill_null(0)).astype(np.int64)


def _record_sizes(batch: pyarrow.RecordBatch) -> NDArray[np.int64]:
    """int64[n]: bytes of each record in a batch, about."""
    sizes = _lengths(batch.column("payload")) + RECORD_OVERHEAD
    keys, attributes = _column(batch, "key"), _column(batch, "attributes")
    if keys is not None and keys.null_count < len(keys):
        sizes += _lengths(keys)
    if attributes is not None and attributes.null_count < len(attributes):
        offsets = np.asarray(attributes.offsets)
        first, last = int(offsets[0]), int(offsets[-1])
        entries = _lengths(attributes.keys[first:last]) + _lengths(attributes.items[first:last])
        ends = np.concatenate(([0], (entries + _ATTRIBUTE_OVERHEAD).cumsum()))
        sizes += np.diff(ends[offsets - first])
    return sizes


def _schema_changes(batch: pyarrow.RecordBatch) -> NDArray[np.int64]:
    """Rows that have another schema or version than the row before."""
    changed = np.zeros(max(0, batch.num_rows - 1), np.bool_)
    for name in ("schema_id", "schema_version"):
        column = _column(batch, name)
        if column is not None and column.null_count < len(column):
            values = np.asarray(column.cast(pyarrow.int64()).fill_null(-1))
            changed |= np.diff(values) != 0
    return np.flatnonzero(changed) + 1


def _schema_at(batch: pyarrow.RecordBatch, row: int) -> tuple[int | None, int | None]:
    schema_id, version = (_column(batch, name) for name in ("schema_id", "schema_version"))
    return (
        None if schema_id is None else schema_id[row].as_py(),
        None if version is None else version[row].as_py(),
    )


def _refuse_null(batch: pyarrow.RecordBatch, name: str, before: int) -> NoReturn:
    column = _column(batch, name)
    if column is None:
        raise InvalidArgument(
            f"the rows have no column {name}", why=f"their columns are {', '.join(batch.schema.names)}"
        )
    row = before + int(np.flatnonzero(np.asarray(column.is_null()))[0])
    raise InvalidArgument(
        f"{name} of row {row} is null", why=f"a record has a {name}", hint="fill it or filter the row out"
    )
