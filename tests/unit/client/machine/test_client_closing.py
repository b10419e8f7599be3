"""What a client gave up between question and answer is undone at the broker, and closing always closes."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import danube
import danube.sync
from danube.client.machine.publishing import PartitionProducer
from danube.client.machine.subscribing import PartitionConsumer
from danube.core.dispatch.consumer_window import ConsumerWindow
from danube.core.partition.policy import TopicPolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import ClosedError, OperationTimeout, StorageFull, SubscriptionBusy
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous
from tests.unit.client.machine.test_client_session import SECOND_NS, Peer

TOPIC = "/default/t"


def kinds(peer: Peer) -> list[tuple[int, int]]:
    return [(one.kind, one.handle) for one, _ in peer.sent()]


def half_open(kind: int) -> tuple[Peer, PartitionConsumer | PartitionProducer, wire.Frame]:
    """Something whose open is sent and not answered."""
    peer = Peer()
    peer.connect()
    opening: PartitionConsumer | PartitionProducer
    if kind == Kind.SUBSCRIBE:
        body = wire.Subscribe(TOPIC, "s", "c", credit_records=10, credit_bytes=1000)
        opening = PartitionConsumer(peer.session, body, 0, True, ConsumerWindow(10, least=10, most=10))
    else:
        opening = PartitionProducer(peer.session, "p", TOPIC, 0, 30 * SECOND_NS)
    opening.start()
    [(frame, _)] = peer.sent()
    assert frame.kind == kind
    return peer, opening, frame


def answer(frame: wire.Frame) -> bytes:
    if frame.kind == Kind.SUBSCRIBE:
        return wire.control_frame(Kind.SUBSCRIBED, wire.Subscribed(), frame.correlation, frame.handle)
    opened = wire.ProducerOpened(7, 3, 0)
    return wire.control_frame(Kind.PRODUCER_OPENED, opened, frame.correlation, frame.handle)


OPENS = [(Kind.SUBSCRIBE, Kind.CLOSE_CONSUMER), (Kind.OPEN_PRODUCER, Kind.CLOSE_PRODUCER)]


@pytest.mark.parametrize("opens, closes", OPENS)
def test_closing_what_is_not_open_yet_undoes_it(opens: int, closes: int) -> None:
    peer, opening, frame = half_open(opens)
    closed = opening.close()
    [(close, _)] = peer.sent()
    assert (close.kind, close.handle) == (closes, frame.handle) and not closed.settled
    peer.feed(wire.result_frame(None, close.correlation))
    assert closed.settled and not peer.session._opened
    peer.feed(answer(frame))  # a broker that took the close first
    assert kinds(peer) == [(closes, frame.handle)]


@pytest.mark.parametrize("opens, closes", OPENS)
def test_an_open_that_is_answered_too_late_is_undone(opens: int, closes: int) -> None:
    peer, _, frame = half_open(opens)
    peer.pass_time(31)
    assert (closes, frame.handle) in kinds(peer)
    peer.feed(answer(frame))
    assert (closes, frame.handle) in kinds(peer)


@pytest.mark.parametrize("opens, closes", OPENS)
def test_a_refusal_that_comes_late_needs_no_undoing(opens: int, closes: int) -> None:
    peer, opening, frame = half_open(opens)
    opening.close()
    peer.sent()
    peer.refuse(frame, SubscriptionBusy("busy"))
    assert kinds(peer) == []


@pytest.mark.parametrize("opens, closes", OPENS)
def test_a_lost_connection_undoes_it_as_well(opens: int, closes: int) -> None:
    peer, opening, _ = half_open(opens)
    closed = opening.close()
    peer.lose()
    assert closed.settled
    peer.connect()
    assert kinds(peer) == []
    assert opening.close().settled


# -- the shells ---------------------------------------------------------------------------------------


def consumers(fake: FakeBroker) -> int:
    with fake.lock:
        return sum(
            len(subscription.consumers)
            for partition in fake.partitions.values()
            for subscription in partition.subscriptions.values()
        )


def producers(fake: FakeBroker) -> int:
    with fake.lock:
        return sum(len(connection.handles) for connection in fake.connections)


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
@pytest.mark.parametrize("what", ["consumer", "producer"])
@asynchronous
async def test_an_asyncio_open_that_is_cut_leaves_nobody(fake: FakeBroker, what: str, how: str) -> None:
    fake.create(TOPIC, 3, TopicPolicy())
    async with danube.connect(fake.url) as client:
        await client.admin.status()
        opens = Kind.SUBSCRIBE if what == "consumer" else Kind.OPEN_PRODUCER

        def hold(connection: Any, frame: wire.Frame) -> None:
            fake.hold_answers |= frame.kind == opens

        fake.when_frame = hold
        opened = client.consumer(TOPIC, "s", "exclusive") if what == "consumer" else client.producer(TOPIC)
        if how == "timed out":
            client._session.request_timeout_ns = 50_000_000
            with pytest.raises(OperationTimeout):
                await opened.open()
        else:
            opening = asyncio.ensure_future(opened.open())
            await asyncio.to_thread(fake.wait_for, lambda: fake.seen(opens) == 3)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        await asyncio.to_thread(fake.wait_for, lambda: producers(fake) == 0)
        assert consumers(fake) == 0
        fake.when_frame = None
        fake.release()
        client._session.request_timeout_ns = 10_000_000_000
        async with client.consumer(TOPIC, "s", "exclusive"):
            assert consumers(fake) == 3


@asynchronous
async def test_closing_while_it_subscribes_again_leaves_nobody(fake: FakeBroker) -> None:
    fake.create(TOPIC, 0, TopicPolicy())
    async with danube.connect(fake.url) as client:
        consumer = await client.consumer(TOPIC, "s", "exclusive").open()

        def hold(connection: Any, frame: wire.Frame) -> None:
            fake.hold_answers |= frame.kind == Kind.SUBSCRIBE

        fake.when_frame = hold
        fake.drop_connections()
        await asyncio.to_thread(fake.wait_for, lambda: fake.seen(Kind.SUBSCRIBE) == 2)
        closing = asyncio.ensure_future(consumer.close())
        await asyncio.to_thread(fake.wait_for, lambda: fake.seen(Kind.CLOSE_CONSUMER) == 1)
        assert consumers(fake) == 0
        fake.release()
        await closing


@pytest.mark.parametrize("what", ["consumer", "producer"])
@asynchronous
async def test_what_is_closed_while_it_opens_does_not_open(fake: FakeBroker, what: str) -> None:
    fake.create(TOPIC, 0, TopicPolicy())
    async with danube.connect(fake.url) as client:
        opened = client.consumer(TOPIC, "s") if what == "consumer" else client.producer(TOPIC)
        fake.hold()
        opening = asyncio.ensure_future(opened.open())
        await asyncio.to_thread(fake.wait_for, lambda: fake.seen(Kind.LOOKUP))
        await opened.close()
        fake.release()
        with pytest.raises(ClosedError):
            await opening
        await asyncio.to_thread(fake.wait_for, lambda: producers(fake) == 0)


@asynchronous
async def test_a_cancelled_close_of_the_client_closes_its_connection(fake: FakeBroker) -> None:
    client = await danube.connect(fake.url).open()
    producer = await client.producer(TOPIC).open()
    fake.hold()
    sending = producer.send_nowait(b"x")
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(client.close())
    await asyncio.to_thread(fake.wait_for, lambda: fake.seen(Kind.PUBLISH))
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await asyncio.to_thread(fake.wait_for, lambda: not fake.connections)
    with pytest.raises(ClosedError):
        await sending


@asynchronous
async def test_a_client_that_is_closed_while_it_connects_does_not_stay(fake: FakeBroker) -> None:
    client = danube.connect(fake.url)
    fake.hold()
    opening = asyncio.ensure_future(client.open())
    await asyncio.to_thread(fake.wait_for, lambda: fake.seen(Kind.HELLO))
    await client.close()
    fake.release()
    with pytest.raises(ClosedError):
        await opening
    await asyncio.to_thread(fake.wait_for, lambda: not fake.connections)


@asynchronous
async def test_the_error_that_ends_a_block_is_kept_where_closing_fails_too(fake: FakeBroker) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        async with danube.connect(fake.url) as client:
            producer = await client.producer(TOPIC).open()
            fake.refuse(Kind.PUBLISH, StorageFull("full"))
            producer.send_nowait(b"x")
            raise ZeroDivisionError
    assert "full" in raised.value.__notes__[0]
    with pytest.raises(ZeroDivisionError) as raised:
        with danube.sync.connect(fake.url) as blocking:
            other = blocking.producer(TOPIC).open()
            fake.refuse(Kind.PUBLISH, StorageFull("full"))
            other.send_nowait(b"x")
            raise ZeroDivisionError
    assert "full" in raised.value.__notes__[0]


class Alarm(Exception):
    """Raised by a signal's handler."""


