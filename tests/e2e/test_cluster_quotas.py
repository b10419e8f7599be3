"""Limits of a namespace over three brokers: every owner keeps them, whichever broker was told."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from danube.errors import LimitExceeded
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
