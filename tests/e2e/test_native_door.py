"""The native door against peers that do it wrong: every one gets a typed error or a close."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from typing import Any

from danube.core.batch.columns import encode
from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameDecoder, Hello, Kind, Lookup, OpenProducer
from danube.errors import DanubeError


class RawPeer:
    """A socket that speaks frames, and anything else it is told to."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._received = bytearray()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def frame(self) -> tuple[int, int, int, bytes] | None:
        """The next frame as kind, correlation, handle and body; None when the broker closed."""
        decoder = FrameDecoder()
        while True:
            for frame in decoder.frames(bytes(self._received), 0, len(self._received)):
                body = bytes(self._received[frame.start : frame.end])
                del self._received[: frame.start - 16 + 16 + ((frame.end - frame.start + 7) & ~7)]
                return frame.kind, frame.correlation, frame.handle, body
            try:
                more = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not more:
                return None
            self._received += more

    def error(self) -> DanubeError:
        found = self.frame()
        assert found is not None and found[0] == Kind.ERROR
        return wire.decode_error(found[3])

    def shake(self) -> None:
        self.send(wire.control_frame(Kind.HELLO, Hello(), 1))
        found = self.frame()
        assert found is not None and found[0] == Kind.WELCOME

    def open_producer(self, topic: str, **options: Any) -> None:
        self.send(wire.control_frame(Kind.LOOKUP, Lookup(topic, create=True, **options), 2))
        assert self.frame()[0] == Kind.RESULT  # type: ignore[index]
        self.send(wire.control_frame(Kind.OPEN_PRODUCER, OpenProducer(topic, "raw"), 3, 7))
        assert self.frame()[0] == Kind.PRODUCER_OPENED  # type: ignore[index]


def still_serves(process: Any) -> None:
    with RawPeer(process.port) as peer:
        peer.shake()
        peer.send(wire.control_frame(Kind.PING, None, 9))
        assert peer.frame()[:2] == (Kind.PONG, 9)  # type: ignore[index]


def test_what_is_not_the_protocol_is_refused(shared_broker: Any) -> None:
    process = shared_broker()
    garbage = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        struct.pack("<IBBHII", 0xFFFF_FFF8, 1, 0, 0, 1, 0),
        struct.pack("<IBBHII", 0, 1, 0, 0, 1, 0),
        struct.pack("<IBBHII", 17, 1, 0, 0, 1, 0) + b"x",
        wire.control_frame(Kind.PING, None, 1),
        wire.control_frame(Kind.HELLO, Hello(versions=[99]), 1),
        wire.frame_header(Kind.HELLO, 8, 1) + b"\xc1" * 8,
    ]
    for bytes_sent in garbage:
        with RawPeer(process.port) as peer:
            peer.send(bytes_sent)
            peer.error()
            assert peer.frame() is None
    still_serves(process)


def test_damaged_and_impossible_batches_get_a_typed_error(shared_broker: Any, topic: str) -> None:
    process = shared_broker()
    good = bytearray(encode([b"x" * 100] * 10, publish_time_us=1).to_bytes())

    def flipped(position: int) -> bytes:
        damaged = bytearray(good)
        damaged[position] ^= 0x10
        return bytes(damaged)

    with RawPeer(process.port) as peer:
        peer.shake()
        peer.open_producer(topic)
        for position in (0, 4, 36, 40, 60, 84, 96, 110, 140, 300, len(good) - 9):
            body = flipped(position)
            peer.send(wire.frame_header(Kind.PUBLISH, len(body), 5, 7) + body)
            found = peer.frame()
            assert found is not None and (found[0], found[1]) == (Kind.ERROR, 5)
        for body in (bytes(good[:104]), bytes(good) + bytes(8), bytes(good) * 2, b""):
            peer.send(wire.frame_header(Kind.PUBLISH, len(body), 5, 7) + body)
            found = peer.frame()
            assert found is not None and (found[0], found[1]) == (Kind.ERROR, 5)
        large = encode([bytes(5 * 1024 * 1024)], publish_time_us=1).to_bytes()
        peer.send(wire.frame_header(Kind.PUBLISH, len(large), 6, 7) + large)
        assert wire.decode_error(peer.frame()[3]).code == 1104  # type: ignore[index]
        peer.send(wire.frame_header(Kind.PUBLISH, len(good), 8, 7) + bytes(good))
        found = peer.frame()
        assert found is not None and found[0] == Kind.PUBLISHED
        assert wire.decode_published(found[3]).base_offset == 0
        peer.send(wire.frame_header(Kind.PUBLISH, len(good), 8, 1234) + bytes(good))
        assert wire.decode_error(peer.frame()[3]).retryable  # type: ignore[index]


