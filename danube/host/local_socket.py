"""A Unix socket beside the native port, for clients on the broker's host: sooner answers than over loopback.

Each worker listens at an abstract name that contains the broker's address and port.  Processes of the same
network namespace, for which the address is the same host, can connect to it.  The name ends with the broker.

A client with a loopback address tries this socket first, and uses it only if the listening process has the
client's user: another user could bind the name without access to the port.  Linux only.

An abstract address has no permissions: any process that guesses it can connect, or listen there.  So whoever
uses one asks for the user of the other end.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any, Final

from danube.limits import WORKERS_MAX

# What a TCP socket on loopback grows to, and what Linux 6.18 allows.  With the 208 KiB of older kernels many
# megabytes on their way to a consumer take twice as long as over loopback.
BUFFER_BYTES: Final = 4 << 20
OWN_HOSTS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - names them, listens nowhere
_LOCALHOST: Final = ("127.0.0.1", "::1")
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred, unix(7): process, user, group


def peer_of(raw: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the peer.  For an outgoing connection: of the process that called listen()."""
    told = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(told)
    return process, user


def same_user(raw: socket.socket) -> bool:
    """Whether the process at the other end is of this one's user."""
    return peer_of(raw)[1] == os.geteuid()


def has_room() -> bool:
    """Whether this process may have sockets with buffers of BUFFER_BYTES."""
    if sys.platform != "linux":
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        tune(probe)
        return probe.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 2 * BUFFER_BYTES  # the kernel doubles


def listen(host: str, port: int, worker: int, backlog: int) -> socket.socket | None:
    """Open a worker's socket beside ``host:port``; None if clients search none there.

    Also None if another process has the name; clients then use the port.
    """
    host = OWN_HOSTS.get(host, host)
    if sys.platform != "linux" or host == "localhost" or not loopback(host):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(_name(host, port, worker))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


def dial(host: str, port: int) -> socket.socket | None:
    """A connection, not blocking, to this user's broker at a loopback address; None if TCP is the way."""
    hosts = _LOCALHOST if host == "localhost" else (host,) if loopback(host) else ()
    if sys.platform != "linux" or not hosts:
        return None
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.setblocking(False)
    for one in hosts:
        for worker in _draws():
            if raw.connect_ex(_name(one, port, worker)) == 0:
                if same_user(raw):
                    tune(raw)
                    return raw
                raw.close()
                return None
    raw.close()
    return None


def tune(raw: Any) -> None:
    """Set the options of a Unix socket, for either side; a TCP socket is left as it is."""
    if unix(raw):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)


def unix(raw: Any) -> bool:
    """Whether it is a Unix socket; None is no socket."""
    return raw is not None and sys.platform != "win32" and raw.family == socket.AF_UNIX


def loopback(host: str) -> bool:
    """Whether only this host reaches the address; a name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_address(address: str) -> bool:
    """Whether only this host reaches ``host:port``."""
    return loopback(address.rpartition(":")[0])


def _name(host: str, port: int, worker: int) -> str:
    return f"\0danube-native-{host}:{port}-{worker}"


def _draws() -> Iterator[int]:
    """Yield workers to try, so that clients spread over them; their number is unknown, but 0 exists."""
    bound = WORKERS_MAX
    while bound:
        yield random.randrange(bound)  # noqa: S311 - no secret
        bound //= 2
