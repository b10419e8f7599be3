"""The bytes between members of a cluster: a greeting each way, then frames.

A greeting has a bounded size:

    position  size  field
           0     4  magic     b"DNR1"; the digit is the version of this layout
           4     2  size      of what follows, little-endian; GREETING_BYTES_MAX at most
           6        Greeting  as MessagePack

A frame comes only after both greetings were accepted:

           0     4  size      of what follows the 16 bytes; the lane's bound at most
           4     1  kind
           5     3  0
           8     8  number    of a request, repeated by its answer; else 0
          16        body
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from danube.errors import ProtocolError
from danube.limits import KIB, MIB

MAGIC: Final = b"DNR1"
VERSION: Final = 1
GREETING_BYTES_MAX: Final = 1 * KIB
SMALL_MESSAGE_BYTES_MAX: Final = 64 * KIB
GUEST_FRAME_BYTES_MAX: Final = 16 * KIB

# Errors that decoding a peer's bytes may raise.  Invalid UTF-8 and deep nesting have their own classes, and
# an uncaught one would end the whole process.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_GREETING_HEAD: Final = struct.Struct("<4sH")
_FRAME_HEAD: Final = struct.Struct("<IB3xQ")


class Lane(IntEnum):
    """Traffic of a connection.  Each kind has its own connection, so nothing large delays a heartbeat."""

    RAFT = 1  # messages of the engine, small ones
    BULK = 2  # messages of the engine, large ones
    CALLS = 3  # requests of members to each other
    GUEST = 4  # requests of nodes that are not members, or not yet

    @property
    def frame_bytes_max(self) -> int:
        return _FRAME_BYTES_MAX[self]


_FRAME_BYTES_MAX: Final = {
    Lane.RAFT: SMALL_MESSAGE_BYTES_MAX,
    Lane.BULK: 24 * MIB,
    Lane.CALLS: 24 * MIB,
    Lane.GUEST: GUEST_FRAME_BYTES_MAX,
}


class Kind(IntEnum):
    MESSAGE = 1
    PING = 2
    PONG = 3
    REQUEST = 4
    ANSWER = 5


class Greeting(msgspec.Struct, frozen=True):
    """Identity of the sender, its cluster, and the wanted node; a refusal states ``refused`` instead."""

    cluster: str = ""  # its name, as configured
    cluster_id: str = ""  # "" while the node belongs to none
    node_id: str = ""
    address: str = ""  # host:port where others reach this node
    lane: int = 0
    wanted: str = ""  # node id that the dialling side expects; "" for any
    refused: str = ""
    version: int = VERSION


class Frame(NamedTuple):
    kind: Kind
    number: int
    body: bytes


class Refused(Exception):
    """A greeting that is not accepted; the reason is one word of a fixed list, for counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Greeting)


def pack_greeting(greeting: Greeting) -> bytes:
    body = _encoder.encode(greeting)
    if len(body) > GREETING_BYTES_MAX:
        raise ProtocolError("a greeting is too large", why=f"it has {len(body)} bytes")
    return _GREETING_HEAD.pack(MAGIC, len(body)) + body


class GreetingReader:
    """Reads the greeting from the first bytes of a connection; keeps the bytes behind it."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Greeting | None:
        """The greeting once it is whole; raises Refused as early as the bytes cannot be one."""
        pending = self._pending
        pending += data
        if pending[: len(MAGIC)] != MAGIC[: len(pending)]:
            raise Refused("garbage", "no greeting")
        if len(pending) < _GREETING_HEAD.size:
            return None
        _, size = _GREETING_HEAD.unpack_from(pending)
        if size > GREETING_BYTES_MAX:
            raise Refused("oversized", f"a greeting of {size} bytes")
        end = _GREETING_HEAD.size + size
        if len(pending) < end:
            return None
        try:
            greeting = _decoder.decode(memoryview(pending)[_GREETING_HEAD.size : end])
        except UNREADABLE as error:
            raise Refused("garbage", str(error)) from None
        self._pending = pending[end:]
        return greeting

    @property
    def rest(self) -> bytes:
        """Return the bytes behind the greeting."""
        return bytes(self._pending)


def pack_frame(kind: Kind, body: bytes = b"", number: int = 0) -> bytes:
    return _FRAME_HEAD.pack(len(body), kind, number) + body


class FrameReader:
    """Frames out of a stream that arrives in any pieces; holds at most one unfinished frame."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Return the frames that ``data`` completes; raises ProtocolError for bytes that no member sends."""
        pending = self._pending
        pending += data
        start = 0
        try:
            while len(pending) - start >= _FRAME_HEAD.size:
                size, kind, number = _FRAME_HEAD.unpack_from(pending, start)
                if size > self._bytes_max:
                    raise ProtocolError("a frame is too large", why=f"it says {size} bytes")
                end = start + _FRAME_HEAD.size + size
                if len(pending) < end:
                    break
                body = bytes(memoryview(pending)[start + _FRAME_HEAD.size : end])
                start = end
                yield Frame(_kind(kind), number, body)
        finally:
            del pending[:start]


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise ProtocolError("a frame has an unknown kind", why=str(number)) from None
