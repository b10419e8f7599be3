"""ReceiveMessages, Ack and Nack between a door and a shard: credit, take-over, ends, settled turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from danube.core.metadata.commands import KnownConsumer
from danube.core.metadata.known_consumers import consumer_identity
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import (
    Draining,
    InvalidArgument,
    OwnerMoved,
    SubscriptionBusy,
    SubscriptionNotFound,
    TopicNotFound,
)
from danube.server.messages import consuming, settling
from danube.server.messages.consuming import Consuming, GrpcConsumer, Place
from danube.server.messages.session import BrokerSession
from danube.server.messages.settling import Settling, ranges_of
from danube.server.proto.DanubeApi_pb2 import AckRequest, AckResponse, MsgID, NackRequest, StreamMessage
from tests.unit.broker_parts import RecordingSession, RoutedBench, batch, numbered

TOPIC = "/default/grpc"


class FakeStream:
    """A stream of an HTTP/2 machine, as far as a consumer sees it."""

    def __init__(self) -> None:
        self.local_closed = False
        self.queued_bytes = 0
        self.context: Any = None


class Connection:
    """A connection that keeps what its streams were sent."""

    def __init__(self) -> None:
        self.congested = False
        self.headed: list[FakeStream] = []
        self.data: dict[FakeStream, bytes] = {}
        self.ends: dict[FakeStream, Any] = {}
        self.answers: dict[Any, Any] = {}
        self.consumed_bytes = 0
        self.blocked = False  # what is sent waits for the client's window

    def send_head(self, stream: FakeStream, block: bytes) -> None:
        self.headed.append(stream)

    def send_data(self, stream: FakeStream, data: bytes) -> None:
        self.data[stream] = self.data.get(stream, b"") + data
        if self.blocked:
            stream.queued_bytes += len(data)

    def end(self, stream: FakeStream, error: Any) -> None:
        stream.local_closed = True
        self.ends[stream] = error

    def payloads(self, stream: FakeStream) -> list[bytes]:
        data, found, position = self.data.get(stream, b""), [], 0
        while position < len(data):
            size = int.from_bytes(data[position + 1 : position + 5], "big")
            found.append(StreamMessage.FromString(data[position + 5 : position + 5 + size]).payload)
            position += 5 + size
        return found

    def answer(self, stream: Any, message: bytes, size: int = 0) -> None:
        self.answers[stream] = AckResponse.FromString(message[5:]).request_id
        self.consumed_bytes += size

    def answer_all(self, streams: Sequence[Any], messages: Sequence[bytes], size: int) -> None:
        self.consumed_bytes += size
        for stream, message in zip(streams, messages, strict=True):
            self.answer(stream, message)

    def answer_error(self, stream: Any, error: BaseException) -> None:
        self.answers[stream] = error

    def consumed(self, stream: Any, size: int) -> None:
        self.consumed_bytes += size


class Door:
    """The consuming and settling halves on a bench, and a native producer."""

    def __init__(self, root: Path) -> None:
        self.bench = RoutedBench(root)
        self.topic = self.bench.proposals.create(TOPIC, reliable=True)
        self.session = BrokerSession(self.bench.router, lambda: None)
        self.known: dict[int, KnownConsumer] = {}
        self.consuming = Consuming(self.session, self)
        self.settling = Settling(self.session, self.bench.shard.settle)
        self.connection = Connection()
        self.producer = RecordingSession()
        self.bench.request(self.producer, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 1)
        self.producer.take()

    # Known, in a dict

    def find(self, consumer_id: int) -> KnownConsumer | None:
        return self.known.get(consumer_id)

    def place(self, identity: KnownConsumer) -> Place:
        return Place(TOPIC, self.topic.policy.reliable)

    # what clients do

    def identity(self, name: str = "c", mode: str = "shared") -> KnownConsumer:
        number = consumer_identity(self.topic.topic_id, 0, "s", name)
        found = KnownConsumer(number, self.topic.topic_id, 0, "s", mode, name)
        self.known[number] = found
        return found

    def publish(self, data: bytes) -> None:
        self.bench.correlation += 1
        assert self.bench.route(
            self.producer, wire.frame_header(Kind.PUBLISH, len(data), self.bench.correlation, 1) + data
        )
        self.turn()

    def turn(self) -> None:
        self.settling.hand_over()
        self.session.offer_held()
        self.bench.turn()
        self.bench.syncer.step()
        self.bench.turn()

    def run(self, work: Any) -> Any:
        """Run a coroutine of the door while the bench takes its turns."""

        async def both() -> Any:
            task = asyncio.ensure_future(work)
            for _ in range(50):
                await asyncio.sleep(0)
                self.turn()
                if task.done():
                    break
            return await task

        return asyncio.run(both())

    def receive(self, identity: KnownConsumer, connection: Connection | None = None) -> FakeStream:
        stream = FakeStream()
        connection = connection or self.connection
        self.run(self.consuming.receive(identity.consumer_id, cast(Any, connection), cast(Any, stream)))
        self.turn()
        return stream

    @property
    def links(self) -> list[str]:
        hosted = self.bench.shard.partitions.get(TOPIC)
        host = None if hosted is None else hosted.subscriptions.get("s")
        return [] if host is None else [link.name for link in host.links.values()]


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


def subscribe(door: Door, identity: KnownConsumer, connection: Connection | None = None) -> GrpcConsumer:
    found = door.run(door.consuming.subscribe(identity, cast(Any, connection or door.connection)))
    assert isinstance(found, GrpcConsumer)
    return found


def test_nothing_is_delivered_before_receive(door: Door) -> None:
    identity = door.identity()
    consumer = subscribe(door, identity)
    door.publish(numbered(3))
    assert not door.connection.data
    stream = door.receive(identity)
    assert door.connection.headed == [stream] and door.consuming.find(identity.consumer_id) is consumer
    assert door.connection.payloads(stream) == [b"0", b"1", b"2"]


def test_credit_is_given_back_as_the_client_takes(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming, "CREDIT_RECORDS", 4)
    identity = door.identity(mode="failover")
    stream = (subscribe(door, identity), door.receive(identity))[1]
    connection = door.connection
    connection.blocked = True
    for start in range(0, 12, 2):
        door.publish(numbered(2, start))
    assert len(connection.payloads(stream)) == 4, "no more than the credit while the client reads nothing"
    connection.blocked, stream.queued_bytes = False, 0
    connection.congested = True
    stream.context.give_credit()
    door.turn()
    assert len(connection.payloads(stream)) == 4, "the socket itself is full"
    connection.congested = False
    for _ in range(6):
        stream.context.give_credit()
        door.turn()
    assert [int(payload) for payload in connection.payloads(stream)] == list(range(12))


@pytest.mark.parametrize(("records", "size"), [(8, 1 << 20), (1_000, 400)], ids=["records", "bytes"])
def test_credit_is_given_back_when_half_of_it_is_used(
    door: Door, monkeypatch: pytest.MonkeyPatch, records: int, size: int
) -> None:
    monkeypatch.setattr(consuming, "CREDIT_RECORDS", records)
    monkeypatch.setattr(consuming, "CREDIT_BYTES", size)
    given: list[tuple[int, int]] = []
    credit = door.consuming.credit
    monkeypatch.setattr(
        door.consuming, "credit", lambda one, n, size: (given.append((n, size)), credit(one, n, size))
    )
    identity = door.identity(mode="failover")
    stream = (subscribe(door, identity), door.receive(identity))[1]
    assert given == [(records, size)]
    for number in range(20):
        door.publish(numbered(1, number))
    assert [int(payload) for payload in door.connection.payloads(stream)] == list(range(20))
    used = given[1:]
    assert 0 < len(used) < 20, "not for each record"
    assert all(2 * count >= records or 2 * spent >= size for count, spent in used)


def test_consumers_of_a_connection_share_its_credit(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming, "CONNECTION_CREDIT_BYTES", 1000)
    given: list[int] = []
    credit = door.consuming.credit
    monkeypatch.setattr(
        door.consuming, "credit", lambda one, n, size: (given.append(size), credit(one, n, size))
    )
    for name in ("a", "b", "c", "d"):
        subscribe(door, door.identity(name))
    for name in ("a", "b", "c", "d"):
        door.receive(door.identity(name))
    assert given == [250] * 4


def test_a_new_stream_takes_over_and_gets_what_the_old_one_held(door: Door) -> None:
    identity = door.identity()
    subscribe(door, identity)
    first = door.receive(identity)
    door.publish(numbered(3))
    second = door.receive(identity)
    assert door.connection.ends == {first: None} and door.links == ["c"]
    assert door.connection.payloads(second) == [b"0", b"1", b"2"]
    other = Connection()
    third = door.receive(identity, other)
    assert door.connection.ends[second] is None and other.payloads(third) == [b"0", b"1", b"2"]


def test_a_take_over_elsewhere_ends_the_stream_well(door: Door) -> None:
    identity = door.identity()
    subscribe(door, identity)
    stream = door.receive(identity)
    native = RecordingSession(9)
    body = wire.Subscribe(TOPIC, "s", "c")
    door.bench.request(native, Kind.SUBSCRIBE, body, 5)
    door.turn()
    assert door.connection.ends == {stream: None} and door.consuming.find(identity.consumer_id) is None


def test_ends_of_streams_say_why(door: Door) -> None:
    identity = door.identity()
    subscribe(door, identity)
    stream = door.receive(identity)
    door.bench.shard.partitions[TOPIC].close_handles(OwnerMoved("the owner restarted"))
    assert isinstance(door.connection.ends[stream], OwnerMoved)
    stream = door.receive(identity)
    door.bench.shard.delete_topic(door.topic)
    assert isinstance(door.connection.ends[stream], TopicNotFound)
    assert not door.links


def test_a_client_that_leaves_is_forgotten_here_and_at_the_owner(door: Door) -> None:
    one, two = door.identity("one"), door.identity("two")
    subscribe(door, one)
    door.receive(one)
    subscribe(door, two)
    door.publish(numbered(1))
    door.consuming.connection_lost(door.connection)
    door.turn()
    assert door.links == [] and door.consuming.of_connection(door.connection) == []
    assert door.connection.payloads(door.receive(one)) == [b"0"], "what it held comes again"


def test_a_client_that_leaves_while_it_is_joined_again(door: Door) -> None:
    identity = door.identity()
    stream = FakeStream()
    stream.local_closed = True
    door.run(door.consuming.receive(identity.consumer_id, cast(Any, door.connection), cast(Any, stream)))
    door.turn()
    assert door.links == [] and not door.connection.headed


def test_a_consumer_that_its_owner_closes_in_the_turn_in_which_it_joins_is_told(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream would wait for ever: the owner has said already that it is closed."""
    joined = door.session.call

    async def closed_at_once(kind: Kind, body: Any, handle: int = 0) -> Any:
        answer = await joined(kind, body, handle)
        door.bench.shard.partitions[TOPIC].close_handles(OwnerMoved("the partition moves"))
        return answer

    monkeypatch.setattr(door.session, "call", closed_at_once)
    monkeypatch.setattr(consuming, "UNKNOWN_DELAY_S", 0)
    identity = door.identity()
    with pytest.raises(OwnerMoved, match="while it joined"):
        subscribe(door, identity)
    with pytest.raises(OwnerMoved, match="while it joined"):
        door.receive(identity)
    assert not door.connection.headed and door.consuming.find(identity.consumer_id) is None


