"""Policies of namespaces and quotas of tenants, through a real broker of two workers, by every way to ask."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import danube
from danube import sync
from danube.core.placement.workers import owner_of
from danube.errors import LimitExceeded, OperationTimeout, PolicyMismatch, QuotaExceeded, TopicNotFound
from danube.server.proto import DanubeAdmin_pb2
from tests import fork_server
from tests.e2e.grpc_parts import EXHAUSTED, DanubeCalls
from tests.grpc_client import GrpcError

ROOT = Path(__file__).resolve().parents[2]
RATE = 200


def cli(address: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = fork_server.run([sys.executable, "-m", "danube", *words, "-s", address], cwd=ROOT)
    assert done.returncode == 0 or not check, done.stderr + done.stdout
    return done


def told(address: str, *words: str) -> Any:
    return json.loads(cli(address, *words, "-o", "json").stdout)


def test_policies_are_set_by_commands_hold_for_clients_and_outlive_the_broker(broker: Any) -> None:
    process = broker(workers=2)
    address = process.address
    cli(address, "namespaces", "create", "team")
    cli(address, "namespaces", "set", "team", "--max-producers-per-topic", "1", "--durability-min", "fsync")
    cli(address, "tenants", "set", "acme", "--namespace", "team", "--max-topics", "4")
    with sync.connect(address) as client:
        for number in range(4):
            assert client.admin.create_topic(f"/team/t{number}").durability == "fsync"
    process.kill()
    process.start()
    with sync.connect(address) as client:
        assert client.admin.namespaces(prefix="t") == ["team"]
        with pytest.raises(LimitExceeded) as refused:
            client.admin.create_topic("/team/t4")
        assert refused.value.facts == {"limit": 4, "quota": "max_topics"}
        with pytest.raises(PolicyMismatch):
            client.admin.update_topic("/team/t0", durability="written")
        for number in range(4):  # some are the other worker's
            with client.producer(f"/team/t{number}") as producer:
                producer.send(b"x")
                with pytest.raises(LimitExceeded, match="max_producers_per_topic"):
                    client.producer(f"/team/t{number}").__enter__()
        client.admin.set_namespace_policy("team", max_producers_per_topic=2)
        assert client.admin.namespace_policy("team")["effective"]["max_producers_per_topic"] == 2
    assert told(address, "namespaces", "policy", "team")["tenant"] == "acme"
    assert "max_producers_per_topic" in cli(address, "namespaces", "policy", "team").stdout
    assert [row["namespace"] for row in told(address, "namespaces", "list")] == ["default", "system", "team"]
    assert told(address, "tenants", "list")[0]["usage"]["topics"] == 4
    assert "acme" in cli(address, "tenants", "list").stdout
    [row] = told(address, "quotas", "top")
    assert (row["name"], row["used"], row["limit"], row["percent"]) == ("acme", 4, 4, 100)
    assert cli(address, "namespaces", "set", "team", check=False).returncode == 2
    cli(address, "tenants", "delete", "acme", "--yes")
    assert told(address, "tenants", "list") == []
    assert cli(address, "namespaces", "delete", "team", "--yes", check=False).returncode == 4, "it has topics"
    cli(address, "namespaces", "create", "empty")
    cli(address, "namespaces", "delete", "empty", "--yes")


def test_a_namespace_lowers_the_records_in_flight_and_all_come_as_they_are_acked(broker: Any) -> None:
    address = broker(workers=1).address  # another worker would learn of the policy a moment later
    cli(address, "namespaces", "create", "team")
    with sync.connect(address) as client:
        client.admin.create_topic("/team/t", partitions=2)
        with client.consumer("/team/t", "s") as consumer, client.producer("/team/t") as producer:
            cli(address, "namespaces", "set", "team", "--max-unacked", "3")
            assert client.admin.namespace_policy("team")["effective"]["max_unacked"] == 3
            sent = {b"%d" % number for number in range(60)}
            for payload in sent:
                producer.send(payload, key=payload)
            held = [consumer.receive(timeout=10) for _ in range(6)]
            with pytest.raises(OperationTimeout):
                consumer.receive(timeout=0.5)
            got = {record.payload for record in held}
            for record in held:
                record.ack()
            while got < sent:
                record = consumer.receive(timeout=10)
                got.add(record.payload)
                record.ack()
    assert got == sent


def test_clients_publish_at_the_rate_of_their_topic_and_lose_nothing(broker: Any) -> None:
    process = broker(workers=2)
    count = 5 * RATE

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await client.admin.create_namespace("slow")
            await client.admin.set_namespace_policy("slow", max_publish_rate_per_topic=RATE)
            await client.admin.create_topic("/slow/t")
            async with client.producer("/slow/t") as producer:
                started_ns = time.monotonic_ns()
                for start in range(0, count, 50):
                    await producer.send_many([b"%d" % number for number in range(start, start + 50)])
                elapsed_s = (time.monotonic_ns() - started_ns) / 1e9
            # A second is saved at the beginning; everything else goes at the rate.
            assert elapsed_s >= count / RATE - 1 - 0.1
            [partition] = (await client.admin.describe_topic("/slow/t")).partitions
            assert partition["high_watermark"] == count

    asyncio.run(scenario())


def test_what_is_far_beyond_the_rate_is_refused_where_a_send_has_no_time_to_wait(broker: Any) -> None:
    process = broker(workers=1)
    with sync.connect(process.address) as client:
        client.admin.create_namespace("slow")
        client.admin.set_namespace_policy("slow", max_publish_rate_per_topic=RATE)
        client.admin.create_topic("/slow/t")
        with client.producer("/slow/t", timeout=5) as producer:
            producer.send_many([b"x"] * (100 * RATE))
            with pytest.raises(QuotaExceeded) as refused:
                producer.send(b"y")
            assert 5_000 < refused.value.facts["retry_after_ms"] <= 99_000
            client.admin.set_namespace_policy("slow", max_publish_rate_per_topic=0)
            producer.send(b"z")
        [partition] = client.admin.describe_topic("/slow/t").partitions
        assert partition["high_watermark"] == 100 * RATE + 1


@pytest.mark.parametrize("blocking", [False, True])
def test_clients_that_are_refused_wait_and_store_everything_once_and_in_order(
    broker: Any, blocking: bool
) -> None:
    process = broker(workers=1)
    numbers = [b"%d" % number for number in range(4 * RATE)]
    with sync.connect(process.address) as client:
        client.admin.create_namespace("slow")
        client.admin.set_namespace_policy("slow", max_publish_rate_per_topic=RATE)
        client.admin.create_topic("/slow/t")
        began_ns = time.monotonic_ns()
        if blocking:
            with client.producer("/slow/t", timeout=60) as producer:
                for start in range(0, len(numbers), 2 * RATE):  # each takes two seconds of the rate
                    for number in numbers[start : start + 2 * RATE]:
                        producer.send_nowait(number)
                    producer.flush()
        else:
            asyncio.run(_send_at_once(process.address, numbers))
        assert time.monotonic_ns() - began_ns >= 1.9e9, "it did wait"
        with client.consumer("/slow/t", subscription="s", start="earliest") as consumer:
            got = [consumer.receive(timeout=60).payload for _ in numbers]
        assert got == numbers
        [partition] = client.admin.describe_topic("/slow/t").partitions
        assert partition["high_watermark"] == len(numbers)


async def _send_at_once(address: str, numbers: list[bytes]) -> None:
    async with danube.connect(address) as client:
        async with client.producer("/slow/t", timeout=60) as producer:
            parts = [numbers[start : start + RATE] for start in range(0, len(numbers), RATE)]
            await asyncio.gather(*map(producer.send_many, parts))  # the last two batches are refused


def test_topics_of_two_workers_share_the_rate_of_their_namespace_and_its_stored_bytes(broker: Any) -> None:
    process = broker(workers=2)
    count, batch = 6 * RATE, 50

    async def publish(client: Any, topic: str) -> None:
        async with client.producer(topic, timeout=120) as producer:
            for _ in range(count // 4 // batch):
                await producer.send_many([b"x" * 100] * batch)

    async def scenario() -> None:
        async with danube.connect(process.address) as client:
            await client.admin.create_namespace("team")
            await client.admin.set_namespace_policy("team", max_publish_rate=RATE)
            topics = [f"/team/t{number}" for number in range(4)]
            for topic in topics:
                await client.admin.create_topic(topic)
            owners = {
                owner_of((await client.admin.describe_topic(topic)).topic.topic_id, 0, 2) for topic in topics
            }
            assert owners == {0, 1}
            began_ns = time.monotonic_ns()
            await asyncio.gather(*(publish(client, topic) for topic in topics))
            elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
            # A second is saved, and each producer's last batch is answered a second after it came at most.
            assert elapsed_s >= count / RATE - 1 - 1 - 4 * batch / RATE
            top = await client.admin.quotas()
            assert [(row["quota"], row["limit"]) for row in top] == [("max_publish_rate", RATE)]
            assert 0 < top[0]["used"] <= 2.5 * RATE, "a second is saved, and one is owed"
            await client.admin.set_namespace_policy("team", max_publish_rate=0, max_storage_bytes=1_000)
            async with client.producer(topics[0], timeout=5) as producer:
                with pytest.raises(QuotaExceeded) as refused:
                    for _ in range(100):  # it is looked at once a second
                        await producer.send(b"y")
                        await asyncio.sleep(0.1)
            assert refused.value.facts["quota"] == "max_storage_bytes"
            await client.admin.set_namespace_policy("team", max_storage_bytes=0)
            async with client.producer(topics[0]) as producer:
                await producer.send(b"z")

    asyncio.run(scenario())
    found = told(process.address, "namespaces", "policy", "team")["policy"]
    assert (found["max_publish_rate"], found["max_storage_bytes"]) == (0, 0)
    sizes = ("--max-publish-bytes", "1MiB", "--max-storage-bytes", "9GiB")
    cli(process.address, "namespaces", "set", "team", *sizes)
    found = told(process.address, "namespaces", "policy", "team")["policy"]
    assert (found["max_publish_bytes"], found["max_storage_bytes"]) == (1 << 20, 9 << 30)


def test_a_changed_policy_holds_for_producers_that_are_open(broker: Any) -> None:
    process = broker(workers=2)
    with sync.connect(process.address) as client, DanubeCalls(process.grpc_address) as calls:
        client.admin.create_namespace("team")
        for number in range(2):  # perhaps of both workers
            topic = f"/team/t{number}"
            client.admin.create_topic(topic)
            with client.producer(topic) as producer:
                official = calls.create(topic, "official")
                producer.send(b"x")
                calls.send(topic, official, b"x", "official")
                client.admin.set_namespace_policy("team", auto_create=False, max_producers_per_topic=1)
                producer.send(b"y")
                calls.send(topic, official, b"y", "official")
                with pytest.raises(TopicNotFound):
                    client.producer("/team/missing").open()
                client.admin.set_namespace_policy("team", durability_min="fsync")
                with pytest.raises(PolicyMismatch, match="durability_min"):
                    while True:  # the worker of the topic learns of it a moment later
                        producer.send(b"z")
                with pytest.raises(GrpcError):
                    calls.send(topic, official, b"z", "official")
            client.admin.set_namespace_policy("team", durability_min="", max_producers_per_topic=0)
            with client.producer(topic) as producer:
                producer.send(b"again")


def test_official_clients_see_the_limits_and_may_try_again(broker: Any) -> None:
    process = broker(workers=2)
    with sync.connect(process.address) as client:
        client.admin.set_namespace_policy(
            "default", max_producers_per_topic=1, max_publish_bytes_per_topic=2_000, auto_create=False
        )
        client.admin.create_topic("/default/t")
    with DanubeCalls(process.grpc_address) as calls:
        producer_id = calls.create("/default/t", "p")
        with pytest.raises(GrpcError) as refused:
            calls.create("/default/t", "q")
        assert refused.value.code == EXHAUSTED
        statuses = []
        for _ in range(2):  # more than ten seconds of the rate, and one message that comes too early
            try:
                calls.send("/default/t", producer_id, b"x" * 20_000)
                statuses.append(0)
            except GrpcError as error:
                statuses.append(error.code)
        assert statuses == [0, EXHAUSTED]
    with DanubeCalls(process.admin_address) as calls:
        answer = calls.admin(
            "NamespaceAdmin/GetNamespacePolicies", DanubeAdmin_pb2.NamespaceRequest(name="default")
        )
    policies = json.loads(answer.policies)
    assert (len(policies), policies["max_producers_per_topic"]) == (7, 1)
