"""Batches of a piece of a segment as a table of numbers, by a kernel or by its twin."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from danube.core import kernels
from danube.core.batch.checksum import crc32c
from danube.core.batch.columns import BatchView
from danube.core.batch.format import (
    BODY_CRC_START,
    COMPRESSION_MASK,
    HEADER_BYTES,
    MAGIC,
    STAMPED_BYTES,
    Flag,
    read_header,
)
from danube.errors import DanubeError
from danube.limits import ATTRIBUTE_BYTES_MAX, BATCH_BYTES_MAX, KEY_BYTES_MAX

ROWS_MAX: Final = 4_096
_WORDS: Final = 14
_STAMPED: Final = struct.Struct("<4sIQqIII")


class Verdict(IntEnum):
    """Fault of a batch whose header is intact."""

    FINE = 0
    BODY = 1
    SHAPE = 2
    PAYLOADS = 3
    KEYS = 4
    ATTRIBUTES = 5
    DELTAS = 6


class Stop(IntEnum):
    END = 0
    CUT = 1
    BAD_HEADER = 2


class Rows(NamedTuple):
    """int64[n] each; ``end_offset`` is behind the last record, also where records are left out."""

    position: NDArray[np.int64]
    size: NDArray[np.int64]
    base_offset: NDArray[np.int64]
    end_offset: NDArray[np.int64]
    record_count: NDArray[np.int64]
    append_time_us: NDArray[np.int64]
    epoch: NDArray[np.int64]
    flags: NDArray[np.int64]
    producer_id: NDArray[np.int64]
    producer_epoch: NDArray[np.int64]
    base_sequence: NDArray[np.int64]
    schema_id: NDArray[np.int64]
    schema_version: NDArray[np.int64]
    verdict: NDArray[np.int64]


class Examined(NamedTuple):
    """The batches up to ``stop``; END before the end of the bytes when there were too many for one call."""

    rows: Rows
    stop: int
    reason: Stop


def warm_up() -> bool:
    """Load the kernels for this process; False if they cannot be had (the twins are used then)."""
    return kernels.load().available


def examine(data: NDArray[np.uint8], start: int, end: int) -> Examined:
    """Judge the batches in ``data[start:end]``; ``data`` is one-dimensional and contiguous."""
    if not kernels.available:
        return examine_twin(data, start, end)
    table = np.empty((ROWS_MAX, _WORDS), np.int64)
    result = np.empty(3, np.int64)
    kernels.compiled.examine_batches(data, start, end, table, result)
    count, stop, reason = result.tolist()
    return Examined(Rows._make(table[:count].T), stop, Stop(reason))


def find(data: NDArray[np.uint8], start: int, end: int, least_offset: int) -> int:
    """Position of the next intact header at or above ``least_offset``, in steps of 8; -1 where none is."""
    if not kernels.available:
        return find_twin(data, start, end, least_offset)
    return int(kernels.compiled.find_batch(data, start, end, least_offset))


def examine_twin(data: NDArray[np.uint8], start: int, end: int) -> Examined:
    """examine() by struct and numpy."""
    view = memoryview(data.tobytes())
    rows: list[tuple[int, ...]] = []
    position, reason = start, Stop.END
    while position < end and len(rows) < ROWS_MAX:
        if end - position < HEADER_BYTES:
            reason = Stop.CUT
            break
        if not _header_intact(view, position):
            reason = Stop.BAD_HEADER
            break
        _, size, base, time_us, epoch, body_crc, _ = _STAMPED.unpack_from(view, position)
        if size > end - position:
            reason = Stop.CUT
            break
        batch = bytes(view[position : position + size])
        count, version, schema_id, producer, sequence = struct.unpack_from("<IIQqq", batch, 40)
        flags, producer_epoch = struct.unpack_from("<H", batch, 36)[0], struct.unpack_from("<I", batch, 80)[0]
        verdict, span = Verdict.BODY, count
        if crc32c(batch[BODY_CRC_START:]) == body_crc:
            verdict, span = _judge(batch, count)
        rows.append(
            (position, size, base, base + span, count, time_us, epoch, flags, producer, producer_epoch,
             sequence, struct.unpack("<q", struct.pack("<Q", schema_id))[0], version, verdict)
        )  # fmt: skip
        position += size
    table = np.array(rows, np.int64).reshape(-1, _WORDS)
    return Examined(Rows._make(table.T), position, reason)


def _header_intact(view: memoryview, position: int) -> bool:
    magic, size, base, _, _, _, header_crc = _STAMPED.unpack_from(view, position)
    if magic != MAGIC or size & 7 or not HEADER_BYTES <= size <= BATCH_BYTES_MAX or base >> 63:
        return False
    return bool(crc32c(bytes(view[position : position + STAMPED_BYTES])) == header_crc)


def _judge(batch: bytes, count: int) -> tuple[Verdict, int]:
    try:
        header = read_header(batch)
        view = BatchView(batch, header)
        view.layout  # noqa: B018  (raises where the sizes contradict each other)
    except DanubeError:
        return Verdict.SHAPE, count
    if header.flags & COMPRESSION_MASK > 2:
        return Verdict.SHAPE, count
    if header.flags & COMPRESSION_MASK:
        return Verdict.FINE, count
    verdict = _judge_columns(view, header.flags)
    if verdict is Verdict.FINE and header.flags & Flag.SELECTED:
        return verdict, int(view.offset_deltas[-1]) + 1
    return verdict, count


def _judge_columns(view: BatchView, flags: int) -> Verdict:
    verdict = Verdict.PAYLOADS
    try:
        view.payload_offsets  # noqa: B018
        if flags & Flag.KEYS:
            verdict = Verdict.KEYS
            keys = view.keys()
            if max(0 if key is None else len(key) for key in keys) > KEY_BYTES_MAX:
                return verdict
            validity = view.key_validity
            if validity is not None and np.diff(view._key_column()[0])[~validity].any():
                return verdict
        if flags & Flag.ATTRIBUTES:
            verdict = Verdict.ATTRIBUTES
            view.attributes_list()
            if int(np.diff(view._attribute_column()[0]).max()) > ATTRIBUTE_BYTES_MAX:
                return verdict
        verdict = Verdict.DELTAS
        view.offset_deltas  # noqa: B018
    except DanubeError:
        return verdict
    return Verdict.FINE


def find_twin(data: NDArray[np.uint8], start: int, end: int, least_offset: int) -> int:
    """find() by a search for the magic."""
    content = data[start:end].tobytes()
    place = content.find(MAGIC)
    while 0 <= place <= len(content) - HEADER_BYTES:
        intact = place & 7 == 0 and _header_intact(memoryview(content), place)
        if intact and struct.unpack_from("<Q", content, place + 8)[0] >= least_offset:
            return start + place
        place = content.find(MAGIC, place + 1)
    return -1
