"""A kernel over received bytes of a gRPC port: takes many complete calls at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from danube.core.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER_BYTES,
    HEADERS,
    STREAM_ID_MASK,
)
from danube.core.kernels import jit

_MESSAGE_HEAD_BYTES = 5  # of gRPC: is it compressed, and its size


@jit.inline
def _big_endian(data: Any, position: Any) -> Any:
    return (
        np.int64(data[position]) << 24
        | np.int64(data[position + 1]) << 16
        | np.int64(data[position + 2]) << 8
        | np.int64(data[position + 3])
    )


@jit.inline
def alike(data: Any, one: Any, other: Any, size: Any) -> Any:
    """Whether ``size`` bytes of ``data`` are the same at two places."""
    different = 0
    for index in range(size):
        different |= data[one + index] ^ data[other + index]
    return different == 0


@jit.jit("void(const uint8[::1], int64, int64, int64[:, ::1], int64[::1])")
def scan_calls(data: Any, last_stream_id: Any, frame_bytes_max: Any, messages: Any, told: Any) -> None:
    """Take frames as long as each opens the next stream, all with one header block, or is a whole message.

    A whole message is DATA that ends a stream opened so far, with a higher id than the one before it,
    and holds one message that is not compressed.  Column i of ``messages`` gets its stream's id, its
    start and its end.  ``told`` gets where the frames end, how many streams are opened, start and end of
    their header block, the number of messages, the bytes of their frames and of the largest.
    """
    position = count = opened = block = block_size = total = largest = last_message = np.int64(0)
    while position + FRAME_HEADER_BYTES <= len(data) and count < messages.shape[1]:
        size = _big_endian(data, position) >> 8
        kind, flags = data[position + 3], data[position + 4]
        stream_id = _big_endian(data, position + 5)
        body = position + FRAME_HEADER_BYTES
        end = body + size
        if end > len(data) or size > frame_bytes_max:
            break
        if kind == HEADERS:
            if flags != END_HEADERS or stream_id != last_stream_id + 2 or stream_id > STREAM_ID_MASK:
                break
            if opened == 0:
                block, block_size = body, size
            elif size != block_size or not alike(data, body, block, size):
                break
            opened += 1
            last_stream_id = stream_id
        else:
            if kind != DATA or flags != END_STREAM or not last_message < stream_id <= last_stream_id:
                break
            if size < _MESSAGE_HEAD_BYTES or data[body] != 0:
                break
            if _big_endian(data, body + 1) != size - _MESSAGE_HEAD_BYTES:
                break
            messages[0, count] = last_message = stream_id
            messages[1, count] = body + _MESSAGE_HEAD_BYTES
            messages[2, count] = end
            count += 1
            total += size
            largest = max(largest, size)
        position = end
    told[0] = position
    told[1] = opened
    told[2] = block
    told[3] = block + block_size
    told[4] = count
    told[5] = total
    told[6] = largest
