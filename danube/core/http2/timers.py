"""When a silent peer is asked, and when a slow one is given up: the clock of one HTTP/2 connection."""

from __future__ import annotations

from danube.core.http2.frames import ErrorCode
from danube.core.http2.settings import Http2Settings


class ConnectionTimers:
    """Times in ns.  A moment of 0 is one that nobody waits for."""

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
        """Nothing is read on purpose: the peer's time does not run."""
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
        """It is time for a keepalive PING."""
        wait = self._settings.keepalive_ns
        return bool(wait) and not self.asked_ns and now_ns - self.heard_ns >= wait
