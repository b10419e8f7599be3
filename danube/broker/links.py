"""The protocol between workers and the processes beside them: frames over a Unix stream socket.

    position  size  field
           0     4  size of what follows, little-endian
           4        MessagePack map: "kind" and the fields of that kind

A worker is the client.  What it says is true until it says otherwise or its connection ends, and saying it
again changes nothing, so after a lost connection it says everything again.

    worker -> mover                                   mover -> worker
    attach   this worker owns the partition now       state    what of it is in the store, or why not
    detach   it no longer does ("gone": given away)   fetched  the answer to one fetch
    sealed   look at the directory: there may be more
    trim     records below start_offset have expired
    give_up  the holes that begin below end_offset are given up
    cursors  keep this copy of the subscriptions' progress ("soon": by request, do not wait)
    leave    another broker takes it: hurry            (state has its "left_id" when the cursors are kept)
    inherit  make its directory ready for a new owner  inherited  it is (or "error" and "code")
    delete   the topic is gone: remove its objects
    fetch    copy a range of an object into a file    (fetched has the error's "code", too)
    staged   may these objects take others' place?    judged   what became of each (or "error" and "code")
    metadata keep this snapshot of the metadata       store    whether the store answers, or why not

    worker -> metrics                                 metrics -> worker
    measured the answer, a Measured of core.measured  measure  what of your partitions is not off the host?

Fields that a side does not know are ignored, so both may gain some; a kind that it does not know is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from danube import limits
from danube.errors import ProtocolError

FRAME_BYTES_MAX: Final = 256 * limits.MIB  # a metadata snapshot, or the manifest of a million segments
PARTITIONS_PER_FRAME_MAX: Final = limits.PARTITIONS_MAX

_SIZE: Final = struct.Struct("<I")
_U32_END: Final = 1 << 32
_U63_END: Final = 1 << 63

Frame = dict[str, Any]

_PARTITION: Final[Mapping[str, type]] = {"topic_id": int, "partition": int}

# Fields that must be there, with their types; integers are not negative.
FIELDS_BY_KIND: Final[Mapping[str, Mapping[str, type]]] = {
    "attach": {**_PARTITION, "topic": str, "epoch": int, "directory": str, "log_start": int},
    "detach": _PARTITION,
    "sealed": _PARTITION,
    "trim": {**_PARTITION, "start_offset": int},
    "give_up": {**_PARTITION, "end_offset": int},
    "policy": {**_PARTITION, "compacts": bool, "tombstone_retention_ms": int},
    "cursors": {**_PARTITION, "blob": bytes},
    "leave": {**_PARTITION, "id": int, "blob": bytes, "end_offset": int},
    "inherit": {
        **_PARTITION, "id": int, "topic": str, "epoch": int, "directory": str, "broker_id": int,
        "owner_epoch": int, "reserved_end": int, "reserved_broker_id": int, "reserved_epoch": int,
        "closed": bool,
    },
    "inherited": {"id": int, "error": str},
    "delete": {"topic_id": int, "partitions": int},
    "fetch": {
        **_PARTITION, "id": int, "key": str, "start": int, "end": int, "path": str, "position": int,
    },
    "metadata": {"version": int, "blob": bytes},
    "state": {**_PARTITION, "epoch": int, "manifest": bytes, "loaded": bool, "error": str},
    "fetched": {"id": int, "error": str},
    "staged": {**_PARTITION, "id": int, "epoch": int, "objects": bytes},
    "judged": {"id": int, "answers": bytes, "error": str},
    "store": {"name": str, "answers": bool, "error": str},
    "measure": {"id": int, "topics_max": int},
    "measured": {"id": int, "worker": int, "answer": bytes},
}  # fmt: skip


def encode_frame(kind: str, **fields: Any) -> bytes:
    """One frame; ProtocolError when it is too large or a field of its kind is missing or no such value."""
    frame = {"kind": kind, **fields}
    _check(frame)
    body = msgspec.msgpack.encode(frame)
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame {kind!r} is too large", why=f"it has {len(body)} bytes")
    return _SIZE.pack(len(body)) + body


class FrameReader:
    """Frames out of a stream that arrives in any pieces; holds at most one unfinished frame."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """The frames that ``data`` completes.  Consume all of them before the next call.

        Raises ProtocolError for what no peer of ours sends; the connection is to be closed then.
        """
        pending = self._pending
        pending += data
        position = 0
        while len(pending) - position >= _SIZE.size:
            size = _SIZE.unpack_from(pending, position)[0]
            if size > FRAME_BYTES_MAX:
                raise ProtocolError("a frame is too large", why=f"it says {size} bytes")
            end = position + _SIZE.size + size
            if len(pending) < end:
                break
            yield _decode(bytes(memoryview(pending)[position + _SIZE.size : end]))
            position = end
        del pending[:position]


def _decode(body: bytes) -> Frame:
    try:
        frame = msgspec.msgpack.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError("a frame is no MessagePack", why=str(error)) from None
    if not isinstance(frame, dict):
        raise ProtocolError("a frame is no map")
    _check(frame)
    return frame


def _check(frame: Mapping[str, Any]) -> None:
    kind = frame.get("kind")
    fields = FIELDS_BY_KIND.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError("a frame has an unknown kind", why=repr(kind)[:80])
    for name, wanted in fields.items():
        value = frame.get(name)
        if type(value) is not wanted or (isinstance(value, int) and not 0 <= value < _end_of(name)):
            raise ProtocolError(f"a frame {kind!r} cannot be used", why=f"its {name} is wrong or missing")


def _end_of(name: str) -> int:
    if name == "partitions":
        return PARTITIONS_PER_FRAME_MAX + 1
    return _U32_END if name in ("partition", "epoch") else _U63_END
