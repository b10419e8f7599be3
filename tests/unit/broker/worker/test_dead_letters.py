"""Dead letters: the original is acked when its copy is acknowledged, and never before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from danube.broker.partition.hosted import HostedPartition
from danube.broker.routing.judging import Judging
from danube.broker.worker.dead_letters import DeadLetters
from danube.broker.worker.worker import Worker
from danube.client.machine.publishing import Outgoing
from danube.core.batch.columns import BatchView
from danube.core.metadata.commands import (
    Binding,
    CreateNamespace,
    DeleteBinding,
    PutBinding,
    SetNamespacePolicy,
    UpdatePolicy,
)
from danube.core.metadata.policies import NamespacePolicy
from danube.core.partition.policy import FailurePolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.core.security.authority import Authority
from danube.core.security.principals import INTERNAL
from danube.errors import Conflict, DanubeError, Overloaded, StorageFailed, TopicNotFound
from danube.host import clock
from danube.limits import ATTRIBUTE_BYTES_MAX
from tests.unit.broker_parts import RecordingSession, RoutedBench, batch

LETTERS = "/default/letters"
ORDERS = "/default/orders"
FAILURE = FailurePolicy(
    max_redelivery_count=0, base_redelivery_delay_ms=0, poison="dead_letter", dead_letter_topic=LETTERS
)


class LetterBench(RoutedBench):
    """A shard whose dead letters go through its own router; it is the worker they ask."""

    index = 0
    cluster = None

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.metadata = self.proposals
        self.proposals.create(ORDERS, failure=FAILURE)
        self.dead_letters = DeadLetters(cast(Worker, self))
        self.shard._deliveries._take_dead_letters = self.dead_letters.take
        self.session = RecordingSession()

    def schedule_turn(self) -> None:
        self._wanted()

    def metadata_changed(self) -> None:
        self._changed_metadata()

    def poison(self, *payloads: bytes, **fields: Any) -> None:
        """Publish, deliver and nack; the letters are taken in the same turn."""
        self.open_producer(self.session)
        self.publish(self.session, batch(*payloads, **fields))
        self.turn()
        self.subscribe(self.session, start="earliest")
        self.turn()
        self.nack(self.session, 0, len(payloads))
        self.turn()
        self.session.take()

    @property
    def floor(self) -> int:
        return self.hosted.subscription("s").core.ack_floor

    def letters_stored(self) -> list[BatchView]:
        hosted = self.shard.partitions.get(LETTERS)
        if hosted is None or hosted.log is None or not hosted.high_watermark:
            return []
        data = hosted.log.read(0, hosted.high_watermark).data
        views, position = [], 0
        while position < len(data):
            views.append(BatchView(data, position=position))
            position += views[-1].header.size
        return views


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LetterBench]:
    made = LetterBench(tmp_path)
    monkeypatch.setattr(clock, "monotonic_ns", lambda: Clock.now_ns)
    Clock.now_ns = 10**12
    yield made
    made.shard.close()


class Clock:
    now_ns = 10**12


def pass_time(bench: LetterBench, seconds: int = 61) -> None:
    """So much time that anything that waits is tried again, if anything remembers it."""
    bench.turn()
    Clock.now_ns += seconds * 10**9
    bench.shard.tick()
    bench.turn()
    bench.turn()


def test_a_namespace_that_is_full_of_producers_takes_dead_letters(bench: LetterBench) -> None:
    bench.proposals.create(LETTERS)
    bench.ask(RecordingSession(9), Kind.OPEN_PRODUCER, wire.OpenProducer(LETTERS, "p"), 1)
    full = bench.shard.partitions[LETTERS]
    full.limit(NamespacePolicy(max_producers_per_topic=1))
    bench.poison(b"bad")
    bench.turn()
    assert bench.floor == 1 and len(bench.letters_stored()) == 1
    assert full.producers.name_count == 1 and len(full.producers) == 2


def test_the_topic_is_made_opened_and_the_original_acked_after_the_copy(bench: LetterBench) -> None:
    bench.poison(b"bad", keys=[b"k"], attributes=[{"colour": "red"}], producer_name="till")
    ((command, _),) = bench.proposals.waiting
    assert getattr(command, "topic", "") == LETTERS and bench.floor == 0
    bench.proposals.step()
    assert bench.metadata_changes == 1
    assert bench.floor == 0 and bench.letters_stored() == [], "it was sent, not acknowledged"
    bench.turn()
    assert bench.floor == 1 and bench.counters["dead_letters"] == 1
    (copy,) = bench.letters_stored()
    assert (copy.payloads(), copy.keys()) == ([b"bad"], [b"k"])
    attributes = copy.attributes(0)
    assert attributes["colour"] == "red"
    assert attributes["x-original-topic"] == ORDERS and attributes["x-original-subscription"] == "s"
    assert attributes["x-failure-reason"] == "bad" and attributes["x-original-topic-offset"] == "0"


def guard(bench: LetterBench) -> None:
    """Have rights judged from now on; the policy is ada's."""
    authority = Authority(lambda: bench.proposals.state.access)
    bench.router.judging = Judging(authority, lambda: bench.proposals.state, bench.router.route)
    record = bench.proposals.state.topic(ORDERS)
    failure = msgspec.structs.replace(FAILURE, set_by="user:ada")
    policy = msgspec.structs.replace(record.policy, failure=failure)
    bench.proposals.apply(UpdatePolicy(topic=ORDERS, policy=policy))
    bench.session.identity = INTERNAL


