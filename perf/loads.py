"""What the clients of a benchmark do, each in a process of its own.

Run as ``loads.py NAME JSON``.  A load prints ``ready`` when it is set up and starts on a line from
its standard input; its result is one line of JSON.  Moments are CLOCK_MONOTONIC nanoseconds, which all
processes of one machine share.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import danube  # noqa: E402
from danube.core.placement.workers import owner_of  # noqa: E402
from danube.errors import Conflict, Overloaded  # noqa: E402
from perf.pump import percentiles  # noqa: E402
from tests.child_process import told  # noqa: E402

IN_FLIGHT = 8  # send_many calls that run side by side
STAMP = struct.Struct("<Q")


async def go() -> None:
    """Tell the parent that this process is set up, and wait for its word."""
    print("ready", flush=True)
    await told().wait()


def payloads_of(size: int, count: int) -> list[bytes]:
    """Records of ``size`` bytes that differ from each other."""
    return [number.to_bytes(8, "little").ljust(size, b"x")[:size] for number in range(count)]


async def make_topic(client: Any, options: dict[str, Any]) -> None:
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


async def delete_topics(options: dict[str, Any]) -> dict[str, Any]:
    """Give back the disk and page cache of topics whose measurement is over."""
    async with danube.connect(options["url"]) as client:
        await go()
        for topic in options["topics"]:
            await client.admin.delete_topic(topic)
    return {}


def open_producer(client: Any, options: dict[str, Any], name: str = "bench") -> Any:
    return client.producer(
        options["topic"],
        name=name,
        reliable=options["durability"] != "memory",
        durability=options["durability"],
        partitions=options.get("partitions", 0),
    )


async def send_all(
    producer: Any, payloads: list[bytes], batch_count: int, in_flight: int = IN_FLIGHT
) -> None:
    """Send ``payloads`` again and again, a bounded number of calls side by side."""
    pending: deque[asyncio.Future[Any]] = deque()
    for _ in range(batch_count):
        if len(pending) >= in_flight:
            await pending.popleft()
        pending.append(asyncio.ensure_future(producer.send_many(payloads)))
    while pending:
        await pending.popleft()


@asynccontextmanager
async def placed_client(options: dict[str, Any]) -> AsyncIterator[Any]:
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


async def topic_elsewhere(client: Any, options: dict[str, Any]) -> dict[str, Any]:
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


async def publish(options: dict[str, Any]) -> dict[str, Any]:
    """Send ``batch_count`` batches through ``send_many`` and wait for all acknowledgements."""
    payloads = payloads_of(options["size"], options["batch"])
    async with placed_client(options) as client, open_producer(client, options) as producer:
        await send_all(producer, payloads, options.get("warm_count", 4))
        await go()
        started = time.monotonic_ns()
        await send_all(producer, payloads, options["batch_count"])
        ended = time.monotonic_ns()
    return {"started_ns": started, "ended_ns": ended, "records": options["batch"] * options["batch_count"]}


async def nowait(options: dict[str, Any]) -> dict[str, Any]:
    """One ``send_nowait`` a record; the client coalesces.  Ends when all are acknowledged."""
    payloads = payloads_of(options["size"], 1_000)
    async with danube.connect(options["url"]) as client, open_producer(client, options) as producer:
        await producer.send(payloads[0])
        await go()
        started = time.monotonic_ns()
        for _ in range(options["record_count"] // 1_000):
            for payload in payloads:
                try:
                    producer.send_nowait(payload)
                except Overloaded:
                    await producer.ready()
                    producer.send_nowait(payload)
            await asyncio.sleep(0)
        await producer.flush()
        ended = time.monotonic_ns()
    return {"started_ns": started, "ended_ns": ended, "records": options["record_count"] // 1_000 * 1_000}


async def read_batches(options: dict[str, Any]) -> dict[str, Any]:
    """Read payloads through ``batches()`` until ``record_count`` records came or the parent says stop."""
    wanted, records, first, last = options.get("record_count", 0), 0, 0, 0
    async with opened_consumer(options) as consumer:
        print("ready", flush=True)
        stopped = asyncio.ensure_future(told().wait())
        reader = asyncio.ensure_future(
            anext_of(
                batches := consumer.batches(max_records=options.get("max_records", 65_536), max_wait=0.05)
            )
        )
        while not (wanted and records >= wanted):
            await asyncio.wait([reader, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                break
            batch = reader.result()
            reader = asyncio.ensure_future(anext_of(batches))
            if batch is None:
                break
            last = time.monotonic_ns()
            first = first or last
            records += len(batch.payloads)
            await batch.ack()
        reader.cancel()
        stopped.cancel()
    return {"started_ns": first, "ended_ns": last, "records": records}


async def replay(options: dict[str, Any]) -> dict[str, Any]:
    """Read a stored log's payloads from its start through ``batches()``, acknowledging each batch."""
    records = 0
    await go()
    started = time.monotonic_ns()
    async with danube.connect(options["url"]) as client, open_consumer(client, options) as consumer:
        async for batch in consumer.batches(max_records=options.get("max_records", 65_536), max_wait=0.05):
            records += len(batch.payloads)
            await batch.ack()
            if records >= options["record_count"]:
                break
        ended = time.monotonic_ns()
    return {"started_ns": started, "ended_ns": ended, "records": records}


