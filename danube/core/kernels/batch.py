"""Kernels over batches: scanning stored ones, checking columns, gathering records, hashing keys.

Kernels read only inside the given byte arrays.  Positions come from a checked Layout; every offset that a
peer wrote is compared with its column's size before it is used.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from danube.core.batch.format import (
    BODY_CRC_START,
    COMPRESSION_MASK,
    FLAGS_KNOWN,
    HEADER_BYTES,
    MAGIC,
    STAMPED_BYTES,
)
from danube.core.kernels import MALFORMED, WELL_FORMED, jit
from danube.core.kernels.crc import crc32c
from danube.limits import ATTRIBUTES_PER_RECORD_MAX, BATCH_BYTES_MAX, BATCH_RECORDS_MAX

_MAGIC: Final = int.from_bytes(MAGIC, "little")
_END, _CUT, _BAD_HEADER, _BAD_BODY, _OFFSET_MISMATCH = range(5)  # batch_scan.StopReason

_ATTRIBUTE_HEAD: Final = 6
_NOT_ASCII: Final = np.uint64(0x8080808080808080)


@jit.inline
def _shape_is_valid(data: Any, position: Any, size: Any) -> Any:
    """The checks of batch.read_header that scan_batches has not made."""
    flags = np.int64(jit.load_short(data, position + 36))
    count = np.int64(jit.load_half(data, position + 40))
    columns_size = np.int64(jit.load_half(data, position + 96))
    names = np.int64(jit.load_short(data, position + 38)) + np.int64(jit.load_short(data, position + 100))
    least = HEADER_BYTES + ((names + 7) & ~7)
    if flags & COMPRESSION_MASK == 0:
        least += columns_size
    return (
        0 < count <= BATCH_RECORDS_MAX
        and size >= least
        and flags & ~FLAGS_KNOWN == 0
        and jit.load_short(data, position + 102) == 0
        and columns_size <= BATCH_BYTES_MAX
    )


@jit.inline
def _examine(data: Any, position: Any, end: Any) -> Any:
    """Judge the batch at ``position``, in the order that batch_scan gives the reasons."""
    if end - position < HEADER_BYTES:
        return _CUT
    size = np.int64(jit.load_half(data, position + 4))
    if jit.load_half(data, position) != _MAGIC or size & 7 or size < HEADER_BYTES or size > BATCH_BYTES_MAX:
        return _BAD_HEADER
    if np.int64(jit.load_word(data, position + 8)) < 0:
        return _BAD_HEADER
    if crc32c(data, position, position + STAMPED_BYTES) != jit.load_half(data, position + 32):
        return _BAD_HEADER
    if size > end - position:
        return _CUT
    if crc32c(data, position + BODY_CRC_START, position + size) != jit.load_half(data, position + 28):
        return _BAD_BODY
    if not _shape_is_valid(data, position, size):
        return _BAD_HEADER
    return _END


@jit.jit("void(const uint8[::1], int64, int64, int64, int64[:, ::1], int64[::1])")
def scan_batches(data: Any, start: Any, end: Any, expected_offset: Any, rows: Any, result: Any) -> None:
    """Walk intact batches; a row is (position, size, base offset, record count).

    ``expected_offset`` -1 takes any offsets.  ``result`` becomes (count, stop, reason); the reason is
    END with ``stop`` before ``end`` where the rows are full.
    """
    position = start
    count = 0
    reason = _END
    while position < end and count < len(rows):
        reason = _examine(data, position, end)
        if reason != _END:
            break
        offset = np.int64(jit.load_word(data, position + 8))
        if expected_offset >= 0 and offset != expected_offset:
            reason = _OFFSET_MISMATCH
            break
        size = np.int64(jit.load_half(data, position + 4))
        records = np.int64(jit.load_half(data, position + 40))
        rows[count, 0] = position
        rows[count, 1] = size
        rows[count, 2] = offset
        rows[count, 3] = records
        count += 1
        position += size
        if expected_offset >= 0:
            expected_offset += records
    result[0] = count
    result[1] = position
    result[2] = reason


@jit.jit("int64(const uint8[::1], int64, int64, int64, int64)")
def check_offsets(data: Any, position: Any, count: Any, total: Any, limit: Any) -> Any:
    """WELL_FORMED, MALFORMED, or the index of the first entry larger than ``limit``."""
    before = np.int64(jit.load_int(data, position))
    backwards = before != 0
    largest = np.int64(0)
    for index in range(count):
        after = np.int64(jit.load_int(data, position + 4 * (index + 1)))
        backwards |= after < before
        largest = max(largest, after - before)
        before = after
    if backwards or before != total:
        return MALFORMED
    if largest <= limit:
        return WELL_FORMED
    for index in range(count):
        place = position + 4 * index
        if np.int64(jit.load_int(data, place + 4)) - np.int64(jit.load_int(data, place)) > limit:
            return index
    return MALFORMED


@jit.jit("int64(const uint8[::1], int64, int64, int64)")
def check_nulls(data: Any, validity: Any, position: Any, count: Any) -> Any:
    """MALFORMED where an entry that the bitmap calls null has bytes."""
    for index in range(count):
        if (data[validity + (index >> 3)] >> (index & 7)) & 1 == 0:
            place = position + 4 * index
            if jit.load_int(data, place) != jit.load_int(data, place + 4):
                return MALFORMED
    return WELL_FORMED


@jit.inline
def _second_octets(first: Any) -> Any:
    """Octets that may follow ``first`` in UTF-8 (low, high), and how many follow in all (0: none may)."""
    if first < 0xC2 or first > 0xF4:
        return 0, 0, 0
    if first < 0xE0:
        return 0x80, 0xBF, 1
    if first < 0xF0:  # no overlong forms, no surrogates
        return (0xA0 if first == 0xE0 else 0x80), (0x9F if first == 0xED else 0xBF), 2
    return (0x90 if first == 0xF0 else 0x80), (0x8F if first == 0xF4 else 0xBF), 3


@jit.jit("boolean(const uint8[::1], int64, int64)")
def text_is_valid(data: Any, place: Any, end: Any) -> Any:
    """Whether ``data[place:end]`` is UTF-8."""
    while place < end:
        if end - place >= 8 and jit.load_word(data, place) & _NOT_ASCII == 0:
            place += 8
            continue
        if data[place] < 0x80:
            place += 1
            continue
        low, high, more = _second_octets(data[place])
        if more == 0 or end - place <= more:
            return False
        if data[place + 1] < low or data[place + 1] > high:
            return False
        for index in range(2, more + 1):
            if data[place + index] & 0xC0 != 0x80:
                return False
        place += more + 1
    return True


@jit.inline
def _check_entry(data: Any, place: Any, end: Any) -> Any:
    """One record's attributes, ``data[place:end]``."""
    attributes = 0
    while place < end:
        if end - place < _ATTRIBUTE_HEAD or attributes == ATTRIBUTES_PER_RECORD_MAX:
            return MALFORMED
        middle = place + _ATTRIBUTE_HEAD + np.int64(jit.load_short(data, place))
        after = middle + np.int64(jit.load_half(data, place + 2))
        if after > end:
            return MALFORMED
        if not text_is_valid(data, place + _ATTRIBUTE_HEAD, middle) or not text_is_valid(data, middle, after):
            return MALFORMED
        place = after
        attributes += 1
    return WELL_FORMED


