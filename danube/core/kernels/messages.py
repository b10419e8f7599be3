"""Kernels over messages of the gRPC API, back to back: where their fields lie, their payloads side by side.

A message is read only in the form in which serializers write it: the fields that differ between messages of
a producer come in the order of their numbers, each at most once, and no size or number is cut off.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from danube.core.kernels import MALFORMED, jit
from danube.core.kernels.http2 import alike

_REQUEST_ID, _PLACE, _PAYLOAD, _PUBLISH_TIME = 0x08, 0x12, 0x1A, 0x20  # tags of danube.StreamMessage
_VARINT_BYTES_MAX = 10


@jit.inline
def _varint(data: Any, position: Any, end: Any) -> Any:
    """A number and where it ends; MALFORMED instead of the latter where it is cut off or beyond 64 bits."""
    number = np.uint64(0)
    shift = np.uint64(0)
    last = min(end, position + _VARINT_BYTES_MAX)
    while position < last:
        byte = np.uint64(data[position])
        position += 1
        number |= (byte & np.uint64(127)) << shift
        if byte < 128:
            return np.int64(number), (position if shift < 63 or byte < 2 else MALFORMED)
        shift += np.uint64(7)
    return np.int64(0), MALFORMED


@jit.inline
def _sized(data: Any, position: Any, end: Any) -> Any:
    """Where the bytes of a field with a size begin and end; MALFORMED for the latter where cut off."""
    size, start = _varint(data, position, end)
    if start < 0 or size < 0 or size > end - start:
        return np.int64(0), np.int64(MALFORMED)
    return np.int64(start), np.int64(start + size)


@jit.jit("int64(const uint8[::1], const int64[::1], int64[:, ::1])")
def scan_messages(data: Any, bounds: Any, found: Any) -> Any:
    """Find request id, publish time, payload's start and end, and run of each message of ``data``.

    Message i is ``data[bounds[i]:bounds[i + 1]]`` and gets column i of ``found``.  Those of a run follow each
    other, with the same bytes in all fields but these.  Returns the number of runs, or MALFORMED where one
    message is not of the form.
    """
    runs = np.int64(0)
    place = place_size = rest = rest_size = np.int64(0)
    for index in range(len(bounds) - 1):
        position = bounds[index]
        end = bounds[index + 1]
        request_id = time = np.int64(0)
        if position < end and data[position] == _REQUEST_ID:
            request_id, position = _varint(data, position + 1, end)
        if position < 0 or position >= end or data[position] != _PLACE:
            return MALFORMED
        place_before, place_size_before = place, place_size
        place, position = _sized(data, position + 1, end)
        place_size = position - place
        start = position
        if 0 < position < end and data[position] == _PAYLOAD:
            start, position = _sized(data, position + 1, end)
        found[2, index] = start
        found[3, index] = position
        if 0 < position < end and data[position] == _PUBLISH_TIME:
            time, position = _varint(data, position + 1, end)
        if position < 0 or time < 0:  # no time goes beyond 2**63
            return MALFORMED
        found[0, index] = request_id
        found[1, index] = time
        rest_before, rest_size_before = rest, rest_size
        rest, rest_size = position, end - position
        if (
            index == 0
            or place_size != place_size_before
            or rest_size != rest_size_before
            or not alike(data, place, place_before, place_size)
            or not alike(data, rest, rest_before, rest_size)
        ):
            runs += 1
        found[4, index] = runs - 1
    return runs


@jit.jit("void(const int64[:, ::1], int64[::1])")
def sum_up(found: Any, sums: Any) -> None:
    """Sum up the columns of ``found``: payload bytes, largest payload, latest time, two flags.

    They tell whether the times differ, and whether there is any request id.
    """
    total = largest = latest = varying = identified = np.int64(0)
    for index in range(found.shape[1]):
        size = found[3, index] - found[2, index]
        total += size
        largest = max(largest, size)
        latest = max(latest, found[1, index])
        varying |= found[1, index] ^ found[1, 0]
        identified |= found[0, index]
    sums[0] = total
    sums[1] = largest
    sums[2] = latest
    sums[3] = varying
    sums[4] = identified


@jit.jit("void(const uint8[::1], const int64[:, ::1], uint8[::1], int32[::1])")
def gather_payloads(data: Any, found: Any, joined: Any, offsets: Any) -> None:
    """Copy the payloads of the columns of ``found`` side by side; ``offsets`` gets where each ends."""
    target = np.int64(0)
    offsets[0] = 0
    for index in range(found.shape[1]):
        size = found[3, index] - found[2, index]
        jit.copy_bytes(joined, target, data, found[2, index], size)
        target += size
        offsets[index + 1] = target