def bind_ada(bench: LetterBench) -> None:
    bench.proposals.apply(PutBinding(binding=Binding("b", "user", "ada", ("producer",), "topic", LETTERS)))


def test_a_copy_needs_the_right_of_who_asked_for_it(bench: LetterBench) -> None:
    guard(bench)
    bench.poison(b"bad")
    assert bench.floor == 0 and bench.proposals.waiting == [], "the topic is not even made"
    told = bench.hosted.subscription("s").statistics(0)["dead_letter_error"]
    assert "user:ada has no permission Produce on topic /default/letters" in told
    assert bench.counters["dead_letters_refused"] == 1 and bench.counters["dead_letters"] == 0
    bind_ada(bench)
    pass_time(bench)
    bench.proposals.step()
    bench.turn()
    assert bench.floor == 1 and len(bench.letters_stored()) == 1
    assert bench.hosted.subscription("s").statistics(0)["dead_letter_error"] == ""


def test_a_right_that_was_taken_away_stops_the_next_copy(bench: LetterBench) -> None:
    guard(bench)
    bind_ada(bench)
    open_topic(bench)
    bench.poison(b"one")
    bench.turn()
    assert bench.floor == 1
    bench.proposals.apply(DeleteBinding(id="b", scope="topic", resource_name=LETTERS))
    bench.publish(bench.session, batch(b"two"))
    bench.turn()
    bench.nack(bench.session, 1, 2)
    pass_time(bench)
    assert bench.floor == 1 and bench.counters["dead_letters_refused"] >= 1
    assert len(bench.letters_stored()) == 1


def test_letters_stay_within_what_the_namespace_says(bench: LetterBench) -> None:
    """The policy was set before: it is kept, and no copy is made."""
    bench.proposals.apply(CreateNamespace(namespace="other"))
    record = bench.proposals.state.topic(ORDERS)
    failure = msgspec.structs.replace(FAILURE, dead_letter_topic="/other/letters")
    policy = msgspec.structs.replace(record.policy, failure=failure)
    bench.proposals.apply(UpdatePolicy(topic=ORDERS, policy=policy))
    within = NamespacePolicy(dead_letter_within="namespace")
    bench.proposals.apply(SetNamespacePolicy(namespace="default", policy=within))
    bench.poison(b"bad")
    assert bench.floor == 0 and bench.proposals.waiting == []
    assert "dead_letter_within" in bench.hosted.subscription("s").statistics(0)["dead_letter_error"]


def test_many_letters_wait_for_one_opening(bench: LetterBench) -> None:
    bench.poison(*(b"%d" % number for number in range(10)))
    assert len(bench.proposals.waiting) == 1
    bench.proposals.step()
    bench.turn()
    assert bench.floor == 10
    assert [view.payload(0) for view in bench.letters_stored()] == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize(
    "refusal", [StorageFailed("the metadata cannot be written"), Conflict("made by another")]
)
def test_a_topic_that_cannot_be_made_is_tried_again(bench: LetterBench, refusal: Any) -> None:
    bench.poison(b"bad")
    if isinstance(refusal, Conflict):
        bench.proposals.create(LETTERS)
    bench.proposals.step(refusal)
    bench.turn()
    if not isinstance(refusal, Conflict):
        assert bench.floor == 0
        pass_time(bench)
        bench.proposals.step()
    bench.turn()
    assert bench.floor == 1


def test_metadata_that_takes_no_more_is_not_an_accident(bench: LetterBench) -> None:
    bench.proposals.refusal = Overloaded("too many metadata changes wait")
    bench.poison(b"bad")
    assert bench.floor == 0
    bench.proposals.refusal = None
    pass_time(bench)
    bench.proposals.step()
    bench.turn()
    assert bench.floor == 1


def open_topic(bench: LetterBench) -> None:
    bench.proposals.create(LETTERS)
    bench.shard.open(LETTERS, lambda _: None)


def test_a_copy_that_is_refused_at_once_leaves_the_original_and_is_tried_again(bench: LetterBench) -> None:
    open_topic(bench)
    letters = bench.shard.partitions[LETTERS]
    letters.failure = letters.refusal = StorageFailed("the disk is away")
    bench.poison(b"bad")
    bench.turn()
    assert bench.floor == 0 and not bench.dead_letters._letters
    letters.failure = letters.refusal = None
    pass_time(bench)
    assert bench.floor == 1 and len(bench.letters_stored()) == 1


