"""The supervisor's view of a process beside the workers (mover, metrics): its socket, its pulse, its life.

The supervisor keeps the listening socket open, so workers that connect while the process does not run are
accepted by the next one.  It is watched like a worker, but nothing waits for it: a broker whose mover or
metrics cannot run serves on.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable
from typing import Any, Final

from danube.broker.processes import process
from danube.broker.processes.contexts import DrainSignal, Pulse, SupervisorSettings
from danube.broker.processes.process import STABLE_NS, restart_delay_ns
from danube.host import telemetry

BACKLOG: Final = 256

SideMain = Callable[[DrainSignal, "SideProcess"], int | None]

_log = telemetry.events("broker.supervisor")


class SideProcess:
    """At most one running process ``name``; the methods are called by the supervisor's turns.

    ``door`` is a socket besides its own that it alone serves; ``drain_timeout_ms`` is its time to end in.
    """

    def __init__(
        self,
        name: str,
        settings: SupervisorSettings,
        main: SideMain,
        *,
        drain_timeout_ms: int,
        door: socket.socket | None = None,
        final_exit_code: int = 0,
    ) -> None:
        """Make the socket, on an abstract address that cannot be guessed, and the shared pulse.

        One that leaves with ``final_exit_code`` (0: none is) is not started again, and ``over`` says so.
        """
        self.name = name
        self._settings = settings
        self._main = main
        self._drain_timeout_ms = drain_timeout_ms
        self._door = door
        self._final_exit_code = final_exit_code
        self.over = False
        self._deaths = 0
        self._start_ns = 0  # not before
        self._started_ns = 0
        self._seen_beat_ns = 0
        self._seen_ns = 0  # when the pulse last changed, by the supervisor's waking time
        self._deadline_ns = 0
        self.pid = 0
        self.address = f"\0danube-{name}-{secrets.token_hex(16)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(self.address)
        self.listener.listen(BACKLOG)
        self.pulse = Pulse()

    def context(self, drain: DrainSignal) -> dict[str, Any]:
        """Return the fields of a SideContext; called in the process itself."""
        return {
            "listener": self.listener, "drain": drain, "settings": self._settings, "pulse": self.pulse,
        }  # fmt: skip

    def leave(self) -> None:
        """In another child: it has no part in these sockets."""
        self.listener.close()
        if self._door is not None:
            self._door.close()

    def turn(self, now_ns: int, paused_ns: int, become_child: Callable[[SideProcess], DrainSignal]) -> None:
        """Reap, start or check it, whatever is due."""
        self._reap(now_ns)
        if self.pid:
            self._check_pulse(now_ns, paused_ns)
        elif now_ns >= self._start_ns and not self.over:
            self._start(now_ns, become_child)

    def _start(self, now_ns: int, become_child: Callable[[SideProcess], DrainSignal]) -> None:
        self.pulse.reset()
        self.pulse.start_count += 1
        try:
            self.pid = process.fork_child(lambda: self._main(become_child(self), self), f"danube-{self.name}")
        except OSError as error:
            self.pulse.start_count -= 1
            self._deaths += 1
            self._start_ns = now_ns + restart_delay_ns(self._deaths)
            _log.error(f"{self.name} cannot be started", why=str(error))
            return
        self.pulse.pid = self.pid
        self._started_ns = self._seen_ns = now_ns
        self._seen_beat_ns = 0
        _log.info(f"{self.name} started", pid=self.pid)

    def _reap(self, now_ns: int) -> None:
        status = process.ended_status(self.pid) if self.pid else None
        if status is None:
            return
        pid, self.pid = self.pid, 0
        self.pulse.pid = 0
        if self._deadline_ns:
            if status:
                _log.warning(f"{self.name} did not drain", pid=pid, how=process.describe_status(status))
            return
        self.over = bool(self._final_exit_code) and status == self._final_exit_code
        _log.error(f"{self.name} ended", pid=pid, how=process.describe_status(status))
        stable = self.pulse.last_ns != 0 and now_ns - self._started_ns >= STABLE_NS
        self._deaths = 1 if stable else self._deaths + 1
        self._start_ns = now_ns + restart_delay_ns(self._deaths)

    def _check_pulse(self, now_ns: int, paused_ns: int) -> None:
        """Kill a process that hangs.  Time in which the supervisor slept does not count."""
        beat_ns = self.pulse.last_ns
        if beat_ns != self._seen_beat_ns:
            self._seen_beat_ns = beat_ns
            self._seen_ns = now_ns
            return
        self._seen_ns += paused_ns
        limit_ms = self._settings.heartbeat_timeout_ms if beat_ns else self._settings.start_timeout_ms
        silent_ms = (now_ns - self._seen_ns) // 1_000_000
        if silent_ms > limit_ms:
            _log.error(f"{self.name} gives no heartbeat and is killed", pid=self.pid, silent_ms=silent_ms)
            os.kill(self.pid, signal.SIGKILL)
            self._seen_ns = now_ns

    def stop(self, now_ns: int, *, at_once: bool) -> None:
        """SIGTERM once, SIGKILL at the deadline or ``at_once``; then until ``pid`` is 0."""
        first = not self._deadline_ns
        if first:
            self._deadline_ns = now_ns + self._drain_timeout_ms * 1_000_000
        self._reap(now_ns)
        if not self.pid:
            return
        if at_once or now_ns >= self._deadline_ns:
            os.kill(self.pid, signal.SIGKILL)
        elif first:
            os.kill(self.pid, signal.SIGTERM)

    def close(self) -> None:
        """Kill the process: it must not outlive the supervisor."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.leave()
        self.pulse.close()
