"""Between workers, without rings: what is forwarded, a full ring both ways, restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from danube.broker.api import RoutedSession
from danube.broker.routing import remote
from danube.broker.routing.remote import RecordKind, RemoteSessions
from danube.core.protocol import native as wire
from danube.core.protocol.native import FrameDecoder, Kind
from danube.ipc.channel import Channel
from tests.unit.broker_parts import (
    TOPIC,
    Bench,
    FakeChannel,
    Received,
    RecordingSession,
    batch,
    expected,
    frames_in,
    numbered,
)

OWNER, HOLDER = 0, 1
CONNECTION = 7


class Pair:
    """An owner and the worker that holds a connection, joined by records that the test carries."""

    def __init__(self, root: Path) -> None:
        self.owner, self.holder = Bench(root / "owner"), Bench(root / "holder")
        self.to_holder, self.to_owner = FakeChannel(), FakeChannel()
        self.delivered: list[tuple[int, Received]] = []
        self.metadata_reads = 0
        self.owner_end = RemoteSessions(
            cast(Channel, self.to_holder), self.owner.shard, self._nobody, self._read
        )
        self.holder_end = RemoteSessions(
            cast(Channel, self.to_owner), self.holder.shard, self._deliver, self._read
        )

    def _read(self) -> None:
        self.metadata_reads += 1

    def _nobody(self, connection_id: int, frames: bytes) -> None:
        raise AssertionError("the owner holds no connection")

    def _deliver(self, connection_id: int, frames: bytes) -> None:
        self.delivered += [(connection_id, frame) for frame in frames_in(frames)]

    def forward(self, raw: bytes, connection: int = CONNECTION) -> bool:
        buffer = memoryview(bytearray(b"unread  " + raw))
        (frame,) = FrameDecoder().frames(buffer, 8, len(buffer))
        return self.holder_end.forward(OWNER, RecordingSession(connection), frame, buffer)

    def carry(self) -> None:
        """Everything that is in the rings arrives."""
        self.holder_end.flush()
        for worker, kind, record in self.to_owner.take():
            assert worker == OWNER
            self.owner_end.take(HOLDER, kind, memoryview(bytearray(record)))
        self.owner.turn()
        self.owner.syncer.step()
        self.owner_end.flush()
        self.bring()

    def bring(self) -> None:
        for worker, kind, record in self.to_holder.take():
            assert worker == HOLDER
            self.holder_end.take(OWNER, kind, memoryview(record))

    def got(self, connection: int = CONNECTION) -> list[Received]:
        delivered, self.delivered = self.delivered, []
        assert {number for number, _ in delivered} <= {connection}
        return [frame for _, frame in delivered]

    def subscribe(self, connection: int = CONNECTION, handle: int = 2, name: str = "s") -> None:
        request = wire.Subscribe(
            TOPIC, name, f"c{connection}", start="earliest", credit_records=10_000, credit_bytes=1 << 24
        )
        assert self.forward(wire.control_frame(Kind.SUBSCRIBE, request, 5, handle), connection)
        self.carry()

    def fill(self, *batches: bytes) -> None:
        producer = RecordingSession(99)
        self.owner.open_producer(producer)
        for raw in batches:
            self.owner.publish(producer, raw)
            self.owner.turn()
        self.owner.ask(producer, Kind.CLOSE_PRODUCER, handle=1)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.owner.shard.close()
    made.holder.shard.close()


def records(frames: list[Received]) -> list[tuple[int, bytes]]:
    return [record for frame in frames if frame.kind == Kind.DELIVER for record in frame.records]


def test_publishing_and_consuming_work_across_workers(pair: Pair) -> None:
    pair.forward(wire.control_frame(Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 3, 1))
    pair.carry()
    assert [frame.kind for frame in pair.got()] == [Kind.PRODUCER_OPENED]
    raw = numbered(5)
    pair.forward(wire.frame_header(Kind.PUBLISH, len(raw), 4, 1) + raw)
    pair.carry()
    (frame,) = pair.got()
    assert (frame.kind, frame.correlation) == (Kind.PUBLISHED, 4)
    assert pair.holder.counters["forwarded_out"] == pair.owner.counters["forwarded_in"] == 1
    pair.subscribe()
    pair.carry()
    assert records(pair.got()) == expected(0, 5)
    pair.forward(wire.ack_frame(2, bytes(8) + (5).to_bytes(8, "little")))
    pair.carry()
    assert pair.owner.hosted.subscription("s").core.ack_floor == 5


def test_a_full_ring_to_the_owner_takes_nothing(pair: Pair) -> None:
    pair.to_owner.room = False
    raw = wire.control_frame(Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 3, 1)
    assert not pair.forward(raw) and not pair.forward(wire.frame_header(Kind.PUBLISH, 0, 4, 1))
    assert pair.to_owner.sent == [] and pair.holder.counters["forwarded_out"] == 0
    pair.to_owner.room = True
    assert pair.forward(raw)
    pair.carry()
    assert [frame.correlation for frame in pair.got()] == [3]


def test_a_full_ring_to_the_connection_keeps_every_frame_in_order(pair: Pair) -> None:
    pair.to_holder.room = False
    for correlation in range(1, 6):
        pair.forward(wire.control_frame(Kind.CLOSE_PRODUCER, None, correlation, 9))
    pair.carry()
    assert pair.got() == [] and pair.owner_end.flush()
    pair.to_holder.room = True
    assert not pair.owner_end.flush()
    pair.bring()
    assert [frame.correlation for frame in pair.got()] == [1, 2, 3, 4, 5]


def test_a_backlog_stops_deliveries_to_that_connection_until_it_is_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BACKLOG_BYTES_MAX", 4000)
    pair.fill(*[batch(b"%d" % number + bytes(1000)) for number in range(12)])
    pair.to_holder.room = False
    pair.subscribe()
    link = next(iter(pair.owner.hosted.subscription("s").links.values()))
    pair.owner.shard.wake(pair.owner.hosted)
    pair.owner.turn()
    assert pair.owner_end.flush()
    assert not link.session.writable
    pair.fill(*[batch(b"%d" % number + bytes(1000)) for number in range(12, 15)])
    pair.owner.turn()
    assert pair.owner.hosted.subscription("s").core.in_flight_count < 15, "nothing more is granted to it"
    pair.to_holder.room = True
    for _ in range(4):
        pair.carry()
    assert link.session.writable
    assert [offset for offset, _ in records(pair.got())] == list(range(15))


def test_a_chunk_reaches_all_consumers_of_another_worker(pair: Pair) -> None:
    pair.fill(numbered(50))
    pair.subscribe(1, name="a")
    pair.delivered.clear()
    for connection, name in ((2, "b"), (3, "c")):
        request = wire.Subscribe(TOPIC, name, "c", start="earliest", credit_records=99, credit_bytes=1 << 20)
        pair.forward(wire.control_frame(Kind.SUBSCRIBE, request, 5, 2), connection)
    pair.carry()
    pair.carry()
    by_connection: dict[int, list[Received]] = {}
    for connection, frame in pair.delivered:
        by_connection.setdefault(connection, []).append(frame)
    assert {number: records(frames) for number, frames in by_connection.items() if records(frames)} == {
        2: expected(0, 50),
        3: expected(0, 50),
    }


def test_notices_wait_for_room_and_keep_their_order(pair: Pair) -> None:
    pair.subscribe()
    assert pair.owner.hosted.subscription("s").links
    pair.to_owner.room = False
    pair.holder_end.notify(OWNER, RecordKind.SESSION_GONE, CONNECTION)
    pair.holder_end.notify(OWNER, RecordKind.METADATA)
    assert pair.holder_end.flush()
    pair.to_owner.room = True
    pair.holder_end.notify(OWNER, RecordKind.METADATA)
    assert not pair.holder_end.flush()
    kinds = [kind for _, kind, _ in pair.to_owner.sent]
    assert kinds == [RecordKind.SESSION_GONE, RecordKind.METADATA, RecordKind.METADATA]
    pair.carry()
    assert not pair.owner.hosted.subscription("s").links and not pair.owner_end._sessions
    assert pair.metadata_reads == 2


def test_a_worker_that_restarts_takes_its_connections_with_it(pair: Pair) -> None:
    pair.subscribe()
    pair.to_holder.room = False
    pair.fill(numbered(3))
    pair.owner.turn()
    pair.owner_end.notify(HOLDER, RecordKind.METADATA)
    assert pair.owner_end.flush()
    pair.owner_end.worker_restarted(HOLDER)
    pair.to_holder.room = True
    assert not pair.owner_end.flush() and pair.to_holder.sent == [], "nothing of the old one goes to the new"
    host = pair.owner.hosted.subscription("s")
    assert not host.links and host.core.in_flight_count == 0 and not pair.owner_end._sessions


def test_a_connection_that_only_asked_is_forgotten_with_its_end(tmp_path: Path) -> None:
    from tests.unit.broker_parts import RoutedBench

    pair = Pair(tmp_path)
    routed = RoutedBench(tmp_path / "routed", 2)
    name = routed.name_owned_by(1)
    channel = FakeChannel()
    routed.router.remote = RemoteSessions(cast(Channel, channel), routed.shard, pair._nobody, pair._read)
    session: RoutedSession = RecordingSession(CONNECTION)
    correlation = routed.request(session, Kind.ADMIN, wire.Admin("list_subscriptions", name))
    routed.router.answered(session, wire.result_frame([], correlation))
    assert not session.requests and not session.routes
    routed.router.session_gone(session)
    assert [(worker, kind) for worker, kind, _ in channel.take()] == [
        (1, RecordKind.TO_OWNER),
        (1, RecordKind.SESSION_GONE),
    ]


def test_what_the_rings_have_no_room_for_is_pending(pair: Pair) -> None:
    assert not pair.owner_end.pending
    pair.owner_end._session(HOLDER, CONNECTION).send(wire.result_frame(None, 1))
    assert pair.owner_end.pending, "an answer"
    pair.to_holder.room = False
    assert pair.owner_end.flush() and pair.owner_end.pending
    pair.to_holder.room = True
    assert not pair.owner_end.flush() and not pair.owner_end.pending
    pair.to_holder.room = False
    pair.owner_end.notify(HOLDER, RecordKind.METADATA)
    assert pair.owner_end.pending, "a notice"
    pair.to_holder.room = True
    assert not pair.owner_end.flush() and not pair.owner_end.pending


def test_unknown_gone_sessions_change_nothing(pair: Pair) -> None:
    record: Any = memoryview((123).to_bytes(8, "little"))
    pair.owner_end.take(HOLDER, RecordKind.SESSION_GONE, record)
    assert not pair.owner_end._sessions
