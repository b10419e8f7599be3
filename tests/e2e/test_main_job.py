"""The main job through a real broker: publish, consume, acknowledge, restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import danube
from danube.errors import PolicyMismatch, TopicNotFound
from tests.broker_process import BrokerProcess

Shared = Callable[[int], BrokerProcess]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A broker with so many workers, one for all tests that kill nothing: each has topics of its own."""
    made: dict[int, BrokerProcess] = {}

    def get(workers: int) -> BrokerProcess:
        if workers not in made:
            directory = tmp_path_factory.mktemp(f"workers-{workers}")
            made[workers] = BrokerProcess(directory / "data", workers=workers).start()
        return made[workers]

    yield get
    for process in made.values():
        process.kill()


async def take(consumer: Any, count: int, timeout_s: float = 20) -> list[Any]:
    """The next ``count`` messages, each acked."""
    taken = []
    async with asyncio.timeout(timeout_s):
        async for message in consumer:
            await message.ack()
            taken.append(message)
            if len(taken) == count:
                break
    return taken


@pytest.mark.parametrize("workers", [1, 2])
def test_every_field_of_a_record_arrives(shared: Shared, workers: int) -> None:
    process = shared(workers)

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer("/default/orders", name="p1", reliable=True) as producer:
                ack = await producer.send(b"payload", key="k", attributes={"a": "b", "ä": "ü"})
                assert (ack.offset, ack.partition, ack.durability) == (0, 0, "written")
                second = await producer.send(b"", key=None)
                assert second.offset == 1
            async with client.consumer(
                "/default/orders", subscription="s", mode="shared", start="earliest"
            ) as consumer:
                first, empty = await take(consumer, 2)
                assert first.payload == b"payload"
                assert first.key in ("k", b"k")
                assert first.attributes == {"a": "b", "ä": "ü"}
                assert (first.offset, first.partition, first.producer_name) == (0, 0, "p1")
                assert first.redelivery_count == 0
                assert empty.payload == b"" and not empty.attributes

    asyncio.run(scenario())


@pytest.mark.parametrize("workers", [1, 2])
def test_partitions_keep_the_order_of_a_key_and_cover_all_workers(shared: Shared, workers: int) -> None:
    process = shared(workers)

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await client.admin.create_topic("/default/keyed", partitions=4)
            keys = [f"key-{index % 16}" for index in range(400)]
            payloads = [f"{index}".encode() for index in range(400)]
            async with client.producer("/default/keyed", partitions=4) as producer:
                acks = await producer.send_many(payloads, keys=keys)
                assert sum(ack.record_count for ack in acks) == 400
                assert len({ack.partition for ack in acks}) == 4
            async with client.consumer("/default/keyed", subscription="s", start="earliest") as consumer:
                messages = await take(consumer, 400)
            by_key: dict[Any, list[int]] = {}
            for message in messages:
                by_key.setdefault(message.key, []).append(int(message.payload))
            assert len(by_key) == 16
            assert all(numbers == sorted(numbers) for numbers in by_key.values())

    asyncio.run(scenario())


@pytest.mark.parametrize("workers", [1, 2])
def test_acknowledged_records_and_cursors_survive_a_killed_broker(broker: Any, workers: int) -> None:
    process = broker(workers=workers)

    async def before() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer("/default/kept", name="p") as producer:
                await producer.send_many([f"{index}".encode() for index in range(1000)])
            async with client.consumer("/default/kept", subscription="s", start="earliest") as consumer:
                await take(consumer, 300)

    async def after() -> None:
        async with danube.connect(process.address) as client:
            async with client.consumer("/default/kept", subscription="s") as consumer:
                rest = await take(consumer, 700)
            assert [message.offset for message in rest] == list(range(300, 1000))
            assert [int(message.payload) for message in rest] == list(range(300, 1000))
            async with client.producer("/default/kept", name="p") as producer:
                assert (await producer.send(b"next")).offset == 1000

    asyncio.run(before())
    process.kill()
    process.start()
    asyncio.run(after())


