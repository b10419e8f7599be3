"""No majority for a time: nothing is served, and afterwards everything goes on where it was."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from danube import sync
from danube.errors import DanubeError
from tests.broker_cluster import BrokerCluster
from tests.broker_process import wait_until

TOPIC = "/default/orders"
OUTAGE_S = 5.0  # two leases, and some elections


def test_a_subscription_goes_on_where_it_was_after_an_outage_of_the_metadata(tmp_path: Path) -> None:
    with BrokerCluster(tmp_path, 3) as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)
        owner = cluster.owner(TOPIC)
        pids = [pid for broker in cluster.others(owner) for pid in broker.pids]
        seen: dict[int, bytes] = {}
        with (
            sync.connect(owner.address, timeout=60) as client,
            client.producer(TOPIC, name="p") as producer,
            client.consumer(TOPIC, "s", start="earliest") as consumer,
        ):
            for number in range(200):
                producer.send(b"%d" % number)
            for _ in range(100):
                message = consumer.receive(timeout=20)
                message.ack()
                seen[message.offset] = bytes(message.payload)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                while time.monotonic() - began < OUTAGE_S:
                    with suppress(
                        DanubeError
                    ):  # what is at hand may be taken, what is asked for is not given
                        message = consumer.receive(timeout=0.5)
                        seen[message.offset] = bytes(message.payload)
                        message.ack()
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            wait_until(lambda: len(cluster.alive()) == 3, 30, "all are registered again")
            for number in range(200, 250):
                producer.send(b"%d" % number)
            while len(seen) < 250:
                message = consumer.receive(timeout=30)
                message.ack()
                seen[message.offset] = bytes(message.payload)
        assert sorted(int(payload) for payload in seen.values()) == list(range(250)), "no jump, no loss"
        assert [int(seen[offset]) for offset in sorted(seen)] == list(range(250)), "in order"
