"""The outgoing connection to one peer: dials, dials again, and queues messages within bounds.

Beyond the bound the oldest message is dropped: an engine repeats important messages, and old heartbeats are
useless.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from danube.cluster.links.frames import Lane, Refused
from danube.cluster.links.link import Link
from danube.errors import ConnectionFailed
from danube.host import telemetry
from danube.limits import MIB

RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 1.0
_WAITING_BYTES_MAX: Final = {Lane.RAFT: 1 * MIB, Lane.BULK: 32 * MIB, Lane.CALLS: 32 * MIB}
_WAITING_FRAMES_MAX: Final = {Lane.RAFT: 256, Lane.BULK: 16, Lane.CALLS: 1_024}

_log = telemetry.events("cluster.transport")
_random = random.SystemRandom()


class OutgoingLane:
    """Frames of one lane to one node, in order while a connection lasts."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, node_id: str, lane: Lane, dial: Callable[[], Awaitable[Link]]
    ) -> None:
        self._loop = loop
        self._node_id = node_id
        self.lane = lane
        self._dial = dial
        self._link: Link | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = RETRY_FIRST_S
        self._opened_s = 0.0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._opened: list[asyncio.Future[Link]] = []
        self._ended = False
        self.dropped_count = 0

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.open

    def send(self, frame: bytes) -> None:
        """Write a frame, or keep it until there is a connection with room."""
        link = self._link
        if link is not None and link.room and not self._waiting:
            link.write(frame)
            return
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        while (
            self._waiting_bytes > _WAITING_BYTES_MAX[self.lane]
            or len(self._waiting) > _WAITING_FRAMES_MAX[self.lane]
        ):
            self._waiting_bytes -= len(self._waiting.popleft())
            self.dropped_count += 1
        self.connect()

    async def link(self) -> Link:
        """The connection, as soon as there is one; the caller sets the bound on waiting."""
        if self._link is not None and self._link.open:
            return self._link
        waiting: asyncio.Future[Link] = self._loop.create_future()
        self._opened.append(waiting)
        self.connect()
        try:
            return await waiting
        finally:
            if waiting in self._opened:
                self._opened.remove(waiting)

    def connect(self) -> None:
        """Dial now, unless that is under way or was tried a moment ago."""
        if self._link is None and self._dialling is None and self._retry is None and not self._ended:
            self._dialling = self._loop.create_task(self._connect())
            self._dialling.add_done_callback(_dialled)

    def renew(self) -> None:
        """Close open connections, because the node has another address now."""
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
        if self._link is not None:
            self._link.abort()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._retry_s = RETRY_FIRST_S
        self.connect()

    def resumed(self) -> None:
        """Send waiting messages: the link has room again."""
        link = self._link
        while self._waiting and link is not None and link.room:
            frame = self._waiting.popleft()
            self._waiting_bytes -= len(frame)
            link.write(frame)

    def lost(self, link: Link) -> None:
        """Dial again: a connection ended."""
        if link is self._link:
            self._link = None
            if self._loop.time() - self._opened_s > RETRY_MAX_S:
                self._retry_s = RETRY_FIRST_S  # else it may be refused just behind the greeting, each time
            self._retry_later()

    def close(self) -> None:
        self._ended = True
        if self._dialling is not None:
            self._dialling.cancel()
        if self._retry is not None:
            self._retry.cancel()
        if self._link is not None:
            self._link.abort()
        for waiting in self._opened:
            if not waiting.done():
                waiting.set_exception(ConnectionFailed(f"node {self._node_id} is no member any more"))
        self._waiting.clear()

    async def _connect(self) -> None:
        try:
            link = await self._dial()
        except (OSError, Refused, ConnectionFailed) as error:
            _log.lasting("node not reached", source=self._node_id, lane=self.lane.name, why=_why(error))
            self._dialling = None
            self._retry_later()
            return
        self._dialling = None
        if self._ended or not link.open:
            link.abort()
            self._retry_later()
            return
        self._link = link
        self._opened_s = self._loop.time()
        opened, self._opened = self._opened, []
        for waiting in opened:
            if not waiting.done():
                waiting.set_result(link)
        self.resumed()

    def _retry_later(self) -> None:
        """With jitter, so that nodes that lost each other do not meet in step."""
        if self._ended or self._retry is not None:
            return
        delay_s = self._retry_s * (0.5 + _random.random() / 2)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        self._retry = self._loop.call_later(delay_s, self._retry_due)

    def _retry_due(self) -> None:
        self._retry = None
        # Lanes that are not in use wait for the next frame; the engine's own is always kept.
        if self.lane is Lane.RAFT or self._waiting or self._opened:
            self.connect()


def _dialled(task: asyncio.Task[None]) -> None:
    """Re-raise unexpected errors on the loop; otherwise the lane would wait for ever."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


def _why(error: Exception) -> str:
    if isinstance(error, Refused):
        return f"{error.reason} {error.detail}".strip()
    return str(error) or type(error).__name__
