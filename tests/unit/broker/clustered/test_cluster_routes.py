"""A router of a cluster: what is elsewhere, what waits, what another broker is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from danube.broker.clustered.directory import Directory
from danube.broker.clustered.parked import WAIT_NS, Parked
from danube.broker.clustered.parts import RIGHTS_KEPT_NS, ClusterParts, OtherBrokers
from danube.broker.clustered.peers import Peers
from danube.broker.operations.context import Answer
from danube.broker.processes.lease import SharedLease
from danube.cluster.log.local_log import LocalLog
from danube.core.cluster.commands import (
    AssignPartitions,
    GrantLease,
    RegisterBroker,
    ReleasePartitions,
    RevokeLease,
)
from danube.core.metadata.commands import Command, CreateTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Admin, FrameDecoder, Kind, OpenProducer
from danube.core.security.principals import INTERNAL, Identity, Principal
from danube.errors import DanubeError, OwnerMoved, Unavailable
from danube.host import clock
from tests.unit.broker_parts import RecordingSession, RoutedBench

TOPIC = "/default/orders"


class Place:
    """The metadata of broker 1 of two."""

    def __init__(self) -> None:
        self.state = Metadata()
        self.reads = 0
        for broker_id in (1, 2):
            self.commit(GrantLease(lease_id=broker_id, ttl_ms=10_000))
            self.commit(
                RegisterBroker(broker_id=broker_id, lease_id=broker_id, native_address=f"b{broker_id}:1")
            )
        self.commit(CreateTopic(topic=TOPIC, partitions=2, policy=TopicPolicy(), created_us=1))
        self.directory = Directory(1, cast(LocalLog, self), self._read)

    @property
    def version(self) -> int:
        return self.state.version

    def _read(self) -> None:
        self.reads += 1

    def commit(self, command: Command) -> None:
        self.state.apply(self.state.version + 1, command)

    def assign(self, broker_id: int, partition: int = 0) -> None:
        topic_id = self.state.topic(TOPIC).topic_id
        epoch = self.state.cluster.owners.of(topic_id, partition).epoch
        self.commit(AssignPartitions(broker_id=broker_id, partitions=((topic_id, partition, epoch),)))


def test_what_is_elsewhere() -> None:
    place = Place()
    topic_id = place.state.topic(TOPIC).topic_id
    assert type(place.directory.elsewhere(topic_id, 0)) is Unavailable and place.reads == 1
    place.assign(1)
    assert place.directory.elsewhere(topic_id, 0) is None and place.reads == 1
    place.commit(ReleasePartitions(broker_id=1, partitions=((topic_id, 0, 1),)))
    place.assign(2)
    moved = place.directory.elsewhere(topic_id, 0)
    assert isinstance(moved, OwnerMoved)
    assert moved.facts == {"address": "b2:1", "broker_id": "2", "epoch": 2}
    place.commit(RevokeLease(lease_id=2))
    assert type(place.directory.elsewhere(topic_id, 0)) is Unavailable, "its owner is away"


def test_a_lookup_says_where_and_who() -> None:
    place = Place()
    record = place.state.topic(TOPIC)
    place.assign(1, 0)
    place.assign(2, 1)
    view = wire.TopicView(TOPIC, record.topic_id, record.physical_names, True, "written", 1)
    place.directory.describe(record, view)
    assert view.owners == ["", "b2:1"] and view.brokers == ["b1:1", "b2:1"]
    assert place.directory.address == "b1:1"


class Routes:
    """A router that takes what it is offered, or refuses it with an error."""

    def __init__(self) -> None:
        self.error: DanubeError | None = None
        self.full = False  # the ring to the worker that owns it
        self.taken: list[int] = []
        self.parked = Parked(self.route)

    def route(self, session: Any, frame: wire.Frame, buffer: memoryview) -> bool:
        if self.full:
            return False
        if self.error is None:
            self.taken.append(frame.correlation)
        elif not self.parked.take(session, frame, buffer, self.error):
            session.send_error(self.error, frame.correlation)
        return True

    def ask(self, session: Any, correlation: int, kind: Kind = Kind.OPEN_PRODUCER) -> None:
        buffer = memoryview(bytearray(wire.control_frame(kind, OpenProducer(TOPIC, "p"), correlation)))
        for frame in FrameDecoder().frames(buffer, 0, len(buffer)):
            self.route(session, frame, buffer)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    time = [WAIT_NS]
    monkeypatch.setattr(clock, "monotonic_ns", lambda: time[0])
    return time


def test_a_request_waits_for_an_owner(now: list[int]) -> None:
    routes, session = Routes(), RecordingSession()
    routes.error = Unavailable("nobody owns it")
    routes.ask(session, 7)
    assert len(routes.parked) == 1 and not session.take()
    routes.parked.offer()
    assert len(routes.parked) == 1, "still nobody"
    routes.error = None
    routes.parked.offer()
    assert routes.taken == [7] and not len(routes.parked)


def test_waiting_has_an_end_and_one_deadline(now: list[int]) -> None:
    routes, session = Routes(), RecordingSession()
    routes.error = Unavailable("nobody owns it")
    routes.ask(session, 7)
    now[0] += WAIT_NS - 1
    routes.parked.offer()
    routes.parked.tick(now[0])
    assert not session.take()
    now[0] += 1
    routes.parked.tick(now[0])
    assert session.only(Kind.ERROR).correlation == 7 and not len(routes.parked)


def test_a_ring_that_is_full_holds_up_one_tick_and_not_the_worker(now: list[int]) -> None:
    routes, session = Routes(), RecordingSession()
    routes.error = Unavailable("nobody owns it")
    routes.ask(session, 7)
    routes.ask(session, 8)
    routes.error = None
    routes.full = True
    now[0] += WAIT_NS
    routes.parked.tick(now[0])
    assert len(routes.parked) == 2 and not session.take()
    routes.full = False
    routes.parked.tick(now[0])
    assert routes.taken == [7, 8] and not len(routes.parked)


def test_what_does_not_wait(now: list[int]) -> None:
    routes, session = Routes(), RecordingSession()
    routes.error = OwnerMoved("elsewhere", address="b2:1")
    routes.ask(session, 1)
    routes.error = Unavailable("nobody owns it")
    routes.ask(session, 2, Kind.LOOKUP)
    assert [frame.correlation for frame in session.take(Kind.ERROR)] == [1, 2]
    routes.ask(session, 3)
    session.closed = True
    routes.parked.offer()
    assert not routes.taken and not len(routes.parked)


class Elsewhere:
    """Who is asked next: what the directory says of every partition, and the questions other brokers got."""

    def __init__(self) -> None:
        self.owner: DanubeError | None = None
        self.describe: Any = None
        self.answers: list[Answer] = []

    def elsewhere(self, topic_id: int, partition: int) -> DanubeError | None:
        return self.owner

    def forward(self, moved: OwnerMoved, request: Admin, answer: Answer, asking: Identity) -> bool:
        self.answers.append(answer)
        return True


class Asked:
    """A router that asked the broker it takes for the owner, and who asked it."""

    def __init__(self, root: Path) -> None:
        self.bench, self.elsewhere, self.session = RoutedBench(root), Elsewhere(), RecordingSession()
        router = self.bench.router
        self.parked, fake = Parked(router.route), self.elsewhere
        router.elsewhere = OtherBrokers(cast(Directory, fake), self.parked, cast(Peers, fake))
        self.elsewhere.owner = OwnerMoved("broker 2 has it", address="b2:1")
        topic = self.bench.name_owned_by(0)
        self.bench.request(self.session, Kind.ADMIN, Admin("describe_partition", topic, {}))

    def answer(self, outcome: object) -> None:
        """The last one that was asked answers."""
        self.elsewhere.answers[-1](outcome)

    def refuse(self) -> None:
        self.answer(OwnerMoved("broker 1 has it", address="b1:1"))


@pytest.fixture
def asked(tmp_path: Path, now: list[int]) -> Iterator[Asked]:
    made = Asked(tmp_path)
    yield made
    made.bench.shard.close()


def test_a_question_to_the_former_owner_is_answered_here_once_this_broker_knows_that_it_owns(
    asked: Asked,
) -> None:
    asked.refuse()
    assert not asked.session.take() and len(asked.parked) == 1
    asked.elsewhere.owner = None
    asked.parked.offer()
    asked.bench.turn()
    assert asked.session.only(Kind.RESULT) and len(asked.elsewhere.answers) == 1 and not len(asked.parked)


def test_an_owner_that_does_not_know_yet_is_asked_again_at_each_tick(asked: Asked, now: list[int]) -> None:
    asked.refuse()
    asked.parked.tick(now[0])
    asked.parked.tick(now[0])
    assert len(asked.elsewhere.answers) == 2, "one question at a time"
    asked.answer({"end": 5})
    assert wire.decode_result(asked.session.only(Kind.RESULT).body) == {"end": 5}


def test_asking_again_has_one_deadline(asked: Asked, now: list[int]) -> None:
    now[0] += WAIT_NS - 1
    asked.refuse()
    asked.parked.tick(now[0])
    now[0] += 1
    asked.refuse()
    assert isinstance(asked.session.only(Kind.ERROR).error, OwnerMoved) and not len(asked.parked)


@pytest.mark.parametrize(
    "outcome", [OwnerMoved("the connection is closed"), Unavailable("nobody owns it")], ids=["lost", "nobody"]
)
def test_what_may_have_been_done_or_waited_already_is_not_asked_again(
    asked: Asked, outcome: DanubeError
) -> None:
    asked.answer(outcome)
    assert type(asked.session.only(Kind.ERROR).error) is type(outcome) and not len(asked.parked)


def test_only_so_many_questions_wait(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danube.broker.clustered.parked.PARKED_MAX", 0)
    asked.refuse()
    assert asked.session.only(Kind.ERROR)


@pytest.mark.parametrize(
    ("address", "forwarded"), [("", False), (5, False), ("b2:1", True)], ids=["none", "no text", "twice"]
)
def test_what_is_not_asked_on(address: Any, forwarded: bool) -> None:
    peers = Peers(cast(Any, SimpleNamespace(create_task=None)))
    request = Admin("describe_partition", TOPIC, {}, forwarded)
    answered: Callable[[Any], None] = lambda value: None  # noqa: E731
    assert not peers.forward(OwnerMoved("elsewhere", address=address), request, answered)


@pytest.mark.parametrize(
    ("asking", "told"),
    [
        (Identity(Principal("user", "ann"), "token", groups=("a", "b")), ("user:ann", ("a", "b"))),
        (INTERNAL, ("user:bob", ("c",))),
    ],
    ids=["a client", "the broker itself"],
)
def test_a_request_goes_on_with_who_asked_and_the_groups(
    asking: Identity, told: tuple[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Admin] = []

    def request(kind: Kind, body: Admin, **_: Any) -> Any:
        sent.append(body)
        return SimpleNamespace(when_settled=lambda settled: None)

    peers = Peers(cast(Any, SimpleNamespace()))
    monkeypatch.setattr(peers, "_connect", lambda address: SimpleNamespace(request=request))
    request_of = Admin("describe_partition", TOPIC, {}, False, "user:bob", ("c",))
    assert peers.forward(OwnerMoved("elsewhere", address="b2:1"), request_of, lambda value: None, asking)
    assert [(one.on_behalf, one.groups, one.forwarded) for one in sent] == [(*told, True)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent[0]), type=Admin) == sent[0]


def test_rights_are_known_for_some_seconds_after_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [5]
    monkeypatch.setattr(clock, "elapsed_ns", lambda: now_ns[0])
    cluster, lease = ClusterParts.__new__(ClusterParts), SharedLease()
    cluster._lease, cluster._began_ns = lease, 5
    for since_ns in (5, 1_000):
        now_ns[0] = since_ns + RIGHTS_KEPT_NS - 1
        assert cluster.rights_known
        now_ns[0] += 1
        assert not cluster.rights_known, "the start counts until there is a lease"
        lease.extend(1_000)
    lease.extend(now_ns[0])
    assert cluster.rights_known


def test_the_lease_that_processes_share() -> None:
    lease = SharedLease()
    assert lease.end_ns == 0 == lease.registration
    lease.begin(3)
    lease.extend(20)
    lease.extend(10)
    assert lease.end_ns == 20 and lease.registration == 3
    lease.end()
    assert lease.end_ns == 0
