"""A connection whose publishes are ahead of their limit is not read until they are within it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from danube.broker.api import RoutedSession
from danube.core.protocol.native import Frame
from danube.host import clock
from danube.server.native import NativeConnection
from tests.unit.native_door import Door, FakeRouter, FakeTransport, feed, publish

REST_NS = 30_000_000


class LimitingRouter(FakeRouter):
    """Each frame of the first ``ahead`` is ahead of its limit."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead

    def route(self, session: RoutedSession, frame: Frame, view: memoryview) -> bool:
        taken = super().route(session, frame, view)
        if len(self.taken) <= self.ahead:
            session.rest_ns = clock.monotonic_ns() + REST_NS
        return taken


def limited(ahead: int) -> tuple[Door, LimitingRouter, NativeConnection, FakeTransport]:
    door, router = Door(), LimitingRouter(ahead)
    door.router = door.server.router = router  # type: ignore[assignment]
    return door, router, *door.connect()


async def turns_until(door: Door, done: Callable[[], bool]) -> None:
    """Run the turns that the door asks for, as a worker would."""
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0.001)
            if door.server.waiting:
                door.server.hand_over()
                door.server.flush()


def test_frames_behind_one_that_is_ahead_wait_and_keep_their_order() -> None:
    async def scenario() -> None:
        door, router, connection, transport = limited(ahead=2)
        began_ns = clock.monotonic_ns()
        feed(connection, b"".join(publish(number, 96) for number in range(1, 6)))
        assert [one for one, _ in router.taken] == [1]
        assert (transport.reading, connection.waiting, connection.rest_ns) == (False, True, 0)
        assert door.turns, "what was taken is written in a turn"
        await turns_until(door, lambda: len(router.taken) == 5)
        assert [one for one, _ in router.taken] == [1, 2, 3, 4, 5]
        assert transport.reading and not connection.waiting
        assert clock.monotonic_ns() - began_ns >= 2 * REST_NS

    asyncio.run(scenario())


def test_a_connection_that_closes_while_it_rests_is_forgotten() -> None:
    async def scenario() -> None:
        door, router, connection, _ = limited(ahead=1)
        feed(connection, publish(1, 96) + publish(2, 96))
        connection.connection_lost(None)
        asked = len(door.turns)
        await asyncio.sleep(2 * REST_NS / 1e9)  # the time at which it would have gone on
        assert not door.server.waiting and len(door.turns) == asked
        assert [one for one, _ in router.taken] == [1]

    asyncio.run(scenario())
