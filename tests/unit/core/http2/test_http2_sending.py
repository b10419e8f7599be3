"""Windows of the peer: what is sent at once, what waits, in which order it goes, and what is given up."""

from __future__ import annotations

import pytest

from danube.core.http2 import frames
from danube.core.http2.connection import Http2Settings, Stream
from danube.core.http2.frames import ErrorCode
from danube.core.http2.headers import OK_TRAILERS, RESPONSE_HEAD
from tests.unit.http2_parts import Door, Frame, number, parsed, settings

WINDOW = frames.window_frame


def payloads(door: Door, stream_id: int) -> bytes:
    return b"".join(
        frame.payload for frame in door.sent() if frame.kind == "DATA" and frame.stream_id == stream_id
    )


def test_data_is_cut_by_the_frame_size_of_the_peer() -> None:
    door = Door()
    stream = door.call(ended=True)
    body = bytes(range(256)) * 200
    door.machine.answer(stream, RESPONSE_HEAD, body, OK_TRAILERS)
    sent = door.sent()
    assert [len(frame.payload) for frame in sent if frame.kind == "DATA"] == [16384, 16384, 16384, 2048]
    assert b"".join(frame.payload for frame in sent if frame.kind == "DATA") == body
    assert sent[-1] == Frame("HEADERS", 5, 1, OK_TRAILERS)


def test_larger_frames_are_used_up_to_64_kib() -> None:
    door = Door().feed(settings((5, 1 << 20), (4, 1 << 20)) + WINDOW(0, 1 << 20))
    stream = door.call(ended=True)
    door.output()
    door.machine.answer(stream, RESPONSE_HEAD, bytes(100_000), OK_TRAILERS)
    assert [len(frame.payload) for frame in door.sent() if frame.kind == "DATA"] == [65536, 34464]


def test_what_the_window_of_a_stream_holds_back_follows_its_update() -> None:
    door = Door().feed(settings((4, 10)))
    door.output()
    stream = door.call(ended=True)
    door.machine.answer(stream, RESPONSE_HEAD, b"0123456789abcdef", OK_TRAILERS)
    assert [frame.payload for frame in door.sent()] == [RESPONSE_HEAD, b"0123456789"]
    assert stream.queued_bytes == door.machine.queued_bytes == 6
    door.feed(WINDOW(1, 2))
    assert [frame.payload for frame in door.sent()] == [b"ab"]
    door.feed(WINDOW(0, 1000))
    assert door.sent() == []
    door.feed(WINDOW(1, 100))
    assert [frame.payload for frame in door.sent()] == [b"cdef", OK_TRAILERS]
    assert door.machine.queued_bytes == 0
    assert not door.machine.streams
    assert [event[0] for event in door.events] == ["request"], "an answer that is complete needs no space"


def test_a_door_hears_when_all_that_waited_went_out() -> None:
    door = Door().feed(settings((4, 4)))
    stream = door.call()
    door.machine.send_headers(stream, RESPONSE_HEAD)
    door.machine.send_data(stream, b"01234567")
    door.machine.send_data(stream, memoryview(b"89"))
    assert stream.queued_bytes == 6
    door.feed(WINDOW(1, 5))
    assert ("writable", 1) not in door.events
    door.feed(WINDOW(1, 5))
    assert door.events[-1] == ("writable", 1)
    assert payloads(door, 1) == b"0123456789"
    door.machine.send_data(stream, b"more")
    assert payloads(door, 1) == b"more"


def test_streams_take_turns_at_the_window_of_the_connection() -> None:
    door = Door().feed(settings((4, 1 << 20)))
    streams = [door.call(stream_id) for stream_id in (1, 3, 5)]
    door.output()
    door.machine.send_data(streams[0], bytes(65535))  # uses the whole window up
    door.output()
    for stream in streams:
        door.machine.send_data(stream, bytes(40_000))
    assert door.sent() == []
    door.feed(WINDOW(0, 80_000))
    order = [(frame.stream_id, len(frame.payload)) for frame in door.sent()]
    assert order == [(1, 16384), (3, 16384), (5, 16384), (1, 16384), (3, 14464)]
    door.feed(WINDOW(0, 1 << 20))
    assert [frame.stream_id for frame in door.sent()] == [5, 1, 3, 5]
    assert door.machine.queued_bytes == 0


def test_a_new_initial_window_moves_every_stream_and_may_make_it_negative() -> None:
    door = Door()
    stream = door.call()
    door.machine.send_data(stream, bytes(1000))
    door.feed(settings((4, 100)))
    assert stream.send_window == 100 - 1000
    door.output()
    door.machine.send_data(stream, b"waits")
    assert door.output() == b""
    door.feed(WINDOW(1, 900))
    assert door.output() == b"", "the window is 0 now"
    door.feed(settings((4, 103)))
    assert payloads(door, 1) == b"wai"
    door.feed(settings((4, 65535)))
    assert payloads(door, 1) == b"ts"


