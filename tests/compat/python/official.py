"""What every scenario uses: the official client's objects, what is expected, and the test that listens.

The scripts in this folder run in .venv-official, where ``danube`` is the official client; pytest never
imports them.  A script is started as ``script.py SCENARIO URL TOPIC`` and ends with 0 when the scenario
held.  To make the outside do something it prints a line of JSON and waits for a line to come back.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from danube import (
    Consumer,
    DanubeClient,
    DanubeClientBuilder,
    DispatchStrategy,
    Producer,
    SubType,
)

SCENARIO_TIMEOUT_S = 60.0
RECEIVE_TIMEOUT_S = 10.0
CERTIFICATES = "SCENARIO_CERTIFICATES"  # names the file of the authorities to trust


class Failed(Exception):
    """The scenario did not hold."""


def expect(condition: object, what: str, *facts: object) -> None:
    if not condition:
        raise Failed(f"{what}: {', '.join(map(repr, facts))}")


async def connect(url: str) -> DanubeClient:
    """A client with channels of its own; over TLS, and with a token, where the test set them."""
    builder = DanubeClientBuilder().service_url(url)
    if CERTIFICATES in os.environ:
        builder = builder.with_tls(os.environ[CERTIFICATES]).with_token("a-token-that-nobody-checks")
    return await builder.build()


@asynccontextmanager
async def producing(
    client: DanubeClient,
    topic: str,
    name: str = "producer",
    *,
    reliable: bool = True,
    partitions: int = 0,
    schema: Callable[[Any], Any] | None = None,
) -> AsyncIterator[Producer]:
    """A created producer; ``schema`` adds a schema reference to its builder."""
    strategy = DispatchStrategy.RELIABLE if reliable else DispatchStrategy.NON_RELIABLE
    builder = client.new_producer().with_topic(topic).with_name(name).with_dispatch_strategy(strategy)
    if partitions:
        builder = builder.with_partitions(partitions)
    if schema is not None:
        builder = schema(builder)
    producer = builder.build()
    await producer.create()
    try:
        yield producer
    finally:
        await producer.close()


class Inbox:
    """A consumer that receives, and what came so far that nobody took."""

    def __init__(self, consumer: Consumer, queue: asyncio.Queue[Any]) -> None:
        self.consumer = consumer
        self.queue = queue

    async def take(self, count: int, *, ack: bool = True) -> list[Any]:
        """The next ``count`` messages, acknowledged; fails when they do not come."""
        messages = []
        for _ in range(count):
            try:
                message = await asyncio.wait_for(self.queue.get(), RECEIVE_TIMEOUT_S)
            except TimeoutError:
                payloads = [message.payload[:40] for message in messages]
                raise Failed(f"{len(messages)} of {count} messages came: {payloads}") from None
            messages.append(message)
            if ack:
                await self.consumer.ack(message)
        return messages

    async def payloads(self, count: int) -> list[bytes]:
        return [message.payload for message in await self.take(count)]

    async def silent(self, for_s: float = 0.5) -> None:
        """Fails when anything comes within this time."""
        try:
            message = await asyncio.wait_for(self.queue.get(), for_s)
        except TimeoutError:
            return
        raise Failed(f"nothing was to come, and this did: {message}")


async def open_inbox(
    client: DanubeClient,
    topic: str,
    name: str,
    subscription: str = "subscription",
    kind: SubType = SubType.EXCLUSIVE,
    filters: Sequence[str] = (),
) -> Inbox:
    """Subscribe and start to receive."""
    builder = client.new_consumer().with_topic(topic).with_consumer_name(name)
    builder = builder.with_subscription(subscription).with_subscription_type(kind)
    consumer = builder.with_key_filters(list(filters)).build()
    await consumer.subscribe()
    return Inbox(consumer, await consumer.receive())


@asynccontextmanager
async def receiving(*arguments: Any, **options: Any) -> AsyncIterator[Inbox]:
    """open_inbox(), closed at the end."""
    inbox = await open_inbox(*arguments, **options)
    try:
        yield inbox
    finally:
        await inbox.consumer.close()


async def refused(call: Awaitable[Any], *codes: grpc.StatusCode) -> str:
    """The text of the error with which ``call`` fails; its code must be one of ``codes``."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        expect(error.code() in codes, f"the code is not one of {codes}", error.code(), error.details())
        return error.details() or ""
    raise Failed(f"the call was to be refused and answered {answer!r}")


async def outside(**request: Any) -> dict[str, Any]:
    """Ask the test to do something with the broker; returns when it is done."""
    print(json.dumps(request), flush=True)
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    answer: dict[str, Any] = json.loads(line)
    return answer


def numbers(messages: Sequence[Any]) -> list[int]:
    return [int(message.payload) for message in messages]


def run(module: str) -> None:
    """Run the scenario that the command line names: an ``async def`` of the script with (url, topic)."""
    name, url, topic = sys.argv[1:4]
    scenario = getattr(sys.modules[module], name)
    expect(inspect.iscoroutinefunction(scenario), "not a scenario", name)

    async def bounded() -> None:
        async with asyncio.timeout(SCENARIO_TIMEOUT_S):
            await scenario(url, topic)

    asyncio.run(bounded())
