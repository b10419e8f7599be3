"""The mover's threads: those whose work can wait go on with what publishing and reading leave over."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from danube.broker.processes import last_resort
from danube.errors import DanubeError

NICENESS: Final = 5  # a third of the share of a thread that has none, where processors are short


def yielding_pool(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of so many threads; threads that they start (parts of an upload) yield as they do."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_yield)


def _yield() -> None:
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(niceness, NICENESS))  # to go back is not allowed


def deliver(ended: Callable[[Any, DanubeError | None], None], future: asyncio.Future[Any]) -> None:
    """How a job ended: a DanubeError is an outcome, anything else is a bug and ends the process."""
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
    """Takes an outcome that came after the mover had ended."""


async def wait_for(met: Callable[[], bool], changed: asyncio.Event, limit_s: float) -> None:
    """Until ``met()``, which is asked at each change, or until the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not met():
                changed.clear()
                await changed.wait()
