"""Real brokers that own partitions between them: any of them is asked, the owner serves, clients follow."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import danube
from danube import sync
from danube.core.batch.columns import encode
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from tests import fork_server
from tests.broker_cluster import BrokerCluster
from tests.broker_process import ROOT, BrokerProcess, wait_until

TOPIC = "/default/orders"
MORE = 300  # records that go to one owner before it is another one's turn


def test_publish_and_consume_through_any_broker(tmp_path: Path) -> None:
    with BrokerCluster(tmp_path, 3, workers=2) as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC, partitions=6)
        owners = {cluster.owner(TOPIC, index).port for index in range(6)}
        assert len(owners) == 3, "partitions are spread"
        asyncio.run(_through_all(cluster))
        with sync.connect(cluster.brokers[2].address) as client:
            with client.producer(TOPIC) as producer:
                acks = producer.send_many([b"%d" % number for number in range(600)])
            assert sum(ack.record_count for ack in acks) == 600
            described = client.admin.describe_topic(TOPIC)
            assert len(described.partitions) == 6
            assert sum(one["log_end"] for one in described.partitions) == 900
            with client.consumer(TOPIC, "late", start="earliest") as consumer:
                seen = set()
                while len(seen) < 900:
                    message = consumer.receive(timeout=10)
                    message.ack()
                    seen.add((message.partition, message.offset))


async def _through_all(cluster: BrokerCluster) -> None:
    async with danube.connect(cluster.brokers[1].address) as reader:
        async with reader.consumer(TOPIC, "all", start="earliest") as consumer:
            for number, broker in enumerate(cluster.brokers):
                async with danube.connect(broker.address) as client:
                    async with client.producer(TOPIC) as producer:
                        await producer.send_many([b"%d %d" % (number, one) for one in range(100)])
            seen = set()
            while len(seen) < 300:
                message = await consumer.receive(timeout=10)
                await message.ack()
                seen.add((message.partition, message.offset))


def test_commands_of_any_broker_reach_the_owner(tmp_path: Path) -> None:
    with BrokerCluster(tmp_path, 3) as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)
        other = cluster.others(cluster.owner(TOPIC))[0]
        grpc = f"http://{other.grpc_address}"
        run("cli", "produce", "-s", grpc, "-t", TOPIC, "-m", "hello", "-c", "3", "--reliable")
        with sync.connect(other.address) as client, client.consumer(TOPIC, "s", start="earliest") as consumer:
            assert [bytes(consumer.receive(timeout=10).payload) for _ in range(3)] == [b"hello"] * 3
            consumer.flush()
        admin = f"http://{other.admin_address}"
        shown = run("admin", "--endpoint", admin, "topics", "subscriptions", TOPIC)
        assert "s" in shown.split('"'), shown
        run("admin", "--endpoint", admin, "topics", "unsubscribe", TOPIC, "--subscription", "s")
        with sync.connect(cluster.brokers[0].address) as client:
            assert client.admin.list_subscriptions(TOPIC) == []


def run(module: str, *words: str) -> str:
    """One of the commands that official tools have; what it prints."""
    code = f"from danube.cli.upstream.{module} import main; main()"
    done = fork_server.run([sys.executable, "-c", code, *words], cwd=ROOT)
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_move_while_producers_and_consumers_run(tmp_path: Path) -> None:
    """Of a topic that stores nothing, so that nothing but following is seen."""
    with BrokerCluster(tmp_path, 2) as cluster:
        home, other = cluster.brokers
        with sync.connect(home.address) as client:
            client.admin.create_topic("/default/live", reliable=False)
        first = cluster.owner("/default/live")
        running = Running(cluster.brokers[1].address, "/default/live")
        running.stored = False
        asyncio.run(running.during(lambda: _move_about(cluster, running, first, 3)))
        print(f"longest time without an acknowledgement: {running.gap_s:.3f} s")
        assert running.gap_s < 1.0, running.gap_s
        assert running.received > 0 and not running.errors
        with sync.connect(other.address) as client, client.producer("/default/live") as producer:
            producer.send(b"sync client")


def _move_about(cluster: BrokerCluster, running: Running, first: BrokerProcess, times: int) -> None:
    there = first
    for _ in range(times):
        running.wait_more(MORE)
        there = cluster.others(there)[0]
        cluster.place(running.topic, there)
    running.wait_more(MORE)


class Running:
    """A producer that sends on and on and a consumer that acks, by the asyncio client."""

    def __init__(self, address: str, topic: str) -> None:
        self.address = address
        self.topic = topic
        self.offsets: list[int] = []  # of what was acknowledged, in order of sending
        self.seen: dict[int, bytes] = {}  # by offset
        self.again = 0
        self.received = 0
        self.stored = True  # else offsets begin anew at the next owner
        self.whole = True  # what is stored can all be read: no disk is away with records of its own
        self.gap_s = 0.0
        self.pause_s = 0.001  # between ten records and the next ten
        self.errors: list[BaseException] = []

    async def during(self, work: Callable[[], None]) -> None:
        over = asyncio.Event()
        async with danube.connect(self.address) as client:
            async with client.consumer(self.topic, "all", start="earliest") as consumer:
                async with client.producer(self.topic, name="steady") as producer:
                    tasks = [
                        asyncio.create_task(self._send(producer, over)),
                        asyncio.create_task(self._receive(consumer)),
                    ]
                    try:
                        await asyncio.to_thread(work)
                    finally:
                        over.set()
                        await asyncio.wait(tasks[:1], timeout=10)
                await self._all_received(tasks[1])
                for task in tasks:
                    task.cancel()
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        self.errors += [
            one
            for one in outcomes
            if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError)
        ]

    async def _all_received(self, receiving: asyncio.Task[None]) -> None:
        """Until what was acknowledged is delivered, where that can be waited for."""
        deadline_s = time.monotonic() + (20 if self.stored and self.whole else 0.3)
        while time.monotonic() < deadline_s and not receiving.done():
            if self.stored and not set(self.offsets).difference(self.seen):
                return
            await asyncio.sleep(0.01)

    def wait_more(self, count: int, timeout_s: float = 20.0) -> None:
        """In another thread: until so many more records are acknowledged."""
        wanted = len(self.offsets) + count
        wait_until(lambda: len(self.offsets) >= wanted, timeout_s, f"{count} records are acknowledged")

    def note(self, offset: int) -> None:
        """A record was delivered."""

    async def _send(self, producer: danube.Producer, over: asyncio.Event) -> None:
        number, last_s = 0, time.monotonic()
        while not over.is_set():
            acks = await asyncio.gather(
                *(producer.send_nowait(b"%d" % (number + place)) for place in range(10))
            )
            number += 10
            self.offsets += [ack.offset for ack in acks]
            now_s = time.monotonic()
            self.gap_s, last_s = max(self.gap_s, now_s - last_s), now_s
            await asyncio.sleep(self.pause_s)

    async def _receive(self, consumer: danube.Consumer) -> None:
        async for message in consumer:
            await message.ack()
            self.received += 1
            self.note(message.offset)
            if message.offset in self.seen:
                self.again += 1
                assert not self.stored or self.seen[message.offset] == bytes(message.payload)
            self.seen[message.offset] = bytes(message.payload)


def test_the_blocking_client_follows_and_finds_another_home(tmp_path: Path) -> None:
    """Moves under a blocking producer and consumer; then the broker of the client's URL is killed."""
    (tmp_path / "store").mkdir()
    with BrokerCluster(tmp_path, 3, arguments=["--storage", f"file://{tmp_path}/store"]) as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)
        owner = cluster.owner(TOPIC)
        home, target = cluster.others(owner)
        cluster.ask(target)
        with (
            sync.connect(home.address, timeout=20) as client,
            client.producer(TOPIC, name="p") as producer,
            client.consumer(TOPIC, "s", start="earliest") as consumer,
        ):
            offsets = [producer.send(b"%d" % number).offset for number in range(50)]
            cluster.place(TOPIC, target)
            offsets += [producer.send(b"%d" % number).offset for number in range(50, 100)]
            home.kill()
            offsets += [producer.send(b"%d" % number).offset for number in range(100, 150)]
            seen: dict[int, bytes] = {}
            while len(seen) < 150:
                message = consumer.receive(timeout=20)
                message.ack()
                seen[message.offset] = bytes(message.payload)
            assert client.admin.topic(TOPIC).topic == TOPIC, "asked of another broker"
        assert offsets == list(range(150))
        assert [int(seen[offset]) for offset in offsets] == offsets


