"""Load tests: a producer that keeps its schedule, and a consumer that accounts for what it is handed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from danube.errors import ConnectionFailed, OperationTimeout, StorageFull
from danube.host.clock import monotonic_ns
from danube.load import consuming, producing, stamp
from danube.load.audit import Auditor
from danube.load.collector import Collector, Reader
from danube.load.consuming import Consuming
from danube.load.links.links import Delivery
from danube.load.plan import Plan
from danube.load.producing import Producing

RUN = "00000000000000aa"


class Requests:
    """What would be Locust's statistics."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float, int, Exception | None]] = []

    def __call__(
        self, kind: str, name: str, milliseconds: float, size: int, error: Exception | None = None
    ) -> None:
        self.rows.append((kind, name, milliseconds, size, error))

    def of(self, kind: str) -> list[tuple[str, str, float, int, Exception | None]]:
        return [row for row in self.rows if row[0] == kind]


class FakeSender:
    """Takes records; answers when it is let."""

    def __init__(self, pipelined: bool = True) -> None:
        self.pipelined = pipelined
        self.answering = threading.Event()
        self.answering.set()
        self.begun: list[stamp.Stamp] = []
        self.begun_ns: list[int] = []
        self.keys: list[str] = []
        self.waiting = 0
        self.waiting_max = 0
        self.level = "written"
        self.when_open: Callable[[], None] = lambda: None
        self.when_begin: Callable[[], None] = lambda: None
        self.failure: Exception | None = None
        self.closed = False

    def open(self) -> None:
        self.when_open()

    def begin(self, payload: bytes, key: str) -> Callable[[], str]:
        self.when_begin()
        found = stamp.read(payload)
        assert isinstance(found, stamp.Stamp)
        self.begun.append(found)
        self.begun_ns.append(monotonic_ns())
        self.keys.append(key)
        self.waiting += 1
        self.waiting_max = max(self.waiting_max, self.waiting)
        return self.answer

    def answer(self) -> str:
        assert self.answering.wait(20)
        self.waiting -= 1
        if self.failure is not None:
            raise self.failure
        return self.level

    def close(self) -> None:
        self.closed = True
        self.answering.set()


class Bench:
    """One producer with everything around it."""

    def __init__(self, *links: FakeSender, **options: str) -> None:
        self.links = list(links)
        self.names: list[str] = []
        self.requests = Requests()
        self.collector = Collector(RUN)
        self.halted = threading.Event()
        self.plan = Plan.parse({"sizes": "100", "rate": "200", **options})
        self.work = Producing(
            self.plan,
            self.collector,
            self._link,
            self.requests,
            protocol="native",
            durability="written",
            halted=self.halted,
        )

    def _link(self, name: str) -> FakeSender:
        self.names.append(name)
        return self.links[min(len(self.names), len(self.links)) - 1]

    def report(self) -> dict[str, Any]:
        return self.collector.take()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "PAUSE_S", 0.01)
    monkeypatch.setattr(consuming, "PAUSE_S", 0.01)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*links: FakeSender, **options: str) -> Bench:
        made.append(Bench(*links, **options))
        return made[-1]

    yield make
    for one in made:
        one.work.close()


