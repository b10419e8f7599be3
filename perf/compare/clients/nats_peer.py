"""nats-py: JetStream with asynchronous publishes and a durable pull consumer; core NATS without storage."""

from __future__ import annotations

import asyncio
from itertools import cycle, islice
from time import monotonic
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RetentionPolicy, StorageType, StreamConfig

from perf.child import payloads_of
from perf.compare.clients.roles import Peer, main

IN_FLIGHT = 4_000
AHEAD_BYTES_MAX = 16 << 20  # ahead of an ack: the server cuts off a reader that is 64 MiB behind
FILL_WINDOW = 20_000
FILL_TIMEOUT_S = 60.0
BYTES_MAX = 64 << 20  # in flight


class JetStream(Peer):
    """Acknowledged publishes with a window; batches fetched, the last of each acknowledged for all."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.window = self.fitting(IN_FLIGHT, BYTES_MAX)
        self.ahead = self.fitting(2 * IN_FLIGHT, AHEAD_BYTES_MAX)

    async def open(self) -> None:
        self.client = await nats.connect(self.options["url"], pending_size=BYTES_MAX)
        self.opened.push_async_callback(self.client.close)
        self.stream = self.client.jetstream(publish_async_max_pending=self.window)

    async def create(self) -> None:
        storage = StorageType.MEMORY if self.options["level"] == "in memory" else StorageType.FILE
        limits = RetentionPolicy.LIMITS
        await self.stream.add_stream(
            StreamConfig(
                name=self.topic, subjects=[self.topic], storage=storage, retention=limits, allow_atomic=True
            )
        )

    async def delete(self) -> None:
        await self.stream.delete_stream(self.topic)

    async def publish(self, payloads: list[bytes], count: int) -> None:
        failed: list[BaseException] = []

        def note(future: Any) -> None:
            if future.exception() is not None:
                failed.append(future.exception())

        for payload in islice(cycle(payloads), count):
            (await self.stream.publish_async(self.topic, payload)).add_done_callback(note)
        await self.stream.publish_async_completed()
        if failed:
            raise failed[0]

    async def send(self, payload: bytes) -> None:
        await self.stream.publish(self.topic, payload)

    async def fill(self, count: int) -> None:
        """Publishes without acknowledgement, never more than a window ahead of what is stored."""
        stored = before = (await self.stream.stream_info(self.topic)).state.messages
        chosen = cycle(payloads_of(self.options["size"], 1_000))
        while stored < before + count:
            step = min(FILL_WINDOW, self.window * 4, before + count - stored)
            for payload in islice(chosen, step):
                await self.client.publish(self.topic, payload)
            await self.client.flush()
            stored = await self._stored(stored + step)

    async def _stored(self, wanted: int) -> int:
        """Wait until the stream holds ``wanted`` messages."""
        deadline = monotonic() + FILL_TIMEOUT_S
        while (found := (await self.stream.stream_info(self.topic)).state.messages) < wanted:
            if monotonic() > deadline:
                raise SystemExit(f"the stream holds {found} messages instead of {wanted}")
            await asyncio.sleep(0.001)
        return int(found)

    async def subscribe(self, name: str) -> None:
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.ALL, max_ack_pending=self.ahead
        )
        self.reader = await self.stream.subscribe(
            self.topic, durable=name, stream=self.topic, config=config, manual_ack=True,
            pending_msgs_limit=-1, pending_bytes_limit=-1,
        )  # fmt: skip

    async def receive(self) -> int:
        """What has arrived, at most half of what the server sends ahead of an acknowledgement."""
        message = await self.reader.next_msg(timeout=None)
        count = 1
        while self.reader.pending_msgs and count < self.ahead // 2:
            message = await self.reader.next_msg(timeout=None)
            count += 1
        await message.ack()
        return count


class Core(JetStream):
    """Publishes that the server has taken when a flush after them returns; nothing is stored."""

    async def create(self) -> None:
        pass

    async def delete(self) -> None:
        pass

    async def publish(self, payloads: list[bytes], count: int) -> None:
        for number, payload in enumerate(islice(cycle(payloads), count)):
            await self.client.publish(self.topic, payload)
            if number % self.window == 0:
                await self.client.flush()
        await self.client.flush()

    async def send(self, payload: bytes) -> None:
        await self.client.publish(self.topic, payload)
        await self.client.flush()

    async def subscribe(self, name: str) -> None:
        self.reader = await self.client.subscribe(
            self.topic, pending_msgs_limit=1_000_000, pending_bytes_limit=4 * BYTES_MAX
        )
        await self.client.flush()

    async def receive(self) -> int:
        count = 0
        while not count or self.reader.pending_msgs:
            await self.reader.next_msg(timeout=None)
            count += 1
        return count


if __name__ == "__main__":
    main(lambda options: Core(options) if options["level"] == "taken" else JetStream(options))
