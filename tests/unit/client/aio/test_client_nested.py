"""A loop that is run again inside of a task, as nest_asyncio does, serves its client meanwhile."""

from __future__ import annotations

import asyncio
import heapq
from asyncio import tasks
from collections.abc import Coroutine
from typing import Any

import danube
from tests.fakes.broker import FakeBroker

TOPIC = "/default/t"
COUNT = 20


def turn(loop: Any) -> None:
    """One turn of a selector loop that may be called inside of another one."""
    wait_s = 0.0 if loop._ready else 0.05
    if loop._scheduled:
        wait_s = min(wait_s, max(0.0, loop._scheduled[0].when() - loop.time()))
    loop._process_events(loop._selector.select(wait_s))
    while loop._scheduled and loop._scheduled[0].when() <= loop.time():
        loop._ready.append(heapq.heappop(loop._scheduled))
    for _ in range(len(loop._ready)):
        if not loop._ready:
            return  # an inner turn has run it
        handle = loop._ready.popleft()
        if not handle.cancelled():
            handle._run()


def run_inside(loop: Any, work: Coroutine[Any, Any, Any]) -> Any:
    """Run the loop until ``work`` is done, in the middle of the task that calls."""
    inner = loop.create_task(work)
    outer = asyncio.current_task(loop)
    if outer is not None:
        tasks._leave_task(loop, outer)
    try:
        while not inner.done():
            turn(loop)
    finally:
        if outer is not None:
            tasks._enter_task(loop, outer)
    return inner.result()


def test_a_handler_that_runs_the_loop_again_sends_and_receives() -> None:
    async def echo(client: Any, payload: bytes) -> bytes:
        async with client.producer(f"{TOPIC}2") as producer, client.consumer(f"{TOPIC}2", "s") as consumer:
            await producer.send(payload)
            message = await consumer.receive(timeout=30)
            await message.ack()
            return bytes(message.payload)

    async def story(url: str) -> list[bytes]:
        found: list[bytes] = []
        async with danube.connect(url) as client, client.producer(TOPIC) as producer:
            async with client.consumer(TOPIC, "s", start="earliest") as consumer:
                sending = asyncio.ensure_future(producer.send_many([b"%d" % one for one in range(COUNT)]))
                while len(found) < COUNT:
                    message = await consumer.receive(timeout=30)
                    found.append(run_inside(loop, echo(client, bytes(message.payload))))
                    await message.ack()
                await sending
        return found

    loop = asyncio.SelectorEventLoop()
    with FakeBroker() as broker:
        asyncio.events._set_running_loop(loop)
        try:
            assert run_inside(loop, story(broker.url)) == [b"%d" % one for one in range(COUNT)]
        finally:
            asyncio.events._set_running_loop(None)
            loop.close()
