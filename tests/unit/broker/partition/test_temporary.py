"""Jobs without rights of administration: temporary subscriptions, ends, progress, marks of stored rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube.core.batch.row_mark import RowMark
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import InvalidArgument, OwnerMoved, SubscriptionBusy, SubscriptionNotFound
from tests.answers import fitting
from tests.unit.broker_parts import CREDIT, TOPIC, Bench, RecordingSession, batch, expected, numbered


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    fill(made, 6)
    yield made
    made.shard.close()


@pytest.fixture
def session() -> RecordingSession:
    return RecordingSession()


def fill(bench: Bench, count: int) -> None:
    producer = RecordingSession(99)
    bench.open_producer(producer)
    bench.publish(producer, numbered(count))
    bench.turn()
    bench.ask(producer, Kind.CLOSE_PRODUCER, handle=1)


def subscribe(bench: Bench, session: RecordingSession, handle: int = 2, **fields: Any) -> wire.Subscribed:
    fields = {"mode": "exclusive", "start": "earliest", "temporary": True, "consumer": "c", **fields}
    view = bench.subscribe(session, handle, **fields)
    assert view.temporary == fields["temporary"]
    return view


def result(bench: Bench, op: str, **args: Any) -> Any:
    return fitting(op, wire.decode_result(bench.admin(RecordingSession(98), op, **args).body))


# -- temporary subscriptions ----------------------------------------------------------------------


def test_it_goes_with_its_consumer_and_is_never_stored(bench: Bench, session: RecordingSession) -> None:
    cursors = bench.hosted.cursors
    assert cursors is not None
    subscribe(bench, session)
    bench.turn()
    assert session.records() == expected(0, 6)
    bench.ack(session, 0, 6)
    bench.shard.store_cursors()
    bench.ask(session, Kind.CLOSE_CONSUMER, handle=2)
    assert not bench.hosted.subscriptions
    again = Bench(bench.shard._root)
    bench.shard.close()
    assert (
        again.admin(RecordingSession(98), "list_subscriptions").kind == Kind.RESULT
        and not again.hosted.subscriptions
    )
    again.shard.close()


def test_it_goes_with_the_connection(bench: Bench, session: RecordingSession) -> None:
    subscribe(bench, session)
    bench.shard.drop_session(session)
    assert not bench.hosted.subscriptions
    bench.turn()


def test_it_goes_with_the_last_consumer(bench: Bench, session: RecordingSession) -> None:
    other = RecordingSession(2)
    subscribe(bench, session, mode="shared")
    subscribe(bench, other, mode="shared", consumer="d")
    bench.shard.drop_session(session)
    assert list(bench.hosted.subscriptions) == ["s"]
    bench.shard.drop_session(other)
    assert not bench.hosted.subscriptions


def test_its_consumer_that_comes_back_takes_it_over_or_makes_it_anew(
    bench: Bench, session: RecordingSession
) -> None:
    epoch = subscribe(bench, session).epoch
    bench.turn()
    session.take()
    bench.ack(session, 0, 4)
    other = RecordingSession(2)
    assert subscribe(bench, other, epoch=epoch).ack_floor == 4, (
        "the broker has not noticed the end of the first"
    )
    bench.shard.drop_session(session)
    assert list(bench.hosted.subscriptions) == ["s"]
    bench.turn()
    assert other.records() == expected(4, 6)
    bench.shard.drop_session(other)
    third = RecordingSession(3)
    assert subscribe(bench, third, start="offset", start_value=2, epoch=epoch).ack_floor == 2
    bench.turn()
    assert third.records() == expected(2, 6)


@pytest.mark.parametrize("first", [True, False])
def test_it_is_no_other_s_subscription(bench: Bench, session: RecordingSession, first: bool) -> None:
    subscribe(bench, session, temporary=first)
    request = wire.Subscribe(TOPIC, "s", "c", mode="exclusive", temporary=not first)
    other = RecordingSession(2)
    bench.ask(other, Kind.SUBSCRIBE, request, 2)
    assert isinstance(other.only(Kind.ERROR).error, SubscriptionBusy)
    assert list(session.consumers) == [2], "nobody is displaced"


def test_of_a_topic_without_a_log_too(tmp_path: Path, session: RecordingSession) -> None:
    bench = Bench(tmp_path, reliable=False, durability="memory")
    subscribe(bench, session)
    assert list(bench.hosted.lossy) == ["s"]
    bench.ask(session, Kind.CLOSE_CONSUMER, handle=2)
    session.only(Kind.RESULT)
    assert not bench.hosted.lossy
    subscribe(bench, session, temporary=False)
    bench.ask(session, Kind.CLOSE_CONSUMER, handle=2)
    assert list(bench.hosted.lossy) == ["s"]
    bench.shard.close()


def test_it_goes_when_the_partition_does(bench: Bench, session: RecordingSession) -> None:
    subscribe(bench, session)
    subscribe(bench, session, 3, name="kept", temporary=False)
    hosted = bench.hosted
    hosted.close_handles(OwnerMoved("elsewhere"))
    assert list(hosted.subscriptions) == ["kept"]
    assert [frame.handle for frame in session.take(Kind.ERROR)] == [2, 3]


# -- operations -----------------------------------------------------------------------------------


def test_ends_tell_nobody_s_name(bench: Bench, session: RecordingSession) -> None:
    subscribe(bench, session)
    ends = result(bench, "partition_ends")
    assert ends == {
        "partition": TOPIC, "start": 0, "log_end": 6, "high_watermark": 6, "holes": [], "histories": [],
    }  # fmt: skip
    described = result(bench, "describe_partition")
    assert described.items() >= ends.items() and described["subscriptions"] == ["s"]


def test_progress_tells_nobody_s_name(bench: Bench, session: RecordingSession) -> None:
    subscribe(bench, session)
    bench.turn()
    bench.ack(session, 0, 4)
    told = result(bench, "subscription_progress", subscription="s")
    assert told == {
        "subscription": "s", "ack_floor": 4, "left_from": 6, "lag": 2, "damaged": 0, "expired": 0,
    }  # fmt: skip
    error = bench.admin(RecordingSession(98), "subscription_progress", subscription="none").error
    assert isinstance(error, SubscriptionNotFound)


def test_the_mark_of_stored_rows(bench: Bench) -> None:
    producer = RecordingSession(99)
    bench.open_producer(producer)
    marked = RowMark("ab", True)
    bench.publish(producer, batch(b"x", b"y", origin=marked.text))
    bench.publish(producer, batch(b"z", origin="127.0.0.1"))
    assert result(bench, "row_mark", offset=6) == {"mark": "", "waiting": True}
    bench.turn()
    assert result(bench, "row_mark", offset=6) == {"mark": marked.text, "waiting": False}
    for offset in (0, 7, 8, 9, 1 << 40):  # unmarked, no batch's first, an address, the end, beyond it
        assert result(bench, "row_mark", offset=offset) == {"mark": "", "waiting": False}
    assert isinstance(bench.admin(RecordingSession(98), "row_mark", offset=-1).error, InvalidArgument)


def test_a_topic_without_a_log_has_no_marks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, reliable=False, durability="memory")
    producer = RecordingSession(99)
    bench.open_producer(producer)
    bench.publish(producer, batch(b"x", origin=RowMark("ab", False).text))
    bench.turn()
    assert result(bench, "row_mark", offset=0) == {"mark": "", "waiting": False}
    bench.shard.close()


def test_credit_of_a_temporary_consumer_counts(bench: Bench, session: RecordingSession) -> None:
    subscribe(bench, session, credit_records=2, credit_bytes=CREDIT)
    bench.turn()
    assert session.records() == expected(0, 2)
    bench.frame(session, wire.credit_frame(2, 4, 0))
    bench.turn()
    assert session.records() == expected(2, 6)
