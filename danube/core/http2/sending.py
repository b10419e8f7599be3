"""The sending side of an HTTP/2 server connection: answers, both windows, a fair line of waiting streams.

Bytes that the windows allow go into ``output`` at once; the rest waits in its stream.  Streams that only the
connection's window holds back are in a queue and take turns of one frame.  A stream whose own window is used
up is in no queue; its WINDOW_UPDATE adds it again, so each update costs only the frames that it sends.

Floods: how many frames without useful work a peer may send.

Two allowances fill with time and with useful work, and are spent by what a peer can repeat cheaply:

    control  PING, SETTINGS, PRIORITY, WINDOW_UPDATE, unknown frames, empty DATA, frames for streams
             that ended, pieces of DATA that a tiny window made; each call and each DATA frame that
             was sent for its own sake earns some, because clients answer those with such frames
    resets   calls that the peer resets, that are refused or malformed; each call that was not earns
             a part of one, so cancelling a share of many calls is fine

A client at 100,000 calls/s stays far below both.  A peer that only floods uses up its allowance in a fraction
of a second and gets ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

from danube.core.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MIN,
    FRAME_HEADER,
    HEADERS,
    WINDOW_BYTES_DEFAULT,
    ErrorCode,
    Http2Settings,
    goaway_frame,
    reset_frame,
)
from danube.core.http2.streams import ENDED_STREAMS_MIN, EndedStreams, Http2Handler, Stream

CONTROL_BURST: Final = 10_000
CONTROL_PER_SECOND: Final = 1_000
CONTROL_PER_CALL: Final = 4
CONTROL_PER_DATA: Final = 2
RESETS_BURST: Final = 2_000
RESETS_PER_SECOND: Final = 100
CALLS_PER_RESET: Final = 4
_SECOND_NS: Final = 1_000_000_000


class FloodGuard:
    """Both allowances of one connection.  Times in ns; calls and DATA frames are running totals."""

    __slots__ = ("_calls_seen", "_data_seen", "_filled_ns", "_resets", "control_left", "resets_count")

    def __init__(self, now_ns: int) -> None:
        self._filled_ns = now_ns
        self.control_left = float(CONTROL_BURST)
        self._resets = float(RESETS_BURST)
        self._calls_seen = 0
        self._data_seen = 0
        self.resets_count = 0

    def control(self, cost: int, now_ns: int, calls: int, data_frames: int) -> bool:
        """Spend ``cost``; False when there is no more."""
        self.control_left -= cost
        if self.control_left >= 0:
            return True
        self._fill(now_ns, calls, data_frames)
        return self.control_left >= 0

    def reset(self, now_ns: int, calls: int, data_frames: int) -> bool:
        """Spend one reset; False when there is no more."""
        self.resets_count += 1
        self._resets -= 1
        if self._resets >= 0:
            return True
        self._fill(now_ns, calls, data_frames)
        return self._resets >= 0

    def _fill(self, now_ns: int, calls: int, data_frames: int) -> None:
        seconds = max(0, now_ns - self._filled_ns) / _SECOND_NS
        calls_new, data_new = calls - self._calls_seen, data_frames - self._data_seen
        earned = calls_new * CONTROL_PER_CALL + data_new * CONTROL_PER_DATA
        useful = max(0, calls_new - self.resets_count)
        self.control_left = min(CONTROL_BURST, self.control_left + seconds * CONTROL_PER_SECOND + earned)
        self._resets = min(
            RESETS_BURST, self._resets + seconds * RESETS_PER_SECOND + useful / CALLS_PER_RESET
        )
        self._filled_ns = now_ns
        self._calls_seen, self._data_seen, self.resets_count = calls, data_frames, 0


_SMALL_PIECE_BYTES = 256  # a shorter DATA frame that a window made is charged to the peer
_ANSWERS_MAX = 64  # that become one piece of output
_pack = FRAME_HEADER.pack


@lru_cache(maxsize=1024)
def _answers_layout(count: int, head: int, body: int, trailers: int) -> Struct:
    """The frames of ``count`` answers with so many bytes in each: one call instead of nine for every one."""
    return Struct(">" + f"5sI{head + 5}sI{body + 5}sI{trailers}s" * count)


@lru_cache(maxsize=256)
def _answer_parts(head: bytes, size: int, trailers: bytes) -> tuple[bytes, bytes, bytes]:
    """Build the fixed bytes before the three stream ids of such an answer, without its body."""
    opening, body, closing = (
        _pack(size << 8 | kind, flags, 0)[:5]
        for size, kind, flags in (
            (len(head), HEADERS, END_HEADERS),
            (size, DATA, 0),
            (len(trailers), HEADERS, END_HEADERS | END_STREAM),
        )
    )
    return opening, head + body, closing


class SendingSide:
    """Output to the peer.  The socket's owner takes ``output``."""

    def __init__(self, handler: Http2Handler, settings: Http2Settings, now_ns: int) -> None:
        self.output: list[bytes] = []
        self.streams: dict[int, Stream] = {}
        self.last_stream_id = 0
        self.failed = ""
        self.closing = False
        self._handler = handler
        self._settings = settings
        self._now_ns = now_ns
        self._floods = FloodGuard(now_ns)
        self._ended = EndedStreams(max(ENDED_STREAMS_MIN, 4 * settings.max_concurrent_streams))
        self._send_window = WINDOW_BYTES_DEFAULT
        self._peer_window = WINDOW_BYTES_DEFAULT  # of a new stream
        self._peer_frame_bytes = FRAME_BYTES_MIN
        self._answer_bytes_max = FRAME_BYTES_MIN  # -1 while a table size update must go first
        self._block_start = b""
        self._waiting: OrderedDict[int, Stream] = OrderedDict()  # by stream id, in the order of turns
        self._queued_bytes = 0
        self._data_frames = 0  # sent for their own sake, not because a window cut them small

    @property
    def queued_bytes(self) -> int:
        """Bytes of all streams that wait for a window."""
        return self._queued_bytes

    def answer(self, stream: Stream, head: bytes, body: bytes, trailers: bytes) -> None:
        """The whole response to a call, in one piece when the windows allow; closes our side.

        ``body`` is the DATA payload (a framed gRPC message), ``head`` and ``trailers`` header blocks.
        """
        size = len(body)
        if (
            size <= self._answer_bytes_max
            and size <= self._send_window
            and size <= stream.send_window
            and len(head) + len(trailers) <= FRAME_BYTES_MIN
            and stream.remote_closed
            and not stream.local_closed
            and stream.queue is None
        ):
            stream_id = stream.stream_id
            self._send_window -= size
            opening, middle, closing = _answer_parts(head, size, trailers)
            self.output.append(
                _answers_layout(1, len(head), size, len(trailers)).pack(
                    opening, stream_id, middle, stream_id, body + closing, stream_id, trailers
                )
            )
            stream.local_closed = True
            del self.streams[stream_id]
            return
        self.send_headers(stream, head)
        self.send_data(stream, body)
        self.send_trailers(stream, trailers)

    def answer_all(
        self, streams: Sequence[Stream], head: bytes, bodies: Sequence[bytes], trailers: bytes
    ) -> None:
        """answer() of several calls, a body for each."""
        for start in range(0, len(streams), _ANSWERS_MAX):
            some, theirs = streams[start : start + _ANSWERS_MAX], bodies[start : start + _ANSWERS_MAX]
            if not self._answered_together(some, head, theirs, trailers):
                for stream, body in zip(some, theirs, strict=True):
                    self.answer(stream, head, body, trailers)

    def _answered_together(
        self, streams: Sequence[Stream], head: bytes, bodies: Sequence[bytes], trailers: bytes
    ) -> bool:
        """Whether the windows allowed it and nothing was unusual: bodies of one size, no stream reset."""
        count, size = len(streams), len(bodies[0])
        if (
            size > self._answer_bytes_max
            or size * count > self._send_window
            or len(head) + len(trailers) > FRAME_BYTES_MIN
        ):
            return False
        opening, middle, closing = _answer_parts(head, size, trailers)
        pieces: list[bytes | int] = []
        for stream, body in zip(streams, bodies, strict=True):
            if (
                not stream.remote_closed
                or stream.local_closed
                or stream.queue is not None
                or stream.send_window < size
                or len(body) != size
            ):
                return False
            stream_id = stream.stream_id
            pieces += (opening, stream_id, middle, stream_id, body + closing, stream_id, trailers)
        for stream in streams:
            stream.local_closed = True
            del self.streams[stream.stream_id]
        self._send_window -= size * count
        self.output.append(_answers_layout(count, len(head), size, len(trailers)).pack(*pieces))
        return True

    def send_headers(self, stream: Stream, block: bytes, *, end_stream: bool = False) -> None:
        """A header block ahead of all data; with ``end_stream`` the whole answer."""
        if stream.local_closed or stream.trailers is not None:
            return
        self._send_block(stream.stream_id, block, END_STREAM if end_stream else 0)
        if end_stream:
            self._end_local(stream)

    def send_data(self, stream: Stream, data: bytes | memoryview) -> None:
        """Send or queue ``data``; more than the queue may hold resets the stream."""
        if stream.local_closed or stream.trailers is not None or not data:
            return
        size = len(data)
        if stream.queue is not None:
            self._enqueue(stream, data)
            return
        room = min(self._send_window, stream.send_window)
        if size <= room and size <= self._peer_frame_bytes:
            self._send_window -= size
            stream.send_window -= size
            self._data_frames += 1
            self.output.append(b"".join((_pack(size << 8, 0, stream.stream_id), data)))
            return
        view = memoryview(data)
        sent = min(size, max(room, 0))
        if size - sent > self._queue_room(stream):
            self._overflow(stream)
            return
        self._send_frames(stream, view[:sent])
        if sent < size:
            self._enqueue(stream, view[sent:])

    def send_trailers(self, stream: Stream, block: bytes) -> None:
        """The end of an answer, after all queued data; closes our side.

        A client that has not ended its side gets RST_STREAM(NO_ERROR), because further data would not be
        read.
        """
        if stream.local_closed or stream.trailers is not None:
            return
        if stream.queue is not None:
            stream.trailers = block
            return
        self._send_block(stream.stream_id, block, END_STREAM)
        self._end_local(stream)

    def reset(self, stream: Stream, code: int) -> None:
        """Give a stream up without further events."""
        if self.streams.get(stream.stream_id) is not stream:
            return
        self.output.append(reset_frame(stream.stream_id, code))
        self._ended.reset(stream.stream_id, by_peer=False)
        self._drop(stream)

    def go_away(self, text: str = "", code: int = 0) -> None:
        """Take no new streams; those that are open go on."""
        if self.failed or self.closing:
            return
        self.closing = True
        self.output.append(goaway_frame(self.last_stream_id, code, text))

    def disconnected(self, reason: str) -> None:
        """The transport is gone: every open stream is cancelled, nothing is sent any more."""
        if not self.failed:
            self.failed = reason or "disconnected"
            self._cancel_all(ErrorCode.CANCEL)

    # -- for the receiving side ------------------------------------------------------------------

    def _fail(self, code: ErrorCode, text: str) -> None:
        """Fail the connection: the peer gets the error once, every stream is cancelled."""
        if not self.failed:
            self.failed = f"{code.name}: {text}"
            self.output.append(goaway_frame(self.last_stream_id, code, text))
            self._cancel_all(code)

    def _cancel_all(self, code: int) -> None:
        self.closing = True
        for stream in list(self.streams.values()):
            if self.streams.get(stream.stream_id) is stream:
                self._drop(stream)
                self._handler.cancelled(stream, code)

    def _drop(self, stream: Stream) -> None:
        """Forget a stream that is closed on both sides and has no waiting data."""
        stream.local_closed = stream.remote_closed = True
        del self.streams[stream.stream_id]
        if stream.queue is not None:
            self._queued_bytes -= stream.queued_bytes
            self._waiting.pop(stream.stream_id, None)
        stream.queued_bytes = 0
        stream.queue = None
        stream.trailers = None

    def _end_local(self, stream: Stream) -> None:
        """Our END_STREAM went out."""
        if not stream.remote_closed:
            self.output.append(reset_frame(stream.stream_id, ErrorCode.NO_ERROR))
            self._ended.reset(stream.stream_id, by_peer=False)
        self._drop(stream)

    def _send_block(self, stream_id: int, block: bytes, flags: int) -> None:
        if self._block_start:
            block = self._block_start + block
            self._block_start = b""
            self._answer_bytes_max = self._peer_frame_bytes
        most = self._peer_frame_bytes
        kind, start = HEADERS, 0
        while len(block) - start > most:
            self.output.append(_pack(most << 8 | kind, flags, stream_id) + block[start : start + most])
            kind, flags, start = CONTINUATION, 0, start + most
        rest = block[start:]
        self.output.append(_pack(len(rest) << 8 | kind, flags | END_HEADERS, stream_id) + rest)

    def _send_frames(self, stream: Stream, view: memoryview) -> None:
        """DATA that both windows have room for, cut by the peer's frame size."""
        size, most, stream_id = len(view), self._peer_frame_bytes, stream.stream_id
        self._send_window -= size
        stream.send_window -= size
        pieces: list[bytes | memoryview] = []
        for start in range(0, size, most):
            piece = view[start : start + most]
            pieces += (_pack(len(piece) << 8 | DATA, 0, stream_id), piece)
        if pieces:
            self._data_frames += len(pieces) // 2
            self.output.append(b"".join(pieces))

    # -- what windows hold back ------------------------------------------------------------------

    def _queue_room(self, stream: Stream) -> int:
        settings = self._settings
        return min(
            settings.queued_bytes_per_stream_max - stream.queued_bytes,
            settings.queued_bytes_max - self._queued_bytes,
        )

    def _overflow(self, stream: Stream) -> None:
        """Reset a stream whose client does not take the data that it requested."""
        self.reset(stream, ErrorCode.ENHANCE_YOUR_CALM)
        self._handler.cancelled(stream, ErrorCode.ENHANCE_YOUR_CALM)

    def _enqueue(self, stream: Stream, data: bytes | memoryview) -> None:
        if len(data) > self._queue_room(stream):
            self._overflow(stream)
            return
        if stream.queue is None:
            stream.queue = bytearray()
        stream.queue += data
        stream.queued_bytes += len(data)
        self._queued_bytes += len(data)
        self._stand_in_line(stream)

    def _stand_in_line(self, stream: Stream) -> None:
        if stream.send_window > 0:
            self._waiting.setdefault(stream.stream_id, stream)

    def _flush(self) -> None:
        """Let the line send as far as the window of the connection reaches, one frame a turn."""
        waiting = self._waiting
        while waiting and self._send_window > 0:
            stream = waiting.popitem(last=False)[1]
            if stream.queue is not None:
                self._send_queued(stream, stream.queue)

    def _send_queued(self, stream: Stream, queue: bytearray) -> None:
        size = min(self._send_window, stream.send_window, self._peer_frame_bytes, stream.queued_bytes)
        if size <= 0:
            return  # its own window shrank while it stood in line
        self._send_window -= size
        stream.send_window -= size
        stream.queued_bytes -= size
        self._queued_bytes -= size
        self.output.append(_pack(size << 8 | DATA, 0, stream.stream_id) + queue[:size])
        del queue[:size]
        if not queue:
            self._data_frames += 1
            self._emptied(stream)
            return
        self._stand_in_line(stream)
        if size >= _SMALL_PIECE_BYTES:
            self._data_frames += 1
        else:
            self._charge(2)

    def _emptied(self, stream: Stream) -> None:
        stream.queue = None
        if stream.trailers is None:
            self._handler.writable(stream)
            return
        block, stream.trailers = stream.trailers, None
        self._send_block(stream.stream_id, block, END_STREAM)
        self._end_local(stream)

    # -- budgets ---------------------------------------------------------------------------------

    def _charge(self, cost: int) -> bool:
        """Spend the peer's allowance of frames that bring nothing forward; False: the connection failed."""
        calls = (self.last_stream_id + 1) >> 1
        if self._floods.control(cost, self._now_ns, calls, self._data_frames):
            return True
        self._fail(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")
        return False

    def _charge_reset(self) -> bool:
        calls = (self.last_stream_id + 1) >> 1
        if self._floods.reset(self._now_ns, calls, self._data_frames):
            return True
        self._fail(ErrorCode.ENHANCE_YOUR_CALM, "too many calls are reset, refused or malformed")
        return False
