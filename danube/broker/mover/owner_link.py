"""The mover's end of one worker's connection: frames in, states and answers out, both bounded."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Final, Protocol

from danube.broker.links import Accepted, Frame
from danube.errors import DanubeError
from danube.host.local_socket import peer_of

if TYPE_CHECKING:
    from danube.broker.mover.partition import MovedPartition

FETCHES_MAX: Final = 256  # open fetches of one worker; at this number its connection is not read


class Mover(Protocol):
    """Members of the mover that OwnerLink uses."""

    def connected(self, link: OwnerLink) -> None: ...
    def disconnected(self, link: OwnerLink) -> None: ...
    def on_frame(self, link: OwnerLink, frame: Frame) -> None: ...


class OwnerLink(Accepted):
    """Connection of one worker.

    States are not queued: a changed partition is noted once, and its state is read when it can be sent.
    """

    def __init__(self, mover: Mover) -> None:
        super().__init__()
        self._mover = mover
        self._changed: dict[MovedPartition, None] = {}
        self._room = True
        self._fetches = 0
        self.closed = False
        self.pid = 0  # of the worker

    def on_made(self, peer: socket.socket) -> None:
        self.pid = peer_of(peer)[0]
        self._mover.connected(self)

    def on_frame(self, frame: Frame) -> None:
        self._mover.on_frame(self, frame)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._changed.clear()
        self._mover.disconnected(self)

    def pause_writing(self) -> None:
        self._room = False

    def resume_writing(self) -> None:
        self._room = True
        self._send_states()

    def changed(self, partition: MovedPartition) -> None:
        """Send the partition's state to the owner when there is room; it is read only then."""
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
            super().send(kind, **fields)

    def fetch_began(self) -> None:
        self._fetches += 1
        if self._fetches == FETCHES_MAX:
            self._transport.pause_reading()

    def fetch_ended(self, fetch_id: int, error: DanubeError | None) -> None:
        if self._fetches == FETCHES_MAX and not self.closed:
            self._transport.resume_reading()
        self._fetches -= 1
        self.send("fetched", id=fetch_id, **told(error))

    def close(self) -> None:
        self.closed = True
        super().close()


def told(error: DanubeError | None) -> dict[str, Any]:
    """Return the outcome of a request as fields of its answer."""
    return {"error": ""} if error is None else {"error": str(error), "code": error.code}
