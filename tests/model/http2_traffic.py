"""Traffic of HTTP/2 clients made of a seed: fair, at the edge, and damaged; and a run of the machine over it.

    python -m tests.model.http2_traffic [--seconds 60] [--seed N]     fuzz until the time is over

Each input is fair traffic with some of its bytes or frames changed.  A run must not raise, must tell
each call at most once that it is over, must keep output, queues and memories bounded, and must end
with no stream when it failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from hpack import Encoder

from danube.core.http2 import frames
from danube.core.http2.connection import Http2Settings, ServerConnection, Stream
from danube.core.http2.headers import MEMORY_HEADS_MAX, OK_TRAILERS, RESPONSE_HEAD
from danube.core.protocol.grpc import MessageAssembler, frame_message

SECOND = 1_000_000_000
KINDS = range(11)
SETTINGS = Http2Settings(
    max_concurrent_streams=8,
    initial_window_bytes=65_535,
    connection_window_bytes=80_000,
    queued_bytes_per_stream_max=50_000,
    queued_bytes_max=120_000,
)
METHODS = [b"POST"] * 8 + [b"GET", b""]
MORE = [
    (b"grpc-timeout", b"5S"),
    (b"x-trace", b"%d"),
    (b"content-length", b"7"),
    (b"X-Bad", b"1"),
    (b"te", b"gzip"),
]


class Traffic:
    """One client: a table, stream ids, and a liking for edges."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.encoder = Encoder()
        self.next_id = 1
        self.open: list[int] = []

    def whole(self, count: int) -> list[bytes]:
        """Frames of a connection, the preface with the first."""
        start = [frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, self.pairs()), frames.SETTINGS_ACK]
        return start + [self.piece() for _ in range(count)]

    def pairs(self) -> bytes:
        window = self.source.choice([0, 1, 100, 65_535, 1 << 20])
        frame = self.source.choice([16_384, 20_000, 1 << 20])
        table = self.source.choice([0, 100, 4096])
        chosen = self.source.sample(
            [(1, table), (4, window), (5, frame), (3, 1), (99, 7)], self.source.randint(0, 4)
        )
        return b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in chosen)

    def piece(self) -> bytes:
        roll = self.source.random()
        if roll < 0.35 or not self.open:
            return self.opening()
        stream_id = self.source.choice(self.open)
        if roll < 0.75:
            return self.data(stream_id)
        if roll < 0.85:
            increment = self.source.choice([1, 10, 1000, 1 << 16, 1 << 20])
            return frames.window_frame(self.source.choice([0, stream_id]), increment)
        if roll < 0.89:
            return frames.ping_frame(self.source.randbytes(8), answer=self.source.random() < 0.5)
        if roll < 0.92:
            self.open.remove(stream_id)
            return frames.reset_frame(stream_id, 8)
        if roll < 0.95:
            return frames.frame(frames.SETTINGS, 0, 0, self.pairs())
        if roll < 0.98:
            return frames.frame(frames.PRIORITY, 0, stream_id, bytes(5))
        self.open.remove(stream_id)
        return frames.frame(frames.HEADERS, 5, stream_id, self.encoder.encode([(b"x-end", b"1")]))

    def opening(self) -> bytes:
        stream_id, self.next_id = self.next_id, self.next_id + self.source.choice([2, 2, 2, 4])
        fields = [
            (b":method", self.source.choice(METHODS)),
            (b":scheme", b"http"),
            (b":path", self.source.choice([b"/danube/A", b"/danube/B"])),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        ]
        for name, value in self.source.sample(MORE, self.source.choice([0, 0, 0, 1, 2])):
            fields.append((name, value.replace(b"%d", str(self.source.randrange(5)).encode())))
        indexed = self.source.random() < 0.5
        block = self.encoder.encode([(name, value, not indexed) for name, value in fields])
        ended = self.source.random() < 0.2
        if not ended:
            self.open.append(stream_id)
        flags = frames.END_STREAM if ended else 0
        if self.source.random() < 0.85:
            return frames.frame(frames.HEADERS, flags | frames.END_HEADERS, stream_id, block)
        cut = self.source.randrange(len(block))
        first = frames.frame(frames.HEADERS, flags, stream_id, block[:cut])
        return first + frames.frame(frames.CONTINUATION, frames.END_HEADERS, stream_id, block[cut:])

    def data(self, stream_id: int) -> bytes:
        ended = self.source.random() < 0.4
        if ended:
            self.open.remove(stream_id)
        message = frame_message(self.source.randbytes(self.source.choice([0, 1, 10, 300, 5000])))
        flags = frames.END_STREAM if ended else 0
        if self.source.random() < 0.9:
            return frames.frame(frames.DATA, flags, stream_id, message)
        padding = self.source.randrange(20)
        return frames.frame(
            frames.DATA, flags | frames.PADDED, stream_id, bytes([padding]) + message + bytes(padding)
        )


