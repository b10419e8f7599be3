"""A real broker dies with records that only its disk has, another one goes on, and the disk comes back."""

from __future__ import annotations

import json
import time
from pathlib import Path

from danube import sync
from tests.broker_cluster import BrokerCluster
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.test_cluster_owners import TOPIC


def receive(consumer: sync.Consumer, count: int, timeout: float = 30.0) -> list[tuple[int, bytes]]:
    found = []
    for _ in range(count):
        message = consumer.receive(timeout=timeout)
        message.ack()
        found.append((message.offset, bytes(message.payload)))
    return found


def dies_exposed(cluster: BrokerCluster) -> tuple[BrokerProcess, BrokerProcess, list[int]]:
    """100 records in the store, 50 more on the owner's disk alone, which is killed; both brokers, offsets."""
    with sync.connect(cluster.brokers[0].address) as client:
        client.admin.create_topic(TOPIC)
    owner = cluster.owner(TOPIC)
    other = cluster.others(owner)[0]
    cluster.ask(other)
    with sync.connect(owner.address) as client, client.producer(TOPIC) as producer:
        offsets = [producer.send(b"%d" % number).offset for number in range(100)]
        client.admin.seal(TOPIC)
        wait_until(
            lambda: client.admin.describe_topic(TOPIC).partitions[0]["uploaded_end"] == 100, 20, "uploaded"
        )
        offsets += [producer.send(b"%d" % number).offset for number in range(100, 150)]
    owner.kill()
    return owner, other, offsets


def test_records_that_only_a_dead_host_had_are_delivered_when_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with BrokerCluster(tmp_path, 3, arguments=["--storage", f"file://{tmp_path}/store"]) as cluster:
        owner, other, offsets = dies_exposed(cluster)
        assert offsets == list(range(150))
        with sync.connect(other.address) as client:
            with client.producer(TOPIC) as producer:
                behind = [producer.send(b"%d" % number).offset for number in range(150, 160)]
            assert behind[0] >= 1 << 25 and behind == list(range(behind[0], behind[0] + 10))
            with client.consumer(TOPIC, "by-hundreds", start="earliest") as late:
                messages = [late.receive(timeout=30) for _ in range(110)]
                assert [one.offset for one in messages] == [*range(100), *behind], "no ack is waited for"
                for one in messages:
                    one.ack()
                late.flush()
            with client.consumer(TOPIC, "s", start="earliest") as consumer:
                assert [offset for offset, _ in receive(consumer, 110)] == [*range(100), *behind]
                described = client.admin.describe_topic(TOPIC).partitions[0]
                [hole] = described["holes"]
                assert (hole["start"], hole["kind"], hole["broker_id"]) == (100, "open", cluster.id_of(owner))
                back_s = time.monotonic()
                cluster.start([owner])
                returned = receive(consumer, 50, timeout=60)
                print(f"delivered {time.monotonic() - back_s:.1f} s after the start of its broker")
            assert returned == [(number, b"%d" % number) for number in range(100, 150)]
            [hole] = client.admin.describe_topic(TOPIC).partitions[0]["holes"]
            assert (hole["start"], hole["kind"]) == (150, "unused")
        aside = owner.data_dir / "returning"
        wait_until(lambda: not any(aside.iterdir()), 60, "nothing is kept aside")


def test_an_operator_gives_up_what_a_lost_disk_had(tmp_path: Path) -> None:
    from tests.e2e.test_compaction import cli

    (tmp_path / "store").mkdir()
    with BrokerCluster(tmp_path, 3, arguments=["--storage", f"file://{tmp_path}/store"]) as cluster:
        _, other, _ = dies_exposed(cluster)
        with sync.connect(other.address) as client, client.consumer(TOPIC, "s", start="earliest") as consumer:
            receive(consumer, 100)
            wait_until(
                lambda: client.admin.describe_subscription(TOPIC, "s").partitions[0]["withheld"] > 0,
                20,
                "hole",
            )
            done = cli("topics", "accept-loss", TOPIC, "--yes", "-o", "json", "-s", other.address)
            told = json.loads(done.stdout)
            assert told["given_up_offsets"] >= 50
            numbers = client.admin.describe_subscription(TOPIC, "s").partitions[0]
            assert (numbers["withheld"], numbers["lag"]) == (0, 0) and numbers["ack_floor"] > 150


def test_a_member_whose_machine_ended_gives_no_offset_twice(tmp_path: Path) -> None:
    """It stays the owner: it goes on behind what was reserved, and what its disk has comes back."""
    (tmp_path / "store").mkdir()

    def publish(count: int) -> list[int]:
        with sync.connect(member.address) as client, client.producer(TOPIC) as producer:
            return [producer.send(b"x").offset for _ in range(count)]

    with BrokerCluster(tmp_path, 1, arguments=["--storage", f"file://{tmp_path}/store"]) as cluster:
        [member] = cluster.brokers
        with sync.connect(member.address) as client:
            client.admin.create_topic(TOPIC)
        assert publish(3) == [0, 1, 2]
        member.kill()
        cluster.start([member])
        assert publish(2) == [3, 4], "the end of a process leaves nothing out"
        member.kill()
        host = member.data_dir / "host"
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        assert boot in host.read_bytes()
        host.write_bytes(host.read_bytes().replace(boot, boot[::-1]))  # as the next boot would find it
        cluster.start([member])
        [behind] = publish(1)
        assert behind >= 1 << 25
        with (
            sync.connect(member.address) as client,
            client.consumer(TOPIC, "s", start="earliest") as consumer,
        ):
            assert sorted(offset for offset, _ in receive(consumer, 6, 60)) == [0, 1, 2, 3, 4, behind]
