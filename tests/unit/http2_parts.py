"""What the tests of the HTTP/2 machine share: a door that notes what it is told, and a client's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from danube.core.http2 import frames
from danube.core.http2.connection import Http2Settings, ServerConnection, Stream
from danube.core.http2.headers import OK_TRAILERS, RESPONSE_HEAD, response_block
from danube.core.protocol.grpc import frame_message

SECOND = 1_000_000_000
GREETING = frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0) + frames.SETTINGS_ACK
FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/danube.Topic/Ask"),
    (":authority", "localhost:6650"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
BLOCK = response_block(FIELDS)


class Frame(NamedTuple):
    kind: str
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> int:
        """Of RST_STREAM and GOAWAY; the increment of WINDOW_UPDATE."""
        return int.from_bytes(self.payload[-4:] if self.kind != "GOAWAY" else self.payload[4:8], "big")


def parsed(data: bytes) -> list[Frame]:
    found, position = [], 0
    while position < len(data):
        word, flags, stream_id = frames.FRAME_HEADER.unpack_from(data, position)
        end = position + 9 + (word >> 8)
        assert end <= len(data), "output ends inside a frame"
        found.append(Frame(frames.KIND_NAMES[word & 0xFF], flags, stream_id, data[position + 9 : end]))
        position = end
    return found


class Door:
    """Notes everything; with ``echo`` it gives windows back and answers ended calls with their body."""

    def __init__(
        self, settings: Http2Settings | None = None, *, echo: bool = False, greeted: bool = True
    ) -> None:
        self.echo = echo
        self.events: list[tuple[Any, ...]] = []
        self.stream_by_id: dict[int, Stream] = {}
        self.now = 1
        self.rest = b""
        self.machine = ServerConnection(self, settings or Http2Settings(), self.now)
        self.greeting = b""
        if greeted:
            self.feed(GREETING)
            self.greeting = self.output()
            self.events.clear()

    def feed(self, data: bytes) -> Door:
        view = memoryview(self.rest + data)
        taken = self.machine.receive(view, 0, len(view), self.now)
        self.rest = bytes(view[taken:])
        return self

    def output(self) -> bytes:
        taken, self.machine.output = self.machine.output, []
        return b"".join(taken)

    def sent(self) -> list[Frame]:
        return parsed(self.output())

    def call(self, stream_id: int = 1, *, ended: bool = False, block: bytes = BLOCK) -> Stream:
        self.feed(headers(stream_id, ended=ended, block=block))
        return self.stream_by_id[stream_id]

    @property
    def code(self) -> str:
        return self.machine.failed.partition(":")[0]

    def request(self, stream: Stream, ended: bool) -> None:
        self.stream_by_id[stream.stream_id] = stream
        self.events.append(("request", stream.stream_id, stream.head.path, ended))
        if self.echo:
            stream.context = bytearray()
            if ended:
                self.finish(stream)

    def data(self, stream: Stream, data: memoryview, ended: bool) -> None:
        self.events.append(("data", stream.stream_id, bytes(data), ended))
        if self.echo:
            self.machine.consumed(stream, len(data))
            stream.context += data
            if ended:
                self.finish(stream)

    def requests(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            self.request(stream, False)

    def messages(self, streams: Sequence[Stream], messages: Sequence[bytes]) -> None:
        for stream, message in zip(streams, messages, strict=True):
            self.data(stream, memoryview(frame_message(message)), True)

    def finish(self, stream: Stream) -> None:
        self.machine.answer(stream, RESPONSE_HEAD, bytes(stream.context), OK_TRAILERS)

    def cancelled(self, stream: Stream, code: int) -> None:
        self.events.append(("cancelled", stream.stream_id, code))

    def writable(self, stream: Stream) -> None:
        self.events.append(("writable", stream.stream_id))


def headers(stream_id: int = 1, *, ended: bool = False, block: bytes = BLOCK, flags: int = 0) -> bytes:
    flags |= frames.END_HEADERS | (frames.END_STREAM if ended else 0)
    return frames.frame(frames.HEADERS, flags, stream_id, block)


def data(stream_id: int, payload: bytes = b"", *, ended: bool = False, flags: int = 0) -> bytes:
    return frames.frame(frames.DATA, flags | (frames.END_STREAM if ended else 0), stream_id, payload)


def settings(*pairs: tuple[int, int]) -> bytes:
    payload = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in pairs)
    return frames.frame(frames.SETTINGS, 0, 0, payload)


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")