def test_a_window_that_shrinks_takes_a_stream_out_of_the_line() -> None:
    door = Door().feed(settings((4, 1 << 20)))
    stream = door.call()
    door.machine.send_data(stream, bytes(70_000))
    door.feed(settings((4, 1)))
    door.output()
    door.feed(WINDOW(0, 10))
    assert door.output() == b""
    door.feed(WINDOW(1, 1 << 20))
    assert len(payloads(door, 1)) == 10


def test_of_several_initial_windows_in_one_frame_the_last_holds() -> None:
    door = Door()
    stream = door.call()
    door.feed(settings((4, 1), (4, 70_000)))
    assert stream.send_window == 70_000


def test_trailers_and_the_end_wait_for_the_data() -> None:
    door = Door().feed(settings((4, 3)))
    stream = door.call()
    door.output()
    door.machine.send_data(stream, b"abcdef")
    door.machine.send_trailers(stream, OK_TRAILERS)
    door.machine.send_data(stream, b"too late")
    door.machine.send_headers(stream, OK_TRAILERS)
    door.machine.send_trailers(stream, OK_TRAILERS)
    assert [frame.kind for frame in door.sent()] == ["DATA"]
    door.feed(WINDOW(1, 3))
    sent = door.sent()
    assert [frame.kind for frame in sent] == ["DATA", "HEADERS", "RST_STREAM"]
    assert sent[0].payload == b"def"


def test_trailers_only_ends_a_stream() -> None:
    door = Door()
    stream = door.call(ended=True)
    door.machine.send_headers(stream, OK_TRAILERS, end_stream=True)
    assert door.sent() == [Frame("HEADERS", 5, 1, OK_TRAILERS)]
    assert not door.machine.streams


def test_a_large_header_block_is_continued() -> None:
    door = Door()
    stream = door.call(ended=True)
    block = OK_TRAILERS * 2000
    door.machine.answer(stream, RESPONSE_HEAD, b"x", block)
    sent = door.sent()
    assert [(frame.kind, frame.flags) for frame in sent[2:]] == [("HEADERS", 1), ("CONTINUATION", 4)]
    assert b"".join(frame.payload for frame in sent[2:]) == block


def test_a_peer_with_a_smaller_header_table_is_told_once_that_we_use_none() -> None:
    door = Door().feed(settings((1, 0)))
    door.output()
    for stream_id in (1, 3):
        stream = door.call(stream_id, ended=True)
        door.machine.answer(stream, RESPONSE_HEAD, b"x", OK_TRAILERS)
    blocks = [frame.payload for frame in door.sent() if frame.kind == "HEADERS"]
    assert blocks == [b"\x20" + RESPONSE_HEAD, OK_TRAILERS, RESPONSE_HEAD, OK_TRAILERS]
    door.feed(settings((1, 8192)) + settings((1, 100)))
    door.machine.answer(door.call(5, ended=True), RESPONSE_HEAD, b"x", OK_TRAILERS)
    assert door.sent()[-3].payload == RESPONSE_HEAD


def test_a_queue_that_is_full_costs_the_stream() -> None:
    door = Door(Http2Settings(queued_bytes_per_stream_max=100))
    stream = door.call()
    door.machine.send_data(stream, bytes(65535))
    door.machine.send_data(stream, bytes(60))
    door.machine.send_data(stream, bytes(60))
    assert door.events[-1] == ("cancelled", 1, ErrorCode.ENHANCE_YOUR_CALM)
    assert door.sent()[-1] == Frame("RST_STREAM", 0, 1, number(ErrorCode.ENHANCE_YOUR_CALM))
    assert door.machine.queued_bytes == 0
    assert not door.machine.failed


def test_one_piece_larger_than_the_queue_costs_the_stream_before_any_is_sent() -> None:
    door = Door(Http2Settings(queued_bytes_per_stream_max=100))
    stream = door.call(ended=True)
    door.machine.answer(stream, RESPONSE_HEAD, bytes(70_000), OK_TRAILERS)
    assert [frame.kind for frame in door.sent()[-2:]] == ["HEADERS", "RST_STREAM"]
    assert door.events[-1] == ("cancelled", 1, ErrorCode.ENHANCE_YOUR_CALM)


def test_all_queues_together_are_bounded() -> None:
    door = Door(Http2Settings(queued_bytes_max=150))
    streams = [door.call(stream_id) for stream_id in (1, 3)]
    door.machine.send_data(streams[0], bytes(65535))
    for stream in streams:
        door.machine.send_data(stream, bytes(100))
    assert door.events[-1][:2] == ("cancelled", 3)
    assert door.machine.queued_bytes == 100


