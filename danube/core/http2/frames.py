"""HTTP/2 frames as bytes: numbers, the frame header and the frames that a server builds (RFC 9113, 4 and 6).

    position  size  field
           0     3  length     of the payload alone, big-endian
           3     1  kind       DATA .. CONTINUATION; others are ignored
           4     1  flags
           5     4  stream id  31 bits; the top bit is reserved and ignored

``FRAME_HEADER`` reads length and kind as one 32-bit word: ``word >> 8`` and ``word & 0xFF``.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER: Final = struct.Struct(">IBI")
FRAME_HEADER_BYTES: Final = 9
FRAME_BYTES_MIN: Final = 16_384  # the smallest limit that either side may have
FRAME_BYTES_MAX: Final = (1 << 24) - 1
WINDOW_BYTES_DEFAULT: Final = 65_535
WINDOW_BYTES_MAX: Final = (1 << 31) - 1
STREAM_ID_MASK: Final = 0x7FFF_FFFF

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9
KIND_NAMES: Final = (
    "DATA", "HEADERS", "PRIORITY", "RST_STREAM", "SETTINGS",
    "PUSH_PROMISE", "PING", "GOAWAY", "WINDOW_UPDATE", "CONTINUATION",
)  # fmt: skip

END_STREAM: Final = 0x01
ACK: Final = 0x01
END_HEADERS: Final = 0x04
PADDED: Final = 0x08
WITH_PRIORITY: Final = 0x20

_UINT32: Final = struct.Struct(">I")
_NUMBERED: Final = struct.Struct(">IBII")
_GOAWAY: Final = struct.Struct(">IBIII")
_GOAWAY_TEXT_BYTES_MAX: Final = 256


class ErrorCode(IntEnum):
    """Why a stream was reset or a connection ended (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame with its header."""
    return FRAME_HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def reset_frame(stream_id: int, code: int) -> bytes:
    return _NUMBERED.pack(4 << 8 | RST_STREAM, 0, stream_id, code)


def window_frame(stream_id: int, increment: int) -> bytes:
    """WINDOW_UPDATE by ``increment`` bytes; stream 0 is the connection."""
    return _NUMBERED.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id, increment)


def ping_frame(payload: bytes, *, answer: bool) -> bytes:
    return frame(PING, ACK if answer else 0, 0, payload)


def goaway_frame(last_stream_id: int, code: int, text: str) -> bytes:
    told = text.encode("utf-8", "replace")[:_GOAWAY_TEXT_BYTES_MAX]
    return _GOAWAY.pack((8 + len(told)) << 8 | GOAWAY, 0, 0, last_stream_id, code) + told


def uint32(view: memoryview | bytes) -> int:
    """The first four bytes as a big-endian number."""
    number: int = _UINT32.unpack_from(view)[0]
    return number


SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0)
