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
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0


def end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, SIGKILL to what is left after the grace; whose parent is gone is the guard's."""
    if server.poll() is None:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_S)
    own, deadline = os.getpid(), time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
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
