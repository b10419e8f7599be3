"""Receive buffers and the connection that uses them: lent, given back, never shared; a full ring; limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from danube.broker.worker.places import Places
from danube.client.aio.connection import Link
from danube.client.blocking.connection import BlockingLink
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import (
    DanubeError,
    Draining,
    LimitExceeded,
    OperationTimeout,
    ProtocolError,
    UnsupportedVersion,
)
from danube.limits import OUTPUT_BUFFER_BYTES_MAX, RECEIVE_BUFFER_BYTES, RECEIVE_BUFFER_BYTES_FIRST
from danube.server import native
from danube.server.receive_buffers import KEPT_MAX, LARGE_MAX, ReceiveBuffer, ReceiveBuffers
from tests.unit.native_door import Door, feed, publish

SIZE = 4096


def read(buffers: ReceiveBuffers, data: bytes, held: ReceiveBuffer | None = None, wanted: int = 16) -> Any:
    """As a socket would: into the room, and no more than it has."""
    room, held = buffers.room(held, wanted)
    assert len(room) >= len(data)
    room[: len(data)] = data
    return buffers.received(held, len(data))


def test_reads_of_a_turn_lie_behind_each_other_until_it_ends() -> None:
    buffers = ReceiveBuffers(SIZE)
    first = read(buffers, b"a" * 100)
    assert (first.start, first.end) == (0, 100)
    first.start = 100  # all of it was taken
    assert buffers.keep(first, 16, earned=False) is None
    second = read(buffers, b"b" * 50)
    assert second is first and (second.start, second.end) == (100, 150)
    assert bytes(first.view[:150]) == b"a" * 100 + b"b" * 50
    buffers.end_turn()
    assert read(buffers, b"c").start == 0


def test_a_full_scratch_buffer_is_used_again_when_the_turn_has_ended() -> None:
    buffers = ReceiveBuffers(SIZE)
    first = read(buffers, b"a" * (SIZE - 10))
    first.start = first.end
    buffers.keep(first, 16, earned=False)
    second = read(buffers, b"b")
    assert second is not first and bytes(first.view[:5]) == b"aaaaa"
    assert buffers.lent_bytes == SIZE
    buffers.end_turn()
    assert buffers.lent_bytes == 0 and buffers._free == [first]


@pytest.mark.parametrize("earned", [False, True])
def test_a_part_of_a_frame_takes_at_most_twice_its_bytes_until_much_was_sent(earned: bool) -> None:
    buffers = ReceiveBuffers(SIZE)
    held = buffers.keep(read(buffers, b"x" * 24), 12 << 20, earned=earned)
    assert held is not None and held.size == (SIZE if earned else 64)
    assert bytes(held.view[held.start : held.end]) == b"x" * 24
    for _ in range(40):
        room, held = buffers.room(held, 12 << 20)
        assert held is not None
        room[: len(room)] = b"y" * len(room)
        held = buffers.keep(buffers.received(held, len(room)), 12 << 20, earned=earned)
        assert held is not None
        assert held.size <= max(64, SIZE if earned else 0, 2 * held.unread_bytes)
        if held.unread_bytes > 10 * SIZE:
            break
    assert held.unread_bytes > 10 * SIZE
    assert bytes(held.view[held.start : held.start + 25]) == b"x" * 24 + b"y"


def test_a_part_that_no_frame_lies_before_takes_no_room_of_the_turn() -> None:
    buffers = ReceiveBuffers(SIZE)
    for _ in range(1000):
        held = buffers.keep(read(buffers, b"x" * (SIZE // 4)), SIZE, earned=False)
        assert held is not None and held.size <= SIZE // 2
    assert buffers.lent_bytes == 0


def test_a_read_into_a_block_ends_where_its_frame_ends() -> None:
    """Else a connection that sends many frames would be read in pieces as small as its block."""
    buffers = ReceiveBuffers(SIZE)
    for size in (1, 15, 16, 20):
        held = buffers.keep(read(buffers, b"x" * size), 40 if size >= 16 else 16, earned=False)
        while held is not None:
            wanted = 40 if held.unread_bytes >= 16 else 16
            room, held = buffers.room(held, wanted)
            assert held is not None and 0 < len(room) <= wanted - held.unread_bytes
            buffer = buffers.received(held, len(room))
            buffer.start = buffer.end if buffer.unread_bytes == 40 else buffer.start
            held = buffers.keep(buffer, wanted, earned=False)


def test_only_a_few_connections_keep_a_whole_buffer_and_give_it_back() -> None:
    buffers = ReceiveBuffers(SIZE)
    parts = [buffers.keep(read(buffers, b"x" * 40), SIZE, earned=True) for _ in range(LARGE_MAX + 5)]
    assert sorted(part.size for part in parts if part) == [80] * 5 + [SIZE] * LARGE_MAX
    buffers.end_turn()
    for part in parts[:LARGE_MAX]:
        assert part is not None
        buffers.give_back(part)
    assert len(buffers._free) == KEPT_MAX
    again = buffers.keep(read(buffers, b"x" * 40), SIZE, earned=True)
    assert again is not None and again.size == SIZE


def test_a_lent_buffer_is_free_once_and_only_after_the_turn() -> None:
    buffers = ReceiveBuffers(SIZE)
    held = buffers.keep(read(buffers, b"x" * 40), SIZE, earned=True)
    assert held is not None
    buffers.lend(held)
    buffers.give_back(held)
    assert held not in buffers._free
    buffers.end_turn()
    buffers.end_turn()
    assert buffers._free == [held]


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
        other, _ = door.connect()
        door.turns.clear()
        feed(connection, publish(1, 304) + b"\xff" * 64)
        assert transport.closed and door.turns == ["asked"]
        connection.connection_lost(None)
        feed(other, publish(7, 304))
        assert [bytes(body) for _, body in door.router.taken] == [b"\x01" * 304, b"\x07" * 304]
        door.server.flush()
        feed(other, publish(8, 304))
        assert bytes(door.router.taken[0][1]) != b"\x01" * 304, "then it is free"

    run(test)


@pytest.mark.parametrize("sent", [b"", b"\x40", wire.frame_header(Kind.PUBLISH, 12 << 20, 1, 1) + b"x" * 8])
def test_a_thousand_connections_hold_what_they_have_sent(run: Any, sent: bytes) -> None:
    def test() -> None:
        door = Door(connections_max=1000)
        buffers = door.server.buffers
        connections = [door.connect()[0] for _ in range(1000)]
        for connection in connections:
            connection.get_buffer(-1)  # as for a socket that has ended, too
            feed(connection, sent)
        held = [connection._buffer for connection in connections]
        assert sum(buffer.size for buffer in held if buffer) <= 64 * 1000
        assert buffers.lent_bytes == 0 and buffers._free == []

    run(test)


def test_a_thousand_connections_that_speak_at_once_are_read_into_one_buffer(run: Any) -> None:
    def test() -> None:
        door = Door(connections_max=1000)
        for _ in range(1000):
            feed(door.connect()[0], wire.control_frame(Kind.PING, None, 1) + publish(2, 64))
        assert len(door.router.taken) == 1000 and door.server.buffers.lent_bytes == 0

    run(test)


def test_much_that_comes_at_once_is_written_before_more_is_read(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "LENT_BYTES_MAX", 4096)

    def test() -> None:
        door = Door()
        door.server.buffers = ReceiveBuffers(1024)
        connection, _ = door.connect()
        door.turns.clear()
        feed(connection, publish(1, 1008) * 6, 1024)
        assert door.turns.count("run") == 1

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


def test_connections_that_would_take_the_logs_descriptors_are_told_so(run: Any) -> None:
    def test() -> None:
        places = Places(2)
        door, other = Door(places=places), Door(places=places)
        first, _ = door.connect()
        other.connect()
        _, late = door.connect(shake=False)
        (frame,) = door.sent(late)
        assert type(frame.error) is LimitExceeded and late.closed
        assert "descriptors for 2 connections" in frame.error.what
        first.connection_lost(None)
        other.connect()

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


# -- a client's connection -----------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [False, True])
def test_the_buffer_of_a_client_grows_when_a_read_fills_it(run: Any, blocking: bool) -> None:
    class Session:
        """Takes all but ``left`` bytes."""

        left = 0
        wanted = 100

        def received(self, view: memoryview, start: int, end: int) -> int:
            return end - self.left

    def test() -> None:
        session: Any = Session()
        link: Any = BlockingLink(session) if blocking else Link(session)

        def fill(count: int) -> int:
            room = link._view[link._end :] if blocking else link.get_buffer(-1)
            room[:count] = b"x" * count
            (link._received if blocking else link.buffer_updated)(count)
            return len(link._buffer)

        sizes = [fill(10), fill(RECEIVE_BUFFER_BYTES_FIRST - 1)]
        assert sizes == [RECEIVE_BUFFER_BYTES_FIRST, RECEIVE_BUFFER_BYTES_FIRST]
        session.left = 10
        assert fill(RECEIVE_BUFFER_BYTES_FIRST) == RECEIVE_BUFFER_BYTES
        assert bytes(link._view[:10]) == b"x" * 10 and link._end == 10
        session.left = 0
        assert fill(RECEIVE_BUFFER_BYTES - 10) == RECEIVE_BUFFER_BYTES

    run(test)
