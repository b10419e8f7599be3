"""The router: whom a frame is for, what any worker answers, and what happens when an owner restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from danube.broker.api import RoutedSession
from danube.broker.audit.audit import Audit
from danube.broker.routing.remote import RecordKind, RemoteSessions
from danube.core.metadata.roles import Access
from danube.core.protocol import native as wire
from danube.core.protocol.native import Frame, Kind, OpenProducer, Subscribe
from danube.core.security.authority import Authority
from danube.core.security.principals import Identity, Principal
from danube.errors import (
    CallerError,
    DanubeError,
    InvalidArgument,
    InvalidName,
    NotAllowed,
    OwnerMoved,
    PolicyMismatch,
    ProtocolError,
    StorageFailed,
    TopicExists,
    TopicNotFound,
    Unavailable,
)
from tests.unit.broker_parts import RecordingSession, RoutedBench, numbered


class FakeRemote:
    """The way to another worker."""

    def __init__(self) -> None:
        self.room = True
        self.forwarded: list[tuple[int, int, int]] = []
        self.notices: list[tuple[int, int, int]] = []

    def forward(self, worker: int, session: RoutedSession, frame: Frame, buffer: memoryview) -> bool:
        if self.room:
            self.forwarded.append((worker, session.connection_id, frame.kind))
        return self.room

    def notify(self, worker: int, kind: int, connection_id: int = 0) -> None:
        self.notices.append((worker, kind, connection_id))


class Routed(RoutedBench):
    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, 2, **options)
        self.remote = FakeRemote()
        self.router.remote = cast(RemoteSessions, self.remote)
        self.here, self.there = self.name_owned_by(0), self.name_owned_by(1)
        self.session = RecordingSession(7)

    def error(self) -> Exception:
        return self.session.only(Kind.ERROR).error

    def result(self) -> Any:
        return wire.decode_result(self.session.only(Kind.RESULT).body)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Routed]:
    made = Routed(tmp_path)
    yield made
    made.shard.close()


def test_frames_go_to_the_owner_of_their_partition(bench: Routed) -> None:
    bench.request(bench.session, Kind.OPEN_PRODUCER, wire.OpenProducer(bench.here, "p"), 1)
    assert bench.session.only(Kind.PRODUCER_OPENED) and bench.remote.forwarded == []
    bench.request(bench.session, Kind.SUBSCRIBE, wire.Subscribe(bench.there, "s", "c"), 2)
    raw = numbered(1)
    assert bench.route(bench.session, wire.frame_header(Kind.PUBLISH, len(raw), 9, 1) + raw)
    assert bench.route(bench.session, wire.credit_frame(2, 1, 1))
    assert bench.remote.forwarded == [(1, 7, Kind.SUBSCRIBE), (1, 7, Kind.CREDIT)]
    bench.turn()
    assert bench.session.only(Kind.PUBLISHED).correlation == 9


def test_a_topic_that_does_not_exist_belongs_to_the_owner_of_the_next_one(bench: Routed) -> None:
    assert bench.router.owner_to_be(bench.there) == 1
    for number in range(8):
        name = f"/default/next-{number}"
        expected = bench.router.owner_to_be(name)
        with pytest.raises(TopicNotFound):
            bench.router.owner(name)
        assert bench.router.owner_to_be(f"{name}-part-1") == (expected + 1) % 2
        bench.proposals.create(name)
        assert bench.router.owner(name) == expected
    with pytest.raises(InvalidName):
        bench.router.owner_to_be("no name")


def test_a_full_ring_is_offered_the_same_frame_again(bench: Routed) -> None:
    bench.remote.room = False
    raw = wire.control_frame(Kind.OPEN_PRODUCER, wire.OpenProducer(bench.there, "p"), 5, 1)
    assert not bench.route(bench.session, raw)
    assert bench.session.requests == {}, "nothing is owed for what was not taken"
    bench.remote.room = True
    assert bench.route(bench.session, raw)
    assert bench.session.requests == {5: 1} and bench.session.take() == []
    bench.remote.room = False
    close = wire.control_frame(Kind.CLOSE_PRODUCER, None, 6, 1)
    assert not bench.route(bench.session, close) and bench.session.routes == {1: 1}
    bench.remote.room = True
    assert bench.route(bench.session, close) and bench.session.routes == {}


def test_a_full_ring_is_offered_what_opens_again_where_access_is_controlled(tmp_path: Path) -> None:
    ada = Identity(Principal("user", "ada"), "token")
    bench = Routed(tmp_path, authority=Authority(Access, frozenset({ada.principal})))
    bench.session.identity = ada
    bench.remote.room = False
    raw = wire.control_frame(Kind.SUBSCRIBE, wire.Subscribe(bench.there, "s", "c"), 5, 1)
    assert not bench.route(bench.session, raw)
    bench.remote.room = True
    assert bench.route(bench.session, raw)
    assert bench.session.take() == [] and bench.session.routes == {1: 1} and list(bench.session.grants) == [1]
    assert bench.route(bench.session, wire.control_frame(Kind.CLOSE_PRODUCER, None, 6, 1))
    assert isinstance(bench.error(), InvalidArgument), "it is a consumer"
    assert bench.session.routes == {1: 1} and list(bench.session.grants) == [1]
    bench.shard.close()


def test_an_operation_that_a_full_ring_refuses_is_audited_once(bench: Routed) -> None:
    class Told:
        def __init__(self) -> None:
            self.ops: list[str] = []

        def request(self, asker: Any, request: wire.Admin, connection_id: int) -> None:
            self.ops.append(request.op)

    told = Told()
    bench.router.audit = cast(Audit, told)
    bench.remote.room = False
    raw = wire.control_frame(Kind.ADMIN, wire.Admin("seek", bench.there), 5)
    for _ in range(3):
        assert not bench.route(bench.session, raw)
    bench.remote.room = True
    assert bench.route(bench.session, raw)
    assert told.ops == ["seek"]
    assert bench.route(bench.session, raw)
    assert told.ops == ["seek", "seek"], "this is another one"


@pytest.mark.parametrize("kind", [Kind.LOOKUP, Kind.OPEN_PRODUCER, Kind.SUBSCRIBE])
def test_a_denied_frame_that_finds_or_opens_is_audited(tmp_path: Path, kind: Kind) -> None:
    told: list[tuple[str, str, str, int]] = []

    class Told:
        def tell(self, asker: Any, operation: str, resource: str, outcome: str, **more: Any) -> None:
            told.append((str(asker.principal), operation, outcome, more["code"]))

    bench = Routed(tmp_path, authority=Authority(Access, frozenset()))
    bench.router.audit = cast(Audit, Told())
    bench.session.identity = Identity(Principal("user", "eve"), "token")
    requests = {
        Kind.LOOKUP: wire.Lookup(bench.here),
        Kind.OPEN_PRODUCER: wire.OpenProducer(bench.here, "p"),
        Kind.SUBSCRIBE: wire.Subscribe(bench.here, "s", "c"),
    }
    bench.request(bench.session, kind, requests[kind], 1)
    error = bench.error()
    assert isinstance(error, NotAllowed)
    assert told == [("user:eve", kind.name.lower(), "denied", error.code)]
    bench.shard.close()


def test_answers_settle_their_requests(bench: Routed) -> None:
    for handle in (1, 2):
        bench.request(bench.session, Kind.OPEN_PRODUCER, wire.OpenProducer(bench.there, "p"), handle)
    first, second = bench.session.requests
    bench.router.answered(bench.session, wire.result_frame(None, first) + wire.result_frame(None, 12345))
    assert list(bench.session.requests) == [second]


def test_a_restarted_owner_ends_its_handles_and_requests_and_no_others(bench: Routed) -> None:
    bench.request(bench.session, Kind.OPEN_PRODUCER, wire.OpenProducer(bench.here, "p"), 1)
    opened = bench.request(bench.session, Kind.OPEN_PRODUCER, wire.OpenProducer(bench.there, "p"), 2)
    bench.router.answered(bench.session, wire.result_frame(None, opened))
    open_request = bench.request(bench.session, Kind.SUBSCRIBE, wire.Subscribe(bench.there, "s", "c"), 3)
    bench.session.take()
    bench.router.worker_restarted(bench.session, 1)
    frames = bench.session.take()
    assert all(isinstance(frame.error, OwnerMoved) for frame in frames)
    assert [(frame.correlation, frame.handle) for frame in frames] == [(open_request, 0), (0, 2), (0, 3)]
    assert bench.session.routes == {} and bench.session.requests == {}
    bench.router.worker_restarted(bench.session, 1)
    assert bench.session.take() == []


def test_a_closed_handle_leaves_nothing_behind(bench: Routed) -> None:
    for handle in range(1, 20):
        bench.request(bench.session, Kind.OPEN_PRODUCER, wire.OpenProducer(bench.here, "p"), handle)
        bench.request(bench.session, Kind.CLOSE_PRODUCER, None, handle)
    assert bench.session.routes == {} and bench.session.producers == {}


def test_every_worker_that_knows_a_connection_hears_of_its_end(bench: Routed) -> None:
    bench.request(bench.session, Kind.OPEN_PRODUCER, wire.OpenProducer(bench.here, "p"), 1)
    bench.router.session_gone(bench.session)
    assert bench.remote.notices == [], "the other worker never heard of it"
    other = RecordingSession(8)
    bench.request(other, Kind.OPEN_PRODUCER, wire.OpenProducer(bench.there, "p"), 1)
    bench.request(other, Kind.CLOSE_PRODUCER, None, 1)
    bench.router.session_gone(other)
    assert bench.remote.notices == [(1, RecordKind.SESSION_GONE, 8)]


@pytest.mark.parametrize(
    "kind, body, error",
    [
        (Kind.OPEN_PRODUCER, wire.OpenProducer("/default/none", "p"), TopicNotFound),
        (Kind.SUBSCRIBE, wire.Subscribe("no slash", "s", "c"), InvalidName),
        (Kind.ADMIN, wire.Admin("seek", "/default/none"), TopicNotFound),
        (Kind.ADMIN, wire.Admin("dance"), InvalidArgument),
        (Kind.ADMIN, wire.Admin("topic", args={"topic": "/default/none"}), TopicNotFound),
        (Kind.ADMIN, wire.Admin("topic"), InvalidArgument),
        (Kind.PUBLISHED, None, ProtocolError),
        (200, None, ProtocolError),
    ],
)
def test_what_cannot_be_routed_is_answered(
    bench: Routed, kind: int, body: Any, error: type[Exception]
) -> None:
    correlation = bench.request(bench.session, kind, body, 4)
    frame = bench.session.only(Kind.ERROR)
    assert isinstance(frame.error, error) and frame.correlation == correlation
    assert 4 not in bench.session.routes


@pytest.mark.parametrize(
    "args",
    [
        {"partitions": "three"},
        {"partitions": 1.5},
        {"partitions": -1},
        {"policy": "fast"},
        {"policy": 7},
        {"policy": {"durability": 5}},
        {"policy": {"durability": "eternal"}},
        {"policy": {"reliable": "yes"}},
        {"policy": {"retention_ms": "long"}},
        {"policy": {"surprise": 1}},
        {"policy": {1: 2}},
        {"policy": {"failure": {"backoff": "none"}}},
        {"topic": 5},
    ],
)
def test_a_topic_is_not_made_of_anything(bench: Routed, args: dict[str, Any]) -> None:
    before = bench.proposals.state.topic_count
    bench.request(
        bench.session, Kind.ADMIN, wire.Admin("create_topic", args={"topic": "/default/new", **args})
    )
    bench.proposals.step()
    assert isinstance(bench.error(), CallerError)
    assert bench.proposals.state.topic_count == before


def test_topics_are_made_listed_changed_and_deleted(bench: Routed) -> None:
    args = {"topic": "/default/new", "partitions": 3, "policy": {"durability": "fsync"}}
    bench.request(bench.session, Kind.ADMIN, wire.Admin("create_topic", args=args))
    assert bench.session.take() == []
    bench.proposals.step()
    made = bench.result()
    assert made["partitions"] == [f"/default/new-part-{number}" for number in range(3)]
    assert made["durability"] == "fsync" and bench.metadata_changes == 1
    bench.request(bench.session, Kind.ADMIN, wire.Admin("create_topic", args=args))
    bench.proposals.step()
    assert isinstance(bench.error(), TopicExists)
    update = {"topic": "/default/new", "policy": {"max_unacked": 7}}
    bench.request(bench.session, Kind.ADMIN, wire.Admin("update_topic", args=update))
    bench.proposals.step()
    assert bench.result()["policy"]["max_unacked"] == 7
    for namespace, found in (("default", True), ("other", False), (5, False), ([], False)):
        bench.request(bench.session, Kind.ADMIN, wire.Admin("list_topics", args={"namespace": namespace}))
        frame = bench.session.take()[0]
        names = [] if frame.kind == Kind.ERROR else [each["topic"] for each in wire.decode_result(frame.body)]
        assert ("/default/new" in names) is found
    bench.request(bench.session, Kind.ADMIN, wire.Admin("status"))
    assert bench.result() == {"version": "test"}
    bench.request(bench.session, Kind.ADMIN, wire.Admin("delete_topic", args={"topic": "/default/new"}))
    bench.proposals.step()
    assert bench.result() is None
    assert bench.proposals.state.find_topic("/default/new") is None


def test_a_lookup_finds_makes_or_refuses(bench: Routed) -> None:
    bench.request(bench.session, Kind.LOOKUP, wire.Lookup("/default/new"))
    assert isinstance(bench.error(), TopicNotFound)
    assert bench.metadata_reads, "another worker may have made it just now"
    bench.request(bench.session, Kind.LOOKUP, wire.Lookup("/default/new", create=True, partitions=2))
    bench.proposals.step()
    assert bench.result()["partitions"] == ["/default/new-part-0", "/default/new-part-1"]
    bench.request(bench.session, Kind.LOOKUP, wire.Lookup("/default/new", reliable=False))
    assert isinstance(bench.error(), PolicyMismatch)
    bench.request(bench.session, Kind.LOOKUP, wire.Lookup("/default/new", durability="fsync"))
    assert isinstance(bench.error(), PolicyMismatch)
    bench.request(bench.session, Kind.LOOKUP, wire.Lookup("/default/new", durability="soon"))
    assert isinstance(bench.error(), InvalidArgument)
    bench.request(bench.session, Kind.LOOKUP, wire.Lookup("/default/third", create=True))
    bench.proposals.step(StorageFailed("the disk is away"))
    assert isinstance(bench.error(), StorageFailed)


def test_two_that_make_the_same_topic_get_the_same_topic(bench: Routed) -> None:
    other = RecordingSession(8)
    for session, reliable in ((bench.session, True), (other, False)):
        bench.request(session, Kind.LOOKUP, wire.Lookup("/default/new", create=True, reliable=reliable))
    bench.proposals.step()
    assert bench.result()["reliable"] is True
    assert isinstance(other.only(Kind.ERROR).error, PolicyMismatch)


def test_topics_are_not_made_by_lookups_where_that_is_off(tmp_path: Path) -> None:
    bench = Routed(tmp_path, auto_create=False)
    bench.request(bench.session, Kind.LOOKUP, wire.Lookup("/default/new", create=True))
    assert isinstance(bench.error(), TopicNotFound) and bench.proposals.waiting == []


def test_new_topics_have_the_configured_partitions(tmp_path: Path) -> None:
    bench = Routed(tmp_path, default_partitions=4)
    bench.request(bench.session, Kind.LOOKUP, wire.Lookup("/default/new", create=True))
    bench.proposals.step()
    assert len(bench.result()["partitions"]) == 4


@pytest.mark.parametrize("kind", [Kind.OPEN_PRODUCER, Kind.SUBSCRIBE])
def test_who_opens_a_topic_that_another_broker_has_just_made_waits(bench: Routed, kind: Kind) -> None:
    asked: list[DanubeError] = []

    def take(session: Any, frame: Any, buffer: Any, error: DanubeError, answer: Any) -> bool:
        asked.append(error)
        return True

    bench.router.elsewhere = cast(Any, SimpleNamespace(take=take, elsewhere=lambda *place: None))
    newest = bench.router.operations.state.next_topic_id

    def opening(topic_id: int) -> Any:
        partition = "/default/made-there"
        if kind == Kind.OPEN_PRODUCER:
            return OpenProducer(partition, "writer", topic_id=topic_id)
        return Subscribe(partition, "subscription", "consumer", topic_id=topic_id)

    for topic_id in (newest, newest - 1, 0):
        bench.request(bench.session, kind, opening(topic_id), handle=1)
    assert [type(error) for error in asked] == [Unavailable, TopicNotFound, TopicNotFound]
