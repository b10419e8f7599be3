"""All journals of a cluster are damaged: one member goes on, the others rejoin, and every record is back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from danube import sync
from danube.core.placement.recovered import OFFSETS_AHEAD
from tests.broker_cluster import BrokerCluster
from tests.broker_process import BrokerFailed, BrokerProcess, wait_until
from tests.e2e.test_compaction import cli

pytestmark = pytest.mark.slow

TOPICS = [f"/default/t{number}" for number in range(6)]
LAST = "/default/last"
Given = dict[str, dict[int, bytes]]


def publish(client: sync.Client, topic: str, given: Given, count: int) -> list[int]:
    """Publish and note what was acknowledged; no offset may come twice."""
    offsets = []
    with client.producer(topic) as producer:
        for _ in range(count):
            payload = b"%s %d" % (topic.encode(), len(given[topic]))
            offset = producer.send(payload).offset
            assert offset not in given[topic], f"{topic}: offset {offset} was given twice"
            given[topic][offset] = payload
            offsets.append(offset)
    return offsets


def spread(cluster: BrokerCluster) -> Given:
    """Records of two topics at each broker: some in the store, some on that broker's disk alone."""
    given: Given = {topic: {} for topic in TOPICS}
    with sync.connect(cluster.brokers[0].address, timeout=60) as client:
        for topic in TOPICS:
            client.admin.create_topic(topic)
        cluster.wait_heard(TOPICS)  # so each journal has them in other frames than what follows
        for place, topic in enumerate(TOPICS):
            cluster.place(topic, cluster.brokers[place % 3])
        for topic in TOPICS[:3]:
            publish(client, topic, given, 20)
            client.admin.seal(topic)
        for topic in TOPICS:
            publish(client, topic, given, 10)
    return given


def damage(broker: BrokerProcess, what: bytes) -> None:
    """Harm the journal behind the last entry that holds ``what``, and the copy of the metadata."""
    path = broker.data_dir / "raft" / "raft.log"
    content = bytearray(path.read_bytes())
    position = content.rindex(what) + 600  # in one of the next entries
    content[min(position, len(content) - 20)] ^= 0x10
    path.write_bytes(content)
    copy = broker.data_dir / "metadata" / "metadata.log"
    copy.write_bytes(bytes(64) + copy.read_bytes()[64:])


def refuses(broker: BrokerProcess) -> None:
    with pytest.raises(BrokerFailed, match="journal is damaged at position"):
        broker.start()


def recover(broker: BrokerProcess, *flags: str, exit_code: int = 0) -> dict[str, object]:
    done = cli("cluster", "recover", "--data-dir", str(broker.data_dir), *flags, "-o", "json", check=False)
    assert done.returncode == exit_code, done.stderr
    return dict(json.loads(done.stdout))


def received(client: sync.Client, topic: str, count: int) -> list[tuple[int, bytes]]:
    found = []
    with client.consumer(topic, "all", start="earliest") as consumer:
        for _ in range(count):
            message = consumer.receive(timeout=40)
            message.ack()
            found.append((message.offset, bytes(message.payload)))
    return found


def filled(client: sync.Client, topic: str, given: Given) -> bool:
    """Whether the records of before lie in front of the one hole that is left."""
    holes = client.admin.describe_topic(topic).partitions[0]["holes"]
    before = [offset for offset in given[topic] if offset < OFFSETS_AHEAD]
    return [hole["start"] for hole in holes if hole["kind"] == "open"] == [len(before)]


def test_all_journals_are_damaged_and_every_record_comes_back(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with BrokerCluster(tmp_path, 3, arguments=["--storage", f"file://{tmp_path}/store"]) as cluster:
        given = spread(cluster)
        cluster.wait_heard(given)
        for broker in cluster.brokers:
            broker.kill()
        for broker, topic in zip(cluster.brokers, (TOPICS[2], TOPICS[5], TOPICS[0]), strict=True):
            damage(broker, topic.encode())  # who owned what since, and what is reserved, is lost
        refuses(cluster.brokers[0])
        told = [recover(one, exit_code=2) for one in cluster.brokers]
        assert [one["journal"] for one in told] == ["damaged"] * 3
        most = max(told, key=lambda one: (one["last_term"], one["last_index"]))
        assert (told.index(most), most["topics"]) == (1, len(TOPICS))
        first = cluster.brokers[1]
        recover(first, "--unsafe-recover")
        cluster.ask(first)
        cluster.start([first])
        with sync.connect(first.address, timeout=60) as client:
            for topic in TOPICS:  # at once, with everything else still away
                wait_until(lambda topic=topic: cluster.owner(topic) is first, 20, topic)  # type: ignore[misc]
                assert min(publish(client, topic, given, 3)) >= OFFSETS_AHEAD
            for broker in cluster.others(first):
                recover(broker, "--rejoin")
            cluster.start(cluster.others(first))
            for topic in TOPICS:
                wait_until(lambda topic=topic: filled(client, topic, given), 40, f"{topic} is whole")  # type: ignore[misc]
                publish(client, topic, given, 2)
                assert received(client, topic, len(given[topic])) == sorted(given[topic].items())
        survives_its_first_member(cluster, first, given)


def survives_its_first_member(cluster: BrokerCluster, first: BrokerProcess, given: Given) -> None:
    """Who rejoined may vote again, and goes on without the one that was recovered."""
    others = cluster.others(first)
    for broker in others:
        words = ("--node-id", str(cluster.id_of(broker)), "--data-dir", str(first.data_dir))
        changed = json.loads(cli("cluster", "promote-node", *words, "-o", "json").stdout)
    assert len(changed["voters"]) == 3
    cluster.ask(others[0])
    first.kill()
    wait_until(lambda: cluster.owner(TOPICS[0]) is not first, 20, "another owner")
    with sync.connect(others[0].address, timeout=60) as client:
        assert min(publish(client, TOPICS[0], given, 2)) > OFFSETS_AHEAD


def test_records_on_local_disks_alone_are_served_again_by_their_brokers(tmp_path: Path) -> None:
    """No store: a partition waits for its broker, which goes on with its log where that ended."""
    given: Given = {topic: {} for topic in TOPICS[:3]}
    with BrokerCluster(tmp_path, 3) as cluster:
        with sync.connect(cluster.brokers[0].address, timeout=60) as client:
            for topic in given:
                client.admin.create_topic(topic)
                publish(client, topic, given, 10)
            cluster.wait_heard(given)
            client.admin.create_topic(LAST)  # in a frame of its own, which is damaged
        cluster.wait_heard([LAST])
        owners = {topic: cluster.owner(topic) for topic in given}
        for broker in cluster.brokers:
            broker.kill()
        for broker, what in zip(cluster.brokers, (b"/t1", LAST.encode(), b"/t0"), strict=True):
            damage(broker, what)
        first = cluster.brokers[1]
        recover(first, "--unsafe-recover")
        cluster.ask(first)
        cluster.start([first])
        for broker in cluster.others(first):
            recover(broker, "--rejoin")
        cluster.start(cluster.others(first))
        with sync.connect(first.address, timeout=60) as client:
            for topic, owner in owners.items():
                wait_until(lambda owner=owner: cluster.id_of(owner) in cluster.alive(), 20, "it is there")  # type: ignore[misc]
                assert cluster.owner(topic) is owner
                assert publish(client, topic, given, 2) == [10, 11]
                assert received(client, topic, 12) == sorted(given[topic].items())
