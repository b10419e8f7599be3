"""Records whose handling was ended from outside are given back, and that is no failure of theirs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import danube
import danube.sync
from danube.client.machine.subscribing import PartitionConsumer
from danube.core.partition.policy import FailurePolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous
from tests.unit.broker_parts import Bench, RecordingSession, batch

TOPIC = "/default/t"
ENDINGS = [asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit]
FAILURES = [ValueError, TimeoutError, ExceptionGroup("all", [ValueError()])]


def nacks(fake: FakeBroker) -> list[wire.Nack]:
    return fake.partitions[TOPIC].subscriptions["s"].nacks


@pytest.mark.parametrize("ending", [*ENDINGS, *FAILURES])
@pytest.mark.parametrize("what", ["message", "batch"])
def test_a_blocking_block_that_ends_with_an_error(fake: FakeBroker, what: str, ending: Any) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        producer.send(b"x")
        with client.consumer(TOPIC, "s", start="earliest") as consumer:
            handled: Any = consumer.receive() if what == "message" else next(consumer.batches())
            with pytest.raises(ending if isinstance(ending, type) else type(ending)):
                with handled:
                    raise ending
            consumer.receive(timeout=5)
        [nack] = nacks(fake)
        assert nack.ranges == [(0, 1)] and nack.returned is (ending in ENDINGS)
        assert bool(nack.reason) is not nack.returned


@pytest.mark.parametrize("what", ["message", "batch"])
@asynchronous
async def test_a_task_that_is_cancelled_gives_its_records_back(fake: FakeBroker, what: str) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        await producer.send(b"x")
        async with client.consumer(TOPIC, "s", start="earliest") as consumer:
            handled: Any = (
                await consumer.receive() if what == "message" else await anext(aiter(consumer.batches()))
            )
            begun = asyncio.Event()

            async def handle() -> None:
                async with handled:
                    begun.set()
                    await asyncio.sleep(60)

            task = asyncio.ensure_future(handle())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await consumer.receive(timeout=5)
        [nack] = nacks(fake)
        assert nack.returned and nack.ranges == [(0, 1)]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, ValueError])
def test_the_error_of_a_block_is_kept_where_the_consumer_is_closed(fake: FakeBroker, ending: Any) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        producer.send(b"x")
        consumer = client.consumer(TOPIC, "s", start="earliest").open()
        message = consumer.receive()
        consumer.close()
        with pytest.raises(ending) as raised, message:
            raise ending
        assert "not given back" in raised.value.__notes__[0]


@pytest.mark.parametrize("by", ["message", "batch"])
def test_what_the_application_was_never_given_counts_for_nothing_when_it_closes(
    fake: FakeBroker, by: str
) -> None:
    with danube.sync.connect(fake.url) as client, client.producer(TOPIC) as producer:
        producer.send_many([b"%d" % one for one in range(6)])
        producer.send_many([b"%d" % one for one in range(6, 10)])
        with client.consumer(TOPIC, "s", start="earliest") as consumer:
            if by == "message":
                for _ in range(4):
                    consumer.receive().ack()
            else:
                next(consumer.batches(max_records=4)).ack()
            client._connection.wait_until(lambda: consumer._box.partitions[0].ready_records == 4, 5)
        assert [(nack.ranges, nack.returned) for nack in nacks(fake)] == [([(4, 6), (6, 10)], True)]
        with client.consumer(TOPIC, "s") as consumer:
            again = [consumer.receive() for _ in range(6)]
        assert [one.redelivery_count for one in again] == [0] * 6


def test_what_is_given_back_and_what_failed_travels_apart() -> None:
    from tests.unit.client.machine.test_client_acks import Site

    site = Site()
    consumer: PartitionConsumer = site.consumer
    consumer.nack([(0, 1)], -1, "")
    consumer.hand_back([(1, 2)])
    consumer.hand_back([(2, 3)])
    consumer.nack([(3, 4)], -1, "")
    sent = [wire.decode_control(body, wire.Nack) for frame, body in site.sent() if frame.kind == Kind.NACK]
    assert [(one.ranges, one.returned) for one in sent] == [
        ([(0, 1)], False),
        ([(1, 2), (2, 3)], True),
        ([(3, 4)], False),
    ]


def test_a_broker_does_not_count_what_was_given_back(tmp_path: Path) -> None:
    bench, session = Bench(tmp_path), RecordingSession()
    producer = RecordingSession(99)
    bench.open_producer(producer)
    bench.publish(producer, batch(b"x"))
    bench.turn()
    failure = FailurePolicy(max_redelivery_count=1, base_redelivery_delay_ms=0, poison="drop")
    bench.subscribe(session, start="earliest", failure=failure)
    for _ in range(6):
        bench.turn()
        assert session.records() == [(0, b"x")]
        bench.ask(session, Kind.NACK, wire.Nack([(0, 1)], returned=True), 2)
    assert bench.hosted.subscriptions["s"].core.statistics()["nacked"] == 0
    bench.turn()
    assert session.records() == [(0, b"x")]
    bench.shard.close()
