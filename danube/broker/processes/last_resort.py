"""End of a worker that found a bug: it writes the facts and exits with status 70.

asyncio and uvloop hand an exception from a callback to the loop's handler and run on, a thread's
exception ends the thread, a task merely stores it.  Each of these ways leads here instead; the
supervisor starts the worker again from disk.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any, NoReturn

from danube.host import telemetry

_log = telemetry.events("worker")
EXIT_BROKEN = 70


def leave(what: str, error: BaseException | None) -> NoReturn:
    """Write the facts and end this process at once."""
    if error is None:
        _log.error(what)
    else:
        _log.failure(what, error)
    sys.stderr.flush()
    os._exit(EXIT_BROKEN)


def install(loop: asyncio.AbstractEventLoop) -> None:
    """Make every uncaught exception of this process end it."""

    def on_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError):  # a peer's socket: the connection ends, the worker goes on
            _log.debug("connection failed", error=str(error))
            return
        leave(str(context.get("message", "uncaught exception")), error)

    def on_thread(arguments: threading.ExceptHookArgs) -> None:
        leave("uncaught exception in a thread", arguments.exc_value)

    loop.set_exception_handler(on_loop)
    threading.excepthook = on_thread
