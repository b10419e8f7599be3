"""Frames that carry no call: SETTINGS, PING, WINDOW_UPDATE, RST_STREAM and those that change nothing.

When a silent peer is asked, and when a slow one is given up: the clock of one HTTP/2 connection.
"""

from __future__ import annotations

from danube.core.http2.frames import (
    ACK,
    FRAME_BYTES_MIN,
    GOAWAY,
    HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING_BYTES,
    SETTINGS,
    SETTINGS_ACK,
    STREAM_ID_MASK,
    TABLE_BYTES_DEFAULT,
    WINDOW_BYTES_MAX,
    WINDOW_UPDATE,
    ErrorCode,
    Http2Settings,
    ping_frame,
    setting_problem,
    settings_in,
    uint32,
)
from danube.core.http2.sending import SendingSide
from danube.core.http2.streams import Http2Handler, Stream


class ConnectionTimers:
    """Times in ns.  A moment of 0 is not awaited."""

    __slots__ = ("_settings", "acknowledged_by_ns", "asked_ns", "block_since_ns", "greeted_by_ns", "heard_ns",
                 "partial_since_ns")  # fmt: skip

    def __init__(self, settings: Http2Settings, now_ns: int) -> None:
        self._settings = settings
        self.heard_ns = now_ns
        self.asked_ns = 0  # a keepalive PING waits for its answer
        self.greeted_by_ns = now_ns + settings.handshake_timeout_ns  # preface and first SETTINGS
        self.acknowledged_by_ns = self.greeted_by_ns  # our SETTINGS
        self.block_since_ns = 0  # a header block waits for its CONTINUATION
        self.partial_since_ns = 0  # a frame waits for its rest

    def postpone(self, now_ns: int) -> None:
        """Restart the peer's timers: the connection is not read on purpose, so the peer is not late."""
        self.heard_ns = now_ns
        self.asked_ns = now_ns if self.asked_ns else 0
        self.block_since_ns = now_ns if self.block_since_ns else 0
        self.partial_since_ns = now_ns if self.partial_since_ns else 0
        late = now_ns + self._settings.handshake_timeout_ns
        self.greeted_by_ns = late if self.greeted_by_ns else 0
        self.acknowledged_by_ns = late if self.acknowledged_by_ns else 0

    def overdue(self, now_ns: int) -> tuple[ErrorCode, str] | None:
        """The connection error of a peer that took too long, or None."""
        settings = self._settings
        if self.greeted_by_ns and now_ns >= self.greeted_by_ns:
            return ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface and SETTINGS in time"
        if self.acknowledged_by_ns and now_ns >= self.acknowledged_by_ns:
            return ErrorCode.SETTINGS_TIMEOUT, "our SETTINGS were not acknowledged in time"
        if self.block_since_ns and now_ns - self.block_since_ns >= settings.handshake_timeout_ns:
            return ErrorCode.ENHANCE_YOUR_CALM, "a header block was not finished in time"
        if self.partial_since_ns and now_ns - self.partial_since_ns >= settings.frame_timeout_ns:
            return ErrorCode.ENHANCE_YOUR_CALM, "a frame was not finished in time"
        if self.asked_ns and now_ns - self.asked_ns >= settings.keepalive_timeout_ns:
            return ErrorCode.NO_ERROR, "a keepalive PING was not answered in time"
        return None

    def silent(self, now_ns: int) -> bool:
        """Return whether a keepalive PING is due."""
        wait = self._settings.keepalive_ns
        return bool(wait) and not self.asked_ns and now_ns - self.heard_ns >= wait


_SETTINGS_COST = 8
_STREAMS_PER_COST = 8
_TABLE_SIZE_ZERO = b"\x20"
_HTTP1_METHODS = b"GET POST PUT HEAD DELETE OPTIONS CONNECT PATCH".split()