def test_a_copy_that_is_lost_with_its_owner_is_tried_again(bench: LetterBench) -> None:
    open_topic(bench)
    on_publish = bench.shard._handlers[Kind.PUBLISH]
    bench.open_producer(bench.session)
    bench.publish(bench.session, batch(b"bad"))
    bench.turn()
    bench.subscribe(bench.session, start="earliest")
    bench.turn()
    bench.shard._handlers[Kind.PUBLISH] = lambda *args: None  # it went into a ring that is gone
    bench.nack(bench.session, 0, 1)
    bench.turn()
    assert bench.floor == 0 and len(bench.dead_letters._letters) == 1
    bench.shard._handlers[Kind.PUBLISH] = on_publish
    bench.dead_letters.worker_restarted(0)
    assert not bench.dead_letters._letters
    pass_time(bench)
    assert bench.floor == 1 and len(bench.letters_stored()) == 1


def test_a_letter_topic_that_was_deleted_is_made_again(bench: LetterBench) -> None:
    from danube.core.metadata.commands import DeleteTopic

    open_topic(bench)
    bench.poison(b"one", b"two")
    bench.turn()
    assert bench.floor == 2
    record = bench.proposals.state.topic(LETTERS)
    bench.proposals.apply(DeleteTopic(topic=LETTERS))
    bench.shard.delete_topic(record)
    bench.publish(bench.session, batch(b"three"))
    bench.turn()
    bench.nack(bench.session, 2, 3)
    bench.turn()
    bench.proposals.step()
    bench.turn()
    assert bench.floor == 3 and [view.payload(0) for view in bench.letters_stored()] == [b"three"]


def test_letters_need_no_consumer_to_be_tried_again(bench: LetterBench) -> None:
    bench.poison(b"bad")
    bench.ask(bench.session, Kind.CLOSE_CONSUMER, handle=2)
    bench.proposals.step(StorageFailed("not now"))
    bench.turn()
    assert bench.floor == 0
    pass_time(bench)
    bench.proposals.step()
    bench.turn()
    assert bench.floor == 1


def test_attributes_that_leave_no_room_are_cut_not_the_record(bench: LetterBench) -> None:
    open_topic(bench)
    large = {"first": "kept", "second": "x" * (ATTRIBUTE_BYTES_MAX - 100)}
    many = {f"a{number}": "" for number in range(64)}
    bench.poison(b"large", b"many", attributes=[large, many])
    bench.turn()
    assert bench.floor == 2
    first, second = (view.attributes(0) for view in bench.letters_stored())
    assert first["first"] == "kept" and "second" not in first and first["x-poison-policy"] == "dead_letter"
    assert len(second) == 64 and second["x-poison-policy"] == "dead_letter"


def test_a_record_that_expired_before_its_copy_is_let_go(
    bench: LetterBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from danube.errors import OffsetOutOfRange

    bench.poison(b"bad")

    def gone(hosted: HostedPartition, offset: int) -> Any:
        raise OffsetOutOfRange("expired", start=1, end=1)

    monkeypatch.setattr(HostedPartition, "chunk", gone)
    bench.proposals.step()
    bench.turn()
    assert bench.floor == 1 and bench.letters_stored() == [] and not bench.dead_letters._letters


def test_a_policy_without_letters_sends_none(bench: LetterBench) -> None:
    policy = msgspec.structs.replace(FAILURE, poison="drop")
    bench.open_producer(bench.session)
    bench.publish(bench.session, batch(b"bad"))
    bench.turn()
    bench.subscribe(bench.session, start="earliest", failure=policy)
    bench.turn()
    bench.nack(bench.session, 0, 1)
    bench.turn()
    assert bench.floor == 1 and bench.proposals.waiting == []
    assert wire.Kind.ERROR not in [frame.kind for frame in bench.session.take()]


class Elsewhere:
    """A producer at another broker; what it is sent is stored at once."""

    def __init__(self) -> None:
        self.failure: DanubeError | None = None
        self.sent = 0

    def send(self, outgoing: Outgoing, *numbers: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.sent += 1
        outgoing.resolve(None)


def test_a_producer_elsewhere_that_ended_is_replaced_with_the_next_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its topic was deleted and made again, or its name taken: the next letter must not end with it."""
    bench = LetterBench(tmp_path)
    bench.proposals.create(LETTERS)
    made: list[Elsewhere] = []

    def producer_elsewhere(record: Any, partition: str, name: str) -> Elsewhere:
        made.append(Elsewhere())
        return made[-1]

    monkeypatch.setattr(LetterBench, "cluster", SimpleNamespace(producer_elsewhere=producer_elsewhere))
    bench.poison(b"a")
    assert [one.sent for one in made] == [1]
    made[0].failure = TopicNotFound("it was deleted")
    bench.publish(bench.session, batch(b"b"))
    bench.turn()
    bench.nack(bench.session, 1, 2)
    bench.turn()
    assert [one.sent for one in made] == [1, 1]
    assert bench.shard.partitions[ORDERS].subscriptions["s"].core.ack_floor == 2