def test_what_a_killed_broker_owns_waits_for_it(tmp_path: Path) -> None:
    with BrokerCluster(tmp_path, 3) as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)
        owner = cluster.owner(TOPIC)
        survivor = cluster.others(owner)[0]
        cluster.ask(survivor)
        with sync.connect(survivor.address) as client, client.producer(TOPIC, name="p") as producer:
            first = [producer.send(b"%d" % number).offset for number in range(20)]
            owner.kill()
            cluster.start([owner])
            ack = producer.send(b"after")
        assert first == list(range(20)) and ack.offset == 20
        with sync.connect(owner.address) as client, client.consumer(TOPIC, "s", start="earliest") as consumer:
            messages = [consumer.receive(timeout=10) for _ in range(21)]
        assert [message.offset for message in messages] == list(range(21))


def test_an_owner_that_was_paused_says_nothing_when_it_wakes(tmp_path: Path) -> None:
    """It finds that its lease is over before it writes or answers what it was sent."""
    (tmp_path / "store").mkdir()
    with BrokerCluster(tmp_path, 3, arguments=["--storage", f"file://{tmp_path}/store"]) as cluster:
        topic = TOPIC
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(topic)
        owner = cluster.owner(topic)
        survivors = cluster.others(owner)
        cluster.ask(survivors[0])
        with Raw(owner.port) as raw:
            raw.open_producer(topic)
            assert raw.publish(b"before") == Kind.PUBLISHED
            pids = owner.pids
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            raw.send_batch(b"while it sleeps")
            moved = time.monotonic()
            gone = (0, cluster.id_of(owner))
            wait_until(lambda: cluster.ownership(topic).broker_id not in gone, 20, "moved")
            took_s = time.monotonic() - moved
            with sync.connect(survivors[0].address) as client, client.producer(topic) as producer:
                producer.send(b"to the next owner")
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            assert raw.answer() is None, "the connection ends without a word"
        written = [path.read_bytes() for path in (owner.data_dir).glob("**/*.seg")]
        assert not any(b"while it sleeps" in one for one in written)
        assert any(b"before" in one for one in written), "the test looks at the right files"
        print(f"another owner after {took_s:.3f} s")
        assert took_s < 4.0, took_s
        with sync.connect(owner.address) as client, client.producer(topic) as producer:
            producer.send(b"by way of the one that slept")