def turn_until(work: Any, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        work.turn()


# -- producers ------------------------------------------------------------------------------------


def test_records_are_sent_when_they_are_due(bench: Callable[..., Bench]) -> None:
    link = FakeSender()
    one = bench(link)
    turn_until(one.work, lambda: len(link.begun) >= 60)
    assert [found.number for found in link.begun] == list(range(len(link.begun)))
    assert {found.producer for found in link.begun} == {one.work.producer}
    assert len(set(link.keys[:8])) == 8 and link.keys[0] == link.keys[8]
    spacing = {
        after.due_ns - before.due_ns for before, after in zip(link.begun, link.begun[1:], strict=False)
    }
    assert max(spacing) - min(spacing) <= 1 and min(spacing) // 1_000_000 in (4, 5)
    assert all(moment >= found.due_ns for moment, found in zip(link.begun_ns, link.begun, strict=True))


def test_a_broker_that_does_not_answer_does_not_slow_the_arrivals(bench: Callable[..., Bench]) -> None:
    link = FakeSender()
    link.answering.clear()
    one = bench(link)
    turn_until(one.work, lambda: len(link.begun) >= 40)
    assert link.waiting_max == len(link.begun)
    assert one.report()["unanswered"] == len(link.begun)
    began_ns = monotonic_ns()
    link.answering.set()
    one.halted.set()
    turn_until(one.work, lambda: one.collector.unanswered == 0)
    latencies = sorted(row[2] for row in one.requests.of("publish"))
    oldest_ms = (began_ns - link.begun[0].due_ns) / 1e6
    assert latencies[-1] >= oldest_ms >= 39 * 5  # the first waited for as long as all others took to be due


def test_a_late_send_counts_from_when_it_was_due(bench: Callable[..., Bench]) -> None:
    """A client that is held up may not hide the wait of the records that were due meanwhile."""
    link = FakeSender()
    held: list[None] = []

    def hold_once() -> None:
        if not held:
            held.append(None)
            time.sleep(0.2)

    one = bench(link)
    link.when_begin = hold_once
    turn_until(one.work, lambda: len(one.requests.of("publish")) >= 60)
    latencies = [row[2] for row in one.requests.of("publish")]
    assert sum(1 for one_ms in latencies if one_ms > 100) >= 20  # 40 were due while the first was held up
    assert one.report()["behind_max_ns"] > 150_000_000


def test_in_flight_is_bounded(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "IN_FLIGHT_MAX", 4)
    link = FakeSender()
    link.answering.clear()
    one = bench(link)
    thread = threading.Thread(target=lambda: turn_until(one.work, lambda: one.work.sent >= 12))
    thread.start()
    time.sleep(0.3)
    assert len(link.begun) == 4
    link.answering.set()
    thread.join(30)
    assert link.waiting_max <= 4 and [found.number for found in link.begun[:12]] == list(range(12))


def test_without_a_rate_the_next_record_follows_the_answer(bench: Callable[..., Bench]) -> None:
    link = FakeSender()
    one = bench(link, rate="0")
    turn_until(one.work, lambda: len(link.begun) > 100)
    assert link.waiting_max == 1
    assert one.report()["behind_max_ns"] == 0


def test_a_protocol_without_order_has_one_call_under_way(bench: Callable[..., Bench]) -> None:
    link = FakeSender(pipelined=False)
    one = bench(link)
    turn_until(one.work, lambda: len(link.begun) > 20)
    assert link.waiting_max == 1


def test_a_failed_send_is_a_failed_request_and_its_record_is_not_known(bench: Callable[..., Bench]) -> None:
    link = FakeSender()
    link.failure = StorageFull("the disk is full")
    one = bench(link)
    turn_until(one.work, lambda: len(one.requests.of("publish")) >= 5)
    assert all(
        row[4] is link.failure and row[1] == "native written 100B" for row in one.requests.of("publish")
    )
    report = one.report()
    assert not report["acked"] and report["unknown"]
    assert len(one.names) == 1  # the producer goes on


def test_an_acknowledgement_of_a_lesser_level_is_a_failure(bench: Callable[..., Bench]) -> None:
    link = FakeSender()
    link.level = "memory"
    one = bench(link)
    turn_until(one.work, lambda: bool(one.requests.of("publish")))
    assert "level memory, not written" in str(one.requests.of("publish")[0][4])
    assert not one.report()["acked"]


def test_a_producer_that_is_finished_is_replaced_by_another(bench: Callable[..., Bench]) -> None:
    first, second = FakeSender(), FakeSender()

    def break_down() -> None:
        if len(first.begun) == 3:
            raise ConnectionFailed("gone for good")

    first.when_begin = break_down
    one = bench(first, second)
    turn_until(one.work, lambda: len(second.begun) >= 3)
    assert first.closed and len(set(one.names)) == 2
    assert second.begun[0].number == 0 and second.begun[0].producer != first.begun[0].producer
    turn_until(one.work, lambda: one.collector.unanswered == 0)
    report = one.report()
    assert report["acked"][f"{first.begun[0].producer:016x}"] == [[0, 3]]
    assert report["unknown"][f"{first.begun[0].producer:016x}"] == [[3, 4]]
    assert [str(row[4]) for row in one.requests.of("publish") if row[4]] == ["gone for good"]


def test_a_record_whose_send_was_broken_off_is_settled(bench: Callable[..., Bench]) -> None:
    """As when Locust ends the user inside of it."""
    link = FakeSender()

    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    one = bench(link)
    turn_until(one.work, lambda: len(link.begun) >= 1)
    link.when_begin = die
    with pytest.raises(Killed):
        turn_until(one.work, lambda: False)
    one.work.close()
    report = one.report()
    assert (report["unanswered"], report["senders"]) == (0, 0)
    assert sum(end - start for start, end in next(iter(report["unknown"].values()))) == 1


def test_a_failure_to_connect_is_a_failed_request_and_is_tried_again(bench: Callable[..., Bench]) -> None:
    broken, working = FakeSender(), FakeSender()

    def refuse() -> None:
        raise ConnectionFailed("nothing listens there")

    broken.when_open = refuse
    one = bench(broken, broken, working)
    turn_until(one.work, lambda: len(working.begun) >= 1)
    connects = one.requests.of("connect")
    assert [row[1] for row in connects] == ["native producer"] * 3
    assert [row[4] is None for row in connects] == [False, False, True]


def test_a_halted_producer_sends_nothing_more(bench: Callable[..., Bench]) -> None:
    link = FakeSender()
    one = bench(link)
    turn_until(one.work, lambda: len(link.begun) >= 3)
    assert one.report()["senders"] == 1
    one.halted.set()
    count = len(link.begun)
    for _ in range(3):
        one.work.turn()
    assert len(link.begun) == count
    assert one.report()["senders"] == 0


def test_a_producer_that_begins_after_the_halt_does_not(bench: Callable[..., Bench]) -> None:
    link = FakeSender()
    one = bench(link)
    one.halted.set()
    one.work.turn()
    assert not one.names and one.report()["senders"] == 0


# -- consumers ------------------------------------------------------------------------------------


class FakeReceiver:
    """Hands out what it is given."""

    def __init__(self, *payloads: bytes) -> None:
        self.reader = Reader("s", "exclusive")
        self.payloads = list(payloads)
        self.acked: list[bytes] = []
        self.failure: Exception | None = None
        self.when_open: Callable[[], None] = lambda: None
        self.closed = False

    def open(self) -> None:
        self.when_open()

    def receive(self, timeout_s: float) -> Delivery | None:
        if self.failure is not None:
            raise self.failure
        if not self.payloads:
            time.sleep(min(timeout_s, 0.01))
            return None
        payload = self.payloads.pop(0)
        return Delivery(payload, 0, False, self.reader, lambda: self.acked.append(payload))

    def close(self) -> None:
        self.closed = True


def payload_of(number: int, run: str = RUN, due_ns: int | None = None) -> bytes:
    return stamp.write(int(run, 16), 7, number, 0, 100, monotonic_ns() if due_ns is None else due_ns)


def consumer_of(*links: FakeReceiver) -> tuple[Consuming, Collector, Requests]:
    collector, requests = Collector(RUN), Requests()
    waiting = list(links)
    work = Consuming(
        collector,
        lambda: waiting.pop(0),
        requests,
        protocol="native",
        mode="exclusive",
        durability="written",
        subscription="s",
    )
    return work, collector, requests


def test_a_consumer_times_and_acknowledges_what_arrives() -> None:
    late_ns = monotonic_ns() - 500_000_000
    link = FakeReceiver(payload_of(0, due_ns=late_ns), payload_of(1), payload_of(1))
    work, collector, requests = consumer_of(link)
    work.turn()
    assert len(link.acked) == 3
    rows = requests.of("e2e")
    assert [row[1] for row in rows] == ["native exclusive written 100B"] * 2  # the second 1 is no latency
    assert rows[0][2] >= 500 > rows[1][2] >= 0
    report = collector.take()
    assert report["arrived"] == [["s", f"{7:016x}", [[0, 2]], 1, []]]
    assert report["readers"] == {"s": 1}


def test_a_consumer_tells_damaged_and_foreign_records_apart() -> None:
    damaged = payload_of(0)[:-1] + b"\0"
    link = FakeReceiver(damaged, payload_of(0, run="00000000000000bb"), b"somebody else's", payload_of(0))
    work, collector, _ = consumer_of(link)
    work.turn()
    assert len(link.acked) == 4
    assert collector.take()["strays"] == {"s": {"damaged": 1, "foreign": 2}}


def test_a_consumer_that_breaks_is_made_anew() -> None:
    first, second = FakeReceiver(), FakeReceiver(payload_of(0))
    first.failure = OperationTimeout("the broker did not answer")
    work, collector, requests = consumer_of(first, second)
    turn_until(work, lambda: bool(second.acked))
    assert (first.closed, second.closed) == (True, False)
    assert [row[4] for row in requests.of("consume")] == [first.failure]
    work.close()
    assert second.closed and collector.take()["readers"] == {"s": 0}


def test_a_consumer_that_cannot_subscribe_tries_again() -> None:
    broken, working = FakeReceiver(), FakeReceiver(payload_of(0))

    def refuse() -> None:
        raise ConnectionFailed("nothing listens there")

    broken.when_open = refuse
    work, collector, requests = consumer_of(broken, working)
    turn_until(work, lambda: bool(working.acked))
    assert [row[4] is None for row in requests.of("connect")] == [False, True]
    assert collector.take()["readers"] == {"s": 1}


def test_a_reordered_delivery_reaches_the_verdict() -> None:
    """From the bytes that a consumer is handed to the finding."""
    link = FakeReceiver(*map(payload_of, (0, 2, 1, 3)))
    work, collector, _ = consumer_of(link)
    work.turn()
    for number in range(5):
        collector.begin(0)
        collector.acknowledged(7, number)
    collector.halted = True
    auditor = Auditor(RUN, {"s": ("native", "exclusive")}, reliable=True, own_topic=True)
    auditor.add("p", collector.take())
    assert [(one.kind, one.count) for one in auditor.findings()] == [("lost", 1), ("reordered", 1)]
