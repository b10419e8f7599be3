"""aio-pika: confirmed publishes side by side to a quorum queue; deliveries acknowledged in groups."""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika
from aio_pika import DeliveryMode, Message

from perf.compare.clients.roles import Peer, main

IN_FLIGHT = 500
IN_FLIGHT_BYTES = 16 << 20
PREFETCH = 1_000


class Quorum(Peer):
    """A window of publishes that wait for their confirmation; one ack for what has come."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.in_flight = self.fitting(IN_FLIGHT, IN_FLIGHT_BYTES)
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()

    async def open(self) -> None:
        connection = await aio_pika.connect(self.options["url"])
        self.opened.push_async_callback(connection.close)
        self.channel = await connection.channel(publisher_confirms=True)

    async def create(self) -> None:
        await self.channel.declare_queue(self.topic, durable=True, arguments={"x-queue-type": "quorum"})

    async def delete(self) -> None:
        await self.channel.queue_delete(self.topic)

    async def send(self, payload: bytes) -> None:
        message = Message(payload, delivery_mode=DeliveryMode.PERSISTENT)
        await self.channel.default_exchange.publish(message, self.topic)

    async def subscribe(self, name: str) -> None:
        await self.channel.set_qos(prefetch_count=PREFETCH)
        queue = await self.channel.get_queue(self.topic)
        await queue.consume(self.arrived.put)

    async def receive(self) -> int:
        last, count = await self.arrived.get(), 1
        while not self.arrived.empty() and count < PREFETCH // 2:
            last = self.arrived.get_nowait()
            count += 1
        await last.ack(multiple=True)
        return count


if __name__ == "__main__":
    main(Quorum)
