"""Exceptions that end a call of the blocking client wherever they please, and deadlines that hold."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import danube.sync
from danube.client.blocking import connection as blocking
from danube.client.blocking import connection as blocking_link
from danube.client.blocking.connection import BlockingLink
from danube.client.machine.session import Session
from danube.client.records.outbox import Outbox, ProducerOptions
from danube.core.partition.policy import TopicPolicy
from danube.core.protocol.native import Kind
from danube.errors import ClosedError, OperationTimeout
from tests.fakes.broker import FakeBroker
from tests.unit.client.machine.test_client_session import Peer

TOPIC = "/default/t"


class Alarm(BaseException):
    """Raised by a signal's handler, as KeyboardInterrupt is."""


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Have SIGALRM raise in the main thread after so many seconds."""

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def works(client: danube.sync.Client, producer: danube.sync.Producer) -> None:
    """Everything is as it was, from here and from another thread."""
    connection = client._connection
    assert connection._reader == 0 and not connection.lock.locked()
    producer.send(b"after")
    sender = threading.Thread(target=producer.send, args=(b"elsewhere",))
    sender.start()
    sender.join(10)
    assert not sender.is_alive()


def test_a_call_that_a_signal_ends_leaves_nothing_behind(
    fake: FakeBroker, alarm: Callable[[float], None]
) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        fake.create("/default/quiet", 0, TopicPolicy())
        consumer = client.consumer("/default/quiet", "s").open()
        for _ in range(5):
            alarm(0.02)
            with pytest.raises(Alarm):
                consumer.receive()
            works(client, producer)
        assert client.statistics()["connections"] == 1


def test_a_call_that_waits_for_another_reader_is_ended_as_well(
    fake: FakeBroker, alarm: Callable[[float], None]
) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        consumer = client.consumer(TOPIC, "s").open()
        reader = threading.Thread(target=consumer.receive)
        reader.start()
        while not client._connection._reader:
            time.sleep(0.001)
        fake.create("/default/quiet", 0, TopicPolicy())
        other = client.consumer("/default/quiet", "t").open()
        alarm(0.05)
        with pytest.raises(Alarm):
            other.receive()
        producer.send(b"x")
        reader.join(10)
        assert not reader.is_alive()
        works(client, producer)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_an_exception_at_the_edge_of_the_sleep_leaves_nobody_reading(
    fake: FakeBroker, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a handler raises that runs when the lock was let go of, or when poll() has returned."""
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        sleep = blocking._sleep

        def cut(*arguments: Any) -> list[int]:
            if place == "behind":
                sleep(*arguments)
            raise Alarm

        monkeypatch.setattr(blocking, "_sleep", cut)
        with pytest.raises(Alarm):
            producer.send(b"x")
        monkeypatch.setattr(blocking, "_sleep", sleep)
        works(client, producer)
    assert fake.payloads(TOPIC) == [b"x", b"after", b"elsewhere"]


def test_bytes_that_were_read_and_not_taken_cost_the_connection(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        received = Session.received

        def cut(*_: Any) -> int:
            raise Alarm

        monkeypatch.setattr(Session, "received", cut)
        with pytest.raises(Alarm):
            producer.send(b"x")
        monkeypatch.setattr(Session, "received", received)
        works(client, producer)
        assert client.statistics()["connections"] == 2
    assert fake.payloads(TOPIC) == [b"x", b"after", b"elsewhere"]


def test_a_frame_that_was_cut_costs_the_connection(fake: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        send_all = BlockingLink._send_all

        def cut(self: BlockingLink, sock: socket.socket, data: Any) -> None:
            sock.send(memoryview(data)[:5])
            raise Alarm

        monkeypatch.setattr(BlockingLink, "_send_all", cut)
        with pytest.raises(Alarm):
            producer.send(b"x")
        monkeypatch.setattr(BlockingLink, "_send_all", send_all)
        works(client, producer)
    assert fake.payloads(TOPIC) == [b"x", b"after", b"elsewhere"]


def test_a_greeting_that_a_signal_cuts_leaves_no_socket(
    fake: FakeBroker, alarm: Callable[[float], None]
) -> None:
    fake.hold()
    main = threading.main_thread().ident or 0

    def ring(*_: object) -> None:
        fake.when_frame = None
        threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGALRM)).start()

    fake.when_frame = ring
    client = danube.sync.connect(fake.url)
    with pytest.raises(Alarm):
        client.open()
    fake.wait_for(lambda: not fake.connections)
    fake.release()
    with client, client.producer(TOPIC) as producer:
        works(client, producer)


def test_a_group_whose_sending_is_cut_fails_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer()
    peer.connect()
    producer = peer.producer()
    peer.open(7, 3)
    options = ProducerOptions(
        topic=TOPIC, name="p", timeout_ns=10**9, batch_bytes=1024, max_in_flight_bytes=4096
    )
    box = Outbox(options, [producer])
    group, _ = box.add(b"x", None, None)

    def cut(*_: object) -> None:
        raise Alarm

    monkeypatch.setattr(box, "_send_group", cut)
    with pytest.raises(Alarm):
        box.flush_group()
    assert isinstance(group.outcome(0), ClosedError)


def test_deadlines_hold_while_the_thread_that_reads_does_not_come_back(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC, timeout=0.2) as producer:
        fake.hold()
        client._connection._reader = -1  # a thread that is stopped while it reads
        client._session.request_timeout_ns = 200_000_000
        with pytest.raises(OperationTimeout):
            client.admin.status()
        with pytest.raises(OperationTimeout):
            producer.send(b"x")
        client._connection._reader = 0
        fake.release()
        works(client, producer)


def test_a_broker_that_takes_no_bytes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_link, "SEND_STALL_S", 0.05)
    ours, peer = socket.socketpair()
    ours.setblocking(False)
    link = BlockingLink(Session())
    with pytest.raises(TimeoutError, match="took no bytes"):
        link._send_all(ours, bytes(1 << 24))
    taken: list[int] = []

    def take() -> None:
        while len(peer.recv(1 << 20)):
            taken.append(1)

    taker = threading.Thread(target=take)
    taker.start()
    link._send_all(ours, bytes(1 << 22))
    ours.close()
    taker.join(10)
    peer.close()
    assert taken


def test_a_reader_that_left_a_mark_of_its_own_goes_on(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        client._connection._reader = threading.get_ident()  # what two signals in a row may leave
        producer.send(b"x")
        assert client._connection._reader == 0
        assert fake.seen(Kind.PUBLISH) == 1