@jit.jit("int64(const uint8[::1], int64, int64, int64)")
def check_attributes(data: Any, offsets: Any, position: Any, count: Any) -> Any:
    """WELL_FORMED, or MALFORMED for a record that cannot be decoded; the offsets were checked."""
    for index in range(count):
        place = position + np.int64(jit.load_int(data, offsets + 4 * index))
        end = position + np.int64(jit.load_int(data, offsets + 4 * index + 4))
        if _check_entry(data, place, end) == MALFORMED:
            return MALFORMED
    return WELL_FORMED


@jit.jit("int64(const uint8[::1], int64, int64, const int64[::1])")
def measure(data: Any, offsets: Any, total: Any, indexes: Any) -> Any:
    """Byte total of the chosen entries of a variable-length column, or MALFORMED."""
    size = np.int64(0)
    before = np.int64(0)  # entries that overlap could add up to far more than their column
    for chosen in range(len(indexes)):
        place = offsets + 4 * indexes[chosen]
        start = np.int64(jit.load_int(data, place))
        end = np.int64(jit.load_int(data, place + 4))
        if start < before or end < start or end > total:
            return MALFORMED
        size += end - start
        before = end
    return size


@jit.jit("void(const uint8[::1], int64, int64, const int64[::1], uint8[::1], int64, int64)")
def gather_variable(
    data: Any,
    offsets: Any,
    position: Any,
    indexes: Any,
    target: Any,
    target_offsets: Any,
    target_position: Any,
) -> None:
    """Copy the chosen entries, measured before, and their new offsets."""
    end = np.int64(0)
    jit.store_half(target, target_offsets, np.uint32(0))
    for chosen in range(len(indexes)):
        place = offsets + 4 * indexes[chosen]
        start = np.int64(jit.load_int(data, place))
        size = np.int64(jit.load_int(data, place + 4)) - start
        jit.copy_bytes(target, target_position + end, data, position + start, size)
        end += size
        jit.store_half(target, target_offsets + 4 * (chosen + 1), np.uint32(end))


