"""The mover's threads: deferrable work gets the processor time that publishing and reading leave.

Uploads yield to publishing: danube.core.partition.pace decides by figures of Linux, and the threads keep to
it.

One loop measures (``watch``). The threads of uploads call a function from ``rests`` between two pieces of
work; it blocks as long as the pace requires.  If Linux does not show how long a process waited
(/proc/PID/schedstat), no thread is held.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from danube.broker.processes import last_resort
from danube.core.partition.pace import Bounds, Pace, Scheduled
from danube.core.partition.pending import Pending
from danube.errors import DanubeError
from danube.host import clock
from danube.wal.stores.objects import Progress

NICENESS: Final = 5  # on a busy host such a thread gets a third of a normal thread's share


def yielding_pool(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of ``count`` nice threads; threads that they start (parts of an upload) are nice, too."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_yield)


def _yield() -> None:
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(niceness, NICENESS))  # never lower: that needs a privilege


def deliver(ended: Callable[[Any, DanubeError | None], None], future: asyncio.Future[Any]) -> None:
    """Pass on the result or DanubeError of a job; any other error is a bug and ends the process."""
    if future.cancelled():
        return
    error = future.exception()
    if error is None:
        ended(future.result(), None)
    elif isinstance(error, DanubeError):
        ended(None, error)
    else:
        last_resort.leave("a job of the mover failed", error)


def forget(result: Any, error: DanubeError | None) -> None:
    """Drop an outcome that came after the mover had ended."""


async def wait_for(met: Callable[[], bool], changed: asyncio.Event, limit_s: float) -> None:
    """Wait until ``met()``, called at each change, is true, or until the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not met():
                changed.clear()
                await changed.wait()


PROCESSES = Path("/proc")


def scheduled(pid: int) -> Scheduled | None:
    """Return the processor time of a process's first thread (a worker's loop); None if it is not known."""
    try:
        ran, waited, _ = (PROCESSES / str(pid) / "schedstat").read_text().split()
        return Scheduled(int(ran), int(waited))
    except (OSError, ValueError):
        return None


class UploadPace:
    """Pace of all uploads of the mover; ``running`` is the number of uploads under way."""

    def __init__(self, bounds: Bounds, parallel: int) -> None:
        self.running = 0
        self._pace = Pace(bounds, parallel)
        self._released = threading.Event()

    @property
    def share(self) -> float:
        """Return the share of their full speed that uploads may use."""
        return 1.0 if self._released.is_set() else self._pace.share

    @property
    def slots(self) -> int:
        """Return how many uploads may be under way at the same time."""
        return self._pace.slots

    def watch(self, pids: Iterable[int], waiting: Pending) -> float:
        """Measure the workers; return the new share.  Called several times a second during uploads.

        ``waiting``: the backlog.
        """
        found = {pid: one for pid in pids if (one := scheduled(pid)) is not None}
        self._pace.observe(found, clock.monotonic_ns())
        self._pace.exposed(waiting.age_s(clock.wall_us()), waiting.size_bytes)
        return self.share

    def rests(self) -> Progress:
        """Return the pause of one upload: call it after each piece of work, by one thread at a time."""
        since_ns = clock.monotonic_ns()

        def rest(_: int) -> None:
            nonlocal since_ns
            pause_ns = self._pace.pause_ns(clock.monotonic_ns() - since_ns, self.running)
            if pause_ns:
                self._released.wait(pause_ns / 1e9)
            since_ns = clock.monotonic_ns()

        return rest

    def release(self) -> None:
        """Stop pausing uploads: the mover ends, and uploads under way should complete."""
        self._released.set()
