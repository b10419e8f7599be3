"""gRPC over HTTP/2: length-prefixed messages, timeouts and status numbers.

position  size  field
       0     1  compressed  0; we announce identity alone, so 1 is refused
       1     4  length      of the message, big-endian
       5        message
"""

from __future__ import annotations

import re
import struct
from typing import Final

from danube.limits import MIB

PREFIX_BYTES: Final = 5
MESSAGE_BYTES_MAX: Final = 16 * MIB
TIMEOUT_NS_MAX: Final = (1 << 63) - 1
_PREFIX: Final = struct.Struct(">BI")
_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_NS_BY_UNIT: Final = {
    "H": 3_600_000_000_000,
    "M": 60_000_000_000,
    "S": 1_000_000_000,
    "m": 1_000_000,
    "u": 1_000,
    "n": 1,
}

STATUS_NUMBERS: Final = {
    name: number
    for number, name in enumerate(
        (
            "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
            "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
            "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
        )
    )
}  # fmt: skip


def frame_message(message: bytes) -> bytes:
    """``message`` with its prefix, as DATA carries it."""
    return _PREFIX.pack(0, len(message)) + message


def timeout_ns(value: str) -> int:
    """Nanoseconds of a ``grpc-timeout`` field; -1 when it is malformed."""
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        return -1
    return min(int(found[1]) * _NS_BY_UNIT[found[2]], TIMEOUT_NS_MAX)


class MessageAssembler:
    """The messages of one stream's DATA, however they are cut.

    ``take`` returns the messages that are complete now, as views into the given data where they lie
    whole in it and else as bytes.  ``status`` and ``problem`` say why the stream must be refused
    ("" while it is fine); after that nothing is taken.  At most ``message_bytes_max`` plus one DATA
    frame are held.
    """

    __slots__ = ("_held", "_wanted", "message_bytes_max", "messages_count", "problem", "status", "unary")

    def __init__(self, message_bytes_max: int = MESSAGE_BYTES_MAX, *, unary: bool = False) -> None:
        self.message_bytes_max = message_bytes_max
        self.unary = unary
        self.messages_count = 0
        self.status = ""
        self.problem = ""
        self._held: bytearray | None = None  # the start of a message that is not complete
        self._wanted = PREFIX_BYTES  # bytes that must be held before anything can be told

    @property
    def held_bytes(self) -> int:
        """Bytes of an incomplete message."""
        return len(self._held) if self._held is not None else 0

    def take(self, data: memoryview, ended: bool = False) -> list[memoryview | bytes]:
        messages: list[memoryview | bytes] = []
        if self.status:
            return messages
        start, end = 0, len(data)
        while self._held is not None and start < end and not self.status:
            start = self._continue(self._held, data, start, messages)
        while start < end and not self.status:
            if end - start < PREFIX_BYTES:
                self._hold(data[start:], PREFIX_BYTES)
                break
            compressed, size = _PREFIX.unpack_from(data, start)
            if not self._fair(compressed, size):
                break
            after = start + PREFIX_BYTES + size
            if after > end:
                self._hold(data[start:], PREFIX_BYTES + size)
                break
            self._complete(data[start + PREFIX_BYTES : after], messages)
            start = after
        if ended and not self.status:
            self._end()
        return messages

    def _continue(
        self, held: bytearray, data: memoryview, start: int, messages: list[memoryview | bytes]
    ) -> int:
        after = min(len(data), start + self._wanted - len(held))
        held += data[start:after]
        if len(held) < self._wanted:
            return after
        if len(held) == PREFIX_BYTES:
            compressed, size = _PREFIX.unpack(held)
            if not self._fair(compressed, size):
                return after
            self._wanted = PREFIX_BYTES + size
        if len(held) == self._wanted:
            self._held = None
            self._complete(bytes(memoryview(held)[PREFIX_BYTES:]), messages)
        return after

    def _hold(self, rest: memoryview, wanted: int) -> None:
        self._held = bytearray(rest)
        self._wanted = wanted

    def _complete(self, message: memoryview | bytes, messages: list[memoryview | bytes]) -> None:
        self.messages_count += 1
        if self.unary and self.messages_count > 1:
            self._refuse("UNIMPLEMENTED", "a call that takes one message got two")
            messages.clear()
            return
        messages.append(message)

    def _fair(self, compressed: int, size: int) -> bool:
        if compressed == 1:
            self._refuse(
                "UNIMPLEMENTED", "the message is compressed; only grpc-encoding identity is known here"
            )
        elif compressed:
            self._refuse("INTERNAL", f"the first byte of a message is {compressed}, not 0 or 1")
        elif size > self.message_bytes_max:
            self._refuse(
                "RESOURCE_EXHAUSTED", f"a message of {size} bytes, at most {self.message_bytes_max} are taken"
            )
        return not self.status

    def _end(self) -> None:
        if self._held is not None:
            self._refuse("INTERNAL", "the stream ended inside a message")
        elif self.unary and not self.messages_count:
            self._refuse("UNIMPLEMENTED", "a call that takes one message got none")

    def _refuse(self, status: str, problem: str) -> None:
        self.status, self.problem = status, problem
        self._held = None
