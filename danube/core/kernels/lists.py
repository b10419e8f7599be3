"""Kernels over a Python list of ``bytes``, read where the interpreter keeps them (:mod:`objects`).

Objects are given as their ``id``.  These kernels keep the GIL, so no other thread changes a list while one
of them reads it; between two of them it may, so each looks at every element again.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from danube.core.kernels import MALFORMED, WELL_FORMED, jit
from danube.core.kernels.crc import START, advanced, finished
from danube.core.kernels.objects import CONTENT, ITEMS, SIZE, TYPE
from danube.core.kernels.streaming import LINE, stream_at
from danube.limits import RECORD_BYTES_MAX

_NEAR: Final = 12 * 1024  # whole blocks of the checksum, and half of a processor's nearest cache
NEAR_BYTES: Final = _NEAR + LINE
_DIRECT: Final = 8 * 1024  # from here on a payload is read where it is


@jit.jit("int64(intp, intp, int64, int64, int64, int32[::1])", gil=True)
def measure(payloads: Any, bytes_type: Any, start: Any, overhead: Any, bytes_max: Any, offsets: Any) -> Any:
    """Offsets of the payloads from ``start`` on: of as many as have room and fit, but of one at least.

    They fit while they have at most ``bytes_max`` together, with ``overhead`` for each.  Returns how many
    they are, or MALFORMED where one of them is not ``bytes`` or larger than any record.
    """
    items = jit.load_at(payloads + ITEMS) + 8 * start
    end = np.int64(0)
    offsets[0] = 0
    for index in range(min(jit.load_at(payloads + SIZE) - start, len(offsets) - 1)):
        item = jit.load_at(items + 8 * index)
        size = jit.load_at(item + SIZE)
        if jit.load_at(item + TYPE) != bytes_type or size > RECORD_BYTES_MAX:
            return MALFORMED
        if index and end + size + overhead * (index + 1) > bytes_max:
            return index
        end += size
        offsets[index + 1] = end
    return min(jit.load_at(payloads + SIZE) - start, len(offsets) - 1)


@jit.jit("int64(intp, intp, intp, intp, int64, const int32[::1], intp)", gil=True)
def fill(
    target: Any, before: Any, payloads: Any, bytes_type: Any, start: Any, offsets: Any, after: Any
) -> Any:
    """Write ``before``, the payloads that were measured and ``after`` to the address ``target``.

    Returns WELL_FORMED, or MALFORMED where the list has changed since.
    """
    size = jit.load_at(before + SIZE)
    position = target
    jit.copy_at(position, before + CONTENT, size)
    position += size
    count = len(offsets) - 1
    if jit.load_at(payloads + SIZE) < start + count:
        return MALFORMED
    items = jit.load_at(payloads + ITEMS) + 8 * start
    for index in range(count):
        item = jit.load_at(items + 8 * index)
        size = offsets[index + 1] - offsets[index]
        if jit.load_at(item + TYPE) != bytes_type or jit.load_at(item + SIZE) != size:
            return MALFORMED
        jit.copy_at(position, item + CONTENT, size)
        position += size
    jit.copy_at(position, after + CONTENT, jit.load_at(after + SIZE))
    return WELL_FORMED


@jit.inline
def _room(target: Any) -> Any:
    """How much is stored at ``target`` at once, so that the next begins with a whole line."""
    return _NEAR + (-target & (LINE - 1))


@jit.inline
def _put_past(target: Any, source: Any, size: Any, checksum: Any) -> Any:
    """Store past the caches and check what was stored while it is near; the checksum afterwards."""
    done = np.int64(0)
    while done < size:
        step = min(size - done, _room(target + done))
        stream_at(target + done, source + done, step)
        checksum = advanced(checksum, source + done, step)
        done += step
    return checksum


@jit.jit("int64(intp, intp, intp, intp, int64, const int32[::1], intp, uint8[::1])", gil=True)
def fill_past(
    target: Any, before: Any, payloads: Any, bytes_type: Any, start: Any, offsets: Any, after: Any, near: Any
) -> Any:
    """fill() past the caches, by way of ``near``, which has NEAR_BYTES, where payloads are small.

    Returns the CRC32C of all that was written, or MALFORMED.  Who is told of it afterwards sees it.
    """
    count = len(offsets) - 1
    if jit.load_at(payloads + SIZE) < start + count:
        return MALFORMED
    items = jit.load_at(payloads + ITEMS) + 8 * start
    checksum, used, room = START, np.int64(0), _room(target)
    for index in range(-1, count + 1):
        item = before if index < 0 else after if index == count else jit.load_at(items + 8 * index)
        size = jit.load_at(item + SIZE)
        if 0 <= index < count and (
            jit.load_at(item + TYPE) != bytes_type or size != offsets[index + 1] - offsets[index]
        ):
            return MALFORMED
        source = item + CONTENT
        if size >= _DIRECT:
            checksum = _put_past(target, near.ctypes.data, used, checksum)
            checksum = _put_past(target + used, source, size, checksum)
            target += used + size
            used, room = np.int64(0), _room(target)
        elif used + size < room:
            jit.copy_at(near.ctypes.data + used, source, size)
            used += size
        else:
            first = room - used
            jit.copy_at(near.ctypes.data + used, source, first)
            checksum = _put_past(target, near.ctypes.data, room, checksum)
            target += room
            used, room = size - first, np.int64(_NEAR)
            jit.copy_at(near.ctypes.data, source + first, used)
    checksum = _put_past(target, near.ctypes.data, used, checksum)
    jit.fence()
    return np.int64(finished(checksum))
