"""Compiling kernels beside a broker that serves already, and handing them to its processes.

Where the disk has no kernels for this machine, workers begin with the twins.  One process, at a low
priority, compiles them for this start and later ones, and puts them into memory that all processes share.
Each process goes over to them between two turns of its loop.

The memory (a memfd) holds a size in 8 bytes and the kernels as danube.core.kernels.cache has them.  The size
is written last, so whoever reads it finds all of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

from danube.broker.processes import process
from danube.core import kernels
from danube.host import telemetry
from danube.host.clock import monotonic_ns

_SIZE_BYTES: Final = 8
# Twins keep busy workers busier.  At the lowest priority the compiler would get no time from them, so they
# would never get kernels; with this it has a quarter of a core that one of them wants all of.
_LOW_PRIORITY: Final = 5
_KEPT, _NOT_KEPT = 0, 3  # exit statuses of the process

_log = telemetry.events("broker.kernels")


class KernelCompiler:
    """At most one process that compiles; and, in every process, the way to what it compiled."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("danube-kernels", os.MFD_CLOEXEC)
        self._taken = False  # by this process
        self._began_ns = 0
        self.pid = 0

    def start(self, become_child: Callable[[], object]) -> None:
        """Begin, in the supervisor, when the workers have been started."""

        def run() -> int:
            become_child()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.nice(_LOW_PRIORITY)
            content, warning = kernels.compile_kept()
            self._publish(content)
            return _NOT_KEPT if warning else _KEPT

        self._began_ns = monotonic_ns()
        try:
            self.pid = process.fork_child(run, "danube-kernels")
        except OSError as error:
            _log.warning("running without compiled kernels", why=str(error))

    def _publish(self, content: bytes) -> None:
        position, rest = _SIZE_BYTES, memoryview(content)
        while rest:
            written = os.pwrite(self._memory, rest, position)
            position, rest = position + written, rest[written:]
        os.pwrite(self._memory, len(content).to_bytes(_SIZE_BYTES, "little"), 0)

    def turn(self) -> None:
        """In the supervisor: see to the process, and take the kernels, so that later workers have them."""
        status = process.ended_status(self.pid) if self.pid else None
        if status is None:
            return
        self.pid = 0
        if status not in (_KEPT, _NOT_KEPT):
            _log.warning("running without compiled kernels", why=process.describe_status(status))
            return
        _log.info("kernels are compiled", seconds=(monotonic_ns() - self._began_ns) // 1_000_000_000)
        self.take()
        if status == _NOT_KEPT:
            _log.warning(
                "kernels will be compiled again at the next start",
                why="no cache folder can be written; NUMBA_CACHE_DIR names one that can",
            )

    def take(self) -> None:
        """Go over to the kernels once they are there; between two turns of a loop, every second or so."""
        if self._taken or kernels.available:
            return
        size = int.from_bytes(os.pread(self._memory, _SIZE_BYTES, 0), "little")
        if not size:
            return
        self._taken = True
        try:
            kernels.install(os.pread(self._memory, size, _SIZE_BYTES))
            _log.info("kernels are used from now on")
        except Exception as error:  # the twins do the same work
            _log.warning("running without compiled kernels", why=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the process: what it has not finished is begun anew at the next start."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        os.close(self._memory)
