"""Silence, slowness and their ends, with the time as an argument."""

from __future__ import annotations

import pytest

from danube.core.http2 import frames
from danube.core.http2.connection import KEEPALIVE_PING, Http2Settings
from tests.unit.http2_parts import BLOCK, GREETING, SECOND, Door, Frame, data, headers

PING = [Frame("PING", 0, 0, KEEPALIVE_PING)]
PONG = frames.ping_frame(KEEPALIVE_PING, answer=True)


def at(door: Door, seconds: float) -> Door:
    door.now = int(seconds * SECOND)
    door.machine.tick(door.now)
    return door


def test_a_silent_peer_is_asked_and_lives_when_it_answers() -> None:
    door = Door()
    assert at(door, 29.9).sent() == []
    assert at(door, 30.1).sent() == PING
    assert at(door, 45).sent() == [], "once"
    door.feed(PONG)
    assert at(door, 60).sent() == []
    assert at(door, 75.1).sent() == PING


def test_a_peer_that_does_not_answer_is_given_up() -> None:
    door = Door()
    door.call()
    at(at(door, 31), 50.9)
    assert not door.machine.failed
    assert "keepalive" in at(door, 51).machine.failed
    assert door.sent()[-1].kind == "GOAWAY"
    assert door.events[-1] == ("cancelled", 1, 0)


def test_keepalive_can_be_off() -> None:
    assert at(Door(Http2Settings(keepalive_ns=0)), 10_000).sent() == []


def test_idle_connections_give_their_memory_back() -> None:
    door = Door(echo=True).feed(headers(1, ended=True))
    assert door.machine._requests.heads
    at(door, 40)
    assert not door.machine._requests.heads


@pytest.mark.parametrize("start", [b"", frames.PREFACE[:10], frames.PREFACE])
def test_a_preface_and_settings_are_due_in_ten_seconds(start: bytes) -> None:
    door = Door(greeted=False).feed(start)
    at(door, 9.9)
    assert not door.machine.failed
    assert "preface" in at(door, 10.1).machine.failed


def test_settings_must_be_acknowledged() -> None:
    door = Door(greeted=False).feed(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0))
    at(door, 9.9)
    assert not door.machine.failed
    assert at(door, 10.1).code == "SETTINGS_TIMEOUT"


def test_a_header_block_is_due_in_ten_seconds() -> None:
    door = at(Door(), 100)
    door.feed(frames.frame(frames.HEADERS, 0, 1, BLOCK[:5]))
    at(door, 109).feed(frames.frame(frames.CONTINUATION, 0, 1, BLOCK[5:6]))
    assert not door.machine.failed
    assert "header block" in at(door, 110.1).machine.failed


def test_a_frame_is_due_in_thirty_seconds() -> None:
    door = at(Door(Http2Settings(keepalive_ns=0)), 100)
    whole = headers(1) + data(1, bytes(100))
    for second in range(30):
        at(door, 100 + second).feed(whole[second : second + 1])
    assert not door.machine.failed
    assert "frame was not finished" in at(door, 130.1).machine.failed


def test_a_slow_stream_of_whole_frames_is_fine() -> None:
    door = Door(Http2Settings(keepalive_ns=0))
    door.call()
    piece = data(1, bytes(100))
    door.feed(piece[:50])
    for second in range(1, 100):
        at(door, second).feed(piece[50:] + piece[:50])
    assert not door.machine.failed


def test_time_does_not_run_for_a_peer_that_is_not_read() -> None:
    door = Door(greeted=False).feed(GREETING + headers(1)[:12])
    at(door, 35)
    assert door.machine.failed
    door = Door(greeted=False).feed(GREETING + headers(1)[:12])
    door.machine.reading_paused = True
    for second in range(1, 200):
        at(door, second)
    door.machine.reading_paused = False
    at(door, 201)
    door.feed(headers(1)[12:])
    assert door.events == [("request", 1, "/danube.Topic/Ask", False)]
    assert not door.machine.failed


def test_what_was_finished_in_time_is_not_held_against_a_peer_later() -> None:
    door = at(Door(Http2Settings(keepalive_ns=0)), 100)
    door.feed(frames.frame(frames.HEADERS, 0, 1, BLOCK[:5]))
    door.feed(frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, BLOCK[5:])[:11])
    at(door, 105).feed(frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, BLOCK[5:])[11:])
    assert [event[0] for event in door.events] == ["request"]
    at(door, 1000)
    assert not door.machine.failed
