"""Tells systemd (or whatever set NOTIFY_SOCKET) how the broker is doing: sd_notify(3) in one datagram."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class ServiceNotifier:
    """Sends nothing when no service manager asked for it."""

    __slots__ = ("_address", "_next_watchdog_ns", "_watchdog_ns")

    def __init__(self, address: str, watchdog_us: int) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_ns = watchdog_us * 1000 // 2
        self._next_watchdog_ns = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ServiceNotifier:
        own_pid = str(os.getpid())
        interval = environ.get("WATCHDOG_USEC", "")
        meant = environ.get("WATCHDOG_PID", own_pid) == own_pid and interval.isdigit()
        return cls(environ.get("NOTIFY_SOCKET", ""), int(interval) if meant else 0)

    def send(self, state: str) -> None:
        """Send ``state`` (READY=1, STOPPING=1 ...); a manager that is gone is no reason to stop."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
            datagram.setblocking(False)
            try:
                datagram.sendto(state.encode(), self._address)
            except OSError:
                pass

    def watchdog(self, now_ns: int) -> None:
        """Send WATCHDOG=1 when half of the manager's interval has passed."""
        if self._watchdog_ns and now_ns >= self._next_watchdog_ns:
            self._next_watchdog_ns = now_ns + self._watchdog_ns
            self.send("WATCHDOG=1")
