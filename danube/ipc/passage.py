"""Passing open sockets from one worker to another, each with the bytes that were read from it and not used.

A worker has a pair of Unix sockets: it receives from one end, and all other workers send to the other end.  A
message is one descriptor (SCM_RIGHTS, unix(7)), a head with the door's name and the number of bytes sent on
the socket, what one door tells the other, and the unused bytes.  The supervisor keeps both ends of every
pair.  So the replacement of a dead worker receives its waiting sockets, as from the backlog of a listener.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final, NamedTuple

_HEAD: Final = struct.Struct("<16sQH")  # the door's name, bytes sent, and bytes of what is told
TOLD_BYTES_MAX: Final = 1024  # an identity, for one
UNREAD_BYTES_MAX: Final = 128 * 1024  # of one message
BUFFER_BYTES: Final = 4 * UNREAD_BYTES_MAX  # asked for; the kernel gives what net.core.wmem_max allows

Pair = tuple[socket.socket, socket.socket]  # where the worker takes from, where others send to


class Passed(NamedTuple):
    """A connection that comes from another worker."""

    raw: socket.socket | None  # None where this process had no descriptor left for it: it is closed then
    door: str
    sent_bytes: int  # that the client has, or that the kernel has for it
    unread: bytes
    told: bytes = b""  # by the other door to this one


def open_pairs(workers: int) -> tuple[Pair, ...]:
    """Make a socket pair for each worker, before any is forked; none for a single worker."""
    if workers == 1:
        return ()
    pairs = tuple(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(workers))
    for own, towards in pairs:
        towards.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        own.setblocking(False)
        towards.setblocking(False)
    return pairs


def close_pairs(pairs: tuple[Pair, ...]) -> None:
    for pair in pairs:
        for end in pair:
            end.close()


class Passage:
    """One worker's side of it."""

    def __init__(self, worker: int, pairs: tuple[Pair, ...]) -> None:
        """Open the ends for the process of ``worker``; the receiving ends of others are closed."""
        self._own = pairs[worker][0]
        self._towards = [towards for _, towards in pairs]
        for other, (end, _) in enumerate(pairs):
            if other != worker:
                end.close()

    def fileno(self) -> int:
        """Readable while something waits."""
        return self._own.fileno()

    def send(
        self,
        worker: int,
        descriptor: int,
        door: str,
        sent_bytes: int,
        unread: bytes | bytearray | memoryview,
        told: bytes = b"",
    ) -> bool:
        """Give ``worker`` the socket, which the caller closes then; False when it cannot take more now."""
        if len(unread) > UNREAD_BYTES_MAX or len(told) > TOLD_BYTES_MAX:
            return False
        head = _HEAD.pack(door.encode("ascii"), sent_bytes, len(told))
        try:
            socket.send_fds(self._towards[worker], [head, told, unread], [descriptor])
        except OSError:  # its queue is full, or too many descriptors are on their way
            return False
        return True

    def receive(self) -> Passed | None:
        """The next socket and its bytes; None when nothing waits."""
        try:
            size_max = _HEAD.size + TOLD_BYTES_MAX + UNREAD_BYTES_MAX
            message, descriptors, _, _ = socket.recv_fds(self._own, size_max, 1)
        except BlockingIOError:
            return None
        for descriptor in descriptors:  # recv_fds() does not hand MSG_CMSG_CLOEXEC on
            os.set_inheritable(descriptor, False)
        raw = socket.socket(fileno=descriptors[0]) if descriptors else None
        door, sent_bytes, told_bytes = _HEAD.unpack_from(message)
        told, unread = message[_HEAD.size : _HEAD.size + told_bytes], message[_HEAD.size + told_bytes :]
        return Passed(raw, door.rstrip(b"\0").decode("ascii"), sent_bytes, unread, told)

    def close(self) -> None:
        self._own.close()
        for towards in self._towards:
            towards.close()
