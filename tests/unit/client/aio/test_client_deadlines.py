"""Every wait of a client has a deadline, and a call that fails leaves no state behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import danube
import danube.sync
from danube.client.machine.session import Session
from danube.client.records.outbox import UNANSWERED_BATCHES_HOLD, Outbox, ProducerOptions
from danube.errors import OperationTimeout
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous
from tests.unit.client.machine.test_client_session import Peer

TOPIC = "/default/t"


def test_send_nowait_where_no_loop_runs_leaves_nothing_behind(fake: FakeBroker) -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[danube.Client, danube.Producer]:
        client = await danube.connect(fake.url).open()
        return client, await client.producer(TOPIC, timeout=5).open()

    client, producer = loop.run_until_complete(begin())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no running event loop"):
            producer.send_nowait(b"nowhere")
    assert producer._open_box is not None and producer._open_box.group is None
    ack = loop.run_until_complete(asyncio.wait_for(producer.send(b"sent"), 5))
    assert ack.offset == 0
    loop.run_until_complete(client.close())
    loop.close()
    assert fake.payloads(TOPIC) == [b"sent"]


def boxed(timeout_s: int = 5) -> tuple[Peer, Outbox]:
    peer = Peer()
    peer.connect()
    producer = peer.producer(timeout_s=timeout_s)
    peer.open(7, 3)
    options = ProducerOptions(
        topic=TOPIC, name="p", timeout_ns=10**9, batch_bytes=1024, max_in_flight_bytes=4096
    )
    return peer, Outbox(options, [producer])


def test_a_group_that_is_held_for_a_busy_broker_fails_at_its_deadline() -> None:
    peer, box = boxed()
    for _ in range(UNANSWERED_BATCHES_HOLD):
        box.add(b"x", None, None)
        box.end_turn()
    peer.pass_time(2)
    group, index = box.add(b"held", None, None)
    box.end_turn()
    box.end_turn()
    peer.pass_time(4)
    assert box.group is group and not group.parts
    peer.pass_time(2)
    error = group.outcome(index)
    assert isinstance(error, OperationTimeout) and "not sent" in error.why
    assert box.group is None and error in box.take_failures()


def test_a_group_that_left_in_time_has_no_deadline_of_its_own() -> None:
    peer, box = boxed()
    for _ in range(UNANSWERED_BATCHES_HOLD + 1):
        box.add(b"x", None, None)
        box.end_turn()
    peer.acknowledge(peer.published()[0][1], 0)
    assert box.group is None and box._expiry is None


@pytest.mark.parametrize("attribute", ["when_output"])
def test_what_cannot_be_scheduled_changes_nothing(attribute: str) -> None:
    peer = Peer()
    peer.connect()

    def fail() -> None:
        raise RuntimeError("no loop")

    session: Session = peer.session
    session.when_output = fail
    with pytest.raises(RuntimeError):
        session.send(b"x")
    assert not session.has_output
    with pytest.raises(RuntimeError):
        session.mark_dirty(object())
    assert not session.has_output


@asynchronous
async def test_a_flush_that_could_not_be_scheduled_is_scheduled_by_the_next(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        connection = client._connection
        assert connection is not None
        loop = connection._loop

        class Closed:
            def call_soon(self, *_: Any) -> None:
                raise RuntimeError("Event loop is closed")

        connection._loop = Closed()  # type: ignore[assignment]
        with pytest.raises(RuntimeError):
            connection.schedule_flush()
        connection._loop = loop
        assert await client.admin.status()


@asynchronous
async def test_an_asyncio_producer_waits_for_room_no_longer_than_for_a_send(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        producer = await client.producer(
            TOPIC, timeout=0.2, batch_bytes=1024, max_in_flight_bytes=1024
        ).open()
        fake.hold()
        with pytest.raises(OperationTimeout):
            await producer.send(bytes(1100))
        assert not producer._box.has_room
        for call in (
            lambda: producer.send(b"x"),
            producer.ready,
            lambda: producer.send_many([bytes(600)] * 5),
        ):
            with pytest.raises(OperationTimeout):
                async with asyncio.timeout(5):
                    await call()
        fake.release()
        await producer.ready()
        assert (await producer.send(b"later")).offset >= 1
        await producer.close()


def test_a_blocking_producer_waits_for_room_no_longer_than_for_a_send(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client:
        producer = client.producer(TOPIC, timeout=0.2, batch_bytes=1024, max_in_flight_bytes=1024).open()
        fake.hold()
        with pytest.raises(OperationTimeout):
            producer.send(bytes(1100))
        for call in (producer.ready, lambda: producer.send_many([bytes(600)] * 5)):
            with pytest.raises(OperationTimeout):
                call()
        fake.release()
        producer.ready()
        assert producer.send(b"later").offset >= 1
        producer.close()