async def consume(options: dict[str, Any]) -> dict[str, Any]:
    """``async for message`` with one acknowledgement a message."""
    records, started = 0, 0
    async with danube.connect(options["url"]) as client:
        await go()
        started = time.monotonic_ns()
        async with open_consumer(client, options) as consumer:
            async for message in consumer:
                await message.ack()
                records += 1
                if records >= options["record_count"]:
                    break
            ended = time.monotonic_ns()
    return {"started_ns": started, "ended_ns": ended, "records": records}


async def ack_latency(options: dict[str, Any]) -> dict[str, Any]:
    """Microseconds from ``send`` to its acknowledgement, at ``rate`` sends a second (0: back to back)."""
    payload = payloads_of(options["size"], 1)[0]
    loop = asyncio.get_running_loop()
    connected = danube.connect(options["url"], busy_poll_us=options.get("busy_poll_us", 0))
    async with connected as client, open_producer(client, options) as producer:
        for _ in range(50):
            await producer.send(payload)
        await go()
        times, due = [], loop.time()
        for _ in range(options["record_count"]):
            if options["rate"]:
                due += 1 / options["rate"]
                await asyncio.sleep(max(0.0, due - loop.time()))
            started = time.perf_counter_ns()
            await producer.send(payload)
            times.append((time.perf_counter_ns() - started) / 1000)
    return percentiles(times)


async def stamped(options: dict[str, Any]) -> dict[str, Any]:
    """Send records that carry the moment of their sending, ``rate`` a second."""
    loop = asyncio.get_running_loop()
    async with danube.connect(options["url"]) as client, open_producer(client, options) as producer:
        await go()
        due = loop.time()
        for _ in range(options["record_count"]):
            due += 1 / options["rate"]
            await asyncio.sleep(max(0.0, due - loop.time()))
            await producer.send(STAMP.pack(time.monotonic_ns()).ljust(options["size"], b"x"))
    return {}


async def latency(options: dict[str, Any]) -> dict[str, Any]:
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


async def many_topics(options: dict[str, Any]) -> dict[str, Any]:
    """The same number of records over ``topic_count`` topics, one small batch each in turn."""
    payloads = payloads_of(options["size"], options["batch"])
    async with danube.connect(options["url"]) as client:
        producers = []
        for number in range(options["topic_count"]):
            producer = open_producer(client, {**options, "topic": f"{options['topic']}-{number}"})
            await producer.__aenter__()
            producers.append(producer)
        for producer in producers:
            await producer.send_many(payloads)
        await go()
        pending: deque[asyncio.Future[Any]] = deque()
        started = time.monotonic_ns()
        for number in range(options["batch_count"]):
            if len(pending) >= 64:
                await pending.popleft()
            pending.append(asyncio.ensure_future(producers[number % len(producers)].send_many(payloads)))
        while pending:
            await pending.popleft()
        ended = time.monotonic_ns()
        for producer in producers:
            await producer.__aexit__(None, None, None)
    return {"started_ns": started, "ended_ns": ended, "records": options["batch"] * options["batch_count"]}


async def many_consumers(options: dict[str, Any]) -> dict[str, Any]:
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

    async with danube.connect(options["url"]) as client:
        await make_topic(client, options)
        consumers = [
            open_consumer(client, options, f"consumer-{number}")
            for number in range(options["consumer_count"])
        ]
        for consumer in consumers:
            await consumer.__aenter__()
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
        for consumer in consumers:
            await consumer.__aexit__(None, None, None)
    return {"started_ns": started, "ended_ns": ended, "records": records}


def open_consumer(client: Any, options: dict[str, Any], name: str = "bench") -> Any:
    return client.consumer(
        options["topic"],
        subscription=options.get("subscription", "bench"),
        name=name,
        mode=options.get("mode", "exclusive"),
        start="earliest",
    )


@asynccontextmanager
async def opened_consumer(options: dict[str, Any]) -> AsyncIterator[Any]:
    """A consumer that may come before the producer."""
    async with danube.connect(options["url"]) as client:
        await make_topic(client, options)
        async with open_consumer(client, options) as consumer:
            yield consumer


async def anext_of(batches: Any) -> Any:
    return await anext(batches, None)


LOADS: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    load.__name__: load
    for load in (
        publish,
        nowait,
        read_batches,
        replay,
        consume,
        ack_latency,
        stamped,
        latency,
        many_topics,
        many_consumers,
        delete_topics,
    )
}


def main() -> None:
    danube.load_kernels()  # as a program that sends millions would
    print(json.dumps(uvloop.run(LOADS[sys.argv[1]](json.loads(sys.argv[2])))), flush=True)


if __name__ == "__main__":
    main()