@pytest.mark.parametrize("how", ["peer", "us", "gone"])
def test_a_stream_that_ends_takes_its_queue_with_it(how: str) -> None:
    door = Door().feed(settings((4, 1)))
    stream = door.call()
    door.machine.send_data(stream, bytes(100))
    door.output()
    if how == "peer":
        door.feed(frames.frame(frames.RST_STREAM, 0, 1, number(8)))
    elif how == "us":
        door.machine.reset(stream, 8)
    else:
        door.machine.disconnected("gone")
    assert door.machine.queued_bytes == stream.queued_bytes == 0
    assert not door.machine._waiting
    assert "queued=0" in repr(stream)
    door.output()
    door.feed(WINDOW(0, 1000))
    assert door.output() == b""


def test_a_door_that_writes_again_when_it_may_stays_within_the_windows() -> None:
    door = Door().feed(settings((4, 1000)))
    stream = door.call()

    def writable(one: Stream) -> None:
        while not one.queued_bytes:
            door.machine.send_data(one, bytes(600))

    door.writable = writable  # type: ignore[method-assign]
    door.machine.send_data(stream, bytes(1600))
    door.feed(WINDOW(1, 5000))
    assert len(payloads(door, 1)) == 6000


def test_streams_that_end_in_line_leave_it() -> None:
    """A peer that opens no window and resets what waits must not fill the line."""
    door = Door()
    door.machine.send_data(door.call(1), bytes(65535))
    for stream_id in range(3, 1003, 2):
        door.machine.send_data(door.call(stream_id), b"waits")
        assert len(door.machine._waiting) == 1
        door.feed(frames.frame(frames.RST_STREAM, 0, stream_id, number(8)))
    assert not door.machine._waiting


def test_what_is_sent_while_the_line_moves_stays_behind_what_waits() -> None:
    door = Door().feed(settings((4, 1 << 20)))
    first, second = door.call(1), door.call(3)
    door.machine.send_data(first, bytes(65535))
    door.machine.send_data(first, b"1")
    door.machine.send_data(second, b"early ")
    door.writable = lambda one: door.machine.send_data(second, b"late") if one is first else None  # type: ignore
    door.output()
    door.feed(WINDOW(0, 1000))
    assert payloads(door, 3) == b"early late"


def test_an_empty_answer_has_an_empty_frame() -> None:
    door = Door()
    stream = door.call(ended=True)
    door.machine.answer(stream, RESPONSE_HEAD, b"", OK_TRAILERS)
    assert [len(frame.payload) for frame in parsed(door.output())] == [
        len(RESPONSE_HEAD),
        0,
        len(OK_TRAILERS),
    ]


def answered(bodies: list[bytes], together: bool, before: bytes = b"", reset: int = 0) -> tuple[bytes, bytes]:
    """What many answers are on the wire, and what comes after the peer has made room."""
    door = Door().feed(before)
    streams = [door.call(stream_id, ended=True) for stream_id in range(1, 2 * len(bodies), 2)]
    if reset:
        door.feed(frames.reset_frame(reset, ErrorCode.CANCEL))
    door.output()
    if together:
        door.machine.answer_all(streams, RESPONSE_HEAD, bodies, OK_TRAILERS)
    else:
        for stream, body in zip(streams, bodies, strict=True):
            door.machine.answer(stream, RESPONSE_HEAD, body, OK_TRAILERS)
    at_once = door.output()
    door.feed(WINDOW(0, 1 << 20) + b"".join(WINDOW(one.stream_id, 1 << 16) for one in streams))
    assert not door.machine.streams and door.machine.queued_bytes == 0 and not door.machine.failed
    assert door.machine._send_window + sum(map(len, bodies)) >= 65_535 + (1 << 20)
    return at_once, door.output()


@pytest.mark.parametrize(
    ("bodies", "before", "reset"),
    [
        ([b"12345"], b"", 0),
        ([b"%05d" % number for number in range(90)], b"", 0),
        ([b""] * 5, b"", 0),
        ([b"one", b"other", b"one"], b"", 0),
        ([b"12345"] * 9, b"", 5),
        ([bytes(20_000)] * 3, b"", 0),
        ([bytes(9_000)] * 9, b"", 0),
        ([b"12345"] * 9, settings((4, 3)), 0),
        ([b"12345"] * 9, settings((1, 100)), 0),
    ],
    ids=["one", "ninety", "empty", "sizes that differ", "a reset", "large", "beyond the connection's window",
         "beyond their own windows", "a table that changed"],
)  # fmt: skip
def test_answers_together_are_those_one_by_one(bodies: list[bytes], before: bytes, reset: int) -> None:
    assert answered(bodies, True, before, reset) == answered(bodies, False, before, reset)


def test_answers_of_one_size_become_one_piece() -> None:
    door = Door()
    streams = [door.call(stream_id, ended=True) for stream_id in (1, 3, 5)]
    door.output()
    door.machine.answer_all(streams, RESPONSE_HEAD, [b"a", b"b", b"c"], OK_TRAILERS)
    assert len(door.machine.output) == 1
    assert [frame.payload for frame in door.sent()[1::3]] == [b"a", b"b", b"c"]
