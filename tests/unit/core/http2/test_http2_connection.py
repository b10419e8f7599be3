"""The rules of RFC 9113 one by one: what a peer may do, and what it is told when it does more."""

from __future__ import annotations

import pytest

from danube.core.http2 import frames
from danube.core.http2.connection import Http2Settings, ServerConnection
from danube.core.http2.frames import ErrorCode
from danube.core.http2.headers import OK_TRAILERS, RESPONSE_HEAD, response_block
from danube.errors import InvalidArgument, InvariantBroken
from tests.unit.http2_parts import (
    BLOCK,
    FIELDS,
    GREETING,
    Door,
    Frame,
    data,
    headers,
    number,
    parsed,
    settings,
)

RST = frames.RST_STREAM


def block_with(*fields: tuple[str, str]) -> bytes:
    return response_block([*FIELDS, *fields])


# -- the start


def test_the_greeting_is_settings_and_the_window_of_the_connection() -> None:
    machine = ServerConnection(Door(greeted=False), Http2Settings(), 0)
    first, second = parsed(b"".join(machine.output))
    assert first.kind == "SETTINGS"
    pairs = [first.payload[at : at + 6] for at in range(0, len(first.payload), 6)]
    announced = {int.from_bytes(pair[:2], "big"): int.from_bytes(pair[2:], "big") for pair in pairs}
    assert announced == {1: 4096, 3: 1024, 4: 1 << 20, 5: 16384, 6: 16384}
    assert (second.kind, second.stream_id, second.code) == ("WINDOW_UPDATE", 0, (16 << 20) - 65535)


def test_settings_of_the_peer_are_acknowledged() -> None:
    door = Door(greeted=False).feed(GREETING)
    assert [frame.kind for frame in door.sent()][-1:] == ["SETTINGS"]
    assert not door.machine.failed
    assert door.machine.wanted == 9


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "HTTP/1"),
        (b"\x16\x03\x01\x02\x00\x01", "TLS"),
        (b"\x00\x01\x02", "preface"),
        (b"PRI * HTTP/2.0\r\n\r\nSX", "preface"),
    ],
)
def test_who_does_not_speak_http2_gets_nothing_but_the_greeting(start: bytes, reason: str) -> None:
    assert reason in Door(greeted=False).feed(start).machine.failed
    for cut in range(len(start)):
        door = Door(greeted=False).feed(start[:cut]).feed(start[cut:])
        assert door.machine.failed
        assert [frame.kind for frame in door.sent()] == ["SETTINGS", "WINDOW_UPDATE"]
        assert door.feed(b"more").rest == b""
        assert door.output() == b""


def test_the_first_frame_is_settings() -> None:
    assert Door(greeted=False).feed(frames.PREFACE + headers()).code == "PROTOCOL_ERROR"
    assert Door(greeted=False).feed(frames.PREFACE + frames.SETTINGS_ACK).code == "PROTOCOL_ERROR"


def test_wanted_is_what_the_next_step_needs() -> None:
    door = Door(greeted=False)
    assert door.machine.wanted == 24
    door.feed(GREETING + headers()[:5])
    assert door.machine.wanted == 9
    door.feed(headers()[5:10])
    assert door.machine.wanted == len(headers())
    door.feed(headers()[10:])
    assert door.machine.wanted == 9
    assert door.events == [("request", 1, "/danube.Topic/Ask", False)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_window_bytes": 1},
        {"connection_window_bytes": 1 << 31},
        {"max_frame_bytes": 100},
        {"header_table_bytes": 0},
    ],
)
def test_settings_that_http2_does_not_know_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="HTTP/2 wants"):
        Http2Settings(**wrong)


# -- calls


def test_a_call_and_its_answer_byte_by_byte() -> None:
    door = Door(echo=True).feed(headers(1) + data(1, b"abc", ended=True))
    assert door.events == [("request", 1, "/danube.Topic/Ask", False), ("data", 1, b"abc", True)]
    assert door.output() == (
        bytes([0, 0, len(RESPONSE_HEAD), 1, 4, 0, 0, 0, 1])
        + RESPONSE_HEAD
        + bytes([0, 0, 3, 0, 0, 0, 0, 0, 1])
        + b"abc"
        + bytes([0, 0, len(OK_TRAILERS), 1, 5, 0, 0, 0, 1])
        + OK_TRAILERS
    )
    assert not door.machine.streams


