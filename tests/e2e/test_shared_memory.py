"""Clients on the broker's host publish through memory: all arrives once and in order, whoever dies."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import danube
from danube import sync
from danube.core.placement import owner_of
from tests.broker_process import BrokerProcess

pytestmark = pytest.mark.e2e

PAYLOADS = [b"%06d " % number + bytes(200) for number in range(3_000)]  # two batches of 0.5 MiB


def counted(broker: BrokerProcess, name: str) -> int:
    with sync.connect(broker.address) as client:
        return sum(worker[name] for worker in client.admin.status()["workers"])


def read_back(address: str, topic: str, count: int) -> list[bytes]:
    with sync.connect(address) as client, client.consumer(topic, "check", start="earliest") as consumer:
        found: list[bytes] = []
        for batch in consumer.batches(max_wait=0.05):
            found += batch.payloads
            batch.ack()
            if len(found) >= count:
                return found
    return found


def test_an_asyncio_client_on_the_host_shares_memory(broker: Any) -> None:
    process = broker(workers=1)

    async def publish() -> None:
        async with danube.connect(process.address) as client, client.producer("/default/t") as producer:
            for _ in range(10):
                await producer.send_many(PAYLOADS)

    asyncio.run(publish())
    assert counted(process, "shared_in") >= 10
    assert read_back(process.address, "/default/t", 30_000) == PAYLOADS * 10


def test_what_another_worker_owns_crosses_the_ring_from_there(broker: Any) -> None:
    process = broker(workers=2)
    with sync.connect(process.address) as client:
        topics = [f"/default/t{number}" for number in range(8)]
        producers = [client.producer(topic) for topic in topics]
        for producer in producers:
            with producer:
                for _ in range(3):
                    producer.send_many(PAYLOADS)
        owners = {owner_of(client.admin.describe_topic(topic).topic.topic_id, 0, 2) for topic in topics}
    assert owners == {0, 1}
    assert counted(process, "shared_in") >= 8
    assert counted(process, "forwarded_in") > 0
    for topic in topics:
        assert read_back(process.address, topic, 9_000) == PAYLOADS * 3


def test_workers_that_are_killed_meanwhile_lose_and_double_nothing(broker: Any) -> None:
    process = broker(workers=1)
    rounds = 40
    stopped = threading.Event()

    def kill() -> None:
        while not stopped.wait(0.3):
            process.wait_worker_replaced(process.kill_worker())

    killer = threading.Thread(target=kill)
    with sync.connect(process.address) as client, client.producer("/default/t") as producer:
        producer.send_many(PAYLOADS)
        killer.start()
        try:
            for _ in range(rounds - 1):
                producer.send_many(PAYLOADS)
                time.sleep(0.02)
        finally:
            stopped.set()
            killer.join()
    assert read_back(process.address, "/default/t", rounds * len(PAYLOADS)) == PAYLOADS * rounds
    assert counted(process, "shared_in") > 0
