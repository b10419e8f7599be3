"""What both shells need to open a socket: its options, and errors that say what to do."""

from __future__ import annotations

import ipaddress
import socket

from danube.client.address import Address
from danube.errors import ConnectionFailed, DanubeError

_TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)


def tune_socket(sock: socket.socket) -> None:
    """No delay for small frames; on loopback the cubic congestion control where the kernel has it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _on_loopback(sock):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, b"cubic")
        except OSError:
            pass  # another kernel: its default is right too, only slower on loopback


def _on_loopback(sock: socket.socket) -> bool:
    try:
        return ipaddress.ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback
    except (OSError, ValueError, IndexError, AttributeError):
        return False


def refused(address: Address, error: OSError | TimeoutError) -> ConnectionFailed:
    """What went wrong at ``address``, why, and what to do about it."""
    if isinstance(error, ConnectionRefusedError):
        why, hint = "nothing listens there", "start a broker with `danube start`, or check host and port"
    elif isinstance(error, socket.gaierror):
        why, hint = f"the host name is not known ({error.strerror})", "check the host in the URL"
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


def closed_early(address: Address, reason: DanubeError | None) -> DanubeError:
    """The broker closed the connection before it greeted."""
    if reason is not None and not isinstance(reason, ConnectionFailed):
        return reason
    return ConnectionFailed(
        f"the broker at {address} closed the connection before it greeted",
        why=reason.why if reason is not None else "",
        hint="is this Danube's native port, and is the broker not stopping?",
        address=str(address),
    )