@pytest.fixture
def alarms() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", ["consumer", "producer"])
def test_a_blocking_open_that_a_signal_cuts_leaves_nobody(fake: FakeBroker, what: str, alarms: None) -> None:
    fake.create(TOPIC, 0, TopicPolicy())
    opens = Kind.SUBSCRIBE if what == "consumer" else Kind.OPEN_PRODUCER
    with danube.sync.connect(fake.url) as client:

        def hold(connection: Any, frame: wire.Frame) -> None:
            if frame.kind == opens:
                fake.hold_answers = True
                threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGALRM)).start()

        main = threading.main_thread().ident
        fake.when_frame = hold
        opened = client.consumer(TOPIC, "s", "exclusive") if what == "consumer" else client.producer(TOPIC)
        with pytest.raises(Alarm):
            opened.open()
        fake.wait_for(lambda: producers(fake) == 0)  # although nobody reads any more
        fake.when_frame = None
        fake.release()
        with client.consumer(TOPIC, "s", "exclusive"):
            assert consumers(fake) == 1


@pytest.mark.parametrize("what", ["consumer", "producer"])
def test_a_signal_behind_the_last_answer_leaves_nobody(
    fake: FakeBroker, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create(TOPIC, 0, TopicPolicy())
    with danube.sync.connect(fake.url) as client:
        opened = client.consumer(TOPIC, "s", "exclusive") if what == "consumer" else client.producer(TOPIC)
        run = client._connection.run

        def cut(plan: Any) -> None:
            run(plan)
            raise Alarm

        with monkeypatch.context() as patched, pytest.raises(Alarm):
            patched.setattr(client._connection, "run", cut)
            opened.open()
        fake.wait_for(lambda: producers(fake) == 0)


@pytest.mark.parametrize("what", ["consumer", "producer"])
def test_what_another_thread_closes_while_it_opens_does_not_open(fake: FakeBroker, what: str) -> None:
    fake.create(TOPIC, 0, TopicPolicy())
    with danube.sync.connect(fake.url) as client:
        opened = client.consumer(TOPIC, "s") if what == "consumer" else client.producer(TOPIC)

        def close(connection: Any, frame: wire.Frame) -> None:
            if frame.kind == Kind.LOOKUP:
                opened.close()

        fake.when_frame = close
        with pytest.raises(ClosedError):
            opened.open()
        fake.wait_for(lambda: producers(fake) == 0)
