"""Servers and tools as processes: started, waited for, accounted for, and gone afterwards; their network.

Danube asks for cubic on its sockets; a peer takes what the machine gives, and bbr costs a third on loopback.
A network namespace has a default of its own, so both sides get the same and nothing changes outside.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from perf.compare.model import TURN_TIMEOUT_S, Failed
from tests.broker_process import descendants, die_with_parent

GUARD = Path(__file__).with_name("guard.py")
TICKS = os.sysconf("SC_CLK_TCK")
_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED: what the scheduler gave, not sampled ticks
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
TAIL = 1_500
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
WANTED = ("cubic", "reno")  # equal on loopback; a namespace may be refused the first


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of these processes, their threads and what they have reaped; the gone count nothing.

    Of the processes themselves in nanoseconds: a turn of some milliseconds is less than a tick.  The id of
    another process's clock is the kernel's (clock_getcpuclockid(3)).
    """
    total = 0.0
    for pid in pids:
        try:
            own = time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += own + sum(map(int, fields[13:15])) / TICKS  # of reaped children
    return total


class Started:
    """A program that runs, with what it prints in a file of ``directory``."""

    under: tuple[str, ...] = ()  # what runs the command
    how: Mapping[str, Any] = {"stdin": subprocess.DEVNULL, "preexec_fn": die_with_parent}

    def __init__(
        self, command: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = Path(command[0]).name
        self.output = directory / f"output-{time.monotonic_ns()}"
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                [*self.under, *command], stdout=output, stderr=subprocess.STDOUT, cwd=directory,
                env={**os.environ, **(environment or {})}, **self.how,
            )  # fmt: skip
        self._before_s = _children_s()

    def said(self) -> str:
        """The end of what it printed."""
        return self.output.read_text(errors="replace")[-TAIL:].strip()

    def wait(self, ready: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        """Until ``ready``; Failed when it ends before, or when it takes too long."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._process.poll() is not None:
                raise Failed(f"{self.name} ended with {self._process.returncode}: {self.said()}")
            if time.monotonic() > deadline:
                raise Failed(f"{self.name} was not ready within {timeout_s:g} s: {self.said()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()


class Server(Started):
    """A server under a guard: a process tree that can be accounted for and that ends with this process."""

    under = (sys.executable, "-E", "-S", str(GUARD))
    how: Mapping[str, Any] = {"stdin": subprocess.PIPE, "start_new_session": True}

    def pids(self) -> list[int]:
        """The guard and all below it."""
        return [self._process.pid, *descendants(self._process.pid)]

    def stop(self) -> None:
        """End the whole tree."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for pid in reversed(self.pids()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()


def listens(port: int) -> bool:
    """Whether something on loopback accepts connections there."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


class Finished(NamedTuple):
    """What a tool printed and the CPU time that it and its children used."""

    output: str
    cpu_seconds: float


class Tool(Started):
    """A benchmark tool while it runs."""

    def finish(self, timeout_s: float = TURN_TIMEOUT_S) -> Finished:
        """Wait for its end; Failed unless it is a good one in time."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            said = self.said()
            self.kill()
            raise Failed(f"{self.name} was not done within {timeout_s:g} s: {said}") from None
        printed = self.output.read_text(errors="replace")
        self.output.unlink()
        if code:
            raise Failed(f"{self.name} ended with {code}: {printed[-TAIL:].strip()}")
        return Finished(printed, _children_s() - self._before_s)

    def kill(self) -> None:
        super().kill()
        self.output.unlink(missing_ok=True)


def _children_s() -> float:
    """CPU seconds of all children that were reaped; what two tools use at once is the same either way."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


# -- network -----------------------------------------------------------------------------------------


def enter_own_network() -> str:
    """Move this process, which has one thread yet, into a namespace of its own; says what the network is."""
    spaces = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET
    if ctypes.CDLL(None, use_errno=True).unshare(spaces):
        reason = os.strerror(ctypes.get_errno())
        return f"the machine's loopback, {congestion_control()} (no namespace of its own: {reason})"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", IFF_UP, b""))
    for name in WANTED:
        try:
            CONTROL.write_text(name)
            break
        except OSError:
            continue
    return f"a loopback of its own, {congestion_control()}"


def congestion_control() -> str:
    """What new TCP sockets use here unless they ask for something else."""
    try:
        return CONTROL.read_text().strip()
    except OSError:
        return "unknown"