def test_a_killed_worker_is_replaced_and_clients_go_on(broker: Any) -> None:
    import os
    import signal

    process = broker(workers=2)

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer("/default/going-on", name="p", partitions=4) as producer:
                acks: list[Any] = []
                for turn in range(20):
                    acks += await producer.send_many([f"{turn}-{index}".encode() for index in range(100)])
                    if turn in (5, 12):
                        os.kill(process.worker_pids[turn % 2], signal.SIGKILL)
            assert sum(ack.record_count for ack in acks) == 2000
            async with client.consumer("/default/going-on", subscription="s", start="earliest") as consumer:
                messages = await take(consumer, 2000)
            assert len({message.payload for message in messages}) == 2000

    asyncio.run(scenario())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_non_reliable_topic_delivers_to_who_is_there(shared: Shared, workers: int) -> None:
    process = shared(workers)

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer("/default/events", reliable=False) as producer:
                ack = await producer.send(b"nobody is here")
                assert ack.durability == "memory"
                async with (
                    client.consumer("/default/events", subscription="a") as first,
                    client.consumer("/default/events", subscription="b") as second,
                ):
                    await producer.send_many([f"{index}".encode() for index in range(500)])
                    for consumer in (first, second):
                        messages = await take(consumer, 500)
                        assert [int(message.payload) for message in messages] == list(range(500))

    asyncio.run(scenario())


def test_a_mode_mismatch_and_an_unknown_topic_are_said_clearly(shared: Shared) -> None:
    process = shared(1)

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer("/default/reliable") as producer:
                await producer.send(b"x")
            with pytest.raises(PolicyMismatch, match="reliable"):
                async with client.producer("/default/reliable", reliable=False):
                    pass
            with pytest.raises(TopicNotFound, match="reliabel"):
                async with client.consumer("/default/reliabel", subscription="s"):
                    pass

    asyncio.run(scenario())


def test_batches_come_with_arrow_columns(shared: Shared) -> None:
    process = shared(1)

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer("/default/arrow") as producer:
                await producer.send_many([b"%d" % index for index in range(1000)], keys=["k"] * 1000)
            async with client.consumer("/default/arrow", subscription="s", start="earliest") as consumer:
                seen = 0
                async with asyncio.timeout(20):
                    async for batch in consumer.batches(max_records=1000, max_wait=1):
                        table = batch.to_arrow()
                        assert table.num_rows == len(batch.payloads)
                        assert table.column("payload").to_pylist() == list(batch.payloads)
                        seen += table.num_rows
                        await batch.ack()
                        if seen == 1000:
                            break

    asyncio.run(scenario())


@pytest.mark.parametrize("durability", ["written", "fsync"])
def test_the_level_is_named_in_the_acknowledgement(shared: Shared, durability: str) -> None:
    process, topic = shared(1), f"/default/level-{durability}"

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            async with client.producer(topic, durability=durability) as producer:
                assert (await producer.send(b"x")).durability == durability
            entry = await client.admin.describe_topic(topic)
            assert durability in str(entry)

    asyncio.run(scenario())


def test_the_blocking_client_does_the_same(shared: Shared) -> None:
    process = shared(2)
    with danube.sync.connect(process.address) as client:
        with client.producer("/default/sync", partitions=2) as producer:
            ack = producer.send(b"one", key="k")
            assert ack.offset == 0
            producer.send_many([b"two", b"three"])
            future = producer.send_nowait(b"four")
            producer.flush()
            assert future.done()
        with client.consumer("/default/sync", subscription="s", start="earliest") as consumer:
            seen = set()
            for message in consumer:
                seen.add(message.payload)
                message.ack()
                if len(seen) == 4:
                    break
    assert seen == {b"one", b"two", b"three", b"four"}
