"""Who holds a connection: the owner of what it opened or called for first.

Of the native protocol where that evens connections out, of gRPC until the owner holds two fair shares.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import danube
from danube import sync
from danube.core.batch.columns import encode
from danube.core.placement.workers import owner_of
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind, Lookup, OpenProducer
from danube.errors import ConnectionFailed
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.grpc_parts import UNAVAILABLE, DanubeCalls, pb
from tests.e2e.test_native_door import RawPeer
from tests.grpc_client import Disconnected, GrpcError


def workers_of(broker: BrokerProcess) -> list[dict[str, Any]]:
    """Counters of the workers, over a connection that opens nothing and so stays where it came."""
    with sync.connect(broker.address) as client:
        workers: list[dict[str, Any]] = client.admin.status()["workers"]
    return workers


def owner(client: sync.Client, topic: str) -> int:
    return owner_of(client.admin.describe_topic(topic).topic.topic_id, 0, 2)


def held(client: sync.Client) -> list[int]:
    return [worker["connections"] for worker in client.admin.status()["workers"]]


def test_a_lone_client_is_held_by_the_owner_of_its_topic(broker: Any) -> None:
    process = broker(workers=2)
    at_owner = 0
    for number in range(12):
        topic = f"/default/producer-{number}"
        with sync.connect(process.address) as client:
            with client.producer(topic) as producer:
                producer.send(b"first")
                at_owner += held(client)[owner(client, topic)]
                producer.send(b"second")
        with sync.connect(process.address) as client:
            with client.consumer(topic, "s", start="earliest") as consumer:
                assert [bytes(consumer.receive(timeout=10).payload) for _ in range(2)] == [
                    b"first",
                    b"second",
                ]
                assert sum(held(client)) == 1
                at_owner += held(client)[owner(client, topic)]
    assert at_owner >= 20, "of 24: one stays where an answer to it is not written yet"
    workers = workers_of(process)
    passed = sum(worker["connections_passed"] for worker in workers)
    assert passed >= 2, "of 24, by chance"
    forwarded = sum(worker["forwarded_in"] for worker in workers)
    assert forwarded <= 2 * (24 - at_owner), "no other batch crossed a ring"
    assert sum(worker["connections_total"] for worker in workers) >= 24


def test_asyncio_clients_do_not_notice(broker: Any) -> None:
    async def send_and_receive(address: str, number: int) -> list[bytes]:
        topic = f"/default/async-{number}"
        async with danube.connect(address) as client, client.producer(topic) as producer:
            acks = await asyncio.gather(*(producer.send(b"%d" % one) for one in range(50)))
            assert sorted(ack.offset for ack in acks) == list(range(50))
            async with client.consumer(topic, subscription="s", start="earliest") as consumer:
                return [bytes((await consumer.receive()).payload) for _ in range(50)]

    async def all_of_them(address: str) -> list[list[bytes]]:
        return await asyncio.gather(*(send_and_receive(address, number) for number in range(8)))

    received = asyncio.run(all_of_them(broker(workers=2).address))
    assert received == [[b"%d" % one for one in range(50)]] * 8


def test_what_follows_in_the_same_segment_goes_along(broker: Any) -> None:
    process = broker(workers=2)
    for number in range(8):  # about half of them come to the worker that does not own it
        topic = f"/default/raw-{number}"
        with RawPeer(process.port) as peer:
            peer.shake()
            peer.send(wire.control_frame(Kind.LOOKUP, Lookup(topic, create=True), 2))
            assert peer.frame()[0] == Kind.RESULT  # type: ignore[index]
            batch = encode([b"payload"], producer_name="raw", publish_time_us=1, producer_id=0).to_bytes()
            together = [
                wire.control_frame(Kind.OPEN_PRODUCER, OpenProducer(topic, "raw"), 3, 7),
                wire.frame_header(Kind.PUBLISH, len(batch), 4, 7) + batch,  # with no id: refused, in order
                wire.control_frame(Kind.PING, None, 5),
            ]
            peer.send(b"".join(together)[:-3])
            peer.send(b"".join(together)[-3:])
            answers = sorted(peer.frame()[:2] for _ in together)  # type: ignore[index]
            assert answers == [(Kind.PONG, 5), (Kind.PRODUCER_OPENED, 3), (Kind.ERROR, 4)]
    assert sum(worker["connections_passed"] for worker in workers_of(process)) > 0


def test_clients_of_one_topic_are_not_all_drawn_to_its_owner(broker: Any) -> None:
    process = broker(workers=2)
    with ExitStack() as open_until_the_end:
        clients = [open_until_the_end.enter_context(sync.connect(process.address)) for _ in range(16)]
        before = held(clients[0])
        place = None
        for client in clients:
            producer = open_until_the_end.enter_context(client.producer("/default/hot"))
            producer.send(b"x")
            place = owner(client, "/default/hot") if place is None else place
        after = held(clients[0])
    assert sum(before) == sum(after) == 16
    assert after[place or 0] <= max(before[place or 0], 8), "it has what it had, or half"


def test_grpc_clients_are_held_by_the_owner_of_their_topic(broker: Any) -> None:
    process = broker(workers=2)
    topics = [f"/default/grpc-{number}" for number in range(4)]
    with DanubeCalls(process.grpc_address) as calls:
        for topic in topics:
            calls.create(topic)
    before = workers_of(process)
    for number in range(12):
        topic, name = topics[number % 4], f"n{number}"
        with DanubeCalls(process.grpc_address) as calls:
            lookup = pb.TopicLookupRequest(topic=topic)
            assert calls.unary("Discovery/TopicPartitions", lookup).partitions == [topic]
            stream = calls.receive(calls.subscribe(topic, name))
            calls.send(topic, calls.create(topic, name), name.encode(), name)
            assert stream.next().payload == name.encode()
            with sync.connect(process.address) as client:
                assert held(client)[owner(client, topic)] >= 1
    after = workers_of(process)
    assert sum(worker["forwarded_in"] for worker in after) == 0, "no batch crossed a ring"
    assert sum(worker["connections_passed"] for worker in after) >= 1, "of 12, by chance"

    def total(workers: list[dict[str, Any]]) -> int:
        return sum(int(worker["connections_total"]) for worker in workers)

    assert total(after) - total(before) == 12 + 12 + 1, "each is counted once"


@pytest.mark.parametrize("looked_up", [True, False])
def test_a_grpc_client_is_held_by_the_owner_of_the_topic_that_it_makes(broker: Any, looked_up: bool) -> None:
    process = broker(workers=2)
    for number in range(8):
        topic = f"/default/made-{number}"
        with DanubeCalls(process.grpc_address) as calls:
            if looked_up:  # as the official clients do
                with pytest.raises(GrpcError, match="does not exist"):
                    calls.unary("Discovery/TopicLookup", pb.TopicLookupRequest(topic=topic))
            calls.send(topic, calls.create(topic), b"x")
            with sync.connect(process.address) as client:
                assert held(client)[owner(client, topic)] >= 1
    workers = workers_of(process)
    assert sum(worker["forwarded_in"] for worker in workers) == 0, "no batch crossed a ring"
    assert sum(worker["connections_passed"] for worker in workers) >= 1, "of 8, by chance"


def test_grpc_clients_of_one_topic_may_all_be_held_by_its_owner(broker: Any) -> None:
    process = broker(workers=2)
    with ExitStack() as open_until_the_end:
        first = open_until_the_end.enter_context(DanubeCalls(process.grpc_address))
        producer_id = first.create("/default/hot")
        for number in range(8):
            calls = open_until_the_end.enter_context(DanubeCalls(process.grpc_address))
            calls.send("/default/hot", producer_id, b"%d" % number)
        with sync.connect(process.address) as client:
            place = owner(client, "/default/hot")
            assert held(client)[place] >= 8, "all but this one"
    assert sum(worker["forwarded_in"] for worker in workers_of(process)) == 0


def sockets(pid: int) -> int:
    """How many a process holds that is not opening or closing any."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(link.readlink()).startswith("socket:")
    return found


