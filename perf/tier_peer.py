"""The processes of the tiered-storage measurements, one role each.

``get`` reads objects through the bare client, ``first`` times the first record of cold reads, ``paced``
publishes at a steady rate and may follow what it publishes, ``cold`` is many readers of old records.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import AsyncExitStack
from typing import Any

import minio

import danube
from perf.child import Options, Pace, Window, go, moments, percentiles, serve
from perf.compare.clients.danube_native import IN_FLIGHT
from perf.loads import open_producer
from tests.child_process import told
from tests.s3_server import ACCESS_KEY, REGION, SECRET_KEY

WAIT_S = 250.0
EPOCH = 1 << 30  # of an owner after all that wrote the segments
PING_BYTES = 64
WARM_BATCHES = 100
PACED_IN_FLIGHT = 4 * IN_FLIGHT  # more than a paced producer needs, so that the rate is the schedule's


def ranges(sizes: dict[str, int], step: int) -> list[tuple[str, int, int]]:
    """Key, start and length of the GETs that read all objects in order."""
    return [
        (key, start, min(step, size - start))
        for key, size in sorted(sizes.items())
        for start in range(0, size, step)
    ]


def get(client: minio.Minio, bucket: str, key: str, start: int, length: int) -> int:
    response = client.get_object(bucket, key, offset=start, length=length)
    try:
        return len(response.read())
    finally:
        response.close()
        response.release_conn()


async def get_all(options: Options) -> Options:
    """All objects through the bare client, in ranges, in a plain loop."""
    client = minio.Minio(options["endpoint"], ACCESS_KEY, SECRET_KEY, secure=False, region=REGION)
    wanted = ranges(options["objects"], options["step"])
    client.bucket_exists(options["bucket"])
    await go()
    started = time.monotonic_ns()
    size = sum(get(client, options["bucket"], *one) for one in wanted)
    return {**moments(started, len(wanted)), "bytes": size}


async def first(options: Options) -> Options:
    """Milliseconds from opening a consumer at each of ``offsets`` to its first record."""
    times = []
    async with danube.connect(options["url"]) as client:
        await client.admin.describe_topic(options["topic"])
        await go()
        for number, offset in enumerate(options["offsets"]):
            name = f"{options['subscription']}-{number}"
            started = time.perf_counter_ns()
            async with client.consumer(options["topic"], subscription=name, start=offset) as consumer:
                message = await consumer.receive(timeout=WAIT_S)
                times.append((time.perf_counter_ns() - started) / 1e6)
                if message.offset != offset:
                    raise SystemExit(f"asked for {offset}, got {message.offset}")
    return {"times_ms": times}


async def paced(options: Options) -> Options:
    """``batch_count`` batches, one every ``interval_ns``; with ``subscription`` a consumer follows them.

    Both times of each batch are measured.  A producer that falls behind sends as fast as it may until it has
    caught up.  A consumer ends once it has everything, in order and once.
    """
    sent_ns: list[int] = []
    acked_us: list[float] = []
    delivered_us: list[float] = []
    batch, count = options["batch"], options["batch_count"]
    async with AsyncExitStack() as stack:
        client, other = [await stack.enter_async_context(danube.connect(options["url"])) for _ in range(2)]
        name = options.get("subscription", "bench")
        producer = await stack.enter_async_context(open_producer(client, options, name))

        async def send(number: int) -> None:
            payload = number.to_bytes(8, "little").ljust(options["size"], b"x")
            began_ns = time.monotonic_ns()
            sent_ns.append(began_ns)
            await producer.send_many([payload] * batch)
            acked_us.append((time.monotonic_ns() - began_ns) / 1_000)

        async def follow(consumer: Any) -> None:
            records = 0
            async for arrived in consumer.batches():
                now_ns = time.monotonic_ns()
                for payload in arrived.payloads:
                    number = int.from_bytes(payload[:8], "little")
                    if number != records // batch:
                        raise SystemExit(f"batch {number} came after {records} records")
                    records += 1
                    delivered_us.append((now_ns - sent_ns[number]) / 1_000)
                await arrived.ack()
                if records == (WARM_BATCHES + count) * batch:
                    return

        following: asyncio.Future[None] | None = None
        if "subscription" in options:
            consumer = other.consumer(options["topic"], name, "exclusive", start="latest")
            following = asyncio.ensure_future(follow(await stack.enter_async_context(consumer)))
        for number in range(WARM_BATCHES):
            await send(number)
        await go()
        pace, window = Pace(1e9 / options["interval_ns"]), Window(PACED_IN_FLIGHT)
        started = time.monotonic_ns()
        for number in range(count):
            await pace.wait()
            await window.add(send(WARM_BATCHES + number))
        await window.end()
        if following is not None:
            await asyncio.wait_for(following, WAIT_S)
        found = moments(started, batch * count)
    found |= percentiles(acked_us[WARM_BATCHES + count // 20 :])
    if delivered_us:
        found["delivery"] = percentiles(delivered_us[WARM_BATCHES * batch :])
    return found


async def cold(options: Options) -> Options:
    """``readers`` subscriptions from the earliest record, over ``connections``, until it is killed.

    Ready once all have subscribed; from then on it has the processor time that nobody else wants.  Each line
    from the parent is answered by one with the number of records that each has.
    """
    records = [0] * options["readers"]

    async def read(number: int, consumer: Any) -> None:
        async for batch in consumer.batches():
            records[number] += len(batch)
            await batch.ack()

    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(danube.connect(options["url"]))
            for _ in range(options["connections"])
        ]
        consumers = [
            clients[number % len(clients)].consumer(
                options["topic"],
                f"{options['subscription']}-{number}",
                "exclusive",
                start="earliest",
                prefetch_bytes=options["prefetch_bytes"],
            )
            for number in range(options["readers"])
        ]
        await asyncio.gather(*[consumer.open() for consumer in consumers])
        os.nice(19)
        reading = asyncio.gather(*[read(*each) for each in enumerate(consumers)])
        await go()
        while not reading.done():
            print(json.dumps(records), flush=True)
            await asyncio.wait(
                [reading, asked := asyncio.ensure_future(told().wait())], return_when="FIRST_COMPLETED"
            )
            asked.cancel()
        await reading  # none of them ends by itself
    return {}


if __name__ == "__main__":
    serve({"get": get_all, "first": first, "paced": paced, "cold": cold})
