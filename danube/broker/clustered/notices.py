"""Notices of the controller that the host's copy of the metadata has more to read.

    worker --MESSAGE--> controller       I follow
    worker <--MESSAGE-- controller       read again; not sent again before this one was taken

A lost connection is made again, and then everything is read: nothing said on it matters.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, cast

from danube.cluster.links.frames import Kind, pack_frame
from danube.host import telemetry

RETRY_S: Final = 0.1
_FOLLOW: Final = pack_frame(Kind.MESSAGE)

_log = telemetry.events("worker")


class CommitNotices(asyncio.Protocol):
    """One worker's end; calls ``read`` on its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str, read: Callable[[], None]) -> None:
        self._loop = loop
        self._address = address
        self._read = read
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Connect, and again whenever the connection is lost."""
        if not self._stopped and self._connecting is None and self._transport is None:
            self._connecting = self._loop.create_task(self._connect())

    def stop(self) -> None:
        self._stopped = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _connect(self) -> None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            link.connect(self._address)  # at once or not at all
            await self._loop.create_unix_connection(lambda: self, sock=link)
        except OSError as error:
            link.close()
            _log.limited("the controller is not reached", source=self._address[1:], why=str(error))
            self._loop.call_later(RETRY_S, self.start)
        finally:
            self._connecting = None

    # -- asyncio's protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_FOLLOW)
        self._read()

    def data_received(self, data: bytes) -> None:
        self._read()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self._stopped:
            self._loop.call_later(RETRY_S, self.start)
