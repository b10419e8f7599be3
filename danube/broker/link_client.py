"""A worker's connection to a process beside it: frames out, frames in, and a new one when it is lost.

Nothing here is remembered for a later connection: ``on_connected`` is called for each one, and whoever
uses it says everything again.  While there is no connection what is sent is dropped for the same reason.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, cast

from danube.broker.links import Frame, FrameReader, encode_frame
from danube.errors import ProtocolError
from danube.host import telemetry
from danube.limits import MIB

RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 2.0
WAITING_BYTES_MAX: Final = 64 * MIB  # unsent bytes above which nothing large is added

_log = telemetry.events("link")


class LinkClient(asyncio.Protocol):
    """One worker's end; all methods run on its loop.  ``address`` is that of the Unix socket of ``peer``."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peer: str,
        address: str,
        on_connected: Callable[[], None],
        on_frame: Callable[[Frame], None],
    ) -> None:
        self._loop = loop
        self._peer = peer
        self._address = address
        self._on_connected = on_connected
        self._on_frame = on_frame
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._retry_s = RETRY_FIRST_S
        self._stopped = False
        self._connecting: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._transport is not None

    @property
    def crowded(self) -> bool:
        """The peer does not read as fast as it is written to: leave out what is said again anyway."""
        transport = self._transport
        return transport is None or transport.get_write_buffer_size() > WAITING_BYTES_MAX

    def start(self) -> None:
        """Connect, and again whenever the connection is lost."""
        if not self._stopped and self._connecting is None and self._transport is None:
            self._connecting = self._loop.create_task(self._connect())

    def stop(self) -> None:
        """Close for good; what was written still leaves."""
        self._stopped = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.close()

    def send(self, kind: str, **fields: Any) -> None:
        """Queue one frame; dropped without a connection."""
        if self._transport is not None:
            self._transport.write(encode_frame(kind, **fields))

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
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    # -- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast(asyncio.Transport, transport)  # the loop's own class need not be one
        self._reader = FrameReader()
        if self._stopped:
            made.close()
        else:
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

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self._stopped:
            _log.info(f"connection to the {self._peer} lost", why=str(error or ""))
        self._retry_later()
