"""One broker after the other is emptied, stopped, started as another build and filled again, under load."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from danube import __version__, sync
from tests.broker_cluster import BrokerCluster
from tests.broker_process import BrokerFailed, BrokerProcess, wait_until
from tests.e2e.test_cluster_brokers import danube
from tests.e2e.test_cluster_owners import Running
from tests.following_clients import Following, FollowingConsumer, FollowingProducer
from tests.other_build import Build, named_build, other_build

NATIVE = [f"/default/native-{number}" for number in range(3)]
OFFICIAL = [f"/default/official-{number}" for number in range(2)]
THIS = Build(__version__, {})
NEW_VERSION = "0.999.0"
# What a later version may add: to a greeting, to a message of the agreement, to a command.
ZONE = '    zone: str = "a"\n'
VERSION, MODE = '    version: str = ""\n', '    mode: str = ""\n'
CHANGES = {
    "__init__.py": ('__version__ = "0.1.0"', f'__version__ = "{NEW_VERSION}"'),
    "cluster/links/frames.py": ("    version: int = VERSION\n", "    version: int = VERSION\n" + ZONE),
    "cluster/raft/messages.py": ("    hint_index: Number\n", "    hint_index: Number\n    spare: int = 7\n"),
    "core/cluster/commands.py": (VERSION + MODE, VERSION + ZONE + MODE),
}


def rows(cluster: BrokerCluster) -> dict[str, dict[str, Any]]:
    """By broker id, as any broker that runs tells."""
    address = next(one.address for one in cluster.brokers if one.running)
    return {row["broker_id"]: row for row in danube("brokers", "list", "-s", address)}


def replace(cluster: BrokerCluster, broker: BrokerProcess, environment: dict[str, str]) -> None:
    """What docs/cluster.md says, for one broker."""
    broker_id = str(cluster.id_of(broker))
    other = cluster.others(broker)[0].address
    danube("brokers", "unload", broker_id, "--wait", "--timeout", "30s", "-s", other)
    assert broker.stop() == 0
    broker.environment = environment
    cluster.start([broker])
    cluster.ask(cluster.others(broker)[0])
    wait_until(lambda: cluster.id_of(broker) in cluster.alive(), 20, "the new one is registered")
    danube("brokers", "activate", broker_id, "-s", other)


@contextmanager
def official_load(cluster: BrokerCluster) -> Iterator[list[Following]]:
    """A producer and a consumer of each topic; they end, the consumers once they have everything."""
    addresses = [broker.grpc_address for broker in cluster.brokers]
    clients: list[Following] = []
    for number, topic in enumerate(OFFICIAL):
        order = addresses[number:] + addresses[:number]
        clients += [FollowingConsumer(order, topic), FollowingProducer(order, topic)]
    consumers, producers = clients[::2], clients[1::2]
    for client in consumers:
        client.start()
    try:
        for client in producers:
            client.start()
        yield clients
        for client in producers:
            client.finish(30)
        for consumer, producer in zip(consumers, producers, strict=True):
            wait_read(consumer, producer.sent)  # type: ignore[arg-type, attr-defined]
    finally:
        for client in clients:
            client.over.set()
        for client in clients:
            client.finish(30)


def wait_read(consumer: FollowingConsumer, wanted: int) -> None:
    """Until the consumer has as many records or an error; else say what is missing and where it waits."""
    try:
        wait_until(lambda: bool(consumer.error) or len(set(consumer.received)) >= wanted, 20, "all is read")
    except BrokerFailed:
        missing = sorted(set(range(wanted)) - set(consumer.received))
        waits = "".join(traceback.format_stack(sys._current_frames()[consumer.ident or 0]))
        pytest.fail(
            f"{consumer.topic}: {len(missing)} of {wanted} are not read: {missing[:5]}..{missing[-5:]}, "
            f"the last that came is {consumer.received[-1:]}, {consumer.retries} retries; it is in\n{waits}"
        )


async def native_load(cluster: BrokerCluster, work: Callable[[], None]) -> list[Running]:
    """A producer and a consumer of each topic, each by way of another broker, while ``work`` is done."""
    done = threading.Event()

    def worked() -> None:
        try:
            work()
        finally:
            done.set()

    clients = [Running(broker.address, topic) for broker, topic in zip(cluster.brokers, NATIVE, strict=True)]
    for client in clients:
        client.pause_s = 0.02
    tasks: list[Callable[[], object]] = [worked, done.wait, done.wait]
    await asyncio.gather(*(client.during(task) for client, task in zip(clients, tasks, strict=True)))
    return clients


def test_a_cluster_is_replaced_by_a_newer_build_and_back_without_an_error(tmp_path: Path) -> None:
    newer = other_build(tmp_path / "newer", CHANGES)
    roll_there_and_back(tmp_path, THIS, Build(NEW_VERSION, newer))


def test_a_cluster_goes_from_the_version_before_to_this_one_and_back(tmp_path: Path) -> None:
    """Wheels, commits or tags that DANUBE_EARLIER and DANUBE_LATER name; else the commit before and this."""
    name, later_name = (os.environ.get(name, "") for name in ("DANUBE_EARLIER", "DANUBE_LATER"))
    earlier = named_build(tmp_path / "earlier", name or "HEAD^")
    later = named_build(tmp_path / "later", later_name) if later_name else THIS
    if earlier is None and not name:
        pytest.skip("no git, or no commit before this one; DANUBE_EARLIER names a wheel")
    assert earlier is not None and later is not None, f"git knows no {name} or no {later_name}"
    roll_there_and_back(tmp_path, earlier, later)


def roll_there_and_back(tmp_path: Path, older: Build, newer: Build) -> None:
    """Three brokers of the older build are replaced one by one, and back again, under load."""
    (tmp_path / "store").mkdir()
    cluster = BrokerCluster(tmp_path, 3, arguments=["--storage", f"file://{tmp_path}/store"])
    for broker in cluster.brokers:
        broker.environment = older.environment
    with cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            for topic in (*NATIVE, *OFFICIAL):
                client.admin.create_topic(topic)
        took_s = []

        def roll() -> None:
            for version, environment in (newer, older):
                for broker in cluster.brokers:
                    began_s = time.monotonic()
                    replace(cluster, broker, environment)
                    took_s.append(round(time.monotonic() - began_s, 1))
                assert {row["version"] for row in rows(cluster).values()} == {version}

        with official_load(cluster) as official:
            native = asyncio.run(native_load(cluster, roll))
        print(f"each broker: {took_s} s")
        assert {row["mode"] for row in rows(cluster).values()} == {"active"}
        for one in native:
            check_native(one)
        for consumer, producer in zip(official[::2], official[1::2], strict=True):
            check_official(cluster, consumer, producer)  # type: ignore[arg-type]


def check_native(client: Running) -> None:
    """Acknowledged in order at offsets without a gap, delivered, and nothing was an error."""
    print(f"{client.topic}: {len(client.offsets)} records, {client.again} again, gap {client.gap_s:.2f} s")
    assert not client.errors
    assert client.offsets == list(range(len(client.offsets))) and len(client.offsets) > 100
    assert [int(client.seen[offset]) for offset in client.offsets] == client.offsets
    assert client.gap_s < 5.0, client.gap_s


def check_official(cluster: BrokerCluster, consumer: FollowingConsumer, producer: FollowingProducer) -> None:
    """Nothing ended the clients, and the log has each record once and in order."""
    print(f"{producer.topic}: {producer.sent} records, {producer.retries}, {consumer.retries} retries")
    assert producer.error is None, producer.error
    assert consumer.error is None, consumer.error
    assert producer.sent > 100
    with (
        sync.connect(cluster.brokers[0].address) as client,
        client.consumer(producer.topic, "audit", start="earliest") as audit,
    ):
        stored = [audit.receive(timeout=10) for _ in range(producer.sent)]
        assert [int(bytes(one.payload)) for one in stored] == list(range(producer.sent))
        assert [one.offset for one in stored] == list(range(producer.sent))
    first = list(dict.fromkeys(consumer.received))
    assert first == list(range(producer.sent)), "first deliveries are in order"
