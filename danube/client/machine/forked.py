"""The child of a fork shares its parent's connections: how it lets go of a socket without a word."""

from __future__ import annotations

import os
import socket


def let_go(descriptor: int) -> None:
    """Put a socket that is at its end where the parent's was, so that the connection is the parent's alone.

    The number stays taken, because an event loop and a socket object may still know it and would close
    what has it next.  Neither shutdown() nor a selector may be asked: a connection and an epoll set are
    shared with the parent.
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
