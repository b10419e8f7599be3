"""Times the HTTP/2 machine alone: what one call costs in it, without sockets and without a broker.

    python -m perf.http2 [--calls 20000] [--rounds 5] [--batch 64] [--size 1024]

One JSON line per case: microseconds per call or per frame, the best and the median of several rounds.
A turn hands ``batch`` calls over in one buffer, as a busy socket does, and takes the output once.  Calls
that are alike are taken together; those whose end or deadline is apart are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

from hpack import Encoder

from danube.core import kernels
from danube.core.http2 import frames
from danube.core.http2.connection import Http2Settings, ServerConnection, Stream
from danube.core.http2.headers import OK_TRAILERS, RESPONSE_HEAD, response_block
from danube.core.protocol.grpc import MessageAssembler, frame_message

HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/danube.ProducerService/SendMessage"),
    (":authority", "127.0.0.1:6650"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("user-agent", "tonic/0.12"),
]
ANSWER = frame_message(b"\x08\x80\x80\x80\x80\x10")


class Echo:
    """The least a door does: count, give the window back, answer."""

    machine: ServerConnection

    def __init__(self) -> None:
        self.calls = 0

    def request(self, stream: Stream, ended: bool) -> None:
        self.calls += 1

    def data(self, stream: Stream, data: memoryview, ended: bool) -> None:
        self.machine.consumed(stream, len(data))
        if ended:
            self.machine.answer(stream, RESPONSE_HEAD, ANSWER, OK_TRAILERS)

    def requests(self, streams: Sequence[Stream]) -> None:
        self.calls += len(streams)

    def messages(self, streams: Sequence[Stream], messages: Sequence[bytes]) -> None:
        self.machine.consumed(None, sum(map(len, messages)) + 5 * len(messages))
        self.machine.answer_all(streams, RESPONSE_HEAD, [ANSWER] * len(streams), OK_TRAILERS)

    def cancelled(self, stream: Stream, code: int) -> None:
        raise RuntimeError(f"{stream} was cancelled with {code}")

    def writable(self, stream: Stream) -> None:
        pass


class Client:
    """Builds what a client sends; the header block of a call comes from ``block``."""

    def __init__(self, block: Callable[[int], bytes], size: int, *, end_apart: bool = False) -> None:
        self.door = Echo()
        self.machine = self.door.machine = ServerConnection(self.door, Http2Settings(), 0)
        self.block = block
        self.body = frame_message(bytes(size))
        self.end_apart = end_apart
        self.next_id = 1
        self.feed(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0) + frames.SETTINGS_ACK)
        self.feed(frames.window_frame(0, 1 << 30))

    def feed(self, data: bytes) -> int:
        view = memoryview(data)
        started = time.perf_counter_ns()
        taken = self.machine.receive(view, 0, len(view), started)
        self.machine.output = []
        spent = time.perf_counter_ns() - started
        if taken != len(view) or self.machine.failed:
            raise RuntimeError(self.machine.failed or "not all was taken")
        return spent

    def calls(self, count: int) -> bytes:
        parts = []
        for _ in range(count):
            parts.append(
                frames.frame(frames.HEADERS, frames.END_HEADERS, self.next_id, self.block(self.next_id))
            )
            flags = 0 if self.end_apart else frames.END_STREAM
            parts.append(frames.frame(frames.DATA, flags, self.next_id, self.body))
            if self.end_apart:
                parts.append(frames.frame(frames.DATA, frames.END_STREAM, self.next_id))
            self.next_id += 2
        return b"".join(parts)


def tonic() -> Callable[[int], bytes]:
    """The same block for every call, nothing indexed anew."""
    block = response_block(HEAD)
    return lambda _: block


def grpc_go(*, deadlines: bool) -> Callable[[int], bytes]:
    """All fields in the table; with deadlines a new grpc-timeout enters it with every call."""
    encoder = Encoder()

    def block(call: int) -> bytes:
        timeout = [("grpc-timeout", f"{4_999_000 + call % 997}u")] if deadlines else []
        return encoder.encode(HEAD + timeout)

    return block


def unary(client: Client, calls: int, batch: int) -> float:
    """Microseconds of the machine and the door per call."""
    done = spent = 0
    while done < calls:
        spent += client.feed(client.calls(batch))
        done += batch
    return spent / done / 1000


def streamed(client: Client, messages: int, batch: int) -> float:
    """Microseconds per message of a long answer: ``send_data`` and the client's window updates."""
    client.feed(
        frames.frame(frames.HEADERS, frames.END_HEADERS, client.next_id, client.block(client.next_id))
    )
    (stream,) = client.machine.streams.values()
    client.next_id += 2
    done = spent = 0
    while done < messages:
        started = time.perf_counter_ns()
        for _ in range(batch):
            client.machine.send_data(stream, client.body)
        client.machine.output = []
        spent += time.perf_counter_ns() - started
        size = batch * len(client.body)
        spent += client.feed(frames.window_frame(0, size) + frames.window_frame(stream.stream_id, size))
        done += batch
    client.machine.reset(stream, 0)
    return spent / done / 1000


def assembled(_: Client, messages: int, batch: int) -> float:
    """Microseconds per message of 100 bytes that lie many in one DATA frame."""
    data = memoryview(frame_message(bytes(100)) * batch)
    assembler, done, started = MessageAssembler(), 0, time.perf_counter_ns()
    while done < messages:
        done += len(assembler.take(data))
    return (time.perf_counter_ns() - started) / done / 1000


def cases(size: int) -> dict[str, tuple[Callable[[], Client], Callable[[Client, int, int], float]]]:
    return {
        "unary": (lambda: Client(tonic(), size), unary),
        "unary, end apart": (lambda: Client(tonic(), size, end_apart=True), unary),
        "unary, all indexed": (lambda: Client(grpc_go(deadlines=False), size), unary),
        "unary, new deadlines": (lambda: Client(grpc_go(deadlines=True), size), unary),
        "stream out": (lambda: Client(tonic(), size), streamed),
        "assemble": (lambda: Client(tonic(), size), assembled),
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="perf.http2", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=1_024)
    options = parser.parse_args(words)
    kernels.load()
    for name, (make, measure) in cases(options.size).items():
        client = make()
        measure(client, options.batch, options.batch)  # the first touch
        rounds = [measure(client, options.calls, options.batch) for _ in range(options.rounds)]
        found = {"case": name, "us": round(min(rounds), 3), "us_median": round(statistics.median(rounds), 3)}
        print(json.dumps({**found, "size": options.size, "batch": options.batch}))


if __name__ == "__main__":
    main()
