"""Consumers that misbehave, vanish or crawl, and logs that shrink or rot under them."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind, Subscribe
from tests.broker_process import BrokerProcess
from tests.e2e.test_native_door import RawPeer

FAST = {"base_redelivery_delay_ms": 10, "max_redelivery_delay_ms": 50, "ack_timeout_ms": 2_000}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for the tests that harm nothing but a topic of their own.

    Retention is looked at every ten seconds: what is to expire for the last of them is published first.
    """
    place = tmp_path_factory.mktemp("shared") / "data"
    with BrokerProcess(place, workers=2, environment={"DANUBE_WAL__SEGMENT_SIZE": "16MiB"}) as process:
        asyncio.run(publish_more_than_is_kept(process))
        yield process


async def publish_more_than_is_kept(process: BrokerProcess) -> None:
    """80 MB on a topic that keeps 20 MiB, with a subscription that has had none of it."""
    async with danube.connect(process.address) as client:
        await client.admin.create_topic("/default/b17", retention_bytes=20 * 1024 * 1024)
        async with client.producer("/default/b17") as producer:
            await producer.send(b"first")
            async with client.consumer("/default/b17", subscription="slow", start="earliest"):
                pass
            for _ in range(80):
                await producer.send_many([bytes(1000)] * 1000)


async def publish(client: Any, topic: str, payloads: list[bytes], keys: list[str] | None = None) -> None:
    async with client.producer(topic) as producer:
        await producer.send_many(payloads, keys=keys)


async def take(client: Any, topic: str, count: int, subscription: str, **options: Any) -> list[Any]:
    taken: list[Any] = []
    async with client.consumer(topic, subscription=subscription, start="earliest", **options) as consumer:
        async with asyncio.timeout(30):
            async for message in consumer:
                await message.ack()
                taken.append(message)
                if len(taken) == count:
                    break
    return taken


@pytest.mark.parametrize("mode", ["exclusive", "shared", "failover", "key_shared"])
def test_consumers_that_vanish_lose_nothing(shared: BrokerProcess, mode: str, source: random.Random) -> None:
    process, topic = shared, f"/default/h3-{mode}"
    count = 2_000
    keys = [f"k{index % 16}" for index in range(count)]
    acked: Counter[int] = Counter()
    holders: dict[Any, str] = {}
    conflicts: list[Any] = []

    async def one_life(number: int) -> None:
        """Connect, take some, ack most of it, vanish without a word."""
        async with danube.connect(process.address, reconnect_timeout=10) as client:
            try:
                async with client.consumer(
                    topic, "s", mode, start="earliest", name=f"c{number}", failure=FAST
                ) as consumer:
                    limit = source.randrange(20, 200)
                    async with asyncio.timeout(1.5):
                        async for message in consumer:
                            if mode == "key_shared":
                                holder = holders.setdefault(message.key, f"c{number}")
                                if holder != f"c{number}":
                                    conflicts.append((message.key, holder, number))
                                await asyncio.sleep(0)  # let the others run while this one holds the key
                                holders.pop(message.key, None)
                            acked[message.offset] += 1
                            await message.ack()
                            limit -= 1
                            if not limit:
                                break
            except (TimeoutError, danube.DanubeError):
                pass

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await publish(client, topic, [b"%d" % index for index in range(count)], keys)
        async with asyncio.timeout(60):
            number = 0
            while len(acked) < count:
                await asyncio.gather(*(one_life(number + lane) for lane in range(3)))
                number += 3

    asyncio.run(scenario())
    assert sorted(acked) == list(range(count))
    assert not conflicts


def test_acks_that_are_late_double_unknown_or_of_another_change_nothing(broker: Any) -> None:
    process = broker()

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await publish(client, "/default/h1", [b"%d" % index for index in range(10)])
            first = client.consumer("/default/h1", subscription="s", start="earliest", name="a")
            async with first as one:
                held = []
                async with asyncio.timeout(10):
                    async for message in one:
                        held.append(message)
                        if len(held) == 10:
                            break
                with RawPeer(process.port) as stranger:
                    stranger.shake()
                    body = Subscribe("/default/h1", "s", "stranger", credit_records=10, credit_bytes=10_000)
                    stranger.send(wire.control_frame(Kind.SUBSCRIBE, body, 1, 1))
                    assert stranger.frame()[0] == Kind.SUBSCRIBED  # type: ignore[index]
                    ranges = b"".join(
                        low.to_bytes(8, "little") + high.to_bytes(8, "little")
                        for low, high in ((0, 10), (5, 2**63), (2**64 - 1, 3), (1000, 2000))
                    )
                    stranger.send(wire.ack_frame(1, ranges, 2, wire.FrameFlag.SYNC))
                    assert stranger.frame()[:2] == (Kind.RESULT, 2)  # type: ignore[index]
                [entry] = await client.admin.list_subscriptions("/default/h1")
                assert "'ack_floor': 0" in str(entry) or "ack_floor=0" in str(entry)
                for message in held + held:
                    await message.ack()
                await one.flush()
                [entry] = await client.admin.list_subscriptions("/default/h1")
                assert "'ack_floor': 10" in str(entry) or "ack_floor=10" in str(entry)

    asyncio.run(scenario())