def send_native(process: BrokerProcess, topic: str, name: str, payload: bytes) -> bool:
    """Whether a new connection stored it; False: the worker that had it died before it said a word."""
    try:
        with sync.connect(process.address, timeout=20) as client:
            with client.producer(topic, name=name) as producer:
                producer.send(payload)
    except ConnectionFailed:
        return False
    return True


def send_grpc(process: BrokerProcess, topic: str, name: str, payload: bytes) -> bool:
    """The same over gRPC, whose clients try again by themselves."""
    try:
        with DanubeCalls(process.grpc_address) as calls:
            calls.send(topic, calls.create(topic, name), payload, name)
    except (Disconnected, OSError):
        return False
    except GrpcError as error:
        assert error.code == UNAVAILABLE, error
        return False
    return True


@pytest.mark.parametrize("send", [send_native, send_grpc])
def test_workers_die_while_connections_are_passed(
    broker: Any, send: Callable[[BrokerProcess, str, str, bytes], bool]
) -> None:
    process = broker(workers=2)
    stop = threading.Event()
    sent: list[tuple[str, bytes]] = []
    failures: list[BaseException] = []

    def come_and_go(name: int) -> None:
        count = 0
        try:
            while not stop.is_set():
                topic, payload = f"/default/t{(name + count) % 5}", b"%d-%d" % (name, count)
                if send(process, topic, f"p{name}", payload):
                    sent.append((topic, payload))
                    count += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=come_and_go, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for number in range(6):
        wanted = len(sent) + 6
        wait_until(lambda: len(sent) >= wanted or bool(failures), 20, "they go on")  # noqa: B023
        process.wait_worker_replaced(process.kill_worker(number % 2))
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not failures and not any(thread.is_alive() for thread in threads)
    assert sum(worker["connections_passed"] for worker in workers_of(process)) > 0
    stored = set()
    with sync.connect(process.address) as client:
        for topic in sorted({topic for topic, _ in sent}):
            with client.consumer(topic, "all", start="earliest") as consumer:
                while not {one for one in sent if one[0] == topic} <= stored:
                    message = consumer.receive(timeout=10)
                    stored.add((topic, bytes(message.payload)))
                    message.ack()
    assert stored >= set(sent), "an acknowledged record is lost"
    wait_until(lambda: sum(one["connections"] for one in workers_of(process)) == 1, 10, "all have left")

    def kept() -> int:
        counts = [sockets(pid) for pid in process.running_workers()]
        return max(counts) - min(counts)

    wait_until(lambda: kept() <= 2, 10, "no socket of a connection that left is kept")
