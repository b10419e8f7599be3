"""What the native clients of a benchmark do, each in a process of its own (see perf/child.py).

Most are the roles of a comparison, played by Danube's own client; the others only Danube has.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import danube
from danube.core.placement.workers import owner_of
from danube.errors import Conflict, OperationTimeout, QuotaExceeded
from perf.child import Options, Pace, Window, go, moments, payloads_of, percentiles, serve
from perf.compare.clients import roles
from perf.compare.clients.danube_native import Batches, OneByOne
from tests.child_process import told

STAMP = struct.Struct("<Q")
WARM = 50  # stamped records that are not counted


def open_producer(client: Any, options: Options, name: str = "bench") -> Any:
    level = options["durability"]
    return client.producer(options["topic"], name=name, reliable=level != "memory", durability=level)


class Remote(Batches):
    """A client that another worker holds than the one of its topic.

    That one owns what the client opens first, and the broker moves a connection no more from then on.
    """

    async def open(self) -> None:
        await super().open()
        owner = await self._owner_of_new(self.topic)
        for number in range(100):
            self.held = f"{self.topic}-{number}"
            if await self._owner_of_new(self.held) != owner:
                break
            await self.client.admin.delete_topic(self.held)
        else:
            raise SystemExit("no topic of 100 belongs to another worker")
        self.holder = await open_producer(self.client, {**self.options, "topic": self.held}).__aenter__()

    async def _owner_of_new(self, topic: str) -> int:
        """Make a topic; return the worker that owns its first partition."""
        level = self.options["durability"]
        await self.client.admin.create_topic(topic, reliable=level != "memory", durability=level)
        topic_id = (await self.client.admin.describe_topic(topic)).topic.topic_id
        return owner_of(topic_id, 0, self.options["workers"])

    async def close(self) -> None:
        await self.holder.__aexit__(None, None, None)
        await self.client.admin.delete_topic(self.held)
        crossed = any(worker["forwarded_in"] for worker in (await self.client.admin.status())["workers"])
        await super().close()
        if not crossed:
            raise SystemExit("nothing crossed from worker to worker")


async def stamped(peer: Any, options: Options) -> Options:
    """Send records that carry the moment of their sending, ``rate`` a second."""
    await go()
    pace = Pace(options["rate"])
    for _ in range(options["record_count"]):
        await pace.wait()
        await peer.send(STAMP.pack(time.monotonic_ns()).ljust(options["size"], b"x"))
    return {}


async def latency(peer: Any, options: Options) -> Options:
    """Microseconds from sending a stamped record to having it in the consumer's hands."""
    times: list[float] = []
    await peer.create()
    await peer.subscribe("bench")
    print("ready", flush=True)
    async for message in peer.consumer:
        times.append((time.monotonic_ns() - STAMP.unpack_from(message.payload)[0]) / 1000)
        await message.ack()
        if len(times) >= options["record_count"]:
            break
    return percentiles(times[WARM:])


async def many_topics(options: Options) -> Options:
    """The same number of records over ``topic_count`` topics, one small batch each in turn."""
    payloads = payloads_of(options["size"], options["batch"])
    async with danube.connect(options["url"]) as client, AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(
                open_producer(client, {**options, "topic": f"{options['topic']}-{number}"})
            )
            for number in range(options["topic_count"])
        ]
        for producer in producers:
            await producer.send_many(payloads)
        await go()
        window, started = Window(64), time.monotonic_ns()
        for number in range(options["batch_count"]):
            await window.add(producers[number % len(producers)].send_many(payloads))
        await window.end()
        return moments(started, options["batch"] * options["batch_count"])


async def many_consumers(peer: Any, options: Options) -> Options:
    """One shared subscription with ``consumer_count`` consumers that take ``record_count`` records."""
    records, ended = 0, 0
    done = asyncio.Event()

    async def take(consumer: Any) -> None:
        nonlocal records, ended
        async for batch in consumer.batches():
            records += len(batch)
            await batch.ack()
            ended = time.monotonic_ns()
            if records >= options["record_count"]:
                done.set()

    await peer.create()
    async with AsyncExitStack() as stack:
        consumers = [
            await stack.enter_async_context(
                peer.client.consumer(
                    peer.topic, "bench", "shared", name=f"consumer-{number}", start="earliest"
                )
            )
            for number in range(options["consumer_count"])
        ]
        tasks = [asyncio.ensure_future(take(consumer)) for consumer in consumers]
        await go()
        started = time.monotonic_ns()
        await peer.publish(payloads_of(options["size"], options["batch"]), options["record_count"])
        await done.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return moments(started, records, ended)


async def neighbour(options: Options) -> Options:
    """Offer ``rate`` records a second to a namespace that takes ``quota``, until told to stop.

    Nothing is closed in order: what is under way by then would only come in at the quota.
    """
    url, topic, clients = options["url"], options["topic"], options["clients"]
    payloads = payloads_of(options["size"], options["batch"])
    offered = 0

    async def send(producer: Any) -> None:
        with suppress(QuotaExceeded, OperationTimeout):
            await producer.send_many(payloads)

    async def offer() -> None:
        nonlocal offered
        client = await danube.connect(url).__aenter__()
        producer = await client.producer(topic, timeout=3).__aenter__()
        pace, window = Pace(options["rate"] / len(payloads) / clients), Window(64)
        while True:
            await pace.wait()
            offered += len(payloads)
            await window.add(send(producer))

    async with danube.connect(url) as client:
        with suppress(Conflict):
            await client.admin.create_namespace(topic.split("/")[1])
            await client.admin.create_topic(topic, durability=options["durability"])
        await client.admin.set_namespace_policy(topic.split("/")[1], max_publish_rate=options["quota"])
        before = await stored(client, topic)
        await go()
        started, offering = time.monotonic(), [asyncio.ensure_future(offer()) for _ in range(clients)]
        await asyncio.wait([asyncio.ensure_future(told().wait()), *offering], return_when="FIRST_COMPLETED")
        taken = await stored(client, topic) - before
        return {"offered": offered, "taken": taken, "seconds": time.monotonic() - started}


async def stored(client: Any, topic: str) -> int:
    return int((await client.admin.describe_topic(topic)).partitions[0]["log_end"])


PLAYED: dict[str, tuple[Callable[[Options], Any], Callable[..., Any]]] = {
    "publish": (Batches, roles.publish),
    "publish_remote": (Remote, roles.publish),
    "nowait": (OneByOne, roles.publish),
    "ack_latency": (Batches, roles.ack_latency),
    "read": (Batches, roles.read),
    "replay": (Batches, roles.replay),
    "consume": (OneByOne, roles.replay),
    "stamped": (Batches, stamped),
    "latency": (Batches, latency),
    "many_consumers": (Batches, many_consumers),
}

if __name__ == "__main__":
    danube.load_kernels()  # as a program that sends millions would
    played = {name: roles.played(*parts) for name, parts in PLAYED.items()}
    serve({**played, "many_topics": many_topics, "neighbour": neighbour})