def test_a_consumer_that_crawls_holds_up_nobody_and_stays_within_bounds(broker: Any) -> None:
    process = broker()

    def resident_mib() -> float:
        text = Path(f"/proc/{process.worker_pids[0]}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) / 1024

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer("/default/h2") as producer:
                await producer.send_many([bytes(1000)] * 1000)
                with RawPeer(process.port) as crawler:
                    crawler.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    crawler.shake()
                    body = Subscribe(
                        "/default/h2", "slow", "crawler", start="earliest",
                        credit_records=10**9, credit_bytes=2**40,
                    )  # fmt: skip
                    crawler.send(wire.control_frame(Kind.SUBSCRIBE, body, 1, 1))
                    crawler.socket.recv(1)
                    before = resident_mib()
                    for _ in range(200):
                        await producer.send_many([bytes(1000)] * 1000)
                    started = time.monotonic()
                    taken = await take(client, "/default/h2", 50_000, "fast")
                    assert len(taken) == 50_000
                    assert time.monotonic() - started < 15
                    assert resident_mib() - before < 160

    asyncio.run(scenario())


def test_a_dispatch_rate_delays_and_delivers_every_record(shared: BrokerProcess) -> None:
    process = shared

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await client.admin.create_topic("/default/h5", max_dispatch_rate=200)
            await publish(client, "/default/h5", [b"%d" % index for index in range(500)])
            started = time.monotonic()
            taken = await take(client, "/default/h5", 500, "s")
            assert [int(message.payload) for message in taken] == list(range(500))
            assert time.monotonic() - started > 1.0
            await client.admin.update_topic("/default/h5", max_dispatch_rate=0)
            started = time.monotonic()
            assert len(await take(client, "/default/h5", 500, "again")) == 500

    asyncio.run(scenario())


def test_bits_that_flip_in_a_live_log_are_never_served(broker: Any, source: random.Random) -> None:
    process = broker(environment={"DANUBE_WAL__SEGMENT_SIZE": "16MiB"})
    count = 40_000

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            payloads = [b"%08d" % index * 125 for index in range(count)]
            async with client.producer("/default/b13") as producer:
                for start in range(0, count, 100):
                    await producer.send_many(payloads[start : start + 100])
                for segment in sorted((process.data_dir / "partitions").glob("*/*.seg"))[:-1]:
                    with segment.open("r+b") as file:
                        position = source.randrange(4096, 15 * 1024 * 1024)
                        file.seek(position)
                        byte = file.read(1)
                        file.seek(position)
                        file.write(bytes([byte[0] ^ (1 << source.randrange(8))]))
                await producer.send(b"last")
            wrong, seen = 0, 0
            async with client.consumer("/default/b13", subscription="s", start="earliest") as consumer:
                async with asyncio.timeout(30):
                    async for batch in consumer.batches():
                        for offset, payload in zip(batch.offsets.tolist(), batch.payloads, strict=True):
                            seen += 1
                            wrong += offset < count and payload != payloads[offset]
                        await batch.ack()
                        if batch.payloads[-1] == b"last":
                            break
            assert wrong == 0
            assert count - 1_000 < seen < count + 1
            entry = str(await client.admin.describe_topic("/default/b13"))
            assert "damaged" in entry

    asyncio.run(scenario())
    assert process.running


def test_retention_moves_a_slow_subscription_on_and_counts_what_expired(shared: BrokerProcess) -> None:
    process = shared

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with asyncio.timeout(40):
                while True:
                    entry = str(await client.admin.describe_subscription("/default/b17", "slow"))
                    if "'expired': 0" not in entry and "expired=0" not in entry:
                        break
                    await asyncio.sleep(0.2)
            async with client.consumer("/default/b17", subscription="slow") as consumer:
                async with asyncio.timeout(10):
                    async for message in consumer:
                        assert message.offset > 0
                        break
            with pytest.raises(danube.DanubeError, match="holds"):
                async with client.consumer("/default/b17", subscription="exact", start=0):
                    pass

    asyncio.run(scenario())
