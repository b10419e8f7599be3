"""danube-client, the official Python client: one unary call a message, and one for each acknowledgement."""

from __future__ import annotations

import asyncio
from itertools import cycle, islice
from typing import Any

from danube import DanubeClientBuilder, DispatchStrategy, SubType
from perf.child import Window
from perf.compare.clients.roles import Peer, main

IN_FLIGHT = 64


class Official(Peer):
    """A window of calls; its first producer makes a topic, and no call deletes one."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        taken = options["level"] == "taken"
        self.strategy = DispatchStrategy.NON_RELIABLE if taken else DispatchStrategy.RELIABLE
        self.producer: Any = None
        self.consumer: Any = None

    async def open(self) -> None:
        self.client = await DanubeClientBuilder().service_url(self.options["grpc"]).build()

    async def close(self) -> None:
        for end in (self.consumer, self.producer):
            if end is not None:
                await end.close()

    async def create(self) -> None:
        await self._opened()

    async def _opened(self) -> Any:
        if self.producer is None:
            builder = self.client.new_producer().with_topic(self.topic).with_name("compare")
            self.producer = builder.with_dispatch_strategy(self.strategy).build()
            await self.producer.create()
        return self.producer

    async def publish(self, payloads: list[bytes], count: int) -> None:
        producer, window = await self._opened(), Window(IN_FLIGHT)
        for payload in islice(cycle(payloads), count):
            await window.add(producer.send(payload))
        await window.end()

    async def send(self, payload: bytes) -> None:
        await (await self._opened()).send(payload)

    async def subscribe(self, name: str) -> None:
        builder = self.client.new_consumer().with_topic(self.topic).with_consumer_name(name)
        self.consumer = builder.with_subscription(name).with_subscription_type(SubType.EXCLUSIVE).build()
        await self.consumer.subscribe()
        self.arrived = await self.consumer.receive()

    async def receive(self) -> int:
        messages = [await self.arrived.get()]
        while not self.arrived.empty() and len(messages) < IN_FLIGHT:
            messages.append(self.arrived.get_nowait())
        await asyncio.gather(*map(self.consumer.ack, messages))
        return len(messages)


if __name__ == "__main__":
    main(Official)
