"""The processes of the tiered-storage measurements, one role each.

``mover`` and ``put`` upload the same files, ``read`` and ``get`` read the same objects, ``first`` times the
first record of cold reads and ``ping`` a small GET, ``paced`` publishes at a steady rate, ``hot`` does too
and follows what it publishes, ``cold`` is many readers of old records.  ``put``, ``get`` and ``ping`` are the
bare client and know nothing of Danube.

Run as ``tier_peer.py ROLE JSON``; a role prints ``ready``, starts on a line from its standard input, and ends
with one line of JSON.
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
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import minio
import uvloop

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import danube  # noqa: E402
from danube.config.sections import Secret, StorageConfig  # noqa: E402
from perf.loads import IN_FLIGHT, go, open_consumer, open_producer, payloads_of  # noqa: E402
from perf.pump import percentiles  # noqa: E402
from tests.child_process import told  # noqa: E402

WAIT_S = 250.0
EPOCH = 1 << 30  # of an owner after all that wrote the segments
PING_BYTES = 64
WARM_BATCHES = 100
PACED_IN_FLIGHT = 4 * IN_FLIGHT  # more than a paced producer needs, so that the rate is the schedule's


def bare_client(options: dict[str, Any]) -> minio.Minio:
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


async def put(options: dict[str, Any]) -> dict[str, Any]:
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
        ended = time.monotonic_ns()
    return {"started_ns": started, "ended_ns": ended}


async def mover(options: dict[str, Any]) -> dict[str, Any]:
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


async def _moved(address: str, options: dict[str, Any]) -> dict[str, Any]:
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
    ended = time.monotonic_ns()
    writer.close()
    return {"started_ns": started, "ended_ns": ended}


# -- reads --------------------------------------------------------------------------------------------


async def get_all(options: dict[str, Any]) -> dict[str, Any]:
    """All objects in ranges of ``step`` bytes, ``parallel`` at a time (1: a plain loop)."""
    client, bucket = bare_client(options), options["bucket"]
    wanted = ranges(options["objects"], options["step"])
    client.bucket_exists(bucket)
    with ThreadPoolExecutor(options["parallel"]) as pool:
        await go()
        started = time.monotonic_ns()
        if options["parallel"] == 1:
            size = sum(get(client, bucket, *one) for one in wanted)
        else:
            size = sum(pool.map(lambda one: get(client, bucket, *one), wanted))
        ended = time.monotonic_ns()
    return {"started_ns": started, "ended_ns": ended, "bytes": size}


async def ping(options: dict[str, Any]) -> dict[str, Any]:
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


async def first(options: dict[str, Any]) -> dict[str, Any]:
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


async def read(options: dict[str, Any]) -> dict[str, Any]:
    """The topic from its start through ``batches()``, over a connection that is there."""
    records = 0
    async with danube.connect(options["url"]) as client:
        await client.admin.describe_topic(options["topic"])
        await go()
        started = time.monotonic_ns()
        async with open_consumer(client, options) as consumer:
            async for batch in consumer.batches(max_records=65_536, max_wait=0.05):
                records += len(batch)
                await batch.ack()
                if records >= options["record_count"]:
                    break
            ended = time.monotonic_ns()
    return {"started_ns": started, "ended_ns": ended, "records": records}


# -- publishing ---------------------------------------------------------------------------------------


async def paced(options: dict[str, Any]) -> dict[str, Any]:
    """``batch_count`` batches, one every ``interval_ns``; the time to each acknowledgement.

    A producer that falls behind sends as fast as it may until it has caught up; the rate that was reached
    counts to the last acknowledgement.
    """
    payloads = payloads_of(options["size"], options["batch"])
    times: list[float] = []
    pending: deque[asyncio.Future[None]] = deque()
    async with danube.connect(options["url"]) as client, open_producer(client, options) as producer:

        async def send(began_ns: int) -> None:
            await producer.send_many(payloads)
            times.append((time.monotonic_ns() - began_ns) / 1_000)

        for _ in range(WARM_BATCHES):
            await producer.send_many(payloads)
        await go()
        started = time.monotonic_ns()
        for number in range(options["batch_count"]):
            due = started + number * options["interval_ns"]
            wait_ns = due - time.monotonic_ns()
            if wait_ns > 0:
                await asyncio.sleep(wait_ns / 1e9)
            while len(pending) >= PACED_IN_FLIGHT or (pending and pending[0].done()):
                await pending.popleft()
            pending.append(asyncio.ensure_future(send(time.monotonic_ns())))
        while pending:
            await pending.popleft()
        ended = time.monotonic_ns()
    times = times[len(times) // 20 :]
    records = options["batch"] * options["batch_count"]
    return {"started_ns": started, "ended_ns": ended, "records": records, **percentiles(times)}


# -- many cold readers --------------------------------------------------------------------------------


async def hot(options: dict[str, Any]) -> dict[str, Any]:
    """A batch every ``interval_ns`` for ``seconds``, and a consumer that follows: both times of each batch.

    Ends once the consumer has everything, in order and once; DanubeError where that does not come.
    """
    sent_ns: list[int] = []
    acked_us: list[float] = []
    delivered_us: list[float] = []
    pending: set[asyncio.Future[None]] = set()
    async with danube.connect(options["url"]) as client, danube.connect(options["url"]) as other:
        consumer = other.consumer(options["topic"], options["subscription"], "exclusive", start="latest")
        async with open_producer(client, options, options["subscription"]) as producer, consumer:

            async def send(number: int) -> None:
                payload = number.to_bytes(8, "little").ljust(options["size"], b"x")
                began_ns = time.monotonic_ns()
                sent_ns.append(began_ns)
                await producer.send_many([payload] * options["batch"])
                acked_us.append((time.monotonic_ns() - began_ns) / 1_000)

            async def follow(batch_count: int) -> None:
                records = 0
                async for batch in consumer.batches():
                    now_ns = time.monotonic_ns()
                    for payload in batch.payloads:
                        number = int.from_bytes(payload[:8], "little")
                        if number != records // options["batch"]:
                            raise SystemExit(f"batch {number} came after {records} records")
                        records += 1
                        delivered_us.append((now_ns - sent_ns[number]) / 1_000)
                    await batch.ack()
                    if records == batch_count * options["batch"]:
                        return

            batch_count = int(options["seconds"] * 1e9) // options["interval_ns"]
            following = asyncio.ensure_future(follow(WARM_BATCHES + batch_count))
            for number in range(WARM_BATCHES):
                await send(number)
            await go()
            started = time.monotonic_ns()
            for number in range(batch_count):
                wait_ns = started + number * options["interval_ns"] - time.monotonic_ns()
                if wait_ns > 0:
                    await asyncio.sleep(wait_ns / 1e9)
                if len(pending) >= PACED_IN_FLIGHT:
                    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.ensure_future(send(WARM_BATCHES + number))
                pending.add(task)
                task.add_done_callback(pending.discard)
            await asyncio.wait_for(following, WAIT_S)
            ended = time.monotonic_ns()
    warm = WARM_BATCHES * options["batch"]
    return {
        "started_ns": started, "ended_ns": ended, "records": batch_count * options["batch"],
        **percentiles(acked_us[WARM_BATCHES:]), "delivery": percentiles(delivered_us[warm:]),
    }  # fmt: skip


async def cold(options: dict[str, Any]) -> dict[str, Any]:
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


ROLES: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    "put": put,
    "mover": mover,
    "get": get_all,
    "ping": ping,
    "first": first,
    "read": read,
    "paced": paced,
    "hot": hot,
    "cold": cold,
}


def main() -> None:
    role, options = ROLES[sys.argv[1]], json.loads(sys.argv[2])
    # The mover runs on the loop that asyncio brings, as in a broker.
    run = asyncio.run if sys.argv[1] == "mover" else uvloop.run
    print(json.dumps(run(role(options))), flush=True)


if __name__ == "__main__":
    main()
