"""The processes of one session, told apart from others that got the same numbers later.

A process is named by its id, the time of its start and the boot that it belongs to.  A session keeps its
leader's id as long as any process of it lives, so what is in it was started by that leader.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_STATE, _SESSION, _START = 0, 3, 19  # fields of /proc/PID/stat behind the name


def _fields(pid: int) -> list[str]:
    """What the kernel says of a process; [] where there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return []


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class ProcessSession:
    """A process that leads a session of its own, and all that it started."""

    pid: int
    start_ticks: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessSession:
        """Of a child that was just started with ``start_new_session`` and is not waited for yet."""
        return cls(pid, int(_fields(pid)[_START]), _boot())

    def leader_state(self) -> str:
        """The kernel's letter (``S``, ``R``, ``T``, ...); "" when the leader is gone."""
        fields = _fields(self.pid)
        if not fields or int(fields[_START]) != self.start_ticks or self.boot != _boot():
            return ""
        return "" if fields[_STATE] in "ZX" else fields[_STATE]

    def pids(self) -> list[int]:
        """All that live, the leader first; nothing when its number was given to another process."""
        if self.boot != _boot():
            return []
        leader = _fields(self.pid)
        if leader and int(leader[_START]) != self.start_ticks:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                fields = _fields(int(entry.name))
                if fields and int(fields[_SESSION]) == self.pid and int(fields[_START]) >= self.start_ticks:
                    found += [int(entry.name)] if fields[_STATE] not in "ZX" else []
        return sorted(found, key=lambda pid: (pid != self.pid, pid))

    def send(self, number: signal.Signals) -> None:
        """To the leader, then to every other one."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def terminate(self) -> None:
        """SIGTERM to the leader alone, which ends the others in order."""
        if self.leader_state():
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)

    def kill(self, timeout_s: float = 10.0) -> None:
        """SIGKILL to all, until none is left; TimeoutError where the kernel does not let one go."""
        deadline = time.monotonic() + timeout_s
        while pids := self.pids():
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {pids} do not end")
            self.send(signal.SIGKILL)
            time.sleep(0.01)

    def wait_gone(self, timeout_s: float) -> bool:
        """Whether all have ended within the time."""
        deadline = time.monotonic() + timeout_s
        while self.pids():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True
