"""Walking consecutive stored batches: what recovery and reads do before they trust a byte."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core import kernels
from danube.core.batch import (
    BODY_CRC_START,
    FLAGS_KNOWN,
    HEADER_BYTES,
    MAGIC,
    STAMPED_BYTES,
    read_header,
)
from danube.core.checksum import crc32c
from danube.errors import DanubeError
from danube.limits import BATCH_BYTES_MAX

_STAMPED: Final = struct.Struct("<4sIQqIII")
_CHUNK: Final = 4096


class StopReason(IntEnum):
    """Why a scan stopped at ScanResult.stop."""

    END = 0  # every byte was part of a whole, intact batch
    CUT = 1  # a batch begins here and is longer than what is left
    BAD_HEADER = 2  # not a header, or header_crc differs
    BAD_BODY = 3  # body_crc differs
    OFFSET_MISMATCH = 4  # intact, and not the offset that comes next


class ScanResult(NamedTuple):
    """Intact batches in order, as int64 arrays; bytes from ``stop`` on are not among them."""

    positions: NDArray[np.int64]
    sizes: NDArray[np.int64]
    base_offsets: NDArray[np.int64]
    record_counts: NDArray[np.int64]
    stop: int
    reason: StopReason


def scan(
    buffer: bytes | bytearray | memoryview,
    start: int = 0,
    end: int | None = None,
    expected_offset: int | None = None,
) -> ScanResult:
    """Verify the batches in ``buffer[start:end]`` up to the first that is not whole, intact and next.

    With ``expected_offset`` the first batch must have it and each other must follow the one before.
    """
    end = len(buffer) if end is None else min(end, len(buffer))
    return scan_twin(buffer, start, end, expected_offset)


def scan_twin(
    buffer: bytes | bytearray | memoryview, start: int, end: int, expected_offset: int | None
) -> ScanResult:
    """scan() by struct and google_crc32c."""
    view = memoryview(buffer)
    rows: list[tuple[int, int, int, int]] = []
    position, reason = start, StopReason.END
    while position < end:
        reason, size, offset, count = _examine(view, position, end)
        if reason is StopReason.END and expected_offset is not None and offset != expected_offset:
            reason = StopReason.OFFSET_MISMATCH
        if reason is not StopReason.END:
            break
        rows.append((position, size, offset, count))
        position += size
        if expected_offset is not None:
            expected_offset += count
    table = np.array(rows, np.int64).reshape(-1, 4)
    return ScanResult(table[:, 0], table[:, 1], table[:, 2], table[:, 3], position, reason)


def _examine(view: memoryview, position: int, end: int) -> tuple[StopReason, int, int, int]:
    """Judge the batch at ``position``: reason, size, base offset, record count."""
    if end - position < HEADER_BYTES:
        return StopReason.CUT, 0, 0, 0
    magic, size, offset, _, _, body_crc, header_crc = _STAMPED.unpack_from(view, position)
    if magic != MAGIC or size & 7 or not HEADER_BYTES <= size <= BATCH_BYTES_MAX or offset >> 63:
        return StopReason.BAD_HEADER, 0, 0, 0
    if crc32c(bytes(view[position : position + STAMPED_BYTES])) != header_crc:
        return StopReason.BAD_HEADER, 0, 0, 0
    if size > end - position:
        return StopReason.CUT, 0, 0, 0
    if crc32c(bytes(view[position + BODY_CRC_START : position + size])) != body_crc:
        return StopReason.BAD_BODY, 0, 0, 0
    try:
        header = read_header(view, position)
    except DanubeError:
        return StopReason.BAD_HEADER, 0, 0, 0
    return StopReason.END, size, offset, header.record_count
