"""Receive buffers and the connection that uses them: lent, given back, never shared; a full ring; limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from danube.core import wire
from danube.core.wire import Kind
from danube.errors import (
    DanubeError,
    Draining,
    LimitExceeded,
    OperationTimeout,
    ProtocolError,
    UnsupportedVersion,
)
from danube.limits import OUTPUT_BUFFER_BYTES_MAX
from danube.server import native
from danube.server.receive_buffers import KEPT_MAX, ReceiveBuffers
from tests.unit.native_door import Door, feed, publish

SIZE = 4096


def test_a_buffer_given_back_is_used_again() -> None:
    buffers = ReceiveBuffers(SIZE)
    first = buffers.take()
    first.end = 100
    buffers.give_back(first)
    again = buffers.take()
    assert again is first and (again.start, again.end) == (0, 0)


def test_a_lent_buffer_is_not_handed_out_before_the_turn_ends() -> None:
    buffers = ReceiveBuffers(SIZE)
    lent = buffers.take()
    buffers.lend(lent)
    buffers.lend(lent)
    buffers.give_back(lent)
    assert buffers.take() is not lent
    buffers.end_turn()
    assert buffers.take() is lent
    assert buffers.take() is not lent, "it is free once, however often it was lent"


def test_a_lent_buffer_that_is_still_in_use_stays_with_its_connection() -> None:
    buffers = ReceiveBuffers(SIZE)
    lent = buffers.take()
    lent.start, lent.end = 10, 20
    buffers.lend(lent)
    buffers.end_turn()
    assert (lent.start, lent.end, lent.lent) == (10, 20, False)
    assert buffers.take() is not lent


def test_only_a_few_buffers_of_the_usual_size_are_kept() -> None:
    buffers = ReceiveBuffers(SIZE)
    taken = [buffers.take() for _ in range(KEPT_MAX + 5)]
    large = buffers.take(SIZE + 1)
    assert large.size == len(large.data) == SIZE + 1
    for buffer in [large, *taken]:
        buffers.give_back(buffer)
    kept = [buffers.take() for _ in range(KEPT_MAX + 5)]
    assert len(set(map(id, kept)) & set(map(id, taken))) == KEPT_MAX
    assert large not in kept


# -- a connection over a transport that the test holds ---------------------------------------------


@pytest.fixture
def run() -> Callable[[Callable[[], Any]], Any]:
    """Call on a running loop, which the connection asks for the time."""

    async def inside(function: Callable[[], Any]) -> Any:
        return function()

    return lambda function: asyncio.run(inside(function))


@pytest.mark.parametrize("step", [1, 7, 64, 4096, 1 << 20])
def test_frames_arrive_whole_however_they_are_cut(run: Any, step: int) -> None:
    def test() -> None:
        door = Door()
        door.server.buffers = ReceiveBuffers(1024)
        connection, _ = door.connect()
        feed(connection, b"".join(publish(number, number * 304) for number in range(6)), step)
        assert [number for number, _ in door.router.taken] == list(range(6))
        assert all(bytes(body) == bytes([number]) * number * 304 for number, body in door.router.taken)
        assert connection._buffer is None, "an idle connection holds no buffer"

    run(test)


def test_a_full_ring_keeps_the_frame_stops_reading_and_loses_nothing(run: Any) -> None:
    def test() -> None:
        door = Door()
        connection, transport = door.connect()
        door.router.room = False
        feed(connection, publish(1, 64) + publish(2, 64) + publish(3, 64)[:40])
        assert not transport.reading and door.router.taken == []
        feed(connection, publish(3, 64)[40:])  # what the kernel had handed out already
        assert door.server.hand_over(), "still full"
        door.server.flush()
        connection.pause_writing()
        door.router.room = True
        assert not door.server.hand_over()
        assert [number for number, _ in door.router.taken] == [1, 2, 3]
        assert not transport.reading, "the peer takes nothing, so nothing is read from it"
        connection.resume_writing()
        assert transport.reading

    run(test)


def test_batches_before_a_frame_that_is_refused_lie_there_until_they_are_written(run: Any) -> None:
    def test() -> None:
        door = Door()
        connection, transport = door.connect()
        door.turns.clear()
        feed(connection, publish(1, 304) + b"\xff" * 64)
        assert transport.closed and door.turns == ["asked"]
        connection.connection_lost(None)
        other, _ = door.connect()
        feed(other, publish(7, 304))
        assert [bytes(body) for _, body in door.router.taken] == [b"\x01" * 304, b"\x07" * 304]
        door.server.flush()
        assert len(door.server.buffers._free) == 2, "then it is free"

    run(test)


def next_turn(door: Door) -> bool:
    door.server.flush()
    return door.server.hand_over()


def test_a_connection_with_many_frames_has_a_share_of_each_turn(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FRAMES_AT_ONCE", 3)
    monkeypatch.setattr(native, "SHARE_NS", 0)

    def test() -> None:
        door = Door()
        many, transport = door.connect()
        few, _ = door.connect()
        frames = [publish(number, 104) for number in range(1, 9)]
        feed(many, b"".join(frames)[:-10])
        feed(few, publish(99, 16))
        assert [number for number, _ in door.router.taken] == [1, 2, 3, 99]
        assert not transport.reading and not door.server.hand_over(), "no ring is full, and the turn goes on"
        assert len(door.router.taken) == 4
        assert not next_turn(door)
        assert [number for number, _ in door.router.taken[4:]] == [4, 5, 6] and not transport.reading
        door.router.room = False
        assert next_turn(door), "now one is"
        door.router.room = True
        assert not next_turn(door)
        assert transport.reading
        feed(many, frames[-1][-10:])
        next_turn(door)
        taken = [(number, bytes(body)) for number, body in door.router.taken if number != 99]
        assert taken == [(number, bytes([number]) * 104) for number in range(1, 9)]

    run(test)


def test_frames_that_take_no_time_are_taken_together(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SHARE_NS", 3_600_000_000_000)

    def test() -> None:
        door = Door()
        connection, transport = door.connect()
        feed(connection, b"".join(publish(number % 256, 16) for number in range(10 * native.FRAMES_AT_ONCE)))
        assert len(door.router.taken) == 10 * native.FRAMES_AT_ONCE and transport.reading

    run(test)


def test_a_connection_that_is_lost_while_others_have_their_turn_is_forgotten(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FRAMES_AT_ONCE", 1)
    monkeypatch.setattr(native, "SHARE_NS", 0)

    def test() -> None:
        door = Door()
        connection, _ = door.connect()
        for _ in range(2):
            next_turn(door)
        feed(connection, publish(1, 16) + publish(2, 16))
        connection.connection_lost(None)
        assert not next_turn(door)
        assert [number for number, _ in door.router.taken] == [1]

    run(test)


def test_the_handshake_comes_first_in_time_and_in_a_version_both_speak(run: Any) -> None:
    def refused(raw: bytes) -> type[DanubeError]:
        door = Door()
        connection, transport = door.connect(shake=False)
        feed(connection, raw)
        (frame,) = door.sent(transport)
        assert transport.closed and door.router.taken == []
        return type(frame.error)

    def test() -> None:
        assert refused(publish(1, 8)) is ProtocolError
        assert refused(wire.control_frame(Kind.HELLO, wire.Hello(versions=[99]))) is UnsupportedVersion
        assert refused(b"GET / HTTP/1.1\r\n\r\n") in (ProtocolError, LimitExceeded)
        assert refused(wire.frame_header(Kind.HELLO, 1 << 20)) is LimitExceeded
        door = Door()
        _, transport = door.connect(shake=False)
        door.connect()
        door.server.sweep(asyncio.get_running_loop().time() + 6)
        (frame,) = door.sent(transport)
        assert type(frame.error) is OperationTimeout and transport.closed

    run(test)


def test_connections_are_bounded_and_freed(run: Any) -> None:
    def test() -> None:
        door = Door(connections_max=2)
        first, _ = door.connect()
        door.connect()
        _, late = door.connect(shake=False)
        (frame,) = door.sent(late)
        assert type(frame.error) is LimitExceeded and late.closed
        first.connection_lost(None)
        assert door.router.gone == [first] and first.closed and door.counted["connections"] == 1
        first.send(b"into the void")
        door.connect()
        door.server.worker_restarted(3)
        assert door.router.restarted == [3, 3]

    run(test)


def test_a_client_that_never_reads_is_let_go(run: Any) -> None:
    def test() -> None:
        door = Door()
        connection, transport = door.connect()
        transport.unsent = OUTPUT_BUFFER_BYTES_MAX + 1
        connection.send(b"x" * 16)
        door.server.flush()
        assert transport.aborted

    run(test)


def test_a_stopping_broker_refuses_publishes_and_answers_the_rest(run: Any) -> None:
    def test() -> None:
        door = Door()
        connection, transport = door.connect()
        door.server.drain()
        feed(connection, publish(4, 8) + wire.control_frame(Kind.PING, None, 5) + wire.ack_frame(2, b""))
        frames = door.sent(transport)
        assert [(frame.kind, frame.correlation) for frame in frames] == [
            (Kind.ERROR, 0), (Kind.ERROR, 4), (Kind.PONG, 5),
        ]  # fmt: skip
        assert all(type(frame.error) is Draining for frame in frames[:2])
        assert len(door.router.taken) == 1
        assert door.server.session(connection.connection_id) is connection
        assert door.server.session(12345) is None, "somebody who left"
        connection.send(wire.control_frame(Kind.PONG, None, 6))
        assert [frame.correlation for frame in door.sent(transport)] == [6]
        door.server.close_all()
        assert transport.closed

    run(test)
