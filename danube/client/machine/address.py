"""The client's URL: ``danube://host:port[,host:port]``, or ``danube+tls://`` for TLS.

Both shells also use its timeouts for sockets, and its errors with hints.

The child of a fork shares its parent's connections: it drops a socket without sending anything.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from danube.errors import ConnectionFailed, DanubeError, InvalidArgument, ProtocolError
from danube.limits import HANDSHAKE_TIMEOUT_S

if TYPE_CHECKING:
    from danube.client.machine.tls import ClientTls

PORT = 6660
SCHEME = "danube://"
URL_DEFAULT = f"{SCHEME}127.0.0.1:{PORT}"


class Address(NamedTuple):
    """Address of a broker; ``str()`` is how people write it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> list[Address]:
    """Addresses of a URL, in the order in which they are tried; raise InvalidArgument."""
    if not url.startswith(SCHEME):
        raise InvalidArgument(
            f"broker URL {url!r} is not valid",
            why=f"it does not start with {SCHEME}",
            hint=f"for example {URL_DEFAULT}",
        )
    return [_parse_address(part, url) for part in url[len(SCHEME) :].rstrip("/").split(",")]


def _parse_address(text: str, url: str) -> Address:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else rest
        valid = bool(bracket) and (not rest or rest.startswith(":"))
    else:
        host, colon, port = text.rpartition(":")
        if not colon:
            host, port = text, ""
        valid = ":" not in host
    number = int(port) if port.isascii() and port.isdigit() else (PORT if not port else 0)
    if not host or not valid or not 1 <= number <= 65_535 or "/" in host or "@" in host:
        raise InvalidArgument(
            f"broker URL {url!r} is not valid",
            why=f"{text!r} is not host:port",
            hint=f"for example {URL_DEFAULT}",
        )
    return Address(host, number)


def greeting_s(silence_ns: int, connect_timeout_s: float) -> float:
    """How long a broker may take to greet: where silent ones are left early, so is one that never spoke.

    A host that is stopped or hangs still takes connections, and another broker may be there to ask.  So the
    time that the user gave for connecting bounds the greeting as well.
    """
    return min(HANDSHAKE_TIMEOUT_S, 2 * silence_ns / 1e9, connect_timeout_s)


def refused(
    address: Address, error: OSError | TimeoutError | ValueError, tls: ClientTls | None = None
) -> ConnectionFailed:
    """Return the error of a failed connection to ``address``: the failure, its cause and a hint."""
    if tls is not None and (found := tls.failed(address, error)) is not None:
        return found
    if isinstance(error, ConnectionRefusedError):
        why, hint = "nothing listens there", "start a broker with `danube start`, or check host and port"
    elif isinstance(error, socket.gaierror):
        why, hint = f"the host name is not known ({error.strerror})", "check the host in the URL"
    elif isinstance(error, ValueError):  # a label that is too long, or bytes that no name has
        why, hint = f"the host is no name of a host ({error})", "check the host in the URL"
    elif isinstance(error, TimeoutError):
        why, hint = "it did not answer in time", "check the network, the firewall and the port"
    else:
        why = error.strerror or str(error)
        hint = "check host and port" + (
            ", and that a broker listens there" if "ultiple" in str(error) or "onnect" in str(error) else ""
        )
    return ConnectionFailed(
        f"cannot connect to the broker at {address}", why=why, hint=hint, address=str(address)
    )


def unread(descriptor: int, size: int) -> bytes:
    """Return up to ``size`` bytes that a socket has received, ``b""`` when there are none."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            return sock.recv(size, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def told_nothing(reason: DanubeError | None) -> bool:
    """Return whether a broker that ended a connection before it greeted gave no reason.

    It may have lost its cluster in that moment, or begun to serve, so the next connection may go well.
    """
    return reason is None or (isinstance(reason, ConnectionFailed) and not reason.hint)


def closed_early(address: Address, reason: DanubeError | None, tls: ClientTls | None = None) -> DanubeError:
    """The broker closed the connection before it greeted."""
    if reason is not None and not isinstance(reason, ConnectionFailed):
        return reason
    why = reason.why if reason is not None else ""
    hint = reason.hint if reason is not None else ""
    if tls is not None and not hint:  # with TLS 1.3 a client's side is done before the broker has judged it
        why, hint = tls.ended_early()
    return ConnectionFailed(
        f"the broker at {address} closed the connection before it greeted",
        why=why,
        hint=hint or "is this Danube's native port, and is the broker not stopping?",
        address=str(address),
    )


def refuse_http2(first: memoryview) -> None:
    """Raise where the peer greets with an HTTP/2 SETTINGS frame: that is a gRPC port."""
    if len(first) >= 9 and first[3] == 4 and not any(first[5:9]):
        raise ProtocolError(
            "this is a gRPC port", hint="the native protocol has a port of its own, 6660 unless told"
        )


def let_go(descriptor: int) -> None:
    """Replace the parent's socket by a dead one of the same number; the connection is the parent's.

    The number stays in use, because an event loop and a socket object may still hold it and would close its
    next user.  Neither shutdown() nor a selector may be called: the connection and the epoll set are shared
    with the parent.
    """
    try:
        end, other = socket.socketpair()
    except OSError:  # no descriptor is left, so the number cannot be kept
        os.close(descriptor)
        return
    other.close()
    end.setblocking(False)
    os.dup2(end.fileno(), descriptor, inheritable=False)
    end.close()
