"""The broker of a data directory: its identity, whether it lives, and how to stop it.

The supervisor holds ``danube.lock`` as long as it runs and tells about itself in ``danube.json``.
After a crash the file stays, so whether a broker runs is asked of the lock.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

from danube.broker.processes.process import identity_of
from danube.errors import DanubeError, NotFound, OperationTimeout, Unavailable, WrongState

LOCK_FILE = "danube.lock"
STATE_FILE = "danube.json"
STATE_BYTES_MAX = 1024 * 1024
LOOK_INTERVAL_S = 0.02
WILDCARD = "0.0.0.0"  # noqa: S104 - recognised, never bound here


class RunningBroker(msgspec.Struct, frozen=True):
    """Facts of a running broker, as danube.json has them."""

    pid: int
    ready: bool
    addresses: dict[str, str]
    workers: list[dict[str, Any]]  # worker, pid (0: not running at the moment), incarnation
    started_at: int = msgspec.field(name="started_at_us")  # microseconds since 1970
    controller: str = ""  # of a member of a cluster: its socket
    identity: str = ""  # of the process, see process.identity_of
    warnings: tuple[str, ...] = ()  # its notices when it began to serve
    reloads: bool = False  # it has certificates or keys, which it loads again when it is told to

    @property
    def url(self) -> str:
        """Address for a client on this host; a wildcard address becomes loopback."""
        host, _, port = self.addresses.get("native", "").rpartition(":")
        host = {WILDCARD: "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}.get(host, host)
        return f"danube://{host}:{port}"


def read_running(data_dir: Path) -> RunningBroker | None:
    """The broker that runs on this data directory, or None when there is none."""
    if not _locked(data_dir):
        return None
    try:
        with (data_dir / STATE_FILE).open("rb") as file:
            return msgspec.json.decode(file.read(STATE_BYTES_MAX), type=RunningBroker)
    except FileNotFoundError:
        return None  # it holds the lock and has not come so far yet
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise DanubeError(
            f"{data_dir / STATE_FILE} cannot be read",
            why=f"{type(error).__name__}: {error}",
            hint="is this the data directory of a broker of this version?",
        ) from None


def require_running(data_dir: Path) -> RunningBroker:
    """The broker that runs on this data directory; NotFound when there is none."""
    running = read_running(data_dir)
    if running is None:
        raise NotFound(
            f"no broker runs on {data_dir}",
            why="it was not started, or it stopped",
            hint="give the --data-dir that it was started with, or start one with `danube start`",
        )
    return running


def _locked(data_dir: Path) -> bool:
    try:
        lock = os.open(data_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def stop_and_wait(broker: RunningBroker, data_dir: Path, timeout_s: float) -> float:
    """Send SIGTERM and wait until the data directory is free; return the seconds it took.

    Raises OperationTimeout if it takes longer, and Unavailable if the pid in danube.json is of another pid
    namespace, because here the number may be another process.
    """
    began = time.monotonic()
    deadline = began + timeout_s
    try:
        descriptor = os.pidfd_open(broker.pid)
    except ProcessLookupError:
        descriptor = -1
    try:
        # The descriptor is open, so from here on the number stays that of this process.
        if descriptor >= 0 and _names_the_broker(broker):
            _terminate(descriptor, timeout_s)
        elif _elsewhere(broker):
            raise Unavailable(
                f"the broker of {data_dir} cannot be stopped from here",
                why=f"its pid {broker.pid} counts in another pid namespace, such as that of a container",
                hint="run `danube stop` there, or stop the container",
            )
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    while _locked(data_dir):
        if time.monotonic() >= deadline:
            raise OperationTimeout(
                f"the broker (pid {broker.pid}) did not stop within {timeout_s:g} s",
                why="it is still finishing what it accepted, or it hangs",
                hint=f"wait and look with `danube status`, or `kill -9 {broker.pid}`: the log survives that",
            )
        time.sleep(LOOK_INTERVAL_S)
    return time.monotonic() - began


def reload(broker: RunningBroker, data_dir: Path) -> None:
    """Tell the broker to load its certificates and keys again; raises WrongState if it has neither.

    Raises Unavailable if its pid is of another pid namespace.
    """
    if not broker.reloads:
        raise WrongState(
            f"the broker of {data_dir} has no certificates and no keys to load again",
            hint="set tls.cert_file and tls.key_file, or auth.mode, and start it again",
        )
    if not _names_the_broker(broker):
        raise Unavailable(
            f"the broker of {data_dir} cannot be told from here",
            why=f"its pid {broker.pid} counts in another pid namespace, such as that of a container",
            hint="send SIGHUP to it there; it also looks at the files every 5 s",
        )
    os.kill(broker.pid, signal.SIGHUP)


def _names_the_broker(broker: RunningBroker) -> bool:
    """Whether the pid names the broker here and now; a broker of an older version does not tell."""
    return not broker.identity or identity_of(broker.pid) == broker.identity


def _elsewhere(broker: RunningBroker) -> bool:
    own, theirs = identity_of(os.getpid()).split(" ")[0], broker.identity.split(" ")[0]
    return bool(theirs) and own != theirs


def _terminate(descriptor: int, timeout_s: float) -> None:
    """Ask the process to end, and wait for that or for the time-out."""
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except ProcessLookupError:
        return
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    poll.poll(1000 * timeout_s)
