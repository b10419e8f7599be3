"""The protocol between workers and the processes beside them: frames over a Unix stream socket.

    position  size  field
           0     4  size of the rest, little-endian
           4        MessagePack map: "kind" and the fields of that kind

A worker is the client.  A statement is valid until the worker changes it or its connection ends.  Repeating a
statement changes nothing, so after a lost connection the worker repeats all.

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

:class:`LinkClient` is a worker's connection to such a process, made anew when it is lost.

No frame is kept for a later connection: ``on_connected`` is called for each connection, and the user sends
all statements again.  For the same reason frames are dropped while there is no connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import msgspec

from danube import limits
from danube.errors import DanubeError, ProtocolError
from danube.host import telemetry
from danube.host.local_socket import same_user
from danube.limits import MIB

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
    """Encode one frame; ProtocolError if it is too large, or a field of its kind is missing or wrong."""
    frame = {"kind": kind, **fields}
    _check(frame)
    body = msgspec.msgpack.encode(frame)
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame {kind!r} is too large", why=f"it has {len(body)} bytes")
    return _SIZE.pack(len(body)) + body


class FrameReader:
    """Frames out of a stream that arrives in any pieces; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """The frames that ``data`` completes.  Consume all of them before the next call.

        Raises ProtocolError for bytes that no peer of ours sends; the connection must then be closed.
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


RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 2.0
WAITING_BYTES_MAX: Final = 64 * MIB  # unsent bytes above which nothing large is added

_log = telemetry.events("link")


class Dialled(asyncio.Protocol):
    """A connection to the Unix socket of ``peer``, made again whenever it is lost; for one event loop."""

    retry_max_s = RETRY_MAX_S

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: str, address: str) -> None:
        self._loop = loop
        self._peer = peer
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._retry_s = RETRY_FIRST_S
        self._stopped = False
        self._connecting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect, and again whenever the connection is lost."""
        if not self._stopped and self._connecting is None and self._transport is None:
            self._connecting = self._loop.create_task(self._connect())

    def stop(self) -> None:
        """Close for good; written frames are still sent."""
        self._stopped = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.close()

    async def _connect(self) -> None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            link.connect(self._address)  # at once or not at all
            await self._loop.create_unix_connection(lambda: self, sock=link)
        except OSError as error:
            link.close()
            _log.debug(f"{self._peer} not reached", why=str(error))
            self._retry_later()
        finally:
            self._connecting = None

    def _retry_later(self) -> None:
        if not self._stopped:
            self._loop.call_later(self._retry_s, self.start)
            self._retry_s = min(2 * self._retry_s, self.retry_max_s)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast(asyncio.Transport, transport)  # the loop's own class need not be one
        if self._stopped:
            made.close()
        else:
            self.on_made(made)

    def on_made(self, transport: asyncio.Transport) -> None:
        """Handle a new connection, whose peer knows nothing of earlier ones."""

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self._stopped:
            _log.info(f"connection to the {self._peer} lost", why=str(error or ""))
        self._retry_later()


class LinkClient(Dialled):
    """One worker's end of a connection to a process beside it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peer: str,
        address: str,
        on_connected: Callable[[], None],
        on_frame: Callable[[Frame], None],
    ) -> None:
        super().__init__(loop, peer, address)
        self._on_connected = on_connected
        self._on_frame = on_frame
        self._reader = FrameReader()

    @property
    def connected(self) -> bool:
        return self._transport is not None

    @property
    def crowded(self) -> bool:
        """Return whether the peer reads too slowly; then leave out statements that are repeated anyway."""
        transport = self._transport
        return transport is None or transport.get_write_buffer_size() > WAITING_BYTES_MAX

    def send(self, kind: str, **fields: Any) -> None:
        """Queue one frame; dropped without a connection."""
        if self._transport is not None:
            self._transport.write(encode_frame(kind, **fields))

    def on_made(self, transport: asyncio.Transport) -> None:
        self._reader = FrameReader()
        self._on_connected()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._retry_s = RETRY_FIRST_S
                self._on_frame(frame)
        except ProtocolError as error:
            _log.error(f"the {self._peer} sent what cannot be", error=str(error))
            if self._transport is not None:
                self._transport.close()


class Accepted(asyncio.Protocol):
    """A worker's connection at a process beside it; one of another user is refused."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("socket")
        if same_user(peer) and self.room():
            self.on_made(peer)
        else:
            _log.warning("a connection that no worker makes is refused")
            self._transport.abort()

    def room(self) -> bool:
        """Return whether another connection may be accepted."""
        return True

    def on_made(self, peer: socket.socket) -> None: ...
    def on_frame(self, frame: Frame) -> None: ...

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self.on_frame(frame)
        except (DanubeError, msgspec.MsgspecError) as error:
            _log.error("a worker's connection is closed", why=str(error))
            self._transport.abort()

    def send(self, kind: str, **fields: Any) -> None:
        self._transport.write(encode_frame(kind, **fields))

    def close(self) -> None:
        self._transport.close()
