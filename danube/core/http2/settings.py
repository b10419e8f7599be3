"""Both sides' HTTP/2 settings: what we announce and bound, what the peer announced (RFC 9113, 6.5)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from danube.core.http2.frames import (
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    SETTINGS,
    WINDOW_BYTES_DEFAULT,
    WINDOW_BYTES_MAX,
    ErrorCode,
    frame,
)
from danube.errors import InvalidArgument
from danube.limits import KIB, MIB

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
    """What a server connection announces and bounds; sizes in bytes, times in nanoseconds."""

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
