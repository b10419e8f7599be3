"""The gRPC port over killed workers, restarts and stops; and together with native clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from danube import sync
from danube.core.placement.workers import owner_of
from danube.errors import OperationTimeout
from tests.broker_process import BrokerProcess
from tests.e2e.grpc_parts import EXCLUSIVE, NON_RELIABLE, RELIABLE, SHARED, UNAVAILABLE, DanubeCalls, pb
from tests.grpc_client import Disconnected, GrpcError, Stream

TOPIC = "/default/recovery"


def connect(process: BrokerProcess) -> DanubeCalls:
    """A connection, as soon as one is accepted."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return DanubeCalls(process.grpc_address)
        except OSError:
            assert time.monotonic() < deadline


def send_until_taken(process: BrokerProcess, number: int, payload: bytes) -> None:
    """What a client does that gets UNAVAILABLE or loses its connection: connect and send again."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(Disconnected, TimeoutError, OSError), connect(process) as calls:
            try:
                calls.send(TOPIC, number, payload)
                return
            except GrpcError as error:
                assert error.code == UNAVAILABLE, error
    raise AssertionError("never taken")


def drain(stream: Stream, calls: DanubeCalls, wanted: set[bytes]) -> None:
    """Receive and ack until everything wanted was seen."""
    while wanted:
        message = stream.next()
        calls.ack(message)
        wanted.discard(message.payload)


def test_ids_outlive_the_broker(broker: Callable[..., BrokerProcess]) -> None:
    process = broker(workers=2)
    with connect(process) as calls:
        producer = calls.create(TOPIC)
        consumer = calls.subscribe(TOPIC, kind=EXCLUSIVE)
        stream = calls.receive(consumer)
        for index in range(10):
            calls.send(TOPIC, producer, b"%d" % index)
        for _ in range(4):
            calls.ack(stream.next())
        process.terminate()
        error = stream.wait_ended()
        assert error.code == UNAVAILABLE and "stopping" in error.message
        calls.wait(lambda: calls.went_away is not None)
    process.stop()
    process.start()
    with connect(process) as calls:
        assert calls.health(1, consumer) == pb.HealthCheckResponse.OK
        calls.send(TOPIC, producer, b"10")  # never created here
        stream = calls.receive(consumer)  # never subscribed here
        assert [int(stream.next().payload) for _ in range(7)] == list(range(4, 11))
        assert calls.create(TOPIC) == producer
        assert calls.subscribe(TOPIC, kind=EXCLUSIVE) == consumer


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_loses_nothing_that_was_acknowledged(
    broker: Callable[..., BrokerProcess], victim: int
) -> None:
    process = broker(workers=2)
    with connect(process) as calls:
        producer = calls.create(TOPIC)
        consumer = calls.subscribe(TOPIC)
        stream = calls.receive(consumer)
        for index in range(50):
            calls.send(TOPIC, producer, b"%d" % index)
        for _ in range(20):
            calls.ack(stream.next())
        old = process.kill_worker(victim)
        for index in range(50, 60):
            send_until_taken(process, producer, b"%d" % index)
        process.wait_worker_replaced(old)
    wanted = {b"%d" % index for index in range(20, 60)}
    deadline = time.monotonic() + 20
    while wanted and time.monotonic() < deadline:
        with suppress(Disconnected, GrpcError, TimeoutError), connect(process) as calls:
            drain(calls.receive(consumer), calls, wanted)
    assert not wanted


def test_streams_end_when_the_worker_that_owns_their_topic_dies(broker: Callable[..., BrokerProcess]) -> None:
    """At another worker a stream ends with UNAVAILABLE; at the owner its connection ends."""
    process = broker(workers=2)
    with connect(process) as calls, sync.connect(process.address) as native:
        calls.create(TOPIC)
        owner = owner_of(native.admin.describe_topic(TOPIC).topic.topic_id, 0, 2)
    clients = [connect(process) for _ in range(6)]
    streams = [client.receive(client.subscribe(TOPIC, name=f"c{n}")) for n, client in enumerate(clients)]
    for stream, client in zip(streams, clients, strict=True):
        client.wait(lambda stream=stream: stream.headers is not None)
    process.wait_worker_replaced(process.kill_worker(owner))
    for stream, client in zip(streams, clients, strict=True):
        with suppress(Disconnected):
            assert stream.wait_ended(10).code == UNAVAILABLE
        client.close()


def test_a_stop_answers_what_it_took(broker: Callable[..., BrokerProcess]) -> None:
    process = broker(workers=1)
    with connect(process) as calls:
        producer = calls.create(TOPIC)
        started = [
            calls.start(
                "/danube.ProducerService/SendMessage",
                calls.message(TOPIC, producer, b"%d" % index, request_id=index),
                pb.MessageResponse,
            )
            for index in range(200)
        ]
        process.terminate()
        answered = 0
        for call in started:
            error = call.wait_ended()
            assert error.code in (0, UNAVAILABLE)
            answered += error.code == 0
    assert process.stop() == 0
    process.start()
    with connect(process) as calls:
        assert len(stored(process)) >= answered


def stored(process: BrokerProcess) -> list[Any]:
    """Everything in the topic, as a native client reads it."""
    with sync.connect(process.address) as client:
        end = client.admin.describe_topic(TOPIC).partitions[0]["high_watermark"]
        with client.consumer(TOPIC, "audit", start="earliest") as consumer:
            return [consumer.receive(timeout=20) for _ in range(end)]


@pytest.mark.parametrize("mode", [RELIABLE, NON_RELIABLE])
def test_native_and_grpc_clients_meet(broker: Callable[..., BrokerProcess], mode: int) -> None:
    process = broker(workers=2)
    with connect(process) as calls, sync.connect(process.address) as native:
        producer = calls.create(TOPIC, mode=mode)
        stream = calls.receive(calls.subscribe(TOPIC, "grpc"))
        with native.consumer(TOPIC, "native") as consumer, native.producer(TOPIC, name="n") as sender:
            calls.send(
                TOPIC,
                producer,
                b"from grpc",
                attributes={"a": "1"},
                routing_key="k",
                publish_time=1_700_000_000_123,
            )
            sender.send(b"from native", key="nk", attributes={"b": "2"})
            records = [consumer.receive(timeout=10) for _ in range(2)]
            messages = [stream.next() for _ in range(2)]
    by_payload = {record.payload: record for record in records}
    one, two = by_payload[b"from grpc"], by_payload[b"from native"]
    assert (one.key, dict(one.attributes), one.producer_name) == ("k", {"a": "1"}, "p")
    assert one.publish_time_us == 1_700_000_000_123_000
    by_text = {message.payload: message for message in messages}
    got = by_text[b"from native"]
    assert (got.routing_key, dict(got.attributes), got.producer_name) == ("nk", {"b": "2"}, "n")
    offsets = (two.offset, one.offset) if mode == RELIABLE else (0, 0)
    assert (got.msg_id.topic_offset, by_text[b"from grpc"].msg_id.topic_offset) == offsets
    assert 1 <= got.msg_id.producer_id < 1 << 63


def test_both_kinds_of_consumers_share_a_subscription(broker: Callable[..., BrokerProcess]) -> None:
    process = broker(workers=2)
    with connect(process) as calls, sync.connect(process.address) as native:
        producer = calls.create(TOPIC)
        consumer_id = calls.subscribe(TOPIC, "both", "g", SHARED)
        stream = calls.receive(consumer_id)
        with native.consumer(TOPIC, "both", name="n") as consumer:
            for index in range(40):
                calls.send(TOPIC, producer, b"%d" % index)
            seen = set()
            while len(seen) < 40:
                with suppress(TimeoutError):
                    message = stream.next(0.05)
                    calls.ack(message, "both")
                    seen.add(int(message.payload))
                with suppress(OperationTimeout):
                    record = consumer.receive(timeout=0.05)
                    record.ack()
                    seen.add(int(record.payload))
        assert seen == set(range(40))
