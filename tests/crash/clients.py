"""Producers and consumers that write down what they do; run as ``clients.py ROLE JSON``.

``prepare`` makes the topics and subscriptions, ``produce`` and ``consume`` work until a line comes
on standard input (or, with ``steps``, that many sends), ``read_log`` reads every topic from its start
(or from ``since_us``) through a fresh subscription, ``stands`` asks where every subscription stands.
Each reopens what an error closed, as an application would.  A client is native unless its ``via`` says
``grpc`` (:mod:`tests.crash.grpc_clients`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import danube  # noqa: E402
from danube.errors import Conflict, DanubeError, Unavailable  # noqa: E402
from tests.child_process import told  # noqa: E402
from tests.crash.journal import Journal, payload_of, read_payload  # noqa: E402

FAILURE = {
    "max_redelivery_count": 1_000_000,
    "ack_timeout_ms": 1_500,
    "base_redelivery_delay_ms": 20,
    "max_redelivery_delay_ms": 20,
    "backoff": "fixed",
}
IDLE_S = 2.5  # longer than the ack timeout: what was held has come again
STALL_S = 20.0
CONFIRM_EVERY_S = 0.2
STUCK_S = 60.0
GAP_S = 1.0  # how long a consumer that makes gaps gives a record back for
KEYS = 12
LEFT_OUT = ("expired", "damaged", "dropped", "dead_lettered", "lag")


@asynccontextmanager
async def connected(options: dict[str, Any]) -> AsyncIterator[Any]:
    """A client of its own, so that each of them lands on some worker."""
    async with danube.connect(options["url"], **options.get("connect", {})) as client:
        yield client


async def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Make the topics, and every subscription before the first record is sent; again until it works."""
    deadline = time.monotonic() + STALL_S
    while True:
        try:
            await make_all(options)
            return {}
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def make_all(options: dict[str, Any]) -> None:
    async with connected(options) as client:
        for topic in options["topics"]:
            try:
                await client.admin.create_topic(
                    topic["topic"],
                    partitions=topic["partitions"],
                    durability=topic["durability"],
                    retention_ms=topic.get("retention_ms"),
                    failure=FAILURE | options.get("failure", {}),
                )
            except Conflict:
                pass
        for one in options["subscriptions"]:
            async with client.consumer(
                one["topic"],
                subscription=one["subscription"],
                mode=one["mode"],
                start="earliest",
                name="prepare",
            ):
                pass


class Sender:
    """One producer and its journal; ``style`` is many, nowait or one (awaited, with keys)."""

    errors: tuple[type[Exception], ...] = (DanubeError,)

    def __init__(self, options: dict[str, Any], one: dict[str, Any], stopped: asyncio.Event) -> None:
        self.options = options
        self.topic: str = one["topic"]
        self.name: str = one["producer"]
        self.style: str = one["style"]
        self.keyed: bool = one["keyed"]
        self.durability: str = one["durability"]
        self.random = random.Random(f"{options['seed']} {self.name}")
        self.journal = Journal(Path(options["journals"]) / f"producer-{self.name}-{options['part']}.jsonl")
        self.sequence = options["part"] * 1_000_000_000
        self.acknowledged = 0
        self.steps: int = options.get("steps") or sys.maxsize
        self.stopped = stopped

    @property
    def ended(self) -> bool:
        return self.steps <= 0 or self.stopped.is_set()

    async def run(self) -> int:
        while not self.ended:
            try:
                await self.work()
            except self.errors:
                await asyncio.sleep(0.05)
        self.journal.close()
        return self.acknowledged

    async def work(self) -> None:
        """Send until stopped or until an error closes the producer."""
        async with (
            connected(self.options) as client,
            client.producer(self.topic, name=self.name) as producer,
        ):
            await self.send_until_stopped(producer)

    async def send_until_stopped(self, producer: Any) -> None:
        step = {"many": self.send_many, "nowait": self.send_nowait, "one": self.send_one}[self.style]
        while not self.ended:
            self.steps -= 1
            await step(producer)
            await asyncio.sleep(self.random.random() * self.options["pause_s"])

    def next_records(self, count: int) -> tuple[int, list[bytes], list[str | None]]:
        """Number the records and write down that they are about to be sent."""
        first = self.sequence
        self.sequence += count
        keys = [f"key-{self.random.randrange(KEYS)}" if self.keyed else None for _ in range(count)]
        if self.keyed:
            for place, key in enumerate(keys):
                self.journal.write("try", self.name, self.topic, first + place, first + place + 1, key)
        else:
            self.journal.write("try", self.name, self.topic, first, self.sequence, None)
        size = self.random.choice(self.options.get("sizes") or (0, 100, 300, 1_000))
        return (
            first,
            [payload_of(self.name, sequence, size) for sequence in range(first, self.sequence)],
            keys,
        )

    def note(self, first: int, ack: Any, count: int) -> None:
        self.acknowledged += count
        self.journal.write(
            *("ok", self.name, self.topic, first, first + count, ack.partition, ack.offset, ack.durability),
            time.monotonic_ns(),
        )

    def fail(self, first: int, count: int, error: BaseException) -> None:
        self.journal.write("fail", self.name, self.topic, first, first + count, type(error).__name__)

    async def send_many(self, producer: Any) -> None:
        first, payloads, _ = self.next_records(self.random.randrange(1, 60))
        try:
            acks = await producer.send_many(payloads)
        except DanubeError as error:
            self.fail(first, len(payloads), error)
            raise
        for ack in acks:
            self.note(first, ack, ack.record_count)
            first += ack.record_count

    async def send_nowait(self, producer: Any) -> None:
        first, payloads, keys = self.next_records(self.random.randrange(1, 60))
        await producer.ready()
        futures = [
            producer.send_nowait(payload, key=key) for payload, key in zip(payloads, keys, strict=True)
        ]
        error = None
        for sequence, future in enumerate(futures, first):
            try:
                self.note(sequence, await future, 1)
            except DanubeError as failed:
                error = failed
                self.fail(sequence, 1, failed)
        if error is not None:
            raise error

    async def send_one(self, producer: Any) -> None:
        first, payloads, keys = self.next_records(1)
        try:
            self.note(first, await producer.send(payloads[0], key=keys[0]), 1)
        except DanubeError as error:
            self.fail(first, 1, error)
            raise


