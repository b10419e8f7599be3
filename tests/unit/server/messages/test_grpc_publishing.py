"""SendMessage between a door and a shard: batches of a turn, refusals, owners that go away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from danube.broker.routing.remote import RemoteSessions
from danube.core.batch.columns import check_columns
from danube.core.metadata.commands import DeleteTopic, Revocation, Revoke
from danube.core.metadata.known_consumers import producer_identity
from danube.core.metadata.machine import Metadata
from danube.core.metadata.roles import Access
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.core.security.authority import Authority
from danube.core.security.principals import ANONYMOUS, INTERNAL, Identity, Principal
from danube.errors import (
    DanubeError,
    Draining,
    InvalidArgument,
    InvalidName,
    NotAuthenticated,
    Overloaded,
    OwnerMoved,
    ProducerBusy,
    RecordTooLarge,
    StorageFailed,
)
from danube.server.messages import publishing
from danube.server.messages import session as broker_session
from danube.server.messages.answers import response
from danube.server.messages.publishing import Publishing, Target
from danube.server.messages.sent_messages import FEW, Message, parsed
from danube.server.messages.session import BrokerSession
from danube.server.proto.DanubeApi_pb2 import MessageResponse, MsgID, StreamMessage
from tests.stored_batches import check_stored
from tests.unit.broker_parts import FakeChannel, RoutedBench

TOPIC = "/default/grpc"


class Connection:
    """A connection that keeps its answers by stream."""

    def __init__(self) -> None:
        self.answers: dict[Any, Any] = {}
        self.consumed_bytes = 0

    def answer(self, stream: Any, message: bytes, size: int = 0) -> None:
        self.consumed_bytes += size
        self.answers[stream] = MessageResponse.FromString(message[5:]).request_id

    def answer_all(self, streams: Sequence[Any], messages: Sequence[bytes], size: int) -> None:
        self.consumed_bytes += size
        for stream, message in zip(streams, messages, strict=True):
            self.answer(stream, message)

    def answer_error(self, stream: Any, error: BaseException) -> None:
        self.answers[stream] = error

    def consumed(self, stream: Any, size: int) -> None:
        self.consumed_bytes += size


class Door:
    """The publishing half on a bench."""

    def __init__(self, root: Path, workers: int = 1) -> None:
        self.bench = RoutedBench(root, workers)
        self.topic = self.bench.proposals.create(TOPIC)
        self.turns_asked = 0
        self.session = BrokerSession(self.bench.router, self._ask_turn)
        self.publishing = Publishing(self.session, self.bench.router, cast(Any, self.bench.proposals))
        self.connection = Connection()
        self.number = 0

    def _ask_turn(self) -> None:
        self.turns_asked += 1

    def id(self, name: str = "p") -> int:
        return producer_identity(self.topic.topic_id, 0, name)

    def send(self, payload: bytes = b"x", name: str = "p", **fields: Any) -> int:
        """One call, whose stream is its number."""
        self.number += 1
        msg_id = MsgID(producer_id=fields.pop("producer_id", self.id(name)), topic_name=TOPIC)
        message = StreamMessage(
            request_id=self.number, msg_id=msg_id, payload=payload, producer_name=name, **fields
        )
        data = message.SerializeToString()
        self.publishing.send_message(self.connection, cast(Any, self.number), data, len(data) + 5)
        return self.number

    def turn(self) -> None:
        self.publishing.hand_over()
        self.session.offer_held()
        self.bench.turn()

    @property
    def answers(self) -> dict[Any, Any]:
        return self.connection.answers

    def stored(self) -> list[bytes]:
        hosted = self.bench.shard.partitions[TOPIC]
        chunk = hosted.log.read(0, hosted.high_watermark, 1 << 20) if hosted.log else None
        from tests.unit.broker_parts import records_in

        return [payload for _, payload in records_in(chunk.data)] if chunk else []


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


def test_calls_of_one_turn_are_one_batch_and_answered_together(door: Door) -> None:
    sent = [door.send(b"%d" % index) for index in range(5)]
    assert not door.answers and door.connection.consumed_bytes == 0
    door.turn()
    assert door.answers == {number: number for number in sent}
    assert door.stored() == [b"0", b"1", b"2", b"3", b"4"]
    assert door.bench.counters["records_in"] == 5
    assert len(door.bench.shard.partitions[TOPIC].producers) == 1
    assert door.connection.consumed_bytes > 0


def test_messages_with_other_envelopes_stay_in_order(door: Door) -> None:
    for payload, fields in (
        (b"0", {}),
        (b"1", {"schema_id": 1}),
        (b"2", {}),
        (b"3", {"schema_id": 1, "schema_version": 2}),
        (b"4", {}),
    ):
        door.send(payload, **fields)
    door.turn()
    assert door.stored() == [b"0", b"1", b"2", b"3", b"4"]
    assert len(door.answers) == 5


def test_a_group_is_bounded(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "GROUP_RECORDS_MAX", 2)
    for index in range(5):
        door.send(b"%d" % index)
    door.turn()
    assert door.stored() == [b"%d" % index for index in range(5)] and len(door.answers) == 5


def test_a_record_that_is_refused_is_refused_alone(door: Door) -> None:
    good = [door.send(b"a"), door.send(b"b")]
    late = door.send(b"c", publish_time=1 << 63)
    many = door.send(b"d", attributes={str(number): "" for number in range(65)})
    good.append(door.send(b"e"))
    door.turn()
    assert isinstance(door.answers[late], InvalidArgument) and isinstance(door.answers[many], RecordTooLarge)
    assert {number: door.answers[number] for number in good} == {number: number for number in good}
    assert sorted(door.stored()) == [b"a", b"b", b"e"]


def test_a_limit_that_was_lowered_meanwhile_holds_for_what_waits(door: Door) -> None:
    door.send(b"before")
    door.turn()
    sizes = (10, 101, 100, 500)
    numbers = [door.send(bytes(size)) for size in sizes]
    policy = msgspec.structs.replace(door.topic.policy, max_record_bytes=100)
    door.bench.shard.update_policy(msgspec.structs.replace(door.topic, policy=policy))
    for _ in sizes:
        door.turn()
    answers = [door.answers[number] for number in numbers]
    assert [type(answer) for answer in answers] == [int, RecordTooLarge, int, RecordTooLarge]
    assert sorted(map(len, door.stored())) == [len(b"before"), 10, 100]


def test_a_batch_of_this_worker_is_stored_as_any_other(door: Door) -> None:
    """The owner does not check what it has encoded itself: this says that it need not."""
    door.send(b"one", schema_id=1)
    door.turn()
    for number in range(3):
        door.send(b"%d" % number, routing_key="k", attributes={"a": "b"})
    door.turn()
    hosted = door.bench.shard.partitions[TOPIC]
    assert hosted.log is not None
    stored = memoryview(hosted.log.read(0, hosted.high_watermark, 1 << 20).data)
    first = check_stored(stored, 0)
    check_columns(stored[: first.size], first, 1 << 20)
    second = check_stored(stored[first.size :], 1)
    check_columns(stored[first.size :], second, 1 << 20)
    assert (first.epoch, second.epoch) == (hosted.core.epoch,) * 2 and second.end_offset == 4
    assert 0 < first.append_time_us <= second.append_time_us


def test_an_error_that_names_no_record_is_found_out_one_by_one(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = publishing.encode_messages

    def picky(messages: list[Message], **fields: Any) -> Any:
        if any(payload == b"bad" for payload, *_ in messages):
            raise InvalidArgument("one of these is bad")
        return encode(messages, **fields)

    monkeypatch.setattr(publishing, "encode_messages", picky)
    numbers = [door.send(payload) for payload in (b"a", b"bad", b"c")]
    door.turn()
    assert [type(door.answers[number]) for number in numbers] == [int, InvalidArgument, int]


def test_what_is_refused_without_the_owner(door: Door) -> None:
    refused = {
        door.send(producer_id=12345): (OwnerMoved, "not one of"),
        door.send(name=""): (InvalidName, ""),
        door.send(bytes(door.topic.policy.max_record_bytes + 1)): (RecordTooLarge, "bytes"),
    }
    for number, data in ((-1, StreamMessage(producer_name="p").SerializeToString()), (-2, b"\x0a\xff")):
        door.publishing.send_message(door.connection, cast(Any, number), data, len(data))
    refused |= {
        -1: (InvalidArgument, "msg_id is missing"),
        -2: (InvalidArgument, "not a danube.StreamMessage"),
    }
    door.send(b"before")
    door.publishing.draining = True
    with pytest.raises(Draining):
        door.send(b"after")
    with pytest.raises(Draining):
        asyncio.run(door.publishing.create(TOPIC, "p", False, object()))
    door.turn()
    assert door.stored() == [b"before"]
    for number, (error, why) in refused.items():
        assert isinstance(door.answers[number], error) and why in str(door.answers[number])
    assert door.connection.consumed_bytes > door.topic.policy.max_record_bytes


# -- many in one turn ---------------------------------------------------------------------------------


def test_many_calls_of_a_turn_are_read_together(
    door: Door, kernels_or_twins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr(publishing, "parsed", lambda data: read.append(1) or parsed(data))
    payloads = [b"%d" % index * (index % 5) for index in range(3 * FEW)]
    numbers = [door.send(payload, publish_time=7 + index // 9) for index, payload in enumerate(payloads)]
    door.turn()
    assert door.answers == {number: number for number in numbers} and door.stored() == payloads
    assert len(read) == (0 if kernels_or_twins == "kernels" else len(payloads))


def test_producers_that_share_a_turn_get_a_batch_each(door: Door, kernels_or_twins: str) -> None:
    for start in range(0, 6 * FEW, FEW):
        for index in range(start, start + FEW):
            door.send(b"%d" % index, name="pq"[start // FEW % 2])
    door.turn()
    stored = [int(payload) for payload in door.stored()]
    for producer in (0, 1):
        own = [number for number in stored if number // FEW % 2 == producer]
        assert own == sorted(own) and len(own) == 3 * FEW
    assert len(door.answers) == 6 * FEW


def test_one_bad_message_among_many_is_refused_alone(door: Door, kernels_or_twins: str) -> None:
    large = bytes(door.topic.policy.max_record_bytes + 1)
    for bad, error in (
        ({"payload": large}, RecordTooLarge),
        ({"publish_time": 1 << 62}, InvalidArgument),
        ({"publish_time": (1 << 64) - 1}, InvalidArgument),
        ({"producer_id": 99}, OwnerMoved),
        ({"name": ""}, InvalidName),
    ):
        good = [door.send(b"good") for _ in range(FEW)]
        number = door.send(**bad)
        good += [door.send(b"good") for _ in range(FEW)]
        while len(door.answers) < len(good) + 1:
            door.turn()
        assert isinstance(door.answers.pop(number), error), bad
        assert [door.answers.pop(one) for one in good] == good
    assert set(door.stored()) == {b"good"}


@pytest.mark.parametrize("count", [1, 2 * FEW])
def test_what_nobody_foresaw_ends_its_calls_alone(
    door: Door, kernels_or_twins: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    door.send(b"opens it")
    door.turn()

    def unreadable(name: str) -> Any:
        raise OSError("metadata cannot be read")

    monkeypatch.setattr(door.bench.router, "find_topic", unreadable)
    failed = [door.send(name="another") for _ in range(count)]
    good = [door.send(b"good") for _ in range(count)]
    door.turn()
    assert all(isinstance(door.answers[number], OSError) for number in failed)
    assert [door.answers[number] for number in good] == good


def test_a_producer_that_changes_its_schema_keeps_its_order(door: Door, kernels_or_twins: str) -> None:
    for index in range(4 * FEW):
        door.send(b"%d" % index, schema_id=index // FEW % 2)
    door.turn()
    assert door.stored() == [b"%d" % index for index in range(4 * FEW)]


def test_what_waits_for_its_owner_goes_out_in_order(door: Door, kernels_or_twins: str) -> None:
    for index in range(2 * FEW):
        door.send(b"%d" % index)
        if index in (0, FEW):
            door.publishing._read()
    door.turn()
    assert door.stored() == [b"%d" % index for index in range(2 * FEW)]


def test_a_full_disk_fails_every_call_of_the_batch(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    door.send(b"opens it")
    door.turn()
    hosted = door.bench.shard.partitions[TOPIC]
    assert hosted.log is not None

    def fail() -> int:
        raise StorageFailed("no room")

    monkeypatch.setattr(hosted.log, "write", fail)
    numbers = [door.send(), door.send()]
    door.turn()
    assert all(isinstance(door.answers[number], DanubeError) for number in numbers)


def test_a_topic_made_anew_has_other_producers(door: Door) -> None:
    door.send()
    door.turn()
    old_id = door.id()
    door.bench.shard.delete_topic(door.topic)
    door.bench.proposals.apply(DeleteTopic(topic=TOPIC))
    door.topic = door.bench.proposals.create(TOPIC)
    refused = door.send(producer_id=old_id)
    number = door.send(b"new")
    door.turn()
    assert isinstance(door.answers[refused], OwnerMoved)
    assert door.answers[number] == number and door.stored() == [b"new"]


# -- creating -----------------------------------------------------------------------------------------


def create(door: Door, name: str, user: object, *, exclusive: bool = False) -> Any:
    return asyncio.run(door.publishing.create(TOPIC, name, exclusive, user))


def test_a_producer_lives_as_long_as_a_connection_that_made_it(door: Door) -> None:
    one, two = object(), object()
    target = create(door, "p", one)
    assert create(door, "p", two) is target and door.publishing.partition_of(target.producer_id)
    door.publishing.connection_lost(one)
    assert door.bench.shard.partitions[TOPIC].producers
    door.publishing.connection_lost(two)
    assert not door.bench.shard.partitions[TOPIC].producers and not door.publishing.targets
    assert not door.publishing.partition_of(target.producer_id)


def test_exclusive_access_is_asked_for_anew(door: Door) -> None:
    one = object()
    create(door, "p", one)
    create(door, "p", one, exclusive=True)
    with pytest.raises(ProducerBusy):
        create(door, "q", one)
    door.publishing.connection_lost(one)
    create(door, "q", one)
    with pytest.raises(ProducerBusy):
        create(door, "r", one, exclusive=True)


def test_idle_producers_are_forgotten_when_there_are_many(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "TARGETS_MAX", 20)
    for index in range(60):
        door.send(name=f"p{index}")
        door.turn()
    assert len(door.publishing.targets) <= 20 and len(door.answers) == 60
    assert len(door.bench.shard.partitions[TOPIC].producers) <= 20


def test_an_owner_that_refuses_to_open_fails_what_waits(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    door.bench.shard.draining = True
    number = door.send()
    door.turn()
    assert isinstance(door.answers[number], OwnerMoved)
    door.bench.shard.draining = False
    number = door.send()
    door.turn()
    assert door.answers[number] == number


def test_an_owner_that_forgot_the_handle_gets_the_batch_again(door: Door) -> None:
    door.send()
    door.turn()
    door.bench.shard.drop_session(door.session)  # as if the owner had started again
    door.session.closed = False
    number = door.send(b"again")
    door.turn()
    assert door.answers[number] == number and door.stored() == [b"x", b"again"]


def test_what_must_be_sent_again_asks_for_a_turn(door: Door) -> None:
    """An answer may come when the running turn has handed over already."""
    door.send()
    door.turn()
    door.send(b"waits")
    door.publishing._read()
    target = door.publishing.targets[TOPIC, "p"]
    door.turns_asked = 0
    door.publishing.closed(target, OwnerMoved("the owner started again"))
    assert door.turns_asked == 1
    number = door.send(b"taken back")
    door.turn()
    assert door.answers[number] == number
    group = publishing._Group(("", None, None), [], [])
    door.turns_asked = 0
    door.publishing._failed(target, group, OwnerMoved("the owner started again"))
    assert door.turns_asked > 0


# -- another worker owns it ---------------------------------------------------------------------------


class Elsewhere:
    """The topic belongs to worker 1, whose ring is in the test's hands."""

    def __init__(self, root: Path) -> None:
        self.door = Door(root, workers=2)
        name = self.door.bench.name_owned_by(1)
        self.door.topic = self.door.bench.proposals.state.topic(name)
        globals()["TOPIC"] = name
        self.channel = FakeChannel()
        self.door.bench.router.remote = RemoteSessions(
            cast(Any, self.channel), self.door.bench.shard, lambda *_: None, lambda: None
        )

    def opened(self) -> None:
        """Answer the OPEN_PRODUCER that was sent."""
        (_, _, record), *_ = self.channel.take()
        frame = next(wire.FrameDecoder().frames(record, 8, len(record)))
        assert frame.kind == Kind.OPEN_PRODUCER
        body = wire.control_frame(
            Kind.PRODUCER_OPENED, wire.ProducerOpened(1, 1), frame.correlation, frame.handle
        )
        self.door.bench.router.answered(self.door.session, body)
        self.door.session.send(body)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    monkeypatch.setitem(globals(), "TOPIC", TOPIC)
    return Elsewhere(tmp_path)


