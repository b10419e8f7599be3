"""One stream of an HTTP/2 connection, its events, and the memory of streams that ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from danube.core.http2.request import RequestHead

ENDED_STREAMS_MIN: Final = 4_096
SKIPPED_RANGES_MAX: Final = 64


class Stream:
    """A stream that has not ended on both sides.

    ``send_window`` and ``receive_window`` are bytes (RFC 9113, 5.2; the first may be negative).
    ``queued_bytes`` were accepted for sending and wait for a window.  ``context`` is free for the
    door.  After the end both sides are closed and every way to send does nothing.
    """

    __slots__ = ("body_left", "consumed_bytes", "context", "head", "local_closed", "queue", "queued_bytes",
                 "receive_window", "remote_closed", "send_window", "stream_id",
                 "trailers")  # fmt: skip

    def __init__(
        self, stream_id: int, head: RequestHead, send_window: int, receive_window: int, ended: bool
    ) -> None:
        self.stream_id = stream_id
        self.head = head
        self.remote_closed = ended
        self.local_closed = False
        self.send_window = send_window
        self.receive_window = receive_window
        self.consumed_bytes = 0  # by the door, not yet given back to the peer
        self.body_left = -1  # of the content length that the peer named; -1: none
        self.queued_bytes = 0
        self.queue: bytearray | None = None  # never empty
        self.trailers: bytes | None = None  # wait for the queue
        self.context: Any = None

    def __repr__(self) -> str:
        sides = f"remote_closed={self.remote_closed} local_closed={self.local_closed}"
        return f"<Stream {self.stream_id} {self.head.path} {sides} queued={self.queued_bytes}>"


class Http2Handler(Protocol):
    """Events of a server connection; every method may call back into the connection.

    Events of one stream are told in the order of its frames, however the bytes were cut.  So are the requests
    among themselves, and the ends of bodies among themselves.  Between streams nothing else is ordered: where
    many calls are taken together, a request may be told before the body of an earlier stream.
    """

    def request(self, stream: Stream, ended: bool) -> None:
        """The head is complete; ``ended``: no body will come."""

    def data(self, stream: Stream, data: memoryview, ended: bool) -> None:
        """A part of the body, valid only during the call; may be empty when ``ended``."""

    def requests(self, streams: Sequence[Stream]) -> None:
        """request() of each: they have the same head, and a body will come."""

    def messages(self, streams: Sequence[Stream], messages: Sequence[bytes]) -> None:
        """data() of each, which ends it: its body is one gRPC message, given without the 5 bytes before it.

        Those count against flow control too.
        """

    def cancelled(self, stream: Stream, code: int) -> None:
        """The stream ended without the door's doing: reset by or because of the peer, connection over."""

    def writable(self, stream: Stream) -> None:
        """Handle a stream whose data has all left: none of it waits for a window any more."""


class EndedStreams:
    """Which streams ended by a reset, and which ids a peer skipped: ``streams_max``, the oldest forgotten.

    A frame for a stream that we reset was on its way and is ignored; one after the peer's own reset
    or end is its fault; one for an id that was skipped was never legal (RFC 9113, 5.1).
    """

    __slots__ = ("_reset_by_peer", "_skipped", "_streams_max")

    def __init__(self, streams_max: int) -> None:
        self._streams_max = streams_max
        self._reset_by_peer: dict[int, bool] = {}
        self._skipped: deque[tuple[int, int]] = deque(maxlen=SKIPPED_RANGES_MAX)

    def reset(self, stream_id: int, *, by_peer: bool) -> None:
        if len(self._reset_by_peer) >= self._streams_max:
            del self._reset_by_peer[next(iter(self._reset_by_peer))]
        self._reset_by_peer[stream_id] = by_peer

    def skip(self, start: int, end: int) -> None:
        """The ids ``start .. end`` (half-open) will never be used."""
        self._skipped.append((start, end))

    def was_skipped(self, stream_id: int) -> bool:
        return any(start <= stream_id < end for start, end in self._skipped)

    def reset_by_us(self, stream_id: int) -> bool:
        return self._reset_by_peer.get(stream_id) is False

    def reset_by_peer(self, stream_id: int) -> bool:
        return self._reset_by_peer.get(stream_id) is True
