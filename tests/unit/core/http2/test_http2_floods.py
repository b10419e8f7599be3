"""Peers that only cost: each flood ends with ENHANCE_YOUR_CALM soon, honest traffic never does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from danube.core.http2 import frames
from danube.core.http2.headers import OK_TRAILERS, RESPONSE_HEAD, response_block
from danube.core.http2.sending import CONTROL_BURST, RESETS_BURST, FloodGuard
from tests.unit.http2_parts import BLOCK, SECOND, Door, data, headers, number, settings

RST = frames.RST_STREAM


def odd_ids() -> Iterator[int]:
    return itertools.count(3, 2)


def rapid_reset() -> Iterator[bytes]:
    for stream_id in odd_ids():
        yield headers(stream_id) + frames.frame(RST, 0, stream_id, number(8))


def provoked_resets() -> Iterator[bytes]:
    """The server is made to reset: windows that grow by nothing."""
    for stream_id in odd_ids():
        yield headers(stream_id) + frames.window_frame(stream_id, 0)


def malformed() -> Iterator[bytes]:
    for stream_id in odd_ids():
        yield headers(stream_id, block=response_block([("a", "b")]))


def empty_heads() -> Iterator[bytes]:
    for stream_id in odd_ids():
        yield headers(stream_id, block=b"")


def a_million_streams() -> Iterator[bytes]:
    for stream_id in odd_ids():
        yield headers(stream_id)


def late_data() -> Iterator[bytes]:
    yield frames.frame(RST, 0, 1, number(8))
    while True:
        yield data(1, b"x")


def again(piece: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.repeat(piece)


def toggled_windows() -> Iterator[bytes]:
    while True:
        yield settings((4, 100)) + settings((4, 200))


FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "rapid reset": rapid_reset,
    "provoked resets": provoked_resets,
    "malformed": malformed,
    "empty heads": empty_heads,
    "a million streams": a_million_streams,
    "late data": late_data,
    "ping": again(frames.ping_frame(bytes(8), answer=False)),
    "ping answers": again(frames.ping_frame(bytes(8), answer=True)),
    "settings": again(settings()),
    "settings acknowledged": again(frames.SETTINGS_ACK),
    "settings of many": again(settings(*[(9, 1)] * 2000)),
    "initial windows": toggled_windows,
    "priority": again(frames.frame(frames.PRIORITY, 0, 1, bytes(5))),
    "empty data": again(data(1)),
    "padding alone": again(data(1, b"\x05" + bytes(5), flags=8)),
    "window of the connection": again(frames.window_frame(0, 1)),
    "window of a stream": again(frames.window_frame(1, 1)),
    "unknown frames": again(frames.frame(99, 0, 0)),
    "goaway": again(frames.goaway_frame(0, 0, "")),
    "reset of what ended": lambda: itertools.chain(
        [frames.frame(RST, 0, 1, number(8))], itertools.repeat(frames.frame(RST, 0, 1, number(8)))
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_soon_and_leaves_little(name: str) -> None:
    door = Door()
    door.call()
    door.machine.send_data(door.stream_by_id[1], bytes(65535 + 50_000))  # tiny windows have something to move
    door.output()
    written = 0
    for count, piece in enumerate(FLOODS[name]()):
        door.now += 10_000  # 100,000 a second
        door.feed(piece)
        written += len(door.output())
        if door.machine.failed:
            break
        assert count < 2 * CONTROL_BURST, "not stopped"
    assert door.code == "ENHANCE_YOUR_CALM"
    assert written < 1_000_000
    assert len(door.stream_by_id) <= RESETS_BURST + 1100
    assert not door.machine.streams


@pytest.mark.parametrize(
    ("piece", "count_max"),
    [
        (settings(*[(9, 1)] * 2000), CONTROL_BURST // 2000 + 1),  # a setting costs like a frame
        (frames.window_frame(1, 1), CONTROL_BURST // 3 + 1),  # and so does the DATA that an update makes
    ],
)
def test_what_costs_more_is_stopped_sooner(piece: bytes, count_max: int) -> None:
    door = Door()
    stream = door.call()
    door.feed(settings((4, 100)) + frames.window_frame(0, 1 << 20))
    door.machine.send_data(stream, bytes(100_000))
    count = 0
    while not door.machine.failed:
        door.feed(piece)
        count += 1
    assert count <= count_max


def test_a_block_of_endless_parts_ends_the_connection() -> None:
    door = Door().feed(frames.frame(frames.HEADERS, 0, 1))
    for _ in range(17):
        door.feed(frames.frame(frames.CONTINUATION, 0, 1))
    assert door.code == "ENHANCE_YOUR_CALM"


def test_a_block_of_many_bytes_ends_the_connection() -> None:
    door = Door().feed(frames.frame(frames.HEADERS, 0, 1, bytes(16384)))
    for _ in range(2):
        door.feed(frames.frame(frames.CONTINUATION, 0, 1, bytes(16384)))
    assert door.code == "ENHANCE_YOUR_CALM"


def test_a_header_bomb_ends_the_connection() -> None:
    entry = b"\x40\x01a" + b"\x7f\x81\x1e" + b"v" * 3968
    door = Door().feed(headers(1, block=BLOCK + entry))
    door.feed(headers(3, block=b"\xbe" * 16_000))
    assert door.code == "ENHANCE_YOUR_CALM"


def test_headers_that_are_too_large_are_the_doors_to_refuse() -> None:
    block = BLOCK + response_block([("x-a", "v" * 16_300)])
    door = Door().feed(frames.frame(frames.HEADERS, 0, 1, block[:16000]))
    door.feed(frames.frame(frames.CONTINUATION, 4, 1, block[16000:]))
    assert door.stream_by_id[1].head.http_status == 431
    assert not door.machine.failed


def test_a_busy_honest_client_is_never_told_to_calm_down() -> None:
    """100,000 calls/s for a second, each with window updates, a PING in two, one in ten cancelled."""
    door = Door(echo=True)
    ping = frames.ping_frame(bytes(8), answer=False)
    for call in range(100_000):
        door.now += 10_000
        stream_id = 2 * call + 1
        if call % 10 == 0:
            door.feed(headers(stream_id) + frames.frame(RST, 0, stream_id, number(8)))
        else:
            windows = frames.window_frame(0, 5) + frames.window_frame(stream_id, 5)
            door.feed(headers(stream_id) + data(stream_id, b"12345", ended=True) + windows)
        if call % 2:
            door.feed(ping)
        assert not door.machine.failed
        door.output()
        door.events.clear()
        door.stream_by_id.clear()


def test_a_consumer_that_gives_back_every_message_is_honest() -> None:
    door = Door()
    stream = door.call(ended=True)
    for _ in range(50_000):
        door.machine.send_data(stream, bytes(100))
        door.feed(frames.window_frame(1, 100) + frames.window_frame(0, 100))
        door.output()
    assert not door.machine.failed
    assert stream.queued_bytes == 0


def test_a_thousand_open_calls_may_be_cancelled_at_once() -> None:
    door = Door()
    for stream_id in range(1, 2001, 2):
        door.call(stream_id)
    for stream_id in range(1, 2001, 2):
        door.feed(frames.frame(RST, 0, stream_id, number(8)))
    assert not door.machine.failed


def test_late_calls_after_go_away_are_no_flood() -> None:
    door = Door()
    door.machine.go_away("restarting")
    for stream_id in range(1, 20_001, 2):
        door.feed(headers(stream_id))
    assert not door.machine.failed


def test_allowances_come_back_with_time() -> None:
    guard = FloodGuard(0)
    assert guard.control(CONTROL_BURST, 0, 0, 0)
    assert not guard.control(1, 0, 0, 0)
    assert guard.control(900, SECOND, 0, 0)
    assert all(guard.reset(SECOND, 0, 0) for _ in range(RESETS_BURST))
    assert not guard.reset(SECOND, 0, 0)
    assert guard.reset(2 * SECOND, 0, 0)
    assert not guard.control(10**6, SECOND, 0, 0), "a clock that goes back earns nothing"


def test_no_allowance_is_saved_up() -> None:
    """It is filled when it is found empty, so that two bursts are what a peer can have at once."""
    guard, later = FloodGuard(0), 10**9 * SECOND
    spent = sum(guard.control(1, later, 10**6, 10**6) for _ in range(5 * CONTROL_BURST))
    assert CONTROL_BURST < spent <= 2 * CONTROL_BURST + 1
    guard = FloodGuard(0)
    spent = sum(guard.reset(later, 10**6, 10**6) for _ in range(5 * RESETS_BURST))
    assert RESETS_BURST < spent <= 2 * RESETS_BURST + 1


def test_streaming_out_with_answers_ends_cleanly() -> None:
    door = Door()
    stream = door.call(ended=True)
    door.machine.send_headers(stream, RESPONSE_HEAD)
    door.machine.send_trailers(stream, OK_TRAILERS)
    assert [frame.kind for frame in door.sent()] == ["HEADERS", "HEADERS"]