class Raw:
    """The native protocol by hand: what is answered is seen as it is."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._decoder = wire.FrameDecoder()
        self._data = b""
        self._correlation = 1
        self._socket.sendall(wire.control_frame(Kind.HELLO, wire.Hello()))
        assert self.answer() == Kind.WELCOME

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def answer(self) -> int | None:
        """The kind of the next frame; None where the connection ended."""
        while True:
            for frame in wire.FrameDecoder().frames(self._data, 0, len(self._data)):
                self._data = self._data[frame.start + ((frame.end - frame.start + 7) & ~7) :]
                return frame.kind
            try:
                more = self._socket.recv(65_536)
            except ConnectionError:
                return None
            if not more:
                return None
            self._data += more

    def open_producer(self, topic: str) -> None:
        body = wire.OpenProducer(topic, "by-hand")
        for _ in range(100):  # the store may not be in use yet
            self._socket.sendall(wire.control_frame(Kind.OPEN_PRODUCER, body, 1, 1))
            if self.answer() == Kind.PRODUCER_OPENED:
                return
            time.sleep(0.1)
        raise AssertionError("the producer is not opened")

    def send_batch(self, payload: bytes) -> None:
        batch = encode([payload], producer_name="by-hand", publish_time_us=1).to_bytes()
        self._correlation += 1
        self._socket.sendall(wire.frame_header(Kind.PUBLISH, len(batch), self._correlation, 1) + batch)

    def publish(self, payload: bytes) -> int | None:
        self.send_batch(payload)
        return self.answer()


def test_a_move_of_stored_records_while_producers_and_consumers_run(tmp_path: Path) -> None:
    """Offsets go on without a gap and without a second use; what was acknowledged is there once."""
    (tmp_path / "store").mkdir()
    store = ["--log-level", "debug", "--storage", f"file://{tmp_path}/store"]
    with BrokerCluster(tmp_path, 2, workers=2, arguments=store) as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)
        first = cluster.owner(TOPIC)
        running = Running(cluster.brokers[0].address, TOPIC)
        asyncio.run(running.during(lambda: _move_about(cluster, running, first, 3)))
        print(f"longest time without an acknowledgement: {running.gap_s:.3f} s")
        print(f"{len(running.offsets)} records, {running.again} delivered again")
        assert not running.errors
        assert running.offsets == list(range(len(running.offsets)))
        assert sorted(running.seen) == running.offsets
        assert [int(running.seen[offset]) for offset in running.offsets] == running.offsets
        assert running.gap_s < 1.0, running.gap_s


def test_a_broker_that_is_stopped_leaves_no_hole(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with BrokerCluster(tmp_path, 3, arguments=["--storage", f"file://{tmp_path}/store"]) as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)
        owner = cluster.owner(TOPIC)
        home = cluster.others(owner)[0]
        cluster.ask(home)
        with sync.connect(home.address) as client, client.producer(TOPIC, name="p") as producer:
            offsets = [producer.send(b"%d" % number).offset for number in range(100)]
            owner.stop()
            offsets += [producer.send(b"%d" % number).offset for number in range(100, 200)]
            assert offsets == list(range(200))
            with client.consumer(TOPIC, "s", start="earliest") as consumer:
                for offset in offsets:
                    found = consumer.receive(timeout=20).offset
                    assert found == offset, f"what the stopped broker had is away\n{owner.output_tail()}"


def test_another_broker_goes_on_when_the_owner_is_killed(tmp_path: Path) -> None:
    """No offset is given twice, and the producer notices nothing but a pause."""
    (tmp_path / "store").mkdir()
    with BrokerCluster(tmp_path, 3, arguments=["--storage", f"file://{tmp_path}/store"]) as cluster:
        with sync.connect(cluster.brokers[0].address) as client:
            client.admin.create_topic(TOPIC)
        owner = cluster.owner(TOPIC)
        home = cluster.others(owner)[0]
        cluster.ask(home)
        running = Running(home.address, TOPIC)
        running.whole = False

        def kill() -> None:
            running.wait_more(MORE)
            owner.kill()
            running.wait_more(MORE)

        asyncio.run(running.during(kill))
        print(f"longest time without an acknowledgement: {running.gap_s:.3f} s")
        assert not running.errors
        offsets = running.offsets
        assert offsets == sorted(set(offsets)) and len(offsets) > 100
        assert running.gap_s < 4.0, running.gap_s
        assert cluster.owner(TOPIC) is not owner
