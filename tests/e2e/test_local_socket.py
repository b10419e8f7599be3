"""Clients on the broker's host come through the Unix socket beside the native port, or through TCP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import Any

import pytest

import danube
from danube import sync
from danube.errors import ConnectionFailed
from tests.broker_process import BrokerProcess

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="such names are Linux's"),
]

PAYLOADS = [b"%06d " % number + bytes(300) for number in range(4_000)]


def family(client: Any) -> int:
    connection = client._connection
    link = connection._home if isinstance(client, sync.Client) else connection._link
    return int(link.socket.family)


def started(broker: Any, mode: str, workers: int = 1) -> BrokerProcess:
    process: BrokerProcess = broker(workers=workers, environment={"DANUBE_SERVER__LOCAL_SOCKET": mode})
    return process


@pytest.mark.parametrize(("mode", "expected"), [("on", socket.AF_UNIX), ("off", socket.AF_INET)])
@pytest.mark.parametrize("workers", [1, 2])
def test_all_goes_through_it_where_there_is_one(broker: Any, mode: str, expected: int, workers: int) -> None:
    process = started(broker, mode, workers)

    async def run(number: int) -> list[bytes]:
        topic = f"/default/t{number}"
        async with danube.connect(process.address) as client, client.producer(topic) as producer:
            assert family(client) == expected
            await producer.send_many(PAYLOADS)
            await producer.send_many(PAYLOADS)
            await producer.send(b"the last one")
            found: list[bytes] = []
            async with client.consumer(topic, "all", start="earliest") as consumer:
                async for batch in consumer.batches():
                    found += batch.payloads
                    await batch.ack()
                    if found[-1] == b"the last one":
                        return found
        return found

    for number in range(3):
        assert asyncio.run(run(number)) == [*PAYLOADS, *PAYLOADS, b"the last one"]
    with sync.connect(process.address) as client:
        assert family(client) == expected


def test_a_client_comes_back_through_it_when_its_worker_was_killed(broker: Any) -> None:
    process = started(broker, "on", workers=2)

    async def run() -> None:
        async with danube.connect(process.address) as client, client.producer("/default/t") as producer:
            for _ in range(3):
                first = await producer.send(b"before")
                process.kill_worker(0)
                process.kill_worker(1)
                last = await producer.send(b"after")
                assert family(client) == socket.AF_UNIX and last.offset > first.offset

    asyncio.run(run())


def test_a_broker_that_comes_back_without_one_is_found_at_its_port(broker: Any) -> None:
    process = started(broker, "on")
    with sync.connect(process.address) as client, client.producer("/default/t") as producer:
        producer.send(b"before")
        assert family(client) == socket.AF_UNIX
        process.environment["DANUBE_SERVER__LOCAL_SOCKET"] = "off"
        process.kill()
        process.start()
        producer.send(b"after")
        assert family(client) == socket.AF_INET


def test_a_broker_that_is_gone_is_gone_there_too(broker: Any) -> None:
    process = started(broker, "on")
    process.stop()
    with pytest.raises(ConnectionFailed, match="nothing listens there"):
        sync.connect(process.address).open()


def test_a_stopped_worker_keeps_a_client_waiting_as_at_the_port(broker: Any) -> None:
    process = started(broker, "on")
    (worker,) = process.worker_pids
    os.kill(worker, signal.SIGSTOP)
    try:
        with pytest.raises(ConnectionFailed, match=r"did not answer in time|did not greet"):
            sync.connect(process.address, connect_timeout=0.5).open()
    finally:
        os.kill(worker, signal.SIGCONT)
    with sync.connect(process.address) as client:
        assert family(client) == socket.AF_UNIX
