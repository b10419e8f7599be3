"""Export where it runs: the records of one range into one Parquet file, by Arrow and without Spark's rows."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from danube.errors import StorageFailed
from danube.host import files
from danube.limits import MIB
from danube.spark.history.access import BrokerAccess
from danube.spark.history.decode import COLUMNS, Decoder, Losses
from danube.spark.history.places import AnyPlace
from danube.spark.history.plan import Split
from danube.spark.history.reading import read_split
from danube.spark.source.value_types import VALUE
from danube.spark.source.values import Schemas, ValueDecoder, tombstones_of

GROUP_ROWS: Final = 262_144
GROUP_BYTES: Final = 64 * MIB
_STATISTICS: Final = ("partition", "offset", "publish_time", "append_time", "schema_id", "schema_version")
_DICTIONARIES: Final = ("partition", "producer", "schema_id", "schema_version")
_NAMES: Final = tuple(name for name in COLUMNS.names if name != "topic")


class ExportTask(NamedTuple):
    """``shape``: the file's columns (encode_shape). ``schemas``: the schemas of the payloads, or None."""

    split: Split
    places: tuple[AnyPlace, ...]
    file: str
    table: str
    staged: str
    shape: str
    schemas: Schemas | None
    keep_payload: bool
    compression: str
    losses_allowed: bool
    broker: str
    access: BrokerAccess


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """Result of one task; ``rows`` 0: no file was needed."""

    file: str
    rows: int
    bytes: int
    read_bytes: int
    lost: int
    unread: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Exported)


def decode(data: bytes) -> Exported:
    return _decoder.decode(data)


def shape_of(value: pa.DataType | None) -> pa.Schema:
    """The columns of a table; ``value``: the type of typed payloads."""
    fields = [COLUMNS.field(name) for name in _NAMES]
    return pa.schema(fields if value is None else [*fields, (VALUE, value)])


def encode_shape(shape: pa.Schema) -> str:
    return base64.b64encode(shape.serialize().to_pybytes()).decode()


def decode_shape(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(text)))


def export(task: ExportTask) -> bytes:
    """Write the file of one range under a temporary name, and rename it when it is whole.

    A file that an earlier attempt finished is kept: it has the same records.
    """
    staged, final = Path(task.staged) / task.file, Path(task.table) / task.file
    read_bytes = task.split.bytes
    for path in (final, staged):
        if path.exists():
            rows = pq.read_metadata(path).num_rows
            return _encoder.encode(Exported(task.file, rows, path.stat().st_size, read_bytes, 0))
    temporary = staged.with_name(f".{task.file}.{uuid4().hex}")
    writer = _Writer(task)
    try:
        rows = writer.write(temporary)
        size = 0
        if rows:
            with temporary.open("rb") as made:
                os.fsync(made.fileno())
            size = temporary.stat().st_size
            temporary.replace(staged)
    except OSError as error:
        raise StorageFailed(f"{staged} cannot be written", why=error.strerror or str(error)) from None
    finally:
        temporary.unlink(missing_ok=True)
    return _encoder.encode(
        Exported(task.file, rows, size, read_bytes, writer.losses.record_count, writer.unread)
    )


class _Writer:
    """Gathers record batches into row groups."""

    def __init__(self, task: ExportTask) -> None:
        self._task = task
        self._shape = decode_shape(task.shape)
        self._decoder = None
        if task.schemas is not None:
            self._decoder = ValueDecoder(task.schemas, self._shape.field(VALUE).type)
        self._compacted = task.schemas is not None and bool(task.schemas.compacted)
        self.losses = Losses(allowed=task.losses_allowed)
        self.unread = 0

    def write(self, path: Path) -> int:
        groups = self._groups()
        first = next(groups, None)
        if first is None:
            return 0
        rows = 0
        with self._open(path) as writer, path.open("rb") as made:
            for group in chain([first], groups):
                writer.write_table(group, row_group_size=GROUP_ROWS)
                rows += len(group)
                files.start_writing(made.fileno())  # the disk works while the next group is made
        return rows

    def _open(self, path: Path) -> pq.ParquetWriter:
        return pq.ParquetWriter(
            path, self._shape, compression=self._task.compression, use_dictionary=list(_DICTIONARIES),
            write_statistics=list(_STATISTICS), store_schema=False, coerce_timestamps="us",
        )  # fmt: skip

    def _groups(self) -> Iterator[pa.Table]:
        task = self._task
        gathered: list[pa.RecordBatch] = []
        rows = size = 0
        source = (task.split, task.places, Decoder(_NAMES), self.losses, task.broker, task.access)
        for batch in read_split(*source):
            gathered.append(self._shaped(batch))
            rows += batch.num_rows
            size += batch.get_total_buffer_size() if batch.num_rows < 1_024 else batch.nbytes
            if rows >= GROUP_ROWS or size >= GROUP_BYTES:
                yield pa.Table.from_batches(gathered, self._shape)
                gathered, rows, size = [], 0, 0
        if rows:
            yield pa.Table.from_batches(gathered, self._shape)

    def _shaped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._decoder is None:
            return batch
        payloads = batch.column("payload")
        removed = tombstones_of(payloads, batch.column("key")) if self._compacted else None
        found = self._decoder.decode(
            payloads, batch.column("schema_id"), batch.column("schema_version"), removed
        )
        self.unread += len(found.bad)
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if not self._task.keep_payload:
            kept = np.zeros(len(batch), np.bool_)
            kept[found.bad] = True
            columns["payload"] = pc.if_else(pa.array(kept), payloads, pa.scalar(None, pa.binary()))
        return pa.RecordBatch.from_arrays([*columns.values(), found.values], schema=self._shape)
