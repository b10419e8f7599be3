"""redis-py with hiredis: streams with pipelines of XADD and a reader group; PUBLISH without storage.

The blocking client: with pipelines it is twice as fast as the one for asyncio, and nothing else is done here.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from perf.compare.clients.roles import Peer, main

PIPELINE = 500
PIPELINE_BYTES = 4 << 20
BLOCK_MS = 500


class Streams(Peer):
    """A pipeline at a time, the first makes the stream; entries read by a group and acked together."""

    command: tuple[str, ...] = ("XADD", "{topic}", "*", "p")

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.batch = self.fitting(PIPELINE, PIPELINE_BYTES)
        self.words = tuple(word.format(topic=self.topic) for word in self.command)

    async def open(self) -> None:
        self.client = Redis(host="127.0.0.1", port=self.options["port"])
        self.opened.callback(self.client.close)
        self.client.ping()

    async def publish(self, payloads: list[bytes], count: int) -> None:
        chosen, sent = cycle(payloads), 0
        while sent < count:
            pipeline = self.client.pipeline(transaction=False)
            for payload in islice(chosen, min(self.batch, count - sent)):
                pipeline.execute_command(*self.words, payload)
            sent += len(pipeline.execute())

    async def send(self, payload: bytes) -> None:
        self.client.execute_command(*self.words, payload)

    async def subscribe(self, name: str) -> None:
        self.group = name
        try:
            self.client.xgroup_create(self.topic, name, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def receive(self) -> int:
        found = self.client.execute_command(
            *("XREADGROUP", "GROUP", self.group, "reader", "COUNT", self.batch),
            *("BLOCK", BLOCK_MS, "STREAMS", self.topic, ">"),
        )
        if not found:
            return 0
        answers = found.values() if isinstance(found, dict) else [stream[1] for stream in found]
        entries = next(iter(answers))  # one stream was asked for; some versions nest its entries once more
        while isinstance(entries[0][0], list | tuple):
            entries = entries[0]
        self.client.execute_command("XACK", self.topic, self.group, *(entry[0] for entry in entries))
        return len(entries)


class PubSub(Streams):
    """PUBLISH answers when the server has handed the message to whoever listens."""

    command = ("PUBLISH", "{topic}")

    async def subscribe(self, name: str) -> None:
        self.channel = self.client.pubsub(ignore_subscribe_messages=True)
        self.opened.callback(self.channel.close)
        self.channel.subscribe(self.topic)
        while self.channel.get_message(timeout=1) is not None:
            pass

    async def receive(self) -> int:
        count = int(self.channel.get_message(timeout=BLOCK_MS / 1_000) is not None)
        while 0 < count < PIPELINE and self.channel.get_message() is not None:
            count += 1
        return count


if __name__ == "__main__":
    main(lambda options: PubSub(options) if options["level"] == "taken" else Streams(options))
