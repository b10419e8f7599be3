"""Limits of a namespace over three brokers: every owner keeps them, whichever broker was told."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from danube.errors import LimitExceeded, OperationTimeout
from tests.broker_cluster import BrokerCluster
from tests.broker_process import wait_until

TOPIC = "/team/orders"
PARTITIONS = 6
RATE = 600  # of the topic
COUNT = 3_000


def limited(client: Any) -> bool:
    return bool(client.admin.namespace_policy("team")["policy"]["max_partitions"] == PARTITIONS)


def test_every_owner_keeps_the_limits_that_any_broker_was_told(tmp_path: Path) -> None:
    with BrokerCluster(tmp_path, 3) as cluster:
        first, *others = cluster.brokers
        with sync.connect(first.address) as client:
            client.admin.create_namespace("team")
            client.admin.create_topic(TOPIC, partitions=PARTITIONS)
            assert len({cluster.owner(TOPIC, index).port for index in range(PARTITIONS)}) == 3
            client.admin.put_tenant("acme", ["team"], max_publish_rate_per_topic=RATE)
            client.admin.set_namespace_policy("team", max_producers_per_topic=1, max_partitions=PARTITIONS)
            for other in others:
                with sync.connect(other.address) as elsewhere:
                    wait_until(partial(limited, elsewhere), 10, "the policy is known there")
                    with pytest.raises(LimitExceeded, match="max_partitions is 6"):
                        elsewhere.admin.create_topic("/team/more")
            with client.producer(TOPIC) as producer:
                began_ns = time.monotonic_ns()
                for start in range(0, COUNT, 50):
                    producer.send_many([b"%d" % number for number in range(start, start + 50)])
                elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
                with sync.connect(others[0].address) as elsewhere:
                    with pytest.raises(LimitExceeded, match="max_producers_per_topic"):
                        elsewhere.producer(TOPIC).__enter__()
            # Each partition saves a second of its share, and answers its last batch before it is paid.
            assert elapsed_s >= COUNT / RATE - 1 - 0.5
            described = client.admin.describe_topic(TOPIC)
            assert sum(one["high_watermark"] for one in described.partitions) == COUNT


SUM = 300  # records a second of the namespace over all brokers
BATCH = 60  # so that a slow machine needs few round trips


class Load:
    """A client that wants far more than the limit until it is stopped."""

    def __init__(self, address: str, topic: str) -> None:
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, topic))
        self.failure: BaseException | None = None
        self._thread.start()

    def _run(self, address: str, topic: str) -> None:
        try:
            with sync.connect(address) as client:
                self.work(client, topic)
        except BaseException as error:
            self.failure = error
            raise

    def work(self, client: Any, topic: str) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.stopped.set()
        self._thread.join(timeout=150)
        assert not self._thread.is_alive() and self.failure is None


class Publisher(Load):
    def work(self, client: Any, topic: str) -> None:
        with client.producer(topic, timeout=120) as producer:
            while not self.stopped.is_set():
                producer.send_many([b"x"] * BATCH)


class Reader(Load):
    got = 0

    def work(self, client: Any, topic: str) -> None:
        with client.consumer(topic, subscription="s", start="earliest") as consumer:
            while not self.stopped.is_set():
                with suppress(OperationTimeout):
                    consumer.receive(timeout=1).ack()
                    self.got += 1


def stored(client: Any, *topics: str) -> int:
    described = [client.admin.describe_topic(topic).partitions for topic in topics]
    return sum(one["high_watermark"] for partitions in described for one in partitions)


def test_brokers_share_the_rate_of_a_namespace_by_what_they_are_asked_for(tmp_path: Path) -> None:
    with BrokerCluster(tmp_path, 3) as cluster:
        first = cluster.brokers[0]
        with sync.connect(first.address) as client:
            client.admin.create_namespace("team")
            client.admin.create_topic("/team/one")
            client.admin.create_topic("/team/wide", partitions=PARTITIONS)
            assert len({cluster.owner("/team/wide", index).port for index in range(PARTITIONS)}) == 3
            client.admin.set_namespace_policy("team", max_publish_rate=SUM)
            began_ns = time.monotonic_ns()
            alone = Publisher(first.address, "/team/one")
            before, since_ns, best = 0, began_ns, 0.0
            while best < 0.6 * SUM and time.monotonic_ns() - began_ns < 120e9:
                time.sleep(5)  # one report of each broker
                now, now_ns = stored(client, "/team/one"), time.monotonic_ns()
                best = max(best, (now - before) * 1e9 / (now_ns - since_ns))
                before, since_ns = now, now_ns
            assert best >= 0.6 * SUM, "the others take nothing, so its broker has more than a third"
            wide = [Publisher(one.address, "/team/wide") for one in cluster.brokers]
            time.sleep(10)
            for one in (alone, *wide):
                one.stop()
            elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
            # A second is saved, another one may be owed, and a batch of each partition passes beyond that.
            most = SUM * (1.1 * elapsed_s + 2) + (PARTITIONS + 1) * BATCH
            assert stored(client, "/team/one", "/team/wide") <= most


def test_brokers_share_what_a_namespace_may_deliver(tmp_path: Path) -> None:
    with BrokerCluster(tmp_path, 3) as cluster:
        first = cluster.brokers[0]
        with sync.connect(first.address) as client:
            client.admin.create_namespace("team")
            client.admin.create_topic("/team/one")
            client.admin.create_topic("/team/wide", partitions=PARTITIONS)
            assert len({cluster.owner("/team/wide", index).port for index in range(PARTITIONS)}) == 3
            for topic in ("/team/one", "/team/wide"):
                with client.producer(topic) as producer:
                    for _ in range(60):  # more than the test reads at this rate
                        producer.send_many([b"x"] * 2 * SUM)
            client.admin.set_namespace_policy("team", max_dispatch_rate=SUM)
            for one in cluster.brokers:
                with sync.connect(one.address) as elsewhere:
                    wait_until(partial(paced, elsewhere), 10, "the policy is known there")
            began_ns = time.monotonic_ns()
            alone = Reader(first.address, "/team/one")
            before, since_ns, best = 0, began_ns, 0.0
            while best < 0.8 * SUM and time.monotonic_ns() - began_ns < 120e9:
                time.sleep(5)  # one report of each broker
                now, now_ns = alone.got, time.monotonic_ns()
                best = max(best, (now - before) * 1e9 / (now_ns - since_ns))
                before, since_ns = now, now_ns
            assert best >= 0.8 * SUM, "the others deliver nothing, so its broker has nearly all"
            for one in cluster.brokers:
                with sync.connect(one.address) as elsewhere:
                    wait_until(partial(told, elsewhere), 60, "what is delivered is known there")
            wide = Reader(first.address, "/team/wide")
            time.sleep(10)
            alone.stop()
            wide.stop()
            elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
            assert wide.got, "it has its turns beside the other one"
            # A second is saved at each broker's share of the limit.
            assert alone.got + wide.got <= SUM * (1.1 * elapsed_s + 2)


def told(client: Any) -> bool:
    [row] = client.admin.quotas()
    assert (row["name"], row["quota"], row["limit"]) == ("team", "max_dispatch_rate", SUM)
    return bool(0.5 * SUM <= row["used"] <= 2.2 * SUM)


def paced(client: Any) -> bool:
    return bool(client.admin.namespace_policy("team")["policy"]["max_dispatch_rate"] == SUM)
