"""Forking and ending worker processes on Linux.

A child dies with its parent: the kernel sends it SIGKILL when the supervisor goes, however it goes.
Signals are blocked across the fork, so that a child never runs its parent's handlers.

When a process that ended is started again: at once, and more slowly when it dies young.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

from danube.errors import InvariantBroken

EXIT_CRASHED: Final = 1
EXIT_INVARIANT_BROKEN: Final = 70  # EX_SOFTWARE
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HANDLED_SIGNALS: Final = (*STOP_SIGNALS, signal.SIGCHLD)

_SET_PARENT_DEATH_SIGNAL: Final = 1  # prctl(2)
_SET_NAME: Final = 15

_libc = ctypes.CDLL(None, use_errno=True)


def fork_child(child: Callable[[], int | None], name: str) -> int:
    """Run ``child`` in a new process and return its pid; OSError when there can be none.

    The child leaves with the integer that ``child`` returns, 0 for None, EXIT_INVARIANT_BROKEN for a broken
    invariant and EXIT_CRASHED for any other exception, whose traceback it writes to standard error.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _become_child(child, name, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
    return pid


def _become_child(child: Callable[[], int | None], name: str, parent: int) -> NoReturn:
    """Never returns into the parent's stack."""
    status = EXIT_CRASHED
    try:
        _exit_with_parent(parent)
        _libc.prctl(_SET_NAME, name.encode()[:15], 0, 0, 0)
        status = child() or 0
    except InvariantBroken:
        traceback.print_exc()
        status = EXIT_INVARIANT_BROKEN
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else EXIT_CRASHED
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # the reader of the stream has ended
        os._exit(status)


def _exit_with_parent(parent: int) -> None:
    if _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call above
        os._exit(EXIT_CRASHED)


def unblock_signals() -> None:
    """In a child that has installed its own handlers: from here on they run."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)


def ended_status(pid: int) -> int | None:
    """Reap ``pid`` if it has ended: its exit status, or minus the signal that killed it; else None."""
    reaped, wait_status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(wait_status) if reaped else None


def describe_status(status: int) -> str:
    """An exit status in words, for the log."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if status == EXIT_INVARIANT_BROKEN:
        return "an invariant does not hold (status 70)"
    return f"left with status {status}"


def identity_of(pid: int) -> str:
    """Name the process that has ``pid`` now: its pid namespace and when it started, in ticks since boot.

    Empty when there is no such process, or when this user may not look at it.  A pid alone names a process
    only within its namespace and only until the process ends (pid_namespaces(7), proc(5)).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            started = file.read().rpartition(b")")[2].split()[19].decode()
        return f"{os.readlink(f'/proc/{pid}/ns/pid')} {started}"
    except (OSError, IndexError):
        return ""


def catch_stop_signals(handler: Callable[[int, Any], None]) -> None:
    """Call ``handler`` for each signal that asks to stop; one that is ignored (nohup) stays so."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def ignore_stop_signals(handler: Callable[[int, Any], None]) -> None:
    """Ignore the signals of ``handler`` from now on; called when all is stopped.

    The interpreter removes handlers while it exits.  One more signal would then kill the process instead of
    exit code 0.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == handler:
            signal.signal(number, signal.SIG_IGN)


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft
    return hard


SECOND_NS: Final = 1_000_000_000
RESTART_DELAY_MIN_NS: Final = SECOND_NS // 10
RESTART_DELAY_MAX_NS: Final = 5 * SECOND_NS
RESTART_DELAY_SERVED_MAX_NS: Final = 4 * SECOND_NS // 10  # a worker that has served is back within 1 s
STABLE_NS: Final = SECOND_NS  # a process that served and lived this long did not die young


def restart_delay_ns(deaths: int, served: bool = False) -> int:
    """0, 100 ms, 200 ms, 400 ms ... for the first, second ... young death in a row."""
    if deaths <= 1:
        return 0
    delay_max_ns = RESTART_DELAY_SERVED_MAX_NS if served else RESTART_DELAY_MAX_NS
    return min(delay_max_ns, RESTART_DELAY_MIN_NS << min(deaths - 2, 10))
