"""The supervisor's view of the mover: its socket, its process, its pulse.

The supervisor keeps the listening socket open, so workers that connect while no mover runs are accepted
by the next one.  The mover is watched like a worker, but nothing waits for it: a broker whose mover
cannot run serves on, and its sealed segments stay on the local disk until one runs again.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable
from typing import Final

from danube import telemetry
from danube.broker import process
from danube.broker.contexts import DrainSignal, MoverContext, MoverMain, Pulse, SupervisorSettings
from danube.broker.restarts import STABLE_NS, restart_delay_ns

BACKLOG: Final = 256

_log = telemetry.events("broker.supervisor")


class MoverProcess:
    """At most one running mover; the methods are called by the supervisor's turns."""

    __slots__ = (
        "_deadline_ns",
        "_deaths",
        "_main",
        "_pulse",
        "_seen_beat_ns",
        "_seen_ns",
        "_settings",
        "_start_count",
        "_start_ns",
        "_started_ns",
        "address",
        "listener",
        "pid",
    )  # fmt: skip

    def __init__(self, settings: SupervisorSettings, main: MoverMain) -> None:
        self._settings = settings
        self._main = main
        self._start_count = 0
        self._deaths = 0
        self._start_ns = 0  # not before
        self._started_ns = 0
        self._seen_beat_ns = 0
        self._seen_ns = 0  # when the pulse last changed, by the supervisor's waking time
        self._deadline_ns = 0
        self.pid = 0
        self.address = ""
        self.listener: socket.socket
        self._pulse: Pulse

    def open(self) -> None:
        """Make the socket, on an abstract address that nobody can guess, and the shared pulse."""
        self.address = f"\0danube-mover-{secrets.token_hex(16)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(self.address)
        self.listener.listen(BACKLOG)
        self._pulse = Pulse()

    def leave(self) -> None:
        """In a worker: it has no part in the listening socket."""
        self.listener.close()

    def turn(self, now_ns: int, paused_ns: int, become_child: Callable[[], DrainSignal]) -> None:
        """Reap, start or check it, whatever is due."""
        self._reap(now_ns)
        if self.pid:
            self._check_pulse(now_ns, paused_ns)
        elif now_ns >= self._start_ns:
            self._start(now_ns, become_child)

    def _start(self, now_ns: int, become_child: Callable[[], DrainSignal]) -> None:
        self._pulse.reset()
        try:
            self.pid = process.fork_child(lambda: self._be_mover(become_child), "danube-mover")
        except OSError as error:
            self._deaths += 1
            self._start_ns = now_ns + restart_delay_ns(self._deaths)
            _log.error("mover cannot be started", why=str(error))
            return
        self._start_count += 1
        self._started_ns = self._seen_ns = now_ns
        self._seen_beat_ns = 0
        _log.info("mover started", pid=self.pid)

    def _be_mover(self, become_child: Callable[[], DrainSignal]) -> int | None:
        context = MoverContext(
            listener=self.listener,
            drain=become_child(),
            settings=self._settings,
            start_count=self._start_count,
            pulse=self._pulse,
        )
        return self._main(context)

    def _reap(self, now_ns: int) -> None:
        status = process.ended_status(self.pid) if self.pid else None
        if status is None:
            return
        pid, self.pid = self.pid, 0
        if self._deadline_ns:
            if status:
                _log.warning("mover did not drain", pid=pid, how=process.describe_status(status))
            return
        _log.error("mover ended", pid=pid, how=process.describe_status(status))
        stable = self._pulse.last_ns != 0 and now_ns - self._started_ns >= STABLE_NS
        self._deaths = 1 if stable else self._deaths + 1
        self._start_ns = now_ns + restart_delay_ns(self._deaths)

    def _check_pulse(self, now_ns: int, paused_ns: int) -> None:
        """Kill a mover that hangs.  Time in which the supervisor slept does not count."""
        beat_ns = self._pulse.last_ns
        if beat_ns != self._seen_beat_ns:
            self._seen_beat_ns = beat_ns
            self._seen_ns = now_ns
            return
        self._seen_ns += paused_ns
        limit_ms = self._settings.heartbeat_timeout_ms if beat_ns else self._settings.start_timeout_ms
        silent_ms = (now_ns - self._seen_ns) // 1_000_000
        if silent_ms > limit_ms:
            _log.error("mover gives no heartbeat and is killed", pid=self.pid, silent_ms=silent_ms)
            os.kill(self.pid, signal.SIGKILL)
            self._seen_ns = now_ns

    def stop(self, now_ns: int, *, at_once: bool) -> None:
        """SIGTERM once, SIGKILL at the deadline or ``at_once``; then until ``pid`` is 0."""
        first = not self._deadline_ns
        if first:
            self._deadline_ns = now_ns + self._settings.mover_drain_timeout_ms * 1_000_000
        self._reap(now_ns)
        if not self.pid:
            return
        if at_once or now_ns >= self._deadline_ns:
            os.kill(self.pid, signal.SIGKILL)
        elif first:
            os.kill(self.pid, signal.SIGTERM)

    def close(self) -> None:
        """It does not outlive the supervisor."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.listener.close()
        self._pulse.close()
