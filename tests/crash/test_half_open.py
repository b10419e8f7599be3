"""Consumers whose hosts fall silent: what was delivered to them goes to others (row D3)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube import sync
from tests.broker_process import BrokerProcess, die_with_parent
from tests.network_namespaces import Hosts, available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="network namespaces need root"),
]

TOPIC = "/default/orders"
RECORDS = 20
CLOSED_S = 45.0  # keepalive ends after 25 s, a repetition that nobody hears after 30 s
# Takes records without acknowledging them, and goes on living.
CONSUMER = """
import sys, time
from danube import sync
with sync.connect(sys.argv[1]) as client, client.consumer(sys.argv[2], "s", "shared") as consumer:
    print("ready", flush=True)
    for _ in range(int(sys.argv[3])):
        consumer.receive(timeout=30)
    print("taken", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(3, reached=True)
    yield made
    made.close()


@pytest.fixture
def broker(hosts: Hosts, tmp_path: Path) -> Iterator[BrokerProcess]:
    made = BrokerProcess(tmp_path / "data", workers=1, host=hosts.host(0), prefix=hosts.prefix(0))
    yield made.start()
    made.kill()


def consumer_at(hosts: Hosts, place: int, broker: BrokerProcess, topic: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", CONSUMER, broker.address, topic, str(RECORDS)]
    child = subprocess.Popen(
        [*hosts.prefix(place), *words], stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


@pytest.mark.timeout(180)
def test_what_a_silent_host_had_in_flight_goes_to_others(hosts: Hosts, broker: BrokerProcess) -> None:
    """One host falls silent when nothing is under way to it, the other one while records are."""
    topics = {1: f"{TOPIC}-idle", 2: f"{TOPIC}-busy"}
    with sync.connect(broker.address) as client:
        for topic in topics.values():
            client.admin.create_topic(topic)
        children = [consumer_at(hosts, place, broker, topic) for place, topic in topics.items()]
        try:
            for child, topic in zip(children, topics.values(), strict=True):
                with client.producer(topic) as producer:
                    producer.send_many([b"%d" % number for number in range(RECORDS)])
                assert child.stdout is not None and child.stdout.readline() == "taken\n"
            for place in topics:
                hosts.cut(place)
            began_s = time.monotonic()
            with client.producer(topics[2]) as producer:
                producer.send(b"%d" % RECORDS)  # to a host that acknowledges nothing any more
            for topic, count in ((topics[1], RECORDS), (topics[2], RECORDS + 1)):
                with client.consumer(topic, "s", "shared") as other:
                    left_s = CLOSED_S - (time.monotonic() - began_s)
                    taken = {int(bytes(other.receive(timeout=left_s).payload)) for _ in range(count)}
                assert taken == set(range(count))
            print(f"taken over within {time.monotonic() - began_s:.1f} s")
        finally:
            for child in children:
                child.kill()
                child.wait()
                assert child.stdout is not None
                child.stdout.close()
