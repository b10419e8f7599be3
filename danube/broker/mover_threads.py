"""Threads whose work can wait: uploads and merges go on with what publishing and reading leave over."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

NICENESS: Final = 5  # a third of the share of a thread that has none, where processors are short


def yielding_pool(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of so many threads; threads that they start (parts of an upload) yield as they do."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_yield)


def _yield() -> None:
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(niceness, NICENESS))  # to go back is not allowed
