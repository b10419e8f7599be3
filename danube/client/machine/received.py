"""A batch as a consumer keeps it: checked, copied out of the receive buffer once, and read in place."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core.batch.checksum import crc32c
from danube.core.batch.columns import BatchView
from danube.core.batch.compression import decompress
from danube.core.batch.format import (
    BODY_CRC_START,
    HEADER_BYTES,
    STAMPED_BYTES,
    BatchHeader,
    Flag,
    padded,
    read_header,
)
from danube.errors import Damage, ProtocolError

_COMPRESSION = 7
_KEYS = int(Flag.KEYS)
_SELECTED = int(Flag.SELECTED)
_NAMES_START = HEADER_BYTES - BODY_CRC_START


class ReceivedBatch(BatchView):
    """A view over the body alone (byte 36 on), which is the very object whose checksum was taken."""

    __slots__ = ("body", "compacted", "redelivery_count")

    def __init__(
        self, body: bytes, header: BatchHeader, redelivery_count: int, *, compacted: bool = False
    ) -> None:
        self.body = body
        self.compacted = compacted
        self.header = header
        self.record_count = header.record_count
        self.redelivery_count = redelivery_count
        self.data = memoryview(body)
        self._layout = None
        self._columns = None
        self._variable = {}

    @property
    def columns(self) -> memoryview:
        if self._columns is None:
            header, layout = self.header, self.layout
            block = self.data[_NAMES_START + padded(header.name_size + header.origin_size) :]
            kind = header.flags & _COMPRESSION
            self._columns = memoryview(decompress(kind, block, layout.end)) if kind else block
        return self._columns

    def _text(self, position: int, size: int) -> str:
        return super()._text(position - BODY_CRC_START, size)

    def tombstone(self, index: int) -> bool:
        """Return whether the record is a tombstone: its key has no value from here on."""
        return self.compacted and self.removes_key(index)

    @property
    def selected(self) -> bool:
        """Whether the offsets have gaps."""
        return bool(self.header.flags & _SELECTED)

    def key_column(self) -> tuple[NDArray[np.int32], memoryview] | None:
        """int32[n+1] offsets and the bytes of all keys; None if no record has one."""
        return self._key_column() if self.header.flags & _KEYS else None

    def offset_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Half-open offset ranges of the records ``start .. stop``."""
        if not self.selected:
            base = self.header.base_offset
            return [(base + start, base + stop)]
        return ranges_of(self.offsets[start:stop])


class Part(NamedTuple):
    """Records ``start .. stop`` of one wire batch."""

    batch: ReceivedBatch
    start: int
    stop: int


def ranges_of(offsets: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Half-open ranges that hold exactly these offsets; they need not be ordered or distinct."""
    if not len(offsets):
        return []
    ordered = np.unique(offsets)
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    starts = ordered[np.concatenate(([0], breaks + 1))].tolist()
    lasts = ordered[np.concatenate((breaks, [len(ordered) - 1]))].tolist()
    return [(start, last + 1) for start, last in zip(starts, lasts, strict=True)]


def take_batch(
    view: memoryview, position: int, redelivery_count: int, *, compacted: bool = False
) -> ReceivedBatch:
    """Copy the batch at ``position`` out of the receive buffer and check all of it.

    ``compacted``: its topic keeps only the latest record of each key.  Raises Damage if a checksum differs,
    and ProtocolError if the bytes are no batch.  The caller then drops the connection, and the application
    sees no record of the batch.
    """
    header = read_header(view, position)
    end = position + header.size
    if end > len(view):
        raise ProtocolError("delivered batch is cut", size=header.size, present=len(view) - position)
    if crc32c(bytes(view[position : position + STAMPED_BYTES])) != header.header_crc:
        raise Damage("delivered batch has a damaged header", base_offset=header.base_offset)
    body = bytes(view[position + BODY_CRC_START : end])
    if crc32c(body) != header.body_crc:
        raise Damage("delivered batch fails its checksum", base_offset=header.base_offset, size=header.size)
    return ReceivedBatch(body, header, redelivery_count, compacted=compacted)
