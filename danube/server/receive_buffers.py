"""Receive buffers of a worker: one scratch buffer for all sockets, and rests of unfinished frames.

A read goes into the scratch buffer, behind what the turn has read before.  Frames are used where they lie,
until the end of the turn; then the buffer is empty again.  So a connection that is idle, that ends or that
sends whole frames holds nothing.  The beginning of a frame that is not whole yet belongs to its connection:
it is copied into a block at most twice as large.  A few connections that have sent much keep the buffer
itself instead, because copies of parts of large batches would cost more than a tenth of a bulk send.
"""

from __future__ import annotations

from danube.limits import RECEIVE_BUFFER_BYTES

KEPT_MAX = 8  # buffers that wait to be used again
LARGE_MAX = 16  # connections that may keep a whole buffer, if they have sent as much
LENT_BYTES_MAX = 32 * 1024 * 1024  # read in one turn; then batches are written before more is read
ROOM_MIN = 64 * 1024
BLOCK_BYTES_MIN = 64


class ReceiveBuffer:
    """A writable buffer with the unread bytes ``start`` .. ``end``."""

    __slots__ = ("data", "end", "large", "lent", "size", "start", "view")

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = bytearray(size)
        self.view = memoryview(self.data)
        self.start = 0
        self.end = 0
        self.lent = False  # batches of this turn lie in it
        self.large = False  # one of LARGE_MAX

    @property
    def unread_bytes(self) -> int:
        return self.end - self.start


class ReceiveBuffers:
    """The scratch buffer and the buffers of connections of one worker, used only from its loop."""

    def __init__(self, size: int = RECEIVE_BUFFER_BYTES) -> None:
        self._size = size
        self.scratch = ReceiveBuffer(size)
        self._read_at = 0  # where the last read into it began
        self._free: list[ReceiveBuffer] = []
        self._lent: list[ReceiveBuffer] = []
        self.lent_bytes = 0  # which batches of this turn keep from being used again
        self._large_count = 0

    def room(self, held: ReceiveBuffer | None, wanted: int) -> tuple[memoryview, ReceiveBuffer | None]:
        """Return the room for a connection's next bytes, and the buffer it keeps now.

        ``wanted`` is the size of the frame that ``held`` begins with.
        """
        if held is None:
            scratch = self.scratch
            if 2 * scratch.end > self._size:  # too little room is left for a large read
                self.lend(scratch)
                scratch.start = -1  # free at the end of the turn
                scratch = self.scratch = self._take()
            return scratch.view[scratch.end :], None
        if held.large:
            missing = min(wanted, self._size) - held.unread_bytes
            if held.size - held.end < max(missing, ROOM_MIN):
                held = self._widen(held, max(self._size, min(wanted + ROOM_MIN, 2 * held.unread_bytes)))
            return held.view[held.end :], held
        end = held.start + wanted
        if held.end >= min(end, held.size):
            size = max(min(wanted, 2 * held.unread_bytes), held.unread_bytes + BLOCK_BYTES_MIN)
            held = self._widen(held, size)
            end = wanted if wanted > held.end else held.size
        return held.view[held.end : end], held

    def received(self, held: ReceiveBuffer | None, count: int) -> ReceiveBuffer:
        """So many bytes were read into the last room: the buffer that they lie in."""
        if held is None:
            held = self.scratch
            held.start = self._read_at = held.end
        held.end += count
        return held

    def keep(self, buffer: ReceiveBuffer, wanted: int, *, earned: bool) -> ReceiveBuffer | None:
        """Return the buffer that a connection keeps once its whole frames are taken; None if none is left.

        ``wanted`` is the size of the frame that is not whole.  ``earned``: the connection has sent so much
        that it may keep a buffer of full size.
        """
        unread = buffer.end - buffer.start
        if buffer is not self.scratch:
            self.lend(buffer)
            if not unread:
                self.give_back(buffer)
            return buffer if unread else None
        if not unread:
            return None
        if earned and self._large_count < LARGE_MAX:
            self._large_count += 1
            buffer.large = True
            self.lend(buffer)
            self.scratch = self._take()
            return buffer
        block = ReceiveBuffer(max(unread, min(wanted, 2 * unread), BLOCK_BYTES_MIN))
        block.data[:unread] = buffer.view[buffer.start : buffer.end]
        block.end = unread
        if buffer.start == self._read_at:
            buffer.end = self._read_at  # no frame lies behind this place
        return block

    def lend(self, buffer: ReceiveBuffer) -> None:
        """Batches in this buffer are referred to until the end of the turn."""
        if not buffer.lent:
            buffer.lent = True
            self._lent.append(buffer)
            self.lent_bytes += buffer.size

    def give_back(self, buffer: ReceiveBuffer) -> None:
        """Release a connection's buffer; it is reused when its batches are written."""
        if buffer.large:
            buffer.large = False
            self._large_count -= 1
        if buffer.lent:
            buffer.start = -1  # free at the end of the turn
            return
        buffer.start = buffer.end = 0
        if buffer.size == self._size and len(self._free) < KEPT_MAX:
            self._free.append(buffer)

    def end_turn(self) -> None:
        """The log has written: batches no longer lie in any buffer."""
        self.scratch.end = 0
        if self._lent:
            lent, self._lent, self.lent_bytes = self._lent, [], 0
            for buffer in lent:
                buffer.lent = False
                if buffer.start < 0:
                    self.give_back(buffer)

    def _take(self) -> ReceiveBuffer:
        return self._free.pop() if self._free else ReceiveBuffer(self._size)

    def _widen(self, held: ReceiveBuffer, size: int) -> ReceiveBuffer:
        """Move the unread bytes to the front of a buffer of ``size``."""
        wider = self._take() if size == self._size and held.large else ReceiveBuffer(size)
        unread = held.unread_bytes
        wider.data[:unread] = held.view[held.start : held.end]
        wider.start, wider.end = 0, unread
        wider.large, held.large = held.large, False
        self.give_back(held)
        return wider