async def produce(options: dict[str, Any]) -> dict[str, Any]:
    stopped = told()
    senders = [kind_of(one, Sender)(options, one, stopped) for one in options["producers"]]
    print("ready", flush=True)
    return {"acknowledged": sum(await asyncio.gather(*(sender.run() for sender in senders)))}


class Receiver:
    """One consumer and its journal: acks most, nacks some, leaves some until they come again."""

    errors: tuple[type[Exception], ...] = (DanubeError,)

    def __init__(self, options: dict[str, Any], one: dict[str, Any], load: Draining) -> None:
        self.options = options
        self.topic: str = one["topic"]
        self.subscription: str = one["subscription"]
        self.mode: str = one["mode"]
        self.name: str = one["consumer"]
        self.batched: bool = one["batched"]
        self.cold: bool = one.get("cold", False)  # comes when all others take the rest
        self.gaps: bool = one.get("gaps", False)  # acks above many records that it takes later
        self.confirms: bool = options.get("confirms", False)
        self.random = random.Random(f"{options['seed']} {self.subscription} {self.name}")
        file = f"consumer-{self.subscription}-{self.name}-{options['part']}.jsonl"
        self.journal = Journal(Path(options["journals"]) / file)
        self.load = load
        self.received = 0
        self.unconfirmed: list[tuple[int, int]] = []
        self.confirmed_s = 0.0

    async def run(self) -> int:
        if self.cold:
            await self.load.begun.wait()
        while not self.load.finished.is_set():
            try:
                await self.work()
            except self.errors:
                self.load.moment = time.monotonic()
                await asyncio.sleep(0.05)
        self.journal.close()
        return self.received

    async def work(self) -> None:
        """Consume until everything is taken or an error closes the consumer."""
        async with (
            connected(self.options) as client,
            client.consumer(
                self.topic, subscription=self.subscription, mode=self.mode, name=self.name, start="earliest"
            ) as consumer,
            self.load.counting(client),
        ):
            self.unconfirmed.clear()  # of a consumer that an error closed
            await self.until_finished(self.take_batches(consumer) if self.batched else self.take(consumer))
            await self.confirm(consumer, at_once=True)

    async def until_finished(self, taking: Coroutine[Any, Any, None]) -> None:
        """Run ``taking`` until it fails or nothing comes any more."""
        tasks = [asyncio.ensure_future(taking), asyncio.ensure_future(self.load.finished.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    def note(
        self, partition: int, offset: int, payload: bytes, key: Any, *, redelivered: bool = False
    ) -> None:
        identity, intact = read_payload(payload)
        shown = key.decode(errors="replace") if isinstance(key, bytes) else key
        self.received += 1
        self.load.moment = time.monotonic()
        self.journal.write(
            *("got", self.subscription, self.name, self.topic, partition, offset, *identity, shown, intact),
            *(redelivered, time.monotonic_ns()),
        )

    def fate(self) -> str:
        """What to do with a record: leave it until it comes again, nack it, ack it; at the end ack all."""
        drawn = self.random.random() if not self.load.draining else 1.0
        if self.gaps:
            return "nack" if drawn < 0.3 else "ack"
        return "leave" if drawn < 0.02 else "nack" if drawn < 0.05 else "ack"

    def note_ack(self, partition: int, offset: int) -> None:
        self.journal.write("ack", self.subscription, self.topic, partition, offset)
        if self.confirms:
            self.unconfirmed.append((partition, offset))

    async def confirm(self, consumer: Any, *, at_once: bool = False) -> None:
        """Every now and then wait until the broker has stored the acks, and write down which."""
        if not self.unconfirmed or (time.monotonic() - self.confirmed_s < CONFIRM_EVERY_S and not at_once):
            return
        await consumer.flush()
        moment_ns = time.monotonic_ns()
        for partition in {partition for partition, _ in self.unconfirmed}:
            offsets = [offset for one, offset in self.unconfirmed if one == partition]
            self.journal.write("confirmed", self.subscription, self.topic, partition, offsets, moment_ns)
        self.unconfirmed.clear()
        self.confirmed_s = time.monotonic()

    async def take(self, consumer: Any) -> None:
        async for message in consumer:
            again = message.redelivery_count > 0
            self.note(message.partition, message.offset, message.payload, message.key, redelivered=again)
            fate = self.fate()
            if fate == "leave":
                continue
            if fate == "nack":
                await message.nack(delay=GAP_S if self.gaps else 0.02, reason="crash check")
                continue
            await message.ack()
            self.note_ack(message.partition, message.offset)
            await self.confirm(consumer)

    async def take_batches(self, consumer: Any) -> None:
        async for batch in consumer.batches(max_records=100, max_wait=0.01):
            again = (batch.redelivery_counts > 0).tolist()
            came = zip(batch.offsets, batch.payloads, batch.keys, again, strict=True)
            for offset, payload, key, redelivered in came:
                self.note(batch.partition, int(offset), payload, key, redelivered=redelivered)
            if not self.load.draining and self.random.random() < 0.03:
                await batch.nack(delay=0.02, reason="crash check")
                continue
            await batch.ack()
            for offset in batch.offsets:
                self.note_ack(batch.partition, int(offset))
            await self.confirm(consumer)


async def nothing_left(options: dict[str, Any]) -> bool:
    """Whether every subscription stands at the end of its topic, by the broker's word."""
    try:
        async with connected(options) as client:
            for one in options["subscriptions"]:
                found = await client.admin.describe_subscription(one["topic"], one["subscription"])
                if any(part["lag"] or part["in_flight"] for part in found.partitions):
                    return False
    except DanubeError:
        return False
    return True


class Draining:
    """The end of a run: first take everything that is left, then stop when nothing comes any more.

    With ``asks`` the broker must say, too, that there is nothing left.  After ``STUCK_S`` that is not waited
    for: what did not come by then is a matter for the checker.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.idle_s: float = options.get("idle_s", IDLE_S)
        self.begun = asyncio.Event()
        self.finished = asyncio.Event()
        self.moment = time.monotonic()
        self._clients: set[Any] = set()

    @asynccontextmanager
    async def counting(self, client: Any) -> AsyncIterator[None]:
        """While this client has no connection nothing can come: that is no idleness."""
        self._clients.add(client)
        try:
            yield
        finally:
            self._clients.discard(client)

    @property
    def draining(self) -> bool:
        return self.begun.is_set()

    async def watch(self, asked: asyncio.Event) -> None:
        await asked.wait()
        self.begun.set()
        self.moment = time.monotonic()
        while not await self.ended():
            if not all(client.connected for client in self._clients):
                self.moment = time.monotonic()
            await asyncio.sleep(0.05)
        self.finished.set()

    async def ended(self) -> bool:
        idle_s = time.monotonic() - self.moment
        if idle_s < self.idle_s:
            return False
        return idle_s > STUCK_S or not self.options.get("asks") or await nothing_left(self.options)


async def consume(options: dict[str, Any]) -> dict[str, Any]:
    load = Draining(options)
    watching = asyncio.ensure_future(load.watch(told()))
    receivers = [kind_of(one, Receiver)(options, one, load) for one in options["consumers"]]
    print("ready", flush=True)
    received = sum(await asyncio.gather(*(receiver.run() for receiver in receivers)))
    await watching
    return {"received": received}


def kind_of(one: dict[str, Any], native: type[Any]) -> type[Any]:
    """The class that plays a producer or consumer."""
    if one.get("via") != "grpc":
        return native
    from tests.crash.grpc_clients import GrpcReceiver, GrpcSender  # grpcio only where it is asked for

    return GrpcSender if native is Sender else GrpcReceiver


async def read_log(options: dict[str, Any]) -> dict[str, Any]:
    """Every record of every topic, through a subscription that never existed before.

    ``bases`` gives for each topic the offset of each partition below which nothing is asked for, and
    ``since_us`` a moment (microseconds of wall time) before any of it was stored.
    """
    journal, records = Journal(Path(options["journals"]) / f"log-{options['part']}.jsonl"), 0
    async with connected(options) as client:
        for topic in options["topics"]:
            records += await read_topic(client, topic["topic"], options, journal)
    journal.close()
    return {"records": records}


async def stands(options: dict[str, Any]) -> dict[str, Any]:
    """Write down what every subscription left out, and what it has not got yet."""
    journal = Journal(Path(options["journals"]) / f"stands-{options['part']}.jsonl")
    async with connected(options) as client:
        for one in options["subscriptions"]:
            found = await client.admin.describe_subscription(one["topic"], one["subscription"])
            for number, part in enumerate(found.partitions):
                counts = {name: int(part[name]) for name in LEFT_OUT}
                journal.write("stands", one["subscription"], one["topic"], number, counts)
    journal.close()
    return {}


def end_of_records(partition: dict[str, Any]) -> int:
    """Behind the last record: a new owner that has none yet begins behind offsets that nobody uses."""
    end: int = partition["high_watermark"]
    for hole in sorted(partition.get("holes") or [], key=lambda one: -one["end"]):
        if hole["end"] == end:
            end = hole["start"]
    return end


async def whole_description(client: Any, topic: str) -> Any:
    """The description of a topic once every partition knows its start, which its mover looks up."""
    deadline = time.monotonic() + STALL_S
    while True:
        described = await client.admin.describe_topic(topic)
        if all(one["start"] is not None for one in described.partitions):
            return described
        assert time.monotonic() < deadline, f"{topic}: a start is still unknown: {described.partitions}"
        await asyncio.sleep(0.05)


async def read_topic(client: Any, topic: str, options: dict[str, Any], journal: Journal) -> int:
    described = await whole_description(client, topic)
    following = options.get("bases", {}).get(topic) or [one["start"] for one in described.partitions]
    following = [max(base, one["start"]) for base, one in zip(following, described.partitions, strict=True)]
    last = [end_of_records(one) for one in described.partitions]
    since, subscription = options.get("since_us"), f"log-{options['part']}"
    records = 0
    async with client.consumer(
        topic, subscription=subscription, mode="exclusive", start=("time", since) if since else "earliest"
    ) as consumer:
        batches = consumer.batches(max_records=10_000, max_wait=0.01)
        while any(offset < end for offset, end in zip(following, last, strict=True)):
            batch = await asyncio.wait_for(anext(batches), STALL_S)
            for offset, payload, key in zip(batch.offsets, batch.payloads, batch.keys, strict=True):
                if offset < following[batch.partition]:
                    continue  # of an earlier epoch, or come again
                identity, intact = read_payload(payload)
                journal.write("log", topic, batch.partition, int(offset), *identity, key, intact)
                following[batch.partition] = int(offset) + 1
                records += 1
            await batch.ack()
    await client.admin.delete_subscription(topic, subscription)
    return records


ROLES = {"prepare": prepare, "produce": produce, "consume": consume, "read_log": read_log, "stands": stands}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal it is for who started this process
    options = json.loads(sys.argv[2])
    if "log" in options:
        logging.basicConfig(filename=options["log"], format="%(asctime)s %(message)s")
    print(json.dumps(uvloop.run(ROLES[sys.argv[1]](options))), flush=True)


if __name__ == "__main__":
    main()
