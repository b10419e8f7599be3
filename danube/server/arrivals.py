"""Connections that another worker has passed to this one."""

from __future__ import annotations

import asyncio
import socket

from danube import telemetry
from danube.ipc.passage import Passage
from danube.server.native import NativeServer

_log = telemetry.events("native")
TAKEN_MAX = 64  # in one turn of the loop


class Arrivals:
    """Takes them from the passage and gives them to the native door."""

    def __init__(self, passage: Passage, server: NativeServer) -> None:
        self._passage = passage
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._loop.add_reader(self._passage.fileno(), self._take)

    def stop(self) -> None:
        """Take no more: whoever waits still connects again when the broker's processes have ended."""
        self._loop.remove_reader(self._passage.fileno())

    def _take(self) -> None:
        for _ in range(TAKEN_MAX):
            arrived = self._passage.receive()
            if arrived is None:
                return
            raw, unread = arrived
            if raw is None:
                self._lost("no descriptor is left")
                continue
            task = self._loop.create_task(self._serve(raw, unread))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, raw: socket.socket, unread: bytes) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self._server.arrived(unread), raw)
        except OSError as error:
            raw.close()
            self._lost(str(error))

    def _lost(self, why: str) -> None:
        _log.limited("a connection passed to this worker is lost", source="passage", why=why)
