"""A hosted partition whose log begins behind a hole: what its clients and people see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube.core.placement.recovered import HISTORIES_SINCE_US, LOG_EPOCHS, OFFSETS_AHEAD
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import OffsetOutOfRange
from danube.wal.log.log import LogIdentity
from danube.wal.recovery.carry import create_empty
from danube.wal.segments.local_holes import OffsetJump
from danube.wal.tier.hole_changes import Tail, filling, giving_up, holing
from danube.wal.tier.keys import segment_key
from danube.wal.tier.manifest import Manifest
from tests.answers import fitting
from tests.unit.broker.tiers.test_tiers import drain, publish
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession, expected, numbered
from tests.unit.tier_parts import TieredBench, sealed_files

HOLE_END = 1 << 25


def inherited(root: Path) -> tuple[TieredBench, RecordingSession, Tail]:
    """20 records in the store, a hole up to HOLE_END whose 20 records another disk has, 5 records behind."""
    first = TieredBench(root / "first")
    session = RecordingSession()
    first.open_producer(session)
    publish(first, session, 0, 20)
    first.seal()
    first.mover.upload = False
    manifest = first.mover.manifests[first.tier.identity]
    publish(first, session, 20, 20)
    first.seal()
    _, data = sealed_files(first.hosted.directory)[-1]  # type: ignore[arg-type]
    first.mover.upload = True
    first.mover.look(first.tier.identity)
    entry = first.mover.manifests[first.tier.identity].entry(1)
    assert first.mover.store.get(segment_key(first.tier.identity, entry)) == data
    tail = Tail(1, 0, 1_000, 40, [tuple(entry)])
    first.shard.close()

    second = TieredBench(root / "second")
    second.mover.store = first.mover.store
    identity = LogIdentity(second.record.topic_id, 0)
    holed = holing(HOLE_END, 1, 256, 1)(manifest)
    assert holed is not None
    second.mover.manifests[identity] = holed
    directory = root / "second" / "partitions" / identity.directory_name
    directory.mkdir(parents=True)
    create_empty(directory, identity, 1, HOLE_END, 0)
    session = RecordingSession()
    second.open_producer(session)
    publish(second, session, 40, 5)
    session.take()
    return second, session, tail


def behind() -> list[tuple[int, bytes]]:
    return [(HOLE_END + number, b"%d" % (40 + number)) for number in range(5)]


def told(bench: TieredBench, manifest: Manifest | None) -> None:
    """The mover has installed another manifest."""
    assert manifest is not None
    bench.mover.manifests[bench.tier.identity] = manifest
    bench.mover.tell(bench.tier.identity)


def described(bench: TieredBench, session: RecordingSession) -> dict[str, Any]:
    bench.ask(session, Kind.ADMIN, wire.Admin("describe_subscription", TOPIC, {"subscription": "s"}))
    found: dict[str, Any] = wire.decode_result(session.only(Kind.RESULT).body)
    return found


def test_a_consumer_goes_on_behind_the_hole_and_gets_what_comes_back(tmp_path: Path) -> None:
    bench, session, tail = inherited(tmp_path)
    bench.subscribe(session, start="earliest")
    assert drain(bench, session) == [*expected(0, 20), *behind()], "nothing waits for an ack before the hole"
    numbers = described(bench, session)
    assert (numbers["state"], numbers["ack_floor"], numbers["withheld"]) == ("caught_up", 0, HOLE_END - 20)
    bench.ack(session, 0, 20)
    bench.ack(session, HOLE_END, HOLE_END + 5)
    numbers = described(bench, session)
    assert (numbers["ack_floor"], numbers["lag"], numbers["withheld"]) == (20, 0, HOLE_END - 20)
    told(bench, filling(tail, tail.entries, 1)(bench.mover.manifests[bench.tier.identity]))
    assert drain(bench, session) == [(number, b"%d" % number) for number in range(20, 40)]
    bench.ack(session, 20, 40)
    drain(bench, session)
    numbers = described(bench, session)
    assert (numbers["ack_floor"], numbers["lag"], numbers["withheld"]) == (HOLE_END + 5, 0, 0)


def test_what_comes_back_is_delivered_though_nothing_else_happens(tmp_path: Path) -> None:
    """No publish, no ack and no question makes anybody look at the subscription."""
    bench, session, tail = inherited(tmp_path)
    bench.subscribe(session, start="earliest")
    assert drain(bench, session) == [*expected(0, 20), *behind()]
    assert drain(bench, session) == []
    told(bench, filling(tail, tail.entries, 1)(bench.mover.manifests[bench.tier.identity]))
    assert drain(bench, session) == [(number, b"%d" % number) for number in range(20, 40)]


def test_the_hole_is_a_fact_of_the_topic_and_not_damage(tmp_path: Path) -> None:
    bench, session, _ = inherited(tmp_path)
    bench.subscribe(session, start="offset", start_value=30)
    assert drain(bench, session) == behind(), "who begins in a hole is behind it"
    statistics = bench.hosted.statistics()
    [hole] = statistics["holes"]
    assert (hole["start"], hole["end"], hole["kind"], hole["broker_id"]) == (20, HOLE_END, "open", 1)
    assert statistics["damaged"] == [] and bench.tier.statistics()["holes"] == 1
    assert 0 < bench.tier.pending().size_bytes < 4_096, "only what lies behind the hole is pending here"


def test_giving_up_is_answered_when_a_manifest_says_so(tmp_path: Path) -> None:
    bench, session, _ = inherited(tmp_path)
    bench.subscribe(session, start="earliest")
    drain(bench, session)
    bench.ack(session, 0, 20)
    drain(bench, session)
    bench.ask(session, Kind.ADMIN, wire.Admin("accept_loss", TOPIC, {"dry_run": True}))
    [hole] = fitting("accept_loss", wire.decode_result(session.only(Kind.RESULT).body))["holes"]
    assert bench.mover.kinds().count("give_up") == 0
    bench.ask(session, Kind.ADMIN, wire.Admin("accept_loss", TOPIC, {"end_offset": hole["end"]}))
    assert session.take() == [] and bench.mover.kinds().count("give_up") >= 1
    told(bench, giving_up(HOLE_END, 5)(bench.mover.manifests[bench.tier.identity]))
    bench.tiers.tick()
    [gone] = wire.decode_result(session.only(Kind.RESULT).body)["holes"]
    assert gone["kind"] == "given_up"
    numbers = described(bench, session)
    assert (numbers["ack_floor"], numbers["given_up"]) == (HOLE_END, HOLE_END - 20)


def test_giving_up_is_told_though_a_record_before_the_hole_is_not_acked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench, session, _ = inherited(tmp_path)
    bench.subscribe(session, start="earliest")
    drain(bench, session)
    told(bench, giving_up(HOLE_END, 5)(bench.mover.manifests[bench.tier.identity]))
    bench.tiers.tick()
    numbers = described(bench, session)
    assert (numbers["ack_floor"], numbers["given_up"], numbers["withheld"]) == (0, HOLE_END - 20, 0)
    assert "records are passed over" in caplog.text


RECORDS = 20
AHEAD = RECORDS + OFFSETS_AHEAD


@pytest.fixture
def put_back(tmp_path: Path) -> Iterator[tuple[Bench, RecordingSession]]:
    """20 records of a copy, and 5 of the history that began with it, far behind them."""
    older = Bench(tmp_path)
    session = RecordingSession()
    older.open_producer(session)
    older.publish(session, numbered(RECORDS))
    older.turn()
    older.shard.close()
    bench = Bench(tmp_path)
    bench.shard._epoch = 7 * LOG_EPOCHS
    bench.shard.ahead_of = lambda topic_id: OffsetJump(4 * LOG_EPOCHS, HISTORIES_SINCE_US, "a copy")
    session = RecordingSession(2)
    bench.open_producer(session)
    bench.publish(session, numbered(5, start=RECORDS))
    bench.turn()
    session.take()
    yield bench, session
    bench.shard.close()


@pytest.mark.parametrize("value", [RECORDS + 1, AHEAD // 2, AHEAD - 1])
@pytest.mark.parametrize("way", ["start", "seek"])
def test_a_place_that_only_a_lost_history_had_is_refused_with_both_ends(
    put_back: tuple[Bench, RecordingSession], way: str, value: int
) -> None:
    bench, session = put_back
    if way == "start":
        place = wire.Subscribe(TOPIC, "s", "c", start="offset", start_value=value)
        bench.ask(session, Kind.SUBSCRIBE, place, 2)
        error = session.only(Kind.ERROR).error
    else:
        bench.subscribe(session, start="earliest")
        error = bench.admin(session, "seek", subscription="s", kind="offset", value=value).error
    assert isinstance(error, OffsetOutOfRange) and "of a history that is gone" in str(error)
    assert (error.facts["start"], error.facts["end"]) == (RECORDS, AHEAD)
    assert ("s" in bench.hosted.subscriptions) is (way == "seek"), "an error changes nothing"


@pytest.mark.parametrize(("value", "first"), [(RECORDS - 1, RECORDS - 1), (RECORDS, AHEAD), (AHEAD, AHEAD)])
def test_the_ends_of_what_is_lost_are_places_of_this_history(
    put_back: tuple[Bench, RecordingSession], value: int, first: int
) -> None:
    bench, session = put_back
    bench.subscribe(session, start="offset", start_value=value)
    got = []
    for _ in range(5):
        bench.turn()
        got += [offset for offset, _ in session.records()]
    assert got[0] == first and got[-5:] == list(range(AHEAD, AHEAD + 5))
