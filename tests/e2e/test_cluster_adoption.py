"""A broker that was alone becomes the first member of a cluster, with all that it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from danube import sync
from tests.broker_cluster import BrokerCluster
from tests.broker_process import BrokerFailed, BrokerProcess
from tests.e2e.test_compaction import cli

TOPIC, WIDE = "/default/orders.v1", "/default/wide"
STORED = [b"record %d" % number for number in range(60)]


def began_alone(data_dir: Path, arguments: list[str]) -> BrokerProcess:
    """Sixty records, of which "half" has had thirty; sealed in the middle, so that a store has a part."""
    broker = BrokerProcess(data_dir, arguments=arguments).start()
    with sync.connect(broker.address) as client:
        client.admin.create_topic(TOPIC)
        client.admin.create_topic(WIDE, partitions=3)
        with client.consumer(TOPIC, "half", start="earliest") as half, client.producer(TOPIC) as producer:
            assert [producer.send(one).offset for one in STORED[:40]] == list(range(40))
            client.admin.seal(TOPIC)
            assert [producer.send(one).offset for one in STORED[40:]] == list(range(40, 60))
            for one in STORED[:30]:
                message = half.receive(timeout=10)
                assert message.payload == one
                message.ack()
            half.flush()
    return broker


def adopt(data_dir: Path, *words: str, exit_code: int = 0) -> dict[str, object]:
    done = cli("cluster", "adopt", "--data-dir", str(data_dir), *words, "-o", "json", check=False)
    assert done.returncode == exit_code, done.stderr
    return dict(json.loads(done.stdout)) if not exit_code else {"error": done.stderr}


def rest(client: sync.Client) -> list[bytes]:
    """What "half" gets that it did not have."""
    with client.consumer(TOPIC, "half") as half:
        found = []
        for _ in range(len(STORED) - 30):
            message = half.receive(timeout=20)
            found.append(bytes(message.payload))
            message.ack()
        half.flush()
        return found


def everything(client: sync.Client, count: int) -> list[tuple[int, bytes]]:
    found = []
    with client.consumer(TOPIC, "all", start="earliest") as consumer:
        for _ in range(count):
            message = consumer.receive(timeout=20)
            found.append((message.offset, bytes(message.payload)))
            message.ack()
    return found


@pytest.mark.parametrize(
    "stored", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["store", "local"]
)
def test_one_host_becomes_a_cluster_and_others_join(tmp_path: Path, stored: bool) -> None:
    (tmp_path / "store").mkdir()
    storage = ["--storage", f"file://{tmp_path}/store"] if stored else []
    cluster = BrokerCluster(tmp_path, 2, arguments=storage)
    first, second = cluster.brokers
    address = first.arguments[1]
    alone = began_alone(first.data_dir, storage)
    assert "a broker is running" in str(adopt(first.data_dir, exit_code=4)["error"])
    assert alone.stop() == 0
    with pytest.raises(BrokerFailed, match="danube cluster adopt"):
        first.start()  # as a member, before it was adopted
    told = adopt(first.data_dir, "--raft-addr", address)
    assert (told["topics"], told["logs"]) == (2, 4)
    assert "a member of cluster" in str(adopt(first.data_dir, exit_code=4)["error"])
    with pytest.raises(BrokerFailed, match="belongs to a member of a cluster"):
        alone.start()
    try:
        cluster.start([first])
        with sync.connect(first.address) as client:
            assert rest(client) == STORED[30:], "and nothing that was acked"
            with client.producer(TOPIC) as producer:
                assert [producer.send(one).offset for one in (b"a", b"b")] == [60, 61]
            cluster.start([second])
            expected = list(enumerate([*STORED, b"a", b"b"]))
            if stored:
                cluster.place(TOPIC, second)
            assert everything(client, len(expected)) == expected
            assert cluster.owner(TOPIC) is (second if stored else first)
            with client.producer(TOPIC) as producer:
                assert producer.send(b"c").offset == 62
            assert not client.admin.describe_topic(TOPIC).partitions[0].get("holes")
    finally:
        cluster.close()