def test_a_refused_subscribe_leaves_nothing(door: Door) -> None:
    subscribe(door, door.identity("one", "exclusive"))
    with pytest.raises(SubscriptionBusy):
        subscribe(door, door.identity("two", "exclusive"))
    assert door.links == ["one"] and door.consuming.find(door.identity("two").consumer_id) is None
    one = door.consuming.find(door.identity("one").consumer_id)
    assert one is not None
    door.consuming.drop(one)
    door.consuming.drop(one)
    door.turn()
    assert door.links == []


def test_an_unknown_consumer_is_answered_after_a_pause(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming, "UNKNOWN_DELAY_S", 0)
    with pytest.raises(OwnerMoved, match="not known"):
        asyncio.run(door.consuming.receive(4711, cast(Any, door.connection), cast(Any, FakeStream())))


def test_a_stopping_broker_ends_every_stream(door: Door) -> None:
    identity = door.identity()
    subscribe(door, identity)
    stream = door.receive(identity)
    door.consuming.drain()
    door.turn()
    assert isinstance(door.connection.ends[stream], Draining) and door.links == []
    with pytest.raises(Draining):
        subscribe(door, identity)


# -- settling -----------------------------------------------------------------------------------------


def place(offset: int, topic: str = TOPIC) -> MsgID:
    return MsgID(topic_name=topic, topic_offset=offset)


