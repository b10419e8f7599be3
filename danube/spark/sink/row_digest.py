"""A digest of rows that does not depend on how they are cut into batches.

Lengths and bytes of each part of a record (payload, key, names and values of attributes) are streams of their
own, and each is hashed as it comes.  Memory: the state of nine hashes.  Times and schemas are no part of it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow
from numpy.typing import NDArray

from danube.core.batch.checksum import ContentHasher, content_hash, content_hasher

_NONE: Final = -1  # in place of a key's length: the row has none


class RowDigest:
    """The rows of one task and partition, from the first on."""

    def __init__(self) -> None:
        self._entries = content_hasher()  # attributes of each row
        self._parts = [(content_hasher(), content_hasher()) for _ in range(4)]

    def add(self, rows: pyarrow.RecordBatch) -> None:
        """The rows that come next."""
        names = rows.schema.names
        payload, key = self._parts[:2]
        _add(payload, rows.column("payload"))
        if "key" in names:
            _add(key, rows.column("key"))
        else:
            key[0].update(np.full(rows.num_rows, _NONE, np.int32).data)
        if "attributes" in names:
            self._add_attributes(rows.column("attributes"))
        else:
            self._entries.update(np.zeros(rows.num_rows, np.int32).data)

    def _add_attributes(self, values: pyarrow.Array) -> None:
        counts = np.zeros(len(values), np.int32)
        present = values.drop_null() if values.null_count else values  # bytes under a null mean nothing
        if len(present):
            offsets = np.asarray(present.offsets)
            counts[np.asarray(values.is_valid())] = np.diff(offsets)
            span = slice(int(offsets[0]), int(offsets[-1]))
            _add(self._parts[2], present.keys[span])
            _add(self._parts[3], present.items[span])
        self._entries.update(counts.data)

    def hex(self) -> str:
        """The digest of all rows so far."""
        streams = [self._entries, *(stream for part in self._parts for stream in part)]
        return content_hash(b"".join(stream.digest() for stream in streams)).hex()


def _add(streams: tuple[ContentHasher, ContentHasher], values: pyarrow.Array) -> None:
    """Lengths and bytes of one part of the rows."""
    if not len(values):
        return
    missing = np.asarray(values.is_null()) if values.null_count else None
    octets = values.cast(pyarrow.large_binary())
    if missing is not None:
        octets = octets.fill_null(b"")
    _, bounds, content = octets.buffers()
    ends = np.frombuffer(bounds, np.int64, len(octets) + 1, octets.offset * 8)
    lengths: NDArray[np.int32] = np.diff(ends).astype(np.int32)
    if missing is not None:
        lengths[missing] = _NONE
    streams[0].update(lengths.data)
    if ends[-1] > ends[0]:
        streams[1].update(memoryview(content)[int(ends[0]) : int(ends[-1])])
