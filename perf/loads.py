"""What the native clients of a benchmark do, each in a process of its own (see perf/child.py)."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import danube
from danube.core.placement.workers import owner_of
from danube.errors import Conflict, Overloaded
from perf.child import Options, Pace, Window, go, payloads_of, percentiles, serve, timed_us
from tests.child_process import told

IN_FLIGHT = 8  # send_many calls that run side by side
STAMP = struct.Struct("<Q")


async def make_topic(client: Any, options: Options) -> None:
    """Create the topic unless another load of this run was first."""
    try:
        await client.admin.create_topic(
            options["topic"],
            partitions=options.get("partitions", 0),
            reliable=options["durability"] != "memory",
            durability=options["durability"],
        )
    except Conflict:
        pass


async def delete_topics(options: Options) -> Options:
    """Give back the disk and page cache of topics whose measurement is over."""
    async with danube.connect(options["url"]) as client:
        await go()
        for topic in options["topics"]:
            await client.admin.delete_topic(topic)
    return {}


def open_producer(client: Any, options: Options, name: str = "bench") -> Any:
    return client.producer(
        options["topic"],
        name=name,
        reliable=options["durability"] != "memory",
        durability=options["durability"],
        partitions=options.get("partitions", 0),
    )


async def send_all(producer: Any, payloads: list[bytes], batch_count: int) -> None:
    """Send ``payloads`` again and again, a bounded number of calls side by side."""
    window = Window(IN_FLIGHT)
    for _ in range(batch_count):
        await window.add(producer.send_many(payloads))
    await window.end()


def moments(started: int, records: int, ended: int = 0) -> Options:
    return {"started_ns": started, "ended_ns": ended or time.monotonic_ns(), "records": records}


@asynccontextmanager
async def placed_client(options: Options) -> AsyncIterator[Any]:
    """A client, which the broker lets the owner of its topic hold; with ``remote`` another worker does.

    That one owns what the client opens first, and the broker moves a connection no more from then on.
    """
    async with danube.connect(options["url"]) as client:
        if not options.get("remote"):
            yield client
            return
        held = await topic_elsewhere(client, options)
        async with open_producer(client, held):
            yield client
        await client.admin.delete_topic(held["topic"])
        if not any(worker["forwarded_in"] for worker in (await client.admin.status())["workers"]):
            raise SystemExit("nothing crossed from worker to worker")


async def topic_elsewhere(client: Any, options: Options) -> Options:
    """``options`` with another topic, made here, that another worker owns."""
    await make_topic(client, options)
    owner = await owner_in(client, options["topic"], options["workers"])
    for number in range(100):
        other = {**options, "topic": f"{options['topic']}-{number}"}
        await make_topic(client, other)
        if await owner_in(client, other["topic"], options["workers"]) != owner:
            return other
        await client.admin.delete_topic(other["topic"])
    raise SystemExit("no topic of 100 belongs to another worker")


async def owner_in(client: Any, topic: str, workers: int) -> int:
    """The worker that owns the topic's first partition."""
    return owner_of((await client.admin.describe_topic(topic)).topic.topic_id, 0, workers)


async def publish(options: Options) -> Options:
    """Send ``batch_count`` batches through ``send_many`` and wait for all acknowledgements."""
    payloads = payloads_of(options["size"], options["batch"])
    async with placed_client(options) as client, open_producer(client, options) as producer:
        await send_all(producer, payloads, options.get("warm_count", 4))
        await go()
        started = time.monotonic_ns()
        await send_all(producer, payloads, options["batch_count"])
        return moments(started, options["batch"] * options["batch_count"])


async def nowait(options: Options) -> Options:
    """One ``send_nowait`` a record; the client coalesces.  Ends when all are acknowledged."""
    payloads, rounds = payloads_of(options["size"], 1_000), options["record_count"] // 1_000
    async with danube.connect(options["url"]) as client, open_producer(client, options) as producer:
        await producer.send(payloads[0])
        await go()
        started = time.monotonic_ns()
        for _ in range(rounds):
            for payload in payloads:
                try:
                    producer.send_nowait(payload)
                except Overloaded:
                    await producer.ready()
                    producer.send_nowait(payload)
            await asyncio.sleep(0)
        await producer.flush()
        return moments(started, rounds * 1_000)


