"""Run a server and leave nothing of it behind: ``guard.py COMMAND...`` with a pipe as standard input.

The guard is the reaper of everything below it, daemons too.  When its standard input ends, because it is told
to stop or because the process that started it is gone in whatever way, it ends them all; when the server ends
by itself, the guard ends with its code.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0


def below(pid: int) -> list[int]:
    """Descendants of ``pid``."""
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
            children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
        except OSError:
            continue
        found += children
        queue += children
    return found


def end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, SIGKILL to what is left after the grace."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        for pid in below(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def main(command: list[str]) -> int:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    ended = os.pidfd_open(server.pid)
    select.select([sys.stdin, ended], [], [])
    code = server.poll()
    end(server)
    return code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