def ack(door: Door, number: int, offset: int, topic: str = TOPIC, subscription: str = "s") -> None:
    request = AckRequest(request_id=number, msg_id=place(offset, topic), subscription_name=subscription)
    door.settling.ack(door.connection, cast(Any, number), request.SerializeToString(), 10)


def nack(door: Door, number: int, offset: int, **fields: Any) -> None:
    request = NackRequest(request_id=number, msg_id=place(offset), subscription_name="s", **fields)
    door.settling.nack(door.connection, cast(Any, number), request.SerializeToString(), 10)


def test_acks_of_a_turn_are_settled_together(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = door.identity()
    subscribe(door, identity)
    door.receive(identity)
    door.publish(numbered(10))
    monkeypatch.setattr(settling, "SETTLED_PER_REQUEST_MAX", 4)
    for offset in range(9):
        ack(door, 100 + offset, offset)
    nack(door, 200, 9, delay_ms=0, reason="bad")
    assert not door.connection.answers and not door.connection.consumed_bytes
    door.turn()
    assert door.connection.consumed_bytes == 100
    assert door.connection.answers == {100 + n: 100 + n for n in range(9)} | {200: 200}
    assert door.bench.shard.partitions[TOPIC].subscriptions["s"].core.ack_floor == 9


def test_a_nack_without_delay_follows_the_policy(door: Door) -> None:
    identity = door.identity()
    subscribe(door, identity)
    stream = door.receive(identity)
    door.publish(numbered(1))
    nack(door, 1, 0)
    door.turn()
    assert door.connection.answers == {1: 1} and door.connection.payloads(stream) == [b"0"], "later"
    stats = door.bench.shard.partitions[TOPIC].subscriptions["s"].core.statistics()
    assert stats["in_flight"] == 0


def test_acks_that_name_nothing_are_told(door: Door) -> None:
    ack(door, 1, 0, subscription="nobody")
    ack(door, 2, 0, topic="/default/none")
    door.turn()
    assert isinstance(door.connection.answers[1], SubscriptionNotFound)
    assert isinstance(door.connection.answers[2], TopicNotFound)
    for data, words in ((b"\xff", "not a danube"), (b"", "msg_id is missing")):
        for take in (door.settling.ack, door.settling.nack):
            with pytest.raises(InvalidArgument, match=words):
                take(door.connection, cast(Any, 3), data, 10)
    with pytest.raises(InvalidArgument, match="cannot be an offset"):
        ack(door, 4, 2**63)
    door.turn()


def test_ranges_cover_exactly_what_was_acked(source: Any) -> None:
    for _ in range(200):
        offsets = [source.randrange(40) for _ in range(source.randrange(30))]
        ranges = np.frombuffer(ranges_of(offsets), "<u8").reshape(-1, 2)
        covered = [offset for start, end in ranges.tolist() for offset in range(start, end)]
        assert covered == sorted(set(offsets))


def test_a_native_batch_keeps_its_producer_id(door: Door) -> None:
    identity = door.identity()
    subscribe(door, identity)
    stream = door.receive(identity)
    door.publish(batch(b"plain", producer_name="p"))
    data = door.connection.data[stream]
    assert StreamMessage.FromString(data[5:]).msg_id.producer_id > 0


def test_a_delivery_that_cannot_be_told_ends_the_stream(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = door.identity()
    subscribe(door, identity)
    stream = door.receive(identity)

    def fail(*_: Any, **__: Any) -> bytes:
        raise InvalidArgument("a name is not UTF-8")

    monkeypatch.setattr(consuming, "framed_messages", fail)
    door.publish(numbered(1))
    assert isinstance(door.connection.ends[stream], InvalidArgument)
    door.turn()
    assert door.links == []


def test_a_successor_is_asked_what_the_dead_owed(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = door.identity()
    subscribe(door, identity)
    door.receive(identity)
    door.publish(numbered(2))
    request, refusals = door.session.request, [OwnerMoved("it died")] * 2

    def dying(kind: Any, body: Any, handle: int, answer: Any) -> None:
        if refusals:
            answer_to = door.session.expect(answer)
            door.session.send_error(refusals.pop(), answer_to)
        else:
            request(kind, body, handle, answer)

    monkeypatch.setattr(door.session, "request", dying)
    monkeypatch.setattr(door.settling, "_settle", lambda *_: False)  # another worker owns the partition
    ack(door, 1, 0)
    door.turn()
    assert door.connection.answers == {1: 1}
    refusals += [OwnerMoved("it died")] * 3
    ack(door, 2, 1)
    door.turn()
    assert isinstance(door.connection.answers[2], OwnerMoved)
