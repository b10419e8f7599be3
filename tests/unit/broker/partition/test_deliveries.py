"""Who is looked at in a turn: near ones at every write, those behind one after the other, within a share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube.broker.partition import deliveries
from danube.broker.partition.consumers import SubscriptionHost
from danube.core.dispatch.cursor import CursorState
from danube.errors import StorageFailed
from danube.host import clock
from danube.wal.log.cursors import CursorStore
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession, expected, numbered

READERS = 40
LOOK_NS = 200_000


class Looks:
    """Every look, in order; each takes LOOK_NS of a clock that stands still otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 10**12
        self.names: list[str] = []
        self.failing = ""
        real = SubscriptionHost.dispatch

        def dispatch(host: SubscriptionHost, now_ns: int, bytes_max: int) -> bool:
            self.names.append(host.core.name)
            self.ns += LOOK_NS
            if host.core.name == self.failing:
                raise StorageFailed("the disk does not answer")
            return real(host, now_ns, bytes_max)

        monkeypatch.setattr(clock, "monotonic_ns", lambda: self.ns)
        monkeypatch.setattr(SubscriptionHost, "dispatch", dispatch)

    def take(self) -> list[str]:
        names, self.names = self.names, []
        return names


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.shard.close()


def fill(bench: Bench, count: int, start: int = 0, batches: int = 1) -> RecordingSession:
    session = RecordingSession(99)
    bench.open_producer(session)
    for number in range(batches):
        bench.publish(session, numbered(count, start=start + number * count))
    bench.turn()
    session.take()
    return session


def join(bench: Bench, count: int = READERS, **fields: Any) -> dict[str, RecordingSession]:
    """So many subscriptions of one reader each, from the start; nobody was looked at yet."""
    sessions = {f"s{number:03d}": RecordingSession(number) for number in range(count)}
    for number, (name, session) in enumerate(sessions.items()):
        bench.subscribe(session, handle=number + 10, name=name, **{"start": "earliest", **fields})
    return sessions


def settled(bench: Bench, looks: Looks) -> None:
    """Turns until nobody asks for another one, now or later."""
    wanted = -1
    while bench.turns_wanted != wanted or bench.later:
        wanted = bench.turns_wanted
        bench.turn()
        looks.ns += int(max(bench.run_later(), default=0) * 1e9)


def test_a_turn_serves_those_behind_within_its_share_and_each_once_before_any_twice(
    bench: Bench, looks: Looks
) -> None:
    fill(bench, 10)
    sessions = join(bench)
    looks.ns += deliveries.BUSY_NS
    served: list[str] = []
    while len(served) < READERS:
        wanted = bench.turns_wanted
        bench.turn()
        names = looks.take()
        assert 1 <= len(names) <= deliveries.SHARE_NS // LOOK_NS
        assert len(served) + len(names) == READERS or bench.turns_wanted > wanted
        served += names
    assert served == sorted(sessions), "in the order in which they came"
    assert all(session.records() == expected(0, 10) for session in sessions.values())


