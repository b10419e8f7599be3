"""Receive buffers of one worker, lent to connections only while bytes are in them.

Idle connections hold none, so ten thousand of them cost no buffer memory; a buffer that batches of
this turn still lie in comes back at the end of the turn, after the log's write.
"""

from __future__ import annotations

from danube.limits import RECEIVE_BUFFER_BYTES

KEPT_MAX = 8


class ReceiveBuffer:
    """A writable buffer with the unread bytes ``start`` .. ``end``."""

    __slots__ = ("data", "end", "lent", "size", "start", "view")

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = bytearray(size)
        self.view = memoryview(self.data)
        self.start = 0
        self.end = 0
        self.lent = False  # batches of this turn lie in it


class ReceiveBuffers:
    """The pool; one for each worker, used from its loop only."""

    def __init__(self, size: int = RECEIVE_BUFFER_BYTES) -> None:
        self._size = size
        self._free: list[ReceiveBuffer] = []
        self._lent: list[ReceiveBuffer] = []

    def take(self, wanted: int = 0) -> ReceiveBuffer:
        """An empty buffer with room for at least ``wanted`` bytes."""
        if wanted <= self._size and self._free:
            return self._free.pop()
        return ReceiveBuffer(max(self._size, wanted))

    def lend(self, buffer: ReceiveBuffer) -> None:
        """Batches in this buffer are referred to until the end of the turn."""
        if not buffer.lent:
            buffer.lent = True
            self._lent.append(buffer)

    def give_back(self, buffer: ReceiveBuffer) -> None:
        """The connection needs the buffer no more; it is reused when its batches are written."""
        buffer.start = buffer.end = 0
        if not buffer.lent and buffer.size == self._size and len(self._free) < KEPT_MAX:
            self._free.append(buffer)
        elif buffer.lent:
            buffer.start = -1  # free at the end of the turn

    def end_turn(self) -> None:
        """The log has written: batches no longer lie in any buffer."""
        for buffer in self._lent:
            buffer.lent = False
            if buffer.start < 0:
                self.give_back(buffer)
        self._lent.clear()
