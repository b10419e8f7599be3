"""The server's side of one HTTP/2 connection as a machine without a socket (RFC 9113).

Bytes and the time go into ``receive``. The handler gets requests, data and cancelled streams; ``output``
collects the bytes to send.  Only whole frames are taken, so the result does not depend on how the bytes were
cut.  No input of a peer raises an exception.  A fault of one stream resets that stream.  A fault of the
connection queues GOAWAY and sets ``failed``; the door then sends ``output`` and closes.

Flow control of received data is explicit: bytes given to ``data`` count against both windows until the door
calls ``consumed``, even if the stream has ended meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np

from danube.core import kernels
from danube.core.http2.control import ControlSide, foreign_greeting
from danube.core.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    HEADERS,
    KIND_NAMES,
    PADDED,
    PREFACE,
    SETTINGS,
    STREAM_ID_MASK,
    UINT32,
    WINDOW_BYTES_DEFAULT,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    ErrorCode,
    Http2Settings,
    ping_frame,
    reset_frame,
    uint32,
    window_frame,
)
from danube.core.http2.headers import RequestDecoder
from danube.core.http2.request import RequestHead, trailers_fault
from danube.core.http2.streams import Http2Handler, Stream
from danube.errors import ProtocolError, broken

__all__ = ["Http2Handler", "Http2Settings", "RequestHead", "ServerConnection", "Stream"]

KEEPALIVE_PING: Final = b"\0danube\0"
TOGETHER_MIN: Final = 4  # calls in one receive; fewer cost less frame by frame
_TOGETHER_MAX: Final = 256
_TRIES: Final = 2  # more, behind other frames: each copies the rest of the buffer
_EMPTY: Final = memoryview(b"")
_PREFACE_PENDING: Final = 1  # the kind of frame that must come next; 0: any
_SETTINGS_PENDING: Final = 2
_CONTINUATION_PENDING: Final = 3
_Decoded = TypeVar("_Decoded")


class ServerConnection(ControlSide):
    """One connection of a client.  ``wanted`` is how many bytes the next ``receive`` needs at least.

    While the door stops reading on purpose it sets ``reading_paused``, so that no timer blames the peer.
    """

    def __init__(self, handler: Http2Handler, settings: Http2Settings, now_ns: int) -> None:
        super().__init__(handler, settings, now_ns)
        self.wanted = len(PREFACE)
        self.reading_paused = False
        self._requests = RequestDecoder(settings)
        self._heads = self._requests.heads
        self._streams_max = settings.max_concurrent_streams
        self._frame_bytes_max = settings.max_frame_bytes
        self._pending = _PREFACE_PENDING
        self._block: bytearray | None = None
        self._block_stream_id = 0
        self._block_ended = False
        self._block_frames = 0
        self._receive_window = settings.connection_window_bytes
        self._stream_window = settings.initial_window_bytes
        self.calls_received = 0  # at once, last time
        self._consumed = 0
        self._consumed_batch = settings.connection_window_bytes // 2
        self._consumed_batch_of_stream = settings.initial_window_bytes // 2
        self.output.append(settings.greeting())
        if self._receive_window > WINDOW_BYTES_DEFAULT:
            self.output.append(window_frame(0, self._receive_window - WINDOW_BYTES_DEFAULT))

    def receive(self, buffer: memoryview, start: int, end: int, now_ns: int) -> int:
        """Take all whole frames of ``buffer[start:end]``; returns the position after the last one."""
        self._now_ns = self._timers.heard_ns = now_ns
        if self._pending == _PREFACE_PENDING:
            start = self._take_preface(buffer, start, end)
            if self._pending == _PREFACE_PENDING:
                return end if self.failed else start
        unpack, number, streams = FRAME_HEADER.unpack_from, UINT32.unpack_from, self.streams
        first, last_stream_id = start, self.last_stream_id
        tries = _TRIES if self.calls_received >= TOGETHER_MIN and kernels.available else 0
        if tries and not self._pending:
            start = self._take_together(buffer, start, end)
        body = start + FRAME_HEADER_BYTES
        while body <= end and not self.failed:
            word, flags, stream_id = unpack(buffer, start)
            size = word >> 8
            start = body + size
            if start > end or size > self._frame_bytes_max:
                start = body - FRAME_HEADER_BYTES
                if size <= self._frame_bytes_max:
                    self.calls_received = self.last_stream_id - last_stream_id >> 1
                    self._want(FRAME_HEADER_BYTES + size, progress=start > first)
                    return start
                self._too_large(word & 0xFF, size)
                break
            kind = word & 0xFF
            if kind == DATA and flags <= END_STREAM and not self._pending and stream_id in streams:
                self._data(streams[stream_id], buffer[body:start], size, flags)
            elif (
                kind == HEADERS
                and flags | END_STREAM == END_HEADERS | END_STREAM
                and not self._pending
                and self.last_stream_id < stream_id <= STREAM_ID_MASK
            ):
                self._open(stream_id, buffer[body:start].tobytes(), flags & END_STREAM != 0)
            else:
                if kind == WINDOW_UPDATE and size == 4 and not self._pending:
                    (increment,) = number(buffer, body)
                    self._window_update(stream_id & STREAM_ID_MASK, increment & STREAM_ID_MASK)
                else:
                    self._frame(kind, flags, stream_id & STREAM_ID_MASK, buffer[body:start])
                if tries and not self._pending and not self.failed:
                    tries -= 1
                    start = self._take_together(buffer, start, end)
            body = start + FRAME_HEADER_BYTES
        self.calls_received = self.last_stream_id - last_stream_id >> 1
        if self.failed:
            return end
        if start < end:
            self._want(FRAME_HEADER_BYTES, progress=start > first)
        else:
            self.wanted = FRAME_HEADER_BYTES
            self._timers.partial_since_ns = 0
        return start

    def consumed(self, stream: Stream | None, size: int) -> None:
        """Give ``size`` bytes that ``data`` was told of back to the peer; None: of a forgotten stream."""
        self._consumed += size
        if self._consumed >= self._consumed_batch:
            self._receive_window += self._consumed
            if self._receive_window > self._settings.connection_window_bytes:
                broken("more was consumed than received", window=self._receive_window, size=size)
            if not self.failed:
                self.output.append(window_frame(0, self._consumed))
            self._consumed = 0
        if stream is not None and not stream.remote_closed:
            stream.consumed_bytes += size
            if stream.consumed_bytes >= self._consumed_batch_of_stream:
                stream.receive_window += stream.consumed_bytes
                self.output.append(window_frame(stream.stream_id, stream.consumed_bytes))
                stream.consumed_bytes = 0

    def tick(self, now_ns: int) -> None:
        """Ask a silent peer, give up a slow one; call it about once a second."""
        self._now_ns = now_ns
        timers = self._timers
        if self.failed:
            return
        if self.reading_paused:
            timers.postpone(now_ns)
            return
        overdue = timers.overdue(now_ns)
        if overdue is not None:
            self._fail(*overdue)
        elif timers.silent(now_ns):
            timers.asked_ns = now_ns
            self.output.append(ping_frame(KEEPALIVE_PING, answer=False))
            self._requests.forget()

    # -- the start, and what is between frames -------------------------------------------------------

    def _take_preface(self, buffer: memoryview, start: int, end: int) -> int:
        found = buffer[start : min(end, start + len(PREFACE))].tobytes()
        if found == PREFACE:
            self._pending = _SETTINGS_PENDING
            return start + len(PREFACE)
        if found:
            self._want(len(PREFACE), progress=False)
        if not PREFACE.startswith(found):
            self.failed = foreign_greeting(found)
            self.closing = True
        return start

    def _want(self, size: int, *, progress: bool) -> None:
        """Note that part of a frame is there and its rest is due."""
        self.wanted = size
        if progress or not self._timers.partial_since_ns:
            self._timers.partial_since_ns = self._now_ns

    def _too_large(self, kind: int, size: int) -> None:
        name = KIND_NAMES[kind] if kind < len(KIND_NAMES) else "unknown"
        self._fail(
            ErrorCode.FRAME_SIZE_ERROR, f"{name} frame of {size} bytes, more than {self._frame_bytes_max}"
        )

    def _frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        """Any frame but the two that calls are made of."""
        if self._pending and not self._expected(kind, flags, stream_id):
            return
        if kind == DATA:
            self._odd_data(flags, stream_id, payload)
        elif kind == HEADERS:
            self._odd_headers(flags, stream_id, payload)
        elif kind == CONTINUATION:
            self._continuation(flags, stream_id, payload)
        else:
            self._control_frame(kind, flags, stream_id, payload)

    def _expected(self, kind: int, flags: int, stream_id: int) -> bool:
        if self._pending == _SETTINGS_PENDING:
            if kind != SETTINGS or flags & 1:
                self._fail(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
                return False
            self._pending = 0
            self._timers.greeted_by_ns = 0
            return True
        if kind == CONTINUATION and stream_id == self._block_stream_id:
            return True
        self._fail(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted by another frame")
        return False

    # -- requests --------------------------------------------------------------------------------

    def _open(self, stream_id: int, block: bytes, ended: bool) -> None:
        """A whole header block with an id above all that were."""
        head = self._heads.get(block) or self._decoded(self._requests.head, block)
        if head is None:
            return
        if (stream_id != self.last_stream_id + 2 or stream_id == 2) and not self._opened_apart(stream_id):
            return
        self.last_stream_id = stream_id
        if len(self.streams) >= self._streams_max or self.closing:
            self._refuse(stream_id)
            return
        stream = Stream(stream_id, head, self._peer_window, self._stream_window, ended)
        self.streams[stream_id] = stream
        if head.unusual and self._unusual(stream, ended):
            return
        self._handler.request(stream, ended)

    def _decoded(self, decode: Callable[[bytes], _Decoded], block: bytes) -> _Decoded | None:
        try:
            return decode(block)
        except ProtocolError as error:
            self._fail(error.facts.get("code", ErrorCode.COMPRESSION_ERROR), str(error))
            return None

    def _opened_apart(self, stream_id: int) -> bool:
        """The id is not the next one: the ids between are skipped for good."""
        if not stream_id & 1:
            self._fail(ErrorCode.PROTOCOL_ERROR, f"a client cannot open stream {stream_id}")
            return False
        start = self.last_stream_id + 1
        if start < stream_id:
            self._ended.skip(start, stream_id)
        return True

    def _refuse(self, stream_id: int) -> None:
        self.output.append(reset_frame(stream_id, ErrorCode.REFUSED_STREAM))
        self._ended.reset(stream_id, by_peer=False)
        if not self.closing:
            self._charge_reset()
        else:
            self._charge(1)

    def _unusual(self, stream: Stream, ended: bool) -> bool:
        """True when the stream is malformed and already over."""
        head = stream.head
        stream.body_left = head.content_length
        fault = head.malformed
        if not fault and ended and head.content_length > 0:
            fault = "a content length and no body"
        if fault:
            self._stream_error(stream, ErrorCode.PROTOCOL_ERROR, told=False)
        return bool(fault)

    def _odd_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """HEADERS with padding, priority, more to come, or for a stream that was opened before."""
        block = self._unpadded("HEADERS", flags, stream_id, payload)
        if block is None:
            return
        if flags & WITH_PRIORITY:
            if len(block) < 5:
                self._fail(ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short for its priority")
                return
            if uint32(block) & STREAM_ID_MASK == stream_id:
                self._fail(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
                return
            block = block[5:]
        if flags & END_HEADERS:
            self._whole_block(stream_id, block.tobytes(), flags & END_STREAM != 0)
            return
        self._pending = _CONTINUATION_PENDING
        self._block = bytearray(block)
        self._block_stream_id = stream_id
        self._block_ended = flags & END_STREAM != 0
        self._block_frames = 0
        self._timers.block_since_ns = self._now_ns

    def _continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if self._block is None:
            self._fail(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a header block")
            return
        self._block_frames += 1
        self._block += payload
        settings = self._settings
        if (
            self._block_frames > settings.continuation_frames_max
            or len(self._block) > settings.header_list_bytes_max + settings.max_frame_bytes
        ):
            self._fail(ErrorCode.ENHANCE_YOUR_CALM, "a header block has too many parts or bytes")
        elif flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            self._pending = 0
            self._timers.block_since_ns = 0
            self._whole_block(stream_id, block, self._block_ended)

    def _whole_block(self, stream_id: int, block: bytes, ended: bool) -> None:
        if stream_id > self.last_stream_id:
            self._open(stream_id, block, ended)
            return
        fields = self._decoded(self._requests.fields, block)  # whatever becomes of it, the table must know
        if fields is None:
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._late_frame(stream_id, "HEADERS")
        elif stream.remote_closed:
            self._stream_error(stream, ErrorCode.STREAM_CLOSED)
        elif not ended or trailers_fault(fields) or stream.body_left > 0:
            self._stream_error(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.remote_closed = True
            self._handler.data(stream, _EMPTY, True)

    def _take_together(self, buffer: memoryview, start: int, end: int) -> int:
        """Take whole calls that are all alike, if the buffer begins with some; returns where they end.

        If anything is unusual no call is taken; processing frame by frame then finds the fault.
        """
        if start == end:
            return start
        data = buffer[start:end].tobytes()
        found, told = np.empty((3, _TOGETHER_MAX), np.int64), np.empty(7, np.int64)
        kernels.compiled.scan_calls(
            np.frombuffer(data, np.uint8), self.last_stream_id, self._frame_bytes_max, found, told
        )
        taken, opened, block, block_end, count, total, largest = told.tolist()
        ids, starts, ends = found[:, :count].tolist()
        head = self._heads.get(data[block:block_end]) if opened else None
        if (
            not taken
            or total > self._receive_window
            or largest > self._stream_window
            or (opened and (head is None or head.malformed or not self._room_for(opened)))
            or not self._awaited(ids, starts, ends, -1 if head is None else head.content_length)
        ):
            return start
        if head is not None:
            self._open_together(head, opened)
        streams = self.streams
        awaited: list[Stream] = []
        messages: list[bytes] = []
        for stream_id, message, message_end in zip(ids, starts, ends, strict=True):
            stream = streams.get(stream_id)
            if stream is None:  # the door has refused it just now
                self._odd_data(END_STREAM, stream_id, memoryview(data)[message - 5 : message_end])
                total -= message_end - message + 5
                if self.failed:
                    return start + taken
                continue
            stream.remote_closed = True
            awaited.append(stream)
            messages.append(data[message:message_end])
        self._receive_window -= total
        if awaited:
            self._handler.messages(awaited, messages)
        return start + taken

    def _awaited(self, ids: list[int], starts: list[int], ends: list[int], length_of_new: int) -> bool:
        """Whether their streams take these messages as whole bodies; ``length_of_new`` is -1 for any."""
        for stream_id, start, end in zip(ids, starts, ends, strict=True):
            size, length = end - start + 5, length_of_new
            if stream_id <= self.last_stream_id:
                stream = self.streams.get(stream_id)
                if stream is None or stream.remote_closed or size > stream.receive_window:
                    return False
                length = stream.body_left
            elif length < 0:
                return True  # they ascend
            if length >= 0 and length != size:
                return False
        return True

    def _room_for(self, count: int) -> bool:
        return len(self.streams) + count <= self._streams_max and not self.closing

    def _open_together(self, head: RequestHead, count: int) -> None:
        first = self.last_stream_id + 2
        ids = range(first, first + 2 * count, 2)
        window, stream_window = self._peer_window, self._stream_window
        opened = [Stream(stream_id, head, window, stream_window, False) for stream_id in ids]
        if head.unusual:
            for stream in opened:
                stream.body_left = head.content_length
        self.streams.update(zip(ids, opened, strict=True))
        self.last_stream_id = ids[-1]
        self._handler.requests(opened)

    # -- data ------------------------------------------------------------------------------------

    def _data(self, stream: Stream, data: memoryview, size: int, ended: int) -> None:
        """DATA without padding of a stream that is known."""
        self._receive_window -= size
        stream.receive_window -= size
        if self._receive_window < 0:
            self._fail(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window of the connection")
            return
        if stream.remote_closed or stream.receive_window < 0:
            self.consumed(None, size)
            over = not stream.remote_closed
            self._stream_error(stream, ErrorCode.FLOW_CONTROL_ERROR if over else ErrorCode.STREAM_CLOSED)
            return
        if not size and not ended and not self._charge(1):
            return
        if stream.body_left >= 0:
            stream.body_left -= size
            if stream.body_left < 0 or (ended and stream.body_left):
                self.consumed(None, size)
                self._stream_error(stream, ErrorCode.PROTOCOL_ERROR)
                return
        if ended:
            stream.remote_closed = True
            self._handler.data(stream, data, True)
        else:
            self._handler.data(stream, data, False)

    def _odd_data(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """DATA with padding, or of a stream that is not open."""
        data = self._unpadded("DATA", flags, stream_id, payload)
        if data is None:
            return
        padding = len(payload) - len(data)
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._receive_window -= padding
            stream.receive_window -= padding
            self._data(stream, data, len(data), flags & END_STREAM)
            if padding and not self.failed:
                self.consumed(stream, padding)
            return
        self._receive_window -= len(payload)
        if self._receive_window < 0:
            self._fail(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window of the connection")
        elif self._late_frame(stream_id, "DATA"):
            self.consumed(None, len(payload))

    def _unpadded(self, name: str, flags: int, stream_id: int, payload: memoryview) -> memoryview | None:
        if stream_id == 0:
            self._fail(ErrorCode.PROTOCOL_ERROR, f"{name} on stream 0")
            return None
        if not flags & PADDED:
            return payload
        if not payload or payload[0] >= len(payload):
            self._fail(ErrorCode.PROTOCOL_ERROR, "padding is longer than its frame")
            return None
        return payload[1 : len(payload) - payload[0]]

    # -- faults ----------------------------------------------------------------------------------

    def _late_frame(self, stream_id: int, name: str) -> bool:
        """HEADERS or DATA for a stream that is not open; False when the connection failed."""
        ended = self._ended
        if stream_id > self.last_stream_id or ended.was_skipped(stream_id) or not stream_id & 1:
            self._fail(ErrorCode.PROTOCOL_ERROR, f"{name} on stream {stream_id}, which was never open")
        elif ended.reset_by_us(stream_id):
            return self._charge(1)
        elif ended.reset_by_peer(stream_id):
            self.output.append(reset_frame(stream_id, ErrorCode.STREAM_CLOSED))
            return self._charge_reset()
        else:
            self._fail(ErrorCode.STREAM_CLOSED, f"{name} on stream {stream_id}, which has ended")
        return not self.failed
