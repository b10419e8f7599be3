"""Batches as Arrow tables; pyarrow is imported for the first one."""

from __future__ import annotations

import numpy as np
import pyarrow

from danube.client.machine.received import Part, ReceivedBatch

SCHEMA = pyarrow.schema(
    [
        ("payload", pyarrow.binary()),
        ("key", pyarrow.binary()),
        ("offset", pyarrow.int64()),
        ("partition", pyarrow.int32()),
        ("publish_time", pyarrow.timestamp("us", tz="UTC")),
        ("producer_name", pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
        ("attributes", pyarrow.map_(pyarrow.string(), pyarrow.string())),
    ]
)


def table_of(parts: list[Part], partition: int) -> pyarrow.Table:
    """One record batch of the table for each wire batch."""
    return pyarrow.Table.from_batches([_record_batch(part, partition) for part in parts], SCHEMA)


def _record_batch(part: Part, partition: int) -> pyarrow.RecordBatch:
    batch, count = part.batch, part.batch.record_count
    columns = [
        _binary(count, batch.payload_offsets, batch.payload_bytes),
        _keys(batch),
        pyarrow.array(batch.offsets),
        pyarrow.array(np.full(count, partition, np.int32)),
        pyarrow.array(np.array(batch.publish_times)).view(SCHEMA.field("publish_time").type),
        pyarrow.DictionaryArray.from_arrays(np.zeros(count, np.int32), [batch.producer_name]),
        _attributes(batch),
    ]
    whole = pyarrow.RecordBatch.from_arrays(columns, schema=SCHEMA)
    return whole.slice(part.start, part.stop - part.start)


def _binary(
    count: int, offsets: np.ndarray, data: memoryview, validity: pyarrow.Buffer | None = None
) -> pyarrow.Array:
    """A binary array over the batch's own bytes."""
    buffers = [validity, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
    return pyarrow.BinaryArray.from_buffers(pyarrow.binary(), count, buffers)


def _keys(batch: ReceivedBatch) -> pyarrow.Array:
    column = batch.key_column()
    if column is None:
        return pyarrow.nulls(batch.record_count, pyarrow.binary())
    validity = batch.key_validity
    bitmap = None if validity is None else pyarrow.py_buffer(np.packbits(validity, bitorder="little"))
    return _binary(batch.record_count, *column, validity=bitmap)


def _attributes(batch: ReceivedBatch) -> pyarrow.Array:
    kind = SCHEMA.field("attributes").type
    if not batch.header.attribute_bytes:
        empty = pyarrow.array([], pyarrow.string())
        return pyarrow.MapArray.from_arrays(np.zeros(batch.record_count + 1, np.int32), empty, empty)
    return pyarrow.array([list(each.items()) for each in batch.attributes_list()], kind)
