"""Runs the stories in clients/: what becomes of a client that is cancelled, forked, cut by signals or away.

A story is told as in :mod:`tests.stories.test_stories`: blocks of commands, a line of dashes, and the lines
expected until the next empty line.  The broker is the scripted one.  Commands (C: a consumer, P: a producer;
a command on one says what it answered, or its error):

    records N                      the topic has so many, b"0", b"1", ...
    consumer C [blocking] [type=MODE] [start=latest] [open=no]      producer P [blocking] [timeout=SECONDS]
    take C N      ack C 0..3      flush C|P      close C|P      send P TEXT      open C      outcome C|P
    begin COMMAND                  carried out beside; its outcome is told by ``outcome``
    cancel C|P                     the command that was begun
    handle C ERROR                 ``with`` the next message, which ends with this error
    cut COMMAND                    a signal's handler raises while it waits; blocking clients only
    child COMMAND                  in a child of a fork
    broker away | back | hold | release | loses        topic made again | gone      subscription gone
    acked      consumers      stored      deliveries
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import danube
import danube.sync
from danube.core.partition.policy import TopicPolicy
from danube.core.protocol.native import Kind
from tests.fakes.broker import FakeBroker
from tests.stories.test_stories import blocks, bounds, show

TOPIC = "/default/orders"
STORIES = sorted((Path(__file__).parent / "clients").glob("*.txt"))


class Alarm(BaseException):
    """What the handler of the signal raises."""


class Teller:
    """One story's broker and its clients."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.broker.create(TOPIC, 0, TopicPolicy())
        self.clients: dict[bool, Any] = {}
        self.ones: dict[str, Any] = {}
        self.taken: dict[str, dict[int, Any]] = {}
        self.begun: dict[str, asyncio.Future[str]] = {}
        self.lines: list[str] = []

    async def tell(self, line: str) -> None:
        command, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        told = await getattr(self, f"on_{command}")(plain, options)
        if told is not None:
            self.lines.append(told)

    async def until(self, condition: Callable[[], Any]) -> None:
        await asyncio.to_thread(self.broker.wait_for, condition)

    async def client(self, blocking: bool) -> Any:
        if blocking not in self.clients:
            made: Any = (danube.sync if blocking else danube).connect(self.broker.url)
            self.clients[blocking] = made
            await answered(made.open())
        return self.clients[blocking]

    async def outcome_of(self, name: str, work: Callable[[], Any]) -> str:
        try:
            value = await answered(work())
        except BaseException as error:
            return f"{name} {type(error).__name__}"
        return f"{name} {value}" if isinstance(value, str) else f"{name} done"

    # -- what clients do --------------------------------------------------------------------------

    async def on_consumer(self, words: list[str], options: dict[str, str]) -> str | None:
        client = await self.client("blocking" in words)
        mode, start = options.get("type", "shared"), options.get("start", "earliest")
        self.ones[words[0]] = client.consumer(TOPIC, "s", mode, start=start)
        return None if options.get("open") == "no" else await self.on_open(words, {})

    async def on_producer(self, words: list[str], options: dict[str, str]) -> str | None:
        client = await self.client("blocking" in words)
        self.ones[words[0]] = client.producer(TOPIC, timeout=float(options.get("timeout", 30)))
        return await self.on_open(words, {})

    async def on_open(self, words: list[str], options: dict[str, str]) -> str | None:
        told = await self.outcome_of(words[0], self.ones[words[0]].open)
        return None if told.endswith(" done") else told

    async def on_take(self, words: list[str], options: dict[str, str]) -> str:
        name, count = words[0], int(words[1])
        taken = self.taken.setdefault(name, {})

        async def take() -> str:
            messages = [await answered(self.ones[name].receive(timeout=10)) for _ in range(count)]
            taken.update((one.offset, one) for one in messages)
            again = max((one.redelivery_count for one in messages), default=0)
            return f"{show([one.offset for one in messages])}{f' redelivery={again}' if again else ''}"

        return await self.outcome_of(name, take)

    async def on_ack(self, words: list[str], options: dict[str, str]) -> str | None:
        async def ack() -> None:
            for start, end in bounds(words[1:]).tolist():
                for offset in range(start, end):
                    await answered(self.taken[words[0]][offset].ack())

        told = await self.outcome_of(words[0], ack)
        return None if told.endswith(" done") else told

    async def on_flush(self, words: list[str], options: dict[str, str]) -> str:
        return await self.outcome_of(words[0], self.ones[words[0]].flush)

    async def on_close(self, words: list[str], options: dict[str, str]) -> str:
        return await self.outcome_of(words[0], self.ones[words[0]].close)

    async def on_send(self, words: list[str], options: dict[str, str]) -> str:
        return await self.outcome_of(words[0], lambda: self.ones[words[0]].send(words[1].encode()))

    async def on_handle(self, words: list[str], options: dict[str, str]) -> str:
        error: type[BaseException] = {
            **{one.__name__: one for one in (KeyboardInterrupt, SystemExit, GeneratorExit, ValueError)},
            "CancelledError": asyncio.CancelledError,
        }[words[1]]

        async def handle() -> None:
            async with await self.ones[words[0]].receive(timeout=10):
                raise error

        return await self.outcome_of(words[0], handle)

    # -- what is done to them ---------------------------------------------------------------------

    async def on_begin(self, words: list[str], options: dict[str, str]) -> None:
        handler = getattr(self, f"on_{words[0]}")
        self.begun[words[1]] = asyncio.ensure_future(handler(words[1:], options))
        await asyncio.sleep(0.02)

    async def on_cancel(self, words: list[str], options: dict[str, str]) -> None:
        self.begun[words[0]].cancel()

    async def on_outcome(self, words: list[str], options: dict[str, str]) -> str:
        return await self.begun.pop(words[0]) or f"{words[0]} done"

    async def on_cut(self, words: list[str], options: dict[str, str]) -> str | None:
        def ring(*_: object) -> None:
            raise Alarm

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            told: str | None = await getattr(self, f"on_{words[0]}")(words[1:], options)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return told

    async def on_child(self, words: list[str], options: dict[str, str]) -> str:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            threading.Timer(10, os._exit, (1,)).start()  # a hanging child tells nothing
            told = asyncio.run(getattr(self, f"on_{words[0]}")(words[1:], options))
            os.write(writing, str(told).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            told = (await asyncio.to_thread(pipe.read)).decode()
        os.waitpid(child, 0)
        return f"child {told or 'hangs'}"

    # -- the broker -------------------------------------------------------------------------------

    async def on_broker(self, words: list[str], options: dict[str, str]) -> None:
        if words[0] == "away":
            self.broker.stop()
            for client in self.clients.values():
                if isinstance(client, danube.Client):
                    while client.connected:
                        await asyncio.sleep(0.002)
        elif words[0] == "back":
            self.broker.again()
        elif words[0] == "loses":
            self.broker.drop_connections()
        else:
            getattr(self.broker, words[0])()

    async def on_topic(self, words: list[str], options: dict[str, str]) -> None:
        with self.broker.lock:
            policy, names = self.broker.topics.pop(TOPIC)
            for name in names:
                del self.broker.partitions[name]
            if words[0] == "made":
                self.broker.create(TOPIC, 0, policy)

    async def on_subscription(self, words: list[str], options: dict[str, str]) -> None:
        self.broker.partitions[TOPIC].subscriptions.clear()

    async def on_records(self, words: list[str], options: dict[str, str]) -> None:
        async with danube.connect(self.broker.url) as client, client.producer(TOPIC) as producer:
            for number in range(int(words[0])):
                await producer.send(b"%d" % number)

    async def on_acked(self, words: list[str], options: dict[str, str]) -> str:
        return f"acked {show(sorted(self.broker.partitions[TOPIC].subscriptions['s'].acked))}"

    async def on_consumers(self, words: list[str], options: dict[str, str]) -> str:
        """How many the broker has, once it has taken what clients wrote."""
        seen = self.broker.seen(Kind.CLOSE_CONSUMER)
        subscriptions = self.broker.partitions[TOPIC].subscriptions.values()
        count = int(words[0])
        await self.until(lambda: sum(len(one.consumers) for one in subscriptions) == count)
        return f"consumers {count}{' closed' if seen else ''}"

    async def on_stored(self, words: list[str], options: dict[str, str]) -> str:
        return f"stored {b' '.join(self.broker.payloads(TOPIC)).decode()}".rstrip()

    async def end(self) -> None:
        for client in self.clients.values():
            try:
                await answered(client.close())
            except danube.errors.DanubeError:
                continue  # what was lost is told by the story


async def answered(value: Any) -> Any:
    """What a call of either client comes to."""
    return await value if isinstance(value, Awaitable) else value


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_client_story(path: Path) -> None:
    async def run() -> None:
        with FakeBroker() as broker:
            teller = Teller(broker)
            try:
                async with asyncio.timeout(30):
                    for commands, expected in blocks(path.read_text()):
                        teller.lines = []
                        for command in commands:
                            await teller.tell(command)
                        assert teller.lines == expected, "; ".join(commands)
            finally:
                await teller.end()

    asyncio.run(run())


def test_there_are_client_stories() -> None:
    assert len(STORIES) >= 6
