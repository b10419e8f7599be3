"""Connections that leave their worker for another: which, when, and what the other one does with them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from danube.broker.routing.passing import ConnectionPassing
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.ipc.counters import Counter, Counters, State
from danube.ipc.passage import Passage, Passed
from danube.ipc.region import Region
from danube.server.arrivals import PassedConnections
from tests.unit.broker_parts import frames_in
from tests.unit.native_door import DESCRIPTOR, Door, FakeTransport, feed, on_loop, publish

OPEN = wire.control_frame(Kind.OPEN_PRODUCER, wire.OpenProducer("/default/t", "p"), 3, 1)
SUBSCRIBE = wire.control_frame(Kind.SUBSCRIBE, wire.Subscribe("/default/t", "s", "c"), 3, 1)
LOOKUP = wire.control_frame(Kind.LOOKUP, wire.Lookup("/default/t"), 2)
FOUND = wire.result_frame(None, 2)


class FakePassing:
    """Takes connections for another worker, as ConnectionPassing does, while ``takes``."""

    def __init__(self) -> None:
        self.takes = True
        self.passed: list[tuple[int, int, bytes]] = []

    def offer(self, owner: int, descriptor: int, unread: memoryview, sent_bytes: int, told: bytes) -> bool:
        assert not told, "there is nothing to tell where nobody is asked"
        if self.takes:
            self.passed.append((owner, descriptor, bytes(unread)))
        return self.takes


class Passing:
    """A door whose connections may leave for worker 1, which owns everything."""

    def __init__(self) -> None:
        self.way = FakePassing()
        self.door = Door(passing=cast(ConnectionPassing, self.way))
        self.door.router.owner = 1
        self.connection, self.transport = self.door.connect()

    def answer(self, frame: bytes) -> None:
        self.connection.send(frame)
        self.door.server.flush()


@pytest.mark.parametrize("opens", [OPEN, SUBSCRIBE], ids=["producer", "consumer"])
def test_a_connection_goes_with_what_it_opens_first(opens: bytes) -> None:
    def test() -> None:
        one = Passing()
        feed(one.connection, LOOKUP)
        one.answer(FOUND)
        feed(one.connection, opens + publish(4, 64) + publish(5, 64)[:40])
        assert one.way.passed == [(1, DESCRIPTOR, opens + publish(4, 64) + publish(5, 64)[:40])]
        assert [correlation for correlation, _ in one.door.router.taken] == [2], "routed here: the lookup"
        assert one.transport.aborted and one.door.counted["connections_passed"] == 1
        one.connection.connection_lost(None)
        assert one.door.counted["connections"] == 0 and not one.door.server.connections
        one.connection.send(b"a late answer")
        one.door.server.flush()

    on_loop(test)


def test_a_connection_that_is_owed_an_answer_stays() -> None:
    def asked(one: Passing) -> None:
        feed(one.connection, LOOKUP)

    def pinged(one: Passing) -> None:
        feed(one.connection, wire.control_frame(Kind.PING, None, 9))  # its PONG leaves at the end of the turn

    def administers(one: Passing) -> None:
        feed(one.connection, LOOKUP + wire.control_frame(Kind.ADMIN, wire.Admin("topics"), 7))
        one.answer(FOUND)  # the other one is not

    def stays(before: Callable[[Passing], None]) -> None:
        one = Passing()
        before(one)
        feed(one.connection, OPEN)
        assert one.way.passed == [] and not one.transport.aborted
        assert one.door.router.taken[-1][0] == 3

    for before in (asked, pinged, administers):
        on_loop(lambda before=before: stays(before))  # type: ignore[misc]


def test_answers_of_any_kind_are_counted() -> None:
    def test() -> None:
        one = Passing()
        feed(one.connection, LOOKUP + wire.control_frame(Kind.ADMIN, wire.Admin("topics"), 7))
        one.answer(wire.result_frame([1], 7) + FOUND)
        feed(one.connection, wire.control_frame(Kind.PING, None, 8))
        one.door.server.flush()
        feed(one.connection, OPEN)
        assert [owner for owner, _, _ in one.way.passed] == [1]

    on_loop(test)


def test_a_connection_stays_once_it_has_opened_anything() -> None:
    def test() -> None:
        one = Passing()
        one.door.router.owner = 0
        one.way.takes = False  # as it is for an owner that holds it already
        feed(one.connection, OPEN)
        one.way.takes, one.door.router.owner = True, 1
        feed(one.connection, SUBSCRIBE)
        assert one.way.passed == [] and len(one.door.router.taken) == 2

    on_loop(test)


def test_what_another_worker_cannot_take_is_served_here() -> None:
    def unsent(one: Passing) -> None:
        one.transport.unsent = 10

    def unknown(one: Passing) -> None:
        one.door.router.owner = None

    def draining(one: Passing) -> None:
        one.door.server.draining = True

    def refused(one: Passing) -> None:
        one.way.takes = False

    def stays(because: Callable[[Passing], None]) -> None:
        one = Passing()
        because(one)
        feed(one.connection, OPEN)
        assert one.way.passed == [] and one.door.router.taken[-1][0] == 3 and not one.transport.aborted

    for because in (unsent, unknown, draining, refused):
        on_loop(lambda because=because: stays(because))  # type: ignore[misc]


def test_nothing_is_asked_where_there_is_one_worker() -> None:
    def test() -> None:
        door = Door()
        connection, transport = door.connect()
        door.router.owner = 1
        feed(connection, LOOKUP + OPEN)
        assert len(door.router.taken) == 2 and not transport.aborted

    on_loop(test)


def arrive(door: Door, unread: bytes) -> FakeTransport:
    connection, transport = door.server.arrived(unread, 0), FakeTransport()
    connection.connection_made(cast(asyncio.BaseTransport, transport))
    return transport


def test_an_arrival_is_welcomed_already_and_begins_with_its_bytes() -> None:
    def test() -> None:
        door = Door(passing=cast(ConnectionPassing, FakePassing()))
        door.router.owner = 1
        transport = arrive(door, OPEN + publish(4, 64)[:40])
        (connection,) = door.server.connections.values()
        feed(connection, publish(4, 64)[40:])
        assert [correlation for correlation, _ in door.router.taken] == [3, 4]
        assert door.counted == {"connections": 1}, "it was counted where the kernel had put it"
        door.server.sweep(asyncio.get_running_loop().time() + 100)
        assert not transport.closed and frames_in(transport.written) == []

    on_loop(test)


def test_an_arrival_beyond_the_limit_is_told_so() -> None:
    def test() -> None:
        door = Door(connections_max=0)
        transport = arrive(door, OPEN)
        (frame,) = door.sent(transport)
        assert frame.kind == Kind.ERROR and transport.closed and door.router.taken == []

    on_loop(test)


# -- which connections ------------------------------------------------------------------------------


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(3, 1 << 16)
    for worker in range(3):
        block = Counters(made, worker)
        block.begin(100 + worker, 1, 0)
        block.put(Counter.STATE, State.READY)
    yield made
    made.close()


def offered(region: Region, owner: int, shares_max: float = 0) -> bool:
    with socket.socket() as raw:
        pairs = tuple((own.dup(), towards.dup()) for own, towards in region.pairs)
        passage = Passage(0, pairs)
        passing = ConnectionPassing(0, region, passage, "grpc", shares_max=shares_max)
        taken = passing.offer(owner, raw.fileno(), b"x", 9)
        passage.close()
    waiting = Passage(owner, tuple((own.dup(), towards.dup()) for own, towards in region.pairs))
    arrived = waiting.receive() if owner else None
    waiting.close()
    if arrived is not None and arrived.raw is not None:
        assert arrived[1:] == ("grpc", 9, b"x", b"")
        arrived.raw.close()
    assert taken == (arrived is not None)
    return taken


def test_the_owner_gets_a_connection_while_it_holds_fewer(region: Region) -> None:
    here, there = Counters(region, 0), Counters(region, 1)
    for held, others, passed in [(1, 0, True), (1, 1, False), (5, 4, True), (4, 5, False), (9, 0, True)]:
        here.put(Counter.CONNECTIONS, held)
        there.put(Counter.CONNECTIONS, others)
        assert offered(region, 1) == passed, (held, others)
    assert not offered(region, 0), "it is there already"


def test_an_owner_may_be_let_hold_several_shares(region: Region) -> None:
    blocks = [Counters(region, worker) for worker in range(3)]
    for *held, passed in [
        (4, 4, 4, True),  # it would have 5 of 12, less than two of three shares
        (4, 6, 2, True),
        (2, 7, 3, True),
        (1, 8, 3, False),  # 9 of 12
        (12, 0, 0, True),
        (9, 8, 1, True),  # it holds fewer than this one
    ]:
        for block, count in zip(blocks, held, strict=True):
            block.put(Counter.CONNECTIONS, count)
        assert offered(region, 1, shares_max=2) == passed, held


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING, State.STOPPED])
def test_a_worker_that_does_not_serve_gets_none(region: Region, state: State) -> None:
    Counters(region, 0).put(Counter.CONNECTIONS, 1)
    assert offered(region, 1)
    Counters(region, 1).put(Counter.STATE, state)
    assert not offered(region, 1)


def test_a_dead_worker_gets_none(region: Region) -> None:
    Counters(region, 0).put(Counter.CONNECTIONS, 1)
    Counters(region, 1).put(Counter.PID, 0)
    assert not offered(region, 1)


# -- the way in --------------------------------------------------------------------------------------


class FakePassage:
    def __init__(self, arrived: list[Any]) -> None:
        self.own, self._towards = socket.socketpair()
        self.arrived = arrived
        self._towards.send(b"!" * len(arrived))

    def fileno(self) -> int:
        return self.own.fileno()

    def receive(self) -> Any:
        if not self.arrived:
            return None
        self.own.recv(1)
        return self.arrived.pop(0)

    def close(self) -> None:
        self.own.close()
        self._towards.close()


def test_one_that_cannot_be_served_does_not_stop_those_behind_it() -> None:
    async def test() -> None:
        door = Door()
        broken, (client, good) = socket.socket(socket.AF_UNIX), socket.socketpair()
        broken.close()
        for end in (client, good):
            end.setblocking(False)
        passage = FakePassage([Passed(raw, "native", 0, OPEN) for raw in (None, broken, good)])
        passed = PassedConnections(cast(Passage, passage), {"native": door.server})
        passed.start()
        while not door.router.taken:
            await asyncio.sleep(0.001)
        passed.stop()
        (connection,) = door.server.connections.values()
        connection.send(wire.result_frame(None, 3))
        door.server.flush()
        (answer,) = frames_in(await asyncio.get_running_loop().sock_recv(client, 1000))
        assert answer.correlation == 3
        connection.abort()
        client.close()
        passage.close()

    asyncio.run(asyncio.wait_for(test(), 10))
