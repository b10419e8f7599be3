"""danube-client, the official Python client: one unary call a message, and one for each acknowledgement."""

from __future__ import annotations

import asyncio
from typing import Any

from danube import DanubeClientBuilder, DispatchStrategy, SubType
from perf.compare.clients.roles import Peer, main


class Official(Peer):
    """A window of calls; its first producer makes a topic, and no call deletes one."""

    in_flight = 64
    producer: Any = None

    async def open(self) -> None:
        self.client = await DanubeClientBuilder().service_url(self.options["grpc"]).build()

    async def create(self) -> None:
        await self._producer()

    async def _producer(self) -> Any:
        if self.producer is None:
            taken = self.options["level"] == "taken"
            strategy = DispatchStrategy.NON_RELIABLE if taken else DispatchStrategy.RELIABLE
            builder = self.client.new_producer().with_topic(self.topic).with_name("compare")
            self.producer = builder.with_dispatch_strategy(strategy).build()
            await self.producer.create()
            self.opened.push_async_callback(self.producer.close)
        return self.producer

    async def publish(self, payloads: list[bytes], count: int) -> None:
        await self._producer()  # before sends side by side would each make one
        await super().publish(payloads, count)

    async def send(self, payload: bytes) -> None:
        await (await self._producer()).send(payload)

    async def subscribe(self, name: str) -> None:
        builder = self.client.new_consumer().with_topic(self.topic).with_consumer_name(name)
        self.consumer = builder.with_subscription(name).with_subscription_type(SubType.EXCLUSIVE).build()
        await self.consumer.subscribe()
        self.opened.push_async_callback(self.consumer.close)
        self.arrived = await self.consumer.receive()

    async def receive(self) -> int:
        messages = [await self.arrived.get()]
        while not self.arrived.empty() and len(messages) < self.in_flight:
            messages.append(self.arrived.get_nowait())
        await asyncio.gather(*map(self.consumer.ack, messages))
        return len(messages)


if __name__ == "__main__":
    main(Official)
