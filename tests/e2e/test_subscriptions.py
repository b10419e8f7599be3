"""Subscriptions through a real broker: modes, redelivery, dead letters, seek, retention."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

import danube
from danube.errors import SubscriptionBusy

FAST = {"base_redelivery_delay_ms": 10, "max_redelivery_delay_ms": 50, "ack_timeout_ms": 300}


async def collect(consumer: Any, into: list[Any], count: int, ack: bool = True) -> None:
    async for message in consumer:
        into.append(message)
        if ack:
            await message.ack()
        if len(into) == count:
            return


async def publish(client: Any, topic: str, count: int, **options: Any) -> None:
    async with client.producer(topic, **options) as producer:
        await producer.send_many([b"%d" % index for index in range(count)])


def test_shared_is_an_exact_round_robin(shared_broker: Any, topic: str) -> None:
    process = shared_broker()

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer(topic) as producer:
                await producer.send(b"first")
                async with (
                    client.consumer(topic, subscription="s", mode="shared") as one,
                    client.consumer(topic, subscription="s", mode="shared") as two,
                    client.consumer(topic, subscription="s", mode="shared") as three,
                ):
                    await producer.send_many([b"%d" % index for index in range(36)])
                    taken: list[list[Any]] = [[], [], []]
                    async with asyncio.timeout(10):
                        await asyncio.gather(
                            *(
                                collect(consumer, into, 12)
                                for consumer, into in zip((one, two, three), taken, strict=True)
                            )
                        )
            numbers = [[int(message.payload) for message in messages] for messages in taken]
            assert sorted(number for row in numbers for number in row) == list(range(36))
            assert all([second - first for first, second in pairwise(row)] == [3] * 11 for row in numbers)

    asyncio.run(scenario())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failover_standby_takes_over_in_order(shared_broker: Any, topic: str, workers: int) -> None:
    process = shared_broker(workers=workers)

    async def scenario() -> None:
        async with danube.connect(process.address) as first, danube.connect(process.address) as second:
            await publish(first, topic, 10)
            active = first.consumer(topic, subscription="s", mode="failover", start="earliest", name="a")
            standby = second.consumer(topic, subscription="s", mode="failover", start="earliest", name="b")
            taken: list[Any] = []
            async with standby as waiting:
                async with active:
                    pass
                rest: list[Any] = []
                async with asyncio.timeout(10):
                    await collect(waiting, rest, 10)
            assert [message.offset for message in taken + rest] == list(range(10))

    asyncio.run(scenario())


def test_a_failover_standby_continues_after_what_was_acked(shared_broker: Any, topic: str) -> None:
    process = shared_broker()

    async def scenario() -> None:
        async with danube.connect(process.address) as first, danube.connect(process.address) as second:
            await publish(first, topic, 10)
            taken: list[Any] = []
            rest: list[Any] = []
            async with (
                first.consumer(
                    topic, subscription="s", mode="failover", start="earliest", name="a"
                ) as active,
                second.consumer(
                    topic, subscription="s", mode="failover", start="earliest", name="b"
                ) as standby,
            ):
                async with asyncio.timeout(10):
                    await collect(active, taken, 4)
                    await active.close()
                    await collect(standby, rest, 6)
            assert [message.offset for message in taken] == [0, 1, 2, 3]
            assert [message.offset for message in rest] == [4, 5, 6, 7, 8, 9]

    asyncio.run(scenario())


def test_exclusive_refuses_a_second_consumer(shared_broker: Any, topic: str) -> None:
    process = shared_broker()

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await publish(client, topic, 1)
            async with client.consumer(topic, subscription="s", mode="exclusive", name="a"):
                with pytest.raises(SubscriptionBusy):
                    async with client.consumer(topic, subscription="s", mode="exclusive", name="b"):
                        pass

    asyncio.run(scenario())


@pytest.mark.parametrize("workers", [1, 2])
def test_key_shared_keeps_a_key_at_one_consumer(shared_broker: Any, topic: str, workers: int) -> None:
    process = shared_broker(workers=workers)

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer(topic) as producer:
                await producer.send(b"-", key="none")
                async with (
                    client.consumer(topic, subscription="s", mode="key_shared", name="a") as one,
                    client.consumer(topic, subscription="s", mode="key_shared", name="b") as two,
                ):
                    keys = [f"k{index % 20}" for index in range(400)]
                    await producer.send_many([b"%d" % index for index in range(400)], keys=keys)
                    taken: list[list[Any]] = [[], []]
                    tasks = [
                        asyncio.create_task(collect(consumer, into, 400))
                        for consumer, into in zip((one, two), taken, strict=True)
                    ]
                    async with asyncio.timeout(10):
                        while sum(map(len, taken)) < 400:
                            await asyncio.sleep(0.01)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            owners: dict[Any, set[int]] = {}
            for index, messages in enumerate(taken):
                for message in messages:
                    owners.setdefault(message.key, set()).add(index)
            assert all(len(consumers) == 1 for consumers in owners.values())
            assert all(taken)

    asyncio.run(scenario())


def test_a_vanished_consumer_gives_its_records_back(shared_broker: Any, topic: str) -> None:
    process = shared_broker()

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await publish(client, topic, 10)
            held: list[Any] = []
            async with (
                danube.connect(process.address) as other,
                other.consumer(topic, subscription="s", start="earliest", name="a") as consumer,
            ):
                async with asyncio.timeout(10):
                    await collect(consumer, held, 10, ack=False)
            again: list[Any] = []
            async with client.consumer(topic, subscription="s", name="b") as consumer:
                async with asyncio.timeout(10):
                    await collect(consumer, again, 10)
            assert [message.offset for message in again] == list(range(10))
            assert {message.redelivery_count for message in again} == {1}

    asyncio.run(scenario())


def test_a_nacked_record_comes_again_and_ends_as_a_dead_letter(shared_broker: Any, topic: str) -> None:
    process = shared_broker(workers=2)
    failure = {
        **FAST,
        "max_redelivery_count": 2,
        "poison": "dead_letter",
        "dead_letter_topic": "/default/dead",
    }

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer(topic, name="p") as producer:
                await producer.send(b"poison", key="k", attributes={"a": "b"})
                await producer.send(b"good")
            counts: Counter[bytes] = Counter()
            async with client.consumer(
                topic, subscription="s", start="earliest", failure=failure
            ) as consumer:
                async with asyncio.timeout(15):
                    async for message in consumer:
                        counts[message.payload] += 1
                        if message.payload == b"good":
                            await message.ack()
                        else:
                            await message.nack(reason="cannot read it")
                        if counts[b"poison"] == 3 and counts[b"good"] == 1:
                            break
                    async with asyncio.timeout(10):
                        while "/default/dead" not in str(await client.admin.list_topics()):
                            await asyncio.sleep(0.02)
                    dead: list[Any] = []
                    async with client.consumer(
                        "/default/dead", subscription="d", start="earliest"
                    ) as letters:
                        await collect(letters, dead, 1)
                    while True:
                        entry = await client.admin.describe_subscription(topic, "s")
                        if "'lag': 0" in str(entry) or "lag=0" in str(entry):
                            break
                        await asyncio.sleep(0.02)
            assert counts[b"poison"] == 3
            attributes = dead[0].attributes
            assert dead[0].payload == b"poison" and attributes["a"] == "b"
            assert attributes["x-original-topic"] == topic
            assert attributes["x-original-topic-offset"] == "0"
            assert attributes["x-failure-reason"] == "cannot read it"

    asyncio.run(scenario())


def test_a_blocked_subscription_can_be_unblocked(shared_broker: Any, topic: str) -> None:
    process = shared_broker()

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await publish(client, topic, 3)
            failure = {**FAST, "max_redelivery_count": 0, "poison": "block"}
            async with client.consumer(
                topic, subscription="s", mode="exclusive", start="earliest", failure=failure
            ) as consumer:
                taken: list[Any] = []
                async with asyncio.timeout(10):
                    async for message in consumer:
                        if message.offset == 0 and not taken:
                            await message.nack()
                            break
                    await asyncio.sleep(0.3)
                    entry = await client.admin.describe_subscription(topic, "s")
                    assert "blocked" in str(entry)
                    await client.admin.unblock(topic, "s")
                    async for message in consumer:
                        await message.ack()
                        taken.append(message.offset)
                        if 0 in taken and len(set(taken)) == 3:
                            break

    asyncio.run(scenario())


def test_an_ack_that_does_not_come_in_time_means_redelivery(shared_broker: Any, topic: str) -> None:
    process = shared_broker()

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await publish(client, topic, 1)
            async with client.consumer(topic, subscription="s", start="earliest", failure=FAST) as consumer:
                taken: list[Any] = []
                async with asyncio.timeout(10):
                    await collect(consumer, taken, 2, ack=False)
            assert [message.offset for message in taken] == [0, 0]
            assert [message.redelivery_count for message in taken] == [0, 1]

    asyncio.run(scenario())


def test_seek_and_start_positions(shared_broker: Any, topic: str) -> None:
    process = shared_broker()

    async def first_offset(client: Any, subscription: str, **options: Any) -> int:
        async with client.consumer(topic, subscription=subscription, **options) as consumer:
            async with asyncio.timeout(10):
                async for message in consumer:
                    await message.ack()
                    return int(message.offset)
        return -1

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await publish(client, topic, 50)
            await asyncio.sleep(0.05)
            middle = danube_now()
            await asyncio.sleep(0.05)
            await publish(client, topic, 50)
            assert await first_offset(client, "e", start="earliest") == 0
            assert await first_offset(client, "o", start=17) == 17
            assert await first_offset(client, "t", start=("time", middle)) == 50
            await client.admin.seek(topic, "o", 42)
            assert await first_offset(client, "o") == 42
            await client.admin.seek(topic, "o", "earliest")
            assert await first_offset(client, "o") == 0

    def danube_now() -> int:
        import time

        return time.time_ns() // 1000

    asyncio.run(scenario())


def test_a_deleted_topic_is_gone_and_its_name_starts_again(broker: Any) -> None:
    process = broker(workers=2)

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await publish(client, "/default/t", 10, partitions=2)
            await client.admin.delete_topic("/default/t")
            assert "/default/t" not in str(await client.admin.list_topics())
            await publish(client, "/default/t", 3)
            async with client.consumer("/default/t", subscription="s", start="earliest") as consumer:
                taken: list[Any] = []
                async with asyncio.timeout(10):
                    await collect(consumer, taken, 3)
            assert [message.offset for message in taken] == [0, 1, 2]

    asyncio.run(scenario())
    async_directories = list((process.data_dir / "partitions").iterdir())
    assert len(async_directories) == 1


def test_a_slow_consumer_of_a_non_reliable_topic_loses_the_oldest_counted(
    shared_broker: Any, topic: str
) -> None:
    process = shared_broker()

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer(topic, reliable=False) as producer:
                await producer.send(b"make it")
                async with client.consumer(topic, subscription="s", prefetch_records=100) as consumer:
                    for _ in range(60):
                        await producer.send_many([bytes(1000)] * 1000)
                    entry = str(await client.admin.describe_subscription(topic, "s"))
                    assert "dropped" in entry
                    async with asyncio.timeout(10):
                        async for message in consumer:
                            assert len(message.payload) == 1000
                            break

    asyncio.run(scenario())


def test_a_late_consumer_gets_its_share_of_slow_tasks(shared_broker: Any, topic: str) -> None:
    """Two native consumers with the default prefetch, the second a second late: each task is done once."""
    count, tasks_s = 120, 0.05

    async def work(client: Any, done: list[int], others: list[int], opened: list[int]) -> None:
        async with client.consumer(topic, "s", "shared", start="earliest") as consumer:
            opened.append(count - len(others))
            while len(done) + len(others) < count:
                message = await consumer.receive(timeout=60)
                await asyncio.sleep(tasks_s)
                done.append(int(message.payload))
                await message.ack()

    async def scenario() -> None:
        async with danube.connect(process.address) as one, danube.connect(process.address) as two:
            await publish(one, topic, count)
            first: list[int] = []
            second: list[int] = []
            left: list[int] = []
            working = asyncio.ensure_future(work(one, first, second, []))
            await asyncio.sleep(1)
            late = asyncio.ensure_future(work(two, second, first, left))
            await asyncio.wait({working, late}, return_when=asyncio.FIRST_COMPLETED, timeout=120)
            for task in (working, late):
                task.cancel()
            await asyncio.gather(working, late, return_exceptions=True)
            assert sorted(first + second) == list(range(count)), "each task is done once"
            assert len(second) >= 0.35 * left[0], (len(first), len(second), left[0])

    process = shared_broker()
    asyncio.run(scenario())