def test_padding_and_priority_are_taken_off() -> None:
    padded = headers(1, block=b"\x03" + number(0) + b"\x10" + BLOCK + b"\0\0\0", flags=0x28)
    door = Door().feed(padded + data(1, b"\x02hi\0\0", flags=8) + data(1, b"\x00", ended=True, flags=8))
    assert door.events == [
        ("request", 1, "/danube.Topic/Ask", False),
        ("data", 1, b"hi", False),
        ("data", 1, b"", True),
    ]


def test_a_header_block_may_come_in_parts() -> None:
    first = frames.frame(frames.HEADERS, frames.END_STREAM, 1, BLOCK[:5])
    middle = frames.frame(frames.CONTINUATION, 0, 1, BLOCK[5:9])
    last = frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, BLOCK[9:])
    door = Door().feed(first + middle + last)
    assert door.events == [("request", 1, "/danube.Topic/Ask", True)]


def test_trailers_of_a_client_end_its_side() -> None:
    door = Door().feed(
        headers(1) + data(1, b"x") + headers(1, ended=True, block=response_block([("x-a", "1")]))
    )
    assert door.events[-1] == ("data", 1, b"", True)
    assert door.stream_by_id[1].remote_closed


def test_reserved_bits_and_unknown_frames_are_ignored() -> None:
    door = Door().feed(frames.frame(200, 255, 77, b"?") + frames.frame(frames.HEADERS, 4, 1 << 31 | 1, BLOCK))
    door.feed(frames.frame(frames.DATA, 1, 1 << 31 | 1, b"x"))
    assert [event[0] for event in door.events] == ["request", "data"]
    assert not door.machine.failed


def test_an_undefined_flag_of_data_is_ignored() -> None:
    door = Door().feed(headers(1) + data(1, b"x", flags=0x40))
    assert door.events[-1] == ("data", 1, b"x", False)


def test_a_head_that_is_no_grpc_is_told_with_its_problem() -> None:
    block = response_block([(":method", "GET"), (":scheme", "http"), (":path", "/")])
    stream = Door().call(block=block, ended=True)
    assert stream.head.http_status == 405
    assert "POST" in stream.head.problem


def test_an_answer_before_the_end_of_a_request_tells_the_client_to_stop() -> None:
    door = Door()
    stream = door.call()
    door.machine.answer(stream, RESPONSE_HEAD, b"early", OK_TRAILERS)
    sent = door.sent()
    assert [frame.kind for frame in sent] == ["HEADERS", "DATA", "HEADERS", "RST_STREAM"]
    assert sent[-1].code == ErrorCode.NO_ERROR
    door.feed(data(1, b"late", ended=True))  # it was on its way
    assert not door.machine.failed
    assert door.sent() == []


def test_what_is_sent_after_the_end_goes_nowhere() -> None:
    door = Door()
    stream = door.call(ended=True)
    door.machine.answer(stream, RESPONSE_HEAD, b"x", OK_TRAILERS)
    door.output()
    door.machine.answer(stream, RESPONSE_HEAD, b"x", OK_TRAILERS)
    door.machine.send_headers(stream, RESPONSE_HEAD)
    door.machine.send_data(stream, b"x")
    door.machine.send_trailers(stream, OK_TRAILERS)
    door.machine.reset(stream, 8)
    assert door.output() == b""


