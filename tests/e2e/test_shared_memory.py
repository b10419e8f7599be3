"""Clients on the broker's host publish through memory: all arrives once and in order, whoever dies."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import danube
from danube import sync
from danube.client.machine.shared_memory import CopyChoice
from danube.core import kernels
from danube.core.placement.workers import owner_of
from danube.core.protocol.native import SHARED_MEMORY_NAME
from tests.broker_process import BrokerProcess

# Without kernels clients copy batches into the memory; with them they make them there.
pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("kernels_or_twins")]

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


@pytest.mark.parametrize("streamed", [True, False])
def test_threads_of_one_client_do_not_write_over_each_others_batches(
    broker: Any, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setattr(CopyChoice, "streams", lambda _: streamed and kernels.available)
    process = broker(workers=1)
    with sync.connect(process.address) as client, client.producer("/default/t") as producer:

        def publish(letter: bytes) -> None:
            for _ in range(20):
                producer.send_many([letter * 300] * 500)

        threads = [threading.Thread(target=publish, args=(letter,)) for letter in (b"a", b"b", b"c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = Counter(read_back(process.address, "/default/t", 30_000))
    assert found == {letter * 300: 10_000 for letter in (b"a", b"b", b"c")}
    assert counted(process, "shared_in") >= 57, "all but what came before the broker had mapped the memory"


def owned_by_each(client: Any, count: int = 8) -> list[str]:
    """Topics, made here, of which both workers of a broker own some."""
    topics = [f"/default/t{number}" for number in range(count)]
    for topic in topics:
        client.admin.create_topic(topic)
    assert {owner_of(client.admin.describe_topic(topic).topic.topic_id, 0, 2) for topic in topics} == {0, 1}
    return topics


def test_what_another_worker_owns_is_read_where_it_lies_as_well(broker: Any) -> None:
    process = broker(workers=2)
    with sync.connect(process.address) as client:
        topics = owned_by_each(client)
        producers = [client.producer(topic) for topic in topics]
        for producer in producers:
            with producer:
                for _ in range(3):
                    producer.send_many(PAYLOADS)
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in process.worker_pids]
        assert [SHARED_MEMORY_NAME in each for each in maps] == [True, True]
    assert counted(process, "shared_in") >= 8
    assert counted(process, "forwarded_in") > 0
    for topic in topics:
        assert read_back(process.address, topic, 9_000) == PAYLOADS * 3


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_are_killed_meanwhile_lose_and_double_nothing(broker: Any, workers: int) -> None:
    process = broker(workers=workers)
    rounds = 40
    stopped = threading.Event()

    def kill() -> None:
        for number in itertools.cycle(range(workers)):
            if stopped.wait(0.3):
                return
            process.wait_worker_replaced(process.kill_worker(number))

    killer = threading.Thread(target=kill)
    with sync.connect(process.address) as client, ExitStack() as opened:
        topics = owned_by_each(client) if workers == 2 else ["/default/t"]
        producers = [opened.enter_context(client.producer(topic)) for topic in topics]
        for producer in producers:
            producer.send_many(PAYLOADS)
        killer.start()
        try:
            for _ in range(rounds - 1):
                for producer in producers:
                    producer.send_many(PAYLOADS)
                time.sleep(0.02)
        finally:
            stopped.set()
            killer.join()
    for topic in topics:
        assert read_back(process.address, topic, rounds * len(PAYLOADS)) == PAYLOADS * rounds
    assert counted(process, "shared_in") > 0
