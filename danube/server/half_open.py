"""Connections whose peer has vanished without closing: a host without power, a cut cable.

The peer sends no word, and records delivered to it wait for acks that never come.  The kernel's keepalive
probes a connection without unsent bytes.  With unsent bytes keepalive pauses, and the kernel would repeat
them for a quarter of an hour.  So the broker asks the kernel for how long nothing has come back.
``TCP_USER_TIMEOUT`` would do both, but also ends a connection whose peer is slow to read.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Any, Final

from danube.host import local_socket, tcp

GONE_MS: Final = 30_000
KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # 25 s in all
_UNSENT: Final = 0x5411  # SIOCOUTQ, linux/sockios.h
_COUNT: Final = struct.Struct("=i")
_INFO: Final = getattr(socket, "TCP_INFO", 11)
_INFO_BYTES: Final = 60  # of struct tcp_info, linux/tcp.h
_RETRANSMITS: Final = 2
_LAST_ACK_RECEIVED: Final = struct.Struct("=56xI")  # milliseconds ago
_BYTES_ACKED: Final = struct.Struct("=120xQ")
_ALL_BYTES: Final = 1 << 62  # more than any connection sends


def tune_socket(raw: Any) -> None:
    """Set the options of every connection, which include probes for a vanished peer."""
    if not tcp.tune(raw):
        local_socket.tune(raw)
        return
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in KEEPALIVE.items():
        if hasattr(socket, name):
            raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def unsent_bytes(descriptor: int) -> int:
    """Return the bytes in the kernel that the peer has not taken; 0 if the kernel does not show it."""
    try:
        (count,) = _COUNT.unpack(fcntl.ioctl(descriptor, _UNSENT, bytes(_COUNT.size)))
    except (OSError, ValueError):
        return 0
    return int(count)


def untaken_bytes(raw: Any) -> int:
    """Return a number that falls whenever the peer takes bytes of a connection with unsent ones.

    Between TLS and the kernel lie bytes that no transport shows.  So the kernel is asked how many bytes the
    peer has taken in all.
    """
    try:
        info = raw.getsockopt(socket.IPPROTO_TCP, _INFO, _BYTES_ACKED.size)
    except OSError:  # the socket was closed meanwhile, or this kernel does not show it
        return _ALL_BYTES
    taken = _BYTES_ACKED.unpack(info)[0] if len(info) == _BYTES_ACKED.size else 0
    return _ALL_BYTES - int(taken)


def gone(raw: Any) -> bool:
    """Return whether the kernel repeats sent data and has received nothing for GONE_MS.

    A peer that merely does not read gets window probes, which are no repetitions, and answers them.
    """
    if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        info = raw.getsockopt(socket.IPPROTO_TCP, _INFO, _INFO_BYTES)
    except OSError:  # the socket was closed meanwhile, or this kernel does not show it
        return False
    if len(info) < _INFO_BYTES or not info[_RETRANSMITS]:
        return False
    (silent_ms,) = _LAST_ACK_RECEIVED.unpack_from(info)
    return bool(silent_ms > GONE_MS)
