"""Walking consecutive stored batches; recovery and reads do it before they trust any byte."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core import kernels
from danube.core.batch.checksum import crc32c
from danube.core.batch.format import (
    BODY_CRC_START,
    HEADER_BYTES,
    MAGIC,
    STAMPED_BYTES,
    read_header,
)
from danube.errors import DanubeError, InvalidArgument
from danube.limits import BATCH_BYTES_MAX

_STAMPED: Final = struct.Struct("<4sIQqIII")
_ROWS_FIRST: Final = 512  # 16 KiB: most reads hold fewer batches
_ROWS_NEXT: Final = 16_384

Data = bytes | bytearray | memoryview


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
    buffer: Data,
    start: int = 0,
    end: int | None = None,
    expected_offset: int | None = None,
) -> ScanResult:
    """Verify the batches in ``buffer[start:end]`` up to the first that is not whole, intact and next.

    With ``expected_offset`` the first batch must have it and each other must follow the one before.
    """
    if not 0 <= start <= len(buffer):
        raise InvalidArgument(f"scan cannot start at {start} of {len(buffer)} bytes")
    end = len(buffer) if end is None else min(end, len(buffer))
    if not kernels.available or start >= end:
        return scan_twin(buffer, start, end, expected_offset)
    return _scan_with_kernel(kernels.compiled, buffer, start, end, expected_offset)


def _scan_with_kernel(
    batch: Any, buffer: Data, start: int, end: int, expected_offset: int | None
) -> ScanResult:
    octets = np.frombuffer(buffer, np.uint8)
    expected = -1 if expected_offset is None else expected_offset
    result = np.empty(3, np.int64)
    parts: list[NDArray[np.int64]] = []
    rows_count = _ROWS_FIRST
    while True:
        rows = np.empty((rows_count, 4), np.int64)
        batch.scan_batches(octets, start, end, expected, rows, result)
        count, start, reason = result.tolist()
        parts.append(rows[:count])
        if reason != StopReason.END or start >= end:
            table = parts[0] if len(parts) == 1 else np.concatenate(parts)
            return _result(table, start, StopReason(reason))
        if expected >= 0:
            expected = int(rows[-1, 2] + rows[-1, 3])
        rows_count = _ROWS_NEXT


def _result(table: NDArray[np.int64], stop: int, reason: StopReason) -> ScanResult:
    return ScanResult(table[:, 0], table[:, 1], table[:, 2], table[:, 3], stop, reason)


def scan_twin(buffer: Data, start: int, end: int, expected_offset: int | None) -> ScanResult:
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
    return _result(np.array(rows, np.int64).reshape(-1, 4), position, reason)


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
