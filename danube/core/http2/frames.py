"""HTTP/2 frames as bytes: numbers, the frame header and the frames that a server builds (RFC 9113, 4 and 6).

    position  size  field
           0     3  length     of the payload alone, big-endian
           3     1  kind       DATA .. CONTINUATION; others are ignored
           4     1  flags
           5     4  stream id  31 bits; the top bit is reserved and ignored

``FRAME_HEADER`` reads length and kind as one 32-bit word: ``word >> 8`` and ``word & 0xFF``.

Both sides' HTTP/2 settings: what we announce and bound, what the peer announced (RFC 9113, 6.5).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from danube.errors import InvalidArgument
from danube.limits import KIB, MIB

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

UINT32: Final = struct.Struct(">I")
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
    number: int = UINT32.unpack_from(view)[0]
    return number


SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0)


HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6
SETTING_BYTES: Final = 6
TABLE_BYTES_DEFAULT: Final = 4_096
_SETTING: Final = struct.Struct(">HI")
_SECOND: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Http2Settings:
    """Settings and bounds of a server connection; sizes in bytes, times in nanoseconds."""

    max_concurrent_streams: int = 1_024
    initial_window_bytes: int = 1 * MIB  # of each stream, 65,535 or more
    connection_window_bytes: int = 16 * MIB  # 65,535 or more
    max_frame_bytes: int = FRAME_BYTES_MIN
    header_list_bytes_max: int = 16 * KIB  # name + value + 32 of each field, as RFC 9113 counts
    header_fields_max: int = 128
    header_table_bytes: int = TABLE_BYTES_DEFAULT  # 4,096 or more
    continuation_frames_max: int = 16  # of one header block
    queued_bytes_per_stream_max: int = 16 * MIB  # held back by the peer's windows; more resets the stream
    queued_bytes_max: int = 64 * MIB  # of all streams together
    keepalive_ns: int = 30 * _SECOND  # silence after which a PING asks; 0: never
    keepalive_timeout_ns: int = 20 * _SECOND
    handshake_timeout_ns: int = 10 * _SECOND  # preface, acknowledged settings, a whole header block
    frame_timeout_ns: int = 30 * _SECOND  # from the first byte of a frame to its last

    def __post_init__(self) -> None:
        bounds = (
            ("initial_window_bytes", WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MAX),
            ("connection_window_bytes", WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MAX),
            ("max_frame_bytes", FRAME_BYTES_MIN, FRAME_BYTES_MAX),
            ("header_table_bytes", TABLE_BYTES_DEFAULT, 64 * KIB),
        )
        for name, low, high in bounds:
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(f"{name} is {value}", why=f"HTTP/2 wants {low} to {high}")

    def greeting(self) -> bytes:
        """The SETTINGS frame that a server starts with."""
        announced = (
            (HEADER_TABLE_SIZE, self.header_table_bytes),
            (MAX_CONCURRENT_STREAMS, self.max_concurrent_streams),
            (INITIAL_WINDOW_SIZE, self.initial_window_bytes),
            (MAX_FRAME_SIZE, self.max_frame_bytes),
            (MAX_HEADER_LIST_SIZE, self.header_list_bytes_max),
        )
        return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in announced))


def settings_in(payload: memoryview) -> Iterator[tuple[int, int]]:
    """(identifier, value) of a SETTINGS payload, whose size is a multiple of ``SETTING_BYTES``."""
    return iter(_SETTING.iter_unpack(payload))


def setting_problem(identifier: int, value: int) -> tuple[ErrorCode, str] | None:
    """The connection error that a value outside its range is, or None; unknown identifiers are fine."""
    if identifier == ENABLE_PUSH and value > 1:
        return ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}, not 0 or 1"
    if identifier == INITIAL_WINDOW_SIZE and value > WINDOW_BYTES_MAX:
        return ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE is {value}, more than 2^31-1"
    if identifier == MAX_FRAME_SIZE and not FRAME_BYTES_MIN <= value <= FRAME_BYTES_MAX:
        return ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {value}, not 2^14 to 2^24-1"
    return None
