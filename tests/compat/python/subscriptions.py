"""Subscription types: who gets which message, who is refused, who continues where."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress

import grpc
from official import connect, expect, numbers, open_inbox, producing, receiving, refused, run

from danube import SubType

COUNT = 36
TASKS = 200


async def exclusive(url: str, topic: str) -> None:
    """One consumer name gets everything in order; another name is refused until the first is gone."""
    client, other = await connect(url), await connect(url)
    async with producing(client, topic) as producer:
        async with receiving(client, topic, "first") as inbox:
            for number in range(10):
                await producer.send(b"%d" % number)
            messages = await inbox.take(10)
            expect(numbers(messages) == list(range(10)), "order", numbers(messages))
            expect(
                [message.msg_id.topic_offset for message in messages] == list(range(10)),
                "offsets count from 0",
                messages,
            )
            await refused(open_inbox(other, topic, "second"), grpc.StatusCode.PERMISSION_DENIED)
        async with receiving(other, topic, "second") as inbox:
            await producer.send(b"10")
            expect(await inbox.payloads(1) == [b"10"], "the second one continues after the first")


async def shared(url: str, topic: str) -> None:
    """Three consumers take turns: exactly a third each."""
    clients = [await connect(url) for _ in range(3)]
    async with producing(clients[0], topic) as producer:
        inboxes = [
            await open_inbox(client, topic, f"consumer-{number}", kind=SubType.SHARED)
            for number, client in enumerate(clients)
        ]
        for number in range(COUNT):
            await producer.send(b"%d" % number)
        taken = await asyncio.gather(*(inbox.take(COUNT // 3) for inbox in inboxes))
        seen = [number for messages in taken for number in numbers(messages)]
        expect(sorted(seen) == list(range(COUNT)), "each message once", seen)
        for inbox in inboxes:
            await inbox.silent(0.1)
            await inbox.consumer.close()


async def shared_work(url: str, topic: str) -> None:
    """Two workers with tasks of 50 ms, the second 2 s late: each has its part, nothing is done twice."""
    clients = [await connect(url), await connect(url)]
    done: list[list[int]] = [[], []]

    async def work(index: int) -> None:
        await asyncio.sleep(2 * index)
        async with receiving(clients[index], topic, f"worker-{index}", kind=SubType.SHARED) as inbox:
            while sum(map(len, done)) < TASKS:
                with suppress(TimeoutError):
                    message = await asyncio.wait_for(inbox.queue.get(), 0.5)
                    await asyncio.sleep(0.05)
                    await inbox.consumer.ack(message)
                    done[index] += numbers([message])
            await inbox.silent()

    async with producing(clients[0], topic) as producer:
        async with receiving(clients[0], topic, "worker-0", kind=SubType.SHARED):
            pass  # the subscription is there before the tasks are
        for number in range(TASKS):
            await producer.send(b"%d" % number)
        await asyncio.gather(work(0), work(1))
    expect(sorted(done[0] + done[1]) == list(range(TASKS)), "each task once", done)
    expect(min(map(len, done)) >= 0.35 * TASKS, "at least 35 of 100 each", *map(len, done))


async def shared_survivor(url: str, topic: str) -> None:
    """What a consumer that leaves did not acknowledge goes to the others."""
    first, second = await connect(url), await connect(url)
    async with producing(first, topic) as producer:
        leaving = await open_inbox(first, topic, "leaving", kind=SubType.SHARED)
        async with receiving(second, topic, "staying", kind=SubType.SHARED) as staying:
            for number in range(10):
                await producer.send(b"%d" % number)
            acknowledged = numbers(await leaving.take(2))
            await leaving.take(3, ack=False)
            await leaving.consumer.close()
            rest = numbers(await staying.take(8))
            expect(sorted(acknowledged + rest) == list(range(10)), "each once", acknowledged, rest)
            await staying.silent()


async def failover(url: str, topic: str) -> None:
    """The standby gets nothing until the active one leaves, then what was not acknowledged, in order."""
    first, second = await connect(url), await connect(url)
    async with producing(first, topic) as producer:
        active = await open_inbox(first, topic, "active", kind=SubType.FAILOVER)
        async with receiving(second, topic, "standby", kind=SubType.FAILOVER) as standby:
            for number in range(5):
                await producer.send(b"%d" % number)
            expect(numbers(await active.take(3)) == [0, 1, 2], "the first one is active")
            expect(numbers(await active.take(2, ack=False)) == [3, 4], "and gets all")
            await standby.silent(0.3)
            await active.consumer.close()
            await producer.send(b"5")
            expect(numbers(await standby.take(3)) == [3, 4, 5], "the standby is promoted and continues")


async def key_shared(url: str, topic: str) -> None:
    """A key stays with one consumer, in order; both consumers get work."""
    clients = [await connect(url), await connect(url)]
    async with producing(clients[0], topic) as producer:
        inboxes = [
            await open_inbox(client, topic, f"consumer-{number}", kind=SubType.KEY_SHARED)
            for number, client in enumerate(clients)
        ]
        for number in range(100):
            await producer.send_with_key(b"%d" % number, None, f"key-{number % 10}")
        seen: dict[str, list[int]] = defaultdict(list)
        owner: dict[str, int] = {}
        done = asyncio.Event()

        async def take(index: int) -> None:
            while True:
                [message] = await inboxes[index].take(1)
                key = message.routing_key
                expect(owner.setdefault(key, index) == index, "a key visits one consumer", key)
                seen[key].append(int(message.payload))
                if sum(map(len, seen.values())) == 100:
                    done.set()

        tasks = [asyncio.create_task(take(index)) for index in (0, 1)]
        waiting = asyncio.create_task(done.wait())
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await waiting
        expect(
            all(seen[f"key-{key}"] == list(range(key, 100, 10)) for key in range(10)), "order of keys", seen
        )
        expect(set(owner.values()) == {0, 1}, "both get work", owner)
        for inbox in inboxes:
            await inbox.consumer.close()


async def key_filters(url: str, topic: str) -> None:
    """Filters choose keys; a message that nobody wants is skipped."""
    client, other = await connect(url), await connect(url)
    kind = SubType.KEY_SHARED
    async with producing(client, topic) as producer:
        async with (
            receiving(client, topic, "europe", kind=kind, filters=["eu-*"]) as europe,
            receiving(other, topic, "america", kind=kind, filters=["us-?", "ca-*"]) as america,
        ):
            for key in ("eu-1", "us-1", "asia", "us-11", "ca-11", "eu-2"):
                await producer.send_with_key(key.encode(), None, key)
            expect(await europe.payloads(2) == [b"eu-1", b"eu-2"], "the filter eu-*")
            expect(await america.payloads(2) == [b"us-1", b"ca-11"], "the filters us-? and ca-*")
            await asyncio.gather(europe.silent(), america.silent())


async def resume(url: str, topic: str) -> None:
    """The same name continues at the first message that was not acknowledged, again and again."""
    client = await connect(url)
    async with producing(client, topic) as producer:
        async with receiving(client, topic, "consumer") as inbox:
            for number in range(12):
                await producer.send(b"%d" % number)
            expect(numbers(await inbox.take(3)) == [0, 1, 2], "from the start")
            expect(numbers(await inbox.take(1, ack=False)) == [3], "one more is on its way")
        for start in (3, 6, 9):
            async with receiving(client, topic, "consumer") as inbox:
                expect(
                    numbers(await inbox.take(3)) == [start, start + 1, start + 2], f"it continues at {start}"
                )
                if start < 9:
                    expect(numbers(await inbox.take(1, ack=False)) == [start + 3], "without an ack")


async def take_over(url: str, topic: str) -> None:
    """A second consumer of the same name takes the first one's place and what it held."""
    first, second = await connect(url), await connect(url)
    async with producing(first, topic) as producer:
        older = await open_inbox(first, topic, "same")
        for number in range(4):
            await producer.send(b"%d" % number)
        expect(numbers(await older.take(4, ack=False)) == [0, 1, 2, 3], "the first one gets them")
        # The older consumer's client would take its place back at once: it asks again when its stream ends.
        await older.consumer.close()
        async with receiving(second, topic, "same") as newer:
            expect(numbers(await newer.take(4)) == [0, 1, 2, 3], "they are delivered again, in order")


async def two_subscriptions(url: str, topic: str) -> None:
    """Two clients produce and two subscriptions each get everything, in each producer's order."""
    clients = [await connect(url), await connect(url)]
    async with (
        producing(clients[0], topic, "first") as first,
        producing(clients[1], topic, "second") as second,
        receiving(clients[0], topic, "reader", "left") as left,
        receiving(clients[1], topic, "reader", "right") as right,
    ):

        async def send(producer: object, word: bytes) -> None:
            for number in range(20):
                await producer.send(word + b"%d" % number)  # type: ignore[attr-defined]

        await asyncio.gather(send(first, b"a"), send(second, b"b"))
        for inbox in (left, right):
            payloads = await inbox.payloads(40)
            for word, name in ((b"a", "first"), (b"b", "second")):
                own = [payload for payload in payloads if payload.startswith(word)]
                expect(own == [word + b"%d" % number for number in range(20)], name, own)


if __name__ == "__main__":
    run("__main__")
