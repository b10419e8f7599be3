"""A loopback of one's own, so that all products use the same congestion control and no port is taken.

Danube asks for cubic on its sockets; a peer takes what the machine gives, and bbr costs a third on loopback.
A network namespace has a default of its own, so both sides get the same and nothing changes outside.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
WANTED = ("cubic", "reno")  # equal on loopback; a namespace may be refused the first


def enter_own_network() -> str:
    """Move this process, which has one thread yet, into a namespace of its own; says what the network is."""
    spaces = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET
    if ctypes.CDLL(None, use_errno=True).unshare(spaces):
        reason = os.strerror(ctypes.get_errno())
        return f"the machine's loopback, {congestion_control()} (no namespace of its own: {reason})"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", IFF_UP, b""))
    for name in WANTED:
        try:
            CONTROL.write_text(name)
            break
        except OSError:
            continue
    return f"a loopback of its own, {congestion_control()}"


def congestion_control() -> str:
    """What new TCP sockets use here unless they ask for something else."""
    try:
        return CONTROL.read_text().strip()
    except OSError:
        return "unknown"