def test_while_somebody_publishes_the_share_is_small(bench: Bench, looks: Looks) -> None:
    fill(bench, 10)
    join(bench)
    bench.turn()
    assert len(looks.take()) == -(-deliveries.BUSY_SHARE_NS // LOOK_NS)
    bench.turn()
    assert looks.take() == [], "it rests"
    (rest_s,) = bench.run_later()
    assert rest_s * 1e9 >= max(deliveries.REST_MIN_NS, deliveries.REST_FACTOR * deliveries.BUSY_SHARE_NS)
    looks.ns += int(rest_s * 1e9)
    bench.turn()
    assert len(looks.take()) == -(-deliveries.BUSY_SHARE_NS // LOOK_NS)
    looks.ns += deliveries.BUSY_NS
    bench.turn()
    assert len(looks.take()) == deliveries.SHARE_NS // LOOK_NS


def test_the_share_grows_with_what_is_published(
    bench: Bench, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "BUSY_SHARE_BYTES", 100)
    producer = fill(bench, 10)
    join(bench, credit_records=1)
    bench.publish(producer, numbered(1_000, start=10))
    bench.turn()
    bench.turn()
    assert len(looks.take()) == deliveries.SHARE_NS // LOOK_NS, "of many bytes the whole share"


def test_who_follows_gets_a_record_in_the_turn_of_its_write_however_many_are_behind(
    bench: Bench, looks: Looks
) -> None:
    producer = fill(bench, 10)
    sessions = join(bench)
    hot = RecordingSession(7)
    bench.subscribe(hot, handle=7, name="hot", start="latest")
    for number in range(10, 30):
        looks.take()
        bench.publish(producer, numbered(1, start=number))
        bench.turn()
        assert hot.records() == expected(number, number + 1)
        assert looks.take()[0] == "hot"
    settled(bench, looks)
    assert all(session.records() == expected(0, 30) for session in sessions.values())


def test_a_turn_that_wrote_leaves_out_those_behind_and_never_twice_in_a_row(
    bench: Bench, looks: Looks
) -> None:
    producer = fill(bench, 10)
    waiting = set(join(bench))
    for number in range(4):
        bench.publish(producer, numbered(1, start=10 + number))
        bench.turn()
        served = waiting & set(looks.take())
        assert bool(served) == bool(number % 2)
        waiting -= served
        looks.ns += 10 * deliveries.REST_MIN_NS


def test_few_readers_wait_for_no_other_turn(bench: Bench, looks: Looks) -> None:
    producer = fill(bench, 10)
    sessions = join(bench, 2)
    bench.publish(producer, numbered(1, start=10))
    bench.turn()
    assert [session.records() for session in sessions.values()] == [expected(0, 11)] * 2


def test_an_ack_looks_at_its_own_subscription_alone(bench: Bench, looks: Looks) -> None:
    fill(bench, 10)
    sessions = join(bench, credit_records=5)
    settled(bench, looks)
    looks.take()
    bench.ack(sessions["s003"], 0, 5, handle=13)
    bench.turn()
    assert looks.take() == ["s003"]


def test_an_ack_with_nothing_left_to_deliver_asks_for_no_turn_and_is_stored(
    bench: Bench, looks: Looks
) -> None:
    fill(bench, 4)
    (session,) = join(bench, 1).values()
    settled(bench, looks)
    assert [offset for offset, _ in session.records()] == [0, 1, 2, 3]
    looks.take()
    wanted = bench.turns_wanted
    bench.ack(session, 0, 2, handle=10)
    assert bench.turns_wanted == wanted, "no turn can deliver anything"
    bench.shard.store_cursors()
    assert bench.hosted.cursors is not None and bench.hosted.log is not None and bench.hosted.directory
    bench.hosted.cursors.close()
    stored = CursorStore(bench.hosted.directory, bench.hosted.log.identity).load()["s000"]
    assert CursorState.decode(stored).ack_floor == 2
    bench.nack(session, 2, 3, handle=10)
    assert bench.turns_wanted > wanted, "what comes back is delivered"


def test_a_record_that_is_nacked_without_a_consumer_comes_again_after_its_delay(
    bench: Bench, looks: Looks
) -> None:
    fill(bench, 1)
    (session,) = join(bench, 1).values()
    settled(bench, looks)
    assert [offset for offset, _ in session.records()] == [0]
    assert bench.shard.settle(TOPIC, "s000", b"", [(0, 50, "not now")])
    bench.turn()
    assert session.records() == []
    looks.ns += 10 * 10**9
    bench.shard.tick()
    bench.turn()
    assert [offset for offset, _ in session.records()] == [0]
    assert not bench.shard.settle("/default/other", "s000", b"", [(0, 0, "")]), "another worker's"


def test_a_write_looks_at_nobody_who_is_behind(bench: Bench, looks: Looks) -> None:
    producer = fill(bench, 10)
    join(bench, credit_records=5)
    settled(bench, looks)
    looks.take()
    for number in range(3):
        bench.publish(producer, numbered(1, start=10 + number))
        bench.turn()
    assert looks.take() == []


def test_timers_look_at_those_whose_time_has_come(bench: Bench, looks: Looks) -> None:
    fill(bench, 10)
    early = join(bench, 1)
    settled(bench, looks)
    looks.ns += 10 * 10**9
    late = RecordingSession(50)
    bench.subscribe(late, handle=50, name="late", start="earliest")
    settled(bench, looks)
    assert early["s000"].records() == late.records() == expected(0, 10)
    looks.take()
    looks.ns += 21 * 10**9  # of the 30 s that an ack may take
    bench.shard.tick()
    bench.turn()
    assert looks.take() == ["s000"]
    looks.ns += 10 * 10**9
    bench.shard.tick()
    bench.turn()
    assert "late" in looks.take()


def test_readers_at_the_same_place_share_one_read_over_many_turns(
    bench: Bench, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bench, 10)
    log = bench.hosted.log
    assert log is not None
    reads: list[int] = []
    real = log.read

    def read(offset: int, *rest: int) -> Any:
        reads.append(offset)
        return real(offset, *rest)

    monkeypatch.setattr(log, "read", read)
    join(bench)
    settled(bench, looks)
    assert len(looks.take()) >= READERS
    assert reads == [0]
    assert bench.hosted._chunk is None, "nothing stays when nobody waits for it"


def test_a_subscription_that_goes_while_it_waits_is_not_looked_at(bench: Bench, looks: Looks) -> None:
    fill(bench, 10)
    sessions = join(bench)
    bench.shard.drop_session(sessions["s039"])
    bench.admin(RecordingSession(98), "delete_subscription", subscription="s039")
    settled(bench, looks)
    assert set(looks.take()) == set(sessions) - {"s039"}


def test_a_partition_that_goes_takes_its_readers_out_of_the_queue(bench: Bench, looks: Looks) -> None:
    fill(bench, 10)
    join(bench)
    bench.shard.delete_topic(bench.record)
    settled(bench, looks)
    assert looks.take() == []


def test_a_reader_whose_bytes_cannot_be_read_stops_no_other_and_is_tried_again(
    bench: Bench, looks: Looks
) -> None:
    fill(bench, 10)
    sessions = join(bench, 5)
    looks.failing = "s002"
    settled(bench, looks)
    got = {name: session.records() for name, session in sessions.items()}
    assert got == {name: [] if name == "s002" else expected(0, 10) for name in sessions}
    assert bench.counters["storage_errors"] == 1
    looks.failing = ""
    looks.ns += deliveries.READ_RETRY_NS
    bench.shard.tick()
    settled(bench, looks)
    assert sessions["s002"].records() == expected(0, 10)