class ControlSide(SendingSide):
    """Control frames of a peer: about the connection, and about streams that they do not open."""

    def __init__(self, handler: Http2Handler, settings: Http2Settings, now_ns: int) -> None:
        super().__init__(handler, settings, now_ns)
        self.peer_going_away = False
        self._timers = ConnectionTimers(settings, now_ns)
        self._peer_table_bytes = TABLE_BYTES_DEFAULT

    def _control_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        if kind == WINDOW_UPDATE:
            if len(payload) != 4:
                self._fail(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has 4 bytes")
            else:
                self._window_update(stream_id, uint32(payload) & STREAM_ID_MASK)
        elif kind == RST_STREAM:
            self._rst_stream(stream_id, payload)
        elif kind == PING:
            self._ping(flags, stream_id, payload)
        elif kind == SETTINGS:
            self._take_settings(flags, stream_id, payload)
        elif kind == PRIORITY:
            self._priority(stream_id, payload)
        elif kind == GOAWAY:
            self._goaway(stream_id, payload)
        elif kind == PUSH_PROMISE:
            self._fail(ErrorCode.PROTOCOL_ERROR, "a client cannot push")
        else:
            self._charge(1)

    def _window_update(self, stream_id: int, increment: int) -> None:
        """The frame that comes most often: some clients send five of them for each message."""
        self._floods.control_left -= 1
        if self._floods.control_left < 0 and not self._charge(0):
            return
        if stream_id == 0:
            self._send_window += increment
            if not increment:
                self._fail(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            elif self._send_window > WINDOW_BYTES_MAX:
                self._fail(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection is above 2^31-1")
            elif self._waiting:
                self._flush()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id, "WINDOW_UPDATE")
        elif not increment:
            self._stream_error(stream, ErrorCode.PROTOCOL_ERROR)
        elif stream.send_window + increment > WINDOW_BYTES_MAX:
            self._stream_error(stream, ErrorCode.FLOW_CONTROL_ERROR)
        else:
            stream.send_window += increment
            if stream.queue is not None:
                self._stand_in_line(stream)
                self._flush()

    def _rst_stream(self, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 4:
            self._fail(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has 4 bytes")
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            if self._check_not_idle(stream_id, "RST_STREAM"):
                self._charge(1)
            return
        self._ended.reset(stream_id, by_peer=True)
        self._drop(stream)
        self._handler.cancelled(stream, uint32(payload))
        self._charge_reset()

    def _ping(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if stream_id or len(payload) != 8:
            code = ErrorCode.PROTOCOL_ERROR if stream_id else ErrorCode.FRAME_SIZE_ERROR
            self._fail(code, "PING has 8 bytes and no stream")
        elif flags & ACK:
            self._timers.asked_ns = 0
            self._charge(1)
        elif self._charge(1):
            self.output.append(ping_frame(payload.tobytes(), answer=True))

    def _priority(self, stream_id: int, payload: memoryview) -> None:
        """Priorities are ignored (RFC 9113, 5.3.2), their form is not."""
        if stream_id == 0 or len(payload) != 5:
            code = ErrorCode.FRAME_SIZE_ERROR if stream_id else ErrorCode.PROTOCOL_ERROR
            self._fail(code, "PRIORITY has 5 bytes and a stream")
        elif uint32(payload) & STREAM_ID_MASK == stream_id:
            self._fail(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
        else:
            self._charge(1)

    def _goaway(self, stream_id: int, payload: memoryview) -> None:
        if stream_id or len(payload) < 8:
            code = ErrorCode.PROTOCOL_ERROR if stream_id else ErrorCode.FRAME_SIZE_ERROR
            self._fail(code, "GOAWAY has 8 bytes or more and no stream")
            return
        self.peer_going_away = True
        self._charge(1)

    # -- settings --------------------------------------------------------------------------------

    def _take_settings(self, flags: int, stream_id: int, payload: memoryview) -> None:
        size = len(payload)
        if stream_id:
            self._fail(ErrorCode.PROTOCOL_ERROR, "SETTINGS has no stream")
        elif size % SETTING_BYTES or (flags & ACK and size):
            self._fail(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS has {size} bytes")
        elif flags & ACK:
            self._timers.acknowledged_by_ns = 0
            self._charge(1)
        elif self._charge(_SETTINGS_COST + size // SETTING_BYTES):
            self._apply_settings(payload)

    def _apply_settings(self, payload: memoryview) -> None:
        """In their order (RFC 9113, 6.5.3), except that only the last initial window moves the streams."""
        window = self._peer_window
        for identifier, value in settings_in(payload):
            problem = setting_problem(identifier, value)
            if problem is not None:
                self._fail(*problem)
                return
            if identifier == INITIAL_WINDOW_SIZE:
                window = value
            elif identifier == MAX_FRAME_SIZE:
                # Larger frames than these gain nothing and would let one stream hold up the others.
                self._peer_frame_bytes = min(value, FRAME_BYTES_MIN * 4)
            elif identifier == HEADER_TABLE_SIZE:
                self._limit_peer_table(value)
        self._answer_bytes_max = -1 if self._block_start else self._peer_frame_bytes
        self.output.append(SETTINGS_ACK)
        if window != self._peer_window:
            self._move_windows(window)

    def _limit_peer_table(self, size: int) -> None:
        """We use no table, yet a peer that makes its own smaller is owed a size update (RFC 7541, 4.2)."""
        if size < self._peer_table_bytes:
            self._peer_table_bytes = 0
            self._block_start = _TABLE_SIZE_ZERO

    def _move_windows(self, window: int) -> None:
        if not self._charge(len(self.streams) // _STREAMS_PER_COST):
            return
        change, self._peer_window = window - self._peer_window, window
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > WINDOW_BYTES_MAX:
                self._fail(ErrorCode.FLOW_CONTROL_ERROR, "a new initial window makes one larger than 2^31-1")
                return
            if stream.queue is not None:
                self._stand_in_line(stream)
        self._flush()

    # -- faults ----------------------------------------------------------------------------------

    def _check_not_idle(self, stream_id: int, name: str) -> bool:
        """False, and the connection failed, when a stream was never open; one that has ended is fine."""
        if stream_id > self.last_stream_id or not stream_id & 1:
            self._fail(ErrorCode.PROTOCOL_ERROR, f"{name} on stream {stream_id}, which was never open")
            return False
        return True

    def _stream_error(self, stream: Stream, code: ErrorCode, *, told: bool = True) -> None:
        """The peer's fault ends one stream."""
        self.reset(stream, code)
        if told:
            self._handler.cancelled(stream, code)
        self._charge_reset()


def foreign_greeting(found: bytes) -> str:
    """Name the protocol of a peer whose first bytes are not the HTTP/2 preface."""
    if found[:2] == b"\x16\x03":
        return "TLS on a port without TLS"
    if found.split(b" ", 1)[0] in _HTTP1_METHODS:
        return "HTTP/1 on a port that speaks HTTP/2"
    return "the first bytes are not the preface of HTTP/2"