def test_frames_that_a_ring_refuses_are_offered_again_in_order(elsewhere: Elsewhere) -> None:
    door, channel = elsewhere.door, elsewhere.channel
    channel.room = False
    door.send(b"1")
    door.turn()
    assert door.session.offer_held(), "still refused"
    channel.room = True
    assert not door.session.offer_held()
    elsewhere.opened()
    channel.room = False
    door.turn()
    door.send(b"2")
    door.turn()
    channel.room = True
    door.turn()
    kinds = [wire.FrameDecoder().frames(record, 8, len(record)) for _, _, record in channel.take()]
    assert [next(frames).kind for frames in kinds] == [Kind.PUBLISH, Kind.PUBLISH]


def test_too_many_held_frames_are_refused(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_session, "HELD_FRAMES_MAX", 1)
    door, channel = elsewhere.door, elsewhere.channel
    door.send(b"1")
    door.turn()
    elsewhere.opened()
    channel.room = False
    door.turn()
    number = door.send(b"2")
    door.turn()
    assert isinstance(door.answers[number], Overloaded)


def test_an_owner_that_died_leaves_the_outcome_open(elsewhere: Elsewhere) -> None:
    door, channel = elsewhere.door, elsewhere.channel
    number = door.send(b"1")
    door.turn()
    elsewhere.opened()
    door.turn()
    assert channel.take() and number not in door.answers
    door.session.worker_restarted(1)
    assert isinstance(door.answers[number], OwnerMoved)
    again = door.send(b"2")
    door.turn()
    elsewhere.opened()
    door.turn()
    assert channel.take() and again not in door.answers


