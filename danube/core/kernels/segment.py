"""Kernels for examining sealed history: batch headers, checksums and columns in one pass, no batch skipped.

Unlike ``scan_batches`` they go on behind a batch whose body is damaged, as its header still tells its size.
They read only inside the bytes that they are given: sizes are compared before they are followed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from danube.core.batch.format import (
    BODY_CRC_START,
    COMPRESSION_MASK,
    HEADER_BYTES,
    MAGIC,
    STAMPED_BYTES,
    Flag,
)
from danube.core.kernels import jit
from danube.core.kernels.columns import BODY, FINE, judge_columns
from danube.core.kernels.crc import crc32c
from danube.limits import BATCH_BYTES_MAX

END, CUT, BAD_HEADER = range(3)  # why it stopped

_MAGIC: Final = int.from_bytes(MAGIC, "little")
_TIMES: Final = Flag.TIMES
_REQUEST_IDS: Final = Flag.REQUEST_IDS
_SELECTED: Final = Flag.SELECTED


@jit.inline
def _header_is_intact(data: Any, position: Any) -> Any:
    """Whether the checksum of a batch's 104-byte header in ``data`` is right."""
    size = np.int64(jit.load_half(data, position + 4))
    if jit.load_half(data, position) != _MAGIC or size & 7 or size < HEADER_BYTES or size > BATCH_BYTES_MAX:
        return False
    if np.int64(jit.load_word(data, position + 8)) < 0:
        return False
    return crc32c(data, position, position + STAMPED_BYTES) == jit.load_half(data, position + 32)


@jit.inline
def _span(data: Any, position: Any, count: Any) -> Any:
    """Offsets from the base to behind the last record, of a batch with the verdict FINE."""
    flags = np.int64(jit.load_short(data, position + 36))
    if not flags & _SELECTED or flags & COMPRESSION_MASK or count < 1:
        return count
    names = np.int64(jit.load_short(data, position + 38)) + np.int64(jit.load_short(data, position + 100))
    place = position + HEADER_BYTES + ((names + 7) & ~7)
    if flags & _TIMES:
        place += 8 * count
    if flags & _REQUEST_IDS:
        place += 8 * count
    return np.int64(jit.load_half(data, place + 4 * (count - 1))) + 1


@jit.jit("void(const uint8[::1], int64, int64, int64[:, ::1], int64[::1])")
def examine_batches(data: Any, start: Any, end: Any, rows: Any, result: Any) -> None:
    """Walk batches with intact headers.

    A row is (position, size, base offset, end offset, record count, append time, epoch, flags, producer id,
    producer epoch, base sequence, schema id, schema version, verdict).  ``result`` becomes (count, stop, why
    it stopped); END with ``stop`` before ``end`` where the rows are full.
    """
    position = start
    count = 0
    reason = END
    while position < end and count < len(rows):
        if end - position < HEADER_BYTES:
            reason = CUT
            break
        if not _header_is_intact(data, position):
            reason = BAD_HEADER
            break
        size = np.int64(jit.load_half(data, position + 4))
        if size > end - position:
            reason = CUT
            break
        body = crc32c(data, position + BODY_CRC_START, position + size)
        verdict = BODY
        if body == jit.load_half(data, position + 28):
            verdict = judge_columns(data, position, size, BATCH_BYTES_MAX)
        records = np.int64(jit.load_half(data, position + 40))
        base = np.int64(jit.load_word(data, position + 8))
        rows[count, 0] = position
        rows[count, 1] = size
        rows[count, 2] = base
        rows[count, 3] = base + (_span(data, position, records) if verdict == FINE else records)
        rows[count, 4] = records
        rows[count, 5] = np.int64(jit.load_word(data, position + 16))
        rows[count, 6] = np.int64(jit.load_half(data, position + 24))
        rows[count, 7] = np.int64(jit.load_short(data, position + 36))
        rows[count, 8] = np.int64(jit.load_word(data, position + 56))
        rows[count, 9] = np.int64(jit.load_half(data, position + 80))
        rows[count, 10] = np.int64(jit.load_word(data, position + 64))
        rows[count, 11] = np.int64(jit.load_word(data, position + 48))
        rows[count, 12] = np.int64(jit.load_half(data, position + 44))
        rows[count, 13] = verdict
        count += 1
        position += size
    result[0] = count
    result[1] = position
    result[2] = reason


@jit.jit("int64(const uint8[::1], int64, int64, int64)")
def find_batch(data: Any, start: Any, end: Any, least_offset: Any) -> Any:
    """The next position, a multiple of 8 from ``start`` on, of an intact header at or above ``least_offset``.

    -1 where there is none.  ``start`` is 8-aligned as the segment counts.
    """
    position = start
    while position + HEADER_BYTES <= end:
        if (
            jit.load_half(data, position) == _MAGIC
            and np.int64(jit.load_word(data, position + 8)) >= least_offset
            and _header_is_intact(data, position)
        ):
            return position
        position += 8
    return -1
