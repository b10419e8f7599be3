"""Open sockets from one worker to another, each with the bytes that were read from it and not used.

A worker has a pair of Unix sockets: its own end to take from, and one that all others send to.  A message
is one descriptor (SCM_RIGHTS, unix(7)) and those bytes.  The supervisor keeps both ends of every pair, so
what waits for a worker that died is taken by its replacement, as in the backlog of a listener.
"""

from __future__ import annotations

import os
import socket
from typing import Final

UNREAD_BYTES_MAX: Final = 64 * 1024  # of one message; a socket's buffer holds several

Pair = tuple[socket.socket, socket.socket]  # where the worker takes from, where others send to


def open_pairs(workers: int) -> tuple[Pair, ...]:
    """A pair for each worker, before any is forked; none where there is nobody to pass anything to."""
    if workers == 1:
        return ()
    pairs = tuple(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(workers))
    for end in (end for pair in pairs for end in pair):
        end.setblocking(False)
    return pairs


def close_pairs(pairs: tuple[Pair, ...]) -> None:
    for pair in pairs:
        for end in pair:
            end.close()


class Passage:
    """One worker's side of it."""

    __slots__ = ("_own", "_towards")

    def __init__(self, worker: int, pairs: tuple[Pair, ...]) -> None:
        """In the process of ``worker``: what others take from is closed here."""
        self._own = pairs[worker][0]
        self._towards = [towards for _, towards in pairs]
        for other, (end, _) in enumerate(pairs):
            if other != worker:
                end.close()

    def fileno(self) -> int:
        """Readable while something waits."""
        return self._own.fileno()

    def send(self, worker: int, descriptor: int, unread: bytes | memoryview) -> bool:
        """Give ``worker`` the socket, which the caller closes then; False when it cannot take more now."""
        if len(unread) > UNREAD_BYTES_MAX:
            return False
        try:
            socket.send_fds(self._towards[worker], [unread], [descriptor])
        except OSError:  # its queue is full, or too many descriptors are on their way
            return False
        return True

    def receive(self) -> tuple[socket.socket | None, bytes] | None:
        """The next socket and its bytes; None when nothing waits.

        The socket is None where this process had no descriptor left for it: it is closed then.
        """
        try:
            unread, descriptors, _, _ = socket.recv_fds(self._own, UNREAD_BYTES_MAX, 1)
        except BlockingIOError:
            return None
        for descriptor in descriptors:  # recv_fds() does not hand MSG_CMSG_CLOEXEC on
            os.set_inheritable(descriptor, False)
        return (socket.socket(fileno=descriptors[0]) if descriptors else None), unread

    def close(self) -> None:
        self._own.close()
        for towards in self._towards:
            towards.close()