def test_an_open_request_to_a_dead_owner_fails(elsewhere: Elsewhere) -> None:
    door = elsewhere.door
    number = door.send(b"1")
    door.turn()
    door.session.worker_restarted(1)
    assert isinstance(door.answers[number], OwnerMoved)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**32, 2**64 - 1])
def test_the_echoed_request_id(number: int) -> None:
    framed = response(number)
    assert framed[0] == 0 and int.from_bytes(framed[1:5], "big") == len(framed) - 5
    assert MessageResponse.FromString(framed[5:]).request_id == number


def test_what_one_credential_may_another_one_of_its_principal_may_not_once_it_is_revoked(door: Door) -> None:
    ann = Principal("user", "ann")
    one, other = (Identity(ann, "token", 0, "", key, issued_us=1) for key in (b"1" * 16, b"2" * 16))
    machine = Metadata()
    door.publishing._authority = Authority(lambda: machine.access, frozenset({ann}))
    target = Target(door.publishing, TOPIC, "p")
    for caller in (one, other, one, other):
        door.publishing._demand(caller, target, TOPIC)
    revocation = Revocation(kind="credential", value=other.token_key.hex(), end_us=1 << 60)
    machine.apply(1, Revoke(revocation=revocation, now_us=2))
    door.publishing._demand(one, target, TOPIC)  # judged anew, and remembered
    with pytest.raises(NotAuthenticated):
        door.publishing._demand(other, target, TOPIC)
    door.publishing._demand(one, target, TOPIC)


def test_who_shows_no_credential_is_judged_each_time(door: Door) -> None:
    door.publishing._authority = Authority(Access, frozenset())
    target = Target(door.publishing, TOPIC, "p")
    door.publishing._demand(INTERNAL, target, TOPIC)
    assert target.allowed == {}
    with pytest.raises(NotAuthenticated):
        door.publishing._demand(ANONYMOUS, target, TOPIC)
