"""The mover's end of one worker's connection: frames in, states and answers out, both bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from danube.broker.links import Frame, FrameReader, encode_frame
from danube.errors import DanubeError
from danube.host import telemetry
from danube.host.unix_peer import peer_of, same_user

if TYPE_CHECKING:
    from danube.broker.mover.partition import MovedPartition

FETCHES_MAX: Final = 256  # of one worker, waiting or under way; then its connection is not read

_log = telemetry.events("mover")


class Mover(Protocol):
    def connected(self, link: OwnerLink) -> None: ...
    def disconnected(self, link: OwnerLink) -> None: ...
    def on_frame(self, link: OwnerLink, frame: Frame) -> None: ...


class OwnerLink(asyncio.Protocol):
    """States are not queued: a partition that changed is noted once and read when there is room to send."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._reader = FrameReader()
        self._transport: asyncio.Transport
        self._changed: dict[MovedPartition, None] = {}
        self._room = True
        self._fetches = 0
        self.closed = False
        self.pid = 0  # of the worker

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("socket")
        self.pid = peer_of(peer)[0]
        if not same_user(peer):
            _log.warning("a connection of another user is refused")
            self._transport.abort()
            return
        self._mover.connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._changed.clear()
        self._mover.disconnected(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._mover.on_frame(self, frame)
        except DanubeError as error:
            _log.error("a worker's connection is closed", why=str(error))
            self._transport.abort()

    def pause_writing(self) -> None:
        self._room = False

    def resume_writing(self) -> None:
        self._room = True
        self._send_states()

    def changed(self, partition: MovedPartition) -> None:
        """Tell the owner the partition's state as it is when there is room."""
        if not self.closed:
            self._changed[partition] = None
            self._send_states()

    def _send_states(self) -> None:
        while self._changed and self._room and not self.closed:
            partition = next(iter(self._changed))
            del self._changed[partition]
            self.send("state", **partition.state())

    def send(self, kind: str, **fields: Any) -> None:
        if not self.closed:
            self._transport.write(encode_frame(kind, **fields))

    def fetch_began(self) -> None:
        self._fetches += 1
        if self._fetches == FETCHES_MAX:
            self._transport.pause_reading()

    def fetch_ended(self, fetch_id: int, error: DanubeError | None) -> None:
        if self._fetches == FETCHES_MAX and not self.closed:
            self._transport.resume_reading()
        self._fetches -= 1
        if error is None:
            self.send("fetched", id=fetch_id, error="")
        else:
            self.send("fetched", id=fetch_id, error=str(error), code=error.code)

    def close(self) -> None:
        self.closed = True
        self._transport.close()


def link_factory(mover: Mover) -> Callable[[], OwnerLink]:
    return lambda: OwnerLink(mover)