# -- faults of one stream


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (headers(1, block=block_with(("Upper", "x"))), ErrorCode.PROTOCOL_ERROR),
        (headers(1, block=b""), ErrorCode.PROTOCOL_ERROR),
        (headers(1, block=block_with(("content-length", "5")), ended=True), ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_a_malformed_request_is_reset_and_never_told(sent: bytes, code: ErrorCode) -> None:
    door = Door().feed(sent)
    assert door.events == []
    assert door.sent() == [Frame("RST_STREAM", 0, 1, number(code))]
    assert not door.machine.failed
    door.call(3)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (headers(1), ErrorCode.PROTOCOL_ERROR),  # a second head without the end
        (headers(1, ended=True, block=response_block([(":path", "/")])), ErrorCode.PROTOCOL_ERROR),
        (frames.window_frame(1, 0), ErrorCode.PROTOCOL_ERROR),
        (frames.window_frame(1, (1 << 31) - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (data(1, b"123456", ended=True), ErrorCode.PROTOCOL_ERROR),
        (data(1, b"1", ended=True), ErrorCode.PROTOCOL_ERROR),
        (
            headers(1, ended=True, block=response_block([("x", "y")])),
            ErrorCode.PROTOCOL_ERROR,
        ),  # 5 bytes missing
    ],
)
def test_a_fault_of_one_stream_resets_it(sent: bytes, code: ErrorCode) -> None:
    door = Door()
    stream = door.call(block=block_with(("content-length", "5")))
    door.feed(sent)
    assert Frame("RST_STREAM", 0, 1, number(code)) in door.sent()
    assert door.events[-1] == ("cancelled", 1, code)
    assert stream.local_closed and stream.remote_closed
    assert not door.machine.failed


@pytest.mark.parametrize("sent", [data(1, b"x"), headers(1, ended=True)])
def test_nothing_comes_after_the_end(sent: bytes) -> None:
    door = Door()
    door.call(ended=True)
    door.feed(sent)
    assert door.sent() == [Frame("RST_STREAM", 0, 1, number(ErrorCode.STREAM_CLOSED))]
    assert door.events[-1] == ("cancelled", 1, ErrorCode.STREAM_CLOSED)


def test_a_content_length_that_agrees_is_fine() -> None:
    door = Door()
    door.call(block=block_with(("content-length", "5")))
    door.feed(data(1, b"123") + data(1, b"45", ended=True))
    assert door.events[-1] == ("data", 1, b"45", True)


def test_data_after_the_peers_own_reset_is_a_fault_of_that_stream() -> None:
    door = Door()
    door.call()
    door.feed(frames.frame(RST, 0, 1, number(8)))
    assert door.events[-1] == ("cancelled", 1, 8)
    door.feed(data(1, b"x"))
    assert door.sent() == [Frame("RST_STREAM", 0, 1, number(ErrorCode.STREAM_CLOSED))]
    assert not door.machine.failed


def test_frames_that_crossed_a_reset_of_ours_are_ignored_and_their_window_given_back() -> None:
    door = Door(Http2Settings(connection_window_bytes=65535))
    stream = door.call()
    door.machine.reset(stream, ErrorCode.CANCEL)
    door.sent()
    for _ in range(3):
        door.feed(data(1, bytes(16000)))
    door.feed(headers(1, ended=True) + frames.window_frame(1, 5) + frames.frame(RST, 0, 1, number(0)))
    assert [(frame.kind, frame.stream_id, frame.code) for frame in door.sent()] == [
        ("WINDOW_UPDATE", 0, 48000)
    ]
    assert door.events == [("request", 1, "/danube.Topic/Ask", False)]
    assert not door.machine.failed


def test_too_many_streams_are_refused_one_by_one() -> None:
    door = Door(Http2Settings(max_concurrent_streams=2))
    for stream_id in (1, 3, 5):
        door.feed(headers(stream_id))
    assert door.sent() == [Frame("RST_STREAM", 0, 5, number(ErrorCode.REFUSED_STREAM))]
    door.feed(data(5, b"on its way") + headers(5, ended=True))
    door.machine.answer(door.stream_by_id[1], RESPONSE_HEAD, b"", OK_TRAILERS)
    door.call(7)
    assert [event[1] for event in door.events] == [1, 3, 7]


# -- faults of the connection


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (headers(0), "PROTOCOL_ERROR"),
        (headers(2), "PROTOCOL_ERROR"),
        (headers(5) + headers(3), "PROTOCOL_ERROR"),
        (headers(5) + data(3, b"x"), "PROTOCOL_ERROR"),
        (data(0, b"x"), "PROTOCOL_ERROR"),
        (data(1, b"x"), "PROTOCOL_ERROR"),
        (data(2, b"x"), "PROTOCOL_ERROR"),
        (headers(1) + data(1, b"\x05abc", flags=8), "PROTOCOL_ERROR"),
        (headers(1) + data(1, b"", flags=8), "PROTOCOL_ERROR"),
        (headers(1, block=b"\xff" + BLOCK, flags=8), "PROTOCOL_ERROR"),
        (headers(1, block=b"\0\0", flags=0x20), "FRAME_SIZE_ERROR"),
        (headers(3, block=number(3) + b"\0" + BLOCK, flags=0x20), "PROTOCOL_ERROR"),
        (headers(1, block=b"\xff\xff\xff\xff\xff\xff\xff"), "COMPRESSION_ERROR"),
        (headers(1, block=b"\x80"), "COMPRESSION_ERROR"),
        (headers(1) + headers(1, ended=True, block=b"\xfe"), "COMPRESSION_ERROR"),
        (frames.frame(frames.PRIORITY, 0, 0, bytes(5)), "PROTOCOL_ERROR"),
        (frames.frame(frames.PRIORITY, 0, 1, bytes(4)), "FRAME_SIZE_ERROR"),
        (frames.frame(frames.PRIORITY, 0, 7, number(7) + b"\0"), "PROTOCOL_ERROR"),
        (frames.frame(RST, 0, 1, number(8)), "PROTOCOL_ERROR"),
        (frames.frame(RST, 0, 0, number(8)), "PROTOCOL_ERROR"),
        (headers(1) + frames.frame(RST, 0, 1, b"\0\0\0"), "FRAME_SIZE_ERROR"),
        (frames.frame(frames.SETTINGS, 0, 1), "PROTOCOL_ERROR"),
        (frames.frame(frames.SETTINGS, 0, 0, bytes(5)), "FRAME_SIZE_ERROR"),
        (frames.frame(frames.SETTINGS, 1, 0, bytes(6)), "FRAME_SIZE_ERROR"),
        (settings((2, 2)), "PROTOCOL_ERROR"),
        (settings((4, 1 << 31)), "FLOW_CONTROL_ERROR"),
        (settings((5, 16383)), "PROTOCOL_ERROR"),
        (settings((5, 1 << 24)), "PROTOCOL_ERROR"),
        (frames.frame(frames.PING, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
        (frames.frame(frames.PING, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
        (frames.frame(frames.GOAWAY, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
        (frames.frame(frames.GOAWAY, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
        (frames.frame(frames.PUSH_PROMISE, 4, 1, bytes(8)), "PROTOCOL_ERROR"),
        (frames.frame(frames.CONTINUATION, 4, 1, BLOCK), "PROTOCOL_ERROR"),
        (frames.frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), "FRAME_SIZE_ERROR"),
        (frames.window_frame(0, 0), "PROTOCOL_ERROR"),
        (frames.window_frame(0, (1 << 31) - 1), "FLOW_CONTROL_ERROR"),
        (frames.window_frame(1, 1), "PROTOCOL_ERROR"),
        (headers(1) + frames.window_frame(1, 100) + settings((4, (1 << 31) - 1)), "FLOW_CONTROL_ERROR"),
        (frames.frame(frames.HEADERS, 0, 1, BLOCK) + headers(3), "PROTOCOL_ERROR"),
        (frames.frame(frames.HEADERS, 0, 1, BLOCK) + data(1), "PROTOCOL_ERROR"),
        (headers(1) + frames.frame(frames.HEADERS, 0, 3, BLOCK) + data(1), "PROTOCOL_ERROR"),
        (frames.frame(frames.HEADERS, 0, 1, BLOCK) + frames.frame(200, 0, 0), "PROTOCOL_ERROR"),
        (frames.frame(frames.HEADERS, 0, 1) + frames.frame(frames.CONTINUATION, 4, 3), "PROTOCOL_ERROR"),
        (b"\x00\x40\x01\x00\x00\x00\x00\x00\x01", "FRAME_SIZE_ERROR"),
        (b"\xff\xff\xff\xc8\x00\x00\x00\x00\x00", "FRAME_SIZE_ERROR"),
    ],
)  # fmt: skip
def test_a_fault_of_the_connection_ends_it(sent: bytes, code: str) -> None:
    door = Door().feed(sent)
    assert door.code == code
    last = door.sent()[-1]
    assert last.kind == "GOAWAY"
    assert ErrorCode(last.code).name == code
    assert door.machine.closing and not door.machine.streams
    told = [event for event in door.events if event[0] == "cancelled"]
    assert len(told) == len({event[1] for event in door.events if event[0] == "request"})
    door.feed(headers(101))  # nothing is taken any more
    door.machine.tick(door.now + 1000 * 10**9)
    door.machine.go_away()
    assert door.sent() == []
    assert door.rest == b""


def test_a_call_that_both_sides_ended_is_over_for_good() -> None:
    for late in (data(1, b"x"), headers(1, ended=True)):
        door = Door(echo=True).feed(headers(1, ended=True) + late)
        assert door.code == "STREAM_CLOSED"
    door = Door(echo=True).feed(headers(1, ended=True) + frames.window_frame(1, 9))
    assert not door.machine.failed


# -- flow control towards us


def test_windows_come_back_in_batches_and_only_when_consumed() -> None:
    door = Door(Http2Settings(initial_window_bytes=65536, connection_window_bytes=131072))
    stream = door.call()
    for _ in range(4):
        door.feed(data(1, bytes(16000)))
    assert door.sent() == []
    for _ in range(3):
        door.machine.consumed(stream, 16000)
    sent = [(frame.kind, frame.stream_id, frame.code) for frame in door.sent()]
    assert sent == [("WINDOW_UPDATE", 1, 48000)]
    door.feed(data(1, bytes(16000)) + data(1, b"", ended=True))
    door.machine.consumed(stream, 16000)
    door.machine.consumed(stream, 16000)
    sent = [(frame.kind, frame.stream_id, frame.code) for frame in door.sent()]
    assert sent == [("WINDOW_UPDATE", 0, 80000)], "a stream that ended needs no window"


def test_more_than_the_window_of_a_stream_resets_it() -> None:
    door = Door(Http2Settings(initial_window_bytes=65535))
    door.call()
    for _ in range(5):
        door.feed(data(1, bytes(16000)))
    assert door.events[-1] == ("cancelled", 1, ErrorCode.FLOW_CONTROL_ERROR)
    assert not door.machine.failed


@pytest.mark.parametrize("flags", [0, 8])
def test_more_than_the_window_of_the_connection_ends_it(flags: int) -> None:
    door = Door(Http2Settings(connection_window_bytes=65535))
    door.call(1)
    door.call(3)
    for stream_id in (1, 3, 1, 3, 1):
        door.feed(data(stream_id, bytes(16000), flags=flags))
    assert door.code == "FLOW_CONTROL_ERROR"


def test_data_that_nobody_reads_counts_against_the_connection_too() -> None:
    door = Door(Http2Settings(connection_window_bytes=65535))
    door.call(1)
    for _ in range(4):
        door.feed(data(1, bytes(16000)))
    door.machine.reset(door.stream_by_id[1], 8)
    assert door.feed(data(1, bytes(16000))).code == "FLOW_CONTROL_ERROR"


def test_padding_is_given_back_by_the_machine() -> None:
    door = Door(Http2Settings(initial_window_bytes=65535, connection_window_bytes=65535))
    door.call()
    for _ in range(200):
        door.feed(data(1, b"\xff" + bytes(255), flags=8))
    increments = [(frame.stream_id, frame.code) for frame in door.sent()]
    assert increments == [(0, 32768), (1, 32768)]


def test_the_window_comes_back_for_a_stream_that_is_forgotten() -> None:
    door = Door(Http2Settings(connection_window_bytes=65535))
    stream = door.call()
    for _ in range(3):
        door.feed(data(1, bytes(16000)))
    door.machine.reset(stream, 8)
    door.sent()
    door.machine.consumed(stream, 16000)
    door.machine.consumed(None, 32000)
    assert [(frame.stream_id, frame.code) for frame in door.sent()] == [(0, 48000)]


def test_a_door_that_consumes_more_than_it_got_is_broken() -> None:
    door = Door()
    with pytest.raises(InvariantBroken):
        door.machine.consumed(None, 16 << 20)


# -- the end


def test_go_away_lets_open_calls_finish_and_refuses_new_ones() -> None:
    door = Door()
    stream = door.call(5, ended=True)
    door.machine.go_away("restarting")
    door.machine.go_away("restarting")
    (told,) = door.sent()
    assert told.payload == number(5) + number(0) + b"restarting"
    door.feed(headers(7))
    assert door.sent() == [Frame("RST_STREAM", 0, 7, number(ErrorCode.REFUSED_STREAM))]
    door.machine.answer(stream, RESPONSE_HEAD, b"x", OK_TRAILERS)
    assert len(door.sent()) == 3
    assert not door.machine.failed and door.machine.closing


def test_the_end_of_the_transport_cancels_each_open_call_once() -> None:
    door = Door()
    for stream_id in (1, 3):
        door.call(stream_id)
    door.machine.disconnected("reset by peer")
    door.machine.disconnected("again")
    assert door.events[-2:] == [("cancelled", 1, ErrorCode.CANCEL), ("cancelled", 3, ErrorCode.CANCEL)]
    assert door.machine.failed == "reset by peer"
    assert door.output() == b""


def test_a_door_may_end_other_streams_while_it_is_told_of_one() -> None:
    door = Door()
    streams = [door.call(stream_id) for stream_id in (1, 3, 5)]
    told = door.cancelled

    def cancelled(stream: object, code: int) -> None:
        told(stream, code)  # type: ignore[arg-type]
        for one in streams:
            door.machine.reset(one, 8)

    door.cancelled = cancelled  # type: ignore[method-assign]
    door.machine.disconnected("gone")
    assert [event[1] for event in door.events if event[0] == "cancelled"] == [1]


def test_goaway_of_the_peer_is_noted() -> None:
    door = Door().feed(frames.goaway_frame(0, 0, "bye"))
    assert door.machine.peer_going_away
    assert not door.machine.failed


def test_a_ping_is_answered_with_its_own_bytes() -> None:
    door = Door().feed(
        frames.ping_frame(b"12345678", answer=False) + frames.ping_frame(b"87654321", answer=True)
    )
    assert door.sent() == [Frame("PING", frames.ACK, 0, b"12345678")]
