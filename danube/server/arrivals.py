"""Connections that another worker has passed to this one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Protocol

from danube.host import telemetry
from danube.ipc.passage import Passage, Passed

_log = telemetry.events("passage")
TAKEN_MAX = 64  # in one turn of the loop


class Door(Protocol):
    """A protocol's server that continues connections of other workers."""

    def arrived(self, unread: bytes, sent_bytes: int, told: bytes) -> asyncio.BaseProtocol:
        """The protocol of a connection of which these bytes were read and so many were sent."""


class PassedConnections:
    """Takes them from the passage and gives them to their doors."""

    def __init__(self, passage: Passage, doors: Mapping[str, Door]) -> None:
        self._passage = passage
        self._doors = doors
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._loop.add_reader(self._passage.fileno(), self._take)

    def stop(self) -> None:
        """Accept no more; waiting clients connect again when the broker's processes have ended."""
        self._loop.remove_reader(self._passage.fileno())

    def _take(self) -> None:
        for _ in range(TAKEN_MAX):
            passed = self._passage.receive()
            if passed is None:
                return
            if passed.raw is None:
                self._lost("no descriptor is left")
                continue
            task = self._loop.create_task(self._serve(passed.raw, passed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, raw: socket.socket, passed: Passed) -> None:
        door = self._doors[passed.door]
        try:
            await self._loop.connect_accepted_socket(
                lambda: door.arrived(passed.unread, passed.sent_bytes, passed.told), raw
            )
        except OSError as error:
            raw.close()
            self._lost(str(error))

    def _lost(self, why: str) -> None:
        _log.limited("a connection passed to this worker is lost", source="passage", why=why)
