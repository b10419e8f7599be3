"""A topic or subscription that is deleted, and made again, while a client is away: it is told of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import danube
from danube.broker.partition import subscribing
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import SubscriptionNotFound, TopicNotFound
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession
from tests.unit.client.machine.test_client_closing import half_open
from tests.unit.client.machine.test_client_session import Peer, opened_at
from tests.unit.server.messages import test_grpc_publishing


def refusal(bench: Bench, session: RecordingSession, kind: Kind, body: Any) -> Exception:
    bench.ask(session, kind, body, 9)
    return wire.decode_error(session.only(Kind.ERROR).body)


# -- at the broker ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reliable", [True, False])
def test_a_handle_that_names_another_topic_of_the_name_is_refused(tmp_path: Path, reliable: bool) -> None:
    bench, session = Bench(tmp_path, reliable=reliable), RecordingSession()
    for topic_id in (0, bench.record.topic_id):
        bench.ask(session, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p", topic_id=topic_id), 1 + topic_id)
        session.only(Kind.PRODUCER_OPENED)
    other = bench.record.topic_id + 1
    body = wire.Subscribe(TOPIC, "s", "c", topic_id=other)
    assert isinstance(refusal(bench, session, Kind.SUBSCRIBE, body), TopicNotFound)
    body_of_producer = wire.OpenProducer(TOPIC, "p", 7, 3, topic_id=other)
    assert isinstance(refusal(bench, session, Kind.OPEN_PRODUCER, body_of_producer), TopicNotFound)
    assert not bench.hosted.subscriptions and not bench.hosted.lossy
    bench.shard.close()


def test_who_comes_back_to_a_deleted_subscription_does_not_make_it_anew(tmp_path: Path) -> None:
    bench, session = Bench(tmp_path), RecordingSession()
    epoch = bench.subscribe(session).epoch
    assert epoch == bench.hosted.core.epoch > 0
    bench.ask(session, Kind.CLOSE_CONSUMER, None, 2)
    session.take()
    bench.admin(session, "delete_subscription", subscription="s")
    error = refusal(bench, session, Kind.SUBSCRIBE, wire.Subscribe(TOPIC, "s", "c", epoch=epoch))
    assert isinstance(error, SubscriptionNotFound) and not bench.hosted.subscriptions
    bench.subscribe(session)  # a new consumer does
    session.take()
    assert bench.subscribe(session, handle=3, epoch=epoch).epoch == epoch
    bench.shard.close()


def test_who_comes_back_to_a_subscription_that_keeps_no_file_makes_it_anew(tmp_path: Path) -> None:
    bench, session = Bench(tmp_path, reliable=False), RecordingSession()
    assert bench.subscribe(session, epoch=5).epoch == bench.hosted.core.epoch
    bench.shard.close()


@pytest.mark.parametrize(
    "budget, epoch, lost", [(None, 7, False), (None, 8, False), (object(), 7, False), (object(), 8, True)]
)
def test_only_after_a_takeover_may_a_subscription_be_one_that_nobody_has_heard_of(
    budget: Any, epoch: int, lost: bool
) -> None:
    hosted = SimpleNamespace(budget=budget, core=SimpleNamespace(epoch=7))
    assert subscribing._may_be_lost(cast(Any, hosted), epoch) is lost


def test_grpc_sends_that_wait_are_not_put_into_the_next_topic(tmp_path: Path) -> None:
    door = test_grpc_publishing.Door(tmp_path)
    door.send()
    door.turn()
    target = next(iter(door.publishing.targets.values()))
    waiting = door.send(b"old")
    door.publishing._read()
    target.groups.append(target.in_flight.popitem()[1] if target.in_flight else target.groups.pop())
    door.bench.shard.delete_topic(door.topic)
    door.bench.proposals.apply(test_grpc_publishing.DeleteTopic(topic=test_grpc_publishing.TOPIC))
    door.topic = door.bench.proposals.create(test_grpc_publishing.TOPIC)
    number = door.send(b"new")
    door.turn()
    assert isinstance(door.answers[waiting], TopicNotFound)
    assert door.answers[number] == number and door.stored() == [b"new"]


# -- the client's machine -----------------------------------------------------------------------------


def test_a_consumer_comes_back_as_one_that_was_there() -> None:
    peer, consumer, frame = half_open(Kind.SUBSCRIBE)
    subscribed = wire.Subscribed(epoch=12)
    peer.feed(wire.control_frame(Kind.SUBSCRIBED, subscribed, frame.correlation, frame.handle))
    peer.lose()
    peer.connect()
    [(frame, body)] = peer.sent()
    assert wire.decode_control(body, wire.Subscribe).epoch == 12
    peer.refuse(frame, SubscriptionNotFound("deleted"))
    assert isinstance(consumer.failure, SubscriptionNotFound)


def test_a_producer_that_comes_back_to_another_topic_fails_what_it_holds() -> None:
    peer = Peer()
    producer = opened_at(peer)
    peer.lose()
    peer.connect()
    [(frame, _)] = peer.sent()
    peer.refuse(frame, TopicNotFound("deleted"))
    assert isinstance(producer.failure, TopicNotFound)


# -- the whole client ---------------------------------------------------------------------------------


@asynchronous
async def test_a_topic_that_is_made_again_while_a_client_is_away_gets_nothing_of_it(fake: FakeBroker) -> None:
    topic = "/default/again"
    async with danube.connect(fake.url) as client:
        producer = await client.producer(topic).open()
        await producer.send_many([b"old"] * 5)
        consumer = await client.consumer(topic, "s", start="earliest").open()
        messages = [await consumer.receive() for _ in range(5)]
        fake.stop()
        while client.connected:
            await asyncio.sleep(0.002)
        for message in messages:
            await message.ack()
        pending = producer.send_nowait(b"pending")
        policy = fake.topics.pop(topic)[0]
        fake.create(topic, 0, policy)
        fake.again()
        with pytest.raises(TopicNotFound):
            await consumer.receive()
        with pytest.raises(TopicNotFound):
            await consumer.flush()
        with pytest.raises(TopicNotFound):
            await pending
        with pytest.raises(TopicNotFound):
            await producer.send(b"later")
        with pytest.raises(TopicNotFound):
            await consumer.close()  # acks were given that nobody has
        async with client.producer(topic) as other, client.consumer(topic, "s", start="earliest") as reader:
            await other.send(b"new")
            assert (await reader.receive()).payload == b"new"
    assert fake.payloads(topic) == [b"new"]


@asynchronous
async def test_a_subscription_that_is_deleted_while_a_client_is_away_stays_deleted(fake: FakeBroker) -> None:
    topic = "/default/t"
    async with danube.connect(fake.url) as client:
        async with client.producer(topic) as producer:
            await producer.send(b"x")
        consumer = await client.consumer(topic, "s", start="earliest").open()
        await consumer.receive()
        fake.stop()
        while client.connected:
            await asyncio.sleep(0.002)
        fake.partitions[topic].subscriptions.clear()
        fake.again()
        with pytest.raises(SubscriptionNotFound):
            await consumer.receive()
        assert not fake.partitions[topic].subscriptions