class Run:
    """The machine and a door that answers what ends, in ways that depend on the stream alone."""

    def __init__(self, settings: Http2Settings = SETTINGS) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.sent = bytearray()
        self.rest = b""
        self.over: set[int] = set()
        self.machine = ServerConnection(self, settings, 1)

    def feed(self, data: bytes, now_ns: int = 1) -> None:
        view = memoryview(self.rest + data)
        taken = self.machine.receive(view, 0, len(view), now_ns)
        if not 0 <= taken <= len(view):
            raise AssertionError(f"took {taken} of {len(view)}")
        self.rest = bytes(view[taken:])
        if len(self.rest) >= self.machine.wanted and not self.machine.failed:
            raise AssertionError(f"wants {self.machine.wanted} and has {len(self.rest)}")
        self.take_output()

    def take_output(self) -> None:
        output, self.machine.output = self.machine.output, []
        for piece in output:
            self.sent += piece

    def request(self, stream: Stream, ended: bool) -> None:
        self.events.append(("request", stream.stream_id, stream.head.path, dict(stream.head.fields), ended))
        stream.context = MessageAssembler(4096)
        if ended:
            self.finish(stream)

    def data(self, stream: Stream, data: memoryview, ended: bool) -> None:
        self.events.append(("data", stream.stream_id, bytes(data), ended))
        messages = stream.context.take(data, ended)
        self.machine.consumed(stream, len(data))
        if stream.context.status:
            self.machine.send_headers(stream, OK_TRAILERS, end_stream=True)
        elif stream.stream_id % 3 == 0:
            for message in messages:
                self.machine.send_data(stream, message)
        if ended:
            self.finish(stream)

    def requests(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            self.request(stream, False)

    def messages(self, streams: Sequence[Stream], messages: Sequence[bytes]) -> None:
        for stream, message in zip(streams, messages, strict=True):
            self.data(stream, memoryview(frame_message(message)), True)

    def finish(self, stream: Stream) -> None:
        kind = stream.stream_id // 2 % 5
        if kind == 0:
            self.machine.reset(stream, 2)
        elif kind == 1:
            self.machine.send_headers(stream, RESPONSE_HEAD)
            self.machine.send_data(stream, bytes(stream.stream_id % 7 * 9000))
            self.machine.send_trailers(stream, OK_TRAILERS)
        else:
            self.machine.answer(stream, RESPONSE_HEAD, bytes(100), OK_TRAILERS)

    def cancelled(self, stream: Stream, code: int) -> None:
        if stream.stream_id in self.over:
            raise AssertionError(f"{stream} is over twice")
        self.over.add(stream.stream_id)
        self.events.append(("cancelled", stream.stream_id, int(code)))

    def writable(self, stream: Stream) -> None:
        self.events.append(("writable", stream.stream_id))

    def check(self, fed: int) -> None:
        """What holds after anything that was fed."""
        machine = self.machine
        queued = sum(stream.queued_bytes for stream in machine.streams.values())
        facts = {
            "streams": len(machine.streams) <= SETTINGS.max_concurrent_streams,
            "queued": queued == machine.queued_bytes <= SETTINGS.queued_bytes_max,
            "line": set(machine._waiting) <= set(machine.streams),
            "memory": len(machine._requests.heads) <= MEMORY_HEADS_MAX,
            "output": len(self.sent) <= 100_000 + 60_000 * len(self.events) + 20 * fed,
            "failed": not (machine.failed and machine.streams),
            "rest": len(self.rest) < 16_384 + 9,
            "window": machine._receive_window + machine._consumed == SETTINGS.connection_window_bytes
            or bool(machine.failed),
        }
        wrong = [name for name, held in facts.items() if not held]
        if wrong:
            raise AssertionError(f"{wrong} after {fed} bytes, failed: {machine.failed!r}")
        if not (machine.failed and not self.sent):
            whole_frames(bytes(self.sent))


def whole_frames(data: bytes) -> None:
    position = 0
    while position < len(data):
        position += 9 + (frames.FRAME_HEADER.unpack_from(data, position)[0] >> 8)
    if position != len(data):
        raise AssertionError("the output ends inside a frame")


def mutated(pieces: list[bytes], source: random.Random) -> bytes:
    """Fair traffic with a few faults: bytes, frames, lengths, order."""
    pieces = list(pieces)
    for _ in range(source.choice([0, 1, 1, 2, 5])):
        place = source.randrange(len(pieces))
        how = source.randrange(7)
        if how == 0:
            del pieces[place]
        elif how == 1:
            pieces.insert(place, pieces[source.randrange(len(pieces))])
        elif how == 2:
            pieces[place] = pieces[place][: source.randrange(len(pieces[place]) + 1)]
        elif how == 3:
            payload = source.randbytes(source.choice([0, 1, 4, 5, 8, 40]))
            kind, flags = source.choice(KINDS), source.choice([0, 1, 4, 5, 8, 0x20, 0x2D, 255])
            pieces.insert(
                place, frames.frame(kind, flags, source.choice([0, 1, 2, 3, 5, 1 << 31 | 1]), payload)
            )
        elif pieces[place]:
            damaged = bytearray(pieces[place])
            at = source.randrange(min(len(damaged), 9) if how == 4 else len(damaged))
            damaged[at] = source.choice([0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)])
            pieces[place] = bytes(damaged)
        if not pieces:
            return b""
    return b"".join(pieces)


def fuzz_once(seed: int) -> Run:
    """One input of this seed, cut at random, checked at the end; the seed alone repeats it."""
    source = random.Random(seed)
    data = mutated(Traffic(source).whole(source.choice([3, 10, 40])), source)
    run, start, now_ns = Run(), 0, 1
    while start < len(data):
        end = start + source.choice([1, 7, 100, 4000, len(data)])
        now_ns += source.choice([0, 1000, SECOND])
        run.feed(data[start:end], now_ns)
        if source.random() < 0.1:
            run.machine.tick(now_ns)
            run.take_output()
        start = end
    run.check(len(data))
    if source.random() < 0.5:
        run.machine.disconnected("gone")
        run.check(len(data))
    return run


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.model.http2_traffic")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args(words)
    ends = time.monotonic() + options.seconds
    count = failed = 0
    while time.monotonic() < ends:
        try:
            failed += bool(fuzz_once(options.seed + count).machine.failed)
        except BaseException:
            print(f"seed {options.seed + count} fails: fuzz_once({options.seed + count})", file=sys.stderr)
            raise
        count += 1
    print(f"{count} inputs from seed {options.seed}, {failed} connections failed as they should")
    return 0


if __name__ == "__main__":
    sys.exit(main())