async def read_batches(options: Options) -> Options:
    """Read payloads through ``batches()`` until ``record_count`` records came or the parent says stop."""
    wanted, records, first, last = options.get("record_count", 0), 0, 0, 0
    async with opened_consumer(options) as consumer:
        print("ready", flush=True)
        stopped = asyncio.ensure_future(told().wait())
        batches = consumer.batches(max_records=options.get("max_records", 65_536), max_wait=0.05)
        while not (wanted and records >= wanted):
            reader = asyncio.ensure_future(anext(batches))
            await asyncio.wait([reader, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                reader.cancel()
                break
            batch = reader.result()
            last = time.monotonic_ns()
            first = first or last
            records += len(batch.payloads)
            await batch.ack()
        stopped.cancel()
    return moments(first, records, last)


async def replay(options: Options) -> Options:
    """Read a stored log's payloads from its start through ``batches()``, acknowledging each batch."""
    records = 0
    async with danube.connect(options["url"]) as client:
        await client.admin.describe_topic(options["topic"])
        await go()
        started = time.monotonic_ns()
        async with open_consumer(client, options) as consumer:
            async for batch in consumer.batches(
                max_records=options.get("max_records", 65_536), max_wait=0.05
            ):
                records += len(batch.payloads)
                await batch.ack()
                if records >= options["record_count"]:
                    break
            return moments(started, records)


async def consume(options: Options) -> Options:
    """``async for message`` with one acknowledgement a message."""
    records = 0
    async with danube.connect(options["url"]) as client:
        await go()
        started = time.monotonic_ns()
        async with open_consumer(client, options) as consumer:
            async for message in consumer:
                await message.ack()
                records += 1
                if records >= options["record_count"]:
                    break
            return moments(started, records)


async def ack_latency(options: Options) -> Options:
    """Microseconds from ``send`` to its acknowledgement, at ``rate`` sends a second (0: back to back)."""
    payload = payloads_of(options["size"], 1)[0]
    connected = danube.connect(options["url"])
    async with connected as client, open_producer(client, options) as producer:
        for _ in range(50):
            await producer.send(payload)
        await go()
        count = options["record_count"]
        return percentiles(await timed_us(count, lambda: producer.send(payload), options["rate"]))


async def stamped(options: Options) -> Options:
    """Send records that carry the moment of their sending, ``rate`` a second."""
    async with danube.connect(options["url"]) as client, open_producer(client, options) as producer:
        await go()
        pace = Pace(options["rate"])
        for _ in range(options["record_count"]):
            await pace.wait()
            await producer.send(STAMP.pack(time.monotonic_ns()).ljust(options["size"], b"x"))
    return {}


async def latency(options: Options) -> Options:
    """Microseconds from sending a stamped record to having it in the consumer's hands."""
    times: list[float] = []
    async with opened_consumer(options) as consumer:
        print("ready", flush=True)
        async for message in consumer:
            times.append((time.monotonic_ns() - STAMP.unpack_from(message.payload)[0]) / 1000)
            await message.ack()
            if len(times) >= options["record_count"]:
                break
    return percentiles(times[50:])


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


async def many_consumers(options: Options) -> Options:
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

    async with danube.connect(options["url"]) as client, AsyncExitStack() as stack:
        await make_topic(client, options)
        consumers = [
            await stack.enter_async_context(open_consumer(client, options, f"consumer-{number}"))
            for number in range(options["consumer_count"])
        ]
        tasks = [asyncio.ensure_future(take(consumer)) for consumer in consumers]
        payloads = payloads_of(options["size"], options["batch"])
        async with open_producer(client, options) as producer:
            await go()
            started = time.monotonic_ns()
            await send_all(producer, payloads, options["record_count"] // options["batch"])
        await done.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return moments(started, records, ended)


def open_consumer(client: Any, options: Options, name: str = "bench") -> Any:
    return client.consumer(
        options["topic"],
        subscription=options.get("subscription", "bench"),
        name=name,
        mode=options.get("mode", "exclusive"),
        start="earliest",
    )


@asynccontextmanager
async def opened_consumer(options: Options) -> AsyncIterator[Any]:
    """A consumer that may come before the producer."""
    async with danube.connect(options["url"]) as client:
        await make_topic(client, options)
        async with open_consumer(client, options) as consumer:
            yield consumer


ROLES = {
    role.__name__: role
    for role in (
        publish, nowait, read_batches, replay, consume, ack_latency, stamped, latency, many_topics,
        many_consumers, delete_topics,
    )
}  # fmt: skip

if __name__ == "__main__":
    danube.load_kernels()  # as a program that sends millions would
    serve(ROLES)
