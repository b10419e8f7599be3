"""Tokens over TLS: each allows its holder's part and no more, and one that nobody signed is refused."""

from __future__ import annotations

import os

import grpc
from official import CERTIFICATES, expect, producing, receiving, refused, run

from danube import DanubeClient, DanubeClientBuilder, SubType

DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED


async def connect(url: str, token: str) -> DanubeClient:
    trusting = DanubeClientBuilder().service_url(url).with_tls(os.environ[CERTIFICATES])
    return await trusting.with_token(token).build()


async def roles(url: str, topic: str) -> None:
    """A producer's token publishes, a consumer's receives and acknowledges; each is refused the other's."""
    writes = await connect(url, os.environ["SCENARIO_PRODUCER"])
    reads = await connect(url, os.environ["SCENARIO_CONSUMER"])
    async with producing(writes, topic) as producer, receiving(reads, topic, "consumer") as inbox:
        sent = [b"%d" % number for number in range(20)]
        for payload in sent:
            await producer.send(payload)
        expect(await inbox.payloads(20) == sent, "each once, in order, acknowledged")
        await inbox.silent()
    await refused(reads.new_producer().with_topic(topic).with_name("p").build().create(), DENIED)
    await refused(_consumer(writes, topic).subscribe(), DENIED)
    await refused(writes.new_producer().with_topic(topic + "-x").with_name("p").build().create(), DENIED)


async def wrong_token(url: str, topic: str) -> None:
    """A token that was changed, and none that is a token, are refused with UNAUTHENTICATED."""
    good = os.environ["SCENARIO_PRODUCER"]
    changed = ("A" if good[-10] != "A" else "B").join((good[:-10], good[-9:]))
    for token in (changed, "no token"):
        client = await connect(url, token)
        await refused(client.new_producer().with_topic(topic).with_name("p").build().create(), UNKNOWN)
        await refused(_consumer(client, topic).subscribe(), UNKNOWN)


def _consumer(client: DanubeClient, topic: str):  # type: ignore[no-untyped-def]
    builder = client.new_consumer().with_topic(topic).with_consumer_name("c")
    return builder.with_subscription("s").with_subscription_type(SubType.SHARED).build()


if __name__ == "__main__":
    run("__main__")
