"""Why no records come: the broker's word reaches a consumer of either client, and a Spark task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

import danube
from danube.client.blocking.client import connect as connect_blocking
from danube.client.machine.subscribing import PartitionConsumer
from danube.core.protocol import native as wire
from danube.errors import DanubeError, FetchPending, ObjectMissing, OperationTimeout
from danube.spark.history import tail
from danube.spark.history.tail import PartitionEnds, Tail
from tests.fakes.broker import ConsumerHandle, FakeBroker
from tests.unit.asynchronous import asynchronous

TOPIC = "/default/orders"
GONE = ObjectMissing("there is no object a/b.seg", hint="restore it", key="a/b.seg")


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


def tell(fake: FakeBroker, reason: DanubeError | None) -> None:
    """What a broker says to each consumer."""
    with fake.lock:
        for connection in fake.connections:
            for number, handle in connection.handles.items():
                if isinstance(handle, ConsumerHandle):
                    connection.write(wire.waiting_frame(reason, number))


def test_a_frame_of_a_reason_and_of_none() -> None:
    frame = wire.waiting_frame(GONE, 7)
    found = wire.decode_error(frame[wire.FRAME_HEADER_BYTES :].rstrip(b"\0"))
    assert (
        isinstance(found, ObjectMissing)
        and found.facts == {"key": "a/b.seg"}
        and frame[4] == wire.Kind.WAITING
    )
    assert len(wire.waiting_frame(None, 7)) == wire.FRAME_HEADER_BYTES and wire.handle_of(frame) == 7


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@asynchronous
async def test_a_receive_that_times_out_names_the_broker_s_reason(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC) as producer:
        async with client.consumer(TOPIC, subscription="s") as consumer:
            with pytest.raises(OperationTimeout) as plain:
                await consumer.receive(0.01)
            assert plain.value.why == "" and consumer.waits_for is None
            tell(fake, GONE)
            await until(lambda: consumer.waits_for is not None)
            with pytest.raises(OperationTimeout) as told:
                await consumer.receive(0.01)
            assert "no object a/b.seg" in str(told.value) and told.value.hint == "restore it"
            assert isinstance(told.value.__cause__, ObjectMissing)
            await producer.send(b"it goes on")
            assert (await consumer.receive(20)).payload == b"it goes on"
            assert consumer.waits_for is None, "a delivery takes it back"
            for over in (lambda: tell(fake, None), fake.drop_connections):
                tell(fake, GONE)
                await until(lambda: consumer.waits_for is not None)
                over()
                await until(lambda: consumer.waits_for is None)


def test_the_blocking_client_names_it_too(fake: FakeBroker) -> None:
    with connect_blocking(fake.url) as client, client.producer(TOPIC):
        with client.consumer(TOPIC, subscription="s") as consumer:
            tell(fake, GONE)
            for _ in range(400):
                with pytest.raises(OperationTimeout) as told:
                    consumer.receive(0.05)
                if consumer.waits_for is not None:
                    break
            assert "no object a/b.seg" in str(told.value)
            assert isinstance(told.value.__cause__, ObjectMissing)


def test_a_spark_task_that_is_sent_nothing_names_it(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_WAIT_S", 0.2)
    with connect_blocking(fake.url) as client, client.producer(TOPIC):
        pass
    start = PartitionConsumer.start

    def told(consumer: PartitionConsumer) -> None:
        start(consumer)
        consumer.opened.when_settled(lambda _: consumer.on_waiting(GONE))

    monkeypatch.setattr(PartitionConsumer, "start", told)
    reader = Tail(fake.url)
    with pytest.raises(OperationTimeout, match=r"no object a/b\.seg"):
        next(iter(reader.read(TOPIC, 0, 5)))
    reader.close()


def test_a_spark_job_takes_no_unknown_start_for_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "_WAIT_S", 0.05)
    monkeypatch.setattr(tail, "_ASK_S", 0.01)
    starts: list[int | None] = [None, None, 4]

    def described(_: str) -> list[dict[str, Any]]:
        start = starts.pop(0) if len(starts) > 1 else starts[0]
        return [{"partition": "/default/t", "start": start, "high_watermark": 9}]

    reader = Tail("danube://nowhere:1")
    reader._client = cast(Any, SimpleNamespace(admin=SimpleNamespace(topic_ends=described)))
    assert reader.ends("/default/t") == [("/default/t", PartitionEnds(4, 9))]
    starts[:] = [None]
    with pytest.raises(FetchPending, match="it is not known where /default/t begins"):
        reader.ends("/default/t")
