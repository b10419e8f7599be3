"""Runs a command's coroutine; Ctrl-C and SIGTERM cancel it, so that it closes its resources."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from danube.cli.terminal.failure import Terminated

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; KeyboardInterrupt or Terminated after its clean-up when a signal came."""
    terminated = False

    async def guarded() -> T:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def on_terminate() -> None:
            nonlocal terminated
            terminated = True
            if task is not None:
                task.cancel()

        in_main = threading.current_thread() is threading.main_thread()
        if in_main:
            loop.add_signal_handler(signal.SIGTERM, on_terminate)
        try:
            return await work
        finally:
            if in_main:
                loop.remove_signal_handler(signal.SIGTERM)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if terminated:
            raise Terminated from None
        raise
