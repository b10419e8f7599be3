"""Listening sockets: made by the supervisor, one per worker and door, all on one port.

Beside the native port there may be a Unix socket for each worker (danube/host/local_socket.py).

SO_REUSEPORT lets the kernel spread connections over the workers.  The supervisor keeps every socket open, so
the replacement of a dead worker accepts the connections in its backlog.  When the supervisor stops it closes
the sockets, because no worker is replaced any more.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from typing import Final, cast

from danube.errors import AlreadyRunning, ConfigInvalid
from danube.host import local_socket

LOCAL: Final = "local"  # the door of Unix sockets (danube/host/local_socket.py)
BACKLOG: Final = 4096  # the kernel cuts it to net.core.somaxconn

Address = tuple[str | int, ...]


def open_listeners(
    host: str, ports: Mapping[str, int], workers: int, local: bool = False
) -> list[dict[str, socket.socket]]:
    """Open the sockets of each worker, by door name.  Port 0 takes a free port, the same for all workers.

    ``local``: with a Unix socket beside the native port, where clients look for one.
    Raises AlreadyRunning when a port is taken and ConfigInvalid when the address cannot be used.
    """
    opened: list[dict[str, socket.socket]] = [{} for _ in range(workers)]
    try:
        for door, port in ports.items():
            family, address = _resolve(host, port)
            if port:
                _refuse_taken(family, address, door)
            for sockets in opened:
                sockets[door] = _listen(family, address, door)
                address = (address[0], sockets[door].getsockname()[1], *address[2:])
        if local:
            _open_local(opened)
    except BaseException:
        close_listeners(opened)
        raise
    return opened


def close_listeners(opened: list[dict[str, socket.socket]]) -> None:
    for sockets in opened:
        for listener in sockets.values():
            listener.close()


def addresses(sockets: Mapping[str, socket.socket]) -> dict[str, str]:
    """Return the address of each port, by door, as a user types it."""
    return {door: address_text(listener) for door, listener in sockets.items() if door != LOCAL}


def address_text(listener: socket.socket) -> str:
    """``host:port`` as a user types it."""
    return _text(*listener.getsockname()[:2])


def own_address(listener: socket.socket) -> str:
    """Return the address for this host's own processes, whatever is advertised to others."""
    host, port = listener.getsockname()[:2]
    return _text(local_socket.OWN_HOSTS.get(host, host), port)


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigInvalid(f"host {host!r} is not an address of this machine", why=str(error)) from error
    family, _, _, _, address = found[0]
    return family, cast(Address, address)


def _refuse_taken(family: socket.AddressFamily, address: Address, door: str) -> None:
    """With SO_REUSEPORT two brokers of one user could share a port; a bind without it finds out."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(probe, address, door)


def _open_local(opened: list[dict[str, socket.socket]]) -> None:
    for worker, sockets in enumerate(opened):
        host, port = sockets["native"].getsockname()[:2]
        listener = local_socket.listen(host, port, worker, BACKLOG)
        if listener is None:
            return
        sockets[LOCAL] = listener


def _listen(family: socket.AddressFamily, address: Address, door: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setblocking(False)
        _bind(listener, address, door)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind(listener: socket.socket, address: Address, door: str) -> None:
    try:
        listener.bind(address)
    except OSError as error:
        text = f"{address[0]}:{address[1]}"
        if error.errno == errno.EADDRINUSE:
            raise AlreadyRunning(
                f"{door} port {text} is taken",
                why="another process listens there",
                hint=f"stop it, or give another --{door}-port (0 takes a free one)",
                address=text,
            ) from error
        raise ConfigInvalid(f"cannot listen on {text}", why=os.strerror(error.errno or 0)) from error
