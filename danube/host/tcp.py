"""Options of every TCP socket, on both sides: small frames leave at once, and lost data is repeated soon.

On a network that loses packets TCP repeats one after 0.2 s, 0.4 s, 0.8 s and so on, up to two minutes.  So a
connection with few packets is silent for longer than any heartbeat allows.  Here the pauses of such a
connection do not grow (``TCP_THIN_LINEAR_TIMEOUTS``), and no pause is longer than a second
(``TCP_RTO_MAX_MS``, Linux 6.15), where the kernel has that.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from contextlib import suppress
from typing import Any, Final

from danube.host import local_socket

PROCESS_OF_THIS_HOST: Final = "a process of this host"  # through a Unix socket
_LOOPBACK_NETWORK: Final = "::/64"
_NETWORK_BITS: Final = 64  # of an IPv6 address
RTO_MAX_MS: Final = 1_000  # the least that the kernel takes
_CONGESTION: Final = getattr(socket, "TCP_CONGESTION", 13)
_THIN_LINEAR_TIMEOUTS: Final = 16  # linux/tcp.h
_RTO_MAX_MS: Final = 44


def tune(raw: Any) -> bool:
    """Set the options of both sides; False if ``raw``, a connected socket, is no TCP socket."""
    if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    with suppress(OSError):  # it is gone again
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does so where it dials only
    if sys.platform != "linux":
        return True
    options: list[tuple[int, int | bytes]] = [(_THIN_LINEAR_TIMEOUTS, 1), (_RTO_MAX_MS, RTO_MAX_MS)]
    if on_this_host(raw):
        options.append((_CONGESTION, b"cubic"))  # there is no loss; other algorithms pace needlessly
    for option, value in options:
        with suppress(OSError):  # an older kernel: right too, only slower
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
    return True


def host_of(name: Any) -> str:
    """Return the address of a socket's peer without the port, which every new connection changes.

    An IPv6 address is shortened to its network, because a host has as many of those as it likes.
    """
    if not isinstance(name, tuple) or not name:
        return PROCESS_OF_THIS_HOST
    try:
        address = ipaddress.ip_address(str(name[0]).partition("%")[0])
    except ValueError:
        return str(name[0])
    if address.version == 4 or address.ipv4_mapped is not None:
        return str(address if address.version == 4 else address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))


def local(host: str) -> bool:
    """Return whether ``host``, as host_of() names it, is this one."""
    return host in (PROCESS_OF_THIS_HOST, _LOOPBACK_NETWORK) or host.startswith("127.")


def on_this_host(raw: Any) -> bool:
    """Return whether the peer is on this host, as far as its address tells."""
    if local_socket.unix(raw):
        return True
    try:
        address = str(raw.getpeername()[0])
    except (OSError, IndexError):
        return False
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"