@jit.jit("void(const uint8[::1], int64, const int64[::1], uint8[::1], int64)")
def gather_words(data: Any, position: Any, indexes: Any, target: Any, target_position: Any) -> None:
    """Copy the chosen numbers of a column of eight bytes a record."""
    for chosen in range(len(indexes)):
        word = jit.load_word(data, position + 8 * indexes[chosen])
        jit.store_word(target, target_position + 8 * chosen, word)


@jit.jit("void(const uint8[::1], int64, const int64[::1], uint8[::1], int64)")
def gather_deltas(data: Any, position: Any, indexes: Any, target: Any, target_position: Any) -> None:
    """Write offset deltas: those of a selection at ``position``, or the indexes themselves for -1."""
    for chosen in range(len(indexes)):
        delta = np.uint32(indexes[chosen])
        if position >= 0:
            delta = jit.load_half(data, position + 4 * indexes[chosen])
        jit.store_half(target, target_position + 4 * chosen, delta)


@jit.jit("void(const uint8[::1], int64, const int64[::1], uint8[::1], int64)")
def gather_bits(data: Any, position: Any, indexes: Any, target: Any, target_position: Any) -> None:
    """Set the bits of the chosen records in a bitmap of zeros."""
    for chosen in range(len(indexes)):
        bit = (data[position + (indexes[chosen] >> 3)] >> (indexes[chosen] & 7)) & 1
        target[target_position + (chosen >> 3)] |= np.uint8(bit << (chosen & 7))


@jit.jit("void(uint8[::1])")
def seal(target: Any) -> None:
    """Write body_crc and then header_crc of a whole batch."""
    jit.store_half(target, 28, crc32c(target, BODY_CRC_START, len(target)))
    jit.store_half(target, STAMPED_BYTES, crc32c(target, 0, STAMPED_BYTES))


@jit.jit("uint64(const uint8[::1], int64, int64)")
def ring_hash(data: Any, start: Any, end: Any) -> Any:
    """selection.ring_hash of ``data[start:end]``."""
    hashed = np.uint64(0xCBF29CE484222325)
    for index in range(start, end):
        hashed = (hashed ^ np.uint64(data[index])) * np.uint64(0x100000001B3)
    low = np.uint32(hashed >> np.uint64(32)) ^ np.uint32(hashed & np.uint64(0xFFFFFFFF))
    low = np.uint32(low ^ (low >> np.uint32(16)))
    low = np.uint32(low * np.uint32(0x85EBCA6B))
    low = np.uint32(low ^ (low >> np.uint32(13)))
    low = np.uint32(low * np.uint32(0xC2B2AE35))
    return np.uint64(np.uint32(low ^ (low >> np.uint32(16))))


@jit.jit("int64(const uint8[::1], int64, int64, int64, int64, uint64, uint64[::1])")
def ring_hashes(
    data: Any, validity: Any, offsets: Any, position: Any, total: Any, absent: Any, hashes: Any
) -> Any:
    """Hash every record's key; ``absent`` is the hash of records without one.  MALFORMED for bad offsets."""
    before = np.int64(0)  # entries that overlap could take for ever
    for index in range(len(hashes)):
        if validity >= 0 and (data[validity + (index >> 3)] >> (index & 7)) & 1 == 0:
            hashes[index] = absent
            continue
        start = np.int64(jit.load_int(data, offsets + 4 * index))
        end = np.int64(jit.load_int(data, offsets + 4 * index + 4))
        if start < before or end < start or end > total:
            return MALFORMED
        hashes[index] = ring_hash(data, position + start, position + end)
        before = end
    return WELL_FORMED
