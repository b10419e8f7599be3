"""Peer credentials (pid, uid) of a Unix socket.

An abstract address has no permissions: any process that guesses it can connect, or listen there.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred, unix(7): process, user, group


def peer_of(raw: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the peer.  For an outgoing connection: of the process that called listen()."""
    told = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(told)
    return process, user


def same_user(raw: socket.socket) -> bool:
    """Whether the process at the other end is of this one's user."""
    return peer_of(raw)[1] == os.geteuid()
