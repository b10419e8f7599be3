"""Tokens and certificates over TLS: each allows its holder's part and no more, and a false one is refused."""

from __future__ import annotations

import os

import grpc
from official import CERTIFICATES, expect, producing, receiving, refused, run

from danube import DanubeClient, DanubeClientBuilder, Producer, SubType

DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED


async def connect(url: str, token: str) -> DanubeClient:
    trusting = DanubeClientBuilder().service_url(url).with_tls(os.environ[CERTIFICATES])
    return await trusting.with_token(token).build()


def certified(url: str, holder: str) -> DanubeClientBuilder:
    """A client that shows the certificate of a service account."""
    place = os.path.join(os.environ["SCENARIO_HOLDERS"], holder)
    builder = DanubeClientBuilder().service_url(url)
    return builder.with_mtls(os.environ[CERTIFICATES], f"{place}.pem", f"{place}.key")


async def roles(url: str, topic: str) -> None:
    """A producer's token publishes, a consumer's receives and acknowledges; each is refused the other's."""
    writes = await connect(url, os.environ["SCENARIO_PRODUCER"])
    reads = await connect(url, os.environ["SCENARIO_CONSUMER"])
    await each_its_part(writes, reads, topic)


async def certificates(url: str, topic: str) -> None:
    """A certificate does what its holder's token does; beside a token of another it is refused."""
    writes = await certified(url, "story-writes").build()
    await each_its_part(writes, await certified(url, "story-reads").build(), topic)
    both = certified(url, "story-writes").with_token(os.environ["SCENARIO_CONSUMER"])
    await refused(_producer(await both.build(), topic).create(), UNKNOWN)
    own = certified(url, "story-writes").with_token(os.environ["SCENARIO_PRODUCER"])
    async with producing(await own.build(), topic) as producer:
        await producer.send(b"by both")


async def each_its_part(writes: DanubeClient, reads: DanubeClient, topic: str) -> None:
    async with producing(writes, topic) as producer, receiving(reads, topic, "consumer") as inbox:
        sent = [b"%d" % number for number in range(20)]
        for payload in sent:
            await producer.send(payload)
        expect(await inbox.payloads(20) == sent, "each once, in order, acknowledged")
        await inbox.silent()
    await refused(_producer(reads, topic).create(), DENIED)
    await refused(_consumer(writes, topic).subscribe(), DENIED)
    await refused(_producer(writes, topic + "-x").create(), DENIED)


async def wrong_token(url: str, topic: str) -> None:
    """A token that was changed, and none that is a token, are refused with UNAUTHENTICATED."""
    good = os.environ["SCENARIO_PRODUCER"]
    changed = ("A" if good[-10] != "A" else "B").join((good[:-10], good[-9:]))
    for token in (changed, "no token"):
        client = await connect(url, token)
        await refused(_producer(client, topic).create(), UNKNOWN)
        await refused(_consumer(client, topic).subscribe(), UNKNOWN)


def _producer(client: DanubeClient, topic: str) -> Producer:
    return client.new_producer().with_topic(topic).with_name("p").build()


def _consumer(client: DanubeClient, topic: str):  # type: ignore[no-untyped-def]
    builder = client.new_consumer().with_topic(topic).with_consumer_name("c")
    return builder.with_subscription("s").with_subscription_type(SubType.SHARED).build()


if __name__ == "__main__":
    run("__main__")
