"""Acknowledgements of a client whose connection comes and goes: stored, or told that they are not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import danube
import danube.sync
from danube.client.machine.reply import Reply
from danube.client.machine.sent_acks import KEPT_NS, RANGES_KEPT_MAX, SentAcks
from danube.client.machine.subscribing import PartitionConsumer
from danube.core.dispatch.consumer_window import ConsumerWindow
from danube.core.protocol import native as wire
from danube.core.protocol.native import Frame, FrameFlag, Kind
from danube.errors import (
    ClosedError,
    ConnectionFailed,
    OperationTimeout,
    OwnerMoved,
    StorageFull,
)
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous
from tests.unit.client.machine.test_client_session import Peer, send

TOPIC = "/default/t"


class Site(Peer):
    """A peer with a consumer of one partition."""

    def __init__(self) -> None:
        super().__init__()
        self.connect()
        body = wire.Subscribe(TOPIC, "s", "c", credit_records=10, credit_bytes=1000)
        self.consumer = PartitionConsumer(self.session, body, 0, True, ConsumerWindow(10, least=10, most=10))
        self.consumer.start()
        self.subscribe()

    def last(self, kind: int) -> Frame:
        return [one for one, _ in self.sent() if one.kind == kind][-1]

    def subscribe(self) -> None:
        """Answer the SUBSCRIBE that was sent last."""
        self.answer(self.last(Kind.SUBSCRIBE))

    def answer(self, frame: Frame) -> None:
        subscribed = wire.control_frame(Kind.SUBSCRIBED, wire.Subscribed(), frame.correlation, frame.handle)
        self.feed(subscribed)

    def acks(self) -> tuple[list[tuple[int, int]], Frame | None]:
        """Ranges of the ACK frames that were sent, and the one that asks for a sync."""
        ranges: list[tuple[int, int]] = []
        asking = None
        for frame, body in self.sent():
            if frame.kind == Kind.ACK:
                numbers = memoryview(bytes(body)).cast("Q").tolist()
                ranges += zip(numbers[::2], numbers[1::2], strict=True)
                asking = frame if frame.flags & FrameFlag.SYNC else asking
        return ranges, asking

    def done(self, frame: Frame | None) -> None:
        assert frame is not None
        self.feed(wire.result_frame(None, frame.correlation))


# -- the machine --------------------------------------------------------------------------------------


def test_a_sync_waits_for_a_connection_and_sends_what_was_not_sent() -> None:
    site = Site()
    site.lose()
    site.consumer.ack(3)
    reply = site.consumer.sync_acks()
    assert not reply.settled
    site.connect()
    site.subscribe()
    ranges, asking = site.acks()
    assert (3, 4) in ranges and not reply.settled
    site.done(asking)
    assert reply.settled and reply.error is None


def test_a_sync_sends_again_what_a_lost_connection_may_have_swallowed() -> None:
    site = Site()
    site.consumer.ack(1)
    site.consumer.ack_ranges([(5, 7)])
    assert site.acks() == ([(1, 2), (5, 7)], None)
    site.lose()
    site.connect()
    site.subscribe()
    assert site.acks() == ([], None)  # nobody asks, so nothing that was sought back to is acked again
    reply = site.consumer.sync_acks()
    ranges, asking = site.acks()
    assert {(1, 2), (5, 7)} <= set(ranges)
    site.done(asking)
    assert reply.result() is None
    assert site.consumer.sync_acks().settled and site.acks() == ([], None)


def test_what_was_sought_back_to_is_not_acked_again() -> None:
    site = Site()
    site.consumer.ack(1)
    site.acks()
    site.lose()
    site.connect()
    site.subscribe()
    handle = site.consumer._handle
    site.consumer.ack(3)
    site.consumer.ack(7)
    site.feed(wire.control_frame(Kind.SOUGHT, None, 0, handle))
    assert site.consumer.sync_acks().result() is None and site.acks() == ([], None)
    site.consumer.ack(2)
    reply = site.consumer.sync_acks()
    ranges, asking = site.acks()
    assert set(ranges) == {(2, 3)}
    site.done(asking)
    assert reply.result() is None


@pytest.mark.parametrize("away", ["lost", "moved"])
def test_a_question_that_is_out_is_asked_again_on_the_next_subscription(away: str) -> None:
    site = Site()
    site.consumer.ack(1)
    first, second = site.consumer.sync_acks(), None
    _, asking = site.acks()
    assert asking is not None
    site.consumer.ack(2)
    second = site.consumer.sync_acks()  # behind it
    if away == "lost":
        site.lose()
        site.connect()
    else:
        site.feed(wire.error_frame(OwnerMoved("moved"), 0, asking.handle))
        site.pass_time(1)
    assert not first.settled and not second.settled
    site.subscribe()
    ranges, again = site.acks()
    assert {(1, 2), (2, 3)} <= set(ranges) or (1, 3) in ranges
    site.done(again)
    assert first.result() is None and second.result() is None


def test_a_sync_without_a_connection_fails_at_its_deadline() -> None:
    site = Site()
    site.lose()
    site.consumer.ack(3)
    reply = site.consumer.sync_acks()
    site.pass_time(29)
    assert not reply.settled
    site.pass_time(2)
    with pytest.raises(OperationTimeout, match="no connection"):
        reply.result()


def test_a_refused_sync_tells_why_and_the_next_one_asks_for_all_of_it() -> None:
    site = Site()
    site.consumer.ack(3)
    reply = site.consumer.sync_acks()
    _, asking = site.acks()
    assert asking is not None
    site.refuse(asking, StorageFull("full"))
    with pytest.raises(StorageFull):
        reply.result()
    reply = site.consumer.sync_acks()
    site.done(site.acks()[1])
    assert reply.result() is None


def test_records_given_back_are_sent_by_a_sync_that_has_nothing_to_ask() -> None:
    site = Site()
    site.consumer.nack([(3, 4)], -1, "")
    assert site.consumer.sync_acks().settled
    assert Kind.NACK in [one.kind for one, _ in site.sent()]


def test_a_sync_of_a_consumer_that_has_ended_fails_with_its_reason() -> None:
    site = Site()
    site.consumer.ack(3)
    waiting = site.consumer.sync_acks()
    site.session.fail(ConnectionFailed("given up"))
    for reply in (waiting, site.consumer.sync_acks()):
        with pytest.raises(ConnectionFailed, match="given up"):
            reply.result()


def test_closing_waits_for_a_connection_where_acks_are_pending() -> None:
    site = Site()
    site.lose()
    site.consumer.ack(3)
    closing = site.consumer.close()
    assert not closing.settled and closing is site.consumer.close()
    site.connect()
    site.subscribe()
    frames = site.sent()
    assert [one.kind for one, _ in frames] == [Kind.ACK, Kind.CLOSE_CONSUMER]
    site.done(frames[-1][0])
    assert closing.result() is None
    assert not site.session._opened


def test_closing_fails_where_acks_are_not_sent_in_time() -> None:
    site = Site()
    site.lose()
    site.consumer.ack(3)
    closing = site.consumer.close()
    site.pass_time(6)
    with pytest.raises(OperationTimeout, match="no connection"):
        closing.result()
    assert not site.session._opened


def test_closing_goes_on_where_the_connection_is_lost_before_the_broker_has_confirmed() -> None:
    site = Site()
    site.consumer.ack(3)
    closing = site.consumer.close()
    site.lose()
    assert not closing.settled
    site.connect()
    site.subscribe()
    frames = site.sent()
    assert [one.kind for one, _ in frames] == [Kind.ACK, Kind.CLOSE_CONSUMER]
    site.done(frames[-1][0])
    assert closing.result() is None


def test_closing_is_over_where_the_connection_is_lost_and_nothing_was_acknowledged() -> None:
    site = Site()
    closing = site.consumer.close()
    assert not closing.settled
    site.lose()
    assert closing.result() is None
    site.connect()
    assert Kind.SUBSCRIBE not in [one.kind for one, _ in site.sent()]


def test_a_close_that_is_refused_is_told() -> None:
    site = Site()
    site.consumer.ack(3)
    closing = site.consumer.close()
    site.refuse(site.last(Kind.CLOSE_CONSUMER), StorageFull("full"))
    with pytest.raises(StorageFull):
        closing.result()


def test_closing_without_an_ack_needs_no_connection() -> None:
    site = Site()
    site.lose()
    assert site.consumer.close().result() is None
    assert site.consumer.close().result() is None


def test_closing_tells_once_that_acks_were_lost_with_the_session() -> None:
    site = Site()
    site.lose()
    site.consumer.ack(3)
    site.session.fail(ConnectionFailed("given up"))
    with pytest.raises(ConnectionFailed, match="given up"):
        site.consumer.close().result()
    assert site.consumer.close().result() is None


@pytest.mark.parametrize(
    "late",
    [
        lambda consumer: consumer.ack(7),
        lambda consumer: consumer.ack_ranges([(7, 9)]),
        lambda consumer: consumer.nack([(7, 8)], -1, ""),
    ],
)
def test_an_ack_after_the_close_is_refused(late: Callable[[PartitionConsumer], None]) -> None:
    site = Site()
    site.consumer.ack(6)
    site.consumer.close()
    with pytest.raises(ClosedError):
        late(site.consumer)
    site.done(site.last(Kind.CLOSE_CONSUMER))
    with pytest.raises(ClosedError):
        late(site.consumer)


def test_what_was_sent_is_kept_for_a_while_and_never_without_a_bound() -> None:
    time_ns = 0
    acks = SentAcks(lambda: time_ns)
    acks.add([(0, 1)])
    acks.add([(1, 2), (5, 6)])
    time_ns = KEPT_NS + 1
    acks.add([(6, 7)])
    time_ns = 2 * KEPT_NS + 3
    acks.add([(9, 10)])
    acks.lose()
    assert acks.take_lost() == [(6, 7), (9, 10)]
    for number in range(3 * RANGES_KEPT_MAX):
        acks.add([(2 * number, 2 * number + 1)])
    acks.lose()
    acks.lose()
    assert len(acks.take_lost()) <= 2 * RANGES_KEPT_MAX


def test_a_batch_that_was_sent_and_timed_out_is_told_to_who_flushes() -> None:
    from danube.client.records.outbox import Outbox, ProducerOptions

    peer = Peer()
    peer.connect()
    producer = peer.producer(timeout_s=5)
    peer.open(7, 3)
    options = ProducerOptions(
        topic=TOPIC, name="p", timeout_ns=10**9, batch_bytes=1024, max_in_flight_bytes=4096
    )
    box = Outbox(options, [producer])
    group, _ = box.add(b"x", None, None)
    emptied: Reply = box.emptied()
    [(_, frame, _)] = peer.published()
    peer.pass_time(6)
    assert emptied.settled
    assert [type(one) for one in box.take_failures()] == [OperationTimeout]
    peer.acknowledge(frame, 0)  # too late, and told already
    assert box.take_failures() == [] and box.in_flight_batches == 0 and group.payloads


def test_a_numbered_batch_that_timed_out_is_told_as_late() -> None:
    peer = Peer()
    peer.connect()
    producer = peer.producer(timeout_s=5)
    peer.open(7, 3)
    late: list[Any] = []
    producer.when_late = late.append
    outgoing = send(producer, b"x")
    peer.pass_time(6)
    assert late == [outgoing]


# -- the shells ---------------------------------------------------------------------------------------


@asynchronous
async def test_an_asyncio_flush_lasts_until_the_broker_is_back(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC) as producer:
            await producer.send_many([b"%d" % one for one in range(10)])
        consumer = await client.consumer(TOPIC, "s", start="earliest").open()
        messages = [await consumer.receive() for _ in range(10)]
        fake.stop()
        while client.connected:
            await asyncio.sleep(0.002)
        for message in messages:
            await message.ack()
        flushing = asyncio.ensure_future(consumer.flush())
        await asyncio.sleep(0.05)
        assert not flushing.done()
        fake.again()
        await flushing
        assert fake.partitions[TOPIC].subscriptions["s"].acked == set(range(10))
        fake.stop()
        while client.connected:
            await asyncio.sleep(0.002)
        closing = asyncio.ensure_future(consumer.close())
        await asyncio.wait_for(closing, 5)  # nothing is pending


@asynchronous
async def test_an_asyncio_close_waits_or_fails(fake: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC) as producer:
            await producer.send_many([b"a", b"b"])
        consumer = await client.consumer(TOPIC, "s", start="earliest").open()
        message = await consumer.receive()
        fake.stop()
        while client.connected:
            await asyncio.sleep(0.002)
        await message.ack()
        closing = asyncio.ensure_future(consumer.close())
        fake.again()
        await closing
        assert fake.partitions[TOPIC].subscriptions["s"].acked == {0}
        consumer = await client.consumer(TOPIC, "s").open()
        message = await consumer.receive()
        fake.stop()
        while client.connected:
            await asyncio.sleep(0.002)
        await message.ack()
        monkeypatch.setattr(PartitionConsumer.close, "__defaults__", (100_000_000,))
        with pytest.raises(OperationTimeout, match="no connection"):
            await consumer.close()
        with pytest.raises(ClosedError):
            await message.ack()


def test_a_blocking_flush_and_close_wait_or_fail(fake: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    with danube.sync.connect(fake.url) as client:
        with client.producer(TOPIC) as producer:
            producer.send_many([b"a", b"b", b"c"])
        consumer = client.consumer(TOPIC, "s", start="earliest").open()
        messages = [consumer.receive() for _ in range(3)]
        fake.stop()
        messages[0].ack()
        client._session.request_timeout_ns = 100_000_000
        with pytest.raises(OperationTimeout, match="no connection"):
            consumer.flush()
        client._session.request_timeout_ns = 20_000_000_000
        back = threading.Timer(0.05, fake.again)
        back.start()
        messages[1].ack()
        consumer.flush()
        back.join()
        assert fake.partitions[TOPIC].subscriptions["s"].acked == {0, 1}
        fake.stop()
        messages[2].ack()
        monkeypatch.setattr(PartitionConsumer.close, "__defaults__", (100_000_000,))
        with pytest.raises(OperationTimeout, match="no connection"):
            consumer.close()


def test_leaving_a_block_with_an_error_keeps_that_error(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartitionConsumer.close, "__defaults__", (100_000_000,))
    with danube.sync.connect(fake.url) as client:
        with client.producer(TOPIC) as producer:
            producer.send(b"a")
        with pytest.raises(ZeroDivisionError) as raised:
            with client.consumer(TOPIC, "s", start="earliest") as consumer:
                message = consumer.receive()
                fake.stop()
                with pytest.raises(OperationTimeout):
                    consumer.receive(timeout=0.01)
                message.ack()
                raise ZeroDivisionError
        assert "may be lost" in raised.value.__notes__[0]
