"""Rounds of questions to workers: shared, bounded in time, and right while workers come and go."""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from danube.broker.links import FrameReader, encode_frame
from danube.core.partition.pending import Measured
from danube.server.metrics import gathering
from danube.server.metrics.gathering import Gathering, MeasuredLink

WAIT_S = 20.0


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), WAIT_S))

    return run


Connect = Callable[[int], Coroutine[Any, Any, "Worker"]]


@asynccontextmanager
async def served(worker_count: int, round_max_s: float = WAIT_S) -> AsyncIterator[tuple[Gathering, Connect]]:
    """What asks, and how a worker of a number connects to it."""
    workers: list[Worker] = []
    address = f"\0danube-test-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    listener.setblocking(False)
    gathered = Gathering(worker_count, 10, round_max_s=round_max_s)
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: MeasuredLink(gathered), sock=listener
    )

    async def connect(index: int) -> Worker:
        workers.append(Worker(index))
        return await workers[-1].connect(address)

    try:
        yield gathered, connect
    finally:
        server.close()
        for worker in workers:
            worker.writer.close()
        for link in list(gathered.links):
            link.close()
        await asyncio.sleep(0)


class Worker:
    """A worker's end, which answers when it is told to."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.questions: list[int] = []
        self.asked = asyncio.Event()

    async def connect(self, address: str) -> Worker:
        self.reader, self.writer = await asyncio.open_unix_connection(address)
        return self

    async def question(self) -> int:
        """The next one."""
        frames = FrameReader()
        while data := await self.reader.read(65_536):
            for frame in frames.feed(data):
                assert frame["topics_max"] == 10
                return int(frame["id"])
        raise AssertionError("the connection ended")

    def answer(self, question: int, topics: int = 1) -> None:
        blob = msgspec.msgpack.encode(Measured(topics, True, []))
        self.writer.write(encode_frame("measured", id=question, worker=self.index, answer=blob))


@on_a_loop
async def test_a_round_ends_when_all_have_answered_and_is_told_again_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(2) as (gathered, connect):
        workers = [await connect(index) for index in range(2)]
        asking = [asyncio.create_task(gathered.answers()) for _ in range(100)]
        for worker in workers:
            worker.answer(await worker.question(), 3 + worker.index)
        found = await asyncio.gather(*asking)
        assert all(one is found[0] for one in found), "one round for all who wait"
        assert {index: one.topic_count for index, one in found[0].items()} == {0: 3, 1: 4}
        assert await gathered.answers() is found[0], "nobody is asked again within a second"
        monkeypatch.setattr(gathering, "FRESH_NS", 0)
        again = asyncio.create_task(gathered.answers())
        for worker in workers:
            worker.answer(await worker.question(), 9)
        assert [one.topic_count for one in (await again).values()] == [9, 9]


@on_a_loop
async def test_a_worker_that_does_not_answer_is_missing_and_its_late_answer_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "FRESH_NS", 0)
    async with served(2, round_max_s=1.5) as (gathered, connect):
        quick, slow = [await connect(index) for index in range(2)]
        asking = asyncio.create_task(gathered.answers())
        quick.answer(await quick.question())
        late = await slow.question()
        assert set(await asking) == {0}
        slow.answer(late, 77)  # between rounds
        asking = asyncio.create_task(gathered.answers())
        slow.answer(late, 78)  # in the next one
        quick.answer(await quick.question())
        assert set(await asking) == {0}


@on_a_loop
async def test_a_worker_that_comes_back_within_the_round_is_asked() -> None:
    async with served(2) as (gathered, connect):
        first, dying = [await connect(index) for index in range(2)]
        asking = asyncio.create_task(gathered.answers())
        first.answer(await first.question())
        await dying.question()
        dying.writer.transport.abort()
        again = await connect(1)
        again.answer(await again.question(), 5)
        assert (await asking)[1].topic_count == 5


@on_a_loop
async def test_without_workers_a_round_is_empty_and_in_time() -> None:
    async with served(1, round_max_s=0.2) as (gathered, _):
        assert await gathered.answers() == {}


@on_a_loop
async def test_who_gives_up_waiting_ends_nobody_elses_round() -> None:
    async with served(1) as (gathered, connect):
        worker = await connect(0)
        impatient, patient = [asyncio.create_task(gathered.answers()) for _ in range(2)]
        question = await worker.question()
        impatient.cancel()
        await asyncio.wait([impatient])
        worker.answer(question, 4)
        assert (await patient)[0].topic_count == 4


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        encode_frame("measured", id=1, worker=0, answer=b"no measured"),
        encode_frame("measured", id=1, worker=0, answer=msgspec.msgpack.encode({"topic_count": "x"})),
    ],
    ids=["no frame", "no answer", "another answer"],
)
@on_a_loop
async def test_what_no_worker_says_ends_its_connection(data: bytes) -> None:
    async with served(1, round_max_s=0.3) as (gathered, connect):
        worker = await connect(0)
        asking = asyncio.create_task(gathered.answers())
        await worker.question()
        worker.writer.write(data)
        assert await worker.reader.read() == b"" and await asking == {}


@on_a_loop
async def test_a_worker_that_there_is_not_is_not_counted() -> None:
    async with served(1, round_max_s=0.3) as (gathered, connect):
        worker = await connect(1)
        asking = asyncio.create_task(gathered.answers())
        worker.answer(await worker.question())
        assert await asking == {}


@on_a_loop
async def test_another_user_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(1) as (gathered, connect):
        monkeypatch.setattr("danube.host.local_socket.os.geteuid", lambda: 4_242)
        worker = await connect(0)
        assert await worker.reader.read() == b"" and not gathered.links
        monkeypatch.undo()
        monkeypatch.setattr(gathering, "LINKS_MAX", 1)
        await connect(0)
        second = await connect(0)
        assert await second.reader.read() == b"" and len(gathered.links) == 1
