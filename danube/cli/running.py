"""The broker of a data directory: who it is, whether it lives, and how it is told to stop.

The supervisor writes ``danube.json`` when it serves and removes it when it stopped.  After a crash
the file stays, so a process counts as the broker only if it is older than the file says.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from danube.clock import wall_us
from danube.errors import DanubeError, OperationTimeout

STATUS_FILE = "danube.json"
WILDCARD = "0.0.0.0"  # noqa: S104 - recognised, never bound here
STATUS_BYTES_MAX = 64 * 1024
START_SLACK_S = 2.0  # clock ticks and the wall clock's corrections


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """What the status file says; ``started_at`` is RFC 3339."""

    pid: int
    native: str
    workers: int
    started_at: str

    @property
    def url(self) -> str:
        """Where a client on this host connects; a wildcard address becomes loopback."""
        host, _, port = self.native.rpartition(":")
        host = {WILDCARD: "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}.get(host, host)
        return f"danube://{host}:{port}"


def read_status(data_dir: Path) -> RunningBroker | None:
    """The broker that serves this data directory, or None when there is none (any more)."""
    try:
        with (data_dir / STATUS_FILE).open("rb") as file:
            fields = json.loads(file.read(STATUS_BYTES_MAX))
        workers = fields["workers"]  # how many, or one entry for each
        found = RunningBroker(
            pid=int(fields["pid"]),
            native=str(fields["native"]),
            workers=len(workers) if isinstance(workers, list) else int(workers),
            started_at=str(fields["started_at"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DanubeError(
            f"{data_dir / STATUS_FILE} cannot be read",
            why=str(error),
            hint="is this a data directory of Danube?",
        ) from None
    return found if found.pid > 1 and _lives(found) else None


def _lives(broker: RunningBroker) -> bool:
    """Whether the process lives and is not another one that got the number later."""
    try:
        os.kill(broker.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives and belongs to someone else
    began = _process_start(broker.pid)
    if began is None:
        return True
    if began == 0.0:
        return False
    with suppress(ValueError):
        told = datetime.fromisoformat(broker.started_at.replace("Z", "+00:00")).timestamp()
        return began <= told + START_SLACK_S
    return True


def _process_start(pid: int) -> float | None:
    """When a process began (seconds since 1970); 0.0 for a zombie, None where that cannot be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        if fields[0] in ("Z", "X"):
            return 0.0
        uptime = float(Path("/proc/uptime").read_text("ascii").split()[0])
        age = uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return wall_us() / 1e6 - age
    except (OSError, ValueError, IndexError):
        return None


def stop_and_wait(broker: RunningBroker, timeout_s: float) -> float:
    """Send SIGTERM and wait for the end; seconds it took.  OperationTimeout when it takes longer."""
    began = time.monotonic()
    try:
        descriptor = os.pidfd_open(broker.pid)
    except ProcessLookupError:
        return 0.0
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        ended, _, _ = select.select([descriptor], [], [], timeout_s)
    except ProcessLookupError:
        return 0.0
    finally:
        os.close(descriptor)
    if not ended:
        raise OperationTimeout(
            f"the broker (pid {broker.pid}) did not stop within {timeout_s:g} s",
            why="it is still finishing what it accepted, or it hangs",
            hint=f"wait and look with `danube status`, or `kill -9 {broker.pid}`: the log survives that",
        )
    return time.monotonic() - began
