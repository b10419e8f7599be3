"""Collects figures from all workers: one round at a time, for any number of waiting requests.

Workers connect to the Unix socket of the metrics process, which queries them on demand.  A worker that does
not answer in time, or is being replaced, is missing from the round.  A worker that reconnects within the
round is queried again.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

import msgspec

from danube.broker.links import Accepted, Frame
from danube.core.partition.pending import Measured
from danube.host import clock, telemetry

ROUND_MAX_S: Final = 3.0  # a scraper waits 10 s by default
FRESH_NS: Final = 1_000_000_000  # age below which a round's result is used again
LINKS_MAX: Final = 256

_log = telemetry.events("metrics")


class Gathering:
    """All methods run on the loop of the metrics process."""

    def __init__(self, worker_count: int, topics_max: int, *, round_max_s: float = ROUND_MAX_S) -> None:
        self.links: set[MeasuredLink] = set()
        self._worker_count = worker_count
        self._topics_max = topics_max
        self._round_max_s = round_max_s
        self._question = 0
        self._answers: dict[int, Measured] = {}
        self._complete = asyncio.Event()
        self._round: asyncio.Task[dict[int, Measured]] | None = None
        self._last: dict[int, Measured] = {}
        self._last_ns = -FRESH_NS

    async def answers(self) -> dict[int, Measured]:
        """Return each worker's answer by its number; a caller during a round gets that round's answers."""
        if clock.monotonic_ns() - self._last_ns < FRESH_NS:
            return self._last
        if self._round is None:
            self._question += 1
            self._answers = {}
            self._complete.clear()
            self._round = asyncio.create_task(self._wait())
            for link in list(self.links):
                link.ask(self._question, self._topics_max)
        return await asyncio.shield(self._round)

    async def _wait(self) -> dict[int, Measured]:
        try:
            async with asyncio.timeout(self._round_max_s):
                await self._complete.wait()
        except TimeoutError:
            missing = sorted(set(range(self._worker_count)) - set(self._answers))
            _log.limited("workers did not answer", source="round", missing=str(missing))
        finally:
            self._round = None
        self._last, self._last_ns = self._answers, clock.monotonic_ns()
        return self._last

    def connected(self, link: MeasuredLink) -> None:
        """Add a worker; if a round is under way, ask it at once."""
        self.links.add(link)
        if self._round is not None:
            link.ask(self._question, self._topics_max)

    def on_frame(self, frame: Frame) -> None:
        """``measured``; an answer to an older question is too late."""
        if frame["kind"] != "measured" or frame["id"] != self._question or self._round is None:
            return
        if frame["worker"] < self._worker_count:
            self._answers[frame["worker"]] = msgspec.msgpack.decode(frame["answer"], type=Measured)
            if len(self._answers) == self._worker_count:
                self._complete.set()


class MeasuredLink(Accepted):
    """One worker's connection."""

    def __init__(self, gathering: Gathering) -> None:
        super().__init__()
        self._gathering = gathering

    def room(self) -> bool:
        return len(self._gathering.links) < LINKS_MAX

    def on_made(self, peer: socket.socket) -> None:
        self._gathering.connected(self)

    def on_frame(self, frame: Frame) -> None:
        self._gathering.on_frame(frame)

    def connection_lost(self, error: Exception | None) -> None:
        self._gathering.links.discard(self)

    def ask(self, question: int, topics_max: int) -> None:
        self.send("measure", id=question, topics_max=topics_max)
