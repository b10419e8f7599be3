"""One process of a benchmark (``python -m`` with this module); see bench_run for the lines it speaks."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections import deque
from typing import Any

import uvloop

import danube
from danube.cli.records.bench_run import Part
from danube.errors import DanubeError
from danube.host.clock import monotonic_ns

BATCHES_IN_FLIGHT = 16
RELIABLE_IDLE_S = 30.0  # a consumer that got nothing for so long gives up
LOOK_INTERVAL_S = 0.25
LOSSY_IDLE_S = 2.0  # a non-reliable topic may have dropped the rest
_SENT_AT = struct.Struct("<Q")


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def wait_for_go() -> None:
    say({"ready": True})
    line = await asyncio.to_thread(sys.stdin.readline)
    if line.strip() != "go":
        raise SystemExit(1)  # the parent is gone


async def run_part(part: Part) -> dict[str, Any]:
    roles = {"publish": publish, "consume": consume, "latency": latency}
    async with danube.connect(part.address) as client:
        return await roles[part.role](client, part)


def _producer(client: Any, part: Part) -> Any:
    return client.producer(
        part.topic,
        name=f"bench-producer-{part.index}",
        reliable=part.reliable,
        durability=part.durability,
        partitions=part.partitions,
    )


async def publish(client: Any, part: Part) -> dict[str, Any]:
    """Send the records; the end is the last acknowledgement."""
    async with _producer(client, part) as producer:
        payloads = [bytes(part.size)] * min(part.batch, part.count)
        await wait_for_go()
        began_ns = monotonic_ns()
        if part.batch == 1:
            await _publish_singly(producer, payloads[0], part)
        else:
            await _publish_batches(producer, payloads, part)
        ended_ns = monotonic_ns()
    return {"records": part.count, "began_ns": began_ns, "ended_ns": ended_ns}


async def _publish_batches(producer: Any, payloads: list[bytes], part: Part) -> None:
    in_flight: deque[asyncio.Task[Any]] = deque()
    began_ns, sent = monotonic_ns(), 0
    while sent < part.count:
        await _until_due(began_ns, sent, part.rate)
        step = min(len(payloads), part.count - sent)
        chosen = payloads if step == len(payloads) else payloads[:step]
        in_flight.append(asyncio.create_task(producer.send_many(chosen)))
        sent += step
        if len(in_flight) >= BATCHES_IN_FLIGHT:
            await in_flight.popleft()
    for task in in_flight:
        await task


async def _publish_singly(producer: Any, payload: bytes, part: Part) -> None:
    """Publish as an application does: send_nowait for each record, and wait when there is no room."""
    began_ns, sent, step = monotonic_ns(), 0, 100
    send_nowait = producer.send_nowait
    while sent < part.count:
        await _until_due(began_ns, sent, part.rate)
        await producer.ready()
        upto = min(step, part.count - sent)
        for _ in range(upto):
            send_nowait(payload)
        sent += upto
        await asyncio.sleep(0)
    await producer.flush()


async def _until_due(began_ns: int, sent: int, rate: float) -> None:
    early_ns = began_ns + round(sent / rate * 1e9) - monotonic_ns() if rate else 0
    if early_ns > 0:
        await asyncio.sleep(early_ns / 1e9)


class Tally:
    """Count of a consumer's records, and when the last of them came."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.received = 0
        self.last_ns = monotonic_ns()

    def add(self, count: int) -> bool:
        """Count; whether that was all."""
        self.received += count
        self.last_ns = monotonic_ns()
        return self.received >= self.wanted


async def consume(client: Any, part: Part) -> dict[str, Any]:
    """Receive and acknowledge ``count`` records, or until nothing comes any more."""
    name = f"bench-consumer-{part.index}"
    async with client.consumer(part.topic, subscription=name, name=name, start="earliest") as consumer:
        await wait_for_go()
        tally = Tally(part.count)
        began_ns = tally.last_ns
        receive = _receive_messages if part.batch == 1 else _receive_batches
        work = asyncio.create_task(receive(consumer, tally))
        while not work.done():
            await asyncio.wait({work}, timeout=LOOK_INTERVAL_S)
            # The first record may wait for producers that are slow to begin.
            idle_s = RELIABLE_IDLE_S if part.reliable or not tally.received else LOSSY_IDLE_S
            if monotonic_ns() - tally.last_ns > idle_s * 1e9:
                work.cancel()
                await asyncio.wait({work})
        if not work.cancelled():
            work.result()
    return {"records": tally.received, "began_ns": began_ns, "ended_ns": tally.last_ns}


