"""The processes of the tiered-storage measurements, one role each.

``mover`` and ``put`` upload the same files, ``get`` reads objects, ``first`` times the first record of cold
reads and ``ping`` a small GET, ``paced`` publishes at a steady rate and may follow what it publishes,
``cold`` is many readers of old records.  ``put``, ``get`` and ``ping`` are the bare client alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import minio
import uvloop

import danube
from danube.config.sections import Secret, StorageConfig
from perf.child import Options, Window, go, moments, percentiles, serve
from perf.compare.clients.danube_native import IN_FLIGHT
from perf.loads import open_producer
from tests.child_process import told

WAIT_S = 250.0
EPOCH = 1 << 30  # of an owner after all that wrote the segments
PING_BYTES = 64
WARM_BATCHES = 100
PACED_IN_FLIGHT = 4 * IN_FLIGHT  # more than a paced producer needs, so that the rate is the schedule's


def bare_client(options: Options) -> minio.Minio:
    host = options["endpoint"].removeprefix("http://")
    return minio.Minio(
        host, options["access_key"], options["secret_key"], secure=False, region=options["region"]
    )


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


# -- uploads ------------------------------------------------------------------------------------------


async def put(options: Options) -> Options:
    """The files through fput_object, ``parallel`` at a time, each in parts one after the other."""
    client = bare_client(options)
    client.bucket_exists(options["bucket"])

    def one(path: str) -> None:
        key = f"{options['prefix']}/{Path(path).name}"
        client.fput_object(
            options["bucket"], key, path,
            part_size=options["part_bytes"], num_parallel_uploads=options["part_parallel"],
        )  # fmt: skip

    with ThreadPoolExecutor(options["parallel"]) as pool:
        await go()
        started = time.monotonic_ns()
        for _ in pool.map(one, options["files"]):
            pass
        return moments(started, len(options["files"]))


async def mover(options: Options) -> Options:
    """The same files through the mover, until a manifest that was read back names all of them."""
    from danube.broker.mover.mover import Mover
    from danube.broker.processes.contexts import DrainSignal, MoverContext, Pulse, SupervisorSettings
    from danube.wal.stores.opening import open_store

    listener = socket.socket(socket.AF_UNIX)
    address = f"\0danube-bench-{secrets.token_hex(8)}"
    listener.bind(address)
    listener.listen()
    listener.setblocking(False)
    storage = StorageConfig(
        mode="object_store",
        url=f"s3://{options['bucket']}/{options['prefix']}",
        endpoint=options["endpoint"],
        access_key=Secret(options["access_key"]),
        secret_key=Secret(options["secret_key"]),
        upload_parallel=options["parallel"],
        part_bytes=options["part_bytes"],
    )
    context = MoverContext(
        listener=listener,
        drain=DrainSignal(),
        settings=SupervisorSettings(data_dir=Path(options["data_dir"]), mover_drain_timeout_ms=500),
        start_count=0,
        pulse=Pulse(),
    )
    process = Mover(context, storage, open_store(storage))
    running = asyncio.ensure_future(process.run())
    try:
        async with asyncio.timeout(WAIT_S):
            return await _moved(address, options)
    finally:
        process.stop()
        await running


async def _moved(address: str, options: Options) -> Options:
    """What a worker sees: from ``attach`` to the state that tells of every segment."""
    from danube.broker.links import FrameReader, encode_frame
    from danube.wal.tier.manifest import Manifest

    reader, writer = await asyncio.open_unix_connection(address)
    frames = FrameReader()

    def attach(partition: int, directory: str) -> None:
        fields = {"topic": options["topic"], "topic_id": options["topic_id"], "epoch": EPOCH, "log_start": 0}
        writer.write(encode_frame("attach", partition=partition, directory=directory, **fields))

    async def told(partition: int, count: int) -> None:
        while data := await reader.read(1 << 20):
            for frame in frames.feed(data):
                if frame["kind"] != "state":
                    continue
                if frame["error"]:
                    raise SystemExit(frame["error"])
                named = len(Manifest.decode(frame["manifest"])) if frame["manifest"] else 0
                if frame["partition"] == partition and named == count:
                    return
        raise SystemExit("the mover closed the connection")

    attach(1, f"{options['data_dir']}/none")  # answered once the mover has bound the store
    await told(1, 0)
    await go()
    started = time.monotonic_ns()
    attach(0, options["directory"])
    await told(0, len(options["files"]))
    found = moments(started, len(options["files"]))
    writer.close()
    return found


# -- reads --------------------------------------------------------------------------------------------


async def get_all(options: Options) -> Options:
    """All objects in ranges of ``step`` bytes, in a plain loop."""
    client, bucket = bare_client(options), options["bucket"]
    wanted = ranges(options["objects"], options["step"])
    client.bucket_exists(bucket)
    await go()
    started = time.monotonic_ns()
    size = sum(get(client, bucket, *one) for one in wanted)
    return {**moments(started, len(wanted)), "bytes": size}


async def ping(options: Options) -> Options:
    """Milliseconds of a GET of a few bytes on a kept connection."""
    client, bucket = bare_client(options), options["bucket"]
    key = min(options["objects"])
    get(client, bucket, key, 0, PING_BYTES)
    await go()
    times = []
    for _ in range(options["count"]):
        started = time.perf_counter_ns()
        get(client, bucket, key, 0, PING_BYTES)
        times.append((time.perf_counter_ns() - started) / 1e6)
    return {"median_ms": statistics.median(times)}


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


# -- publishing and reading beside it ------------------------------------------------------------------


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
        started, window = time.monotonic_ns(), Window(PACED_IN_FLIGHT)
        for number in range(count):
            wait_ns = started + number * options["interval_ns"] - time.monotonic_ns()
            if wait_ns > 0:
                await asyncio.sleep(wait_ns / 1e9)
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


ROLES = {
    "put": put, "mover": mover, "get": get_all, "ping": ping, "first": first, "paced": paced, "cold": cold,
}  # fmt: skip

if __name__ == "__main__":
    # The mover runs on the loop that asyncio brings, as in a broker.
    serve(ROLES, asyncio.run if sys.argv[1] == "mover" else uvloop.run)