def test_random_frames_never_end_a_worker(broker: Any, source: random.Random) -> None:
    process = broker(workers=2)
    pids = process.worker_pids
    kinds = [*Kind, 0, 31, 77, 255]
    for _ in range(40):
        with RawPeer(process.port) as peer:
            peer.shake()
            stream = b""
            for _ in range(20):
                body = source.randbytes(source.choice((0, 8, 16, 64, 512)))
                stream += wire.frame_header(
                    source.choice(kinds),
                    len(body),
                    source.randrange(100),
                    source.randrange(4),
                    source.randrange(256),
                )
                stream += body
            cut = source.randrange(len(stream))
            try:
                peer.send(stream[:cut])
                peer.send(stream[cut:])
            except OSError:
                continue
    still_serves(process)
    assert process.worker_pids == pids
    assert "Traceback" not in process.output_tail(100_000)


def test_a_silent_connection_is_closed_in_time(broker: Any) -> None:
    process = broker(environment={"DANUBE_LIMITS__HANDSHAKE_TIMEOUT": "300ms"})
    with RawPeer(process.port) as silent, RawPeer(process.port) as slow:
        slow.send(b"\x20")
        begun = time.monotonic()
        silent.error()
        assert silent.frame() is None
        assert time.monotonic() - begun < 5
        slow.error()


def test_more_connections_than_allowed_are_refused_clearly(broker: Any) -> None:
    process = broker(environment={"DANUBE_LIMITS__CONNECTIONS_MAX": "5"})
    peers = [RawPeer(process.port) for _ in range(5)]
    for peer in peers:
        peer.shake()
    with RawPeer(process.port) as refused:
        assert refused.error().code == 1112
    for peer in peers:
        peer.socket.close()


def test_idle_connections_cost_little_memory(broker: Any) -> None:
    process = broker()
    count = 500

    def resident_kib() -> int:
        with open(f"/proc/{process.worker_pids[0]}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    still_serves(process)
    before = resident_kib()
    peers = [RawPeer(process.port) for _ in range(count)]
    for peer in peers:
        peer.shake()
    grown = resident_kib() - before
    for peer in peers:
        peer.socket.close()
    assert grown / count <= 64, f"{grown / count} KiB for each idle connection"


def test_a_frame_that_comes_byte_by_byte_is_still_a_frame(shared_broker: Any) -> None:
    process = shared_broker()
    with RawPeer(process.port) as peer:
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in wire.control_frame(Kind.HELLO, Hello(), 1):
            peer.send(bytes([byte]))
        assert peer.frame()[0] == Kind.WELCOME  # type: ignore[index]


def test_pipelined_publishes_are_answered_in_order(shared_broker: Any, topic: str) -> None:
    process = shared_broker()
    batch = encode([b"x"] * 10, publish_time_us=1).to_bytes()
    with RawPeer(process.port) as peer:
        peer.shake()
        peer.open_producer(topic)
        peer.send(
            b"".join(
                wire.frame_header(Kind.PUBLISH, len(batch), 100 + turn, 7) + batch for turn in range(200)
            )
        )
        for turn in range(200):
            kind, correlation, handle, body = peer.frame()  # type: ignore[misc]
            assert (kind, correlation, handle) == (Kind.PUBLISHED, 100 + turn, 7)
            assert wire.decode_published(body).base_offset == turn * 10
    assert os.path.exists(process.data_dir)
