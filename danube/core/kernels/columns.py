"""Kernels that judge a batch's columns: those of a producer, and those that were stored.

They read only inside the bytes that they are given: sizes are compared before they are followed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from danube.core.batch.format import BODY_CRC_START, COMPRESSION_MASK, FLAGS_KNOWN, HEADER_BYTES, MAGIC, Flag
from danube.core.kernels import WELL_FORMED, jit
from danube.core.kernels.batch import check_attributes, check_nulls, check_offsets, text_is_valid
from danube.core.kernels.crc import crc32c
from danube.limits import ATTRIBUTE_BYTES_MAX, BATCH_BYTES_MAX, BATCH_RECORDS_MAX, KEY_BYTES_MAX

FINE, BODY, SHAPE, PAYLOADS, KEYS, ATTRIBUTES, DELTAS = range(7)  # verdicts; BODY: a checksum

_MAGIC: Final = int.from_bytes(MAGIC, "little")
_TIMES: Final = Flag.TIMES
_KEYS: Final = Flag.KEYS
_NULL_KEYS: Final = Flag.NULL_KEYS
_ATTRIBUTES: Final = Flag.ATTRIBUTES
_REQUEST_IDS: Final = Flag.REQUEST_IDS
_SELECTED: Final = Flag.SELECTED


@jit.jit("int64(const uint8[::1], int64, int64, int64)")
def judge_columns(data: Any, position: Any, size: Any, max_record_bytes: Any) -> Any:
    """The verdict of a batch whose ``size`` bytes are at hand; compressed columns are not looked into."""
    flags = np.int64(jit.load_short(data, position + 36))
    count = np.int64(jit.load_half(data, position + 40))
    payload_bytes = np.int64(jit.load_half(data, position + 84))
    key_bytes = np.int64(jit.load_half(data, position + 88))
    attribute_bytes = np.int64(jit.load_half(data, position + 92))
    columns_size = np.int64(jit.load_half(data, position + 96))
    names = np.int64(jit.load_short(data, position + 38)) + np.int64(jit.load_short(data, position + 100))
    start = position + HEADER_BYTES + ((names + 7) & ~7)
    if count <= 0 or count > BATCH_RECORDS_MAX or flags & ~FLAGS_KNOWN or columns_size > BATCH_BYTES_MAX:
        return SHAPE
    if jit.load_short(data, position + 102) != 0 or start > position + size:
        return SHAPE
    if flags & COMPRESSION_MASK > 2 or (flags & _NULL_KEYS and not flags & _KEYS):
        return SHAPE
    if (key_bytes and not flags & _KEYS) or (attribute_bytes and not flags & _ATTRIBUTES):
        return SHAPE
    offsets_size = (4 * (count + 1) + 7) & ~7
    place = start
    if flags & _TIMES:
        place += 8 * count
    if flags & _REQUEST_IDS:
        place += 8 * count
    selected = place
    if flags & _SELECTED:
        place += (4 * count + 7) & ~7
    payloads = place
    place += offsets_size + ((payload_bytes + 7) & ~7)
    validity = place
    if flags & _NULL_KEYS:
        place += (count + 63) // 64 * 8
    keys = place
    if flags & _KEYS:
        place += offsets_size + ((key_bytes + 7) & ~7)
    attributes = place
    if flags & _ATTRIBUTES:
        place += offsets_size + ((attribute_bytes + 7) & ~7)
    if place - start != columns_size:
        return SHAPE
    if flags & COMPRESSION_MASK:
        return FINE
    if place != position + size:
        return SHAPE
    if check_offsets(data, payloads, count, payload_bytes, max_record_bytes) != WELL_FORMED:
        return PAYLOADS
    if flags & _KEYS:
        if check_offsets(data, keys, count, key_bytes, KEY_BYTES_MAX) != WELL_FORMED:
            return KEYS
        if flags & _NULL_KEYS and check_nulls(data, validity, keys, count) != WELL_FORMED:
            return KEYS
    if flags & _ATTRIBUTES:
        if check_offsets(data, attributes, count, attribute_bytes, ATTRIBUTE_BYTES_MAX) != WELL_FORMED:
            return ATTRIBUTES
        if check_attributes(data, attributes, attributes + offsets_size, count) != WELL_FORMED:
            return ATTRIBUTES
    if flags & _SELECTED:
        for index in range(1, count):
            before = np.int64(jit.load_half(data, selected + 4 * index - 4))
            if np.int64(jit.load_half(data, selected + 4 * index)) <= before:
                return DELTAS
    return FINE


@jit.jit("boolean(const uint8[::1], int64)")
def columns_are_sound(data: Any, max_record_bytes: Any) -> Any:
    """Whether a producer's batch is whole and can be read, and none of its records is larger than that.

    False says nothing of one whose columns are compressed.
    """
    if len(data) < HEADER_BYTES or jit.load_half(data, 0) != _MAGIC:
        return False
    size, flags = np.int64(jit.load_half(data, 4)), np.int64(jit.load_short(data, 36))
    if size > min(len(data), BATCH_BYTES_MAX) or flags & (COMPRESSION_MASK | _SELECTED):
        return False
    if judge_columns(data, 0, size, max_record_bytes) != FINE:
        return False
    middle = HEADER_BYTES + np.int64(jit.load_short(data, 38))
    end = middle + np.int64(jit.load_short(data, 100))
    return text_is_valid(data, HEADER_BYTES, middle) and text_is_valid(data, middle, end)


@jit.jit("boolean(const uint8[::1], int64)")
def batch_is_sound(data: Any, max_record_bytes: Any) -> Any:
    """columns_are_sound() of bytes that are exactly one batch with a correct body checksum."""
    return (
        columns_are_sound(data, max_record_bytes)
        and np.int64(jit.load_half(data, 4)) == len(data)
        and crc32c(data, BODY_CRC_START, len(data)) == jit.load_half(data, 28)
    )
