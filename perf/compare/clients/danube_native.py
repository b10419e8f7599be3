"""Danube's own client: batches with several calls under way, or records one by one."""

from __future__ import annotations

import asyncio
from itertools import cycle, islice
from typing import Any

import danube
from danube.errors import Overloaded
from perf.child import Window
from perf.compare.clients.roles import Peer, main

IN_FLIGHT = 8
BATCH_BYTES = 512 << 10  # where the client cuts what send_many is given


class Batches(Peer):
    """``send_many``; ``batches()`` with one acknowledgement for each batch."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.batch = options.get("batch") or max(1, BATCH_BYTES // (options["size"] + 8))
        self.producer: Any = None

    async def open(self) -> None:
        self.client = await self.opened.enter_async_context(danube.connect(self.options["url"]))

    async def create(self) -> None:
        """Make the topic and see that its level is the one that the table will name."""
        wanted = self.options["durability"]
        await self.client.admin.create_topic(
            self.topic, reliable=wanted != "memory", durability=wanted,
            max_record_bytes=max(self.options["size"], 1 << 20),
        )  # fmt: skip
        found = (await self.client.admin.describe_topic(self.topic)).topic.durability
        if found != wanted:
            raise SystemExit(f"the topic's level is {found!r} instead of {wanted!r}")

    async def delete(self) -> None:
        await self.client.admin.delete_topic(self.topic)

    async def _producer(self) -> Any:
        if self.producer is None:
            level = self.options["durability"]
            producer = self.client.producer(
                self.topic, name="compare", reliable=level != "memory", durability=level
            )
            self.producer = await self.opened.enter_async_context(producer)
        return self.producer

    async def publish(self, payloads: list[bytes], count: int) -> None:
        producer, window = await self._producer(), Window(IN_FLIGHT)
        whole = list(islice(cycle(payloads), min(count, self.batch)))
        for _ in range(count // len(whole)):
            await window.add(producer.send_many(whole))
        if count % len(whole):
            await window.add(producer.send_many(whole[: count % len(whole)]))
        await window.end()

    async def send(self, payload: bytes) -> None:
        await (await self._producer()).send(payload)

    async def subscribe(self, name: str) -> None:
        consumer = self.client.consumer(self.topic, subscription=name, mode="exclusive", start="earliest")
        self.consumer = await self.opened.enter_async_context(consumer)
        self.batches = self.consumer.batches(max_records=65_536, max_wait=0.05)

    async def receive(self) -> int:
        batch = await anext(self.batches)
        count = len(batch.payloads)
        await batch.ack()
        return count


class OneByOne(Batches):
    """``send_nowait`` and ``send``; one acknowledgement for each message."""

    async def publish(self, payloads: list[bytes], count: int) -> None:
        producer = await self._producer()
        for first in range(0, count, len(payloads)):
            for payload in payloads[: count - first]:
                try:
                    producer.send_nowait(payload)
                except Overloaded:
                    await producer.ready()
                    producer.send_nowait(payload)
            await asyncio.sleep(0)
        await producer.flush()

    async def receive_all(self, count: int) -> int:
        """``async for`` as an application has it, without a coroutine of ours for each message."""
        records = 0
        async for message in self.consumer:
            await message.ack()
            records += 1
            if records >= count:
                break
        return records


if __name__ == "__main__":
    danube.load_kernels()  # as a program that sends millions would
    main(lambda options: OneByOne(options) if options["style"] == "one by one" else Batches(options))