async def _receive_batches(consumer: Any, tally: Tally) -> None:
    async for batch in consumer.batches(max_records=65_536):
        await batch.ack()
        if tally.add(len(batch)):
            return


async def _receive_messages(consumer: Any, tally: Tally) -> None:
    async for message in consumer:
        await message.ack()
        if tally.add(1):
            return


async def latency(client: Any, part: Part) -> dict[str, Any]:
    """Time from a send to its acknowledgement and to the consumer, which has a connection of its own."""
    acknowledged: list[int] = []
    received: list[int] = []
    count = part.count
    async with danube.connect(part.address) as second, _producer(client, part) as producer:
        options: dict[str, Any] = {"subscription": "bench-latency", "start": "latest"}
        async with second.consumer(part.topic, **options) as consumer:
            reader = asyncio.create_task(_note_arrivals(consumer, received, count))
            await wait_for_go()
            late_ns = await _send_on_schedule(producer, part, acknowledged)
            missing = await _wait_for(reader, count, received)
    return {
        "records": count,
        "missing": missing,
        "ack_us": percentiles(acknowledged),
        "end_to_end_us": percentiles(received),
        "schedule_late_us": percentiles(late_ns),
    }


async def _send_on_schedule(producer: Any, part: Part, acknowledged: list[int]) -> list[int]:
    """Send one record after another; latencies of delayed records count from the time they were due."""
    late: list[int] = []
    step_ns = round(1e9 / part.rate)
    rest = bytes(part.size - _SENT_AT.size)
    due_ns = monotonic_ns() + step_ns
    free_ns = 0  # when the last acknowledgement came
    for _ in range(part.count):
        early_ns = due_ns - monotonic_ns()
        if early_ns > 0:
            await asyncio.sleep(early_ns / 1e9)
        now_ns = monotonic_ns()
        # A timer that fires late is the measuring process's own doing; an answer that is late is not.
        began_ns = due_ns if free_ns > due_ns else now_ns
        await producer.send(_SENT_AT.pack(began_ns) + rest)
        free_ns = monotonic_ns()
        acknowledged.append(free_ns - began_ns)
        late.append(max(now_ns - due_ns, 0))
        due_ns += step_ns
    return late


async def _note_arrivals(consumer: Any, received: list[int], count: int) -> None:
    async for message in consumer:
        received.append(monotonic_ns() - _SENT_AT.unpack_from(message.payload)[0])
        await message.ack()
        if len(received) >= count:
            return


async def _wait_for(reader: asyncio.Task[None], count: int, received: list[int]) -> int:
    """Wait for records under way; return the number of missing ones."""
    try:
        await asyncio.wait_for(reader, LOSSY_IDLE_S)
    except TimeoutError:
        pass
    return count - len(received)


def percentiles(values_ns: list[int]) -> dict[str, float]:
    """p50, p99, p999 and the largest, in microseconds; nearest rank, so each one was really measured."""
    ordered = sorted(values_ns)
    ranks = {"p50": 500, "p99": 990, "p999": 999, "max": 1000} if ordered else {}
    return {name: ordered[-(-len(ordered) * rank // 1000) - 1] / 1000 for name, rank in ranks.items()}


def child() -> None:
    """Read the part, run it, answer with the result or with the error."""
    part = Part(**json.loads(sys.stdin.readline()))
    danube.load_kernels()  # as a program that sends millions would
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            say(runner.run(run_part(part)))
    except DanubeError as error:
        say({"error": {"code": error.code, "what": error.what, "why": error.why, "hint": error.hint}})


if __name__ == "__main__":
    child()
