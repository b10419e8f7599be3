"""Subscribing and delivery at the owner: credit, rate, shared chunks, damage, retention, hostile numbers."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.broker.partition import deliveries
from danube.broker.partition.hosted import HostedPartition
from danube.core.partition.policy import FailurePolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import (
    CallerError,
    Fenced,
    FetchPending,
    InvalidArgument,
    OffsetOutOfRange,
    OwnerMoved,
    StorageFull,
    SubscriptionBusy,
    SubscriptionNotFound,
    WrongState,
)
from danube.host import clock
from tests.answers import fitting
from tests.unit.broker_parts import CREDIT, QUICK, TOPIC, Bench, RecordingSession, batch, expected, numbered
from tests.unit.failing_files import FailingFiles

BIG = [1 << 63, (1 << 64) - 1]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.shard.close()


@pytest.fixture
def session() -> RecordingSession:
    return RecordingSession()


def fill(bench: Bench, *counts: int, size: int = 0) -> None:
    """Publish batches of so many records, one write for each, all over several segments if large."""
    producer = RecordingSession(99)
    bench.open_producer(producer)
    for count in counts:
        start = bench.hosted.core.log_end
        payloads = [b"%d" % number + bytes(size) for number in range(start, start + count)]
        bench.publish(producer, batch(*payloads))
        bench.turn()
        bench.sealer.step()
    assert len(producer.take(Kind.PUBLISHED)) == len(counts)
    bench.ask(producer, Kind.CLOSE_PRODUCER, handle=1)


def offsets(session: RecordingSession) -> list[int]:
    return [offset for offset, _ in session.records()]


def segments(bench: Bench) -> list[Path]:
    directory = bench.hosted.directory
    assert directory is not None
    return sorted(
        path for path in directory.iterdir() if path.stat().st_size > 2000 and "cursor" not in path.name
    )


# -- subscribing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start, value, first",
    [
        ("earliest", 0, 0),
        ("latest", 0, 6),
        ("offset", 4, 4),
        ("offset", 6, 6),
        ("time", 0, 0),
        ("time", 1 << 62, 6),
    ],
)
def test_a_new_subscription_starts_where_it_was_asked_to(
    bench: Bench, session: RecordingSession, start: str, value: int, first: int
) -> None:
    fill(bench, 3, 3)
    view = bench.subscribe(session, start=start, start_value=value)
    assert (view.ack_floor, view.high_watermark) == (first, 6)
    bench.turn()
    assert session.records() == expected(first, 6)


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"start": "offset", "start_value": 7}, OffsetOutOfRange),
        ({"start": "offset", "start_value": -1}, OffsetOutOfRange),
        ({"start": "offset", "start_value": BIG[1]}, OffsetOutOfRange),
        ({"start": "yesterday"}, InvalidArgument),
        ({"mode": "anycast"}, InvalidArgument),
        ({"credit_records": -1}, InvalidArgument),
        ({"credit_bytes": -1}, InvalidArgument),
        ({"max_unacked": -1}, InvalidArgument),
        ({"max_unacked": BIG[1]}, InvalidArgument),
        ({"consumer": ""}, CallerError),
        ({"failure": FailurePolicy(poison="dead_letter")}, InvalidArgument),
        ({"mode": "key_shared", "filters": ["a" * 10_000]}, CallerError),
        ({"mode": "key_shared", "filters": ["a"] * 10_000}, CallerError),
    ],
)
def test_a_refused_subscribe_leaves_everything_as_it_was(
    bench: Bench, session: RecordingSession, fields: dict[str, Any], error: type[Exception]
) -> None:
    fill(bench, 6)
    request = wire.Subscribe(TOPIC, **{"subscription": "s", "consumer": "c", **fields})
    bench.ask(session, Kind.SUBSCRIBE, request, 2)
    assert isinstance(session.only(Kind.ERROR).error, error)
    assert not bench.hosted.subscriptions and not session.consumers
    bench.shard.store_cursors()
    assert bench.subscribe(session, start="earliest").ack_floor == 0


def test_a_refused_join_keeps_a_subscription_that_was_there(bench: Bench, session: RecordingSession) -> None:
    fill(bench, 2)
    bench.subscribe(session, mode="exclusive", start="earliest")
    other = RecordingSession(2)
    bench.ask(other, Kind.SUBSCRIBE, wire.Subscribe(TOPIC, "s", "else", mode="exclusive"), 2)
    assert isinstance(other.only(Kind.ERROR).error, SubscriptionBusy)
    bench.ask(other, Kind.SUBSCRIBE, wire.Subscribe(TOPIC, "s", "else", mode="shared"), 2)
    assert isinstance(other.only(Kind.ERROR).error, SubscriptionBusy)
    bench.turn()
    assert session.records() == expected(0, 2)


def test_a_subscription_whose_cursor_a_full_disk_refused_can_be_asked_for_again(
    bench: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bench, 2)
    disk = FailingFiles(monkeypatch)
    disk.arm(0, errno.ENOSPC, lasting=True)
    bench.ask(session, Kind.SUBSCRIBE, wire.Subscribe(TOPIC, "s", "c", start="earliest"), 2)
    assert isinstance(session.only(Kind.ERROR).error, StorageFull)
    assert not session.consumers, "the client was told that nothing is open under this handle"
    disk.disarm()
    assert bench.subscribe(session, consumer="c", start="earliest").ack_floor == 0
    bench.turn()
    assert session.records() == expected(0, 2)


def test_the_same_consumer_name_displaces_the_older_connection(
    bench: Bench, session: RecordingSession
) -> None:
    fill(bench, 3)
    bench.subscribe(session, consumer="c", start="earliest")
    bench.turn()
    assert offsets(session) == [0, 1, 2]
    other = RecordingSession(2)
    bench.subscribe(other, consumer="c")
    frame = session.only(Kind.ERROR)
    assert isinstance(frame.error, Fenced) and frame.handle == 2 and not session.consumers
    bench.turn()
    assert offsets(other) == [0, 1, 2]
    bench.ack(session, 0, 3)
    assert isinstance(session.only(Kind.ERROR).error, OwnerMoved)
    assert bench.hosted.subscription("s").core.ack_floor == 0


def test_a_closed_consumer_gives_its_records_to_the_others(bench: Bench, session: RecordingSession) -> None:
    fill(bench, 4)
    bench.subscribe(session, start="earliest")
    bench.turn()
    assert offsets(session) == [0, 1, 2, 3]
    bench.ack(session, 0, 1)
    bench.ask(session, Kind.CLOSE_CONSUMER, handle=2)
    session.only(Kind.RESULT)
    bench.subscribe(session, handle=3)
    bench.turn()
    assert offsets(session) == [1, 2, 3]


@pytest.fixture
def again(bench: Bench) -> Iterator[Bench]:
    """An owner of epoch 512 of a partition with the records 0 to 5."""
    fill(bench, 6)
    bench.shard.close()
    made = Bench(bench.shard._root)
    made.shard._epoch = 512
    yield made
    made.shard.close()


def test_acks_of_an_earlier_owner_count_though_nothing_was_delivered_here(
    again: Bench, session: RecordingSession
) -> None:
    other = RecordingSession(2)
    again.subscribe(other, start="earliest", credit_records=3)
    again.turn()
    assert offsets(other) == [0, 1, 2]
    again.subscribe(session, consumer="d", credit_records=0, epoch=256)
    producer = RecordingSession(99)
    again.open_producer(producer)
    again.publish(producer, batch(b"6"))
    again.turn()
    again.ack(session, 1, 2)  # another consumer has it
    again.ack(session, 4, 7)  # nobody has them, and of 6 nobody can have heard
    again.frame(other, wire.credit_frame(2, 9, 0))
    again.turn()
    assert offsets(other) == [3, 6]
    state = again.hosted.subscription("s").core.cursor_state()
    assert (state.ack_floor, state.acked.tolist()) == (0, [[1, 2], [4, 6]])


def test_what_somebody_sought_back_to_is_not_acked_by_what_was_acked_before(
    again: Bench, session: RecordingSession
) -> None:
    again.subscribe(RecordingSession(2), start="earliest", credit_records=0)
    again.subscribe(session, consumer="d", credit_records=0, epoch=256)
    again.ack(session, 0, 6)
    core = again.hosted.subscription("s").core
    assert core.ack_floor == 6
    session.take()
    assert again.admin(RecordingSession(3), "seek", subscription="s", kind="earliest").kind == Kind.RESULT
    assert session.only(Kind.SOUGHT).handle == 2
    again.ack(session, 0, 6)
    again.subscribe(session, handle=3, epoch=512, credit_records=0)
    again.ack(session, 0, 6, handle=3)
    assert core.ack_floor == 0


# -- credit and rate ------------------------------------------------------------------------------


def test_record_credit_is_never_passed(bench: Bench, session: RecordingSession) -> None:
    fill(bench, 5, 5)
    bench.subscribe(session, start="earliest", credit_records=3)
    bench.turn()
    assert offsets(session) == [0, 1, 2]
    bench.frame(session, wire.credit_frame(2, 4, 0))
    bench.turn()
    assert offsets(session) == [3, 4, 5, 6]


def test_byte_credit_pauses_a_consumer_and_wakes_it(bench: Bench, session: RecordingSession) -> None:
    fill(bench, 1, 1, 1, size=1000)
    bench.subscribe(session, start="earliest", credit_bytes=0)
    bench.turn()
    assert session.take() == []
    bench.frame(session, wire.credit_frame(2, 0, 1))
    bench.turn()
    got = offsets(session)
    assert got == [0, 1, 2][: len(got)] and got
    link = session.consumers[2]
    assert link.credit_bytes <= 0 and not link.ready
    bench.frame(session, wire.credit_frame(2, 0, CREDIT))
    bench.turn()
    assert got + offsets(session) == [0, 1, 2]


def test_a_connection_that_takes_no_bytes_is_given_none(bench: Bench, session: RecordingSession) -> None:
    fill(bench, 2)
    bench.subscribe(session, start="earliest")
    session.writable = False
    bench.shard.session_writable(session)
    bench.turn()
    assert session.take() == []
    session.writable = True
    bench.shard.session_writable(session)
    bench.turn()
    assert offsets(session) == [0, 1]


def test_a_dispatch_rate_spreads_and_drops_nothing(
    tmp_path: Path, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10**12
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now)
    bench = Bench(tmp_path, max_dispatch_rate=10)
    fill(bench, 25)
    bench.subscribe(session, start="earliest")
    got = []
    for step in range(4):
        bench.turn()
        part = offsets(session)
        assert len(part) <= 10, step
        got += part
        assert bench.hosted.subscriptions["s"].deadline_ns is not None or len(got) == 25
        now += 10**9
        bench.shard.tick()
    assert got == list(range(25))
    bench.shard.close()


def test_much_to_send_takes_several_turns(
    bench: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "TURN_BYTES", 3000)
    fill(bench, *[1] * 12, size=1000)
    bench.subscribe(session, start="earliest")
    turns = [0]
    got: list[int] = []
    while len(got) < 12 and turns[0] < 13:
        wanted = bench.turns_wanted
        bench.turn()
        got += offsets(session)
        turns[0] += 1
        assert len(got) == 12 or bench.turns_wanted > wanted, "it asks for the next turn itself"
    assert got == list(range(12)) and turns[0] > 1


# -- several subscriptions ------------------------------------------------------------------------


def test_subscriptions_at_the_same_place_share_one_read_and_one_copy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bench, 4, 4)
    log = bench.hosted.log
    assert log is not None
    reads: list[int] = []
    real = log.read
    monkeypatch.setattr(log, "read", lambda offset, *rest: (reads.append(offset), real(offset, *rest))[1])
    chunks: list[Any] = []

    class Sharing(RecordingSession):
        def send(self, *parts: bytes | memoryview) -> None:
            chunks.extend(parts[1:])
            super().send(*parts)

    sessions = [Sharing(number) for number in range(3)]
    for number, each in enumerate(sessions):
        bench.subscribe(each, name=f"s{number}", start="earliest")
    bench.turn()
    assert [each.records() for each in sessions] == [expected(0, 8)] * 3
    assert reads == [0]
    assert len(chunks) == 3 and all(chunk is chunks[0] for chunk in chunks)


def test_key_shared_consumers_get_disjoint_records_of_one_chunk(bench: Bench) -> None:
    producer = RecordingSession(99)
    bench.open_producer(producer)
    bench.publish(producer, numbered(40, keys=[b"k%d" % (number % 8) for number in range(40)]))
    bench.turn()
    sessions = [RecordingSession(number) for number in range(2)]
    for number, each in enumerate(sessions):
        bench.subscribe(each, mode="key_shared", start="earliest", consumer=f"c{number}")
    bench.turn()
    got = [each.records() for each in sessions]
    assert all(got) and sorted(got[0] + got[1]) == expected(0, 40)
    assert not {offset % 8 for offset, _ in got[0]} & {offset % 8 for offset, _ in got[1]}


# -- damage and retention -------------------------------------------------------------------------


def damage(bench: Bench, payload: bytes) -> None:
    """Flip a bit of this payload on the disk, and let nothing in memory hide it."""
    for path in segments(bench):
        data = bytearray(path.read_bytes())
        at = data.find(payload)
        if at >= 0:
            data[at] ^= 1
            path.chmod(0o600)
            path.write_bytes(data)
            bench.hosted._chunk = None
            bench.hosted.hot.clear()
            return
    raise AssertionError(f"{payload!r} is not on the disk")


def test_records_of_a_key_do_not_overtake_those_whose_bytes_must_be_fetched(
    bench: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = RecordingSession(99)
    bench.open_producer(producer)
    bench.publish(producer, batch(*[b"x"] * 20, keys=[b"k"] * 20))
    bench.turn()
    bench.subscribe(session, start="earliest", mode="key_shared", credit_records=2)
    bench.turn()
    assert offsets(session) == [0, 1]
    real, away, came = HostedPartition.chunk, [True], [False]

    def chunk(self: HostedPartition, offset: int, *size: int) -> Any:
        if offset < 6 and away[0]:
            raise FetchPending("it is fetched", ready=lambda: came[0])
        return real(self, offset, *size)

    monkeypatch.setattr(HostedPartition, "chunk", chunk)
    bench.frame(session, wire.credit_frame(2, 4, CREDIT))
    bench.turn()
    assert offsets(session) == [], "2 to 5 are fetched"
    came[0] = True  # and did not stay in the cache
    bench.frame(session, wire.credit_frame(2, 4, CREDIT))
    bench.turn()
    assert offsets(session) == [], "6 to 9 are at hand, and overtake nothing"
    away[0] = False
    bench.shard.wake(bench.hosted)
    bench.turn()
    assert offsets(session) == list(range(2, 10))


def test_damage_before_a_grant_is_skipped_counted_and_told_once(
    bench: Bench, session: RecordingSession
) -> None:
    fill(bench, 2, 2, 2, size=600)
    damage(bench, b"2" + bytes(600))
    bench.subscribe(session, start="earliest")
    bench.turn()
    assert offsets(session) == [0, 1, 4, 5]
    assert bench.hosted.statistics()["damaged"] == [[2, 4]] and bench.counters["damaged_records"] == 2
    bench.ack(session, 0, 2)
    bench.ack(session, 4, 6)
    assert bench.hosted.subscription("s").core.ack_floor == 6


def test_damage_between_grant_and_redelivery_keeps_what_is_still_in_flight(
    tmp_path: Path, session: RecordingSession
) -> None:
    failure = FailurePolicy(base_redelivery_delay_ms=0, ack_timeout_ms=60_000)
    bench = Bench(tmp_path, failure=failure)
    fill(bench, 2, 2, 2, size=1500)
    bench.subscribe(session, start="earliest")
    bench.turn()
    assert offsets(session) == [0, 1, 2, 3, 4, 5]
    damage(bench, b"2" + bytes(1500))
    bench.nack(session, 0, 6)
    bench.turn()
    assert offsets(session) == [0, 1, 4, 5]
    core = bench.hosted.subscription("s").core
    assert core.ack_floor == 0, "what was delivered again is not acked by the damage behind it"
    assert core.statistics()["damaged"] == 2
    bench.nack(session, 0, 1)
    bench.turn()
    assert offsets(session) == [0]
    bench.ack(session, 0, 2)
    bench.ack(session, 4, 6)
    assert core.ack_floor == 6
    core.check()
    bench.shard.close()


def test_a_missing_segment_is_passed_and_never_delivered_as_nothing(
    bench: Bench, session: RecordingSession
) -> None:
    fill(bench, *[1] * 9, size=1500)
    bench.shard.close()
    middle = segments(bench)[1]
    assert len(segments(bench)) >= 3
    middle.unlink()
    again = Bench(bench.shard._root)
    again.subscribe(session, start="earliest")
    again.turn()
    got = offsets(session)
    hole = [number for number in range(9) if number not in got]
    assert hole and hole == list(range(hole[0], hole[-1] + 1)) and got[0] == 0 and got[-1] == 8
    for offset in got:
        again.ack(session, offset, offset + 1)
    assert again.hosted.subscription("s").core.ack_floor == 9
    again.shard.close()


def test_retention_that_passes_records_in_flight_expires_them(
    tmp_path: Path, session: RecordingSession
) -> None:
    bench = Bench(tmp_path, failure=FailurePolicy(base_redelivery_delay_ms=0, ack_timeout_ms=60_000))
    fill(bench, *[1] * 9, size=1500)
    bench.subscribe(session, start="earliest")
    bench.turn()
    assert offsets(session) == list(range(9))
    bench.shard.storage.sync_written()
    bench.syncer.step()
    log = bench.hosted.log
    assert log is not None
    log.retain(clock.wall_us(), 0, 6000)
    start = log.start
    assert 0 < start < 9
    bench.hosted._chunk = None
    bench.hosted.hot.clear()
    bench.nack(session, 0, 9)
    bench.turn()
    assert offsets(session) == list(range(start, 9))
    core = bench.hosted.subscription("s").core
    assert (core.ack_floor, core.statistics()["expired"]) == (start, start)
    core.check()
    bench.shard.close()


def test_retention_that_passes_the_place_moves_it_on(bench: Bench, session: RecordingSession) -> None:
    fill(bench, *[1] * 9, size=1500)
    bench.subscribe(session, start="earliest", credit_records=0)
    bench.shard.storage.sync_written()
    bench.syncer.step()
    log = bench.hosted.log
    assert log is not None
    log.retain(clock.wall_us(), 0, 6000)
    bench.frame(session, wire.credit_frame(2, 100, 0))
    bench.turn()
    assert offsets(session) == list(range(log.start, 9))


def test_a_held_key_that_was_damaged_or_expired_stops_nothing(
    bench: Bench, session: RecordingSession
) -> None:
    fill(bench, *[1] * 9, size=1500)
    bench.subscribe(session, start="earliest", credit_records=0)
    host = bench.hosted.subscription("s")
    damage(bench, b"4" + bytes(1500))
    assert host._key_of(4) == b""
    assert host._key_of(5) == b""  # no key and no producer name
    bench.shard.storage.sync_written()
    bench.syncer.step()
    log = bench.hosted.log
    assert log is not None
    log.retain(clock.wall_us(), 0, 6000)
    bench.hosted._chunk = None
    assert host._key_of(0) == b""


def test_a_disk_that_does_not_answer_a_read_is_asked_again_later(
    bench: Bench, session: RecordingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from danube.errors import StorageFailed

    now = 10**12
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now)
    fill(bench, 3)
    bench.subscribe(session, start="earliest")
    log = bench.hosted.log
    assert log is not None

    def fail(*args: Any) -> Any:
        raise StorageFailed("read failed")

    with monkeypatch.context() as patched:
        patched.setattr(log, "read", fail)
        bench.turn()
    assert session.take() == [] and bench.counters["storage_errors"] == 1
    bench.shard.tick()
    bench.turn()
    assert session.take() == [], "not before a second has passed"
    now += 10**9
    bench.shard.tick()
    bench.turn()
    assert offsets(session) == [0, 1, 2]


# -- non-reliable topics --------------------------------------------------------------------------


def test_a_non_reliable_topic_delivers_at_once_counts_what_nobody_heard_and_keeps_no_file(
    tmp_path: Path, session: RecordingSession
) -> None:
    bench = Bench(tmp_path, reliable=False, durability="memory")
    bench.subscribe(session)
    fill(bench, 2, 2)
    assert session.records() == expected(0, 4)
    bench.ack(session, 0, 4)
    bench.nack(session, 0, 1)
    assert session.take() == [], "neither means anything here"
    bench.ask(session, Kind.CLOSE_CONSUMER, handle=2)
    session.take()
    fill(bench, 3)
    assert bench.counters["dropped_records"] == 3 and list(tmp_path.iterdir()) == []
    bench.ask(session, Kind.SUBSCRIBE, wire.Subscribe(TOPIC, "s", "c", mode="exclusive"), 2)
    assert isinstance(session.only(Kind.ERROR).error, SubscriptionBusy)
    bench.admin(session, "delete_subscription", subscription="s")
    assert not bench.hosted.lossy
    bench.shard.close()


def test_a_slow_consumer_of_a_non_reliable_topic_gets_what_its_credit_allows(
    tmp_path: Path, session: RecordingSession
) -> None:
    bench = Bench(tmp_path, reliable=False, durability="memory")
    bench.subscribe(session, credit_records=3)
    fill(bench, 2, 2, 2)
    assert session.records() == expected(0, 3)
    bench.frame(session, wire.credit_frame(2, 100, CREDIT))
    bench.turn()
    assert session.records() == expected(3, 6)
    session.writable = False
    bench.shard.session_writable(session)
    fill(bench, 1)
    assert session.take() == []
    session.writable = True
    bench.shard.session_writable(session)
    bench.turn()
    assert offsets(session) == [6]
    bench.shard.close()


# -- operations -----------------------------------------------------------------------------------


def test_operations_answer_or_refuse(bench: Bench, session: RecordingSession) -> None:
    fill(bench, 5)
    bench.subscribe(session, start="earliest")
    bench.turn()
    session.take()
    other = RecordingSession(2)

    def result(op: str, **args: Any) -> Any:
        return fitting(op, wire.decode_result(bench.admin(other, op, **args).body))

    def refused(op: str, **args: Any) -> type[Exception]:
        return type(bench.admin(other, op, **args).error)

    assert result("describe_partition")["high_watermark"] == 5
    assert [entry["subscription"] for entry in result("list_subscriptions")] == ["s"]
    assert result("describe_subscription", subscription="s")["lag"] == 5
    assert refused("describe_subscription", subscription="none") is SubscriptionNotFound
    assert refused("describe_subscription") is InvalidArgument
    assert refused("drain_the_river") is InvalidArgument
    assert refused("delete_subscription", subscription="s") is WrongState
    assert refused("delete_subscription", subscription="none") is SubscriptionNotFound
    assert refused("seek", subscription="s", kind="offset", value=6) is OffsetOutOfRange
    assert refused("set_failure_policy", subscription="s", failure={"poison": 1}) is InvalidArgument
    assert refused("set_failure_policy", subscription="s", failure={"poison": "eat"}) is InvalidArgument
    assert result("seek", subscription="s", kind="offset", value=3) == {"offset": 3, "lag": 2}
    bench.turn()
    assert session.records() == expected(3, 5)
    assert result("unblock", subscription="s") == {"unblocked": 0}
    bench.ask(session, Kind.CLOSE_CONSUMER, handle=2)
    assert result("delete_subscription", subscription="s") is None
    assert not bench.hosted.subscriptions


def test_a_blocked_record_goes_on_after_unblock(tmp_path: Path, session: RecordingSession) -> None:
    bench = Bench(tmp_path, failure=QUICK)
    fill(bench, 2)
    bench.subscribe(session, start="earliest", mode="exclusive")
    bench.turn()
    session.take()
    bench.nack(session, 0, 1)
    bench.turn()
    assert session.take() == []
    assert fitting("unblock", wire.decode_result(bench.admin(session, "unblock", subscription="s").body)) == {
        "unblocked": 1
    }
    bench.turn()
    assert session.records() == expected(0, 1)
    bench.shard.close()


@pytest.mark.parametrize(
    "op, args",
    [
        ("seek", {"subscription": "s", "kind": "offset", "value": "x"}),
        ("seek", {"subscription": "s", "kind": "offset", "value": None}),
        ("seek", {"subscription": "s", "kind": "offset", "value": float("inf")}),
        ("seek", {"subscription": "s", "kind": "offset", "value": BIG[1]}),
        ("seek", {"subscription": "s", "kind": ["offset"]}),
        ("seek", {"subscription": ["s"]}),
        ("set_failure_policy", {"subscription": "s", "failure": "x"}),
        ("set_failure_policy", {"subscription": "s", "failure": {"ack_timeout_ms": 1.5}}),
        ("describe_subscription", {"subscription": 7}),
    ],
)
def test_arguments_of_any_shape_are_refused_not_raised(
    bench: Bench, session: RecordingSession, op: str, args: dict[str, Any]
) -> None:
    fill(bench, 2)
    bench.subscribe(session)
    assert isinstance(bench.admin(session, op, **args).error, CallerError)


@pytest.mark.parametrize("value", [*BIG, 1 << 62])
def test_huge_numbers_stop_nothing(bench: Bench, session: RecordingSession, value: int) -> None:
    fill(bench, 3)
    bench.subscribe(session, start="earliest", credit_records=value, credit_bytes=value)
    bench.turn()
    assert offsets(session) == [0, 1, 2]
    bench.ask(session, Kind.NACK, wire.Nack([(value, value), (0, value)], delay_ms=value), 2)
    bench.ask(session, Kind.NACK, wire.Nack([(-min(value, 1 << 63), 5), (5, -1)], delay_ms=-5), 2)
    bench.ack(session, value, value)
    bench.ack(session, 0, value)
    assert all(isinstance(frame.error, CallerError) for frame in session.take())
    other = RecordingSession(2)
    request = wire.Subscribe(TOPIC, "t", "c", start="time", start_value=value)
    bench.ask(other, Kind.SUBSCRIBE, request, 3)
    bench.syncer.step()
    assert other.only(Kind.SUBSCRIBED)
    seek = bench.admin(other, "seek", subscription="s", kind="time", value=value)
    assert fitting("seek", wire.decode_result(seek.body)) == {"offset": 3, "lag": 0}
    bench.turn()
    bench.hosted.subscription("s").core.check()


def test_every_failure_policy_that_is_accepted_can_be_stored(bench: Bench, session: RecordingSession) -> None:
    fill(bench, 2)
    huge = dict.fromkeys(("max_redelivery_count", "ack_timeout_ms", "max_redelivery_delay_ms"), (1 << 63) - 1)
    bench.subscribe(session, start="earliest")
    frame = bench.admin(session, "set_failure_policy", subscription="s", failure=huge)
    assert frame.kind == Kind.RESULT
    bench.turn()
    bench.nack(session, 0, 2)
    bench.turn()
    bench.shard.store_cursors()
    assert msgspec.msgpack.encode(bench.hosted.subscription("s").core.failure)
