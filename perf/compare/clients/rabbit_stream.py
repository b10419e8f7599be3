"""rstream: batches over RabbitMQ's stream protocol, confirmed each; a reader whose offset is stored."""

from __future__ import annotations

import asyncio
from itertools import cycle, islice
from typing import Any

from rstream import Consumer, ConsumerOffsetSpecification, OffsetType, Producer

from perf.compare.clients.roles import Peer, main

BATCH = 100
FRAME_BYTES = 800_000  # of the 1 MiB that a frame may have
IN_FLIGHT = 10_000
IN_FLIGHT_BYTES = 32 << 20
CREDIT = 50
STORE_EVERY = 10_000  # records between two stored offsets, as the client's documentation advises


class Stream(Peer):
    """Publishes frames of up to 100 records and counts the confirmations."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.batch = self.fitting(BATCH, FRAME_BYTES)
        self.window = self.fitting(IN_FLIGHT, IN_FLIGHT_BYTES)  # many batches
        place = {"host": "127.0.0.1", "port": options["stream_port"]}
        self.server = {**place, "username": "guest", "password": "guest"}
        self.pending = self.received = self.stored = 0
        self.refused = False
        self.changed = asyncio.Event()

    async def open(self) -> None:
        self.producer = Producer(**self.server)
        await self.producer.start()
        self.opened.push_async_callback(self.producer.close)

    async def create(self) -> None:
        await self.producer.create_stream(self.topic)

    async def delete(self) -> None:
        await self.producer.delete_stream(self.topic)

    def _confirmed(self, status: Any) -> None:
        self.refused |= not status.is_confirmed
        self.pending -= 1
        if not self.pending or self.pending <= self.window - self.batch:
            self.changed.set()

    async def _wait(self, limit: int) -> None:
        """Until at most ``limit`` records are unconfirmed."""
        while self.pending > limit:
            self.changed.clear()
            await self.changed.wait()
        if self.refused:
            raise SystemExit("the server refused a record")

    async def publish(self, payloads: list[bytes], count: int) -> None:
        chosen, confirmed = cycle(payloads), self._confirmed
        for first in range(0, count, self.batch):
            records = list(islice(chosen, min(self.batch, count - first)))
            await self._wait(self.window - len(records))
            self.pending += len(records)
            await self.producer.send_batch(self.topic, records, on_publish_confirm=confirmed)
        await self._wait(0)

    async def send(self, payload: bytes) -> None:
        await self.producer.send_wait(self.topic, payload)

    async def subscribe(self, name: str) -> None:
        self.name = name
        self.consumer = Consumer(**self.server)
        await self.consumer.start()
        self.opened.push_async_callback(self.consumer.close)
        first = ConsumerOffsetSpecification(OffsetType.FIRST, None)
        await self.consumer.subscribe(
            self.topic, self._deliver, decoder=bytes, subscriber_name=name, offset_specification=first,
            initial_credit=CREDIT,
        )  # fmt: skip

    def _deliver(self, record: bytes, context: Any) -> None:
        self.received += 1
        self.offset = context.offset
        self.changed.set()

    async def receive(self) -> int:
        while not self.received:
            self.changed.clear()
            await self.changed.wait()
        count, self.received = self.received, 0
        self.stored += count
        if self.stored >= STORE_EVERY:
            self.stored = 0
            await self.consumer.store_offset(self.topic, self.name, self.offset)
        return count


if __name__ == "__main__":
    main(Stream)
